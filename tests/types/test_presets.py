"""Presets: bytes of a token as published, and the shapes that engines exchange."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvstore.errors import InvalidRequest
from kvstore.limits import MiB
from kvstore.types import presets
from kvstore.types.layout import KVLayout, Retention, ShardAxis

PUBLISHED = {
    "llama-3-8b": Fraction(131_072),
    "llama-3-70b": Fraction(327_680),
    "llama-3.1-405b": Fraction(516_096),
    "qwen2.5-32b": Fraction(262_144),
    "qwen3-235b": Fraction(192_512),
    "qwen3-235b-fp8": Fraction(96_256),
    "deepseek-v3": Fraction(70_272),
    "deepseek-v3-fp8": Fraction(40_016),
    "deepseek-v3.2": Fraction(48_068),
    "deepseek-v4-flash": Fraction(21 * 652, 4) + Fraction(20 * 584, 128),
    "deepseek-v4-pro": Fraction(30 * 652, 4) + Fraction(31 * 584, 128),
    "deepseek-v4.1-flash": Fraction(890),
}


@pytest.mark.parametrize("name", presets.PRESETS)
def test_bytes_per_token_are_the_published_ones(name: str) -> None:
    layout = presets.preset(name)
    assert layout.is_exact
    assert layout.bytes_per_token == PUBLISHED[name]
    assert KVLayout.decode(layout.encode()) == layout


def test_presets_and_figures_are_the_same_set() -> None:
    assert set(PUBLISHED) == set(presets.PRESETS)
    assert [round(PUBLISHED[f"deepseek-v4-{size}"]) for size in ("flash", "pro")] == [3_514, 5_031]


def test_v4_against_v32_is_as_the_report_says() -> None:
    v32 = presets.deepseek_v32().bytes_per_token
    assert round(100 * presets.deepseek_v4_flash().bytes_per_token / v32) == 7
    assert 10 <= 100 * presets.deepseek_v4_pro().bytes_per_token / v32 < 11


def test_v4_layers_are_as_the_report_says() -> None:
    flash, pro = presets.deepseek_v4_flash(), presets.deepseek_v4_pro()
    for layout, csa, hca in ((flash, 21, 20), (pro, 30, 31)):
        held = {part.name: part.layers or () for part in layout.dense_parts}
        assert (len(held["csa"]), len(held["hca"])) == (csa, hca)
        assert held["csa"] == held["indexer"]
        assert not set(held["csa"]) & set(held["hca"])
    assert set(range(43)) - set(flash.part("csa").layers or ()) - set(flash.part("hca").layers or ()) == {0, 1}
    assert flash.record_bytes(part="swa") == 43 * 128 * 584
    assert pro.record_bytes(part="swa") == 61 * 128 * 584


def test_v4_chunks_cover_whole_compressed_entries() -> None:
    with pytest.raises(InvalidRequest, match="not a multiple of 128, the common compression period"):
        presets.deepseek_v4_flash(chunk_tokens=64)
    assert presets.deepseek_v4_pro(chunk_tokens=128).bytes_per_token == PUBLISHED["deepseek-v4-pro"]


def test_v41_keeps_its_windows_in_memory() -> None:
    layout = presets.deepseek_v41_flash()
    assert layout.chunk_bytes == 56_960
    assert layout.part("swa").retention is Retention.VOLATILE
    assert layout.chunks_per_run == 1178


def test_chunks_of_64_tokens_have_the_known_sizes() -> None:
    assert presets.llama_3_70b().chunk_bytes == 20 * MiB
    assert presets.llama_31_405b().chunk_bytes == 31.5 * MiB
    assert presets.deepseek_v32().layer_range(3, "indexer").length_bytes == 132 * 64


def test_shards_divide_kv_heads() -> None:
    layout = presets.llama_3_70b(shards=8)
    assert {layout.record_bytes(shard) for shard in range(8)} == {20 * MiB // 8}
    assert presets.gqa(layers=4, kv_heads=3, head_dim=64, shards=2, shard_axis=ShardAxis.LAYERS).shards == 2
    with pytest.raises(InvalidRequest, match="shards is 3, which does not divide 8 KV heads"):
        presets.llama_3_8b(shards=3)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="layout preset 'gpt-2' is unknown; use one of: llama-3-8b"):
        presets.preset("gpt-2")
    with pytest.raises(InvalidRequest, match="dtype 'int3' is unknown; use one of: fp32"):
        presets.gqa(layers=1, kv_heads=1, head_dim=1, dtype="int3")

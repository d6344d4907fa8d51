"""Layouts: geometry against a plain model, encoding, and clear refusal of what does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given

from kvstore.errors import FormatUnsupported, InvalidRequest
from kvstore.limits import CHECKSUM_BYTES_MAX, CHECKSUM_BYTES_MIN, KiB, MiB
from kvstore.testing.strategies_types import layouts, opaque_layouts
from kvstore.types import presets
from kvstore.types.canonical import decode, encode
from kvstore.types.layout import KVLayout, Part, PartKind, Retention, ShardAxis

MAGIC = b"kvstore.layout.v1"


def small(**changes: Any) -> KVLayout:
    values: dict[str, Any] = {
        "chunk_tokens": 16,
        "dtype": "bf16",
        "layers": 4,
        "parts": (Part(name="kv", entry_bytes=8),),
    }
    return KVLayout(**{**values, **changes})


@given(layouts())
def test_layer_ranges_tile_each_record_without_holes(layout: KVLayout) -> None:
    for shard in range(layout.shards):
        at = 0
        for part in layout.dense_parts:
            for layer in range(layout.layers):
                found = layout.layer_range(layer, part.name, shard=shard)
                assert found.offset_bytes == at
                held = part.layers is None or layer in part.layers
                entries = part.entries or layout.chunk_tokens // part.entry_tokens
                assert found.length_bytes == (entries * part.entry_bytes // layout.shards if held else 0)
                at += found.length_bytes
            whole = layout.layer_range(0, part.name, layer_count=layout.layers, shard=shard)
            assert whole.length_bytes == layout.part_record_bytes(part.name, shard)
            assert whole.offset_bytes + whole.length_bytes == at
        assert at == layout.record_bytes(shard)
        for part in layout.sparse_parts:
            whole = layout.layer_range(0, part.name, layer_count=layout.layers, shard=shard)
            assert (whole.offset_bytes, whole.length_bytes) == (0, layout.record_bytes(shard, part=part.name))
    assert layout.chunk_bytes == sum(layout.record_bytes(shard) for shard in range(layout.shards))


@given(layouts() | opaque_layouts())
def test_a_layout_comes_back_from_its_encoding(layout: KVLayout) -> None:
    again = KVLayout.decode(layout.encode())
    assert again == layout
    assert again.digest == layout.digest
    assert again.differences(layout) == []


@given(layouts(), layouts())
def test_digests_are_equal_just_when_layouts_are(one: KVLayout, other: KVLayout) -> None:
    assert (one.digest == other.digest) == (one == other) == (one.differences(other) == [])


@given(layouts())
def test_checksum_blocks_keep_their_bounds(layout: KVLayout) -> None:
    for size in (layout.checksum_bytes(), *(layout.checksum_bytes(part.name) for part in layout.sparse_parts)):
        assert CHECKSUM_BYTES_MIN <= size <= CHECKSUM_BYTES_MAX


@pytest.mark.parametrize(
    ("entry_bytes", "expected"),
    [
        (64, 4 * KiB),  # a layer of 1 KiB, four times
        (80, 4 * 1280),  # the least multiple of a layer of 1280 B from 4 KiB on
        (256 * KiB // 16, 256 * KiB),
        (3 * MiB // 16, MiB),
        ((2 * MiB + 4 * KiB) // 16, (2 * MiB + 4 * KiB) // 3),
        (65537 * 1, -(-65537 * 16 // 2)),
    ],
)
def test_the_default_checksum_block_is_a_layer(entry_bytes: int, expected: int) -> None:
    assert small(parts=(Part(name="kv", entry_bytes=entry_bytes),)).checksum_bytes() == expected


def test_a_part_can_name_its_checksum_block() -> None:
    kv, swa = Part(name="kv", entry_bytes=8, checksum_bytes=8192), Part(name="swa", entry_bytes=8, kind=PartKind.SPARSE)
    layout = small(parts=(kv, swa))
    assert (layout.checksum_bytes(), layout.checksum_bytes("swa")) == (8192, 4096)
    with pytest.raises(InvalidRequest, match="'kv' is dense"):
        layout.checksum_bytes("kv")


def test_opaque_takes_up_to_its_bytes() -> None:
    layout = KVLayout.opaque(chunk_bytes=1_000_000, chunk_tokens=32)
    assert not layout.is_exact
    assert (layout.chunk_bytes, layout.max_record_bytes, layout.record_bytes()) == (1_000_000,) * 3
    assert layout.checksum_bytes() == 64 * KiB
    assert layout.chunks_per_run == 256
    assert KVLayout.opaque(chunk_bytes=4096, shards=4).record_bytes(3) == 1024
    assert KVLayout.opaque(chunk_bytes=1).chunks_per_run == 64 * MiB
    assert KVLayout.opaque(chunk_bytes=1, run_bytes=7).chunks_per_run == 7


def test_a_run_has_at_least_one_chunk() -> None:
    assert small(run_bytes=1).chunks_per_run == 1
    assert small(run_bytes=1 * MiB).chunks_per_run == 1 * MiB // (16 * 8 * 4)


def test_shards_by_layer_may_differ_by_a_layer() -> None:
    layout = small(layers=5, shards=2, shard_axis=ShardAxis.LAYERS)
    layer = 16 * 8
    assert [layout.record_bytes(shard) for shard in (0, 1)] == [2 * layer, 3 * layer]
    assert layout.layer_range(2, "kv", shard=0).length_bytes == 0
    assert layout.layer_range(2, "kv", shard=1) == layout.layer_range(2, "kv", layer_count=1, shard=1)
    found = layout.layer_range(3, "kv", layer_count=2, shard=1)
    assert (found.offset_bytes, found.length_bytes) == (layer, 2 * layer)


def test_sparse_records_count_for_the_largest() -> None:
    window = Part(name="swa", entry_bytes=584, entries=128, kind=PartKind.SPARSE)
    layout = small(parts=(Part(name="kv", entry_bytes=8), window))
    assert layout.max_record_bytes == layout.record_bytes(part="swa") == 584 * 128 * 4
    assert layout.chunk_bytes == 16 * 8 * 4
    assert [part.name for part in layout.sparse_parts] == ["swa"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens is 0; use an integer of 1 to 65536"),
        ({"chunk_tokens": True}, "chunk_tokens is True"),
        ({"layers": 5000}, "layers is 5000; use an integer of 1 to 4096"),
        ({"shards": 0}, "shards is 0"),
        ({"shards": 3}, "entry_bytes of part 'kv' is 8, which 3 shards do not divide"),
        ({"shards": 8, "shard_axis": ShardAxis.LAYERS}, "shard 0 of 8 would hold no bytes of any dense part"),
        ({"shard_axis": "experts"}, "shard_axis is 'experts'; use one of: heads, layers"),
        ({"run_bytes": -1}, "run_bytes is -1"),
        ({"dtype": ""}, "dtype '' has 0 bytes; use 1 to 64"),
        ({"order": "token,layer"}, "order is 'token,layer'; name each axis once"),
        ({"parts": ()}, "parts are \\[\\]"),
        ({"parts": (Part(name="a", entry_bytes=1),) * 2}, "each name once"),
        ({"parts": (Part(name="a", entry_bytes=1, kind=PartKind.SPARSE),)}, "all sparse"),
        ({"parts": (Part(name="a", entry_bytes=1, layers=(1, 4)),)}, "'a' names layer 4, but layers is 4"),
        ({"parts": (Part(name="a", entry_bytes=2 * MiB),)}, "a record would have 134217728 bytes, above the limit"),
        (
            {"chunk_tokens": 64, "parts": (Part(name="hca", entry_bytes=1, entry_tokens=128),)},
            "chunk_tokens is 64, not a multiple of 128, the common compression period of the parts .*; use 128",
        ),
        (
            {
                "shards": 2,
                "shard_axis": ShardAxis.LAYERS,
                "parts": (
                    Part(name="kv", entry_bytes=1),
                    Part(name="s", entry_bytes=1, layers=(0,), kind=PartKind.SPARSE),
                ),
            },
            "shard 1 of 2 would hold no bytes of the sparse part 's'",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        small(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "part name '' has 0 bytes"),
        ({"name": "x" * 65}, "has 65 bytes; use 1 to 64"),
        ({"entry_bytes": 0}, "entry_bytes of part 'kv' is 0"),
        ({"entry_tokens": 1, "entries": 1}, "set exactly one of the two"),
        ({"layers": ()}, "layers of part 'kv' are empty"),
        ({"layers": (1, 1)}, "not ascending: 1 stands before 1"),
        ({"layers": (-1,)}, "layer of part 'kv' is -1"),
        ({"kind": "thin"}, "kind of part 'kv' is 'thin'; use one of: dense, sparse"),
        ({"retention": Retention.VOLATILE, "ttl_ns": 1}, "dense parts share one SSD record"),
        ({"retention": Retention.VOLATILE, "kind": PartKind.SPARSE}, "which is volatile, is 0"),
        ({"ttl_ns": 5}, "only volatile parts have one"),
        ({"checksum_bytes": 100}, "checksum_bytes of part 'kv' is 100"),
    ],
)
def test_a_part_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Part(**{"name": "kv", "entry_bytes": 8, **changes})


def test_naming_all_layers_is_the_same_as_naming_none() -> None:
    named = small(parts=(Part(name="kv", entry_bytes=8, layers=(0, 1, 2, 3)),))
    assert named == small()
    assert named.digest == small().digest


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    layout = presets.deepseek_v32()
    with pytest.raises(InvalidRequest, match="part 'swa' is not in the layout; its parts are: kv, indexer"):
        layout.layer_range(0, "swa")
    with pytest.raises(InvalidRequest, match=r"layers 61\.\.62 lie outside the model's 0\.\.61"):
        layout.layer_range(61, "kv")
    with pytest.raises(InvalidRequest, match=r"shard 1 lies outside the layout's 0\.\.0"):
        layout.record_bytes(1)
    assert layout.part("indexer").entry_bytes == 132


def test_differences_name_fields_and_parts() -> None:
    one = small()
    assert one.differences(small(dtype="fp8", chunk_tokens=32)) == ["chunk_tokens", "dtype"]
    assert one.differences(small(parts=(Part(name="kv", entry_bytes=9),))) == ["parts.kv.entry_bytes"]
    assert one.differences(small(parts=(Part(name="k", entry_bytes=8),))) == ["parts"]


@pytest.mark.parametrize(
    "field", [item.name for item in dataclasses.fields(KVLayout) if item.init and item.name != "parts"]
)
def test_each_field_is_in_the_digest(field: str) -> None:
    layout = small(shards=2)
    other: dict[str, Any] = {
        "chunk_tokens": 32,
        "dtype": "fp8",
        "layers": 5,
        "quantisation": "int4",
        "order": "layer,head,token,entry",
        "shards": 1,
        "shard_axis": ShardAxis.LAYERS,
        "run_bytes": 5,
    }
    changed = dataclasses.replace(layout, **{field: other[field]})
    assert changed.digest != layout.digest
    assert layout.differences(changed) == [field]


def test_a_field_from_the_future_is_refused_by_name() -> None:
    values = decode(small().encode()[len(MAGIC) :], what="layout")
    assert isinstance(values, dict)
    with pytest.raises(FormatUnsupported, match="layout has unknown fields 'sparsity'"):
        KVLayout.decode(MAGIC + encode({**values, "sparsity": 1}))
    part = values["parts"][0]
    with pytest.raises(FormatUnsupported, match="layout part has unknown fields 'codec'"):
        KVLayout.decode(MAGIC + encode({**values, "parts": [{**part, "codec": "zstd"}]}))
    with pytest.raises(FormatUnsupported, match="lacks the field 'dtype'"):
        KVLayout.decode(MAGIC + encode({name: item for name, item in values.items() if name != "dtype"}))
    with pytest.raises(FormatUnsupported, match="not in canonical form"):
        KVLayout.decode(MAGIC + encode(dict(reversed(values.items()))))


def test_another_version_is_refused_by_name() -> None:
    with pytest.raises(
        FormatUnsupported, match=r"begins with b'kvstore.layout.v2'; this version reads b'kvstore.layout.v1'"
    ):
        KVLayout.decode(b"kvstore.layout.v2" + small().encode()[len(MAGIC) :])


def test_a_layout_with_too_long_an_encoding_is_refused() -> None:
    parts = tuple(Part(name=f"p{index}", entry_bytes=1, layers=tuple(range(index, 4096))) for index in range(1, 8))
    with pytest.raises(InvalidRequest, match=r"layout encodes to \d+ bytes, above the limit of 49152"):
        small(layers=4096, chunk_tokens=1, parts=parts)

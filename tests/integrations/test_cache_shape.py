"""The pure half of the transformers integration: sizes and borders."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest
from kvstore.types.layout import PartKind
from kvstore_client.integrations.cache_shape import CacheShape, checkpoint_tokens


def shape(*, full: tuple[int, ...], window: tuple[int, ...] = (), window_tokens: int = 0) -> CacheShape:
    return CacheShape(
        full_layers=full,
        window_layers=window,
        window_tokens=window_tokens,
        heads=3,
        key_size=64,
        value_size=64,
        element_bytes=2,
        dtype="bf16",
    )


def test_a_chunk_of_smollm2_has_the_bytes_that_its_config_says() -> None:
    layout = shape(full=tuple(range(30))).layout(32)
    assert layout.bytes_per_token == 30 * 2 * 3 * 64 * 2 == 23_040
    assert layout.chunk_bytes == 737_280
    assert not layout.sparse_parts


def test_compressed_latents_count_key_and_value_sizes_apart() -> None:
    latents = CacheShape(
        full_layers=tuple(range(4)),
        window_layers=(),
        window_tokens=0,
        heads=1,
        key_size=512,
        value_size=64,
        element_bytes=2,
        dtype="bf16",
    )
    assert latents.layout(16).bytes_per_token == 4 * 576 * 2


def test_window_layers_are_a_sparse_part_of_their_own() -> None:
    layout = shape(full=(0, 2), window=(1, 3), window_tokens=47).layout(16)
    assert layout.chunk_bytes == 2 * 16 * 768
    assert layout.part("swa").kind is PartKind.SPARSE
    assert layout.record_bytes(part="swa") == 2 * 47 * 768


def test_a_model_of_window_layers_only_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidRequest, match=r"all 2 layers .* at least one layer that keeps every token"):
        shape(full=(), window=(0, 1), window_tokens=47).layout(16)


@pytest.mark.parametrize(
    ("tokens", "border"),
    [(0, 0), (1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (200, 192)],
)
def test_the_checkpoint_leaves_a_token_to_compute(tokens: int, border: int) -> None:
    assert checkpoint_tokens(tokens, 16) == border


def test_the_window_is_shorter_before_it_is_full() -> None:
    assert shape(full=(0,), window=(1,), window_tokens=47).window_held(16) == 16
    assert shape(full=(0,), window=(1,), window_tokens=47).window_held(64) == 47

"""The caller's memory: every kind of buffer, cut anywhere, refused before any I/O when it cannot serve."""

from __future__ import annotations

import ctypes
import mmap
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.limits import MiB
from kvstore.types.layout import ByteRange, KVLayout, ShardAxis
from kvstore.types.part import Part
from kvstore_client.planner import Section, sections_of
from kvstore_client.ranges import select, span_bytes
from kvstore_client.regions import allocate, region_of


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.data())
def test_a_cut_reaches_exactly_its_bytes(sizes: list[int], data: st.DataObject) -> None:
    fragments = [bytearray(size) for size in sizes]
    region = region_of(fragments, index=0, writable=True)
    total = sum(sizes)
    assert region.length_bytes == total
    offset = data.draw(st.integers(0, total))
    length = data.draw(st.integers(0, total - offset))
    views = region.cut(offset, length)
    assert sum(map(len, views)) == length
    for view in views:
        view[:] = b"\xff" * len(view)
    joined = b"".join(fragments)
    assert joined == bytes(offset) + b"\xff" * length + bytes(total - offset - length)


def test_every_kind_of_memory() -> None:
    block = bytearray(24)
    address = ctypes.addressof((ctypes.c_char * 24).from_buffer(block))
    items: list[object] = [
        block,
        memoryview(block),
        array("I", [1, 2, 3]),
        np.zeros((3, 4), np.float32),
        mmap.mmap(-1, 4096),
        (address, 24),
        [block, (address, 8), np.zeros(2)],
        ((address, 8), (address + 8, 16)),
        [],
        np.zeros((0, 4)),
    ]
    sizes = [region_of(item, index=0, writable=True).length_bytes for item in items]  # type: ignore[arg-type]
    assert sizes == [24, 24, 12, 48, 4096, 24, 48, 24, 0, 0]
    region_of((address, 24), index=0, writable=True).cut(3, 2)[0][:] = b"ab"
    assert block[3:5] == b"ab"


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (b"abc", "item 7 is read-only"),
        ("abc", "item 7 is a str"),
        (np.zeros((4, 4))[:, 1], "not C-contiguous"),
        ((0, 10), "address 0"),
        ((10, -1), "length -1"),
        ([(1, 2, 3)], "pass \\(address, length\\)"),
        ([bytearray(1), None], "NoneType"),
    ],
)
def test_unusable_memory_is_refused_by_name(item: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        region_of(item, index=7, writable=True)  # type: ignore[arg-type]


def test_read_only_memory_is_a_fine_source() -> None:
    assert region_of(b"abc", index=0, writable=False).length_bytes == 3


def test_allocated_memory_is_page_aligned_and_writable() -> None:
    for length in (1, 4096, 100_000):
        view = allocate(length, prefault=True)
        assert len(view) == length
        assert ctypes.addressof(ctypes.c_char.from_buffer(view)) % mmap.PAGESIZE == 0
        view[-1] = 7
    assert len(allocate(0)) == 0
    with pytest.raises(InvalidRequest):
        allocate(-1)


@pytest.mark.parametrize("length", [1 << 60, 1 << 70])
def test_memory_that_nobody_has_is_refused_by_its_size(length: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{length} bytes of memory cannot be had"):
        allocate(length)


def test_no_more_memory_is_touched_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_client.regions.free_memory_bytes", lambda: 10 * MiB)
    assert len(allocate(9 * MiB, prefault=True)) == 9 * MiB
    with pytest.raises(InvalidRequest, match=f"{10 * MiB} bytes at once"):
        allocate(10 * MiB, prefault=True)
    assert len(allocate(10 * MiB)) == 10 * MiB, "what is not touched is not taken"


LAYOUT = KVLayout(
    chunk_tokens=4,
    dtype="bf16",
    layers=4,
    shards=1,
    parts=(Part(name="kv", entry_bytes=100), Part(name="indexer", entry_bytes=10)),
)
WHOLE = (Section(shard=0, part=None),)


def spans_of(**wanted: object) -> object:
    arguments: dict[str, object] = {"part": None, "layers": None, "ranges": None, "key_count": 2} | wanted
    return select(LAYOUT, WHOLE, **arguments).spans(0, 1)  # type: ignore[arg-type]


def test_nothing_said_means_whole_records() -> None:
    assert spans_of() is None
    assert select(LAYOUT, WHOLE, key_count=2, part=None, layers=None, ranges=None).is_whole


def test_layers_are_ranges_of_each_dense_part() -> None:
    assert spans_of(layers=range(1, 3)) == ((400, 1200), (1640, 1720))
    assert spans_of(layers=[1, 3], part="kv") == ((400, 800), (1200, 1600))
    assert spans_of(part="indexer") == ((1600, 1760),)
    assert spans_of(layers=range(4)) == ((0, 1760),), "neighbouring ranges are one"


def test_ranges_are_shared_or_per_key() -> None:
    assert spans_of(ranges=[(0, 10), (10, 5), (100, 1)]) == ((0, 15), (100, 101))
    assert spans_of(ranges=[[(0, 10)], [ByteRange(offset_bytes=5, length_bytes=2)]]) == ((5, 7),)
    assert span_bytes(((0, 15), (100, 101))) == 16


def test_layers_of_a_layer_shard_are_its_own() -> None:
    layout = KVLayout(
        chunk_tokens=4,
        dtype="x",
        layers=4,
        shards=2,
        shard_axis=ShardAxis.LAYERS,
        parts=(Part(name="kv", entry_bytes=8),),
    )
    sections = sections_of(layout, shards=(0, 1), parts=(None,))
    chosen = select(layout, sections, key_count=1, part=None, layers=[1, 2], ranges=None)
    assert [chosen.spans(section, 0) for section in (0, 1)] == [((32, 64),), ((0, 32),)]


@pytest.mark.parametrize(
    "wanted",
    [
        {"layers": [0], "ranges": [(0, 1)]},
        {"ranges": [(10, 5), (0, 5)]},
        {"ranges": [(0, 10), (5, 10)]},
        {"ranges": [(0, 1761)]},
        {"ranges": [(-1, 2)]},
        {"ranges": []},
        {"ranges": [[(0, 1)]]},
        {"layers": []},
        {"layers": [2, 1]},
        {"layers": [4]},
        {"part": "none"},
        {"part": "kv", "ranges": [(0, 1)]},
    ],
)
def test_ranges_that_make_no_sense_are_refused(wanted: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        spans_of(**wanted)

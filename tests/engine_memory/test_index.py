"""The index against a dict, its growth, its memory, and what happens when keys are cut short or room ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.engine import _search
from kvstore.engine import index as index_room
from kvstore.engine.index import NOT_INSERTED, Index
from kvstore.engine.location import (
    DEPTH_MAX,
    U64,
    location_depth,
    location_depths,
    location_page,
    location_page_counts,
    location_pages,
    location_segment,
    location_segments,
    pack_location,
    pack_locations,
)

Key = tuple[int, int]


def keys_of(pairs: Sequence[Key]) -> U64:
    return np.array(pairs, dtype=np.uint64).reshape(-1, 2)


def random_keys(count: int, *, seed: int) -> U64:
    return np.random.default_rng(seed).integers(0, 1 << 64, size=(count, 2), dtype=np.uint64)


# Few different halves, so that half-equal keys, equal keys in one batch and the key of all zeros are common.
halves = st.sampled_from([0, 1, 2, 1 << 63, (1 << 64) - 1, 0x1234_5678_9ABC_DEF0])
keys = st.tuples(halves, halves)
steps = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert_many", "delete", "delete_many", "expected"]), st.lists(keys, max_size=40)
    ),
    max_size=25,
)


@given(steps)
def test_it_is_a_dict(steps: list[tuple[str, list[Key]]]) -> None:
    index, model = Index(10_000, seed=1), dict[Key, int]()
    location = 0
    for verb, batch in steps:
        before = [model.get(key, 0) for key in batch]
        if verb == "insert":
            for key in batch:
                location += 1
                assert index.insert(*key, location, location) == model.get(key, 0)
                model[key] = location
        elif verb == "insert_many":
            places = np.arange(location + 1, location + 1 + len(batch), dtype=np.uint64)
            answers = index.insert_many(keys_of(batch), places, places.astype(np.uint32)).tolist()
            for key, place, answer in zip(batch, places.tolist(), answers, strict=True):
                assert answer == model.get(key, 0)
                model[key] = place
            location += len(batch)
        elif verb == "delete":
            for key in batch:
                assert index.delete(*key) == model.pop(key, 0)
        else:
            wrong = verb == "expected"
            expected = np.array(before, dtype=np.uint64) + np.uint64(wrong) if verb == "expected" else None
            removed = index.delete_many(keys_of(batch), expected).tolist()
            if wrong:
                assert not any(removed)
            else:
                assert sum(removed) == sum(model.pop(key, 0) for key in batch)
        assert index.count == len(model)
        assert index.lookup(keys_of(batch)).tolist() == [model.get(key, 0) for key in batch]
    everything = index.taken_slots()
    stored = {
        (a, b): place
        for (a, b), place in zip(index.keys_at(everything).tolist(), index.locations[everything].tolist(), strict=True)
    }
    assert stored == model
    for key, place in model.items():
        assert index.get(*key) == place
        assert index.access[index.find(*key)] == place


@given(st.integers(0, 1 << 32), st.integers(1, 6000), st.booleans())
@settings(max_examples=20)
def test_growth_by_splits_loses_nothing(seed: int, count: int, reserve: bool) -> None:
    index, some = Index(8_000, seed=seed), random_keys(count, seed=seed)
    places = np.arange(1, count + 1, dtype=np.uint64)
    if reserve:
        index.reserve(count)
    half = count // 2
    index.insert_many(some[:half], places[:half], 3)
    for key, place in zip(some[half : half + 50].tolist(), places[half : half + 50].tolist(), strict=True):
        assert index.insert(key[0], key[1], place, 4) == 0
    answers = index.insert_many(some[half:], places[half:], 5)
    assert np.count_nonzero(answers) == min(50, count - half)
    assert (index.lookup(some) == places).all()
    assert not index.lookup(some ^ np.uint64(1 << 40)).any()
    assert index.count == count


def test_touch_answers_the_access_before() -> None:
    index, some = Index(1000, seed=1), random_keys(100, seed=2)
    index.insert_many(some, np.arange(1, 101, dtype=np.uint64), 7)
    slots = index.find_many(some)
    assert (index.touch_many(slots, 9) == 7).all()
    assert index.touch(int(slots[3]), 11) == 9
    assert index.access[slots[3]] == 11


def test_a_full_index_refuses_and_keeps_what_it_has() -> None:
    index = Index(1, seed=1)
    some = random_keys(40_000, seed=3)
    answers = index.insert_many(some, np.arange(1, 40_001, dtype=np.uint64), 1)
    refused = answers == np.uint64(NOT_INSERTED)
    assert 0 < np.count_nonzero(refused) < 40_000
    found = index.lookup(some)
    assert ((found == 0) == refused).all()
    lost = int(np.flatnonzero(refused)[0])
    assert index.insert(int(some[lost, 0]), int(some[lost, 1]), 5, 1) in (0, NOT_INSERTED)


def test_keys_that_all_share_a_half_end_in_a_refusal_not_in_endless_memory() -> None:
    index = Index(2_000, seed=1)
    some = random_keys(2_000, seed=4)
    some[:, 0] = 5
    answers = index.insert_many(some, np.arange(1, 2_001, dtype=np.uint64), 1)
    stored = answers == 0
    assert (index.lookup(some)[stored] == np.arange(1, 2_001, dtype=np.uint64)[stored]).all()
    assert index.memory_bytes < 8 << 20


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no VmRSS")


def worst_bytes_per_chunk(count: int, *, batch: int) -> float:
    """Touched memory per key, at the worst moment of growing from an eighth of `count` to `count`."""
    index = Index(count, seed=5)
    before = resident_bytes()
    worst = 0.0
    for start in range(0, count, batch):
        some = random_keys(batch, seed=start)
        index.insert_many(some, np.arange(start + 1, start + 1 + batch, dtype=np.uint64), 1)
        if start > count // 8:
            worst = max(worst, index.memory_bytes / index.count)
    del some
    measured = (resident_bytes() - before) / index.count
    assert measured < index.memory_bytes / index.count + 16, "memory_bytes says less than the kernel does"
    return worst


def test_a_chunk_costs_at_most_64_bytes_at_a_million() -> None:
    assert worst_bytes_per_chunk(1_000_000, batch=20_000) <= 64


@pytest.mark.nightly
def test_a_chunk_costs_at_most_64_bytes_at_ten_million() -> None:
    assert worst_bytes_per_chunk(10_000_000, batch=100_000) <= 64


@given(
    st.integers(0, (1 << 20) - 1), st.integers(0, (1 << 18) - 1), st.integers(1, (1 << 15) - 1), st.integers(0, 1 << 32)
)
def test_a_location_comes_apart_as_it_was_put_together(segment: int, page: int, pages: int, depth: int) -> None:
    location = pack_location(segment=segment, page=page, pages=pages, depth=depth)
    cut = min(depth, DEPTH_MAX)
    assert 0 < location < 1 << 64
    assert location_segment(location) == segment
    assert location_page(location) == page
    assert location_pages(location) == pages
    assert location_depth(location) == cut
    array = np.array([location], dtype=np.uint64)
    assert location_segments(array).tolist() == [segment]
    assert location_page_counts(array).tolist() == [pages]
    assert location_depths(array).tolist() == [cut]
    one = [np.array([value], dtype=np.uint64) for value in (segment, page, pages, depth)]
    assert pack_locations(segments=one[0], pages_at=one[1], pages=one[2], depths=one[3]).tolist() == [location]


@given(held=st.lists(keys, max_size=300), asked=st.lists(keys, max_size=60), shape=st.integers(0, 3))
def test_every_search_finds_the_same(held: list[Key], asked: list[Key], shape: int) -> None:
    """Compiled, in numpy and one by one; with few different halves, or with many keys so that pages have split."""
    index = Index(20_000, seed=2)
    if shape:
        many = random_keys(shape * 700, seed=shape)
        index.insert_many(many, np.arange(1, len(many) + 1, dtype=np.uint64), 1)
        asked = asked + [(int(key0), int(key1)) for key0, key1 in many[::50]] + [(5, shape)]
    for location, key in enumerate(held, 10_000):
        index.insert(*key, location, 1)
    for key in held[::3]:
        index.delete(*key)
    wanted = keys_of(asked)
    one_by_one = [index.find(*key) for key in asked]
    with pytest.MonkeyPatch.context() as patch:
        assert index_room.IS_COMPILED, "the extension is not built"
        assert index.find_many(wanted).tolist() == one_by_one
        assert index.find_many(wanted[::-1]).tolist() == one_by_one[::-1]
        patch.setattr(index_room, "IS_COMPILED", False)
        assert index.find_many(wanted).tolist() == one_by_one


def test_a_wrong_directory_is_no_wild_read() -> None:
    index = Index(1000, seed=1)
    columns = list(index._columns())
    keys, slots = random_keys(3, seed=1), np.empty(3, dtype=np.int64)
    _search.find_many(keys, slots, *columns)  # type: ignore[arg-type]
    assert slots.tolist() == [-1] * 3
    for at, wrong in (
        (3, np.array([1 << 30], dtype=np.uint32)),
        (3, np.zeros(0, dtype=np.uint32)),
        (1, columns[1][:8]),
    ):
        changed = [*columns]
        changed[at] = wrong
        with pytest.raises(ValueError, match="of the index"):
            _search.find_many(keys, slots, *changed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="as many slots"):
        _search.find_many(keys, slots[:2], *columns)  # type: ignore[arg-type]
    for indices, error in (([3], IndexError), ([-1], IndexError), (["x"], TypeError)):
        with pytest.raises(error):
            index.locate(bytes(96), indices, bytes(16), 0, np.zeros(1, dtype=np.int64))  # type: ignore[arg-type]

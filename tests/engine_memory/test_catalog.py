"""The catalog: index, scores, pins and history always tell one story."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.engine import catalog as catalog_module
from kvstore.engine import history as history_module
from kvstore.engine.api import NamespaceRef
from kvstore.engine.catalog import Catalog
from kvstore.engine.history import Event, Fate, History
from kvstore.engine.index import FEW_KEYS
from kvstore.engine.location import U64, location_pages, location_segment, pack_location
from kvstore.engine.namespaces import index_keys
from kvstore.limits import PAGE_BYTES
from kvstore.types.results import MissReason

SEGMENTS = 3


@pytest.fixture(params=["one by one", "in columns"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a handful of keys is changed."""
    few = {"one by one": FEW_KEYS, "in columns": 0}[request.param]
    monkeypatch.setattr(catalog_module, "FEW_KEYS", few)
    monkeypatch.setattr(history_module, "FEW_KEYS", few)


def keys_of(names: list[int]) -> U64:
    return np.array([(name * 7919, name) for name in names], dtype=np.uint64).reshape(-1, 2)


verbs = st.sampled_from(["commit", "touch", "move", "evict", "delete", "quarantine", "pin", "unpin", "stale"])
steps = st.lists(st.tuples(verbs, st.lists(st.integers(1, 12), min_size=1, max_size=12)), max_size=40)


@given(steps, st.integers(1, 3))
def test_live_bytes_equal_the_sum_of_valid_records(steps: list[tuple[str, list[int]]], size: int) -> None:
    catalog = Catalog(entries_max=1000, segment_count=SEGMENTS, seed=1)
    model: dict[int, int] = {}
    pins: dict[int, int] = {}
    held: list[list[int]] = []
    for tick, (verb, names) in enumerate(steps, 1):
        distinct = sorted(set(names))
        fresh = [
            pack_location(segment=at % SEGMENTS, page=tick * 50 + at, pages=size + at % 2, depth=at)
            for at in range(len(names))
        ]
        at = np.array([model.get(name, 0) for name in distinct], dtype=np.uint64)
        if verb == "commit":
            for (key0, key1), place in zip(keys_of(names).tolist(), fresh, strict=True):
                assert catalog.commit(key0, key1, place, tick)
            model.update(zip(names, fresh, strict=True))
        elif verb == "touch":
            catalog.touch_keys(keys_of(names), tick)
        elif verb == "move":
            # A copy is as long as its original.
            lengths = [location_pages(model[name]) if name in model else size for name in distinct]
            places = [
                pack_location(segment=at % SEGMENTS, page=tick * 50 + at, pages=pages, depth=at)
                for at, pages in enumerate(lengths)
            ]
            new = np.array(places, dtype=np.uint64)
            moved = catalog.move(keys_of(distinct), old=at, new=new)
            for name, did, place in zip(distinct, moved.tolist(), new.tolist(), strict=True):
                assert did == (name in model)
                if did:
                    model[name] = place
        elif verb in ("evict", "quarantine"):
            gone = getattr(catalog, verb)(keys_of(distinct), at, tick)
            assert gone.tolist() == [name in model for name in distinct]
            reason = MissReason.EVICTED if verb == "evict" else MissReason.CORRUPT
            there = [name for name in distinct if name in model]
            assert set(catalog.history.reasons(keys_of(there)).tolist()) <= {reason}
            for name in there:
                del model[name]
        elif verb == "stale":
            assert not catalog.evict(keys_of(distinct), at + np.uint64(1), tick).any()
        elif verb == "delete":
            removed = catalog.delete(keys_of(names), tick).tolist()
            assert sorted(place for place in removed if place) == sorted(model.pop(n) for n in distinct if n in model)
        elif verb == "pin":
            slots = catalog.index.find_many(keys_of(distinct))
            slots = slots[slots >= 0]
            before = catalog.pinned_bytes
            free = catalog.pinnable_bytes(slots)
            catalog.pin(slots)
            assert catalog.pinned_bytes == before + free
            held.append([name for name in distinct if name in model])
        elif held:
            catalog.unpin(keys_of(held.pop()))
        for name in set(pins) - set(model):
            del pins[name]
        everyone = list(model)
        assert catalog.lookup(keys_of(everyone)).tolist() == list(model.values())
        assert catalog.valid(keys_of(everyone), np.array(list(model.values()), dtype=np.uint64)).all()
        assert catalog.scores.live_bytes == sum(map(location_pages, model.values())) * PAGE_BYTES
        for segment in range(SEGMENTS):
            mine = [name for name, place in model.items() if location_segment(place) == segment]
            assert catalog.scores.live_records[segment] == len(mine)
            ticks = catalog.ticks(keys_of(mine)).astype(np.int64)
            weights = np.array([location_pages(model[name]) for name in mine], dtype=np.int64)
            assert catalog.scores._access_sum[segment] == (ticks * weights).sum()
        pinned = catalog.pinned(keys_of(everyone))
        assert catalog.pinned_bytes == sum(
            location_pages(place) * PAGE_BYTES
            for place, is_pinned in zip(model.values(), pinned, strict=True)
            if is_pinned
        )


def test_history_is_a_ring_that_knows_the_last_of_each_key() -> None:
    history = History(4, seed=1)
    history.note(keys_of([1, 2]), Fate.EVICTED, tick=5)
    history.note(keys_of([1]), Fate.DELETED, tick=6)
    history.note(keys_of([3]), Fate.QUARANTINED, tick=7)
    assert history.reasons(keys_of([1, 2, 3, 4])).tolist() == [
        MissReason.ABSENT,
        MissReason.EVICTED,
        MissReason.CORRUPT,
        MissReason.ABSENT,
    ]
    key = keys_of([2])[0].tolist()
    assert history.event(key[0], key[1]) == Event(fate=Fate.EVICTED, tick=5)
    history.note(keys_of([4, 5]), Fate.EVICTED, tick=8)  # overwrites the two oldest events
    assert history.event(key[0], key[1]) is None
    first = keys_of([1])[0].tolist()
    assert history.event(first[0], first[1]) == Event(fate=Fate.DELETED, tick=6)
    history.note(keys_of(list(range(10, 30))), Fate.EVICTED, tick=9)
    assert len(history) == 4
    assert history.reasons(keys_of([29, 25])).tolist() == [MissReason.EVICTED, MissReason.ABSENT]


@given(
    held=st.lists(st.integers(0, 60), unique=True, max_size=60),
    asked=st.lists(st.integers(0, 70), max_size=90),
    indices=st.lists(st.integers(0, 89), max_size=100),
    ticks=st.tuples(st.integers(1, 3), st.integers(0, 3)),
)
def test_locating_is_the_same_compiled_and_not(
    held: list[int], asked: list[int], indices: list[int], ticks: tuple[int, int]
) -> None:
    """Locations, access ticks and scores: with keys given twice, absent ones, any order and any part of a request."""
    ref = NamespaceRef(id=1, digest=bytes(32), generation=1, salt=bytes(range(16)), tenant="t")
    blob = b"".join(name.to_bytes(4, "little") * 8 for name in asked)
    meant = [at for at in indices if at < len(asked)]
    outcomes = []
    for compiled in (True, False):
        catalog = Catalog(entries_max=1000, segment_count=SEGMENTS, seed=1)
        for name in held:
            place = pack_location(segment=name % SEGMENTS, page=name * 8 + 1, pages=1 + name % 5, depth=name)
            for key0, key1 in index_keys(ref, name.to_bytes(4, "little") * 8).tolist():
                assert catalog.commit(key0, key1, place, ticks[0])
        with pytest.MonkeyPatch.context() as patch:
            if not compiled:
                patch.setattr("kvstore.engine.catalog.IS_COMPILED", False)
                patch.setattr("kvstore.engine.index.IS_COMPILED", False)
            found = catalog.locate(ref, blob, meant, ticks[1])
        outcomes.append((found, catalog.index.access.tobytes(), catalog.scores.access_sums.tolist()))
    assert outcomes[0] == outcomes[1]
    assert [location != 0 for location in outcomes[0][0]] == [asked[at] in held for at in meant]


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=12, unique=True), st.sampled_from(Fate))),
    st.integers(3, 20),
)
def test_both_ways_remember_the_same(notes: list[tuple[list[int], Fate]], entries_max: int) -> None:
    histories = [History(entries_max, seed=1) for _ in range(2)]
    for few, history in zip((0, 64), histories, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(history_module, "FEW_KEYS", few)
            for tick, (names, fate) in enumerate(notes, 1):
                history.note(keys_of(names), fate, tick)
    columns, one_by_one = histories
    assert columns.dump() == one_by_one.dump()
    assert (len(columns), columns.noted) == (len(one_by_one), one_by_one.noted)
    for name in range(1, 31):
        key0, key1 = keys_of([name])[0].tolist()
        assert columns.event(key0, key1) == one_by_one.event(key0, key1)


@given(
    st.sets(st.integers(1, 40), max_size=30),
    st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=30),
    st.sampled_from([Fate.EVICTED, Fate.DELETED, Fate.QUARANTINED]),
)
def test_both_ways_end_the_same(there: set[int], ends: list[tuple[int, bool]], fate: Fate) -> None:
    seen = []
    keys = keys_of([name for name, _ in ends])
    for few in (0, 64):
        catalog = Catalog(entries_max=1000, segment_count=SEGMENTS, seed=1)
        places = {name: pack_location(segment=name % SEGMENTS, page=name, pages=2, depth=name) for name in there}
        for name, place in places.items():
            key0, key1 = keys_of([name])[0].tolist()
            catalog.commit(key0, key1, place, name)
        pinned = sorted(there)[::3]
        catalog.pin(catalog.index.find_many(keys_of(pinned)))
        expected = np.array([places.get(name, 7) + 5 * is_stale for name, is_stale in ends], dtype=np.uint64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(catalog_module, "FEW_KEYS", few)
            if fate is Fate.DELETED:
                answer = catalog.delete(keys, 99).tolist()
            else:
                ended = catalog.evict if fate is Fate.EVICTED else catalog.quarantine
                answer = ended(keys, expected, 99).tolist()
        scores, index = catalog.scores, catalog.index
        seen.append(
            (
                answer,
                index.count,
                catalog.pinned_bytes,
                catalog.evicted_tick,
                catalog.history.dump(),
                scores.live_pages.tolist(),
                scores.live_records.tolist(),
                scores.access_sums.tolist(),
                [index.get(*keys_of([name])[0].tolist()) for name in range(1, 41)],
            )
        )
    assert seen[0] == seen[1]

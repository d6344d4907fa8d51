"""Eviction's decisions: ticks, victims, what is kept, what write amplification costs, and the order inside a chain."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.engine.location import U32, U64, location_depths, pack_location
from kvstore.engine.policy import (
    Ancestors,
    EvictionRest,
    SegmentScores,
    TickClock,
    WriteBudget,
    choose_victim,
    eviction_tick,
    records_to_keep,
)
from kvstore.limits import ACCESS_TICK_NS, PAGE_BYTES, SPACE_RETRY_NS_MAX, SPACE_RETRY_NS_MIN


def locations_of(records: list[tuple[int, int, int, int]]) -> U64:
    """From (segment, page, pages, depth)."""
    return np.array(
        [pack_location(segment=one[0], page=one[1], pages=one[2], depth=one[3]) for one in records], dtype=np.uint64
    )


def ticks_of(ticks: list[int]) -> U32:
    return np.array(ticks, dtype=np.uint32)


class Chains:
    """Case 22 in its purest form: room for `capacity` chunks, one segment for each, and the policy decides."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.scores = SegmentScores(capacity)
        self.ancestors = Ancestors(1000)
        self.held: dict[str, tuple[int, int, int]] = {}  # name -> (location, tick, segment)
        self.victims: list[str] = []
        self.number: dict[str, int] = {}

    def _id(self, name: str) -> int:
        return self.number.setdefault(name, len(self.number) + 1)

    def put(self, chain: str, position: int, tick: int) -> None:
        segment = self._room()
        name = f"{chain}{position}"
        location = pack_location(segment=segment, page=1, pages=10, depth=position)
        self.held[name] = (location, tick, segment)
        self.scores.add(location, tick)
        parent = self._id(f"{chain}{position - 1}") if position > 1 else 0
        names = {number: name for name, number in self.number.items()}
        for ancestor in self.ancestors.put(self._id(name), parent, tick):
            self.get(names[ancestor], tick)

    def get(self, name: str, tick: int) -> None:
        if name in self.held:
            location, before, segment = self.held[name]
            self.scores.touch(location, before=before, now=tick)
            self.held[name] = (location, tick, segment)

    def _room(self) -> int:
        used = {segment: name for name, (_, _, segment) in self.held.items()}
        free = [segment for segment in range(self.capacity) if segment not in used]
        if free:
            return free[0]
        victim = choose_victim(self.scores, np.arange(self.capacity))
        assert victim is not None
        location, tick, _ = self.held.pop(used[victim])
        self.scores.remove(location, tick)
        self.victims.append(used[victim])
        return victim

    def longest_prefix(self, chain: str) -> int:
        length = 0
        while f"{chain}{length + 1}" in self.held:
            length += 1
        return length


@pytest.mark.parametrize("same_tick", [True, False], ids=["one tick", "a tick each"])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked prefill"])
def test_the_tail_of_a_chain_goes_first(same_tick: bool, chunked: bool) -> None:
    chains = Chains(8)
    tick = 1
    for batch in [[1, 2], [3, 4], [5, 6, 7, 8]] if chunked else [[1, 2, 3, 4, 5, 6, 7, 8]]:
        for position in batch:
            chains.put("k", position, tick)
            tick += not same_tick
    chains.get("k1", tick)
    chains.get("k2", tick)
    for position in range(1, 5):
        tick += not same_tick
        chains.put("j", position, tick)
    assert chains.victims == ["k8", "k7", "k6", "k5"]
    assert chains.longest_prefix("k") == 4
    assert chains.longest_prefix("j") == 4


def test_orphans_age_out_within_one_turnover() -> None:
    chains = Chains(8)
    for position in range(1, 5):
        chains.put("k", position, 1)
    gone = chains.held.pop("k1")
    chains.scores.remove(gone[0], gone[1])
    for turn in range(2, 10):
        for position in range(1, 5):
            chains.put(f"x{turn}-", position, turn)
    assert not [name for name in chains.held if name.startswith("k")]


def test_mostly_dead_goes_before_a_full_segment_that_is_as_cold() -> None:
    scores = SegmentScores(3)
    full = locations_of([(0, page, 1, 0) for page in range(100)])
    half = locations_of([(1, page, 1, 0) for page in range(50)])
    scores.add_many(full, ticks_of([5] * 100))
    scores.add_many(half, ticks_of([5] * 50))
    assert choose_victim(scores, np.array([0, 1])) == 1
    assert choose_victim(scores, np.array([0, 1, 2])) == 2, "nothing valid at all: for free"
    assert choose_victim(scores, np.array([], dtype=np.int64)) is None


def test_fresh_writes_outlive_older_ones_that_nobody_read() -> None:
    scores = SegmentScores(2)
    scores.add_many(locations_of([(0, 0, 10, 3)]), ticks_of([9]))
    scores.add_many(locations_of([(1, 0, 10, 0)]), ticks_of([2]))
    assert choose_victim(scores, np.array([0, 1])) == 1


record = st.tuples(st.integers(0, 3), st.integers(1, 50), st.integers(1, 30), st.integers(0, 40))


@given(st.lists(st.tuples(record, st.integers(1, 100), st.integers(1, 100), st.booleans()), max_size=40))
def test_scores_kept_step_by_step_are_those_of_the_records(
    steps: list[tuple[tuple[int, int, int, int], int, int, bool]],
) -> None:
    scalar, vector = SegmentScores(4), SegmentScores(4)
    alive: list[tuple[tuple[int, int, int, int], int]] = []
    for one, tick, later, dies in steps:
        location = locations_of([one])
        scalar.add(int(location[0]), tick)
        scalar.touch(int(location[0]), before=tick, now=later)
        vector.add_many(location, ticks_of([tick]))
        vector.touch_many(location, before=ticks_of([tick]), now=later)
        if dies:
            scalar.remove(int(location[0]), later)
            vector.remove_many(location, ticks_of([later]))
        else:
            alive.append((one, later))
    for scores in (scalar, vector):
        for segment in range(4):
            mine = [(one, tick) for one, tick in alive if one[0] == segment]
            pages = sum(one[2] for one, _ in mine)
            assert scores.live_pages[segment] == pages
            assert scores.live_records[segment] == len(mine)
            if pages:
                access = sum(one[2] * t for one, t in mine) / pages
                depth = sum(one[2] * one[3] for one, _ in mine) / pages
                assert scores.mean_access()[segment] == pytest.approx(access)
                assert scores.means(segment) == pytest.approx((pages, access, depth))
            else:
                assert scores.means(segment) == (0, 0, 0)
        assert scores.live_bytes == sum(one[2] for one, _ in alive) * PAGE_BYTES


def test_what_is_kept_is_warm_or_pinned_heads_first_within_the_budget() -> None:
    locations = locations_of([(0, at * 10, 10, depth) for at, depth in enumerate([5, 1, 0, 2, 7])])
    ticks = ticks_of([9, 9, 3, 9, 2])
    pinned = np.array([False, False, False, False, True])
    size = 10 * PAGE_BYTES
    keep = records_to_keep(locations, ticks, pinned, eviction_tick=3, budget_bytes=100 * size)
    assert location_depths(locations)[keep].tolist() == [7, 1, 2, 5]
    tight = records_to_keep(locations, ticks, pinned, eviction_tick=3, budget_bytes=3 * size)
    assert location_depths(locations)[tight].tolist() == [7, 1, 2]
    nothing = records_to_keep(locations, ticks, pinned, eviction_tick=3, budget_bytes=0)
    assert location_depths(locations)[nothing].tolist() == [7], "a pin holds whatever it costs"


def test_nothing_is_kept_that_would_be_the_next_to_go() -> None:
    scores = SegmentScores(3)
    scores.add_many(locations_of([(0, 0, 10, 0), (0, 10, 10, 0)]), ticks_of([1, 5]))
    scores.add_many(locations_of([(1, 0, 10, 0)]), ticks_of([6]))
    scores.add_many(locations_of([(2, 0, 10, 0)]), ticks_of([50]))
    candidates = np.arange(3)
    assert choose_victim(scores, candidates) == 0
    assert eviction_tick(scores, 0, candidates) == 6
    assert eviction_tick(scores, 0, np.array([0])) == 3


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 500)), max_size=50))
def test_write_amplification_stays_within_its_bound(steps: list[tuple[int, int]]) -> None:
    budget = WriteBudget(amplification_max=1.3, saved_bytes_max=10_000)
    for wrote, wish in steps:
        budget.wrote(wrote)
        budget.moved(min(wish, budget.allowance_bytes))
        assert budget.user_bytes == 0 or budget.amplification <= 1.3 + 1e-9


def test_a_quiet_hour_does_not_save_up_a_storm() -> None:
    budget = WriteBudget(amplification_max=2, saved_bytes_max=100)
    budget.wrote(10_000)
    assert budget.allowance_bytes == 100


def test_ticks_go_on_behind_the_highest_on_the_drive() -> None:
    clock = TickClock(now_ns=10**18, last_tick=500)
    assert clock.tick(10**18) == 501
    assert clock.tick(10**18 + 3 * ACCESS_TICK_NS) == 504
    assert clock.tick(0) == 1, "never 0, whatever the clock says"
    assert clock.age_ns(3) == 3 * ACCESS_TICK_NS


def test_a_put_touches_its_ancestors_once_a_tick() -> None:
    ancestors = Ancestors(100)
    assert ancestors.put(1, 0, tick=1) == []
    assert ancestors.put(2, 1, tick=1) == [1]
    assert ancestors.put(3, 2, tick=1) == [2], "1 was touched in this tick already"
    assert ancestors.put(4, 3, tick=2) == [3, 2, 1]
    assert ancestors.put(5, 4, tick=2) == [4]
    assert ancestors.put(9, 8, tick=2) == [8], "an unknown parent is touched, and nothing beyond it"


def test_the_map_of_ancestors_is_bounded() -> None:
    ancestors = Ancestors(10)
    for key in range(1, 1000):
        ancestors.put(key, key - 1, tick=key)
    assert len(ancestors) <= 10


def test_a_circle_of_parents_ends() -> None:
    ancestors = Ancestors(10)
    ancestors.put(1, 2, tick=1)
    ancestors.put(2, 1, tick=2)
    assert ancestors.put(2, 2, tick=3) == [2]


def test_nothing_is_evicted_while_the_log_fails_or_segments_in_a_row_cannot_be_erased() -> None:
    rest, broken = EvictionRest(), OSError(errno.EROFS, "read-only")

    def why(failed: OSError | None, *, unerased: int, now_ns: int, is_log_idle: bool = True) -> str:
        return rest.why(
            failed, is_log_idle=is_log_idle, unerased=unerased, erase_failed=OSError(errno.EIO, "no"), now_ns=now_ns
        )

    assert not why(None, unerased=1, now_ns=0), "one says nothing of the others"
    assert "read-only" in why(broken, unerased=1, now_ns=1)
    assert why(None, is_log_idle=False, unerased=1, now_ns=2), "the log is tried again, and may fail again"
    assert not why(None, unerased=1, now_ns=3)
    assert not why(OSError(errno.ENOSPC, "full"), unerased=1, now_ns=4), "evicting gives room"
    waits, now_ns = [], 10
    for unerased in range(2, 12):
        assert "erase" in why(None, unerased=unerased, now_ns=now_ns)
        assert not rest.is_on_trial
        began_ns = now_ns
        while why(None, unerased=unerased, now_ns=now_ns):
            now_ns += SPACE_RETRY_NS_MIN
        waits.append(now_ns - began_ns)
        assert "[Errno 5] no" in rest.fault, "it stays said while the next is tried"
        assert rest.is_on_trial
        assert why(broken, unerased=unerased, now_ns=now_ns), "its log fails"
        assert not rest.is_on_trial
    assert waits == [min(SPACE_RETRY_NS_MIN << at, SPACE_RETRY_NS_MAX) for at in range(10)]
    assert not why(None, unerased=0, now_ns=now_ns), "one was erased"
    assert not rest.fault
    assert not rest.is_on_trial

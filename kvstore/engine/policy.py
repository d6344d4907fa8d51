"""Eviction, decided: which segment goes, which of its records stay, and what an access is worth. Pure code.

The unit of time is the access tick, 100 ms, u32: coarse on purpose, so that the chunks of one prompt share a tick and
their order is told by depth. Of two records equally cold the deeper goes first, since a prefix is worth what lies
before its first hole.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.engine.location import (
    I64,
    U32,
    U64,
    Bools,
    location_depth,
    location_depths,
    location_page_counts,
    location_pages,
    location_segment,
    location_segments,
)
from kvstore.limits import ACCESS_TICK_NS, PAGE_BYTES, SPACE_RETRY_NS_MAX, SPACE_RETRY_NS_MIN

_TICK_MAX: Final = (1 << 32) - 1
_UNERASED_MAX: Final = 2  # victims in a row, from which on it is the drive and not the segment
NO_SPACE_ERRORS: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""The file system is full, or this user's share of it: no fault of the drive's."""


class TickClock:
    """Monotonic nanoseconds to access ticks, going on from the highest tick found on the drive."""

    def __init__(self, *, now_ns: int, last_tick: int = 0) -> None:
        """Ticks begin behind `last_tick` at `now_ns`."""
        self._offset = last_tick + 1 - now_ns // ACCESS_TICK_NS

    def tick(self, now_ns: int) -> int:
        """The tick of a moment, at least 1."""
        return min(max(now_ns // ACCESS_TICK_NS + self._offset, 1), _TICK_MAX)

    @staticmethod
    def age_ns(ticks: int) -> int:
        """How long so many ticks are."""
        return ticks * ACCESS_TICK_NS


class SegmentScores:
    """Per segment, kept incrementally: live pages, and the sums of access tick and of depth, weighted by pages.

    Attributes:
        live_pages, live_records: shape [segments], exact.
    """

    def __init__(self, segment_count: int) -> None:
        self.live_pages: I64 = np.zeros(segment_count, dtype=np.int64)
        self.live_records: I64 = np.zeros(segment_count, dtype=np.int64)
        self._access_sum: I64 = np.zeros(segment_count, dtype=np.int64)
        self._depth_sum: I64 = np.zeros(segment_count, dtype=np.int64)
        # Scalar access through memoryviews costs a third of numpy's.
        self._scalars = (self.live_pages.data, self.live_records.data, self._access_sum.data, self._depth_sum.data)

    @property
    def access_sums(self) -> I64:
        """Per segment, what `touch` adds to: for the compiled search, which does the same."""
        return self._access_sum

    @property
    def live_bytes(self) -> int:
        """Padded bytes of all valid records, headers included."""
        return int(self.live_pages.sum()) * PAGE_BYTES

    @property
    def record_count(self) -> int:
        """Valid records; the index also has those of dropped namespaces, until their segments go."""
        return int(self.live_records.sum())

    def add(self, location: int, tick: int) -> None:
        """A record became valid."""
        self._account(location, tick, 1)

    def add_alike(self, locations: Sequence[int], tick: int) -> None:
        """`add` of records of one length in one segment, at least one."""
        first, count = locations[0], len(locations)
        segment, pages = location_segment(first), location_pages(first)
        live_pages, live_records, access_sum, depth_sum = self._scalars
        live_pages[segment] += count * pages
        live_records[segment] += count
        access_sum[segment] += count * pages * tick
        depth_sum[segment] += pages * sum(map(location_depth, locations))

    def remove(self, location: int, tick: int) -> None:
        """A record, last accessed at `tick`, is no longer valid."""
        self._account(location, tick, -1)

    def add_many(self, locations: U64, ticks: U32) -> None:
        """`add` for arrays."""
        self._account_many(locations, ticks, 1)

    def remove_many(self, locations: U64, ticks: U32) -> None:
        """`remove` for arrays."""
        self._account_many(locations, ticks, -1)

    def forget(self, segment: int, *, pages: int, records: int) -> None:
        """Records of a segment died together, unnamed (a dropped namespace): their warmth is taken as the mean."""
        live = int(self.live_pages[segment])
        if live:
            self._access_sum[segment] -= int(self._access_sum[segment]) * pages // live
            self._depth_sum[segment] -= int(self._depth_sum[segment]) * pages // live
        self.live_pages[segment] -= pages
        self.live_records[segment] -= records

    def reset(self, segment: int) -> None:
        """A segment holds nothing any more."""
        for column in (self.live_pages, self.live_records, self._access_sum, self._depth_sum):
            column[segment] = 0

    def touch(self, location: int, *, before: int, now: int) -> None:
        """A record last accessed at tick `before` was accessed at `now`."""
        self._access_sum[location_segment(location)] += location_pages(location) * (now - before)

    def touch_many(self, locations: U64, *, before: U32, now: int) -> None:
        """`touch` for arrays."""
        gain = location_page_counts(locations) * (now - before.astype(np.int64))
        np.add.at(self._access_sum, location_segments(locations), gain)

    def mean_access(self) -> npt.NDArray[np.float64]:
        """Mean tick of the live bytes of each segment; NaN without any."""
        with np.errstate(invalid="ignore"):
            return np.divide(self._access_sum, self.live_pages)

    def means(self, segment: int) -> tuple[int, float, float]:
        """Live pages of a segment, and the mean tick and depth of its live bytes, 0 without any."""
        live_pages, _, access_sum, depth_sum = self._scalars
        pages = live_pages[segment]
        return (pages, access_sum[segment] / pages, depth_sum[segment] / pages) if pages else (0, 0.0, 0.0)

    def _account(self, location: int, tick: int, sign: int) -> None:
        segment, pages = location_segment(location), location_pages(location) * sign
        live_pages, live_records, access_sum, depth_sum = self._scalars
        live_pages[segment] += pages
        live_records[segment] += sign
        access_sum[segment] += pages * tick
        depth_sum[segment] += pages * location_depth(location)

    def _account_many(self, locations: U64, ticks: U32, sign: int) -> None:
        segments, pages = location_segments(locations), location_page_counts(locations) * sign
        np.add.at(self.live_pages, segments, pages)
        np.add.at(self.live_records, segments, sign)
        np.add.at(self._access_sum, segments, pages * ticks)
        np.add.at(self._depth_sum, segments, pages * location_depths(locations))


def choose_victim(scores: SegmentScores, candidates: I64) -> int | None:
    """The segment to evict: the one whose live bytes are worth least, counted from the coldest segment's mean tick.

    Warmth is linear in the tick and dead space has none, so a warm segment that is mostly dead may go before a cold
    one that is full. Of equals the deeper goes first, then the earlier in `candidates`.

    Scalars, not columns: a put's bytes have gone through the CPU's caches since the last eviction, and a dozen calls of
    numpy on cold caches take longer than a loop over the segments of any but huge drives, which evict rarely.

    Args:
        candidates: sealed segments that nothing forbids to evict, oldest first.
    """
    means = [scores.means(segment) for segment in candidates.tolist()]
    coldest = min((access for pages, access, _ in means if pages), default=0.0)
    best: int | None = None
    least, deepest = 0.0, 0.0
    for at, (pages, access, depth) in enumerate(means):
        value = pages * (access - coldest + 1)
        if best is None or value < least or (value == least and depth > deepest):
            best, least, deepest = at, value, depth
    return None if best is None else int(candidates[best])


def records_to_keep(locations: U64, ticks: U32, pinned: Bools, *, eviction_tick: float, budget_bytes: int) -> I64:
    """Which live records of a victim are written again elsewhere.

    Pinned records all stay: a victim with more of them than `WriteBudget.affords` is not evicted. Others stay if they
    were accessed after `eviction_tick`, heads first (a prefix without its head is worth nothing), while the budget
    lasts.

    Args:
        locations, ticks, pinned: shape [n], of the victim's live records.
        eviction_tick: records accessed at this tick or before would be among the next to go anyway.
        budget_bytes: what the write-amplification bound allows now.

    Returns:
        Positions to re-insert, in the order to write them.
    """
    depths = location_depths(locations)
    sizes = location_page_counts(locations) * PAGE_BYTES
    wanted = np.flatnonzero(pinned | (ticks > eviction_tick))
    order = wanted[np.lexsort((-ticks[wanted].astype(np.int64), depths[wanted], ~pinned[wanted]))]
    spent = np.cumsum(sizes[order])
    return order[pinned[order] | (spent <= budget_bytes)]


def eviction_tick(scores: SegmentScores, victim: int, candidates: I64) -> float:
    """The tick that a record of `victim` must be younger than to be worth writing again.

    That is the mean of what goes now or of what goes next, whichever is younger: keeping less than that would only
    postpone its eviction by one segment.
    """
    following = choose_victim(scores, candidates[candidates != victim])
    means = [scores.means(segment) for segment in (victim, following) if segment is not None]
    return max((access for pages, access, _ in means if pages), default=0.0)


class WriteBudget:
    """Bounds write amplification: re-insertion may write (bound - 1) bytes for each byte written by users.

    Unused allowance is kept up to `saved_bytes_max`, so that a quiet hour does not end in a storm of re-insertions.
    """

    def __init__(self, *, amplification_max: float, saved_bytes_max: int) -> None:
        self._share = amplification_max - 1.0
        self._saved_max = saved_bytes_max
        self._allowance = 0.0
        self.user_bytes = 0
        self.moved_bytes = 0

    @property
    def amplification(self) -> float:
        """Bytes written to the drive per byte put, since start; 1.0 before the first put."""
        return (self.user_bytes + self.moved_bytes) / self.user_bytes if self.user_bytes else 1.0

    @property
    def allowance_bytes(self) -> int:
        """What may be re-inserted now."""
        return max(0, int(self._allowance))

    def affords(self, moved_bytes: int, *, gained_bytes: int) -> bool:
        """Whether so much may be re-inserted for room that puts will fill: what they will write counts beforehand."""
        return moved_bytes <= self._allowance + gained_bytes * self._share

    def wrote(self, length_bytes: int) -> None:
        """A put wrote so many bytes (padded, with its header)."""
        self.user_bytes += length_bytes
        self._allowance = min(self._allowance + length_bytes * self._share, self._saved_max)

    def moved(self, length_bytes: int) -> None:
        """So many bytes were re-inserted; pinned ones may have gone beyond the allowance, see `affords`."""
        self.moved_bytes += length_bytes
        self._allowance -= length_bytes


class EvictionRest:
    """When nothing is evicted since the drive takes no writes: what a victim held is forgotten before it is erased.

    A drive that has turned read-only would lose all that it can still serve in no time. One segment that cannot be
    erased says nothing of the others; after a second one in a row the next waits, and longer each time.

    Attributes:
        failed: what the drive failed with, until its log has been written to again; None for a lack of space.
        unerased: victims in a row that the drive would not erase.
        is_on_trial: such victims stand between the drive and puts, and the wait for the next is over: it is evicted
            when puts need room, and is the only one that can tell how the drive is now.
    """

    def __init__(self) -> None:
        self.failed: OSError | None = None
        self.unerased = 0
        self.is_on_trial = False
        self._erase_failed: OSError | None = None
        self._until_ns = 0

    @property
    def fault(self) -> str:
        """What is wrong with the drive, for people, until it takes writes again; "" while it does."""
        if self.failed is not None:
            return str(self.failed)
        if self.unerased < _UNERASED_MAX:
            return ""
        return f"the last {self.unerased} segments that were to make room were not erased ({self._erase_failed})"

    def why(
        self,
        failed: OSError | None,
        *,
        is_log_idle: bool,
        unerased: int,
        erase_failed: OSError | None,
        now_ns: int,
    ) -> str:
        """Why nothing may be evicted now, for people; "" when it may.

        Args:
            failed: what stopped the log, or kept a segment from being made. A lack of space is answered by evicting.
            is_log_idle: what was to be written to it is: one that is tried again after a failure works.
            unerased: victims in a row that the drive would not erase.
            erase_failed: why not, of the last.
        """
        if failed is not None and failed.errno not in NO_SPACE_ERRORS:
            self.failed = failed
        elif is_log_idle or failed is not None:
            self.failed = None
        if unerased != self.unerased:
            self.unerased, self._erase_failed = unerased, erase_failed
            rests = unerased - _UNERASED_MAX
            wait_ns = min(SPACE_RETRY_NS_MIN << min(rests, 16), SPACE_RETRY_NS_MAX) if rests >= 0 else 0
            self._until_ns = now_ns + wait_ns
        may_evict = self.failed is None and now_ns >= self._until_ns
        self.is_on_trial = may_evict and self.unerased >= _UNERASED_MAX
        if may_evict:
            return ""
        return f"the drive takes no writes: {self.fault}; replace the drive"


class Ancestors:
    """Recent keys and their parents, so that a put keeps the whole chain before it as warm as itself.

    Bounded: the oldest keys are forgotten. Each key carries the tick of its last walk, so a chain that is put chunk by
    chunk within one tick is walked only as far as it is new.
    """

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._parents: OrderedDict[int, tuple[int, int]] = OrderedDict()  # key -> (parent, tick of the last walk)

    def __len__(self) -> int:
        return len(self._parents)

    def put(self, key: int, parent: int, tick: int) -> list[int]:
        """Remember a key that was put with its parent, and say which ancestors this touches, nearest first.

        Args:
            key, parent: index keys as 128-bit integers; parent 0 for none.
        """
        self._parents[key] = (parent, tick)
        self._parents.move_to_end(key)
        if len(self._parents) > self._entries_max:
            self._parents.popitem(last=False)
        touched: list[int] = []
        while parent:
            touched.append(parent)
            known = self._parents.get(parent)
            if known is None or known[1] == tick:
                break
            self._parents[parent] = (known[0], tick)
            parent = known[0]
        return touched

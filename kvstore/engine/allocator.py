"""Where the next record goes, and how much of the drive may be used: capacity, space, the open segment."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from kvstore.device.base import Device
from kvstore.engine.format import Entries, record_page_count
from kvstore.engine.logrecord import COMMITS_PER_BLOCK
from kvstore.engine.policy import NO_SPACE_ERRORS
from kvstore.engine.segment import OpenSegment, SegmentState, SegmentTable
from kvstore.limits import (
    CHECKSUM_BYTES_MIN,
    LOG_SHARE_COMMITS,
    PAGE_BYTES,
    PAYLOAD_BYTES_MAX,
    SEGMENTS_CLOSING_MAX,
    SEGMENTS_ON_DRIVE_MIN,
    SPACE_RETRY_NS_MAX,
    SPACE_RETRY_NS_MIN,
    MiB,
)

log = logging.getLogger(__name__)

# bound once: reading a member of an enum costs as much as ten other attribute reads, and each turn asks
_FREE: Final = int(SegmentState.FREE)
_SEALED: Final = int(SegmentState.SEALED)
_UNALLOCATED: Final = int(SegmentState.UNALLOCATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Room for some records, side by side."""

    target: OpenSegment
    page: int
    count: int


def payload_bytes_max(segment_bytes: int) -> int:
    """The longest payload that a segment of this size takes, whatever its checksum blocks, within PAYLOAD_BYTES_MAX."""
    room = segment_bytes // PAGE_BYTES - 3  # header page, one index block, footer page
    payload = min((room - 1) * PAGE_BYTES, PAYLOAD_BYTES_MAX)
    while record_page_count(payload, CHECKSUM_BYTES_MIN) > room:
        payload -= PAGE_BYTES
    return payload


class Allocator:
    """Hands out room in ascending order of (segment generation, page).

    Attributes:
        open: the segment that is being filled, None before the first record or while there is no free one.
        closing: full segments that wait for their last records, then for their index.
        unsealed: segments that the drive would not take the index of.
        next_generation: of the next segment to be opened.
        segments_max: segments that may have space on the drive: all within the capacity, fewer while the file system
            is full.
        move_pages: room of the open segment that only records moved out of a victim may take.
        moving: a victim's records are on their way into that room.
        spare_pages: how much that is while no segment is free.
        failed: why the drive gave no space last time, when that was no lack of it, as on a file system that has turned
            read-only. None while it gives some.
    """

    def __init__(self, device: Device, table: SegmentTable, *, log_half_bytes: int, next_generation: int) -> None:
        self._device = device
        self.table = table
        self.open: OpenSegment | None = None
        self.closing: list[OpenSegment] = []
        self.unsealed: list[OpenSegment] = []
        self.next_generation = next_generation
        self.segments_max = table.count
        self.move_pages = 0
        self.moving = False
        self.spare_pages = 0
        # All commits of open and closing segments must fit the log beside tombstones and namespaces.
        self._entries_max = max(int(log_half_bytes // PAGE_BYTES * LOG_SHARE_COMMITS), 1) * COMMITS_PER_BLOCK
        self._closing_max = min(SEGMENTS_CLOSING_MAX, max(table.count // 4, 1))
        self._retry_ns = 0
        self._retry_wait_ns = SPACE_RETRY_NS_MIN
        self.space_errors = 0
        self.failed: OSError | None = None

    # --- room -------------------------------------------------------------------------------------------------------
    def place(self, pages: int, *, count: int = 1, moving: bool = False) -> Stretch | None:
        """Room in the open segment, None where it has none.

        Args:
            pages: of a whole record.
            count: of records of this size; room may be given for fewer.
            moving: for a record of a victim, which may use the room kept for those.
        """
        target = self.open
        if target is None or target.failed:
            return None
        count = min(count, self._entries_max - self._entries_logged())
        # A put longer than what the spare room leaves would never find a place, however much is evicted for it.
        kept = 0 if moving or (target.untouched and not self.moving) else self.move_pages
        while count > 0:
            room_pages = target.room_pages(self.table.segment_pages, count) - kept
            if room_pages >= pages * count:
                break
            count = min(count - 1, max(room_pages // pages, 1))
        else:
            return None
        page = target.next_page
        target.next_page = page + pages * count
        target.outstanding += count
        return Stretch(target=target, page=page, count=count)

    def _entries_logged(self) -> int:
        """Commits that a checkpoint carries, and those that will come."""
        total = sum(one.entry_count + one.outstanding for one in self.closing) if self.closing else 0
        return total + (self.open.entry_count + self.open.outstanding if self.open is not None else 0)

    @property
    def crowded(self) -> bool:
        """Closing segments take all that the log, or their number, allows: the oldest one must end."""
        many = len(self.closing) >= self._closing_max
        return bool(self.closing) and (many or self._entries_logged() >= self._entries_max)

    def watermark(self) -> tuple[int, int]:
        """(generation, page) of the last room handed out: every record placed from now on lies behind it."""
        if self.open is not None:
            return self.open.generation, self.open.next_page - 1
        return self.next_generation - 1, self.table.segment_pages

    def open_room_pages(self) -> int:
        """Pages left in the open segment."""
        return max(self.open.room_pages(self.table.segment_pages), 0) if self.open is not None else 0

    def close_open(self) -> None:
        """The open segment takes no more; it is sealed once its records in progress are done."""
        if self.open is not None:
            self.table.set_state(self.open.segment, SegmentState.CLOSING)
            self.closing.append(self.open)
            self.open = None
            if not self.moving:
                self.move_pages = 0

    def open_next(self) -> OpenSegment | None:
        """Begin a new segment in place of the open one; None when none is free, or too many are closing.

        The caller writes its header page.
        """
        if self.open is not None and (self.crowded or (self.open.untouched and not self.open.failed)):
            return None
        segment = self._free_segment()
        if segment is None:
            return None
        self.close_open()
        target = OpenSegment(segment, self.next_generation)
        self.next_generation += 1
        self.table.set_state(segment, SegmentState.OPEN)
        self.table.generation[segment] = target.generation
        self.open = target
        if not self.moving:
            self.keep_spare_room()
        return target

    def keep_spare_room(self) -> None:
        """While no segment is free, puts leave room for what the next eviction keeps."""
        scarce = self.table.in_state_count[_SEALED] and not self.free_count()
        self.move_pages = self.spare_pages if scarce else 0

    def _free_segment(self) -> int | None:
        if self.table.in_state_count[_FREE]:  # the scan costs 30 us, and puts that wait ask in every turn
            return int(self.table.in_state(SegmentState.FREE)[0])
        if self.allocated_segments() >= self.segments_max:
            return None
        fresh = self.table.in_state(SegmentState.UNALLOCATED)
        return int(fresh[0]) if len(fresh) and self._allocate(int(fresh[0])) else None

    def free_count(self) -> int:
        """Segments that could be opened now, as far as is known."""
        counts = self.table.in_state_count
        free, unallocated = counts[_FREE], counts[_UNALLOCATED]
        room = self.segments_max - self.table.count + unallocated
        return free + min(unallocated, room) if room > 0 else free

    def opened(self, segment: int) -> OpenSegment | None:
        """The open or closing segment with this number."""
        for target in (self.open, *self.closing):
            if target is not None and target.segment == segment:
                return target
        return None

    # --- space --------------------------------------------------------------------------------------------------------
    def allocated_segments(self) -> int:
        """Segments with space on the drive."""
        return self.table.count - self.table.in_state_count[_UNALLOCATED]

    def _allocate(self, segment: int) -> bool:
        if self._reserve(segment):
            return True
        if self.failed is None:
            self.space_lost()
        return False

    def _reserve(self, segment: int) -> bool:
        """Take space for a segment; False where there is none, or the drive `failed`."""
        try:
            self._device.allocate(self.table.offset(segment), self.table.segment_bytes)
        except OSError as error:
            self.failed = None if error.errno in NO_SPACE_ERRORS else error
            if self.failed is None:
                self._give_back(segment)  # fallocate may have reserved part of it
            return False
        self.failed = None
        self.table.set_state(segment, SegmentState.FREE)
        return True

    def space_lost(self) -> None:
        """The file system is full: use what is allocated, less one segment that stays free for others."""
        self.space_errors += 1
        allocated = self.allocated_segments()
        was_whole = self.segments_max >= self.table.count
        reserve = 1 if allocated > SEGMENTS_ON_DRIVE_MIN else 0
        self.segments_max = min(allocated - reserve, self.segments_max)
        self._retry_ns = 0
        if was_whole and self.is_short_of_space:
            log.warning(
                "the file system is full: %d of %d segments of %d MiB may be used now, and more is evicted; free space "
                "on it, or lower the capacity",
                self.segments_max,
                self.table.count,
                self.table.segment_bytes // MiB,
            )

    @property
    def is_short_of_space(self) -> bool:
        """Whether the file system is full, so that less than the capacity can be used."""
        return self.segments_max < self.table.count

    @property
    def over(self) -> int:
        """Segments that have space beyond what may be used now."""
        return max(0, self.allocated_segments() - self.segments_max)

    def retry_space(self, now_ns: int) -> None:
        """Use one more segment again every so often, in case the file system has room; failing makes it rarer.

        After a failure of the drive the first that may have space is tried each time.
        """
        if self.failed is not None:
            self.failed = None
            if self.allocated_segments() < self.segments_max:
                self._free_segment()
            return
        if self.segments_max >= self.table.count:
            self._retry_ns = 0
            return
        if self._retry_ns == 0:
            self._retry_ns = now_ns + self._retry_wait_ns
            self._retry_wait_ns = min(2 * self._retry_wait_ns, SPACE_RETRY_NS_MAX)
            return
        if now_ns < self._retry_ns or self.over:
            return
        self._retry_ns = now_ns + self._retry_wait_ns
        fresh = self.table.in_state(SegmentState.UNALLOCATED)[:2].tolist()
        # The second is a probe: what is taken must leave a segment's worth of space to others, as `space_lost` does.
        taken = [segment for segment in fresh if self._reserve(segment)]
        for segment in taken[1:] if len(taken) == len(fresh) else taken:
            self._give_back(segment)
        if taken and len(taken) == len(fresh):
            self.segments_max = min(self.allocated_segments(), self.table.count)
            self._retry_wait_ns = SPACE_RETRY_NS_MIN
            self._retry_ns = now_ns + SPACE_RETRY_NS_MIN

    def next_retry_ns(self) -> int | None:
        """When `retry_space` has something to do."""
        return self._retry_ns if self.segments_max < self.table.count and self._retry_ns else None

    def freed(self, segment: int) -> None:
        """A segment holds nothing valid any more: keep its space, or give it back where there is too much."""
        self.unsealed = [target for target in self.unsealed if target.segment != segment]
        self.table.generation[segment] = 0
        self.table.set_state(segment, SegmentState.FREE)
        if self.over:
            self._give_back(segment)

    def entries_of_unsealed(self, segment: int) -> Entries | None:
        """The records of a segment of `unsealed`, which its own index does not list, or not all; None for others."""
        return next((target.entries() for target in self.unsealed if target.segment == segment), None)

    def shrink(self) -> None:
        """Give free segments back while more have space than may."""
        for segment in self.table.in_state(SegmentState.FREE).tolist():
            if not self.over:
                return
            self._give_back(segment)

    def _give_back(self, segment: int) -> None:
        try:
            self._device.discard(self.table.offset(segment), self.table.segment_bytes)
        except OSError:
            # The space stays with the file, which is no loss: the segment is used again before a new one is allocated.
            self.table.set_state(segment, SegmentState.FREE)
            return
        self.table.set_state(segment, SegmentState.UNALLOCATED)


assert payload_bytes_max(1 * MiB) > 900 * 1024

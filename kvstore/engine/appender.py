"""Records on their way to the drive: placed in the open segment, joined with neighbours, written, logged.

append -> placed -> one device write for neighbours -> commit record in the log -> `Append.completed`
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from kvstore.device.base import IoKind, IoOp, UrgentWrite
from kvstore.engine.allocator import Allocator
from kvstore.engine.blocking import pages as fresh_pages
from kvstore.engine.format import SegmentHeader, Superblock, encode_segment_header
from kvstore.engine.job import IoQueue, Syncer, io
from kvstore.engine.ledger import Ledger
from kvstore.engine.logrecord import encode_commits
from kvstore.engine.put import Append
from kvstore.engine.segment import OpenSegment, SegmentTable
from kvstore.limits import IO_VECTORS_MAX, PAGE_BYTES, WRITE_ATTEMPTS_MAX, WRITE_JOIN_BYTES_MAX
from kvstore.telemetry.metrics import EngineMetrics
from kvstore.types.flow import FlowClass
from kvstore.types.results import Refused, RefusedReason

_JOINED_MAX: Final = (IO_VECTORS_MAX - 1) // 2  # records in one write: header and payload of each


class Appender:
    """Writes complete records of puts and of eviction.

    Attributes:
        needs_room: records wait for a segment to come free.
        in_flight: appends being written.
    """

    def __init__(
        self,
        *,
        queue: IoQueue,
        syncer: Syncer,
        allocator: Allocator,
        ledger: Ledger,
        superblock: Superblock,
        metrics: EngineMetrics,
        on_closed: Callable[[OpenSegment], None],
    ) -> None:
        """Assemble. `on_closed`: a closing segment has no record in progress any more, seal it."""
        self.queue = queue
        self.allocator = allocator
        self.ledger = ledger
        self.needs_room = False
        self.in_flight = 0
        self._syncer = syncer
        self._table: SegmentTable = allocator.table
        self._superblock = superblock
        self._metrics = metrics
        self._on_closed = on_closed
        self._ready: deque[Append] = deque()
        self._moves: deque[Append] = deque()

    # --- placing ----------------------------------------------------------------------------------------------------
    def append(self, item: Append) -> None:
        """A complete record, header encoded but for its place: written by the next `pump`."""
        (self._moves if item.moving else self._ready).append(item)

    @property
    def backlog(self) -> int:
        """Appends that are complete and have no place yet."""
        return len(self._ready) + len(self._moves)

    def pump(self) -> None:
        """Place what is complete, as far as there is room, and send it to the drive, neighbours in one write."""
        self.needs_room = False
        for waiting in (self._moves, self._ready):
            if not waiting:
                continue
            if len(waiting) > 1 and not waiting[0].moving:
                _order_runs(waiting)
            group: list[Append] = []
            group_bytes = 0
            group_count = 0
            while waiting:
                item = self._place_first(waiting)
                if item is None:
                    if waiting is self._moves:
                        self._give_up_moves()
                    break
                length = item.pages * PAGE_BYTES
                if group and (
                    not _adjoin(group[-1], item)
                    or group_bytes + length > WRITE_JOIN_BYTES_MAX
                    or group_count + item.count > _JOINED_MAX
                ):
                    self._submit(group)
                    group, group_bytes, group_count = [], 0, 0
                group.append(item)
                group_bytes += length
                group_count += item.count
            if group:
                self._submit(group)

    def _give_up_moves(self) -> None:
        """Room for a victim's records was kept in the open segment: if a failed write closed that, none comes before
        the victim is free, and that waits for these."""
        while self._moves:
            self._moves.popleft().failed(Refused(RefusedReason.NO_SPACE, "the segment with its room failed"))
        self.needs_room = False

    def _place_first(self, waiting: deque[Append]) -> Append | None:
        """Take the first that waits, or the part of it that the open segment has room for; None without room."""
        item = waiting[0]
        placed = self.place(item)
        if not placed:
            return None
        if placed < item.count:
            target, page = item.target, item.page
            item.target = None
            item = item.cut(placed)
            item.target, item.page = target, page
        else:
            waiting.popleft()
        return item

    def place(self, item: Append) -> int:
        """Give records their place, in the next segment if the open one has no room.

        Returns:
            How many of `item.count`, its first ones, have a place now; 0 where there is no room.
        """
        count = item.count
        pages = item.pages // count
        stretch = self.allocator.place(pages, count=count, moving=item.moving)
        if stretch is None and (not item.moving or self.allocator.open is None) and self.open_segment():
            stretch = self.allocator.place(pages, count=count, moving=item.moving)
        if stretch is None:
            self.needs_room = True
            return 0
        item.target, item.page = stretch.target, stretch.page
        return stretch.count

    def open_segment(self) -> bool:
        """Begin the next segment: write its header page."""
        before = self.allocator.open
        target = self.allocator.open_next()
        if before is not None and self.allocator.open is not before and before.outstanding == 0:
            self._on_closed(before)
        if target is None:
            return False
        header = SegmentHeader(
            segment=target.segment,
            generation=target.generation,
            disk_id=self._superblock.disk_id,
            opened_ns=time.time_ns(),
        )
        page = fresh_pages(PAGE_BYTES)
        page[:] = encode_segment_header(header)
        self.queue.submit(
            UrgentWrite(
                self._table.offset(target.segment),
                [page],
                flow=FlowClass.WRITEBACK,
                owner=partial(self._header_written, target),
            )
        )
        self._metrics.log_bytes += PAGE_BYTES
        return True

    def _header_written(self, target: OpenSegment, op: IoOp) -> None:
        if op.error is not None:
            target.failed = True
        target.header_written()

    def _submit(self, group: list[Append]) -> None:
        buffers: list[memoryview] = []
        for item in group:
            item.place_header()
            buffers += item.views()
        first = group[0]
        assert first.target is not None
        self.in_flight += len(group)
        at = self._table.offset(first.target.segment, first.page)
        ops: list[IoOp] = []
        for part in _parts(buffers):
            ops.append(IoOp(IoKind.WRITE, at, part, flow=first.flow))
            at += ops[-1].length_bytes
        io(self.queue, ops)(partial(self._written, group))

    def _written(self, group: list[Append], error: OSError | None) -> None:
        for item in group:
            self.in_flight -= 1
            self.written(item, error)

    # --- committing ---------------------------------------------------------------------------------------------------
    def written(self, item: Append, error: OSError | None) -> None:
        """A record's bytes reached the drive, or did not."""
        target = item.target
        assert target is not None
        if error is not None:
            self._write_failed(item, target, error)
        elif item.power:
            self._syncer.sync(lambda failed: self._log_when_ready(item, target, failed))
        else:
            self._log_when_ready(item, target, None)

    def _log_when_ready(self, item: Append, target: OpenSegment, error: OSError | None) -> None:
        if error is not None:
            self._write_failed(item, target, error)
        elif target.ready:
            self._log(item, target)
        else:
            target.when_ready(lambda: self._log(item, target))

    def _log(self, item: Append, target: OpenSegment) -> None:
        if target.failed and not target.entry_count:
            self._write_failed(item, target, OSError(errno.EIO, "the segment's header page was not written"))
            return
        if not item.wanted():
            item.failed(Refused(RefusedReason.OUTCOME_UNKNOWN, "the record ended while it was moved"))
            self.left(target, item.count)
            return
        entry = item.entry(self.ledger.tick)
        records = encode_commits(target.segment, target.generation, entry)
        self.ledger.log.append(records, partial(self._logged, item, target, entry), sync=item.power)

    def _logged(self, item: Append, target: OpenSegment, entry: bytes, error: OSError | None) -> None:
        count, listed = item.count, target.entry_count
        if error is None:
            item.completed(entry)
        else:
            item.failed(Refused(RefusedReason.OUTCOME_UNKNOWN, f"the commit record was not confirmed: {error}"))
        target.unlisted += count - (target.entry_count - listed)
        self.left(target, count)

    def sync(self, on_done: Callable[[OSError | None], None]) -> None:
        """Calls back when everything written so far survives a power cut."""
        self._syncer.sync(on_done)

    def left(self, target: OpenSegment, count: int = 1) -> None:
        """Records that had room in a segment are complete or given up."""
        target.outstanding -= count
        if target.outstanding == 0 and target in self.allocator.closing:
            self._on_closed(target)

    def _write_failed(self, item: Append, target: OpenSegment, error: OSError) -> None:
        """Try once more in another segment; the one that failed takes nothing more."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self.allocator.space_lost()
        target.failed = True
        if self.allocator.open is target:
            self.allocator.close_open()
        item.attempts += 1
        if item.attempts < WRITE_ATTEMPTS_MAX and not item.fixed:
            item.target = None
            (self._moves if item.moving else self._ready).appendleft(item)
        else:
            item.failed(Refused(RefusedReason.NO_SPACE, f"the drive failed to write the record: {error}"))
        self.left(target, item.count)

    def refuse_backlog(self, refused: Refused) -> None:
        """End every record that waits for room on the drive: there is none to be had."""
        waiting = [*self._ready, *self._moves]
        self._ready.clear()
        self._moves.clear()
        self.needs_room = False
        for item in waiting:
            item.failed(refused)


def _adjoin(before: Append, after: Append) -> bool:
    """Whether two placed records lie side by side and belong to one flow."""
    return before.target is after.target and before.page + before.pages == after.page and before.flow is after.flow


def _parts(buffers: list[memoryview]) -> list[list[memoryview]]:
    """What is written in one operation each: a long parcel in several, or reads would wait behind all of it."""
    sizes = list(map(len, buffers))
    if sum(sizes) <= WRITE_JOIN_BYTES_MAX:
        return [buffers]
    parts: list[list[memoryview]] = [[]]
    length = 0
    for size, buffer in zip(sizes, buffers, strict=True):
        if length + size > WRITE_JOIN_BYTES_MAX and parts[-1]:
            parts.append([])
            length = 0
        parts[-1].append(buffer)
        length += size
    return parts


def _order_runs(waiting: deque[Append]) -> None:
    """Bring records of one run together, in the order of their runs' first arrival and their own positions."""
    first: dict[bytes, int] = {}
    placed: list[tuple[int, int, Append]] = []
    for item in waiting:
        run = item.run
        if run is None:
            return
        placed.append((first.setdefault(run[0], len(first)), run[1], item))
    if len(first) == len(placed):
        return
    placed.sort(key=lambda one: one[:2])
    waiting.clear()
    waiting.extend([item for _, _, item in placed])

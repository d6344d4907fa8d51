"""The disk side of the engine, assembled: recovered from a drive, driven by `poll`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from kvstore.device.base import Device, IoOp
from kvstore.engine.allocator import Allocator
from kvstore.engine.appender import Appender
from kvstore.engine.arena import Arena
from kvstore.engine.blocking import BlockingIo
from kvstore.engine.catalog import Catalog
from kvstore.engine.format import (
    SegmentFooter,
    SegmentHeader,
    Superblock,
    encode_segment_footer,
    encode_segment_header,
)
from kvstore.engine.graves import Graves
from kvstore.engine.heads import HeadReader
from kvstore.engine.job import Syncer, start
from kvstore.engine.ledger import Ledger, RecordWatcher, entry_locations
from kvstore.engine.log import Log
from kvstore.engine.logrecord import encode_tombstone
from kvstore.engine.namespaces import NamespaceTable
from kvstore.engine.policy import EvictionRest, WriteBudget
from kvstore.engine.reclaim import Reclaimer
from kvstore.engine.recovery import FoundSegment, LogScan, scan_log, scan_segments, valid_records
from kvstore.engine.scrub import Scrubber
from kvstore.engine.seal import Sealer
from kvstore.engine.segment import OpenSegment, SegmentState, SegmentTable
from kvstore.engine.trim import Trimmer
from kvstore.engine.walk import Walker
from kvstore.engine.writer import MemorySide, Writer
from kvstore.limits import (
    EVICT_AHEAD_SEGMENTS_MIN,
    LOG_SHARE_MANIFESTS,
    LOG_SHARE_TOMBSTONES,
    MOVE_SHARE_MAX,
    MOVE_SHARE_OF_SEGMENT,
    MS_NS,
    OWNER_SWEEP_NS,
    SPACE_RETRY_NS_MIN,
    WRITE_AMPLIFICATION_DEFAULT,
)
from kvstore.telemetry.metrics import EngineMetrics
from kvstore.types.flow import FlowClass
from kvstore.types.results import Refused, RefusedReason

_log = logging.getLogger(__name__)

# bound once: reading a member of an enum costs as much as ten other attribute reads, and each turn asks
_BAD: Final = int(SegmentState.BAD)
_BACKGROUND: Final = FlowClass.BACKGROUND


class DriveQueue(Protocol):
    """The dispatch queue of a drive: `kvstore.device.queue.DispatchQueue`."""

    @property
    def device(self) -> Device: ...

    @property
    def queued(self) -> int: ...

    def submit(self, op: IoOp) -> None: ...

    def start(self) -> None: ...

    def pump(self) -> list[IoOp]: ...


class StoreMemory(MemorySide, RecordWatcher, Protocol):
    """What the disk side asks of the memory side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What the start found.

    Attributes:
        records, live_bytes: valid ones.
        segments: in use.
        bad_log_blocks, bad_index_blocks, bad_headers, bad_footers, bad_manifests: damaged structures, each costing
            only itself.
        orphans, dropped, buried, twins: records passed over, as `ValidRecords` counts them.
        not_indexed: valid records that the index had no room for.
        tick_max: the highest access tick on the drive; ticks go on from there.
        took_ns: duration of the whole start.
    """

    records: int
    live_bytes: int
    segments: int
    bad_log_blocks: int
    bad_index_blocks: int
    bad_headers: int
    bad_footers: int
    bad_manifests: int
    orphans: int
    dropped: int
    buried: int
    twins: int
    not_indexed: int
    tick_max: int
    took_ns: int


class Store:
    """The records of one drive. Made by recovery (it waits for the drive), then driven by `poll` (which never does).

    Attributes:
        superblock, table, allocator, namespaces, ledger, log, appender, writer, reclaimer,
            scrubber, heads, walker: its parts.
        recovered: what the start found.
    """

    def __init__(
        self,
        *,
        queue: DriveQueue,
        superblock: Superblock,
        arena: Arena,
        catalog: Catalog,
        memory: StoreMemory,
        metrics: EngineMetrics,
        amplification_max: float = WRITE_AMPLIFICATION_DEFAULT,
        scrub_bytes_second: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Recover.

        Args:
            superblock: from `drive.prepare_drive`.
            catalog: empty, for `superblock.segment_count` segments.
            amplification_max: bytes written over bytes put that re-insertion may cause.
            scrub_bytes_second: how fast records are verified in the background; 0 is not at all.
            on_progress: told (segments done, segments in all) while the drive is read.

        Raises:
            OSError: the drive cannot be read.
        """
        began_ns = time.monotonic_ns()
        self.superblock = superblock
        self.metrics = metrics
        self._queue = queue
        self._syncer = Syncer(queue)
        io = BlockingIo(queue.device)
        scan = scan_log(io, superblock)
        found = scan_segments(io, superblock, scan, on_progress=on_progress)
        highest = max([scan.highest_generation, *(one.generation for one in found)])
        self.table = SegmentTable(superblock)
        self.allocator = Allocator(
            queue.device, self.table, log_half_bytes=superblock.log_half_bytes, next_generation=highest + 1
        )
        self.namespaces = NamespaceTable(manifest_bytes_max=int(superblock.log_half_bytes * LOG_SHARE_MANIFESTS))
        bad_manifests = self.namespaces.restore(scan.namespaces, scan.drops)
        self.ledger = Ledger(
            catalog=catalog,
            table=self.table,
            allocator=self.allocator,
            namespaces=self.namespaces,
            watcher=memory,
            graves=Graves(log_half_bytes=superblock.log_half_bytes),
        )
        self.log = Log(
            queue,
            self._syncer,
            superblock,
            scan.place,
            snapshot=self.ledger.snapshot,
            segment_generation=lambda: self.allocator.next_generation - 1,
            metrics=metrics,
        )
        self.ledger.attach(self.log)
        self._sealer = Sealer(queue=queue, allocator=self.allocator, superblock=superblock, metrics=metrics)
        budget = WriteBudget(amplification_max=amplification_max, saved_bytes_max=superblock.segment_bytes)
        self.appender = Appender(
            queue=queue,
            syncer=self._syncer,
            allocator=self.allocator,
            ledger=self.ledger,
            superblock=superblock,
            metrics=metrics,
            on_closed=self._seal,
        )
        self.writer = Writer(
            appender=self.appender,
            arena=arena,
            ledger=self.ledger,
            superblock=superblock,
            memory=memory,
            metrics=metrics,
            on_user_bytes=budget.wrote,
        )
        self._rest = EvictionRest()
        self.trimmer = Trimmer(queue=queue, allocator=self.allocator, ledger=self.ledger, metrics=metrics)
        self.reclaimer = Reclaimer(
            queue=queue,
            arena=arena,
            allocator=self.allocator,
            ledger=self.ledger,
            appender=self.appender,
            memory=memory,
            budget=budget,
            metrics=metrics,
        )
        self.scrubber = Scrubber(
            queue=queue, table=self.table, ledger=self.ledger, metrics=metrics, bytes_second=scrub_bytes_second
        )
        self.heads = HeadReader(queue=queue, table=self.table, catalog=catalog)
        self.walker = Walker(
            queue=queue, table=self.table, ledger=self.ledger, allocator=self.allocator, heads=self.heads
        )
        self._next_sweep_ns = 0
        self._revive_ns = self._erase_ns = 0
        self._erased_last = -1
        self.recovered = self._take_over(io, scan, found, bad_manifests, began_ns)

    # --- recovery -----------------------------------------------------------------------------------------------------
    def _take_over(
        self, io: BlockingIo, scan: LogScan, found: list[FoundSegment], bad_manifests: int, began_ns: int
    ) -> RecoveryReport:
        """Fill the tables with what was found, repair headers and footers, and begin to seal what was closing."""
        self.namespaces.reserve_ids(int(one.entries["namespace"].max()) for one in found if len(one.entries))
        for one in found:
            self.table.generation[one.segment] = one.generation
            # what is in one of an unknown use is gone: it is erased before it is used, deletes are kept until then
            self.table.set_state(one.segment, SegmentState.SEALED if one.generation else SegmentState.BAD)
            if one.header_bad:
                self._repair_header(io, one)
            if one.rebuilt is not None and one.sealed and not one.bad_blocks:
                self._repair_footer(io, one.rebuilt)
        generations = {known.ref.id: known.ref.generation for known in self.namespaces}
        valid = valid_records(found, scan.tombstones, generations)
        locations = entry_locations(valid.entries, valid.segments)
        ticks = valid.entries["access"].astype(np.uint32)
        self.ledger.catalog.index.reserve(len(valid.entries))
        taken = self.ledger.load(valid.entries, locations, ticks)
        last_tick = int(ticks.max()) if len(ticks) else 0
        for tombstone in scan.tombstones:
            if tombstone.namespace:
                record = encode_tombstone(tombstone)
                ref = self.namespaces.by_id(tombstone.namespace)
                tenant = ref.tenant if ref is not None else ""
                self.ledger.graves.dig(tombstone.key, tombstone.namespace, last_tick, record, tenant=tenant)
        for segment, record in valid.needed:
            self.ledger.keep_tombstone(segment, record)
        self._reopen(found, scan)
        report = RecoveryReport(
            records=int(taken.sum()),
            live_bytes=self.ledger.live_bytes,
            segments=len(found),
            bad_log_blocks=scan.bad_blocks,
            bad_index_blocks=sum(one.bad_blocks for one in found),
            bad_headers=sum(one.header_bad for one in found),
            bad_footers=sum(one.rebuilt is not None for one in found),
            bad_manifests=bad_manifests,
            orphans=valid.orphans,
            dropped=valid.dropped,
            buried=valid.buried,
            twins=valid.twins,
            not_indexed=int((~taken).sum()),
            tick_max=last_tick,
            took_ns=time.monotonic_ns() - began_ns,
        )
        self.metrics.recovery_ns = report.took_ns
        self.metrics.recovered_records = report.records
        self.metrics.recovery_lost_records = report.orphans + report.not_indexed
        self.metrics.recovery_bad_structures += (
            report.bad_log_blocks + report.bad_index_blocks + report.bad_headers + report.bad_footers + bad_manifests
        )
        took_ms = report.took_ns // MS_NS
        _log.info("recovered %d records of %d bytes in %d ms", report.records, report.live_bytes, took_ms)
        return report

    def _repair_header(self, io: BlockingIo, one: FoundSegment) -> None:
        header = SegmentHeader(
            segment=one.segment, generation=one.generation, disk_id=self.superblock.disk_id, opened_ns=0
        )
        _log.warning("header of segment %d was damaged and is written anew from its footer or the log", one.segment)
        try:
            io.write(self.table.offset(one.segment), encode_segment_header(header))
        except OSError as error:
            _log.warning("header of segment %d cannot be written: %s", one.segment, error)

    def _repair_footer(self, io: BlockingIo, footer: SegmentFooter) -> None:
        _log.warning("footer of segment %d was damaged and is written anew from its index", footer.segment)
        try:
            io.write(self.table.offset(footer.segment, self.table.segment_pages - 1), encode_segment_footer(footer))
        except OSError as error:
            _log.warning("footer of segment %d cannot be written: %s", footer.segment, error)

    def _reopen(self, found: list[FoundSegment], scan: LogScan) -> None:
        """Go on with the segment that was open last; seal the others that have no index yet."""
        unsealed = sorted((one for one in found if not one.sealed and not one.hidden), key=lambda one: one.generation)
        for one in unsealed:
            target = OpenSegment(one.segment, one.generation, next_page=one.end_page)
            target.ready = True
            for entry in one.entries:
                target.add(entry.tobytes())
            # Room must be handed out in the order of generations, so only the newest of all may go on.
            if one.generation == self.allocator.next_generation - 1 and not one.half_sealed:
                self.allocator.open = target
                self.table.set_state(one.segment, SegmentState.OPEN)
            else:
                self.allocator.closing.append(target)
                self.table.set_state(one.segment, SegmentState.CLOSING)
                self._seal(target)

    # --- running -----------------------------------------------------------------------------------------------------
    def poll(self, now_ns: int) -> None:
        """Move everything that can move: completions, placing, the log, eviction."""
        later: list[IoOp] = []
        for op in self._queue.pump():
            if op.flow is _BACKGROUND:
                later.append(op)
            else:
                op.owner(op)
        self.writer.expire_waiting(now_ns)
        if now_ns >= self._next_sweep_ns:
            self._next_sweep_ns = now_ns + OWNER_SWEEP_NS
            self.writer.expire_owners(now_ns)
            self.allocator.retry_space(now_ns)
            self.reclaimer.avoid.clear()
            self.trimmer.forget_barren()
            self._revive_log(now_ns)
            self._erase_again(now_ns)
        self.allocator.spare_pages = self._spare_pages()
        if not self.reclaimer.running:  # it manages that room while it runs
            self.allocator.keep_spare_room()
        self._write_on()
        if later:  # the drive has its next writes before an eviction goes on, which takes a millisecond
            for op in later:
                op.owner(op)
            self._write_on()
        self.writer.grant_waiting()
        self._make_room(now_ns)
        self.scrubber.poll(now_ns)
        self._write_on()

    def _write_on(self) -> None:
        """Give the drive what is complete."""
        self.appender.pump()
        self.log.pump()
        self._queue.start()

    def next_timer_ns(self) -> int | None:
        """When `poll` has something to do even if no operation completes."""
        sweeps = self.writer.pending or self.allocator.next_retry_ns() is not None or self.log.failed is not None
        sweeps = sweeps or self.table.in_state_count[_BAD] > 0 or self.allocator.failed is not None
        times = [self._next_sweep_ns] if sweeps else []
        for due_ns in (self.writer.next_timer_ns(), self.scrubber.next_timer_ns()):
            if due_ns is not None:
                times.append(due_ns)
        return min(times) if times else None

    def _revive_log(self, now_ns: int) -> None:
        """A log that failed is tried again every few seconds, so that writes go on when the drive does."""
        if self.log.failed is None:
            self._revive_ns = 0
        elif self._revive_ns == 0:
            self._revive_ns = now_ns + SPACE_RETRY_NS_MIN
        elif now_ns >= self._revive_ns:
            self._revive_ns = 0
            self.log.revive()

    def _erase_again(self, now_ns: int) -> None:
        """A victim that could not be erased is tried again: while it is there each delete is kept in the log for it."""
        bad = self.allocator.table.in_state(SegmentState.BAD)
        if not len(bad) or self.reclaimer.running:
            return
        if self._erase_ns == 0:
            self._erase_ns = now_ns + SPACE_RETRY_NS_MIN
        elif now_ns >= self._erase_ns:
            self._erase_ns = 0
            later = bad[bad > self._erased_last]  # in turn, or one that never can be would keep the others waiting
            self._erased_last = int(later.min() if len(later) else bad.min())
            self.metrics.erase_retries += 1
            start(self.reclaimer.erase_again(self._erased_last))

    @property
    def idle(self) -> bool:
        """Nothing is on its way to the drive."""
        return (
            not self.appender.backlog
            and not self.appender.in_flight
            and self.log.idle
            and not self.reclaimer.running
            and not self.trimmer.running
            and not self.allocator.closing
        )

    def _seal(self, target: OpenSegment) -> None:
        start(self._sealer.seal(target))

    @property
    def write_fault(self) -> str:
        """What keeps the drive from taking writes, until it has taken some again, for people; "" while it does."""
        error = self.log.failed or self.allocator.failed
        return self._rest.fault if error is None else str(error)

    @property
    def is_on_trial(self) -> bool:
        """Whether only puts can tell that the drive takes writes again, in spite of `write_fault`."""
        return self._rest.is_on_trial and self.log.failed is None and self.allocator.failed is None

    def _make_room(self, now_ns: int) -> None:
        """Evict a segment if room, space or the log asks for it, or what a tenant has above its quota."""
        if self.reclaimer.running or self.trimmer.running:
            return
        why_not = self._rest.why(
            self.log.failed or self.allocator.failed,
            is_log_idle=self.log.idle,
            unerased=self.reclaimer.unerased,
            erase_failed=self.reclaimer.erase_failed,
            now_ns=now_ns,
        )
        if why_not:
            if self.appender.needs_room:
                self.writer.refuse_backlog(Refused(RefusedReason.NO_SPACE, why_not))
            return
        allocator = self.allocator
        if self.appender.needs_room and allocator.crowded and allocator.closing[0].outstanding:
            self.writer.end_writers_of(allocator.closing[0])
        if allocator.over:
            allocator.shrink()
        victim: int | None = None
        if self.ledger.tombstone_bytes > self.superblock.log_half_bytes * LOG_SHARE_TOMBSTONES:
            victim = self.ledger.most_buried()
        short_of_index, self.ledger.index_full = self.ledger.index_full, False
        if victim is None and (allocator.over or short_of_index or self._room_is_short()):
            victim = self.reclaimer.choose()
            if victim is None and self.appender.needs_room:
                self._make_a_candidate()
        if victim is not None:
            start(self.reclaimer.evict(victim))
            return
        crowd = self.trimmer.choose()
        if crowd is not None:
            start(self.trimmer.trim(*crowd))

    def _room_is_short(self) -> bool:
        """No free segment, and the open one is full but for the spare room.

        Drives of many segments have one ahead: the next is freed as soon as the free one is taken, since an eviction's
        reads, writes and sync wait behind what is being put, and puts must not wait for them in turn.
        """
        if self.allocator.free_count():
            return False
        if any(target.outstanding == 0 for target in self.allocator.closing):
            return False  # it is being sealed, and may be colder than all that are
        if self.allocator.segments_max >= EVICT_AHEAD_SEGMENTS_MIN and not self.reclaimer.avoid:
            return True
        return self.appender.needs_room or self.allocator.open_room_pages() <= self._spare_pages()

    def _spare_pages(self) -> int:
        """Room that eviction finds in the open segment for what it keeps."""
        share = MOVE_SHARE_OF_SEGMENT
        pinned = self.ledger.catalog.pinned_bytes
        if pinned:
            # A victim has its share of pinned records, all of which must find room.
            share += min(pinned / (self.table.count * self.table.segment_bytes) * 1.25, MOVE_SHARE_MAX - share)
        return int(self.table.segment_pages * share)

    def _make_a_candidate(self) -> None:
        """Records wait for room and nothing can be evicted: the open segment can, once sealed; else refuse them."""
        allocator = self.allocator
        if allocator.closing or self.appender.in_flight or not self.log.idle:
            return  # something in progress may help
        target = allocator.open
        if target is not None and not self.reclaimer.avoid:
            allocator.close_open()
            if target.outstanding == 0:
                self._seal(target)
            return
        if self.reclaimer.avoid:
            why = (
                f"{self.ledger.catalog.pinned_bytes} bytes are pinned, and moving them for room would write more than "
                "the bound allows; put it again when pins have ended, pin less, or raise the capacity"
            )
            self.writer.refuse_backlog(Refused(RefusedReason.NO_SPACE, why))
            return
        self.writer.refuse_backlog(
            Refused(
                RefusedReason.NO_SPACE,
                f"no segment of the drive's {self.table.count} can be freed, {self.allocator.segments_max} may have "
                "space now; free space on the file system, or lower the capacity",
            )
        )

    def update_gauges(self) -> None:
        """Bring the gauges of the disk side up to date."""
        metrics = self.metrics
        table = self.table
        metrics.capacity_bytes = self.superblock.segments_offset + self.allocator.segments_max * table.segment_bytes
        metrics.allocated_bytes = self._queue.device.allocated_bytes()
        metrics.live_bytes = self.ledger.live_bytes
        metrics.namespaces = len(self.namespaces)
        free = self.allocator.free_count()
        metrics.segments_free = free
        metrics.segments_bad = table.in_state_count[SegmentState.BAD]
        metrics.segments_used = table.count - free - metrics.segments_bad
        metrics.write_amplification = self.reclaimer.budget.amplification

"""Scrub: every record is read and verified now and then, slowly, so that rot is found before a reader finds it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore.device.base import IoKind, IoOp
from kvstore.engine.blocking import pages
from kvstore.engine.format import Entries, entry_spaces
from kvstore.engine.job import IoQueue, Steps, io, start
from kvstore.engine.ledger import Ledger, entry_keys, entry_locations
from kvstore.engine.location import I64, Bools
from kvstore.engine.sealed import read_index
from kvstore.engine.segment import SegmentState, SegmentTable
from kvstore.engine.soundness import why_unsound
from kvstore.limits import PAGE_BYTES, READ_COALESCE_BYTES, SCRUB_REST_NS, SECOND_NS
from kvstore.telemetry.metrics import EngineMetrics
from kvstore.types.flow import FlowClass

_log = logging.getLogger(__name__)


class Scrubber:
    """Walks the sealed segments, oldest first, over and over; a record that is bad twice is quarantined.

    Attributes:
        bytes_second: how fast; 0 stops it. May be changed at any time.
        running: a round is in progress.
        round_errors: bad records of the present or last round.
    """

    def __init__(
        self,
        *,
        queue: IoQueue,
        table: SegmentTable,
        ledger: Ledger,
        metrics: EngineMetrics,
        bytes_second: int,
    ) -> None:
        self._queue = queue
        self._table = table
        self._ledger = ledger
        self._metrics = metrics
        self.bytes_second = bytes_second
        self.running = False
        self.round_errors = 0
        self._now_ns = 0
        self._due_ns = 0
        self._resume: Callable[[], None] | None = None
        self._in_a_hurry = False
        self._on_end: list[Callable[[int], None]] = []

    # --- time -----------------------------------------------------------------------------------------------------
    def poll(self, now_ns: int) -> None:
        """Go on, if it is time."""
        self._now_ns = now_ns
        if self._resume is not None:
            if now_ns >= self._due_ns or self._in_a_hurry:
                resume, self._resume = self._resume, None
                resume()
        elif not self.running and (self._in_a_hurry or (self.bytes_second and now_ns >= self._due_ns)):
            self.running = True
            start(self._round(), self._ended)

    def next_timer_ns(self) -> int | None:
        """When `poll` has something to do."""
        if self._in_a_hurry and (self._resume is not None or not self.running):
            return self._now_ns
        if self._resume is not None or (not self.running and self.bytes_second):
            return self._due_ns
        return None

    def run_now(self, on_end: Callable[[int], None]) -> None:
        """Finish the present round, or make one, as fast as the drive allows; calls back with its bad records."""
        self._in_a_hurry = True
        self._on_end.append(on_end)

    def start_round(self, *, bytes_second: int) -> bool:
        """Begin a round at the next `poll`, at that speed from now on; 0 is as fast as the drive allows, once.

        Returns:
            False when a round was in progress; it goes on.
        """
        was_running = self.running
        if bytes_second:
            self.bytes_second = bytes_second
            self._due_ns = min(self._due_ns, self._now_ns)
        else:
            self._in_a_hurry = True
        return not was_running

    def _ended(self) -> None:
        self.running = False
        self._in_a_hurry = False
        self._metrics.scrub_rounds += 1
        self._due_ns = self._now_ns + SCRUB_REST_NS
        callers, self._on_end = self._on_end, []
        for caller in callers:
            caller(self.round_errors)

    def _pace(self, length_bytes: int) -> Callable[[Callable[[None], None]], None]:
        """Wait until so many bytes are paid for."""

        def begin(resume: Callable[[None], None]) -> None:
            speed = self.bytes_second
            self._due_ns = max(self._due_ns, self._now_ns) + (length_bytes * SECOND_NS // speed if speed else 0)
            self._resume = lambda: resume(None)

        return begin

    # --- a round --------------------------------------------------------------------------------------------------
    def _round(self) -> Steps[None]:
        self.round_errors = 0
        segments = self._table.in_state(SegmentState.SEALED).tolist()
        generations = [int(self._table.generation[segment]) for segment in segments]
        for at, (segment, generation) in enumerate(zip(segments, generations, strict=True)):
            self._metrics.scrub_progress = at / len(segments)
            if self._is_still(segment, generation):
                yield from self._segment(segment, generation)
        self._metrics.scrub_progress = 1.0

    def _is_still(self, segment: int, generation: int) -> bool:
        return bool(
            self._table.state[segment] == SegmentState.SEALED and int(self._table.generation[segment]) == generation
        )

    def _segment(self, segment: int, generation: int) -> Steps[None]:
        entries, _ = yield from read_index(self._queue, self._table, segment)
        yield self._pace(PAGE_BYTES)
        entries = entries[entries["page"].argsort(kind="stable")]
        at = 0
        while at < len(entries):
            end = _stretch(entries, at)
            part = entries[at:end]
            length = int(part["pages"].astype("i8").sum()) * PAGE_BYTES
            yield self._pace(length)
            if self._is_still(segment, generation):
                # Held only for the read: eviction must not wait for the pace.
                self._table.hold(segment)
                yield from self._records(segment, generation, part, length)
                self._table.release(segment)
            at = end

    def _records(self, segment: int, generation: int, part: Entries, length_bytes: int) -> Steps[None]:
        """Verify neighbours, read in one I/O."""
        buffer = pages(length_bytes)
        first = int(part["page"][0])
        op = IoOp(IoKind.READ, self._table.offset(segment, first), [buffer], flow=FlowClass.BACKGROUND)
        error: OSError | None = yield io(self._queue, [op])
        count = self._count(segment, part)
        for at in range(len(part)):
            if not count[at]:
                continue
            entry = part[at : at + 1]
            begin = (int(entry["page"][0]) - first) * PAGE_BYTES
            end = begin + int(entry["pages"][0]) * PAGE_BYTES
            why = str(error) if error is not None else self._why_unsound(buffer[begin:end], entry, segment, generation)
            if why is not None:
                why = yield from self._read_again(segment, generation, entry)
            if why is not None and self._count(segment, entry)[0]:
                self._quarantine(segment, entry, why)
            self._metrics.scrubbed_records += 1
            self._metrics.scrubbed_bytes += end - begin

    def _count(self, segment: int, entries: Entries) -> Bools:
        """Which records can be read: those of a dropped namespace stay in the index, and bear its older generation."""
        valid = self._ledger.catalog.valid(entry_keys(entries), entry_locations(entries, segment))
        return valid & self._ledger.live_spaces(entry_spaces(entries))

    def _read_again(self, segment: int, generation: int, entry: Entries) -> Steps[str | None]:
        """What is wrong on a second look at one record alone."""
        buffer = pages(int(entry["pages"][0]) * PAGE_BYTES)
        at = self._table.offset(segment, int(entry["page"][0]))
        op = IoOp(IoKind.READ, at, [buffer], flow=FlowClass.BACKGROUND)
        error = yield io(self._queue, [op])
        return str(error) if error is not None else self._why_unsound(buffer, entry, segment, generation)

    def _why_unsound(self, data: memoryview, entry: Entries, segment: int, generation: int) -> str | None:
        ref = self._ledger.namespaces.by_id(int(entry["namespace"][0]))
        return why_unsound(data, entry, segment=segment, generation=generation, ref=ref)

    def _quarantine(self, segment: int, entry: Entries, why: str) -> None:
        ref = self._ledger.namespaces.by_id(int(entry["namespace"][0]))
        if ref is None or not self._ledger.quarantine(ref, entry_keys(entry), entry_locations(entry, segment)):
            return
        self.round_errors += 1
        self._metrics.scrub_errors += 1
        self._metrics.checksum_errors_read += 1
        self._metrics.quarantined_records += 1
        page = int(entry["page"][0])
        _log.warning("scrub quarantined the record at segment %d page %d: %s", segment, page, why)


def _stretch(entries: Entries, start_at: int) -> int:
    """End of the run of neighbours from `start_at` on that is read in one I/O."""
    page: I64 = entries["page"].astype("i8")
    count: I64 = entries["pages"].astype("i8")
    total = int(count[start_at])
    at = start_at + 1
    while at < len(entries) and page[at] == page[at - 1] + count[at - 1]:
        total += int(count[at])
        if total * PAGE_BYTES > READ_COALESCE_BYTES:
            break
        at += 1
    return at

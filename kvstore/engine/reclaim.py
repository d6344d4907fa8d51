"""Eviction, carried out: the victim's index is read, what is worth it is written again, the rest is forgotten.

Order on the drive: copies, a sync, their commit records, a sync, then the victim's footer and header are erased
together, a sync, then it is free. A crash in between leaves either both copies (one is found) or the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum

import numpy as np

from kvstore.device.base import IoKind, IoOp, UrgentWrite
from kvstore.engine.allocator import Allocator
from kvstore.engine.appender import Appender
from kvstore.engine.arena import Arena, Piece
from kvstore.engine.blocking import pages
from kvstore.engine.format import Entries, entry_spaces
from kvstore.engine.job import IoQueue, Steps, Wait, gather, io
from kvstore.engine.ledger import Ledger, entry_keys, entry_locations
from kvstore.engine.location import I64, U64, location_depth, location_page, pack_location
from kvstore.engine.policy import WriteBudget, choose_victim, eviction_tick, records_to_keep
from kvstore.engine.put import Append
from kvstore.engine.sealed import read_index
from kvstore.engine.segment import SegmentState, SegmentTable, namespace_key
from kvstore.engine.soundness import why_unsound
from kvstore.engine.writer import MemorySide
from kvstore.limits import DEVICE_IO_BYTES_MAX, MOVE_SHARE_MAX, MOVES_IN_FLIGHT_MAX, PAGE_BYTES
from kvstore.telemetry.metrics import EngineMetrics
from kvstore.types.flow import FlowClass
from kvstore.types.results import Refused


class Move(Append):
    """A live record of a victim on its way to another segment."""

    __slots__ = ("_entry", "_ledger", "_metrics", "_old", "_on_end")

    def __init__(
        self, entry: Entries, old: int, *, ledger: Ledger, metrics: EngineMetrics, on_end: Callable[[bool], None]
    ) -> None:
        """Args: entry: shape [1]. old: where it lies. on_end: told whether the catalog took the copy."""
        super().__init__(
            header_pages=int(entry["header_pages"][0]), pages=int(entry["pages"][0]), flow=FlowClass.BACKGROUND
        )
        self.moving = True
        # Of two copies the newer counts, so after a power cut it must not be the one whose bytes never arrived.
        self.power = True
        self._entry = entry.copy()
        self._old = old
        self._ledger = ledger
        self._metrics = metrics
        self._on_end = on_end

    def wanted(self) -> bool:
        # If the original was deleted before the copy got its place, the tombstone does not reach the copy.
        return bool(self._ledger.catalog.valid(entry_keys(self._entry), np.array([self._old], dtype=np.uint64))[0])

    def entry(self, tick: int) -> bytes:
        # It keeps the warmth it has, which is not the one in its old entry.
        entry, keys = self._entry, entry_keys(self._entry)
        entry["page"] = self.page
        entry["access"] = self._ledger.catalog.ticks(keys)
        return entry.tobytes()

    def completed(self, entry: bytes) -> None:
        assert self.target is not None
        mine = self._entry
        new = pack_location(
            segment=self.target.segment, page=self.page, pages=self.pages, depth=location_depth(self._old)
        )
        taken = self._ledger.move(
            self.target,
            entry,
            keys=entry_keys(mine),
            old=np.array([self._old], dtype=np.uint64),
            new=np.array([new], dtype=np.uint64),
            space=namespace_key(int(mine["namespace"][0]), int(mine["namespace_generation"][0])),
        )
        self._metrics.reinserted_bytes += self.pages * PAGE_BYTES
        self.let_go()
        self._on_end(taken)

    def failed(self, refused: Refused) -> None:
        self.let_go()
        self._on_end(False)


class _Moved(Enum):
    """How the try to copy a record ended."""

    YES = "yes"
    NOT_NOW = "not now"  # no memory, or the drive refused the copy
    NEVER = "never"  # it cannot be read, or its bytes are wrong


class Reclaimer:
    """Evicts segments one at a time.

    Attributes:
        running: an eviction is in progress.
        avoid: segments that hold more pinned bytes than could be moved when they were tried. Forgotten by `candidates`
            when nothing else is left and less is pinned, and by the store every so often, since the budget grows.
        budget: what re-insertion may write.
        unerased: victims in a row that the drive would not erase: all that they held was forgotten for nothing.
        erase_failed: why not, of the last one.
    """

    def __init__(
        self,
        *,
        queue: IoQueue,
        arena: Arena,
        allocator: Allocator,
        ledger: Ledger,
        appender: Appender,
        memory: MemorySide,
        budget: WriteBudget,
        metrics: EngineMetrics,
    ) -> None:
        self._queue = queue
        self._arena = arena
        self._allocator = allocator
        self._table: SegmentTable = allocator.table
        self._ledger = ledger
        self._appender = appender
        self._memory = memory
        self.budget = budget
        self._metrics = metrics
        self.running = False
        self.unerased = 0
        self.erase_failed: OSError | None = None
        self.avoid: set[int] = set()
        self._avoided_pinned_bytes = 0

    def candidates(self) -> I64:
        """Segments that may be evicted, the oldest first."""
        sealed = self._table.in_state(SegmentState.SEALED)
        if not self.avoid:
            return sealed
        others = sealed[~np.isin(sealed, list(self.avoid))]
        if len(others) or self._ledger.catalog.pinned_bytes >= self._avoided_pinned_bytes:
            return others
        self.avoid.clear()
        self._avoided_pinned_bytes = 0
        return sealed

    def choose(self) -> int | None:
        """The segment that goes next, by policy; None where there is none.

        One that a read holds has to wait for it before it is free, and puts would wait with it: others go first.
        """
        candidates = self.candidates()
        first = choose_victim(self._ledger.catalog.scores, candidates)
        if first is None or not self._table.is_held(first):
            return first  # the first of all is the first of those that no read holds
        free = candidates[~self._table.held()[candidates]]
        return choose_victim(self._ledger.catalog.scores, free) if len(free) else first

    def evict(self, victim: int) -> Steps[None]:
        """Free one segment. It is avoided for a while if moving what is pinned in it does not pay, or cannot be.

        What is pinned while others of its records are being moved is moved as well.
        """
        self.running = True
        candidates = self.candidates()
        tick = eviction_tick(self._ledger.catalog.scores, victim, candidates) if len(candidates) else 0.0
        self._table.set_state(victim, SegmentState.EVICTING)
        known = self._allocator.entries_of_unsealed(victim)
        if known is not None:
            entries, complete = known, True
        else:
            entries, complete = yield from read_index(self._queue, self._table, victim, is_urgent=True)
        locations = entry_locations(entries, victim)
        order = self._worthy(entries, locations, tick)
        rotten: set[int] = set()
        beside = False
        while order is not None and len(order):
            stuck = yield from self._move_all(victim, entries, locations, order, rotten, beside=beside)
            order = self._pinned_meanwhile(entries, locations, rotten)
            is_stuck = order is not None and bool(np.isin(order, stuck).any())
            if is_stuck and beside:
                order = None
            beside = is_stuck
        if order is None:
            self.avoid.add(victim)
            self._avoided_pinned_bytes = max(self._avoided_pinned_bytes, self._ledger.catalog.pinned_bytes)
            self._table.set_state(victim, SegmentState.SEALED)
        else:
            self._forget(victim, entries, locations, incomplete=not complete)
            yield lambda resume: self._table.when_unheld(victim, lambda: resume(None))
            yield from self._erase(victim)
            if self._table.state[victim] == SegmentState.BAD:
                self.unerased += 1
        self.running = False

    def erase_again(self, segment: int) -> Steps[None]:
        """Free a victim whose records are gone, and that the drive would not erase."""
        self.running = True
        self._table.set_state(segment, SegmentState.EVICTING)
        yield from self._erase(segment)
        self.running = False

    # --- what stays ---------------------------------------------------------------------------------------------------
    def _worthy(self, entries: Entries, locations: U64, tick: float) -> I64 | None:
        """Positions of the records that are written again, in order; None if pinned ones make it not worth while."""
        is_valid, ticks, is_pinned = self._ledger.catalog.standing(entry_keys(entries), locations)
        if not (is_pinned.any() or (ticks > tick).any()):
            return np.empty(0, dtype=np.int64)
        valid = np.flatnonzero(is_valid & self._ledger.live_spaces(entry_spaces(entries)))
        pinned = is_pinned[valid]
        room = self._allocator.open_room_pages()
        sizes = entries["pages"].astype(np.int64)
        if not self._pays(int(sizes[valid[pinned]].sum()), room):
            return None
        order = valid[
            records_to_keep(
                locations[valid],
                ticks[valid],
                pinned,
                eviction_tick=tick,
                budget_bytes=self.budget.allowance_bytes,
            )
        ]
        return order[np.cumsum(sizes[order]) <= room]

    def _pinned_meanwhile(self, entries: Entries, locations: U64, rotten: Collection[int]) -> I64 | None:
        """Positions of what is pinned and still there when others were moved; None if moving it does not pay."""
        if not self._ledger.catalog.pinned_bytes:
            return np.empty(0, dtype=np.int64)
        is_valid, _, is_pinned = self._ledger.catalog.standing(entry_keys(entries), locations)
        left = np.flatnonzero(is_valid & is_pinned & self._ledger.live_spaces(entry_spaces(entries)))
        left = left[~np.isin(left, list(rotten))]
        size_pages = int(entries["pages"][left].astype(np.int64).sum())
        return left if self._pays(size_pages, self._allocator.open_room_pages()) else None

    def _pays(self, pinned_pages: int, room_pages: int) -> bool:
        """Whether moving so much that is pinned gains room, and few enough bytes are written for it.

        Of a record longer than half a segment one fits each: moved, it takes as much of the drive as before.
        """
        if not pinned_pages:
            return True
        gained_pages = self._table.segment_pages - pinned_pages
        return (
            pinned_pages <= room_pages
            and pinned_pages <= self._table.segment_pages * MOVE_SHARE_MAX
            and self.budget.affords(pinned_pages * PAGE_BYTES, gained_bytes=gained_pages * PAGE_BYTES)
        )

    def _move_all(
        self, victim: int, entries: Entries, locations: U64, order: I64, rotten: set[int], *, beside: bool
    ) -> Steps[list[int]]:
        """Write records again, a few at a time. Answers which could not be, and adds to `rotten` those that are bad.

        With `beside`, one at a time, in memory beside the arena where that has none: puts may hold all of it while they
        wait for the very room that is being made.
        """
        sizes = entries["pages"].astype(np.int64)
        stuck: list[int] = []
        at = 0
        self._allocator.moving = True
        while at < len(order):
            end = at + 1
            while not beside and end < len(order) and end - at < MOVES_IN_FLIGHT_MAX:
                if int(sizes[order[at : end + 1]].sum()) * PAGE_BYTES > DEVICE_IO_BYTES_MAX:
                    break
                end += 1
            batch = order[at:end].tolist()
            self._allocator.move_pages = int(sizes[order[at:]].sum())
            ends: list[_Moved] = yield gather(
                [self._move(victim, entries[one : one + 1], int(locations[one]), beside=beside) for one in batch]
            )
            stuck += [one for one, end_of_it in zip(batch, ends, strict=True) if end_of_it is _Moved.NOT_NOW]
            rotten.update(one for one, end_of_it in zip(batch, ends, strict=True) if end_of_it is _Moved.NEVER)
            at = end
        self._allocator.moving = False
        self._allocator.move_pages = 0
        return stuck

    def _move(self, victim: int, entry: Entries, location: int, *, beside: bool) -> Steps[_Moved]:
        """Copy one record if it is sound."""
        size = int(entry["pages"][0]) * PAGE_BYTES
        piece = self._arena.allocate(size)
        if piece is None and self._memory.reclaim_memory(size):
            piece = self._arena.allocate(size)
        if piece is None and beside:
            piece = _beside_the_arena(size)
        if piece is None:
            return _Moved.NOT_NOW
        at = self._table.offset(victim, location_page(location))
        op = IoOp(IoKind.READ, at, [piece.view], flow=FlowClass.BACKGROUND)
        error = yield io(self._queue, [op])
        if error is not None or op.done_bytes < size or not self._sound(piece, entry, victim):
            piece.release()
            return _Moved.NEVER
        self.budget.moved(size)
        taken: bool = yield self._append(piece, entry, location)
        if not taken:
            return _Moved.NOT_NOW
        self._metrics.reinserted_records += 1
        return _Moved.YES

    def _append(self, piece: Piece, entry: Entries, location: int) -> Wait:
        def begin(resume: Callable[[bool], None]) -> None:
            move = Move(entry, location, ledger=self._ledger, metrics=self._metrics, on_end=resume)
            move.take(piece)
            self._appender.append(move)

        return begin

    def _sound(self, piece: Piece, entry: Entries, victim: int) -> bool:
        """Whether the bytes read are the record that the entry names."""
        ref = self._ledger.namespaces.by_id(int(entry["namespace"][0]))
        generation = int(self._table.generation[victim])
        return ref is not None and not why_unsound(piece.view, entry, segment=victim, generation=generation, ref=ref)

    # --- what goes ----------------------------------------------------------------------------------------------------
    def _forget(self, victim: int, entries: Entries, locations: U64, *, incomplete: bool) -> None:
        gone = self._ledger.evict(entries, locations)
        records, size = int(gone.sum()), int(entries["pages"][gone].astype(np.int64).sum()) * PAGE_BYTES
        if incomplete:
            lost, lost_bytes = self._ledger.forget_rest(victim)
            records, size = records + lost, size + lost_bytes
        self._metrics.evicted_records += records
        self._metrics.evicted_bytes += size
        self._metrics.evicted_segments += 1

    def _erase(self, victim: int) -> Steps[None]:
        """Make sure that nothing of the segment can come back, then let it be used again."""
        empty = pages(PAGE_BYTES)
        # Both at once: with one of the two left the segment is found as it was, or empty.
        error: OSError | None = yield io(
            self._queue,
            [
                UrgentWrite(self._table.offset(victim, page), [empty], flow=FlowClass.BACKGROUND)
                for page in (self._table.segment_pages - 1, 0)
            ],
        )
        if error is None:
            # The next checkpoint leaves out the tombstones of what was here; a power cut must not bring it back then.
            error = yield self._appender.sync
        if error is not None:
            self.erase_failed = error
            self._table.set_state(victim, SegmentState.BAD)
            return
        self.unerased = 0
        self._ledger.freed(victim)
        self._allocator.freed(victim)


def _beside_the_arena(size_bytes: int) -> Piece | None:
    """Memory for one record, which goes when the piece does; None where the machine has none."""
    try:
        return Arena(size_bytes, huge_pages=False, prefault=False).allocate(size_bytes)
    except OSError:
        return None

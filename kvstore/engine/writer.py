"""The put path: tickets are granted as memory comes free, records are placed, joined, written, and logged.

open_put -> (grant queue) -> ticket filled and committed -> ready -> placed in the open segment, neighbours joined
into one device write -> commit record in the log -> in the catalog: visible -> on_done
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

import numpy as np

from kvstore.device.base import IoKind, IoOp
from kvstore.engine.allocator import Allocator, payload_bytes_max
from kvstore.engine.api import PutSpec
from kvstore.engine.arena import Arena
from kvstore.engine.blocking import pages as fresh_pages
from kvstore.engine.format import SegmentHeader, Superblock, content_id, encode_segment_header
from kvstore.engine.job import IoQueue, Syncer
from kvstore.engine.ledger import Ledger
from kvstore.engine.location import location_pages
from kvstore.engine.logrecord import encode_commit
from kvstore.engine.namespaces import index_key
from kvstore.engine.put import Append, OnGrant, Outcome, Put, Ticket, Waiting
from kvstore.engine.segment import OpenSegment, SegmentTable
from kvstore.engine.streaming import StreamingPut
from kvstore.limits import (
    CHECKSUM_BYTES_MIN,
    DEVICE_IO_BYTES_MAX,
    GRANTS_WAITING_MAX,
    IO_VECTORS_MAX,
    PAGE_BYTES,
    WRITE_ATTEMPTS_MAX,
    WRITER_BYTES_PER_CLIENT_MAX,
    WRITER_TTL_NS,
    WRITERS_PER_CLIENT_MAX,
)
from kvstore.telemetry.metrics import EngineMetrics
from kvstore.types.flow import FlowClass
from kvstore.types.results import Exists, Refused, RefusedReason, Stored


class MemorySide(Protocol):
    """What the writer asks of the cache."""

    def stored(self, ticket: Ticket) -> None:
        """A record is durable and in the catalog. Hold `ticket.piece` to cache it: the writer lets go afterwards."""

    def reclaim_memory(self, length_bytes: int) -> bool:
        """Drop cached records until a piece of this length may be free. False when nothing could be dropped."""

    def stored_content(self, key0: int, key1: int) -> bytes:
        """The content id of a stored record, if it is known without asking the drive; else b""."""


class Writer:
    """Puts of one drive.

    Attributes:
        pending: tickets in progress by salted index key.
        now_ns: the time of the present turn, set by `poll`.
        draining: no new puts.
        needs_room: records wait for a segment to come free.
    """

    def __init__(
        self,
        *,
        queue: IoQueue,
        syncer: Syncer,
        arena: Arena,
        allocator: Allocator,
        ledger: Ledger,
        superblock: Superblock,
        memory: MemorySide,
        metrics: EngineMetrics,
        on_closed: Callable[[OpenSegment], None],
        on_user_bytes: Callable[[int], None],
    ) -> None:
        """Assemble.

        Args:
            on_closed: a closing segment has no record in progress any more: seal it.
            on_user_bytes: a put wrote so many bytes, padded and with its header.
        """
        self.queue = queue
        self.arena = arena
        self._arena_start = int(np.frombuffer(arena.memory, dtype=np.uint8).ctypes.data)
        self.ledger = ledger
        self.metrics = metrics
        self.allocator = allocator
        self._syncer = syncer
        self._table: SegmentTable = allocator.table
        self._superblock = superblock
        self._memory = memory
        self._on_closed = on_closed
        self._on_user_bytes = on_user_bytes
        self.payload_bytes_max = payload_bytes_max(superblock.segment_bytes)
        self.pending: dict[bytes, Ticket] = {}
        self.now_ns = 0
        self.draining = False
        self.needs_room = False
        self._grants: deque[Waiting] = deque()
        self._slices: deque[tuple[int, Callable[[memoryview | None], None], StreamingPut]] = deque()
        self._ready: deque[Append] = deque()
        self._moves: deque[Append] = deque()
        self._deadlines: list[tuple[int, int, Waiting]] = []
        self._numbers = count()
        self.writers: dict[bytes, set[StreamingPut]] = {}
        self.in_flight = 0

    # --- asking for a ticket ----------------------------------------------------------------------------------------
    def open_put(self, spec: PutSpec, on_grant: OnGrant, *, streaming: bool = False) -> None:
        """See `api.Engine.open_put`; records for RAM only never come here."""
        refused = self._refusal(spec, streaming=streaming)
        if refused is not None:
            self._refuse(on_grant, refused)
            return
        self._open(Waiting(spec, on_grant, streaming=streaming))

    def _open(self, waiting: Waiting) -> None:
        spec = waiting.spec
        key16 = index_key(spec.namespace, spec.key)
        key0, key1 = int.from_bytes(key16[:8], "little"), int.from_bytes(key16[8:], "little")
        location = self.ledger.catalog.index.get(key0, key1)
        if location:
            self._exists(waiting, key0, key1, location)
            return
        first = self.pending.get(key16)
        if first is not None:
            first.waiters.append(waiting)
            self._watch(waiting)
            return
        if self._grants or not self._grant(waiting):
            self._grants.append(waiting)
            self._watch(waiting)
            self.metrics.grants_waiting = len(self._grants)

    def _refusal(self, spec: PutSpec, *, streaming: bool) -> Refused | None:
        """Why a put cannot be taken whatever the state of memory and drive."""
        if self.draining:
            return Refused(RefusedReason.DRAINING, "the node is shutting down; put to another one")
        if not 0 <= spec.payload_bytes <= self.payload_bytes_max:
            return Refused(
                RefusedReason.INVALID,
                f"record of {spec.payload_bytes} bytes is above this drive's limit of {self.payload_bytes_max} bytes; "
                "use smaller chunks or more shards",
            )
        if spec.block_bytes < CHECKSUM_BYTES_MIN and spec.payload_bytes > spec.block_bytes:
            return Refused(
                RefusedReason.INVALID,
                f"checksum block of {spec.block_bytes} bytes is below the limit of {CHECKSUM_BYTES_MIN}; use a larger",
            )
        failed = self.ledger.log.failed
        if failed is not None:
            return Refused(RefusedReason.NO_SPACE, f"the drive's log fails ({failed}); replace the drive")
        if not self.ledger.namespaces.is_current(spec.namespace):
            return Refused(RefusedReason.UNKNOWN_NAMESPACE, "the namespace was dropped meanwhile; ask for it again")
        if len(self._grants) >= GRANTS_WAITING_MAX:
            return Refused(
                RefusedReason.OVERLOADED, f"{len(self._grants)} puts wait for memory, the limit is reached; retry later"
            )
        return self._streaming_refusal(spec) if streaming else None

    def _streaming_refusal(self, spec: PutSpec) -> Refused | None:
        own = self.writers.get(spec.client_id, set())
        if len(own) >= WRITERS_PER_CLIENT_MAX:
            return Refused(
                RefusedReason.OVERLOADED,
                f"{len(own)} layer-wise writers of one client are open, the limit is {WRITERS_PER_CLIENT_MAX}; "
                "commit or abort some",
            )
        total = sum(ticket.spec.payload_bytes for ticket in own) + spec.payload_bytes
        if total > WRITER_BYTES_PER_CLIENT_MAX:
            return Refused(
                RefusedReason.OVERLOADED,
                f"layer-wise writers of one client hold {total} bytes, the limit is {WRITER_BYTES_PER_CLIENT_MAX}; "
                "commit or abort some",
            )
        return None

    def _refuse(self, on_grant: OnGrant, refused: Refused) -> None:
        self.metrics.refusals[refused.reason] += 1
        on_grant(refused)

    def _exists(self, waiting: Waiting, key0: int, key1: int, location: int) -> None:
        """First commit wins; KV from two writers is never bit-equal, so differing bytes are counted, not refused."""
        spec = waiting.spec
        self.metrics.exists_records += 1
        ticket_pages = Ticket(self, spec).pages
        known = self._memory.stored_content(key0, key1)
        offered = content_prefix(spec)
        if location_pages(location) != ticket_pages or (known and offered and known[:8] != offered):
            self.metrics.differing_records += 1
        waiting.answer(Exists())

    # --- memory -----------------------------------------------------------------------------------------------------
    def _grant(self, waiting: Waiting) -> bool:
        """Give a ticket, if there is memory (or, streaming, room on the drive)."""
        spec = waiting.spec
        ticket: Put | StreamingPut
        if waiting.streaming:
            streaming = StreamingPut(self, spec)
            if not self._grant_streaming(streaming):
                return False
            ticket = streaming
        else:
            put = Put(self, spec)
            piece = self.arena.allocate(put.pages * PAGE_BYTES)
            if piece is None and self._memory.reclaim_memory(put.pages * PAGE_BYTES):
                piece = self.arena.allocate(put.pages * PAGE_BYTES)
            if piece is None:
                return False
            put.grant(piece)
            ticket = put
        self.pending[ticket.key16] = ticket
        waiting.answer(ticket)
        return True

    def _grant_streaming(self, ticket: StreamingPut) -> bool:
        piece = self.arena.allocate(ticket.header_pages * PAGE_BYTES)
        if piece is None and self._memory.reclaim_memory(ticket.header_pages * PAGE_BYTES):
            piece = self.arena.allocate(ticket.header_pages * PAGE_BYTES)
        if piece is None:
            return False
        if not self._place(ticket):
            piece.release()
            return False
        ticket.header = piece
        ticket.expires_ns = self.now_ns + WRITER_TTL_NS
        self.writers.setdefault(ticket.spec.client_id, set()).add(ticket)
        self.metrics.open_writers += 1
        return True

    def grant_waiting(self) -> None:
        """Hand out memory that has come free, in order."""
        while self._slices and self._grant_slice(*self._slices[0]):
            self._slices.popleft()
        while self._grants:
            waiting = self._grants[0]
            if waiting.settled:
                self._grants.popleft()
                continue
            key16 = index_key(waiting.spec.namespace, waiting.spec.key)
            if key16 in self.pending or self.ledger.catalog.index.get(*_halves(key16)):
                self._grants.popleft()
                self._open(waiting)
            elif self._grant(waiting):
                self._grants.popleft()
            else:
                break
        self.metrics.grants_waiting = len(self._grants)

    def arena_offset(self, data: memoryview) -> int:
        """Where in the arena a view begins."""
        return np.frombuffer(data, dtype=np.uint8).ctypes.data - self._arena_start

    def want_slice(
        self, length_bytes: int, on_memory: Callable[[memoryview | None], None], ticket: StreamingPut
    ) -> None:
        """Memory for a slice of a streaming put, now or when it comes free."""
        if self._slices or not self._grant_slice(length_bytes, on_memory, ticket):
            self._slices.append((length_bytes, on_memory, ticket))

    def _grant_slice(
        self, length_bytes: int, on_memory: Callable[[memoryview | None], None], ticket: StreamingPut
    ) -> bool:
        if ticket.ended or (ticket.spec.deadline_ns and self.now_ns >= ticket.spec.deadline_ns):
            on_memory(None)
            return True
        piece = self.arena.allocate(length_bytes)
        if piece is None and self._memory.reclaim_memory(length_bytes):
            piece = self.arena.allocate(length_bytes)
        if piece is None:
            return False
        on_memory(ticket.lend(piece, length_bytes))
        return True

    # --- time -------------------------------------------------------------------------------------------------------
    def _watch(self, waiting: Waiting) -> None:
        heappush(self._deadlines, (waiting.spec.deadline_ns, next(self._numbers), waiting))

    def expire_waiting(self, now_ns: int) -> None:
        """End the puts that have waited until their deadline for a ticket."""
        self.now_ns = now_ns
        deadlines = self._deadlines
        while deadlines and (deadlines[0][2].settled or deadlines[0][0] <= now_ns):
            waiting = heappop(deadlines)[2]
            if not waiting.settled:
                pending = index_key(waiting.spec.namespace, waiting.spec.key) in self.pending
                reason = RefusedReason.PENDING if pending else RefusedReason.OVERLOADED
                self.metrics.refusals[reason] += 1
                waiting.answer(Refused(reason, "the put waited until its deadline for " + _WAITED_FOR[pending]))

    def expire_owners(self, now_ns: int) -> None:
        """End the puts whose owner is gone or silent: a walk over all that are pending."""
        for ticket in [ticket for ticket in self.pending.values() if 0 < ticket.expires_ns <= now_ns]:
            self._expire(ticket)

    def end_writers_of(self, target: OpenSegment) -> None:
        """End the unfinished layer-wise puts of a segment that all other puts wait for."""
        for ticket in list(self.pending.values()):
            if isinstance(ticket, StreamingPut) and ticket.target is target and ticket.expires_ns:
                self._expire(ticket)

    def _expire(self, ticket: Ticket) -> None:
        if ticket.received:
            return  # it is on its way to the drive already
        self.metrics.orphan_puts += 1
        self.end(ticket, Refused(RefusedReason.DEADLINE, "the writer was silent for longer than the owner ttl"))
        if isinstance(ticket, StreamingPut):
            ticket.let_go_unlent()

    def next_timer_ns(self) -> int | None:
        """When `expire_waiting` has something to do."""
        return self._deadlines[0][0] if self._deadlines else None

    def client_gone(self, client_id: bytes) -> None:
        """A client's last connection closed: its unfinished puts end after the owner ttl."""
        for ticket in self.pending.values():
            if ticket.spec.client_id == client_id and not ticket.received:
                ticket.expires_ns = self.now_ns + WRITER_TTL_NS

    # --- placing and writing ----------------------------------------------------------------------------------------
    def append(self, item: Append) -> None:
        """A complete record, header encoded but for its place: written by the next `pump`."""
        (self._moves if item.moving else self._ready).append(item)

    @property
    def backlog(self) -> int:
        """Records that are complete and have no place yet."""
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
            while waiting:
                item = waiting[0]
                if not self._place(item):
                    break
                waiting.popleft()
                length = item.pages * PAGE_BYTES
                if group and (not _adjoin(group[-1], item) or group_bytes + length > DEVICE_IO_BYTES_MAX):
                    self._submit(group)
                    group, group_bytes = [], 0
                group.append(item)
                group_bytes += length
                if len(group) == IO_VECTORS_MAX:
                    self._submit(group)
                    group, group_bytes = [], 0
            if group:
                self._submit(group)

    def _place(self, item: Append) -> bool:
        place = self.allocator.place(item.pages, moving=item.moving)
        if place is None and not item.moving and self.open_segment():
            place = self.allocator.place(item.pages)
        if place is None:
            self.needs_room = True
            return False
        item.target, item.page = place.target, place.page
        return True

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
            opened_ns=self.now_ns,
        )
        page = fresh_pages(PAGE_BYTES)
        page[:] = encode_segment_header(header)
        self.queue.submit(
            IoOp(
                IoKind.WRITE,
                self._table.offset(target.segment),
                [page],
                flow=FlowClass.WRITEBACK,
                owner=partial(self._header_written, target),
            )
        )
        self.metrics.log_bytes += PAGE_BYTES
        return True

    def _header_written(self, target: OpenSegment, op: IoOp) -> None:
        if op.error is not None:
            target.failed = True
        target.header_written()

    def _submit(self, group: list[Append]) -> None:
        buffers = []
        for item in group:
            target, header = item.target, item.header
            assert target is not None
            assert header is not None
            item.place_header()
            end = header.offset + item.pages * PAGE_BYTES
            buffers.append(self.arena.memory[header.offset : end])
        first = group[0]
        assert first.target is not None
        self.in_flight += len(group)
        self.queue.submit(
            IoOp(
                IoKind.WRITE,
                self._table.offset(first.target.segment, first.page),
                buffers,
                flow=first.flow,
                owner=partial(self._written, group),
            )
        )

    def _written(self, group: list[Append], op: IoOp) -> None:
        for item in group:
            self.in_flight -= 1
            self.written(item, op.error)

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
            self.left(target)
            return
        entry = item.entry(self.ledger.tick)
        record = encode_commit(target.segment, target.generation, entry)
        self.ledger.log.append(record, partial(self._logged, item, target, entry), sync=item.power)

    def _logged(self, item: Append, target: OpenSegment, entry: bytes, error: OSError | None) -> None:
        if error is None:
            item.completed(entry)
        else:
            item.failed(Refused(RefusedReason.OUTCOME_UNKNOWN, f"the commit record was not confirmed: {error}"))
        self.left(target)

    def left(self, target: OpenSegment) -> None:
        """A record that had room in a segment is complete or given up."""
        target.outstanding -= 1
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
        if item.attempts < WRITE_ATTEMPTS_MAX and not isinstance(item, StreamingPut):
            item.target = None
            (self._moves if item.moving else self._ready).appendleft(item)
        else:
            item.failed(Refused(RefusedReason.NO_SPACE, f"the drive failed to write the record: {error}"))
        self.left(target)

    def complete(self, ticket: Ticket, entry: bytes) -> None:
        """A put's commit record is on the drive: from now on it is stored."""
        ledger, spec = self.ledger, ticket.spec
        length = ticket.pages * PAGE_BYTES
        self.metrics.written_bytes += length
        self._on_user_bytes(length)
        assert ticket.target is not None
        if ledger.namespaces.is_current(spec.namespace):
            location = ticket.location()
            if not ledger.complete(ticket.target, entry, key=ticket.key, location=location, space=ticket.space):
                self.end(ticket, Refused(RefusedReason.NO_SPACE, "the index is full; raise the memory for it"))
                return
            self._memory.stored(ticket)
        self.metrics.stored_records += 1
        self.metrics.stored_bytes += spec.payload_bytes
        self.end(ticket, Stored(durable=True, content_id=ticket.content_id))

    def end(self, ticket: Ticket, outcome: Outcome) -> None:
        """A put has its outcome: tell its owner and those who wait for its key."""
        if self.pending.get(ticket.key16) is ticket:
            del self.pending[ticket.key16]
        if isinstance(ticket, StreamingPut):
            self._writer_ended(ticket)
        if isinstance(outcome, Refused):
            self.metrics.refusals[outcome.reason] += 1
        if ticket.received:
            ticket.let_go()
        waiters, ticket.waiters = ticket.waiters, []
        ticket.settle(outcome)
        for waiting in waiters:
            if not waiting.settled:
                self._open(waiting)

    def _writer_ended(self, ticket: StreamingPut) -> None:
        own = self.writers.get(ticket.spec.client_id)
        if own is not None and ticket in own:
            own.remove(ticket)
            if not own:
                del self.writers[ticket.spec.client_id]
            self.metrics.open_writers -= 1

    def refuse_backlog(self, refused: Refused) -> None:
        """End every record that waits for room on the drive: there is none to be had."""
        waiting = [*self._ready, *self._moves]
        self._ready.clear()
        self._moves.clear()
        self.needs_room = False
        for item in waiting:
            item.failed(refused)
        for grant in [grant for grant in self._grants if grant.streaming]:
            self.metrics.refusals[refused.reason] += 1
            grant.answer(refused)


_WAITED_FOR = {True: "another put of the same key; its outcome is not known yet", False: "memory; retry later"}


def content_prefix(spec: PutSpec) -> bytes:
    """The part of a content id that two equal payloads share, b"" while the CRC table is not known."""
    return content_id(spec.payload_bytes, spec.crc_table, b"")[:8] if spec.crc_table is not None else b""


def _halves(key16: bytes) -> tuple[int, int]:
    return int.from_bytes(key16[:8], "little"), int.from_bytes(key16[8:], "little")


def _adjoin(before: Append, after: Append) -> bool:
    """Whether two placed records lie side by side and belong to one flow."""
    return before.target is after.target and before.page + before.pages == after.page and before.flow is after.flow


def _order_runs(waiting: deque[Append]) -> None:
    """Bring records of one run together, in the order of their runs' first arrival and their own positions."""
    first: dict[bytes, int] = {}
    items = list(waiting)
    tickets = [item for item in items if isinstance(item, Ticket)]
    if len(tickets) != len(items):
        return
    for ticket in tickets:
        first.setdefault(ticket.spec.run_head, len(first))
    if len(first) == len(items):
        return
    tickets.sort(key=lambda ticket: (first[ticket.spec.run_head], ticket.spec.position))
    waiting.clear()
    waiting.extend(tickets)

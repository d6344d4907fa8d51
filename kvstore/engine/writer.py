"""The put path: tickets are granted as memory comes free, filled by their owners, and handed to the appender.

open_put -> (grant queue) -> ticket filled and committed -> ready -> placed in the open segment, neighbours joined
into one device write -> commit record in the log -> in the catalog: visible -> on_done
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

import numpy as np

from kvstore.engine.allocator import payload_bytes_max
from kvstore.engine.api import Durability, NamespaceRef, PutColumns, PutSpec
from kvstore.engine.appender import Appender
from kvstore.engine.arena import Arena, Piece
from kvstore.engine.format import INDEX_KEY_BYTES, Superblock, content_id, header_page_count, page_count
from kvstore.engine.ledger import Ledger
from kvstore.engine.location import location_pages
from kvstore.engine.namespaces import index_key, index_keys
from kvstore.engine.pending import Pending
from kvstore.engine.put import OnGrant, Outcome, Put, Ticket, Waiting
from kvstore.engine.put_parcel import GrantedParcel
from kvstore.engine.segment import OpenSegment
from kvstore.engine.streaming import StreamingPut
from kvstore.engine.turns import Turns
from kvstore.limits import (
    CHECKSUM_BYTES_MIN,
    DIGEST_BYTES,
    GRANTS_WAITING_MAX,
    PAGE_BYTES,
    PUT_PARCEL_BYTES,
    PUT_PARCEL_ENDS_BYTES,
    PUT_PARCEL_RECORDS_MAX,
    PUT_SHORT_PARCELS,
    WRITER_BYTES_PER_CLIENT_MAX,
    WRITER_TTL_NS,
    WRITERS_PER_CLIENT_MAX,
)
from kvstore.telemetry.metrics import EngineMetrics
from kvstore.types.results import Exists, Refused, RefusedReason, Stored


class MemorySide(Protocol):
    """What the writer asks of the cache."""

    def stored(self, ticket: Ticket) -> None:
        """A record is durable and in the catalog. Hold `ticket.piece` to cache it: the writer lets go afterwards."""

    def stored_parcel(self, parcel: GrantedParcel, locations: Sequence[int], stored: Sequence[bool]) -> None:
        """The same for those records of a parcel that are `stored`, at these places."""

    def reclaim_memory(self, length_bytes: int) -> bool:
        """Drop cached records until a piece of this length may be free. False when nothing could be dropped."""

    def stored_content(self, key0: int, key1: int) -> bytes:
        """The content id of a stored record, if it is known without asking the drive; else b""."""


class Writer:
    """Puts of one drive.

    Attributes:
        pending: puts in progress by salted index key.
        now_ns: the time of the present turn.
        draining: no new puts.
        writers: layer-wise puts in progress, by client.
        grants: puts that wait for memory, and what each client's whole records and parcels hold of it.
    """

    def __init__(
        self,
        *,
        appender: Appender,
        arena: Arena,
        ledger: Ledger,
        superblock: Superblock,
        memory: MemorySide,
        metrics: EngineMetrics,
        on_user_bytes: Callable[[int], None],
    ) -> None:
        """Assemble. `on_user_bytes`: a put wrote so many bytes, padded and with its header."""
        self.appender = appender
        self.arena = arena
        self.ledger = ledger
        self.metrics = metrics
        self._arena_start = int(np.frombuffer(arena.memory, dtype=np.uint8).ctypes.data)
        self._memory = memory
        self._on_user_bytes = on_user_bytes
        self.payload_bytes_max = payload_bytes_max(superblock.segment_bytes)
        self.pending = Pending()
        self._tickets = self.pending.tickets
        self.now_ns = 0
        self.draining = False
        self.grants: Turns[Waiting] = Turns()
        self._slices: deque[tuple[int, int, Callable[[memoryview | None], None], StreamingPut]] = deque()
        self._deadlines: list[tuple[int, int, Waiting]] = []
        self._numbers = count()
        self.writers: dict[bytes, set[StreamingPut]] = {}

    # --- asking for a ticket ----------------------------------------------------------------------------------------
    def open_put(self, spec: PutSpec, on_grant: OnGrant, *, streaming: bool = False) -> None:
        """See `api.Engine.open_put`; records for RAM only never come here."""
        refused = self._refusal(spec.namespace, spec.payload_bytes, spec.block_bytes)
        if refused is None and streaming:
            refused = self._streaming_refusal(spec)
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
        if self.grants or not self._grant(waiting):
            self.grants.append(spec.client_id, waiting)
            self._watch(waiting)
            self.metrics.grants_waiting = len(self.grants)

    def open_parcels(self, columns: PutColumns, first: int, stop: int) -> list[GrantedParcel]:
        """See `api.Engine.open_parcels`."""
        payload_bytes, namespace = columns.payload_bytes, columns.namespace
        if self.grants or self._refusal(namespace, payload_bytes, columns.block_bytes) is not None:
            return []
        keys = columns.keys[first * DIGEST_BYTES : stop * DIGEST_BYTES]
        blob = index_keys(namespace, keys).tobytes()
        keys16 = [blob[at : at + INDEX_KEY_BYTES] for at in range(0, len(blob), INDEX_KEY_BYTES)]
        use = self.ledger.usage.of(namespace.tenant)
        header_pages = header_page_count(payload_bytes, columns.block_bytes)
        pages = header_pages + page_count(payload_bytes)
        if (
            len(set(keys16)) != len(keys16)
            or not use.has_room(len(keys16) * pages)
            or self.pending.has_any(keys16)
            or self.ledger.catalog.holds_any(namespace, keys)
        ):
            return []
        parcels: list[GrantedParcel] = []
        at = 0
        for size in parcel_sizes(len(keys16), payload_bytes):
            some = keys16[at : at + size]
            memory = self._allocate_all(header_pages * PAGE_BYTES, payload_bytes, len(some))
            if memory is None:
                break
            parcel = GrantedParcel(self, columns, first + at, some, *memory)
            self.grants.took(columns.client_id, parcel.pages * PAGE_BYTES)
            at += size
            self.pending.adopt(parcel)
            use.waiting_pages += parcel.pages
            parcels.append(parcel)
        return parcels

    def _allocate_all(self, header_bytes: int, payload_bytes: int, count: int) -> tuple[Piece, list[Piece]] | None:
        """Memory for records of one shape: one piece for all headers, one for each payload, for the cache to keep."""
        header = self._allocate(header_bytes * count)
        if header is None:
            return None
        pieces = self.arena.allocate_resting(payload_bytes, count)
        while len(pieces) < count:
            piece = self._allocate(payload_bytes)
            if piece is None:
                for one in (header, *pieces):
                    one.release()
                return None
            pieces.append(piece)
        return header, pieces

    def _refusal(self, namespace: NamespaceRef, payload_bytes: int, block_bytes: int) -> Refused | None:
        """Why a put cannot be taken whatever the state of memory and drive."""
        if self.draining:
            return Refused(RefusedReason.DRAINING, "the node is shutting down; put to another one")
        if not 0 <= payload_bytes <= self.payload_bytes_max:
            return Refused(
                RefusedReason.INVALID,
                f"record of {payload_bytes} bytes is above this drive's limit of {self.payload_bytes_max} bytes; "
                "use smaller chunks or more shards",
            )
        if block_bytes < CHECKSUM_BYTES_MIN and payload_bytes > block_bytes:
            return Refused(
                RefusedReason.INVALID,
                f"checksum block of {block_bytes} bytes is below the limit of {CHECKSUM_BYTES_MIN}; use a larger",
            )
        failed = self.ledger.log.failed
        if failed is not None:
            return Refused(RefusedReason.NO_SPACE, f"the drive's log fails ({failed}); replace the drive")
        if not self.ledger.namespaces.is_current(namespace):
            return Refused(RefusedReason.UNKNOWN_NAMESPACE, "the namespace was dropped meanwhile; ask for it again")
        if len(self.grants) >= GRANTS_WAITING_MAX:
            return Refused(
                RefusedReason.OVERLOADED, f"{len(self.grants)} puts wait for memory, the limit is reached; retry later"
            )
        return None

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
        if spec.durability is Durability.POWER:
            self.appender.sync(partial(self._exists_synced, waiting))  # it may have been put without
        else:
            waiting.answer(Exists())

    def _exists_synced(self, waiting: Waiting, error: OSError | None) -> None:
        if error is None:
            waiting.answer(Exists())
            return
        detail = f"the record is there, but the drive was not synced ({error}): it may not survive a power cut"
        self.metrics.refusals[RefusedReason.OUTCOME_UNKNOWN] += 1
        waiting.answer(Refused(RefusedReason.OUTCOME_UNKNOWN, detail))

    # --- memory -----------------------------------------------------------------------------------------------------
    def _grant(self, waiting: Waiting) -> bool:
        """Give a ticket, if there is memory (or, streaming, room on the drive)."""
        spec = waiting.spec
        ticket: Put | StreamingPut
        if waiting.streaming:
            streaming = StreamingPut(self, spec)
            if self._is_over_quota(streaming, waiting):
                return True
            if not self._grant_streaming(streaming):
                return False
            ticket = streaming
        else:
            put = Put(self, spec)
            if self._is_over_quota(put, waiting):
                return True
            header = self._allocate(put.header_pages * PAGE_BYTES)
            if header is None:
                return False
            piece: Piece | None = None
            if put.pages > put.header_pages:
                piece = self._allocate((put.pages - put.header_pages) * PAGE_BYTES)
                if piece is None:
                    header.release()
                    return False
            put.grant(header, piece)
            ticket = put
        self._tickets[ticket.key16] = ticket
        self.ledger.usage.of(spec.namespace.tenant).waiting_pages += ticket.pages
        waiting.answer(ticket)
        return True

    def _is_over_quota(self, ticket: Ticket, waiting: Waiting) -> bool:
        """Refuses a put that its tenant's quota has no room for."""
        refused = self.ledger.usage.of(ticket.spec.namespace.tenant).refusal(ticket.pages)
        if refused is None:
            return False
        self.metrics.refusals[RefusedReason.QUOTA] += 1
        waiting.answer(refused)
        return True

    def _allocate(self, length_bytes: int) -> Piece | None:
        """Arena memory, at the cost of the cache if need be."""
        piece = self.arena.allocate(length_bytes)
        if piece is None and self._memory.reclaim_memory(length_bytes):
            piece = self.arena.allocate(length_bytes)
        return piece

    def _grant_streaming(self, ticket: StreamingPut) -> bool:
        piece = self._allocate(ticket.header_pages * PAGE_BYTES)
        if piece is None:
            return False
        if not self.appender.place(ticket):
            piece.release()
            return False
        ticket.header = piece
        ticket.expires_ns = self.now_ns + ticket.spec.owner_ttl_ns
        self.writers.setdefault(ticket.spec.client_id, set()).add(ticket)
        self.metrics.open_writers += 1
        return True

    def grant_waiting(self) -> None:
        """Hand out memory that has come free, in turns."""
        while self._slices and self._grant_slice(*self._slices[0]):
            self._slices.popleft()
        while (waiting := self.grants.first()) is not None:
            client_id = waiting.spec.client_id
            key16 = index_key(waiting.spec.namespace, waiting.spec.key)
            if key16 in self.pending or self.ledger.catalog.index.get(*_halves(key16)):
                self.grants.served(client_id)
                self._open(waiting)
            elif self._grant(waiting):
                self.grants.served(client_id)
            else:
                break
        self.metrics.grants_waiting = len(self.grants)

    def arena_offset(self, data: memoryview) -> int:
        """Where in the arena a view begins."""
        return np.frombuffer(data, dtype=np.uint8).ctypes.data - self._arena_start

    def want_slice(
        self, length_bytes: int, on_memory: Callable[[memoryview | None], None], ticket: StreamingPut
    ) -> None:
        """Memory for a slice of a streaming put, now or when it comes free."""
        # not the deadline of the put's opening: a writer lives for as long as it is written to
        until_ns = self.now_ns + ticket.spec.owner_ttl_ns
        if self._slices or not self._grant_slice(until_ns, length_bytes, on_memory, ticket):
            self._slices.append((until_ns, length_bytes, on_memory, ticket))

    def _grant_slice(
        self, until_ns: int, length_bytes: int, on_memory: Callable[[memoryview | None], None], ticket: StreamingPut
    ) -> bool:
        if ticket.ended or self.now_ns >= until_ns:
            on_memory(None)
            return True
        piece = self._allocate(length_bytes)
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
        """End the puts whose owner is gone or silent: a walk over all that are pending, and that wait."""
        self.grants.sweep()
        for ticket in [ticket for ticket in self._tickets.values() if 0 < ticket.expires_ns <= now_ns]:
            self._expire(ticket)

    def end_writers_of(self, target: OpenSegment) -> None:
        """End the unfinished layer-wise puts of a segment that all other puts wait for."""
        for ticket in list(self._tickets.values()):
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
        """A client's last connection closed: its unfinished puts end after the owner ttl, but for parcels, which their
        connections have given up."""
        for ticket in self._tickets.values():
            if ticket.spec.client_id == client_id and not ticket.received:
                ticket.expires_ns = self.now_ns + WRITER_TTL_NS

    # --- the end ----------------------------------------------------------------------------------------------------
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
        if self._tickets.get(ticket.key16) is ticket:
            del self._tickets[ticket.key16]
            self.ledger.usage.of(ticket.spec.namespace.tenant).waiting_pages -= ticket.pages
        if isinstance(ticket, StreamingPut):
            self._writer_ended(ticket)
        if isinstance(outcome, Refused):
            self.metrics.refusals[outcome.reason] += 1
        if ticket.received:
            ticket.let_go()
        waiters, ticket.waiters = ticket.waiters, []
        ticket.settle(outcome)
        self._open_all(waiters)

    def _open_all(self, waiters: Iterable[Waiting]) -> None:
        """What these waited for has ended."""
        for waiting in waiters:
            if not waiting.settled:
                self._open(waiting)

    def complete_parcel(self, parcel: GrantedParcel, entries: bytes) -> None:
        """The commit records of a parcel are on the drive: from now on its records are stored."""
        columns, count = parcel.columns, parcel.count
        length = parcel.pages * PAGE_BYTES
        self.metrics.written_bytes += length
        self._on_user_bytes(length)
        assert parcel.target is not None
        stored = [True] * count
        if self.ledger.namespaces.is_current(columns.namespace):
            locations = parcel.locations()
            stored = self.ledger.complete_many(
                parcel.target, entries, keys16=parcel.keys16, locations=locations, space=parcel.space
            )
            self._memory.stored_parcel(parcel, locations, stored)
        kept = sum(stored)
        self.metrics.stored_records += kept
        self.metrics.stored_bytes += kept * columns.payload_bytes
        if kept == count:
            self._end_parcel(parcel, [(parcel.first, count, b"".join(parcel.content_ids))])
            return
        full = Refused(RefusedReason.NO_SPACE, "the index is full; raise the memory for it")
        self.metrics.refusals[full.reason] += count - kept
        self._end_parcel(
            parcel,
            [
                (parcel.first + at, 1, its_id if is_stored else full)
                for at, (is_stored, its_id) in enumerate(zip(stored, parcel.content_ids, strict=True))
            ],
        )

    def end_parcel(self, parcel: GrantedParcel, refused: Refused) -> None:
        """None of a parcel's records will be stored."""
        self.metrics.refusals[refused.reason] += parcel.count
        self._end_parcel(parcel, [(parcel.first, parcel.count, refused)])

    def give_up_parcel(self, parcel: GrantedParcel) -> None:
        """Its owner does not send what is missing, and knows so."""
        self.metrics.refusals[RefusedReason.DEADLINE] += parcel.count
        self._end_parcel(parcel, [])

    def _end_parcel(self, parcel: GrantedParcel, outcomes: Iterable[tuple[int, int, bytes | Refused]]) -> None:
        parcel.ended = True
        self.pending.leave(parcel)
        self.ledger.usage.of(parcel.columns.namespace.tenant).waiting_pages -= parcel.pages
        parcel.let_go()
        twins, parcel.twins = parcel.twins, {}
        for part in outcomes:
            parcel.settle(*part)
        for twin in twins.values():
            twin.ended = True
            self._open_all(twin.waiters)

    def _writer_ended(self, ticket: StreamingPut) -> None:
        own = self.writers.get(ticket.spec.client_id)
        if own is not None and ticket in own:
            own.remove(ticket)
            if not own:
                del self.writers[ticket.spec.client_id]
            self.metrics.open_writers -= 1

    def refuse_backlog(self, refused: Refused) -> None:
        """End every record that waits for room on the drive: there is none to be had."""
        self.appender.refuse_backlog(refused)
        for grant in [grant for grant in self.grants if grant.streaming]:
            self.metrics.refusals[refused.reason] += 1
            grant.answer(refused)


_WAITED_FOR = {True: "another put of the same key; its outcome is not known yet", False: "memory; retry later"}


def parcel_sizes(count: int, payload_bytes: int) -> list[int]:
    """How many records go in each parcel: the first is small, since the drive waits.

    Of a short offer those at the end are small, too. A long one's are not: the drive is behind anyway, and each parcel
    costs a write and a block of the log.
    """
    most = max(1, min(PUT_PARCEL_RECORDS_MAX, PUT_PARCEL_BYTES // payload_bytes))
    least = max(1, min(most, PUT_PARCEL_ENDS_BYTES // payload_bytes))
    is_short = count <= PUT_SHORT_PARCELS * most
    sizes: list[int] = []
    while count:
        half = max(least, -(-count // 2)) if is_short else count
        sizes.append(min(most if sizes else least, half, count))
        count -= sizes[-1]
    return sizes


def content_prefix(spec: PutSpec) -> bytes:
    """The part of a content id that two equal payloads share, b"" while the CRC table is not known."""
    return content_id(spec.payload_bytes, spec.crc_table, b"")[:8] if spec.crc_table is not None else b""


def _halves(key16: bytes) -> tuple[int, int]:
    return int.from_bytes(key16[:8], "little"), int.from_bytes(key16[8:], "little")

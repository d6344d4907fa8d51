"""Puts of records that live in RAM only, for a ttl: the parts that are cheaper to recompute than to store."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from kvstore.engine.api import Durability, PutSpec, PutTicket
from kvstore.engine.arena import Piece
from kvstore.engine.arrival import Arrival
from kvstore.engine.cache import Cache, RecordFacts
from kvstore.engine.format import content_id
from kvstore.errors import ChecksumMismatch, InvalidRequest
from kvstore.limits import VOLATILE_TTL_NS_MAX
from kvstore.telemetry.metrics import EngineMetrics
from kvstore.types.checksum import block_count
from kvstore.types.checksum import crc_table as make_crc_table
from kvstore.types.results import Exists, Refused, RefusedReason, Stored

_WORD: Final = 4
_ANY: Final = bytes(16)


class VolatilePut:
    """A `PutTicket` whose record never reaches the drive. Slices are copied into their place in its memory."""

    def __init__(self, owner: VolatilePuts, spec: PutSpec, piece: Piece | None, *, streaming: bool) -> None:
        self.spec = spec
        self._owner = owner
        self._piece = piece
        self._payload = piece.view[: spec.payload_bytes] if piece is not None else memoryview(b"")
        self.buffer: memoryview | None = None if streaming else self._payload
        self._table = bytearray(_WORD * block_count(spec.payload_bytes, spec.block_bytes))
        self._missing = set(range(len(self._table) // _WORD)) if streaming else set()
        self._lent: dict[int, Piece] = {}
        self._crcs: bytes | None = None
        self._arrival = Arrival(self._payload, block_bytes=spec.block_bytes, crc_table=spec.crc_table)
        self._ended = False

    def arrived(self, offset: int, length_bytes: int, crcs: bytes) -> None:
        """See `api.PutTicket.arrived`."""
        if not self._ended:
            self._arrival.arrived(offset, length_bytes, crcs)

    def filled(self) -> None:
        """See `api.PutTicket.filled`."""
        if self._crcs is not None:
            return
        self._crcs = self._arrival.table()
        if self._crcs is None:
            self._refuse_bytes(0, len(self._payload))

    def slice_buffer(self, length_bytes: int, on_memory: Callable[[memoryview | None], None]) -> None:
        """See `api.PutTicket.slice_buffer`; without memory now it calls back with None."""
        piece = self._owner.cache.allocate(length_bytes)
        if piece is None:
            on_memory(None)
            return
        view = piece.view[:length_bytes]
        self._lent[piece.offset] = piece
        on_memory(view)

    def slice_filled(self, offset: int, data: memoryview, crcs: bytes) -> None:
        """See `api.PutTicket.slice_filled`.

        Raises:
            ChecksumMismatch: the words are not those of the data; the ticket is aborted.
            InvalidRequest: not whole blocks of this record; the ticket is aborted.
        """
        spec = self.spec
        piece = self._lent.pop(self._owner.cache.arena.offset_of(data), None)
        if self._ended:
            if piece is not None:
                piece.release()
            return  # its memory may be another record's by now
        try:
            end = offset + len(data)
            if (
                offset % spec.block_bytes
                or end > spec.payload_bytes
                or (end % spec.block_bytes and end != spec.payload_bytes)
            ):
                self._end()
                raise InvalidRequest(
                    f"slice of {len(data)} bytes at {offset}: send whole blocks of {spec.block_bytes} bytes within the "
                    f"record's {spec.payload_bytes}"
                )
            if make_crc_table(data, spec.block_bytes) != crcs:
                self._refuse_bytes(offset, len(data))
            self._payload[offset:end] = data
            first = offset // spec.block_bytes
            self._table[first * _WORD : first * _WORD + len(crcs)] = crcs
            self._missing.difference_update(range(first, first + len(crcs) // _WORD))
        finally:
            if piece is not None:
                piece.release()

    def commit(
        self,
        *,
        crc_table: bytes | None = None,
        content_id: bytes | None = None,
        durability: Durability | None = None,
        on_received: Callable[[], None] | None = None,
        on_done: Callable[[Stored | Exists | Refused], None],
    ) -> None:
        """See `api.PutTicket.commit`: stored, but never durable."""
        if self._ended:
            on_done(Refused(RefusedReason.DEADLINE, "the put had ended before it was committed; put it again"))
            return
        if self.buffer is None:
            if self._missing or (crc_table is not None and crc_table != bytes(self._table)):
                self.abort()
                on_done(Refused(RefusedReason.INVALID, f"{len(self._missing)} blocks were not written, or others were"))
                return
            self._crcs = bytes(self._table)
        else:
            self.filled()
        self._ended = True
        piece, self._piece = self._piece, None
        self._owner.finish(self, piece, self._crcs or b"", content_id, on_received, on_done)

    def abort(self, *, orphaned: bool = False) -> None:
        """See `api.PutTicket.abort`."""
        self._end(orphaned=orphaned)
        lent, self._lent = self._lent, {}
        for piece in lent.values():
            piece.release()

    def _end(self, *, orphaned: bool = False) -> None:
        """As `abort`, but sockets may still write into what was lent."""
        self._owner.metrics.orphan_puts += orphaned and not self._ended
        self._ended = True
        self._owner.tickets.discard(self)
        piece, self._piece = self._piece, None
        if piece is not None:
            piece.release()

    def _refuse_bytes(self, offset: int, length: int) -> None:
        self._owner.metrics.checksum_errors_received += 1
        self._end()
        raise ChecksumMismatch(
            f"record {self.spec.key.hex()}: the {length} bytes received at {offset} do not match their checksums; "
            "send them again"
        )


class VolatilePuts:
    """Hands out the tickets of records for RAM only.

    Attributes:
        tickets: in progress.
        now_ns, tick: of the present turn.
    """

    def __init__(self, cache: Cache, metrics: EngineMetrics) -> None:
        self.cache = cache
        self.metrics = metrics
        self.tickets: set[VolatilePut] = set()
        self.now_ns = 0
        self.tick = 1

    def open_put(
        self, spec: PutSpec, on_grant: Callable[[PutTicket | Exists | Refused], None], *, streaming: bool
    ) -> None:
        """See `api.Engine.open_put`. Granted or refused at once: nobody waits for the sake of a volatile record."""
        record = self.cache.find(spec.namespace.salt, spec.key)
        if record is not None and (not record.until_ns or record.until_ns > self.now_ns):
            self.metrics.exists_records += 1
            on_grant(Exists())
            return
        piece = None
        if not self.cache.has_volatile_room(spec.payload_bytes):
            self._refuse(on_grant, RefusedReason.NO_SPACE, "the RAM cache's share for volatile records is used up")
            return
        if spec.payload_bytes:
            piece = self.cache.allocate(spec.payload_bytes)
            if piece is None:
                self._refuse(on_grant, RefusedReason.OVERLOADED, "all memory for transfers is in use; retry later")
                return
        ticket = VolatilePut(self, spec, piece, streaming=streaming)
        self.tickets.add(ticket)
        on_grant(ticket)

    def finish(
        self,
        ticket: VolatilePut,
        piece: Piece | None,
        crcs: bytes,
        named_id: bytes | None,
        on_received: Callable[[], None] | None,
        on_done: Callable[[Stored | Exists | Refused], None],
    ) -> None:
        """All bytes are there: the record is readable now, until its ttl."""
        self.tickets.discard(ticket)
        spec = ticket.spec
        chosen = named_id or spec.content_id
        facts = RecordFacts(
            key=spec.key,
            record_bytes=spec.payload_bytes,
            block_bytes=spec.block_bytes,
            crcs=crcs,
            content_id=chosen if chosen != _ANY else content_id(spec.payload_bytes, crcs, os.urandom(8)),
            header_pages=0,
            location=0,
        )
        until_ns = self.now_ns + min(spec.volatile_ttl_ns, VOLATILE_TTL_NS_MAX)
        if self.cache.insert_volatile(spec.namespace.salt, facts, piece, tick=self.tick, until_ns=until_ns) is None:
            if piece is not None:
                piece.release()
            self.metrics.refusals[RefusedReason.NO_SPACE] += 1
            on_done(Refused(RefusedReason.NO_SPACE, "the RAM cache's share for volatile records is used up"))
            return
        if on_received is not None:
            on_received()
        on_done(Stored(durable=False, content_id=facts.content_id))

    def client_gone(self, client_id: bytes) -> None:
        """Unfinished puts of a client end."""
        for ticket in [ticket for ticket in self.tickets if ticket.spec.client_id == client_id]:
            ticket.abort(orphaned=True)

    def _refuse(
        self, on_grant: Callable[[PutTicket | Exists | Refused], None], reason: RefusedReason, detail: str
    ) -> None:
        self.metrics.refusals[reason] += 1
        on_grant(Refused(reason, detail))

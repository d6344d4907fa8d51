"""One record on its way to the drive: what the writer appends, and the ticket of a whole-record put."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.engine.api import POSITION_NONE, Durability, PutSpec, PutTicket
from kvstore.engine.arena import Piece
from kvstore.engine.arrival import Arrival
from kvstore.engine.format import (
    CONTENT_ID_BYTES,
    ENTRY,
    content_id,
    fill_record_header,
    header_page_count,
    page_count,
    place_record_header,
)
from kvstore.engine.location import pack_location
from kvstore.engine.namespaces import index_key
from kvstore.engine.segment import OpenSegment, namespace_key
from kvstore.errors import ChecksumMismatch
from kvstore.limits import PAGE_BYTES
from kvstore.types.flow import FlowClass
from kvstore.types.results import Exists, Refused, RefusedReason, Stored

if TYPE_CHECKING:
    from kvstore.engine.writer import Writer

Outcome = Stored | Exists | Refused
OnGrant = Callable[[PutTicket | Exists | Refused], None]
NO_ID = bytes(CONTENT_ID_BYTES)


class Append:
    """A record, or several side by side, that the writer gives a place, writes and logs.

    Attributes:
        pages: of all of it.
        header: its pages; None once let go.
        piece: the padded payload; None once let go, and for no bytes.
        power: sync the drive before the commit is logged, and after.
        count: records in it, side by side.
        moving: a copy of a victim's record.
        fixed: its bytes go to the drive as they come, so it cannot be tried in another place.
        target, page: where it goes, once placed.
    """

    __slots__ = (
        "attempts",
        "count",
        "fixed",
        "flow",
        "header",
        "header_pages",
        "moving",
        "page",
        "pages",
        "piece",
        "power",
        "target",
    )

    def __init__(self, *, header_pages: int, pages: int, flow: FlowClass) -> None:
        self.header_pages = header_pages
        self.pages = pages
        self.flow = flow
        self.count = 1
        self.header: Piece | None = None
        self.piece: Piece | None = None
        self.power = False
        self.moving = False
        self.fixed = False
        self.attempts = 0
        self.target: OpenSegment | None = None
        self.page = 0

    def take(self, piece: Piece) -> None:
        """Its memory: one piece for header and payload, cut in two so that the payload can go to the cache."""
        header_bytes = self.header_pages * PAGE_BYTES
        if self.pages == self.header_pages:
            self.header = piece
        else:
            self.header, self.piece = piece.split([header_bytes, self.pages * PAGE_BYTES - header_bytes])

    def place_header(self) -> None:
        """Write the record's place into its encoded header, and the checksum over all."""
        assert self.target is not None
        assert self.header is not None
        place_record_header(
            self.header.view, segment_generation=self.target.generation, segment=self.target.segment, page=self.page
        )

    @property
    def run(self) -> tuple[bytes, int] | None:
        """Head of its run, and its position in the chain; None for what is only moved."""
        return None

    def views(self) -> list[memoryview]:
        """What is written, in order."""
        assert self.header is not None
        return [self.header.view] if self.piece is None else [self.header.view, self.piece.view]

    def cut(self, count: int) -> Append:
        """An append of its own for its first `count` records, less than all; this one keeps the others."""
        raise AssertionError("one record is not cut")

    def let_go(self) -> None:
        """Give up the memory. Idempotent."""
        if self.header is not None:
            self.header.release()
            self.header = None
        if self.piece is not None:
            self.piece.release()
            self.piece = None

    def wanted(self) -> bool:
        """Whether it should still become valid, asked right before its commit is logged."""
        return True

    def entry(self, tick: int) -> bytes:
        """Its records as commit records and index blocks list them."""
        raise NotImplementedError

    def completed(self, entry: bytes) -> None:
        """The commit record is in the log."""
        raise NotImplementedError

    def failed(self, refused: Refused) -> None:
        """It will not be stored."""
        raise NotImplementedError


class Ticket(Append):
    """A put in progress: what the two kinds of tickets share. See `api.PutTicket`.

    Attributes:
        key16: salted index key.
        received: all bytes are there and verified, and `payload` serves readers that accept pending records.
        ended: it has its outcome; memory handed out is still the caller's until `commit` or `abort`.
    """

    __slots__ = (
        "_on_done",
        "_writer",
        "content_id",
        "crc_table",
        "ended",
        "expires_ns",
        "key16",
        "outcome",
        "received",
        "spec",
        "waiters",
    )

    def __init__(self, writer: Writer, spec: PutSpec) -> None:
        header_pages = header_page_count(spec.payload_bytes, spec.block_bytes)
        super().__init__(header_pages=header_pages, pages=header_pages + page_count(spec.payload_bytes), flow=spec.flow)
        self._writer = writer
        self.spec = spec
        self.key16 = index_key(spec.namespace, spec.key)
        self.crc_table = b""
        self.content_id = spec.content_id
        self.received = False
        self.ended = False
        self.outcome: Outcome | None = None
        self.expires_ns = 0  # of an owner that is gone or silent; 0 is never
        self.waiters: list[Waiting] = []
        self._on_done: Callable[[Outcome], None] | None = None

    @property
    def key(self) -> tuple[int, int]:
        """The index key as two u64."""
        return int.from_bytes(self.key16[:8], "little"), int.from_bytes(self.key16[8:], "little")

    @property
    def space(self) -> int:
        """`namespace_key` of the record."""
        return namespace_key(self.spec.namespace.id, self.spec.namespace.generation)

    @property
    def depth(self) -> int:
        """Position in the chain as locations hold it."""
        return 0 if self.spec.position == POSITION_NONE else self.spec.position

    @property
    def run(self) -> tuple[bytes, int] | None:
        return self.spec.run_head, self.spec.position

    def location(self) -> int:
        """Where it lies, once placed."""
        assert self.target is not None
        return pack_location(segment=self.target.segment, page=self.page, pages=self.pages, depth=self.depth)

    def entry(self, tick: int) -> bytes:
        spec = self.spec
        return ENTRY.pack(
            self.key16,
            spec.namespace.id,
            spec.namespace.generation,
            self.page,
            self.pages,
            self.header_pages,
            spec.part,
            spec.payload_bytes,
            spec.position,
            tick,
            0,
        )

    def make_header(self, out: memoryview) -> None:
        """Encode the header without its place."""
        spec = self.spec
        if self.content_id == NO_ID:
            self.content_id = content_id(spec.payload_bytes, self.crc_table, os.urandom(8))
        fill_record_header(
            out,
            key=spec.key,
            parent=spec.parent,
            run_head=spec.run_head,
            namespace=spec.namespace.digest,
            namespace_generation=spec.namespace.generation,
            position=spec.position,
            part=spec.part,
            payload_bytes=spec.payload_bytes,
            block_bytes=spec.block_bytes,
            content_id=self.content_id,
            crc_table=self.crc_table,
            written_ns=time.time_ns(),
        )

    def completed(self, entry: bytes) -> None:
        self._writer.complete(self, entry)

    def failed(self, refused: Refused) -> None:
        self._writer.end(self, refused)

    def settle(self, outcome: Outcome) -> None:
        """Tell the caller, if it has committed; else `commit` will."""
        self.ended = True
        self.outcome = outcome
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done(outcome)


class Put(Ticket):
    """Ticket of a put whose bytes come into one buffer."""

    __slots__ = ("_arrival", "_verified", "buffer")

    def __init__(self, writer: Writer, spec: PutSpec) -> None:
        super().__init__(writer, spec)
        self.buffer: memoryview | None = None
        self._arrival: Arrival | None = None
        self._verified = False

    def grant(self, header: Piece, piece: Piece | None) -> None:
        """Give it memory for header and payload: two pieces, whose sizes come back, so the arena need not join them."""
        self.header, self.piece = header, piece
        spec = self.spec
        self._writer.grants.took(spec.client_id, self.pages * PAGE_BYTES)
        self.buffer = buffer = piece.view[: spec.payload_bytes] if piece is not None else memoryview(bytearray())
        self._arrival = Arrival(buffer, block_bytes=spec.block_bytes, crc_table=spec.crc_table)

    @property
    def payload(self) -> memoryview | None:
        """All bytes, verified, for readers that accept pending records; hold `piece` while reading."""
        return self.buffer if self.received else None

    def arrived(self, offset: int, length_bytes: int, crcs: bytes) -> None:
        """See `api.PutTicket.arrived`."""
        if not self.ended and self._arrival is not None:
            self._arrival.arrived(offset, length_bytes, crcs)

    def filled(self) -> None:
        """See `api.PutTicket.filled`."""
        if self.ended or self._verified:
            return
        assert self._arrival is not None, "only a granted ticket is filled"
        table = self._arrival.table()
        if table is None:
            self._writer.metrics.checksum_errors_received += 1
            self.abort()
            raise ChecksumMismatch(
                f"record {self.spec.key.hex()}: the {self.spec.payload_bytes} bytes received do not match their CRC "
                "table; send them again"
            )
        self.crc_table = table
        self._verified = True

    def let_go(self) -> None:
        if self.header is not None:  # a twin of a parcel's record never had one
            self._writer.grants.gave(self.spec.client_id, self.pages * PAGE_BYTES)
        super().let_go()

    def slice_buffer(self, length_bytes: int, on_memory: Callable[[memoryview | None], None]) -> None:
        """Only streaming tickets take slices."""
        raise AssertionError("slice_buffer is for streaming tickets")

    def slice_filled(self, offset: int, data: memoryview, crcs: bytes) -> None:
        """Only streaming tickets take slices."""
        raise AssertionError("slice_filled is for streaming tickets")

    def commit(
        self,
        *,
        crc_table: bytes | None = None,
        content_id: bytes | None = None,
        durability: Durability | None = None,
        on_received: Callable[[], None] | None = None,
        on_done: Callable[[Outcome], None],
    ) -> None:
        """See `api.PutTicket.commit`."""
        if self.ended:
            self.let_go()
            on_done(self.outcome or refused_at_deadline(self.spec))
            return
        self.filled()
        assert self.header is not None
        self._on_done = on_done
        self.power = (self.spec.durability if durability is None else durability) is Durability.POWER
        if self.piece is not None and self.spec.payload_bytes < self.piece.length:
            self.piece.view[self.spec.payload_bytes :] = bytes(self.piece.length - self.spec.payload_bytes)
        if content_id is not None:
            self.content_id = content_id
        self.make_header(self.header.view)
        self.received = True
        if on_received is not None:
            on_received()
        self._writer.appender.append(self)

    def abort(self, *, orphaned: bool = False) -> None:
        """See `api.PutTicket.abort`."""
        if self.received:
            return
        if not self.ended:
            self._writer.metrics.orphan_puts += orphaned
            self._writer.end(self, Refused(RefusedReason.DEADLINE, "the put was given up by its owner"))
        self.buffer = self._arrival = None
        self.let_go()


class Waiting:
    """A put that has no ticket yet: it waits for memory, or for another put of its key."""

    __slots__ = ("on_grant", "settled", "spec", "streaming")

    def __init__(self, spec: PutSpec, on_grant: OnGrant, *, streaming: bool) -> None:
        self.spec = spec
        self.on_grant = on_grant
        self.streaming = streaming
        self.settled = False

    def answer(self, what: PutTicket | Exists | Refused) -> None:
        """Settle it, once."""
        if not self.settled:
            self.settled = True
            self.on_grant(what)


def refused_at_deadline(spec: PutSpec) -> Refused:
    """The outcome of a put that ran out of time."""
    return Refused(RefusedReason.DEADLINE, f"record {spec.key.hex()}: the put's deadline has passed; put it again")

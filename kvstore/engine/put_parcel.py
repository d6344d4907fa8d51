"""Put parcels: records of one shape that go from their grant to their commit records together.

Most of what a record costs in Python is a call or an object for each step. Here one of each serves a wave of records:
one search of the index, one header memory, one write, one unit of the log, one entry into the catalog. A parcel is cut
where a part of it must go on alone: what has arrived when the rest is late, what still fits the open segment, a single
record whose bytes are wrong. So a record that is not usual goes on as a parcel of one, and nothing has two ways.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore.engine.api import POSITION_NONE, PutColumns, digest_at
from kvstore.engine.arena import Piece
from kvstore.engine.arrival import Arrival
from kvstore.engine.format import (
    ENTRY,
    content_id,
    header_page_count,
    page_count,
)
from kvstore.engine.location import DEPTH_MAX, pack_location
from kvstore.engine.put import Append, Put
from kvstore.engine.record_headers import write_record_headers
from kvstore.engine.segment import namespace_key
from kvstore.errors import ChecksumMismatch
from kvstore.limits import DIGEST_BYTES, PAGE_BYTES
from kvstore.types.checksum import crcs_match
from kvstore.types.results import Refused

if TYPE_CHECKING:
    from kvstore.engine.writer import Writer

OnParcelDone = Callable[[int, int, "bytes | Refused"], None]
_NONCE_BYTES = 8


class GrantedParcel(Append):
    """See `api.PutParcel`.

    Attributes:
        columns: what it is a part of.
        keys16: salted index keys, one for each record.
        record_pages: of each record.
        pieces: the padded payloads.
        tables, content_ids: of each record, once committed.
        received: committed: all bytes are there and verified, and it is on its way to the drive.
        ended: it has its outcome.
        twins: its records as tickets of their own, made for those who met them under way (`Pending`).
    """

    __slots__ = (
        "_arrivals",
        "_good",
        "_on_done",
        "_writer",
        "buffers",
        "columns",
        "content_ids",
        "ended",
        "first",
        "keys16",
        "missing",
        "pieces",
        "received",
        "record_pages",
        "tables",
        "twins",
    )

    def __init__(
        self,
        writer: Writer,
        columns: PutColumns,
        first: int,
        keys16: list[bytes],
        header: Piece,
        pieces: list[Piece],
    ) -> None:
        """Takes over `header`, the header pages of all its records, and `pieces`."""
        payload_bytes = columns.payload_bytes
        header_pages = header_page_count(payload_bytes, columns.block_bytes)
        self.record_pages = header_pages + page_count(payload_bytes)
        count = len(keys16)
        super().__init__(header_pages=header_pages, pages=count * self.record_pages, flow=columns.flow)
        self._writer = writer
        self.columns = columns
        self.first = first
        self.count = self.missing = count
        self.keys16 = keys16
        self.header = header
        self.pieces = pieces
        self.buffers = [piece.view[:payload_bytes] for piece in pieces]
        self._good: list[bytes | None] = [None] * count  # tables of records that came whole and right
        self._arrivals: list[Arrival | None] = [None] * count  # of the others, once some of their bytes are there
        self.tables: list[bytes] = []
        self.content_ids: list[bytes] = []
        self.received = False
        self.ended = False
        self.twins: dict[bytes, Put] = {}
        self._on_done: OnParcelDone | None = None

    @property
    def space(self) -> int:
        """`namespace_key` of its records."""
        return namespace_key(self.columns.namespace.id, self.columns.namespace.generation)

    @property
    def run(self) -> tuple[bytes, int] | None:
        return digest_at(self.columns.run_heads, self.first), self.positions()[0]

    def keys(self) -> list[bytes]:
        """Record keys."""
        start, stop = self.first * DIGEST_BYTES, (self.first + self.count) * DIGEST_BYTES
        keys = self.columns.keys
        return [keys[at : at + DIGEST_BYTES] for at in range(start, stop, DIGEST_BYTES)]

    def positions(self) -> Sequence[int]:
        """In their chain, or POSITION_NONE."""
        positions = self.columns.positions
        return positions[self.first : self.first + self.count] if positions else (POSITION_NONE,) * self.count

    def _digests(self, digests: bytes) -> Sequence[bytes]:
        """Of parents or run heads, those of its records."""
        if len(digests) <= DIGEST_BYTES:
            return (digest_at(digests, 0),) * self.count
        return [digest_at(digests, index) for index in range(self.first, self.first + self.count)]

    # --- bytes come ---------------------------------------------------------------------------------------------------
    def arrived(self, index: int, offset: int, length_bytes: int, crcs: bytes) -> None:
        """See `api.PutParcel.arrived`."""
        at = index - self.first
        arrival = self._arrivals[at]
        if arrival is None:
            if self.ended:
                return
            arrival = Arrival(self.buffers[at], block_bytes=self.columns.block_bytes, crc_table=None)
            self._arrivals[at] = arrival
        arrival.arrived(offset, length_bytes, crcs)

    def came(self, index: int, tables: bytes, count: int, *, are_good: bool) -> None:
        """See `api.PutParcel.came`."""
        if self.ended:
            return
        if are_good and count == 1:
            self._good[index - self.first] = tables
            return
        block_bytes, length = self.columns.block_bytes, self.columns.payload_bytes
        at = index - self.first
        step = len(tables) // count
        start = 0
        for place in range(at, at + count):
            table = tables[start : start + step]
            start += step
            if are_good or crcs_match(self.buffers[place], block_bytes, table):
                self._good[place] = table
            else:
                self.arrived(self.first + place, 0, length, table)

    def whole(self) -> list[bool]:
        """See `api.PutParcel.whole`."""
        return [
            good is not None or (arrival is not None and arrival.is_whole)
            for good, arrival in zip(self._good, self._arrivals, strict=True)
        ]

    def filled(self) -> bool:
        """See `api.PutParcel.filled`."""
        if self.ended or self.tables:
            return True
        found = [table for table in self._good if table is not None]
        if len(found) < self.count:
            tables = [
                good if good is not None or arrival is None else arrival.table()
                for good, arrival in zip(self._good, self._arrivals, strict=True)
            ]
            found = [table for table in tables if table is not None]
        if len(found) == self.count:
            self.tables = found
            return True
        if self.count == 1:
            self._writer.metrics.checksum_errors_received += 1
            self.abort()
            raise ChecksumMismatch(
                f"record {self.keys()[0].hex()}: the {self.columns.payload_bytes} bytes received do not match their "
                "CRC table; send them again"
            )
        return False

    # --- parts --------------------------------------------------------------------------------------------------------
    def cut(self, count: int) -> GrantedParcel:
        """See `api.PutParcel.cut`. Also of what waits for its place: each part then ends for itself."""
        assert 0 < count < self.count, "a part of a parcel is less than all of it"
        assert self.header is not None, "what has ended is not cut"
        header_bytes = self.header_pages * PAGE_BYTES
        header, self.header = self.header.split([count * header_bytes, (self.count - count) * header_bytes])
        part = GrantedParcel(self._writer, self.columns, self.first, self.keys16[:count], header, self.pieces[:count])
        part._good, part._arrivals = self._good[:count], self._arrivals[:count]
        part.tables, self.tables = self.tables[:count], self.tables[count:]
        part.content_ids, self.content_ids = self.content_ids[:count], self.content_ids[count:]
        part.received, part.attempts, part._on_done = self.received, self.attempts, self._on_done
        del self._good[:count], self._arrivals[:count], self.keys16[:count], self.pieces[:count], self.buffers[:count]
        part.twins = {key16: self.twins.pop(key16) for key16 in part.keys16 if key16 in self.twins}
        self.first += count
        self.count -= count
        self.pages = self.count * self.record_pages
        part.missing = count - sum(part.whole())
        self.missing -= part.missing
        self._writer.pending.adopt(part)
        return part

    def twin(self, key16: bytes) -> Put:
        """The record as a ticket, for those who met it under way: to read it, or to wait for its end."""
        known = self.twins.get(key16)
        if known is None:
            at = self.keys16.index(key16)
            known = self.twins[key16] = Put(self._writer, self.columns.spec(self.first + at))
            known.piece, known.buffer = self.pieces[at], self.buffers[at]
            self._bring_up(known, at)
        return known

    def _bring_up(self, twin: Put, at: int) -> None:
        if self.received:
            twin.crc_table, twin.content_id, twin.received = self.tables[at], self.content_ids[at], True

    # --- the way to the drive -----------------------------------------------------------------------------------------
    def commit(self, *, on_received: Callable[[int, int], None] | None, on_done: OnParcelDone) -> None:
        """See `api.PutParcel.commit`."""
        payload_bytes, count = self.columns.payload_bytes, self.count
        nonces = os.urandom(_NONCE_BYTES * count)
        self.content_ids = [
            content_id(payload_bytes, table, nonces[at * _NONCE_BYTES : (at + 1) * _NONCE_BYTES])
            for at, table in enumerate(self.tables)
        ]
        padding = -payload_bytes % PAGE_BYTES
        if padding:
            for piece in self.pieces:
                piece.view[payload_bytes : payload_bytes + padding] = bytes(padding)
        self._on_done = on_done
        self.received = True
        for key16, twin in self.twins.items():
            self._bring_up(twin, self.keys16.index(key16))
        if on_received is not None:
            on_received(self.first, count)
        self._writer.appender.append(self)

    def place_header(self) -> None:
        """Write the headers, which name their places."""
        assert self.header is not None
        assert self.target is not None
        columns, pages = self.columns, self.record_pages
        write_record_headers(
            self.header.view,
            keys=self.keys(),
            parents=self._digests(columns.parents),
            run_heads=self._digests(columns.run_heads),
            namespace=columns.namespace.digest,
            namespace_generation=columns.namespace.generation,
            positions=self.positions(),
            payload_bytes=columns.payload_bytes,
            block_bytes=columns.block_bytes,
            content_ids=self.content_ids,
            crc_tables=self.tables,
            written_ns=time.time_ns(),
            segment=self.target.segment,
            pages=range(self.page, self.page + self.count * pages, pages),
            segment_generation=self.target.generation,
        )

    def views(self) -> list[memoryview]:
        assert self.header is not None
        header, step = self.header.view, self.header_pages * PAGE_BYTES
        views: list[memoryview] = []
        at = 0
        for piece in self.pieces:
            views += (header[at : at + step], piece.view)
            at += step
        return views

    def entry(self, tick: int) -> bytes:
        columns = self.columns
        namespace, generation = columns.namespace.id, columns.namespace.generation
        pages, header_pages, payload_bytes = self.record_pages, self.header_pages, columns.payload_bytes
        pack, page = ENTRY.pack, self.page
        entries = []
        for key16, position in zip(self.keys16, self.positions(), strict=True):
            entries.append(
                pack(key16, namespace, generation, page, pages, header_pages, 0, payload_bytes, position, tick, 0)
            )
            page += pages
        return b"".join(entries)

    def locations(self) -> list[int]:
        """Where its records lie, once placed."""
        assert self.target is not None
        pages, segment, page = self.record_pages, self.target.segment, self.page
        first = pack_location(segment=segment, page=page, pages=pages, depth=0)
        step = pack_location(segment=0, page=pages, pages=0, depth=0)
        places = range(first, first + self.count * step, step)
        if not self.columns.positions:
            return list(places)
        return [place | min(depth, DEPTH_MAX) for place, depth in zip(places, self.positions(), strict=True)]

    def completed(self, entry: bytes) -> None:
        self._writer.complete_parcel(self, entry)

    def failed(self, refused: Refused) -> None:
        self._writer.end_parcel(self, refused)

    # --- the end ------------------------------------------------------------------------------------------------------
    def settle(self, index: int, count: int, outcome: bytes | Refused) -> None:
        """Tell the owner of some of its records; the parcel has ended."""
        if self._on_done is not None:
            self._on_done(index, count, outcome)

    def abort(self) -> None:
        """See `api.PutParcel.abort`."""
        if not self.ended and not self.received:
            self._writer.give_up_parcel(self)

    def let_go(self) -> None:
        if self.header is not None:
            self._writer.grants.gave(self.columns.client_id, self.pages * PAGE_BYTES)
        super().let_go()
        pieces, self.pieces = self.pieces, []
        for piece in pieces:
            piece.release()
        self.buffers = []
        self._good = [None] * self.count
        self._arrivals = [None] * self.count

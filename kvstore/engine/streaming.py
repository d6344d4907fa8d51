"""A layer-wise put: slices come in any order, whole pages go to the drive at once, header and commit record last.

Room on the drive is taken when the writer opens. A slice that begins or ends inside a page leaves that edge in memory
until its neighbour has filled the page. Nothing is visible before the commit record, so a writer that dies leaves only
dead space in its segment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvstore.device.base import IoKind, IoOp
from kvstore.engine.api import Durability, PutSpec
from kvstore.engine.arena import Piece
from kvstore.engine.blocking import pages as fresh_pages
from kvstore.engine.put import Outcome, Ticket, refused_at_deadline
from kvstore.errors import ChecksumMismatch, InvalidRequest
from kvstore.limits import PAGE_BYTES
from kvstore.types.checksum import block_count
from kvstore.types.checksum import crc_table as make_crc_table
from kvstore.types.results import Refused, RefusedReason

if TYPE_CHECKING:
    from kvstore.engine.writer import Writer


class _Edge:
    """A page of which some bytes are still missing."""

    __slots__ = ("missing_bytes", "page")

    def __init__(self, missing_bytes: int) -> None:
        self.page = fresh_pages(PAGE_BYTES)
        self.missing_bytes = missing_bytes


class StreamingPut(Ticket):
    """Ticket of a put whose bytes come in slices. See `api.PutTicket`.

    Attributes:
        buffer: always None.
    """

    __slots__ = ("_committed", "_edges", "_error", "_lent", "_missing", "_table", "_writing", "buffer")

    def __init__(self, writer: Writer, spec: PutSpec) -> None:
        super().__init__(writer, spec)
        self.fixed = True
        self.buffer: memoryview | None = None
        self._edges: dict[int, _Edge] = {}
        self._lent: dict[int, Piece] = {}
        self._missing = set(range(block_count(spec.payload_bytes, spec.block_bytes)))
        self._table = bytearray(4 * len(self._missing))
        self._writing = 0
        self._committed = False
        self._error: OSError | None = None

    @property
    def payload(self) -> memoryview | None:
        """Never readable before it is stored: most of it is on the drive only."""
        return None

    # --- slices -----------------------------------------------------------------------------------------------------
    def arrived(self, offset: int, length_bytes: int, crcs: bytes) -> None:
        """Only tickets with one buffer are told of parts of slices."""
        raise AssertionError("arrived is for tickets with a buffer")

    def filled(self) -> None:
        """Only tickets with one buffer are filled."""
        raise AssertionError("filled is for tickets with a buffer")

    def slice_buffer(self, length_bytes: int, on_memory: Callable[[memoryview | None], None]) -> None:
        """See `api.PutTicket.slice_buffer`."""
        self._writer.want_slice(length_bytes, on_memory, self)

    def lend(self, piece: Piece, length_bytes: int) -> memoryview:
        """Memory that the owner fills; it comes back with `slice_filled` or `abort`."""
        self._lent[piece.offset] = piece
        return piece.view[:length_bytes]

    def slice_filled(self, offset: int, data: memoryview, crcs: bytes) -> None:
        """See `api.PutTicket.slice_filled`.

        Raises:
            ChecksumMismatch: the words in `crcs` are not those of `data`; the ticket is aborted.
            InvalidRequest: the slice is not whole blocks of this record, or other bytes came there before; the ticket
                is aborted.
        """
        piece = self._lent.pop(self._writer.arena_offset(data))
        if self.ended or self._committed:
            piece.release()
            return
        self.expires_ns = self._writer.now_ns + self.spec.owner_ttl_ns
        try:
            is_new = self._verify(offset, data, crcs)
        except (ChecksumMismatch, InvalidRequest):
            piece.release()
            self._end()
            raise
        if is_new:
            self._write(offset, data, piece)
        else:
            piece.release()

    def _verify(self, offset: int, data: memoryview, crcs: bytes) -> bool:
        """False when the very same blocks came before: the answer was lost on its way, and the client asked again."""
        spec = self.spec
        block, end = spec.block_bytes, offset + len(data)
        if offset % block or end > spec.payload_bytes or (end % block and end != spec.payload_bytes) or not len(data):
            raise InvalidRequest(
                f"slice of {len(data)} bytes at {offset}: send whole blocks of {block} bytes within the record's "
                f"{spec.payload_bytes}"
            )
        if make_crc_table(data, block) != crcs:
            self._writer.metrics.checksum_errors_received += 1
            raise ChecksumMismatch(
                f"record {spec.key.hex()}: slice of {len(data)} bytes at {offset} does not match its checksums; "
                "open the writer again"
            )
        blocks = range(offset // block, offset // block + block_count(len(data), block))
        if self._missing.isdisjoint(blocks) and self._table[4 * blocks.start : 4 * blocks.stop] == crcs:
            return False
        if not self._missing.issuperset(blocks):
            raise InvalidRequest(f"slice at {offset} was written before with other bytes; send each block once")
        self._missing.difference_update(blocks)
        self._table[4 * blocks.start : 4 * blocks.stop] = crcs
        return True

    def _write(self, offset: int, data: memoryview, piece: Piece) -> None:
        """Send whole pages to the drive, keep the edges. `piece` is given back when it is on the drive."""
        end = offset + len(data)
        first = -(-offset // PAGE_BYTES)
        last = end // PAGE_BYTES
        if end == self.spec.payload_bytes and end % PAGE_BYTES and offset <= last * PAGE_BYTES:
            # The record's last page has no neighbour to wait for: pad it.
            skew = end % PAGE_BYTES
            whole_piece = piece.length >= len(data) + PAGE_BYTES - skew
            if offset % PAGE_BYTES == 0 and whole_piece:
                piece.view[len(data) : len(data) + PAGE_BYTES - skew] = bytes(PAGE_BYTES - skew)
                self._send(first, [piece.view[: len(data) + PAGE_BYTES - skew]], piece)
                return
        self._edge(offset, data[: max(0, min(first * PAGE_BYTES, end) - offset)])
        middle = (last - first) * PAGE_BYTES
        if last >= first:
            tail = max(last * PAGE_BYTES, offset)
            self._edge(tail, data[tail - offset :])
        if middle <= 0:
            piece.release()
            return
        at = first * PAGE_BYTES - offset
        if at == 0:
            self._send(first, [data[:middle]], piece)
            return
        # Bytes that do not lie on page boundaries of memory as they do on the drive move once.
        moved = fresh_pages(middle)
        moved[:] = data[at : at + middle]
        piece.release()
        self._send(first, [moved], None)

    def _edge(self, offset: int, data: memoryview) -> None:
        """Bytes of a page that has other bytes too."""
        if not len(data):
            return
        number = offset // PAGE_BYTES
        edge = self._edges.get(number)
        if edge is None:
            size = min(PAGE_BYTES, self.spec.payload_bytes - number * PAGE_BYTES)
            edge = self._edges[number] = _Edge(size)
        start = offset % PAGE_BYTES
        edge.page[start : start + len(data)] = data
        edge.missing_bytes -= len(data)
        if edge.missing_bytes == 0:
            del self._edges[number]
            self._send(number, [edge.page], None)

    def _send(self, page: int, buffers: list[memoryview], piece: Piece | None) -> None:
        assert self.target is not None
        self._writing += 1
        at = self._writer.appender.allocator.table.offset(self.target.segment, self.page + self.header_pages + page)
        op = IoOp(IoKind.WRITE, at, buffers, flow=self.flow, owner=partial(self._sent, piece))
        self._writer.appender.queue.submit(op)

    def _sent(self, piece: Piece | None, op: IoOp) -> None:
        self._writing -= 1
        self._error = self._error or op.error
        if piece is not None:
            piece.release()
        if self._writing == 0:
            if self.ended:
                self._leave()
            elif self._committed:
                self._finish()

    # --- the end ----------------------------------------------------------------------------------------------------
    def commit(
        self,
        *,
        crc_table: bytes | None = None,
        content_id: bytes | None = None,
        durability: Durability | None = None,
        on_received: Callable[[], None] | None = None,
        on_done: Callable[[Outcome], None],
    ) -> None:
        """See `api.PutTicket.commit`; `crc_table` is the whole record's."""
        if self.ended:
            on_done(self.outcome or refused_at_deadline(self.spec))
            return
        self._on_done = on_done
        if self._missing or self._lent:
            self.failed(
                Refused(RefusedReason.INVALID, f"{len(self._missing)} blocks of the record are missing; write them all")
            )
            return
        if crc_table is not None and crc_table != self._table:
            self._writer.metrics.checksum_errors_received += 1
            self.failed(Refused(RefusedReason.INVALID, "the CRC table differs from that of the slices; write again"))
            return
        self.power = (self.spec.durability if durability is None else durability) is Durability.POWER
        self.crc_table = bytes(self._table)
        self.content_id = content_id or self.content_id
        self._committed = True
        self.expires_ns = 0
        if on_received is not None:
            on_received()
        if self._writing == 0:
            self._finish()

    def _finish(self) -> None:
        """All slices are on the drive: write the header, then the commit record."""
        if self._error is not None:
            self._writer.appender.written(self, self._error)
            return
        assert self.header is not None
        assert self.target is not None
        self.make_header(self.header.view)
        self.place_header()
        at = self._writer.appender.allocator.table.offset(self.target.segment, self.page)
        self._writer.appender.queue.submit(
            IoOp(
                IoKind.WRITE,
                at,
                [self.header.view],
                flow=self.flow,
                owner=lambda op: self._writer.appender.written(self, op.error),
            )
        )

    def completed(self, entry: bytes) -> None:
        self._writer.complete(self, entry)
        self.let_go()

    def failed(self, refused: Refused) -> None:
        was_committed = self._committed
        self._writer.end(self, refused)
        if was_committed:
            self.let_go()  # the writer counts the segment down
        else:
            self._give_up()

    def abort(self, *, orphaned: bool = False) -> None:
        """See `api.PutTicket.abort`."""
        if self._committed:
            return
        self._end(orphaned=orphaned)
        self._take_back()

    def _end(self, *, orphaned: bool = False) -> None:
        """As `abort`, but sockets may still write into what was lent."""
        if not self.ended:
            self._writer.metrics.orphan_puts += orphaned
            self._writer.end(self, Refused(RefusedReason.DEADLINE, "the writer was given up by its owner"))
            self._give_up()

    def let_go_unlent(self) -> None:
        """The owner ttl ran out: give up what the owner does not hold; what was lent comes back by `abort`."""
        self._give_up()

    def _give_up(self) -> None:
        self._edges.clear()
        self.let_go()
        if self._writing == 0:
            self._leave()

    def _take_back(self) -> None:
        lent, self._lent = self._lent, {}
        for piece in lent.values():
            piece.release()

    def _leave(self) -> None:
        """Let the segment go on without this record, once no write of it is in flight."""
        target, self.target = self.target, None
        if target is not None:
            self._writer.appender.left(target)

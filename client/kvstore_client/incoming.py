"""One record on its way in: where its slices land, whether they match their checksums, when it is complete. Pure.

A record is a hit only when every byte asked for has arrived, every block that carried it matched its CRC word, and all
slices came from one copy of the record of the expected length.
"""

from __future__ import annotations

from bisect import insort

from kvstore.errors import Unavailable
from kvstore.types.checksum import crc_table, crc_table_fragments
from kvstore.types.results import MissReason
from kvstore.wire.slices import NO_CONTENT_ID, Slice
from kvstore_client.ranges import Spans
from kvstore_client.regions import Region

OPEN = -1
HIT = 0
_CORRUPT = int(MissReason.CORRUPT)
_LAYOUT = int(MissReason.LAYOUT)


class IncomingRecord:
    """State of one record of a read.

    Attributes:
        status: OPEN, HIT, or a MissReason code.
        content_id: Of the copy that arrives; zeros until known. A re-ask names it, and gets this copy or a miss.
        record_bytes: Length of the whole record, -1 until known.
        is_doubtful: The bytes that came did not match their checksums, or were of two copies: worth asking again.
        mismatches: How often that happened, over all attempts.
    """

    __slots__ = (
        "_arrived",
        "_base_bytes",
        "_checked_bytes",
        "_exact",
        "_is_last_placed",
        "_region",
        "_room_bytes",
        "_spans",
        "_whole_until",
        "content_id",
        "is_doubtful",
        "mismatches",
        "record_bytes",
        "status",
    )

    def __init__(
        self, region: Region, base_bytes: int, room_bytes: int, exact: bool, spans: Spans | None, content_id: bytes
    ) -> None:
        """Positional, because one is made for each record of each read.

        Args:
            region: The caller's memory of the item.
            base_bytes: Where in the region this record begins.
            room_bytes: The record's length when `exact`, else the most that fits.
            exact: False for opaque layouts, whose records are of any length.
            spans: What to read; None is all of it.
            content_id: The copy wanted, zeros for any.
        """
        self._region = region
        self._base_bytes = base_bytes
        self._room_bytes = room_bytes
        self._exact = exact
        self._spans = spans
        self.content_id = content_id
        self.mismatches = 0
        self.status = OPEN
        self.is_doubtful = False
        self.record_bytes = -1
        self._is_last_placed = False
        self._whole_until = 0
        self._checked_bytes = 0
        self._arrived: list[tuple[int, int]] | None = None

    def has_come(self, content_id: bytes) -> None:
        """All of it, as long as its room, has come and matched its checksums before."""
        self.has_come_until(content_id, self._room_bytes)
        self.status = HIT

    def has_come_until(self, content_id: bytes, end_bytes: int) -> None:
        """The same of its first bytes; the record is as long as its room."""
        self.content_id = content_id
        self.record_bytes = self._room_bytes
        self._whole_until = end_bytes

    def restart(self) -> None:
        """Forgets what arrived, before the record is asked for again."""
        self.status = OPEN
        self.is_doubtful = False
        self.record_bytes = -1
        self._is_last_placed = False
        self._whole_until = 0
        self._checked_bytes = 0
        self._arrived = None

    @property
    def room_bytes(self) -> int:
        """Length of the whole record, or the most that fits."""
        return self._room_bytes

    @property
    def memory(self) -> memoryview | None:
        """Where a whole record goes, if that is one piece of the caller's memory and nothing else is in between."""
        views = self._region.views
        if self._spans is not None or len(views) != 1:
            return None
        return views[0][self._base_bytes : self._base_bytes + self._room_bytes]

    @property
    def pieces(self) -> list[memoryview]:
        """Where a whole record goes, in order, if nothing else is in between."""
        return [] if self._spans is not None else self._region.cut(self._base_bytes, self._room_bytes)

    def land(self, piece: Slice, waste: memoryview) -> list[memoryview]:
        """Where the bytes of `piece` must be received, in order; memory of the caller only where it asked for them.

        Args:
            piece: The next slice of this record.
            waste: At least SLICE_BYTES_MAX that nobody looks at, for bytes that came too late.

        Raises:
            Unavailable: The node broke the protocol; nothing more from this connection can be trusted.
        """
        length = piece.length_bytes
        if piece.status:
            if self.status == OPEN:
                self.status = piece.status
            return []
        if self.status != OPEN or not self._fits(piece):
            return [waste[:length]] if length else []
        if self._is_last_placed:
            # the record is a hit as soon as its last slice is verified, and must not be written over then
            raise Unavailable(f"node sent byte {piece.offset} of a record after the slice that it called the last")
        self._is_last_placed = piece.last
        if not length:
            return []
        if len(piece.crcs) != 4 * -(-length // piece.block_bytes):
            raise Unavailable(
                f"node sent {length} bytes with {len(piece.crcs) // 4} CRC words of {piece.block_bytes}-byte blocks"
            )
        end = piece.offset + length
        if end != piece.record_bytes and length % piece.block_bytes:
            raise Unavailable(f"node sent {length} bytes that end inside a block of {piece.block_bytes} bytes")
        if self._spans is None:
            return self._region.cut(self._base_bytes + piece.offset, length)
        return self._land_spans(self._spans, piece.offset, end)

    def arriving(self, piece: Slice, view: memoryview, arrived_bytes: int) -> None:
        """Checks the whole blocks of `piece` that are in its one `view` by now, while the CPU's cache has them."""
        if self.status != OPEN:
            return
        size = piece.block_bytes
        at, until = self._checked_bytes, arrived_bytes // size * size
        if at < until:
            if crc_table(view[at:until], size) != piece.crcs[at // size * 4 : until // size * 4]:
                self._doubt()
            self._checked_bytes = until

    def arrived(self, piece: Slice, views: list[memoryview]) -> None:
        """Checks the bytes of `piece`, which have arrived in `views`, but for those that `arriving` has checked."""
        if self.status != OPEN:
            return
        length = piece.length_bytes
        if length:
            block_bytes = piece.block_bytes
            crcs = piece.crcs
            if len(views) > 1:
                found = crc_table_fragments(views, block_bytes)
            elif self._checked_bytes:
                found = crc_table(views[0][self._checked_bytes :], block_bytes)
                crcs = crcs[self._checked_bytes // block_bytes * 4 :]
                self._checked_bytes = 0
            else:
                found = crc_table(views[0], block_bytes)
            if found != crcs:
                self._doubt()
                return
            if piece.offset == self._whole_until:
                self._whole_until += length
            else:
                if self._arrived is None:
                    self._arrived = []
                insort(self._arrived, (piece.offset, piece.offset + length))
        if piece.last:
            if not self._is_complete():
                raise Unavailable(f"node ended a record of {piece.record_bytes} bytes before all had been sent")
            self.status = HIT

    @property
    def wanted_bytes(self) -> int:
        """Bytes that a hit has put into the caller's memory."""
        if self._spans is None:
            return max(0, self.record_bytes)
        return sum(end - start for start, end in self._spans)

    def _fits(self, piece: Slice) -> bool:
        """Whether the copy that `piece` is of is the one that is being read, and of the expected length."""
        if self.record_bytes < 0:
            if self.content_id == NO_CONTENT_ID:
                self.content_id = piece.content_id
            if self._has_wrong_length(piece.record_bytes):
                self.status = _LAYOUT
                return False
            self.record_bytes = piece.record_bytes
        if piece.content_id != self.content_id or piece.record_bytes != self.record_bytes:
            self.content_id = NO_CONTENT_ID
            self._doubt()
            return False
        return True

    def _doubt(self) -> None:
        self.mismatches += 1
        self.is_doubtful = True
        self.status = _CORRUPT

    def _has_wrong_length(self, record_bytes: int) -> bool:
        if self._exact:
            return record_bytes != self._room_bytes
        needed = self._spans[-1][1] if self._spans else 0
        return record_bytes < needed if self._spans is not None else record_bytes > self._room_bytes

    def _land_spans(self, spans: Spans, start: int, end: int) -> list[memoryview]:
        """Views for record bytes start..end: the caller's memory within spans, memory of its own between them."""
        views: list[memoryview] = []
        at, landed = start, self._base_bytes
        for first, behind in spans:
            low, high = max(first, at), min(behind, end)
            if low < high:
                if low > at:
                    views.append(memoryview(bytearray(low - at)))
                views += self._region.cut(landed + low - first, high - low)
                at = high
            landed += behind - first
        if at < end:
            views.append(memoryview(bytearray(end - at)))
        return views

    def _is_complete(self) -> bool:
        if self._whole_until >= (self.record_bytes if self._spans is None else self._spans[-1][1]):
            return True
        spans = ((0, self.record_bytes),) if self._spans is None else self._spans
        return all(self._covers(first, behind) for first, behind in spans)

    def _covers(self, first: int, behind: int) -> bool:
        """Whether record bytes first..behind have all arrived."""
        at = max(first, self._whole_until)
        for low, high in self._arrived or ():
            if low <= at < high:
                at = high
        return at >= behind

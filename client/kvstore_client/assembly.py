"""One record that is written piece by piece: which blocks are complete, their checksums, and unaligned edges. Pure.

The node takes whole checksum blocks. A piece that begins or ends inside a block leaves its edge here, in memory of
ours, until the rest of the block has come; everything between the edges is sent from the caller's memory.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from kvstore.cluster.view import TargetId
from kvstore.errors import InvalidRequest
from kvstore.limits import SLICE_BYTES_MAX
from kvstore.types.checksum import block_count, crc_table, crc_table_fragments
from kvstore.types.content_id import content_id
from kvstore.wire.slices import NO_CONTENT_ID
from kvstore_client.incoming import OPEN
from kvstore_client.regions import Region

_U32 = struct.Struct("<I")


class Piece(NamedTuple):
    """Whole blocks of a record that can be sent now."""

    offset: int
    length_bytes: int
    views: list[memoryview]
    crcs: bytes


class WrittenCopy:
    """One copy of a record, on one target.

    Attributes:
        record: What is written.
        target: Where it goes.
        writer_id: What the node calls it; meaningless before it is granted.
        boot_id: Of the worker that granted it.
        status: OPEN while it takes pieces, then an ItemStatus or RefusedReason code.
        content_id, detail: As in OutgoingRecord.
    """

    __slots__ = ("boot_id", "content_id", "detail", "record", "status", "target", "writer_id")

    def __init__(self, record: AssembledRecord, target: TargetId) -> None:
        self.record = record
        self.target = target
        self.writer_id = 0
        self.boot_id = b""
        self.status = OPEN
        self.content_id = bytes(16)
        self.detail = ""

    def finish(self, status: int, *, content_id: bytes = bytes(16), detail: str = "") -> None:
        """How it ended; it takes no more pieces."""
        self.status = status
        self.content_id = content_id
        self.detail = detail


class AssembledRecord:
    """State of one record of a writer.

    Attributes:
        item: Index of its key in the caller's sequence.
        length_bytes, block_bytes: Of the record.
        copies: One for each target that it is written to; all take the same pieces.
    """

    __slots__ = (
        "_chosen_id",
        "_done",
        "_edges",
        "_left",
        "_table",
        "block_bytes",
        "copies",
        "item",
        "length_bytes",
    )

    def __init__(self, *, item: int, length_bytes: int, block_bytes: int) -> None:
        self.item = item
        self.length_bytes = length_bytes
        self.block_bytes = block_bytes
        self.copies: list[WrittenCopy] = []
        count = block_count(length_bytes, block_bytes)
        self._table = bytearray(4 * count)
        self._done = bytearray(count)
        self._left = count
        self._chosen_id = b""
        self._edges: dict[int, tuple[bytearray, list[tuple[int, int]]]] = {}

    @property
    def is_complete(self) -> bool:
        """True when every block has come."""
        return not self._left

    @property
    def missing_blocks(self) -> int:
        """Blocks of which something is missing."""
        return self._left

    @property
    def crc_table(self) -> bytes:
        """The checksums of all blocks; only right when complete."""
        return bytes(self._table)

    def content_id(self) -> bytes:
        """Of all its copies, chosen here once it is complete; zeros where it has one copy: its node chooses."""
        if len(self.copies) < 2:
            return NO_CONTENT_ID
        if not self._chosen_id:
            self._chosen_id = content_id(self.length_bytes, self.crc_table, os.urandom(8))
        return self._chosen_id

    @property
    def is_open(self) -> bool:
        """Whether any copy takes pieces."""
        return any(copy.status == OPEN for copy in self.copies)

    def add(self, offset: int, region: Region, start: int, length: int) -> list[Piece]:
        """Takes bytes offset..offset+length of the record, which lie in `region` from `start` on.

        Returns:
            What can be sent now, at most SLICE_BYTES_MAX each, in the order of offsets. Views into `region` are only
            valid as long as the caller's memory is.

        Raises:
            InvalidRequest: Outside the record, or some of it has been written before.
        """
        end = offset + length
        if offset < 0 or end > self.length_bytes:
            raise InvalidRequest(
                f"bytes {offset}..{end} of item {self.item} lie outside its record of {self.length_bytes} bytes"
            )
        size = self.block_bytes
        pieces: list[Piece] = []
        first_whole = -(-offset // size)
        behind_whole = block_count(self.length_bytes, size) if end == self.length_bytes else end // size
        if first_whole >= behind_whole:
            for block in range(offset // size, block_count(end, size)):
                low, high = max(offset, block * size), min(end, (block + 1) * size)
                pieces += self._add_edge(block, low, region, start + low - offset, high - low)
            return pieces
        if offset < first_whole * size:
            pieces += self._add_edge(first_whole - 1, offset, region, start, first_whole * size - offset)
        pieces += self._add_whole(first_whole, behind_whole, region, start - offset)
        tail = behind_whole * size
        if tail < end:
            pieces += self._add_edge(behind_whole, tail, region, start + tail - offset, end - tail)
        return pieces

    def _add_whole(self, first: int, behind: int, region: Region, shift: int) -> list[Piece]:
        """Blocks first..behind, whose record offset plus `shift` is their place in `region`."""
        size = self.block_bytes
        step = max(1, SLICE_BYTES_MAX // size)
        self._claim(first, behind)
        pieces = []
        for block in range(first, behind, step):
            low = block * size
            high = min(min(block + step, behind) * size, self.length_bytes)
            views = region.cut(low + shift, high - low)
            crcs = crc_table_fragments(views, size)
            self._table[4 * block : 4 * block + len(crcs)] = crcs
            pieces.append(Piece(low, high - low, views, crcs))
        return pieces

    def _add_edge(self, block: int, offset: int, region: Region, start: int, length: int) -> list[Piece]:
        """Part of one block, copied until the block is whole."""
        low = block * self.block_bytes
        size = min(self.block_bytes, self.length_bytes - low)
        known = self._edges.get(block)
        if known is None:
            if self._done[block]:
                raise self._twice(offset, offset + length)
            known = self._edges[block] = (bytearray(size), [])
        memory, filled = known
        at = offset - low
        if any(first < at + length and at < behind for first, behind in filled):
            raise self._twice(offset, offset + length)
        filled.append((at, at + length))
        for view in region.cut(start, length):
            memory[at : at + len(view)] = view
            at += len(view)
        if sum(behind - first for first, behind in filled) < size:
            return []
        del self._edges[block]
        self._claim(block, block + 1)
        crcs = crc_table(memory, self.block_bytes)
        self._table[4 * block : 4 * block + 4] = crcs
        return [Piece(low, size, [memoryview(memory)], crcs)]

    def _claim(self, first: int, behind: int) -> None:
        if any(self._done[first:behind]) or any(first <= block < behind for block in self._edges):
            raise self._twice(first * self.block_bytes, min(behind * self.block_bytes, self.length_bytes))
        self._done[first:behind] = b"\1" * (behind - first)
        self._left -= behind - first

    def _twice(self, first: int, behind: int) -> InvalidRequest:
        return InvalidRequest(
            f"some of bytes {first}..{behind} of item {self.item} were written before; write each byte once"
        )

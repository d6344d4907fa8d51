"""All memory that touches the device: one anonymous mapping, handed out in contiguous page-aligned pieces.

Freed pieces rest in exact-size bins, so that the sizes in use come back in a few dictionary operations; when no hole
is large enough the bins are emptied, neighbours join, and the search runs once more. Both are amortised: a piece is
joined at most once for each time it was freed.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from kvstore.limits import PAGE_BYTES, MiB

_MADV_HUGEPAGE: Final = 14  # madvise(2); the mmap module lists these two only where libc's headers do
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14


class Piece:
    """A contiguous run of arena pages, shared by whoever holds it and free again when the last one lets go.

    Attributes:
        offset: byte offset in the arena, a multiple of PAGE_BYTES.
        length: bytes, a multiple of PAGE_BYTES; at least what was asked for.
        holders: how many releases are outstanding; 0 once freed. Changed by `hold` and `release`, and in line where
            that is done for every record.
        view: the memory. Its contents are whatever was there before. It must not be used after the last `release`.
    """

    __slots__ = ("_arena", "holders", "length", "offset", "view")

    def __init__(self, arena: Arena, offset: int, length: int) -> None:
        self._arena = arena
        self.holders = 1
        self.offset = offset
        self.length = length
        self.view = arena.memory[offset : offset + length]

    def hold(self) -> None:
        """One more holder, who will `release` too."""
        assert self.holders > 0, "a freed piece cannot be held again"
        self.holders += 1

    def release(self) -> None:
        """One holder fewer; the last one gives the memory back."""
        holders = self.holders = self.holders - 1
        if holders == 0:
            self._arena._free(self.offset, self.length)
        assert holders >= 0, "a piece was released more often than it was held"

    def split(self, lengths: Sequence[int]) -> list[Piece]:
        """Cut into adjacent pieces of their own, without a copy. This piece is spent: do not use it again.

        Args:
            lengths: bytes of each, multiples of PAGE_BYTES; what is left over at the end is freed.
        """
        assert self.holders == 1, "only the one holder of a piece may split it"
        self.holders = 0
        arena = self._arena
        offset = self.offset
        end = offset + self.length
        pieces = []
        for length in lengths:
            assert 0 < length <= end - offset, "the pieces are longer than what is split"
            assert length % PAGE_BYTES == 0
            pieces.append(Piece(arena, offset, length))
            offset += length
        if offset < end:
            arena._free(offset, end - offset)
        return pieces


class Arena:
    """Page-aligned memory of fixed size. Not thread-safe: it belongs to the engine's thread.

    Attributes:
        memory: the whole mapping, for `Device.register`.
        size_bytes: its length, `size_bytes` rounded up to whole pages.
        free_bytes: bytes not in any piece.
    """

    def __init__(self, size_bytes: int, *, huge_pages: bool = True, prefault: bool = True) -> None:
        """Map the memory.

        Args:
            size_bytes: rounded up to pages; at least one page is mapped.
            huge_pages: ask for transparent huge pages, best effort.
            prefault: touch every page now, so that no request pays for it.

        Raises:
            OSError: the address space or the memory limit does not allow the mapping.
        """
        self.size_bytes = max(_round_up(size_bytes), PAGE_BYTES)
        # Private: shared anonymous memory is shmem, which gets no huge pages by default. With them a registered 1 MiB
        # read costs 10 us of processor time instead of 28 (docs/decisions, io_uring).
        self._map = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = memoryview(self._map)
        self._address = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)
        if huge_pages and self.size_bytes >= 2 * MiB:
            _advise(self._map, _MADV_HUGEPAGE)
        if prefault and not _advise(self._map, _MADV_POPULATE_WRITE):
            np.frombuffer(self._map, dtype=np.uint8)[::PAGE_BYTES] = 0
        self.free_bytes = self.size_bytes
        self._bins: dict[int, list[int]] = {}  # length -> offsets of pieces freed and not yet joined
        self._hole_at: dict[int, int] = {0: self.size_bytes}  # offset -> length of joined holes
        self._hole_end: dict[int, int] = {self.size_bytes: 0}  # end -> offset
        self._holes: list[tuple[int, int]] = [(self.size_bytes, 0)]  # (length, offset), sorted: best fit

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self._address

    @property
    def used_bytes(self) -> int:
        """Bytes in pieces that somebody holds."""
        return self.size_bytes - self.free_bytes

    def allocate(self, length_bytes: int) -> Piece | None:
        """A piece of at least `length_bytes` (whole pages, at least one), or None where no hole is that long."""
        length = (length_bytes + PAGE_BYTES - 1) & -PAGE_BYTES or PAGE_BYTES
        resting = self._bins.get(length)
        if resting:
            self.free_bytes -= length
            return Piece(self, resting.pop(), length)
        if length > self.free_bytes:
            return None
        offset = self._take(length)
        if offset < 0 and self._join_bins():
            offset = self._take(length)
        if offset < 0:
            return None
        self.free_bytes -= length
        return Piece(self, offset, length)

    def allocate_resting(self, length_bytes: int, count: int) -> list[Piece]:
        """As many pieces of one length, at most `count`, as were freed lately and are still there."""
        length = (length_bytes + PAGE_BYTES - 1) & -PAGE_BYTES or PAGE_BYTES
        resting = self._bins.get(length)
        if not resting:
            return []
        taken = resting[-count:]
        del resting[-count:]
        self.free_bytes -= length * len(taken)
        return [Piece(self, offset, length) for offset in taken]

    def largest_hole_bytes(self) -> int:
        """The longest piece that `allocate` could give now. Joins what rests in the bins first."""
        self._join_bins()
        return self._holes[-1][0] if self._holes else 0

    def offset_of(self, view: memoryview) -> int:
        """Where in the arena a view of its memory, not empty, begins."""
        return int(np.frombuffer(view, dtype=np.uint8).ctypes.data) - self._address

    def _free(self, offset: int, length: int) -> None:
        self.free_bytes += length
        resting = self._bins.get(length)
        if resting is None:
            self._bins[length] = [offset]
        else:
            resting.append(offset)

    def _take(self, length: int) -> int:
        """Offset of the start of the shortest hole that fits, -1 without one."""
        at = bisect_left(self._holes, (length, 0))
        if at == len(self._holes):
            return -1
        hole, offset = self._holes.pop(at)
        del self._hole_at[offset]
        del self._hole_end[offset + hole]
        if hole > length:
            self._add_hole(offset + length, hole - length)
        return offset

    def _join_bins(self) -> bool:
        """Turn everything in the bins into joined holes; says whether there was anything."""
        bins, self._bins = self._bins, {}
        pieces = [(offset, length) for length, offsets in bins.items() for offset in offsets]
        for offset, length in _joined(sorted(pieces)):
            self._insert_hole(offset, length)
        return bool(pieces)

    def _insert_hole(self, offset: int, length: int) -> None:
        before = self._hole_end.get(offset)
        if before is not None:
            length += self._remove_hole(before)
            offset = before
        end = offset + length
        if end in self._hole_at:
            length += self._remove_hole(end)
        self._add_hole(offset, length)

    def _add_hole(self, offset: int, length: int) -> None:
        self._hole_at[offset] = length
        self._hole_end[offset + length] = offset
        insort(self._holes, (length, offset))

    def _remove_hole(self, offset: int) -> int:
        length = self._hole_at.pop(offset)
        del self._hole_end[offset + length]
        del self._holes[bisect_left(self._holes, (length, offset))]
        return length


def _round_up(length_bytes: int) -> int:
    return -(-length_bytes // PAGE_BYTES) * PAGE_BYTES


def _advise(memory: mmap.mmap, advice: int) -> bool:
    """madvise(2), best effort: an older kernel says EINVAL."""
    try:
        memory.madvise(advice)
    except OSError:
        return False
    return True


def _joined(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Adjacent (offset, length) pairs made one; `pieces` come in order of offset."""
    joined: list[tuple[int, int]] = []
    start = end = -1
    for offset, length in pieces:
        if offset != end:
            if end > start:
                joined.append((start, end - start))
            start = offset
        end = offset + length
    if end > start:
        joined.append((start, end - start))
    return joined

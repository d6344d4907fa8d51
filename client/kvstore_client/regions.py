"""The caller's memory as flat byte views: buffers, (address, length) pairs and sequences of fragments of these.

Nothing here copies payload. Views keep the caller's objects alive; memory behind an (address, length) pair is the
caller's to keep until the call returns.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeAlias, cast

from kvstore.errors import InvalidRequest
from kvstore.limits import ALLOCATED_OF_FREE_MAX, FRAGMENTS_PER_ITEM_MAX
from kvstore.types.buffers import Buffer, view_of
from kvstore.types.free_memory import free_memory_bytes

Fragment: TypeAlias = "Buffer | tuple[int, int]"
Item: TypeAlias = "Fragment | Sequence[Fragment]"

_EMPTY = memoryview(b"")


class Region:
    """The memory of one item: one or more fragments that follow each other in the item, not in memory."""

    __slots__ = ("_starts", "length_bytes", "views")

    def __init__(self, views: list[memoryview]) -> None:
        self.views = views
        if len(views) == 1:
            self.length_bytes = len(views[0])
            self._starts: list[int] | None = None
            return
        total, starts = 0, []
        for view in views:
            starts.append(total)
            total += len(view)
        self.length_bytes = total
        self._starts = starts

    def cut(self, offset_bytes: int, length_bytes: int) -> list[memoryview]:
        """Views of `length_bytes` of the item from `offset_bytes` on; both must lie inside it."""
        if self._starts is None:
            view = self.views[0]
            if offset_bytes == 0 and length_bytes == len(view):
                return [view]
            return [view[offset_bytes : offset_bytes + length_bytes]]
        if length_bytes == 0:
            return []
        found = []
        index = bisect_right(self._starts, offset_bytes) - 1
        at = offset_bytes - self._starts[index]
        while length_bytes > 0:
            view = self.views[index]
            piece = view[at : at + length_bytes]
            if len(piece):
                found.append(piece)
                length_bytes -= len(piece)
            index += 1
            at = 0
        return found


def region_of(item: Item, *, index: int, writable: bool) -> Region:
    """The region of one caller's item.

    Args:
        item: An object with the buffer protocol, an (address, length) pair of integers, or a sequence of these.
        index: Position of the item in the caller's batch, for messages.
        writable: True for a destination.

    Raises:
        InvalidRequest: Not a buffer, read-only, or not C-contiguous; the message names the item.
    """
    if type(item) is memoryview and item.format == "B" and item.ndim == 1 and item.contiguous:
        if writable and item.readonly:
            raise InvalidRequest(f"item {index} is read-only memory; pass memory that may be written")
        return Region([item])
    if isinstance(item, list | tuple) and not _is_address(item):
        if len(item) > FRAGMENTS_PER_ITEM_MAX:
            raise InvalidRequest(f"item {index} has {len(item)} fragments; pass at most {FRAGMENTS_PER_ITEM_MAX}")
        return Region([_view(fragment, index, writable) for fragment in item] or [_EMPTY])
    return Region([_view(cast("Fragment", item), index, writable)])


def refuse_repeated(items: Sequence[Item]) -> None:
    """Makes sure that no destination of a call is given twice, where one item would overwrite the other.

    Compares identities only, 0.1 us for each item: memory that overlaps in other ways is the caller's to avoid.

    Raises:
        InvalidRequest: An item that holds memory is the same object as an earlier one.
    """
    if len(items) < 2 or len(set(map(id, items))) == len(items):
        return
    first: dict[int, int] = {}
    for index, item in enumerate(items):
        earlier = first.setdefault(id(item), index)
        if earlier != index and region_of(item, index=index, writable=True).length_bytes:
            raise InvalidRequest(
                f"item {index} is the same memory as item {earlier}, and would overwrite it; pass other memory for each"
            )


def allocate(length_bytes: int, *, prefault: bool = False) -> memoryview:
    """Page-aligned anonymous memory, writable, freed when the last view of it is gone.

    Args:
        length_bytes: 0 or more.
        prefault: Touch each page now, so that the first call into it pays no page faults.

    Raises:
        InvalidRequest: there is not so much memory.
    """
    if length_bytes < 0:
        raise InvalidRequest(f"length {length_bytes} is negative; pass 0 or more bytes")
    if length_bytes == 0:
        return memoryview(bytearray())
    free = free_memory_bytes() if prefault else None
    if free is not None and length_bytes > free * ALLOCATED_OF_FREE_MAX:
        raise InvalidRequest(
            f"{length_bytes} bytes at once are more than this machine can give ({free} are free); ask for less"
        )
    try:
        area = mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise InvalidRequest(f"{length_bytes} bytes of memory cannot be had ({error}); ask for less") from None
    view = memoryview(area)
    if prefault:
        for at in range(0, length_bytes, mmap.PAGESIZE):
            view[at] = 0
    return view


def _is_address(item: Sequence[object]) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and all(isinstance(value, int) for value in item)


def _view(fragment: Fragment, index: int, writable: bool) -> memoryview:
    """One fragment as a flat view of bytes."""
    if isinstance(fragment, tuple):
        return _address_view(fragment, index)
    try:
        view = view_of(fragment)
    except (TypeError, BufferError) as error:
        raise InvalidRequest(
            f"item {index} is a {type(fragment).__name__}, which gives no memory ({error}); "
            "pass a buffer, an (address, length) pair, or a sequence of these"
        ) from None
    if writable and view.readonly:
        raise InvalidRequest(f"item {index} is read-only {type(fragment).__name__}; pass memory that may be written")
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    if view.nbytes == 0:
        return _EMPTY
    if not view.c_contiguous:
        raise InvalidRequest(
            f"item {index} has shape {view.shape} and strides {view.strides}, which is not C-contiguous; "
            "pass its rows as fragments, or a contiguous buffer"
        )
    return view.cast("B")


def _address_view(pair: tuple[int, int], index: int) -> memoryview:
    if not _is_address(pair):
        raise InvalidRequest(f"item {index} holds the tuple {pair!r:.80}; pass (address, length) as two integers")
    address, length = pair
    if length < 0 or (address <= 0 and length):
        raise InvalidRequest(f"item {index} is address {address} with length {length}; pass an address and 0 or more")
    if length == 0:
        return _EMPTY
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")

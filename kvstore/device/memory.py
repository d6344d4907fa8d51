"""A drive in memory: for tests, and to see how fast everything above a drive is."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from typing import Final

from kvstore.device.base import DeviceMode, IoKind, IoOp
from kvstore.device.scattered import ScatteredRead
from kvstore.device.transfer import ALIGNMENT_BYTES, check_op
from kvstore.errors import Closed, InvalidRequest

# Bound once: reading a member of an enum costs as much as ten other attribute reads, and each operation needs it.
_READ: Final = IoKind.READ
_SYNC: Final = IoKind.SYNC


class MemoryDevice:
    """Bytes in an anonymous mapping. Operations take effect, in order, when `poll` is called.

    Space is counted as a file system does: pages that were written or allocated, until they are discarded.

    Args:
        size_bytes: addressable bytes, a multiple of 4096.
        space_bytes: physical space; beyond it, writes and allocate fail with ENOSPC. None: as much as is addressable.
    """

    def __init__(self, *, size_bytes: int, space_bytes: int | None = None) -> None:
        if size_bytes <= 0 or size_bytes % ALIGNMENT_BYTES:
            raise InvalidRequest(
                f"memory device: size {size_bytes} bytes is not a positive multiple of {ALIGNMENT_BYTES}; round it"
            )
        self._size_bytes = size_bytes
        self._space_bytes = size_bytes if space_bytes is None else space_bytes
        self._memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._memory)
        self._pages = bytearray(size_bytes // ALIGNMENT_BYTES)  # 1: has physical space
        self._pages_used = 0
        self._waiting: list[IoOp] = []
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._mode = DeviceMode(name="memory", direct_io=False, reason="bytes in this process's memory")

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def alignment_bytes(self) -> int:
        return ALIGNMENT_BYTES

    @property
    def mode(self) -> DeviceMode:
        return self._mode

    def register(self, memory: memoryview) -> None:
        """Nothing to pin: bytes are copied by the processor."""
        self._check_open()

    def fileno(self) -> int:
        return self._event_fd

    def submit(self, ops: Sequence[IoOp]) -> None:
        self._check_open()
        if ops:
            if not self._waiting:
                os.eventfd_write(self._event_fd, 1)
            self._waiting.extend(ops)

    def poll(self) -> list[IoOp]:
        self._check_open()
        done, self._waiting = self._waiting, []
        if done:
            os.eventfd_read(self._event_fd)
            for op in done:
                self._perform(op)
        return done

    def _perform(self, op: IoOp) -> None:
        if isinstance(op, ScatteredRead):
            for number, extent in enumerate(op.extents()):
                self._perform(extent)
                op.settled(number, extent)
            return
        op.error = check_op(op, self._size_bytes)
        op.done_bytes = 0
        if op.error is not None or op.kind is _SYNC:
            return
        if op.kind is _READ:
            at = op.offset
            for view in op.buffers:
                piece = self._view[at : at + len(view)]
                view[: len(piece)] = piece
                at += len(piece)
            op.done_bytes = at - op.offset
            return
        try:
            self.allocate(op.offset, op.length_bytes)
        except OSError as error:
            op.error = error
            return
        at = op.offset
        for view in op.buffers:
            self._view[at : at + len(view)] = view
            at += len(view)
        op.done_bytes = op.length_bytes

    def allocate(self, offset: int, length_bytes: int) -> None:
        self._check_open()
        pages = _pages(offset, length_bytes)
        count = pages.stop - pages.start
        fresh = self._pages[pages].count(0)
        if fresh:
            if (self._pages_used + fresh) * ALIGNMENT_BYTES > self._space_bytes:
                raise OSError(
                    errno.ENOSPC,
                    f"memory device: {length_bytes} bytes at {offset} do not fit into {self._space_bytes} bytes of "
                    f"space, {self._pages_used * ALIGNMENT_BYTES} of them used",
                )
            self._pages[pages] = b"\1" * count
            self._pages_used += fresh

    def discard(self, offset: int, length_bytes: int) -> None:
        self._check_open()
        pages = _pages(offset, length_bytes)
        self._pages_used -= self._pages[pages].count(1)
        self._pages[pages] = bytes(pages.stop - pages.start)
        # private anonymous memory reads as zeros afterwards, madvise(2)
        self._memory.madvise(mmap.MADV_DONTNEED, offset, length_bytes)

    def allocated_bytes(self) -> int:
        self._check_open()
        return self._pages_used * ALIGNMENT_BYTES

    def close(self) -> None:
        if self._event_fd >= 0:
            self.poll()
            os.close(self._event_fd)
            self._event_fd = -1
            self._view.release()
            self._memory.close()

    def _check_open(self) -> None:
        if self._event_fd < 0:
            raise Closed("memory device was closed before the call")


def _pages(offset: int, length_bytes: int) -> slice:
    """The pages of an aligned range."""
    return slice(offset // ALIGNMENT_BYTES, (offset + length_bytes) // ALIGNMENT_BYTES)

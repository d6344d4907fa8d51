"""Device I/O that waits: for start-up, `check` and tests, when nothing else runs on the device."""

from __future__ import annotations

import mmap
import select
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.device.base import Device, IoKind, IoOp
from kvstore.limits import PAGE_BYTES, QUEUE_DEPTH_DEFAULT

if TYPE_CHECKING:
    from typing_extensions import Buffer


def pages(length_bytes: int) -> memoryview:
    """Fresh zeroed memory that the device can use without a bounce: page-aligned, rounded up to whole pages."""
    return memoryview(mmap.mmap(-1, max(-(-length_bytes // PAGE_BYTES), 1) * PAGE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bytes of the drive and the page-aligned memory they are read into."""

    offset: int
    buffer: memoryview


class BlockingIo:
    """Reads and writes one after the other, or several at once up to a depth. Aligned memory only."""

    def __init__(self, device: Device, *, depth: int = QUEUE_DEPTH_DEFAULT) -> None:
        self.device = device
        self._depth = depth
        self._poll = select.poll()
        self._poll.register(device.fileno(), select.POLLIN)

    def read(self, offset: int, length_bytes: int) -> memoryview:
        """The bytes of a range; zeros where nothing was ever written.

        Raises:
            OSError: the drive failed.
        """
        buffer = pages(length_bytes)
        error = self.read_many([Range(offset=offset, buffer=buffer)])[0]
        if error is not None:
            raise error
        return buffer

    def read_many(self, ranges: Iterable[Range]) -> list[OSError | None]:
        """Fill the buffers of all ranges; each one's error, None where it went well. A short read leaves zeros."""
        ops = [IoOp(IoKind.READ, item.offset, [item.buffer]) for item in ranges]
        self.run(ops)
        for op in ops:
            if op.error is None and op.done_bytes < op.length_bytes:
                op.buffers[0][op.done_bytes :] = bytes(op.length_bytes - op.done_bytes)
        return [op.error for op in ops]

    def write(self, offset: int, data: Buffer) -> None:
        """Write whole pages.

        Raises:
            OSError: the drive failed.
        """
        view = memoryview(data)
        buffer = pages(len(view))
        buffer[: len(view)] = view
        self._one(IoOp(IoKind.WRITE, offset, [buffer]))

    def sync(self) -> None:
        """Wait until everything written is on stable storage.

        Raises:
            OSError: the drive failed.
        """
        self._one(IoOp(IoKind.SYNC, 0, []))

    def _one(self, op: IoOp) -> None:
        self.run([op])
        if op.error is not None:
            raise op.error

    def run(self, ops: Sequence[IoOp]) -> None:
        """Carry out all operations; returns when the last has completed."""
        started = done = 0
        while done < len(ops):
            room = self._depth - (started - done)
            if room > 0 and started < len(ops):
                batch = ops[started : started + room]
                self.device.submit(batch)
                started += len(batch)
            self._poll.poll()
            done += len(self.device.poll())

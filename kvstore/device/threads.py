"""The thread pool device: preadv and pwritev on a pool of threads. Works wherever a file can be opened.

Threads take operations from one queue and append what is done to another; the driver is woken through an eventfd once
for as many completions as come together. Handing an operation to a thread and back costs more than a small read, so a
thread takes several extents of a scattered read at one time.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Final

from kvstore.device.base import DeviceMode, IoKind, IoOp
from kvstore.device.file import DataFile
from kvstore.device.scattered import ScatteredRead
from kvstore.device.transfer import (
    ALIGNMENT_BYTES,
    PartOp,
    Step,
    bounce,
    check_op,
    describe,
    remaining,
    settle,
    unbounce,
)
from kvstore.errors import Closed
from kvstore.limits import DEVICE_RETRIES_MAX, DEVICE_THREADS_MAX, EXTENTS_PER_THREAD, IO_VECTORS_MAX
from kvstore.telemetry.metrics import DeviceMetrics

# Bound once: reading a member of an enum costs as much as ten other attribute reads, and each operation needs it.
_READ: Final = IoKind.READ
_SYNC: Final = IoKind.SYNC

Transfer = Callable[[int, list[Any], int], int]


class ThreadsDevice:
    """A data file driven by a pool of threads.

    Args:
        file: open data file; the device owns it from here on.
        depth: operations that run at one time, at most DEVICE_THREADS_MAX; others wait in a queue.
        reason: why this backend was chosen, for people.
        metrics: where calls that had to be repeated are counted.
        preadv, pwritev: the system calls; tests hand in ones that fail.
    """

    def __init__(
        self,
        file: DataFile,
        *,
        depth: int,
        reason: str,
        metrics: DeviceMetrics | None = None,
        preadv: Transfer = os.preadv,
        pwritev: Transfer = os.pwritev,
    ) -> None:
        self._file = file
        self._metrics = metrics or DeviceMetrics()
        self._mode = DeviceMode(name="threads", direct_io=file.direct_io, reason=f"{reason}; {file.direct_reason}")
        self._preadv = preadv
        self._pwritev = pwritev
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._signalled = False
        self._todo: SimpleQueue[IoOp | None] = SimpleQueue()
        self._done: deque[IoOp] = deque()
        self._parts: set[ScatteredRead] = set()  # of scattered reads that several threads share
        self._threads = [
            threading.Thread(target=self._work, name=f"kvstore-io-{index}", daemon=True)
            for index in range(min(depth, DEVICE_THREADS_MAX))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    @property
    def alignment_bytes(self) -> int:
        return ALIGNMENT_BYTES

    @property
    def mode(self) -> DeviceMode:
        return self._mode

    def register(self, memory: memoryview) -> None:
        """Nothing to pin: each call hands its own buffers to the kernel."""
        self._check_open()

    def fileno(self) -> int:
        return self._event_fd

    def submit(self, ops: Sequence[IoOp]) -> None:
        self._check_open()
        put = self._todo.put
        for op in ops:
            if op.extent_count > EXTENTS_PER_THREAD:
                assert isinstance(op, ScatteredRead)
                while op.begun < op.extent_count:
                    part = op.cut(EXTENTS_PER_THREAD)
                    self._parts.add(part)
                    put(part)
            else:
                put(op)

    def poll(self) -> list[IoOp]:
        self._check_open()
        # In this order: a thread that sees the flag still set has appended before, and is seen below; one that
        # sets it after the read leaves the descriptor readable.
        if self._signalled:
            try:
                os.eventfd_read(self._event_fd)
            except BlockingIOError:
                pass  # the thread has set the flag and not yet written: a spurious wake-up follows
            self._signalled = False
        done = self._done
        found: list[IoOp] = []
        while done:
            op = done.popleft()
            if op in self._parts:
                assert isinstance(op, ScatteredRead)
                self._parts.discard(op)
                assert op.whole is not None
                if not op.whole.join(op):
                    continue
                op = op.whole
            found.append(op)
        return found

    def allocate(self, offset: int, length_bytes: int) -> None:
        self._file.allocate(offset, length_bytes)

    def discard(self, offset: int, length_bytes: int) -> None:
        self._file.discard(offset, length_bytes)

    def allocated_bytes(self) -> int:
        return self._file.allocated_bytes()

    def close(self) -> None:
        if self._event_fd < 0:
            return
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._event_fd)
        self._event_fd = -1
        self._file.close()

    def _check_open(self) -> None:
        if self._event_fd < 0:
            raise Closed(f"{self._file.path}: the device was closed before the call")

    def _work(self) -> None:
        get = self._todo.get
        append = self._done.append
        while (op := get()) is not None:
            self._perform(op)
            append(op)
            if not self._signalled:
                self._signalled = True
                os.eventfd_write(self._event_fd, 1)

    def _perform(self, op: IoOp) -> None:
        if isinstance(op, ScatteredRead):
            try:
                extents = op.extents()
            except ValueError:  # memory that was released: the thread must outlive it
                op.faults = dict.fromkeys(range(op.extent_count), (0, describe(op, errno.EFAULT)))
                return
            for number, extent in enumerate(extents):
                self._perform(extent)
                op.settled(number, extent)
            return
        op.done_bytes = 0
        op.error = check_op(op, self._file.size_bytes)
        if op.error is not None:
            return
        if self._transfer(op):
            return
        # The drive did not take the caller's memory as it is: once more through aligned memory of ours.
        part = bounce(op)
        op.error = None
        if not self._transfer(part):
            part.error = describe(op, errno.EINVAL)
        self._finish_bounced(part)

    def _finish_bounced(self, part: PartOp) -> None:
        unbounce(part)
        part.original.done_bytes = part.done_bytes
        part.original.error = part.error

    def _transfer(self, op: IoOp) -> bool:
        """Carry out one operation to its end. False: EINVAL, which under O_DIRECT means unaligned memory."""
        retries = 0
        while True:
            result = self._call(op)
            if result == -errno.EINVAL and self._file.direct_io:
                op.done_bytes = 0
                return False
            step = settle(op, result)
            if step is Step.DONE:
                return True
            self._metrics.retries += 1
            if step is Step.RETRY:
                retries += 1
                if retries > DEVICE_RETRIES_MAX:
                    op.error = describe(op, -result)
                    return True

    def _call(self, op: IoOp) -> int:
        """One system call for what is left of an operation: bytes moved, or -errno."""
        fd = self._file.fd
        try:
            if op.kind is _SYNC:
                os.fdatasync(fd)
                return 0
            buffers: list[memoryview] = op.buffers
            if op.done_bytes:
                buffers = remaining(buffers, op.done_bytes)
            if len(buffers) > IO_VECTORS_MAX:
                buffers = buffers[:IO_VECTORS_MAX]
            if op.kind is _READ:
                return self._preadv(fd, buffers, op.offset + op.done_bytes)
            return self._pwritev(fd, buffers, op.offset + op.done_bytes)
        except OSError as error:
            return -(error.errno or errno.EIO)
        except (TypeError, ValueError, BufferError):
            return -errno.EFAULT  # a buffer that was released, or is read-only: the thread must outlive it

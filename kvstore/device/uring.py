"""The io_uring device: one ring per drive, batches in and out with one call each, memory and file registered.

The work of the common case happens in the compiled binding (`_uring.c`); Python sees an operation again only when it
did not move all its bytes, was handed in unaligned, or waits for room in the ring.
"""

from __future__ import annotations

import errno
import os
import resource
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvstore.device.base import DeviceMode, IoOp
from kvstore.device.file import DataFile
from kvstore.device.scattered import ScatteredRead
from kvstore.device.transfer import ALIGNMENT_BYTES, PartOp, Step, bounce, check_op, describe, rest_of, settle, unbounce
from kvstore.device.uring_probe import UringAbilities
from kvstore.errors import Closed
from kvstore.limits import DEVICE_RETRIES_MAX, REGISTERED_PIECE_BYTES, MiB
from kvstore.telemetry.metrics import DeviceMetrics

Reaped = tuple[list[IoOp], list[tuple[IoOp, int]], list[tuple[ScatteredRead, list[tuple[int, int]] | None]]]
"""What moved all its bytes; what else, with the result; scattered reads with the extents that did not, or None."""


class Ring(Protocol):
    """What the device needs of the compiled ring; tests put a failing one in between."""

    variants: int

    @property
    def in_flight(self) -> int: ...
    @property
    def depth(self) -> int: ...
    def submit(self, ops: Sequence[IoOp], start: int, odd: list[IoOp], /) -> int: ...
    def reap(self) -> Reaped: ...
    def wait(self) -> None: ...
    def fileno(self) -> int: ...
    def register_memory(self, memory: memoryview, piece_bytes: int, /) -> None: ...
    def register_file(self) -> None: ...
    def close(self) -> None: ...


class UringDevice:
    """A data file driven by io_uring.

    Args:
        file: open data file; the device owns it from here on.
        ring: a ring over `file`; owned too.
        abilities: what `probe_uring` found on this file.
        reason: why this backend was chosen, for people.
        metrics: where operations that had to be repeated are counted.
    """

    def __init__(
        self,
        file: DataFile,
        ring: Ring,
        *,
        abilities: UringAbilities,
        reason: str,
        metrics: DeviceMetrics | None = None,
    ) -> None:
        self._file = file
        self._metrics = metrics or DeviceMetrics()
        self._ring = ring
        self._abilities = abilities
        self._reason = "; ".join((reason, *abilities.notes, file.direct_reason))
        self._event_fd = ring.fileno()
        self._backlog: deque[IoOp] = deque()  # waits for room in the ring, in order
        self._ready: list[IoOp] = []  # finished without the kernel
        self._retries: dict[IoOp, int] = {}
        # parts of scattered reads that go on their own: of which, and which extent, or None for several
        self._parts: dict[IoOp, tuple[ScatteredRead, int | None]] = {}
        self._extents_left: dict[ScatteredRead, int] = {}
        self._closed = False
        try:
            ring.register_file()
        except OSError:
            pass  # noted by the probe; the descriptor works as well
        ring.variants = abilities.variants
        self._memory_note = "memory not registered yet"

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    @property
    def alignment_bytes(self) -> int:
        return ALIGNMENT_BYTES

    @property
    def mode(self) -> DeviceMode:
        return DeviceMode(name="uring", direct_io=self._file.direct_io, reason=f"{self._reason}; {self._memory_note}")

    def register(self, memory: memoryview) -> None:
        """Pin memory for the life of the device. What the kernel refuses is said in `mode`; I/O works without."""
        self._check_open()
        try:
            self._ring.register_memory(memory, REGISTERED_PIECE_BYTES)
        except OSError as error:
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            self._memory_note = (
                f"{len(memory)} bytes of memory not registered ({os.strerror(error.errno or 0)}; the locked memory "
                f"limit is {soft} bytes, ulimit -l), so each operation pins its own"
            )
        else:
            self._memory_note = f"{len(memory) // MiB} MiB of memory registered"

    def fileno(self) -> int:
        return self._event_fd

    def submit(self, ops: Sequence[IoOp]) -> None:
        self._check_open()
        if self._backlog:
            self._backlog.extend(ops)
            return
        odd: list[IoOp] = []
        taken = self._ring.submit(ops, 0, odd)
        if taken < len(ops):
            self._backlog.extend(ops[taken:])
        if odd:
            self._take_odd(odd)
            self._pump()

    def poll(self) -> list[IoOp]:
        self._check_open()
        reaped, odd, scattered = self._ring.reap()
        if not (odd or scattered or self._backlog or self._ready or self._parts):
            return reaped
        done: list[IoOp] = []
        for op in reaped:
            self._finish(op, done)
        for op, result in odd:
            self._settle(op, result, done)
        for whole, results in scattered:
            if results is None:  # there was no memory to note them: what came is not believed
                results = [(number, -errno.ENOMEM) for number in range(len(whole.lengths))]
            self._settle_extents(whole, results, done)
        self._pump()
        ready, self._ready = self._ready, []
        for op in ready:
            self._finish(op, done)
        return done

    def allocate(self, offset: int, length_bytes: int) -> None:
        self._file.allocate(offset, length_bytes)

    def discard(self, offset: int, length_bytes: int) -> None:
        self._file.discard(offset, length_bytes)

    def allocated_bytes(self) -> int:
        return self._file.allocated_bytes()

    def close(self) -> None:
        if self._closed:
            return
        while self._backlog or self._ring.in_flight:
            self._ring.wait()
            self.poll()
        self._closed = True
        self._ring.close()
        self._file.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._file.path}: the device was closed before the call")

    def _pump(self) -> None:
        """Move what waits into the ring, as far as there is room."""
        backlog = self._backlog
        while backlog:
            room = self._ring.depth - self._ring.in_flight
            if room <= 0:
                return
            batch = [backlog.popleft() for _ in range(min(room, len(backlog)))]
            odd: list[IoOp] = []
            taken = self._ring.submit(batch, 0, odd)
            backlog.extendleft(reversed(batch[taken:]))
            self._take_odd(odd)
            if taken < len(batch):
                return  # a scattered read, for which there is not room enough yet

    def _take_odd(self, ops: Sequence[IoOp]) -> None:
        """Operations that the ring did not start: refused ones finish now, unaligned ones go through our memory."""
        for op in ops:
            if isinstance(op, ScatteredRead):
                self._take_apart(op)
                continue
            error = check_op(op, self._file.size_bytes)
            if error is None and op.length_bytes:
                self._backlog.append(bounce(op))
                continue
            op.error = error
            op.done_bytes = 0
            if not self._ready:
                os.eventfd_write(self._event_fd, 1)
            self._ready.append(op)

    def _take_apart(self, op: ScatteredRead) -> None:
        """A scattered read that the ring cannot take as it is goes in parts, or each extent by itself."""
        depth = self._ring.depth
        if op.extent_count > depth:
            while op.begun < op.extent_count:
                part = op.cut(depth)
                self._parts[part] = op, None
                self._backlog.append(part)
            return
        extents = op.extents()
        self._extents_left[op] = len(extents)
        for number, extent in enumerate(extents):
            self._parts[extent] = op, number
        self._take_odd(extents)

    def _settle_extents(self, op: ScatteredRead, results: Sequence[tuple[int, int]], done: list[IoOp]) -> None:
        """Go on with the extents of a scattered read that did not complete whole in one call."""
        op.done_bytes = op.length_bytes - sum(op.lengths[number] for number, _ in results)
        self._extents_left[op] = len(results)
        for number, result in results:
            extent = op.extent(number)
            self._parts[extent] = op, number
            self._settle(extent, result, done)

    def _finish(self, op: IoOp, done: list[IoOp]) -> None:
        """An operation has ended; a part of a scattered read ends that with the last one."""
        part = self._parts.pop(op, None)
        if part is None:
            done.append(op)
            return
        whole, number = part
        if number is None:
            assert isinstance(op, ScatteredRead)
            if whole.join(op):
                self._finish(whole, done)
            return
        whole.settled(number, op)
        left = self._extents_left[whole] = self._extents_left[whole] - 1
        if not left:
            del self._extents_left[whole]
            self._finish(whole, done)

    def _settle(self, op: IoOp, result: int, done: list[IoOp]) -> None:
        """Go on with an operation that did not complete whole in one call."""
        step = settle(op, result)
        if step is not Step.DONE:
            self._metrics.retries += 1
        if step is Step.RETRY:
            retries = self._retries[op] = self._retries.get(op, 0) + 1
            if retries <= DEVICE_RETRIES_MAX:
                self._backlog.append(op)
                return
            op.error = describe(op, -result)
        if self._retries:
            self._retries.pop(op, None)
        if step is Step.MORE:
            self._backlog.append(rest_of(op))
            return
        while isinstance(op, PartOp):
            unbounce(op)
            original = op.original
            original.done_bytes = op.start_bytes + op.done_bytes
            original.error = op.error
            op = original
        self._finish(op, done)

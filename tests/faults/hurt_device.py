"""A drive inside a real worker that kills its process at a chosen step, or becomes slow, as a file tells it to.

Steps are operations on the drive, named by the part of the format that they touch, and a moment: before the operation
is submitted, with half of its bytes written, or after it has completed and before the engine hears of it. Between two
of them a worker does nothing that outlives it, so these are all the steps of a put there are.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from kvstore.device.base import Device, DeviceMode, IoKind, IoOp
from kvstore.engine.format import LOG_OFFSET, SUPERBLOCK_OFFSETS, Superblock, decode_superblock
from kvstore.limits import PAGE_BYTES

CONTROL_VARIABLE: Final = "FAULTS_CONTROL"
_LOOK_S: Final = 0.05  # how soon a slow drive notices that it may be quick again


class Region(Enum):
    """Parts of a drive."""

    SUPERBLOCK = "superblock"
    LOG = "log"
    HEADER = "header"  # of a segment: written when it is opened, and when it is freed
    RECORD = "record"
    SEAL = "seal"  # index blocks and footer at a segment's end
    DRIVE = "drive"  # the whole: syncs


class Moment(Enum):
    """When the process dies."""

    BEFORE = "before"
    TORN = "torn"
    AFTER = "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The `count`-th operation of a kind on a region, from when it is armed. `node`: the supervisor dies first."""

    kind: IoKind
    region: Region
    moment: Moment
    count: int = 1
    node: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the drive is to do from now on: die at a step, move `bytes_per_s` at most (0: as fast as it can)."""

    crash: Step | None = None
    bytes_per_s: int = 0

    def write(self, path: Path) -> None:
        """Hand it to the worker; whole or not at all."""
        text = json.dumps(asdict(self), default=lambda value: value.value)
        scratch = path.with_suffix(".new")
        scratch.write_text(text)
        scratch.rename(path)

    @classmethod
    def read(cls, path: Path) -> Order:
        """The order that lies there; none is no fault."""
        try:
            value = json.loads(path.read_text())
        except FileNotFoundError:
            return cls()
        step = value["crash"]
        if step is not None:
            step = Step(
                kind=IoKind(step["kind"]),
                region=Region(step["region"]),
                moment=Moment(step["moment"]),
                count=step["count"],
                node=step["node"],
            )
        return cls(crash=step, bytes_per_s=value["bytes_per_s"])


class HurtDevice:
    """Wraps the device of a worker. `control` is looked at before each operation."""

    def __init__(self, inner: Device, *, path: Path, control: Path) -> None:
        self._inner = inner
        self._path = path
        self._control = control
        self._stamp: tuple[int, int] | None = None
        self._order = Order()
        self._left = 0  # operations of the armed step to let pass, this one included
        self._doomed: IoOp | None = None
        self._superblock: Superblock | None = None
        self._late: deque[tuple[float, IoOp]] = deque()
        self._free_at = 0.0  # when a slow drive has moved all that it was given
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready = select.epoll()
        for fd in (inner.fileno(), self._wake):
            self._ready.register(fd, select.EPOLLIN)

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    @property
    def alignment_bytes(self) -> int:
        return self._inner.alignment_bytes

    @property
    def mode(self) -> DeviceMode:
        return self._inner.mode

    def register(self, memory: memoryview) -> None:
        self._inner.register(memory)

    def fileno(self) -> int:
        return self._ready.fileno()

    def allocate(self, offset: int, length_bytes: int) -> None:
        self._inner.allocate(offset, length_bytes)

    def discard(self, offset: int, length_bytes: int) -> None:
        self._inner.discard(offset, length_bytes)

    def allocated_bytes(self) -> int:
        return self._inner.allocated_bytes()

    def close(self) -> None:
        self._ready.close()
        self._inner.close()

    def submit(self, ops: Sequence[IoOp]) -> None:
        self._look()
        for op in ops:
            step = self._order.crash
            if step is None or self._doomed or not self._matches(step, op):
                self._inner.submit([op])
                continue
            self._left -= 1
            if self._left:
                self._inner.submit([op])
            elif step.moment is Moment.BEFORE:
                self._die(step)
            elif step.moment is Moment.TORN and op.kind is IoKind.WRITE:
                self._write_half(op)
                self._die(step)
            else:
                self._doomed = op
                self._inner.submit([op])

    def poll(self) -> list[IoOp]:
        done = self._inner.poll()
        if self._doomed is not None and any(op is self._doomed for op in done):
            assert self._order.crash is not None
            self._die(self._order.crash)
        if not self._late and not self._order.bytes_per_s:
            return done
        return self._slowly(done)

    def _slowly(self, done: list[IoOp]) -> list[IoOp]:
        """Holds back what has completed until a drive of the ordered speed would have moved it, one by one."""
        self._look()
        now = time.monotonic()
        speed = self._order.bytes_per_s
        for op in done:
            self._free_at = max(now, self._free_at) + (op.length_bytes / speed if speed else 0.0)
            self._late.append((self._free_at, op))
        if self._late and not speed:
            self._late = deque((now, op) for _, op in self._late)
        ready = []
        while self._late and self._late[0][0] <= now:
            ready.append(self._late.popleft()[1])
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        if self._late:
            timer = threading.Timer(min(self._late[0][0] - now, _LOOK_S), os.eventfd_write, (self._wake, 1))
            timer.daemon = True
            timer.start()
        return ready

    def _look(self) -> None:
        try:
            found = os.stat(self._control)
        except FileNotFoundError:
            stamp = None
        else:
            stamp = (found.st_mtime_ns, found.st_ino)
        if stamp != self._stamp:
            self._stamp = stamp
            self._order = Order.read(self._control)
            self._left = self._order.crash.count if self._order.crash else 0

    def _matches(self, step: Step, op: IoOp) -> bool:
        return op.kind is step.kind and (op.kind is IoKind.SYNC or self._region(op) is step.region)

    def _region(self, op: IoOp) -> Region:
        if op.offset < LOG_OFFSET:
            return Region.SUPERBLOCK
        if self._superblock is None:
            with self._path.open("rb") as file:
                pages = [os.pread(file.fileno(), PAGE_BYTES, offset) for offset in SUPERBLOCK_OFFSETS]
            self._superblock = next(filter(None, map(decode_superblock, pages)), None)
            assert self._superblock is not None, f"{self._path} has no superblock and is written to"
        if op.offset < self._superblock.segments_offset:
            return Region.LOG
        within = (op.offset - self._superblock.segments_offset) % self._superblock.segment_bytes
        if within == 0:
            return Region.HEADER
        return Region.SEAL if within + op.length_bytes == self._superblock.segment_bytes else Region.RECORD

    def _write_half(self, op: IoOp) -> None:
        """The first half of the bytes in whole pages, at least one page if there are two."""
        left = op.length_bytes // 2 // PAGE_BYTES * PAGE_BYTES
        buffers = []
        for buffer in op.buffers:
            if left:
                buffers.append(buffer[:left])
                left -= len(buffers[-1])
        if not buffers:
            return
        half = IoOp(IoKind.WRITE, op.offset, buffers)
        self._inner.submit([half])
        while half not in self._inner.poll():
            pass

    def _die(self, step: Step) -> None:
        self._control.unlink()
        if step.node:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

"""A drive that fails on demand: a wrapper of any device, deterministic by its seed.

Operations take effect inside `poll`, so nothing is in flight in the wrapped device between calls: a test that replays
the same calls with the same seed sees the same faults.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import select
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvstore.device.base import Device, DeviceMode, IoKind, IoOp
from kvstore.device.scattered import ScatteredRead
from kvstore.device.transfer import check_op, describe
from kvstore.errors import Closed

_PAGE_BYTES: Final = 4096
_TORN_UNIT_BYTES: Final = 512  # what a drive writes at once, at the least
_EVERYWHERE: Final = 1 << 62


class FaultAction(Enum):
    """What goes wrong with an operation."""

    ERROR = "error"  # fails with errno_code, nothing moves
    SHORT = "short"  # a read brings its first keep_bytes only, without an error
    TORN = "torn"  # only the first keep_bytes of a write land; acknowledged
    LOST = "lost"  # a write is acknowledged and never lands
    MISDIRECTED = "misdirected"  # the operation goes to offset + shift_bytes
    FLIP = "flip"  # one bit differs: of what a read returns, or of what a write stores


@dataclass(slots=True, kw_only=True)
class Fault:
    """One armed fault.

    Attributes:
        action: what goes wrong.
        kind: operations it hits; None is any.
        start, end: byte range of the drive; an operation is hit when it touches it. A SYNC is of all of it.
        skip: operations that would be hit and are let pass first.
        times: how often it strikes; None is always.
        errno_code: for ERROR.
        keep_bytes: for SHORT and TORN.
        shift_bytes: for MISDIRECTED, a multiple of 4096.
        bit: for FLIP, counted from the operation's first byte; out of range wraps.
    """

    action: FaultAction
    kind: IoKind | None = None
    start: int = 0
    end: int = _EVERYWHERE
    skip: int = 0
    times: int | None = 1
    errno_code: int = errno.EIO
    keep_bytes: int = 0
    shift_bytes: int = _PAGE_BYTES
    bit: int = 0

    def strikes(self, op: IoOp) -> bool:
        """Whether it hits this operation; counts down `skip` and `times`."""
        if self.kind is not None and op.kind is not self.kind:
            return False
        if op.kind is not IoKind.SYNC and not (op.offset < self.end and op.offset + op.length_bytes > self.start):
            return False
        if self.times == 0:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


class Survival(Enum):
    """Which writes that completed but were not synced outlive a crash."""

    ALL = "all"  # the process died: the page cache and the drive's cache live on
    NONE = "none"  # the power went: only what was synced
    SOME = "some"  # the power went: any of them, in any combination, the last ones torn


@dataclass(slots=True)
class _Unsynced:
    """A write that completed after the last sync: what was there, and what came."""

    offset: int
    before: bytes
    after: bytes


@dataclass(slots=True)
class FaultCounts:
    """How often each fault struck, for a test to prove that it tested something."""

    by_action: dict[FaultAction, int] = field(default_factory=lambda: dict.fromkeys(FaultAction, 0))

    def __getitem__(self, action: FaultAction) -> int:
        return self.by_action[action]


class FaultyDevice:
    """Wraps a device with faults, held-back and reordered completions, and crashes.

    Args:
        inner: the device that keeps the bytes; closed with this one.
        seed: of every random choice.
        shuffle: True: each poll completes a random part of what is due, in random order.
        remember_unsynced: keep what each write replaced until the next sync, so that `crash` can undo it. Reads
            before each write, so it is off by default.
        rates: probability of each action per operation, on top of armed faults.
    """

    def __init__(
        self,
        inner: Device,
        *,
        seed: int = 0,
        shuffle: bool = False,
        remember_unsynced: bool = False,
        rates: dict[FaultAction, float] | None = None,
    ) -> None:
        self.inner = inner
        self.counts = FaultCounts()
        self.full = False  # allocate answers ENOSPC while True
        self.read_only = False  # allocate and discard answer EROFS while True
        self._seed = seed
        self._random = random.Random(seed)
        self._shuffle = shuffle
        self._remember = remember_unsynced
        self._rates = dict(rates or {})
        self._faults: list[Fault] = []
        self._due: list[tuple[IoOp, int]] = []  # operation, unsynced writes that had completed when it was submitted
        self._unsynced: list[_Unsynced] = []
        self._synced = 0  # how many unsynced writes were ever dropped from the front
        self._holding = False
        self._may_complete = 0
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # ---- what a test does to the drive ------------------------------------------------------------------------

    def inject(self, fault: Fault) -> Fault:
        """Arm a fault; of several that would strike one operation, the first armed does."""
        self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Disarm all faults and random rates."""
        self._faults.clear()
        self._rates.clear()
        self.full = self.read_only = False

    def hold(self) -> None:
        """Complete nothing until `release`: a slow drive."""
        self._holding = True
        self._may_complete = 0
        self._signal()

    def release(self, count: int | None = None) -> None:
        """Let `count` held operations complete, the oldest first, or all of them and stop holding."""
        if count is None:
            self._holding = False
        else:
            self._may_complete += count
        self._signal()

    @property
    def held(self) -> int:
        """Operations submitted and not completed."""
        return len(self._due)

    def flip_at_rest(self, offset: int, bit: int) -> None:
        """Flip one bit of a stored byte, past the device's back."""
        page = offset - offset % _PAGE_BYTES
        data = bytearray(self._read(page, _PAGE_BYTES))
        data[offset - page] ^= 1 << (bit % 8)
        self._write(page, bytes(data))

    def crash(self, survival: Survival = Survival.ALL) -> FaultyDevice:
        """The node dies now; returns the drive as the next start finds it, without faults.

        Operations that have not completed land not at all, whole, up to a sector, or in any of their pages (a seeded
        choice); with NONE, not at all. Completed writes that were not synced survive as `survival` says; for NONE and
        SOME the device must have been made with `remember_unsynced`. This object is closed to its users; the wrapped
        device lives on.
        """
        self._check_open()
        assert survival is Survival.ALL or self._remember, "make the device with remember_unsynced=True"
        kept = self._undo_unsynced(survival)
        if survival is not Survival.NONE:
            for write in kept:
                self._land(write.offset, write.after)
            for op, _ in self._due:
                if op.kind is IoKind.WRITE:
                    self._land_part(op.offset, b"".join(op.buffers))
        reopened = FaultyDevice(
            self.inner, seed=self._seed + 1, shuffle=self._shuffle, remember_unsynced=self._remember
        )
        self._due.clear()
        os.close(self._event_fd)
        self._event_fd = -1
        return reopened

    def _undo_unsynced(self, survival: Survival) -> list[_Unsynced]:
        """Take back completed writes where a crash may; those that survive are to be written again, in order."""
        if survival is Survival.ALL:
            return []
        for write in reversed(self._unsynced):
            self._land(write.offset, write.before)
        if survival is Survival.NONE:
            return []
        return [write for write in self._unsynced if self._random.random() < 0.5]

    def _land_part(self, offset: int, data: bytes) -> None:
        """Nothing, all, the first sectors, or any of the pages: a long write is several commands to a drive."""
        kind = self._random.randrange(4)
        if kind == 3:
            for at in range(0, len(data), _PAGE_BYTES):
                if self._random.random() < 0.5:
                    self._land(offset + at, data[at : at + _PAGE_BYTES])
            return
        units = len(data) // _TORN_UNIT_BYTES
        self._land(offset, data[: (0, units, self._random.randint(0, units))[kind] * _TORN_UNIT_BYTES])

    # ---- the Device protocol ----------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        return self.inner.size_bytes

    @property
    def alignment_bytes(self) -> int:
        return self.inner.alignment_bytes

    @property
    def mode(self) -> DeviceMode:
        return self.inner.mode

    def register(self, memory: memoryview) -> None:
        self._check_open()
        self.inner.register(memory)

    def fileno(self) -> int:
        return self._event_fd

    def submit(self, ops: Sequence[IoOp]) -> None:
        self._check_open()
        seen = self._synced + len(self._unsynced)
        self._due.extend((op, seen) for op in ops)
        self._signal()

    def poll(self) -> list[IoOp]:
        self._check_open()
        count = len(self._due)
        if self._holding:
            count = min(count, self._may_complete)
            self._may_complete -= count
        chosen = self._due[:count]
        if self._shuffle and count > 1:
            self._random.shuffle(chosen)
            chosen = chosen[: self._random.randint(1, count)]
        taken = {id(op) for op, _ in chosen}
        self._due = [entry for entry in self._due if id(entry[0]) not in taken]
        for op, seen in chosen:
            self._perform(op, seen)
        self._signal()
        return [op for op, _ in chosen]

    def allocate(self, offset: int, length_bytes: int) -> None:
        self._check_open()
        self._check_writable()
        if self.full:
            raise OSError(errno.ENOSPC, f"allocate of {length_bytes} bytes at {offset}: no space (injected)")
        self.inner.allocate(offset, length_bytes)

    def discard(self, offset: int, length_bytes: int) -> None:
        self._check_open()
        self._check_writable()
        self.inner.discard(offset, length_bytes)

    def allocated_bytes(self) -> int:
        self._check_open()
        return self.inner.allocated_bytes()

    def close(self) -> None:
        if self._event_fd >= 0:
            self.clear()
            self.release()
            while self._due:
                self.poll()
            os.close(self._event_fd)
            self._event_fd = -1
            self.inner.close()

    def _check_open(self) -> None:
        if self._event_fd < 0:
            raise Closed("the faulty device was closed or has crashed before the call")

    def _check_writable(self) -> None:
        if self.read_only:
            raise OSError(errno.EROFS, f"{os.strerror(errno.EROFS)} (injected)")

    def _signal(self) -> None:
        """Make the descriptor readable exactly when a poll would complete something."""
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            pass
        if self._due and (not self._holding or self._may_complete):
            os.eventfd_write(self._event_fd, 1)

    # ---- carrying out, with faults ----------------------------------------------------------------------------

    def _perform(self, op: IoOp, seen: int) -> None:
        if isinstance(op, ScatteredRead):
            for number, extent in enumerate(op.extents()):  # a fault strikes one extent
                self._perform(extent, seen)
                op.settled(number, extent)
            return
        if check_op(op, self.size_bytes) is not None or not (op.length_bytes or op.kind is IoKind.SYNC):
            self._run([op])  # refused, or nothing to move: no place for a fault
            return
        fault = self._strike(op)
        if fault is not None:
            self.counts.by_action[fault.action] += 1
        if fault is not None and fault.action is FaultAction.ERROR:
            op.done_bytes = 0
            op.error = describe(op, fault.errno_code)
        elif op.kind is IoKind.WRITE:
            self._perform_write(op, fault)
        elif op.kind is IoKind.READ:
            self._perform_read(op, fault)
        else:
            self._run([op])
            if op.error is None:
                del self._unsynced[: max(seen - self._synced, 0)]
                self._synced = max(self._synced, seen)

    def _strike(self, op: IoOp) -> Fault | None:
        for fault in self._faults:
            if _fits(fault.action, op.kind) and fault.strikes(op):
                return fault
        for action, rate in self._rates.items():
            if _fits(action, op.kind) and self._random.random() < rate:
                return self._random_fault(action, op)
        return None

    def _random_fault(self, action: FaultAction, op: IoOp) -> Fault:
        units = max(op.length_bytes // _TORN_UNIT_BYTES - 1, 0)
        return Fault(
            action=action,
            keep_bytes=self._random.randint(0, units) * _TORN_UNIT_BYTES,
            bit=self._random.randrange(max(op.length_bytes * 8, 1)),
        )

    def _perform_read(self, op: IoOp, fault: Fault | None) -> None:
        if fault is None:
            self._run([op])
            return
        at = op.offset + (fault.shift_bytes if fault.action is FaultAction.MISDIRECTED else 0)
        twin = IoOp(op.kind, at, op.buffers, flow=op.flow)
        self._run([twin])
        op.done_bytes, op.error = twin.done_bytes, twin.error
        if fault.action is FaultAction.SHORT:
            op.done_bytes = min(op.done_bytes, fault.keep_bytes)
        elif fault.action is FaultAction.FLIP:
            _flip(op.buffers, fault.bit % max(op.length_bytes * 8, 1))

    def _perform_write(self, op: IoOp, fault: Fault | None) -> None:
        before = self._read(op.offset, op.length_bytes) if self._remember else b""
        if fault is None:
            self._run([op])
        else:
            self._land_wrong(op, fault)
            op.done_bytes, op.error = op.length_bytes, None
        if self._remember and op.error is None:
            after = self._read(op.offset, op.length_bytes)
            self._unsynced.append(_Unsynced(op.offset, before, after))

    def _land_wrong(self, op: IoOp, fault: Fault) -> None:
        data = bytearray(b"".join(op.buffers))
        if fault.action is FaultAction.TORN:
            self._land(op.offset, bytes(data[: fault.keep_bytes]))
        elif fault.action is FaultAction.MISDIRECTED:
            at = op.offset + fault.shift_bytes
            self._land(at, bytes(data[: max(self.inner.size_bytes - at, 0)]))
        elif fault.action is FaultAction.FLIP:
            _flip([memoryview(data)], fault.bit % (len(data) * 8))
            self._land(op.offset, bytes(data))
        else:
            assert fault.action is FaultAction.LOST

    def _land(self, offset: int, data: bytes) -> None:
        """Store any number of bytes; the rest of the last page stays."""
        whole = -(-len(data) // _PAGE_BYTES) * _PAGE_BYTES
        if whole:
            old_tail = self._read(offset, whole)[len(data) :]
            self._write(offset, data + old_tail)

    def _read(self, offset: int, length_bytes: int) -> bytes:
        page = memoryview(mmap.mmap(-1, length_bytes))
        op = IoOp(IoKind.READ, offset, [page])
        self._run([op])
        if op.error is not None:
            raise op.error
        return bytes(page)

    def _write(self, offset: int, data: bytes) -> None:
        pages = memoryview(mmap.mmap(-1, len(data)))
        pages[:] = data
        op = IoOp(IoKind.WRITE, offset, [pages])
        self._run([op])
        if op.error is not None:
            raise op.error

    def _run(self, ops: Sequence[IoOp]) -> None:
        """Carry out operations on the wrapped device, to their end."""
        self.inner.submit(ops)
        waiting = len(ops)
        poll = select.poll()
        poll.register(self.inner.fileno(), select.POLLIN)
        while waiting:
            poll.poll()
            waiting -= len(self.inner.poll())


def _fits(action: FaultAction, kind: IoKind) -> bool:
    """Whether an action makes sense for a kind of operation."""
    if action is FaultAction.ERROR:
        return True
    if action is FaultAction.SHORT:
        return kind is IoKind.READ
    if action in (FaultAction.TORN, FaultAction.LOST):
        return kind is IoKind.WRITE
    return kind is not IoKind.SYNC


def _flip(buffers: Sequence[memoryview], bit: int) -> None:
    """Flip one bit of a vector, counted from its first byte."""
    at = bit // 8
    for view in buffers:
        if at < len(view):
            view[at] ^= 1 << (bit % 8)
            return
        at -= len(view)

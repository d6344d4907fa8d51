"""What the result of a system call means for an operation, and buffers that the drive cannot take as they are.

Shared by every device that moves real bytes, so that short transfers, EINTR, EAGAIN and unaligned memory are handled
once. Nothing here does I/O.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from enum import Enum
from typing import Final

from kvstore.device.base import IoKind, IoOp
from kvstore.limits import PAGE_BYTES

# Bound once: reading a member of an enum costs as much as ten other attribute reads, and each operation needs it.
_READ: Final = IoKind.READ
_WRITE: Final = IoKind.WRITE
_SYNC: Final = IoKind.SYNC

ALIGNMENT_BYTES: Final = PAGE_BYTES
_AGAIN_ERRNOS: Final = frozenset((errno.EINTR, errno.EAGAIN))


class Step(Enum):
    """What to do with an operation after one system call."""

    DONE = "done"
    MORE = "more"
    RETRY = "retry"


class PartOp(IoOp):
    """An operation that a device submits in place of one it was handed: its rest, or its aligned copy.

    Attributes:
        original: what the caller handed in, and gets back.
        start_bytes: how much of the original was done before this part.
        bounced: True when `buffers` are the device's own memory, to be copied back after a read.
    """

    __slots__ = ("bounced", "original", "start_bytes")

    def __init__(self, original: IoOp, *, offset: int, buffers: Sequence[memoryview], start_bytes: int) -> None:
        super().__init__(original.kind, offset, buffers, flow=original.flow)
        self.original = original
        self.start_bytes = start_bytes
        self.bounced = False


def check_op(op: IoOp, size_bytes: int) -> OSError | None:
    """Why an operation can never be carried out on a drive of `size_bytes`, or None.

    Reads may reach past the end (they come back short); a write there would grow a file beyond its capacity.
    """
    if op.kind is _SYNC:
        return None
    if op.offset % ALIGNMENT_BYTES or op.length_bytes % ALIGNMENT_BYTES or op.offset < 0:
        return OSError(
            errno.EINVAL,
            f"{op.kind.value} of {op.length_bytes} bytes at {op.offset}: offset and length must be multiples "
            f"of {ALIGNMENT_BYTES}",
        )
    if op.kind is _WRITE and op.offset + op.length_bytes > size_bytes:
        return OSError(
            errno.ENOSPC,
            f"write of {op.length_bytes} bytes at {op.offset} ends beyond the drive's {size_bytes} bytes",
        )
    return None


def settle(op: IoOp, result: int) -> Step:
    """Apply the result of one call (bytes moved, or -errno) that began at `op.done_bytes`.

    After MORE the rest must be transferred, from the updated `op.done_bytes`, which is then a multiple of 4096: a
    transfer that ended inside a page repeats that page. After RETRY the same call is due again.
    """
    if result < 0:
        if -result in _AGAIN_ERRNOS:
            return Step.RETRY
        op.error = describe(op, -result)
        return Step.DONE
    before = op.done_bytes
    op.done_bytes = before + result
    if op.done_bytes >= op.length_bytes or op.kind is _SYNC:
        return Step.DONE
    whole_pages = op.done_bytes - op.done_bytes % ALIGNMENT_BYTES
    if whole_pages > before:
        op.done_bytes = whole_pages
        return Step.MORE
    if op.kind is _WRITE:
        op.error = describe(op, errno.EIO)
    return Step.DONE  # a read: the end of the file


def describe(op: IoOp, code: int) -> OSError:
    """The error of an operation, naming it."""
    return OSError(code, f"{op.kind.value} of {op.length_bytes} bytes at {op.offset}: {os.strerror(code)}")


def remaining(buffers: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    """The part of a vector after its first `done_bytes`, as views of the same memory."""
    rest: list[memoryview] = []
    for view in buffers:
        if done_bytes >= len(view):
            done_bytes -= len(view)
        else:
            rest.append(view[done_bytes:] if done_bytes else view)
            done_bytes = 0
    return rest


def rest_of(op: IoOp) -> PartOp:
    """What is left of an operation after `op.done_bytes`."""
    return PartOp(
        op,
        offset=op.offset + op.done_bytes,
        buffers=remaining(op.buffers, op.done_bytes),
        start_bytes=op.done_bytes,
    )


def bounce(op: IoOp) -> PartOp:
    """The whole operation over page-aligned memory of ours; a write's bytes are copied now."""
    staging = memoryview(mmap.mmap(-1, op.length_bytes))
    if op.kind is _WRITE:
        at = 0
        for view in op.buffers:
            staging[at : at + len(view)] = view
            at += len(view)
    part = PartOp(op, offset=op.offset, buffers=[staging], start_bytes=0)
    part.bounced = True
    return part


def unbounce(part: PartOp) -> None:
    """Copy what a bounced read brought into the caller's buffers."""
    if part.bounced and part.kind is _READ:
        at = 0
        for view in part.original.buffers:
            view[:] = part.buffers[0][at : at + len(view)]
            at += len(view)

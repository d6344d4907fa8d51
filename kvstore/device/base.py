"""The contract of a drive: asynchronous reads and writes on one flat space of bytes.

A device knows nothing of segments, keys or checksums. It is driven by one thread: `submit` and `poll` never block, the
file descriptor `fileno()` becomes readable when completions wait, and whoever owns the loop calls `poll` then.
Completions may come in any order. The device finishes what it accepted: short transfers, EINTR and EAGAIN are its
business, any other errno reaches the caller in the completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from kvstore.types.flow import FlowClass


class IoKind(Enum):
    """What an operation does."""

    READ = "read"
    WRITE = "write"
    SYNC = "sync"


class IoOp:
    """One operation. Mutable only by the device that holds it; may be reused by its owner after completion.

    Attributes:
        kind: READ, WRITE or SYNC (fdatasync: covers every write whose completion was polled before the sync was
            submitted; operations in flight together are not ordered among themselves).
        offset: byte offset on the drive, a multiple of `Device.alignment_bytes`.
        buffers: where to read to or write from, in order. The owner keeps them alive and untouched until the
            completion. Each buffer's address and length are multiples of `Device.alignment_bytes`
            (memory of an `Arena`); a device that is handed other buffers bounces through its own.
        length_bytes: sum of the buffers' lengths.
        flow: class tag, for the order in the dispatch queue.
        error: errno-carrying OSError after completion, else None.
        owner: whatever the submitter wants back, typically a callable or a continuation object.
        extent_count, faults: how many operations of the drive it is, and what became of those of them that did not come
            whole; see `scattered.ScatteredRead`.
        is_urgent: it goes past what waits in classes; see `UrgentWrite` and `UrgentRead`.
    """

    extent_count: int = 1
    faults: dict[int, tuple[int, OSError | None]] | None = None
    is_urgent: bool = False

    __slots__ = (
        "buffers",
        "done_bytes",
        "error",
        "flow",
        "kind",
        "length_bytes",
        "offset",
        "owner",
        "submitted_ns",
    )

    def __init__(
        self,
        kind: IoKind,
        offset: int,
        buffers: Sequence[memoryview],
        *,
        flow: FlowClass = FlowClass.BACKGROUND,
        owner: Any = None,
    ) -> None:
        self.kind = kind
        self.offset = offset
        self.buffers = list(buffers)
        self.length_bytes = sum(map(len, self.buffers))
        self.flow = flow
        self.owner = owner
        self.error: OSError | None = None
        self.done_bytes = 0
        self.submitted_ns = 0


class UrgentWrite(IoOp):
    """A write of the log, or of a segment's header, index or footer: what many commits, or free room, wait for.

    Whoever submits it says so, since a record may be as short: those go with their class, or a flood of small puts
    would take the drive before reads. At most a batch of the log and a few pages are on their way at any time.
    """

    __slots__ = ()

    is_urgent = True

    def __init__(self, offset: int, buffers: Sequence[memoryview], *, flow: FlowClass, owner: Any = None) -> None:
        super().__init__(IoKind.WRITE, offset, buffers, flow=flow, owner=owner)


class UrgentRead(IoOp):
    """A read that free room waits for: of a victim's index, some pages at a time. No client waits for it."""

    __slots__ = ()

    is_urgent = True

    def __init__(self, offset: int, buffers: Sequence[memoryview]) -> None:
        super().__init__(IoKind.READ, offset, buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMode:
    """How bytes are moved and why this way was chosen: shown in status and as a gauge, never silent.

    Attributes:
        name: "uring", "threads" or "memory".
        direct_io: True when the page cache is bypassed (O_DIRECT).
        reason: one sentence for a person, e.g. "io_uring_setup: EPERM (seccomp), so threads".
    """

    name: str
    direct_io: bool
    reason: str


class Device(Protocol):
    """One drive. Raises `OSError` from allocate/discard, `Closed` after close."""

    @property
    def size_bytes(self) -> int:
        """Addressable bytes: the set capacity for a file (sparse until allocated), the real size of a block device."""

    @property
    def alignment_bytes(self) -> int:
        """Multiple that offsets, lengths and addresses must have (4096; never less)."""

    @property
    def mode(self) -> DeviceMode: ...

    def register(self, memory: memoryview) -> None:
        """Tell the device of memory that most operations will use (pinned once by io_uring). At most once."""

    def fileno(self) -> int:
        """A descriptor for select/epoll, readable while completions wait."""

    def submit(self, ops: Sequence[IoOp]) -> None:
        """Start operations; never blocks. The caller keeps the number in flight within the queue depth.

        A `ScatteredRead` is as many operations as it has extents, and completes once, when all of them have.
        """

    def poll(self) -> list[IoOp]:
        """Completed operations, `error` and `done_bytes` set. Never blocks; clears the readiness of `fileno()`.

        A read past the allocated end completes short: `done_bytes` < `length_bytes` with no error; the rest of
        the buffers is undefined.
        """

    def allocate(self, offset: int, length_bytes: int) -> None:
        """Reserve physical space for a range (fallocate). Raises OSError(ENOSPC) when the file system is full."""

    def discard(self, offset: int, length_bytes: int) -> None:
        """Give the physical space of a range back (hole punching, BLKDISCARD); a no-op where unsupported."""

    def allocated_bytes(self) -> int:
        """Physical bytes in use, as `du` counts them."""

    def close(self) -> None:
        """Wait for what is in flight, then release. Idempotent."""

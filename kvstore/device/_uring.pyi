"""Types of the compiled binding, _uring.c, where each call is described."""

from collections.abc import Sequence
from typing import Final

from kvstore.device.base import IoKind, IoOp
from kvstore.device.scattered import ScatteredRead
from kvstore.device.transfer import PartOp

INTERFACE: Final[int]
VARIANT_PLAIN: Final[int]
VARIANT_FIXED: Final[int]
VARIANT_VECTOR_FIXED: Final[int]
OP_READ: Final[int]
OP_WRITE: Final[int]
OP_READ_FIXED: Final[int]
OP_WRITE_FIXED: Final[int]
OP_READV_FIXED: Final[int]
OP_WRITEV_FIXED: Final[int]
SETUP_COOP_TASKRUN: Final[int]
SETUP_TASKRUN_FLAG: Final[int]
SETUP_SINGLE_ISSUER: Final[int]
SETUP_DEFER_TASKRUN: Final[int]

class Ring:
    variants: int
    def __init__(
        self,
        fd: int,
        depth: int,
        *,
        size_bytes: int,
        alignment_bytes: int,
        read: IoKind,
        write: IoKind,
        sync: IoKind,
        part_type: type[PartOp],
        scattered_type: type[ScatteredRead],
        setup_flags: int = 0,
    ) -> None: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def depth(self) -> int: ...
    def submit(self, ops: Sequence[IoOp], start: int, odd: list[IoOp], /) -> int: ...
    def reap(
        self,
    ) -> tuple[list[IoOp], list[tuple[IoOp, int]], list[tuple[ScatteredRead, list[tuple[int, int]] | None]]]: ...
    def wait(self) -> None: ...
    def fileno(self) -> int: ...
    def register_memory(self, memory: memoryview, piece_bytes: int, /) -> None: ...
    def register_file(self) -> None: ...
    def supports(self, opcode: int, /) -> bool: ...
    def close(self) -> None: ...

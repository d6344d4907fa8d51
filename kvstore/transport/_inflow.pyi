"""Types of the compiled inflow, _inflow.c; `inflow.py` describes it."""

from collections.abc import Sequence
from typing import Final

from kvstore.types.buffers import Buffer

INTERFACE: Final[int]
DONE: Final[int]
ARM: Final[int]
STOP: Final[int]

class Inflow:
    epoch: int
    def __init__(
        self,
        *,
        handle: object,
        views: Sequence[memoryview],
        request_id: int,
        start: bytes,
        before: bytes,
        after: bytes,
        final_flag: int,
        block_bytes: int,
        record_bytes: int,
        slices_max: int,
        payload_max: int,
        piece_bytes: int,
    ) -> None: ...
    def receive(self, rearm_at_ns: int, /) -> int: ...
    def rest(self) -> bytes: ...
    def done(self) -> dict[int, bytes]: ...
    def content_ids(self) -> list[bytes]: ...

def crc32c(data: Buffer, /) -> int: ...
def crc_ways() -> tuple[str, ...]: ...
def choose_crc(way: str, /) -> None: ...

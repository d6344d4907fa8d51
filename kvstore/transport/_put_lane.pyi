"""Types of the compiled put lane, _put_lane.c; `put_lane.py` describes it."""

from collections.abc import Sequence
from typing import Final

from kvstore.transport.base import Landing
from kvstore.types.buffers import Buffer

INTERFACE: Final[int]
MORE: Final[int]
OTHER: Final[int]
CLOSED: Final[int]

class Lane:
    received_bytes: int
    expected_bytes: int
    is_over: bool
    def __init__(
        self,
        *,
        request_id: int,
        start: bytes,
        behind: bytes,
        block_bytes: int,
        record_bytes: int,
        per_frame: int,
        piece_bytes: int,
    ) -> None: ...
    def expect(self, landings: Sequence[Landing], /) -> None: ...
    def receive(self, connected: object, bytes_max: int, /) -> tuple[int, list[tuple[list[int], bytes, bool]]]: ...
    def take_apart(self) -> tuple[bytes, list[Landing]]: ...

def crc32c(data: Buffer, /) -> int: ...
def crc_ways() -> tuple[str, ...]: ...
def choose_crc(way: str, /) -> None: ...

"""Types of the compiled check, _records.c, where it is described."""

from typing import Final

from kvstore.types.buffers import Buffer

INTERFACE: Final[int]

def check(
    view: memoryview,
    wants: list[tuple[int, int]],
    keys: bytes,
    space: bytes,
    generations: dict[int, int],
    magic: int,
    length: int,
    header_bytes: int,
    block_bytes: int,
    record_bytes: int,
    words: int,
    flags: int,
    sums: bool,
    /,
) -> bytes | None: ...
def crc32c(data: Buffer, /) -> int: ...
def crc_ways() -> tuple[str, ...]: ...
def choose_crc(way: str, /) -> None: ...

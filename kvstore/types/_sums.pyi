"""Types of the compiled check, _sums.c, where it is described."""

from typing import Final

from kvstore.types.buffers import Buffer

INTERFACE: Final[int]

def match(data: Buffer, block_bytes: int, table: Buffer, /) -> bool: ...

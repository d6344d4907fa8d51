"""The type of anything with a buffer: bytes, bytearray, memoryview, mmap, array.array, numpy arrays."""

from __future__ import annotations

from typing import Protocol


class Buffer(Protocol):
    """An object that `memoryview` takes (PEP 688, which names the method for checkers of any Python version)."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

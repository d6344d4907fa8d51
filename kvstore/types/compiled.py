"""The parts in C, and which build of each this code goes with.

Each has a twin in Python that gives the same answers, slower. A checkout or an installation whose Python is newer than
its compiled files would call them by other rules than they were built with, and read wrong bytes as right ones: so each
part carries a number, which is raised here and in its `KV_INTERFACE` whenever its arguments, results or constants
change, and a part of another number is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Final, Protocol

INTERFACES: Final[Mapping[str, int]] = {
    "kvstore.device._uring": 3,
    "kvstore.engine._records": 3,
    "kvstore.transport._exchange": 4,
    "kvstore.engine._search": 2,
    "kvstore.transport._inflow": 2,
    "kvstore.transport._outflow": 1,
    "kvstore.transport._put_lane": 1,
    "kvstore.types._sums": 3,
}
# by its folder: the name `kvstore` on PyPI is somebody else's program
BUILD_AGAIN: Final = "pip install --force-reinstall --no-deps . in kvstore's source folder"


def require_interface(part: ModuleType) -> None:
    """Refuse a part of another build as if it could not be imported.

    Raises:
        ImportError: its number is another than this code goes with, or it has none.
    """
    wanted, found = INTERFACES[part.__name__], getattr(part, "INTERFACE", None)
    if found != wanted:
        raise ImportError(
            f"{part.__name__} is of another build: interface {'without a number' if found is None else found}, "
            f"this code goes with {wanted}; build it again ({BUILD_AGAIN})",
            name=part.__name__,
        )


class Summing(Protocol):
    """A part that computes checksums (`_crc32c.h`)."""

    def crc_ways(self) -> tuple[str, ...]:
        """How this processor can, the best way last."""
        ...


def require_crc_instruction(part: Summing) -> None:
    """Refuse a part that sums payload where the processor has no instruction for it: Python's library is faster.

    Raises:
        ImportError: as if the part could not be imported.
    """
    if len(part.crc_ways()) < 2:
        raise ImportError("this processor has no instruction for CRC32C that the compiled part knows")

"""A record on its way from the drive, and who waits for it: one flight per record however many ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from kvstore.engine.api import NamespaceRef, ReadSpec
from kvstore.engine.arena import Piece
from kvstore.engine.cache import RecordFacts
from kvstore.types.results import MissReason


class Waiter(Protocol):
    """Who wants what a flight brings. `index` is the waiter's own name for the record.

    Attributes:
        sums: whole records are to be summed for it. Without, it does that itself, and asks once more where they are
            wrong; headers are checked in any case.
    """

    sums: bool

    def loaded(
        self, index: int, facts: RecordFacts, piece: Piece | None, payload: memoryview, offset: int, crcs: bytes
    ) -> None:
        """Verified blocks (see `sums`), `payload` beginning at `offset` of the record; hold `piece` to keep them."""

    def headed(self, index: int, facts: RecordFacts) -> None:
        """The verified header that was asked for."""

    def failed(self, index: int, reason: MissReason) -> None:
        """Nothing will come."""


class Starter(Waiter, Protocol):
    """A waiter that starts reads.

    Attributes:
        spec: says for which namespace, and in which flow class.
        staged_bytes: grows by what is on its way from the drive for it.
        force_cache: what it reads is wanted in the cache, whatever admission says.
        doubted: indices of records that were read before, and were not right.
    """

    spec: ReadSpec
    staged_bytes: int
    force_cache: bool
    doubted: set[int]

    def loaded_run(self, piece: Piece, view: memoryview, run: Sequence[tuple[int, int, RecordFacts]]) -> None:
        """`loaded` for many whole records: (index, where in `view` the payload begins, facts) of each."""


class Bundle(Protocol):
    """Records that are on the way together; they become flights of their own when somebody joins one."""

    def unpack(self) -> None:
        """Put a flight for each of its records in its place."""


FlightKey = int | tuple[int, int, int]
"""A whole record's location; or a location with offset and length of blocks in its payload, or HEADER."""

HEADER: Final = (-1, 0)


class Flight:
    """One record, or blocks of one, on the way from the drive.

    Attributes:
        waiters: (waiter, index) of all who want it; the first one started it.
        wanted_in_cache: whatever admission says (a prefetch).
        at, length_bytes: where it lies in its load's memory.
        version: of the catalog when it was started.
        second: it was read before, and was not right.
    """

    __slots__ = (
        "at",
        "key",
        "length_bytes",
        "location",
        "name",
        "ref",
        "second",
        "version",
        "waiters",
        "wanted_in_cache",
    )

    def __init__(
        self,
        name: FlightKey,
        ref: NamespaceRef,
        key: bytes,
        location: int,
        version: int,
        waiters: list[tuple[Waiter, int]],
        *,
        at: int = 0,
        length_bytes: int = 0,
        wanted_in_cache: bool = False,
    ) -> None:
        self.name = name
        self.ref = ref
        self.key = key
        self.location = location
        self.version = version
        self.waiters = waiters
        self.wanted_in_cache = wanted_in_cache
        self.second = False
        self.at = at
        self.length_bytes = length_bytes

"""Whose turn it is to get memory for a put. Pure: no I/O, no clock.

Who holds least of the memory goes first, and among equals who has waited longest; one client's puts go in order. So one
client alone gets all there is, and who comes to a node whose memory others hold gets what comes free until it holds as
much as they do, however many puts they have waiting and however slowly they send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final, Generic, Protocol, TypeVar

_HEAP_SPARE: Final = 64  # outdated entries that are let lie


class Settles(Protocol):
    """What waits, and may be answered while it does."""

    @property
    def settled(self) -> bool:
        """It waits no longer."""


_Waiting = TypeVar("_Waiting", bound=Settles)


class Turns(Generic[_Waiting]):
    """Puts that wait for memory, and how much each client holds.

    While one waits that is not served, nobody else is: what is large would else wait for ever. A client that holds
    nothing is passed at most once by each other one.
    """

    __slots__ = ("_count", "_heap", "_held", "_lines", "_numbers", "_turn")

    def __init__(self) -> None:
        self._lines: dict[bytes, deque[_Waiting]] = {}
        self._held: dict[bytes, int] = {}
        self._numbers: dict[bytes, int] = {}  # of those in line: since when they wait for their next grant
        self._turn = 0
        self._heap: list[tuple[int, int, bytes]] = []  # (held, number, client), outdated ones among them
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[_Waiting]:
        for line in self._lines.values():
            yield from line

    def held_bytes(self, client_id: bytes) -> int:
        """Memory that a client holds."""
        return self._held.get(client_id, 0)

    def took(self, client_id: bytes, length_bytes: int) -> None:
        """A client was given memory."""
        held = self._held
        held[client_id] = held.get(client_id, 0) + length_bytes
        if self._count and client_id in self._lines:
            self._enter(client_id)

    def gave(self, client_id: bytes, length_bytes: int) -> None:
        """It has given some back."""
        left = self._held[client_id] - length_bytes
        assert left >= 0, "a client gave back more memory than it held"
        if left:
            self._held[client_id] = left
        else:
            del self._held[client_id]
        if self._count and client_id in self._lines:
            self._enter(client_id)

    def append(self, client_id: bytes, waiting: _Waiting) -> None:
        """One more that waits."""
        line = self._lines.get(client_id)
        self._count += 1
        if line is not None:
            line.append(waiting)
            return
        self._lines[client_id] = deque([waiting])
        self._renew(client_id)

    def first(self) -> _Waiting | None:
        """Whose turn it is; those that were answered meanwhile are dropped."""
        heap = self._heap
        while heap:
            held, number, client_id = heap[0]
            if self._numbers.get(client_id) != number or self.held_bytes(client_id) != held:
                heappop(heap)
                continue
            line = self._lines[client_id]
            while line and line[0].settled:
                line.popleft()
                self._count -= 1
            if line:
                return line[0]
            self._leave(client_id)
        return None

    def served(self, client_id: bytes) -> None:
        """The first in this client's line waits no longer for memory: the others of it wait from now on."""
        line = self._lines[client_id]
        line.popleft()
        self._count -= 1
        if line:
            self._renew(client_id)
        else:
            self._leave(client_id)

    def sweep(self) -> None:
        """Drops all that were answered: they would count as waiting until it is their client's turn."""
        for client_id, line in list(self._lines.items()):
            left = deque(waiting for waiting in line if not waiting.settled)
            self._count -= len(line) - len(left)
            self._lines[client_id] = left
            if not left:
                self._leave(client_id)

    def _renew(self, client_id: bytes) -> None:
        self._turn += 1
        self._numbers[client_id] = self._turn
        self._enter(client_id)

    def _leave(self, client_id: bytes) -> None:
        del self._lines[client_id], self._numbers[client_id]

    def _enter(self, client_id: bytes) -> None:
        heappush(self._heap, (self.held_bytes(client_id), self._numbers[client_id], client_id))
        if len(self._heap) > 2 * len(self._lines) + _HEAP_SPARE:
            self._heap = [(self.held_bytes(one), number, one) for one, number in self._numbers.items()]
            heapify(self._heap)

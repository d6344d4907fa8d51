"""Callers that wait until keys are no longer pending."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from itertools import count


class Waits:
    """Who waits for which puts. `pending` holds the salted index keys of puts in progress."""

    def __init__(self, pending: Mapping[bytes, object]) -> None:
        self._pending = pending
        self._heap: list[tuple[int, int, list[bytes], Callable[[], None]]] = []
        self._serial = count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, keys: list[bytes], deadline_ns: int, on_done: Callable[[], None]) -> Callable[[], None]:
        """Call back once none of the keys is pending, or at the deadline; at once if none is.

        Returns:
            What ends the wait with the next `check`.
        """
        left = [key for key in keys if key in self._pending]
        if left:
            heappush(self._heap, (deadline_ns, next(self._serial), left, on_done))
        else:
            on_done()
        return left.clear

    def check(self, now_ns: int) -> None:
        """Call back whoever has waited enough."""
        if not self._heap:
            return
        done: list[Callable[[], None]] = []
        while self._heap and self._heap[0][0] <= now_ns:
            done.append(heappop(self._heap)[3])
        still = []
        for wait in self._heap:
            # Only the last key is looked at until it is done, so a long wait costs one look-up a turn.
            left = wait[2]
            while left and left[-1] not in self._pending:
                left.pop()
            if left:
                still.append(wait)
            else:
                done.append(wait[3])
        if len(still) < len(self._heap):
            self._heap = sorted(still, key=lambda wait: wait[:2])
        for on_done in done:
            on_done()

    def next_deadline_ns(self) -> int | None:
        """When `check` has something to do even if nothing completes."""
        return self._heap[0][0] if self._heap else None

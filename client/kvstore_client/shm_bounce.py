"""Memory of this process through which records come that belong to memory which no node can reach.

The node puts a record into it, from its drive without a copy of its own, and the client copies it to where it belongs:
one copy more than into memory of `alloc`, and one less than through a socket. What is checked is what has been copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.limits import BOUNCE_BYTES_ALL_MAX, BOUNCE_BYTES_MAX, PAGE_BYTES, MiB
from kvstore_client.shm import SharedMemory
from kvstore_client.stats import Counters

BOUNCED_CALL_BYTES_MIN: Final = 1 * MiB
"""Of one call; less is as quick through the socket."""
BOUNCED_RECORD_BYTES_MIN: Final = 1 * MiB
"""Of each record in one piece of memory; smaller ones cost less through the socket (decisions/shared-memory.md)."""
_STEP_BYTES: Final = 2 * MiB  # of huge pages


def bounced_bytes(memory: memoryview | None, room_bytes: int) -> int:
    """Bytes of the place that a record gets here; 0 for one that is better sent through the socket.

    Args:
        memory: Where it belongs, if that is one piece.
        room_bytes: Of the record, at least.
    """
    return 0 if memory is not None and room_bytes < BOUNCED_RECORD_BYTES_MIN else room_bytes


class Bounce:
    """Of one connection; made at its first use."""

    __slots__ = ("_counters", "_memory", "_whole")

    def __init__(self, memory: SharedMemory, counters: Counters) -> None:
        self._memory = memory
        self._counters = counters
        self._whole: memoryview | None = None

    def cut(self, lengths: Sequence[int]) -> list[memoryview]:
        """Places for the first of so many records, none of them empty: as many as fit, each from the start of a page.

        None if there is no memory, or all connections have BOUNCE_BYTES_ALL_MAX. They belong to the call in progress on
        the connection.
        """
        starts, end = [], 0
        for length in lengths:
            behind = end + -(-length // PAGE_BYTES) * PAGE_BYTES
            if behind > BOUNCE_BYTES_MAX:
                break
            starts.append(end)
            end = behind
        if not end:
            return []
        whole = self._whole
        if whole is None or len(whole) < end:
            size = min(BOUNCE_BYTES_MAX, -(-end // _STEP_BYTES) * _STEP_BYTES)
            self._whole = None  # so that it does not count beside what takes its place
            del whole
            whole = self._whole = self._memory.allocate_bounded(size, bytes_max=BOUNCE_BYTES_ALL_MAX)
            if whole is None:
                return []
        return [whole[start : start + length] for start, length in zip(starts, lengths, strict=False)]

    def forget(self) -> None:
        """The node may still write to it: the next call gets other memory."""
        self._whole = None

    def copied(self, length_bytes: int) -> None:
        """So much was copied out of it."""
        self._counters.copied_bytes += length_bytes


def copy_out(place: memoryview, offset: int, views: Sequence[memoryview]) -> int:
    """Copies bytes of a place, from `offset` on, to where they belong; how many."""
    at = offset
    for view in views:
        view[:] = place[at : at + len(view)]
        at += len(view)
    return at - offset

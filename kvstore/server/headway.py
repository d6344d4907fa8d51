"""Whether a peer keeps up with what it has begun: it holds memory of ours until it has read, or sent on.

A byte now and then is no progress (slow loris): within twice the time that a peer may stand still it must move what
PEER_RATE_BYTES_SECOND_MIN makes of once that time, or what it has begun must end. That is a seventieth of what a
hundred clients get of a link of 1 Gbit/s. While others wait for memory, it must also move as much as is held for it in
PEER_DRAINS_NS: a few who are slow on purpose would else keep a node from everybody. All together hold no more than
there is, so where the node's link moves all of its memory in that time, no honest peer falls behind.
"""

from __future__ import annotations

from typing import Final

from kvstore.limits import (
    PEER_DRAINS_NS,
    PEER_RATE_BYTES_SECOND_MIN,
    PEER_STALL_NS,
    PEER_STALL_WAITED_NS,
    REQUEST_ARRIVES_NS,
    REQUEST_ARRIVES_WAITED_NS,
    SECOND_NS,
)
from kvstore.wire.body import MemoryBudget

_NOTHING: Final = object()


class Patience:
    """How long peers may take: less while others need what they hold.

    Attributes:
        stall_ns: for which one may stand still.
        arrives_ns: for a request to be whole.
    """

    __slots__ = ("_memory", "_others_wait", "_refused_count", "arrives_ns", "stall_ns")

    def __init__(self, memory: MemoryBudget) -> None:
        """
        Args:
            memory: What requests hold.
        """
        self._memory = memory
        self._refused_count = 0
        self._others_wait = False
        self.stall_ns = PEER_STALL_NS
        self.arrives_ns = REQUEST_ARRIVES_NS

    def look(self, *, others_wait: bool) -> None:
        """Looks whether requests were refused since the last time; `others_wait`: calls do, for memory."""
        was_full = self._memory.refused_count != self._refused_count
        self._refused_count = self._memory.refused_count
        self._others_wait = others_wait
        self.stall_ns = PEER_STALL_WAITED_NS if others_wait else PEER_STALL_NS
        self.arrives_ns = REQUEST_ARRIVES_WAITED_NS if was_full else REQUEST_ARRIVES_NS

    def least_rate(self, held_bytes: int) -> int:
        """What one must move of whom so much memory is held, in bytes a second."""
        drains = held_bytes * SECOND_NS // PEER_DRAINS_NS if self._others_wait else 0
        return max(drains, PEER_RATE_BYTES_SECOND_MIN)


class Headway:
    """How one peer gets on, as seen now and then."""

    __slots__ = ("_call_id", "_moved_bytes", "_moved_ns", "_request", "_request_ns", "_seen_bytes", "_seen_ns")

    def __init__(self) -> None:
        self._call_id = -1
        self._moved_bytes: int | None = None  # when its time began
        self._seen_bytes: int | None = None  # when it was looked at last
        self._seen_ns = 0  # when that was seen first
        self._moved_ns = 0
        self._request: object = _NOTHING
        self._request_ns = 0

    def is_stalled(self, moved_bytes: int | None, *, call_id: int, now_ns: int, stall_ns: int, least: int) -> bool:
        """Whether it has stood still for `stall_ns`, or moved next to nothing in twice that time.

        Args:
            moved_bytes: So far, in the call; it may fall when a part of it is done. None: nothing is expected.
            call_id: Another one has begun something else.
            now_ns: Not less than before.
            stall_ns: For how long it may.
            least: Bytes a second; less is next to nothing.
        """
        before = self._moved_bytes
        if moved_bytes != self._seen_bytes:
            self._seen_bytes = moved_bytes
            self._seen_ns = now_ns
        if moved_bytes is None or before is None or moved_bytes < before or call_id != self._call_id:
            self._call_id = call_id
            self._seen_ns = now_ns
        elif moved_bytes - before < least * stall_ns // SECOND_NS:
            return now_ns - self._seen_ns >= stall_ns or now_ns - self._moved_ns >= 2 * stall_ns
        self._moved_bytes = moved_bytes
        self._moved_ns = now_ns
        return False

    def is_late(self, request: object | None, *, now_ns: int, arrives_ns: int) -> bool:
        """Whether `request` is on its way for `arrives_ns`; None: nothing is."""
        if request is not self._request or request is None:
            self._request = request
            self._request_ns = now_ns
            return False
        return now_ns - self._request_ns >= arrives_ns

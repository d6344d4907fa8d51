"""The body of a frame while it arrives: its memory grows with what has come, and all of a node's have a bound together.

A header alone, which costs a peer 32 bytes, must not make us reserve what it announces.
"""

from __future__ import annotations

from kvstore.errors import Overloaded
from kvstore.limits import BODY_FIRST_BYTES, INLINE_PUT_BYTES_MAX


class MemoryBudget:
    """Bytes that all connections of a node, or of one client, may hold together for what peers have sent them.

    Attributes:
        limit_bytes, used_bytes: what may be held, and is.
        small_bytes: of the limit, kept for what is small.
        refused_count: how often there was none left.
    """

    __slots__ = ("_whole", "_whose", "limit_bytes", "refused_count", "small_bytes", "used_bytes")

    def __init__(
        self,
        limit_bytes: int,
        *,
        small_bytes: int = 0,
        whose: str = "all connections",
        whole: MemoryBudget | None = None,
    ) -> None:
        """
        Args:
            limit_bytes: What may be held.
            small_bytes: See there.
            whose: Who shares it, for messages.
            whole: Of which this is a part: what is held here is held there, too.
        """
        self.limit_bytes = limit_bytes
        self.small_bytes = small_bytes
        self.used_bytes = 0
        self.refused_count = 0
        self._whose = whose
        self._whole = whole

    def take(self, length_bytes: int, *, is_large: bool = False) -> None:
        """Holds so much more. Raises Overloaded, and holds nothing more, when it would be over the limit."""
        limit_bytes = self.limit_bytes - self.small_bytes if is_large else self.limit_bytes
        if self.used_bytes + length_bytes > limit_bytes:
            self.refused_count += 1
            raise Overloaded(
                f"{length_bytes} bytes more would be over the {limit_bytes} bytes that the requests of {self._whose} "
                f"may take, {self.used_bytes} are in use: try again later, or with smaller batches"
            )
        if self._whole is not None:
            self._whole.take(length_bytes, is_large=is_large)
        self.used_bytes += length_bytes

    def give_back(self, length_bytes: int) -> None:
        """Holds so much less."""
        if self._whole is not None:
            self._whole.give_back(length_bytes)
        self.used_bytes -= length_bytes
        assert self.used_bytes >= 0, "given back more than was taken"


class ArrivingBody:
    """A body too long for the read-ahead: at first BODY_FIRST_BYTES of memory, then twice as much each time it is full.

    Attributes:
        memory: what has come, in its first `at` bytes.
        left_bytes: what has not come yet.
    """

    __slots__ = ("_budget", "_held_bytes", "_total_bytes", "at", "memory")

    def __init__(self, total_bytes: int, first: memoryview, budget: MemoryBudget | None) -> None:
        """
        Args:
            total_bytes: As the header says.
            first: Its beginning, copied here; at most BODY_FIRST_BYTES.
            budget: Charged for the memory, until `let_go`.

        Raises:
            Overloaded: The budget is used up.
        """
        size = min(total_bytes, BODY_FIRST_BYTES)
        self._budget = budget
        self._total_bytes = total_bytes
        self._held_bytes = 0
        self._hold(size)
        self.memory = bytearray(size)
        self.at = len(first)
        self.memory[: self.at] = first

    @property
    def left_bytes(self) -> int:
        return self._total_bytes - self.at

    @property
    def is_growing(self) -> bool:
        """There is memory only for a part of what is left."""
        return len(self.memory) < self._total_bytes

    def room(self) -> memoryview:
        """Where the next bytes belong; never empty before the end. Valid until `advance`."""
        return memoryview(self.memory)[self.at :]

    def advance(self, count: int) -> None:
        """Takes note of `count` bytes that came into `room()`. Raises Overloaded when there is no memory for more."""
        self.at += count
        size = len(self.memory)
        if self.at == size and self.left_bytes:
            more = min(self._total_bytes - size, size)
            self._hold(more)
            grown = bytearray(size + more)  # not in place: a view of the old memory may live on with who has received
            grown[:size] = self.memory
            self.memory = grown

    def let_go(self) -> None:
        """The memory is free, or somebody else's affair. Idempotent."""
        if self._budget is not None:
            self._budget.give_back(self._held_bytes)
            self._held_bytes = 0

    def _hold(self, length_bytes: int) -> None:
        if self._budget is not None:
            held_bytes = self._held_bytes + length_bytes
            self._budget.take(length_bytes, is_large=held_bytes > INLINE_PUT_BYTES_MAX)
            self._held_bytes = held_bytes

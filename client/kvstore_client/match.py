"""`Match`: what a lookup found, and the pins that keep it until the match ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvstore.types.layout import KVLayout
from kvstore.types.results import MissReason
from kvstore_client.core import ClientCore
from kvstore_client.pins import PinHold, holds
from kvstore_client.read_verbs import MatchAnswer


class MatchView:
    """The answer of a match.

    Attributes:
        chunks: Length of the prefix whose dense records are all there, for every shard asked. Never crosses a hole.
        tokens: `chunks` in tokens.
        boundary: The longest prefix that every needed part can serve, in tokens: at most `tokens`, and a place where
            each needed sparse part has a checkpoint. Equals `tokens` when only dense parts are needed.
        boundary_chunks: `boundary` in chunks.
        pending: How many chunks right behind the prefix are being written now; `wait` for them may lengthen it.
        reason: Why the chunk behind the prefix is a miss; None when all keys matched.
        load_seconds_estimate: How long loading the prefix may take, by the node's drives and the measured network;
            0.0 when nothing is known or nothing matched. Recomputing may be quicker.
    """

    def __init__(self, core: ClientCore, answer: MatchAnswer, layout: KVLayout) -> None:
        self._core = core
        self._answer = answer
        self.chunks = answer.chunks
        self.tokens = answer.chunks * layout.chunk_tokens
        self.boundary = answer.boundary_chunks * layout.chunk_tokens
        self.boundary_chunks = answer.boundary_chunks
        self.pending = answer.pending
        self.reason: MissReason | None = answer.reason
        self.load_seconds_estimate = answer.load_seconds_estimate
        self._pins: tuple[PinHold, ...] = answer.pins

    def __repr__(self) -> str:
        behind = "all matched" if self.reason is None else f"then {self.reason.name.lower()}"
        held = "pinned" if self.pinned else "not pinned"
        return f"<{type(self).__name__} of {self.tokens} tokens in {self.chunks} chunks, {behind}, {held}>"

    @property
    def pinned(self) -> bool:
        """Whether the found chunks are held against eviction, as far as this side can know.

        False when the node had no room for the pin, its ttl is over (counted from when the request was sent), the node
        was started again, or the match has ended. A load of unpinned chunks is still right; it may only miss.
        """
        return (
            bool(self._pins)
            and time.monotonic_ns() < self._answer.pinned_until_ns
            and all(holds(self._core, pin) for pin in self._pins)
        )

    def take_pins(self) -> tuple[PinHold, ...]:
        """The pins that are still to be given back; the match holds none afterwards."""
        pins, was_pinned = self._pins, self.pinned
        if pins and not was_pinned and self._answer.pinned_until_ns:
            self._core.counters.pins_lost += 1
        self._pins = ()
        return pins


class Match(MatchView):
    """A match of the blocking client: `with namespace.match(keys) as m: ...` gives the pins back at the end."""

    def __init__(
        self, core: ClientCore, answer: MatchAnswer, layout: KVLayout, give_back: Callable[[tuple[PinHold, ...]], None]
    ) -> None:
        super().__init__(core, answer, layout)
        self._give_back = give_back

    def release(self) -> None:
        """Gives the pins back now. Harmless when repeated; never raises for a node's trouble."""
        pins = self.take_pins()
        if pins:
            self._give_back(pins)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

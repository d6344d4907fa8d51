"""Whether a queue pair may be used, made or made again, and when: a table of legal steps, time as an argument."""

from __future__ import annotations

from enum import Enum
from typing import Final

from kvstore.limits import PAIR_BACKOFF_NS_MAX, PAIR_BACKOFF_NS_MIN
from kvstore.transport.rdma.statuses import Action


class LinkState(Enum):
    """Of the way between two processes on one lane."""

    ABSENT = "absent"
    """No queue pair; one may be made now."""
    MAKING = "making"
    """The two ends tell each other their numbers, or probe."""
    READY = "ready"
    """It carries payload."""
    WAITING = "waiting"
    """It broke; the next one may be made when the pause is over."""
    CLOSED = "closed"
    """For good."""


class Step(Enum):
    """What happens to a link."""

    BEGIN = "begin"
    PROBED = "probed"
    BROKE = "broke"
    RETIRED = "retired"
    """Taken down on purpose, while idle, or to make memory quiet: no pause is due."""


_TABLE: Final = {
    (LinkState.ABSENT, Step.BEGIN): LinkState.MAKING,
    (LinkState.MAKING, Step.PROBED): LinkState.READY,
    (LinkState.MAKING, Step.BROKE): LinkState.WAITING,
    (LinkState.READY, Step.BROKE): LinkState.WAITING,
    (LinkState.MAKING, Step.RETIRED): LinkState.ABSENT,
    (LinkState.READY, Step.RETIRED): LinkState.ABSENT,
    (LinkState.WAITING, Step.RETIRED): LinkState.WAITING,
    (LinkState.ABSENT, Step.RETIRED): LinkState.ABSENT,
    (LinkState.ABSENT, Step.BROKE): LinkState.WAITING,
}


class Link:
    """The life of the queue pairs of one lane, one after the other.

    Attributes:
        state: now.
        breaks: in a row, without a transfer that went well between.
        rebuilt: queue pairs that were made after one broke.
    """

    __slots__ = ("_may_begin_ns", "_refreshed", "breaks", "rebuilt", "state")

    def __init__(self) -> None:
        self.state = LinkState.ABSENT
        self.breaks = 0
        self.rebuilt = 0
        self._may_begin_ns = 0
        self._refreshed = False

    def may_begin(self, now_ns: int) -> bool:
        """Whether a queue pair is missing, and may be made now."""
        return self.state is LinkState.ABSENT or (self.state is LinkState.WAITING and now_ns >= self._may_begin_ns)

    def begin(self, now_ns: int) -> None:
        """The handshake begins."""
        assert self.may_begin(now_ns), self.state
        if self.state is LinkState.WAITING:
            self.rebuilt += 1
            self.state = LinkState.ABSENT
        self._step(Step.BEGIN)

    def probed(self) -> None:
        """Bytes have come across."""
        self._step(Step.PROBED)

    def worked(self) -> None:
        """A transfer went well: what broke before is over."""
        self.breaks = 0
        self._refreshed = False

    def broke(self, action: Action, now_ns: int) -> None:
        """The queue pair is in error, and was closed. A region that was not as described is refreshed once at once."""
        self._step(Step.BROKE)
        if action is Action.REFRESH and not self._refreshed:
            self._refreshed = True
            self._may_begin_ns = now_ns
            return
        pause_ns = min(PAIR_BACKOFF_NS_MIN << min(self.breaks, 16), PAIR_BACKOFF_NS_MAX)
        self.breaks += 1
        self._may_begin_ns = now_ns + pause_ns

    def retired(self) -> None:
        """The queue pair was closed on purpose."""
        self._step(Step.RETIRED)

    def close(self) -> None:
        """No other one will be made."""
        self.state = LinkState.CLOSED

    def _step(self, step: Step) -> None:
        following = _TABLE.get((self.state, step))
        assert following is not None, f"a link that is {self.state.value} cannot be told {step.value}"
        self.state = following

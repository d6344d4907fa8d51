"""When to try again and when to stop: a retry budget, full-jitter back-off, a circuit breaker. Time is an argument."""

from __future__ import annotations

from enum import Enum

from kvstore.limits import (
    BREAKER_FAILURES_MAX,
    BREAKER_OPEN_NS_MAX,
    BREAKER_OPEN_NS_MIN,
    BREAKER_SILENCE_NS,
    DOUBT_NS,
    RETRY_BACKOFF_NS_MAX,
    RETRY_BACKOFF_NS_MIN,
    RETRY_BUDGET_RATIO,
    RETRY_BUDGET_TOKENS_MAX,
    RETRY_TRICKLE_NS,
)


class RetryBudget:
    """A token bucket shared by all calls of a client, so that retries stay a small share of the traffic.

    Each first attempt earns `RETRY_BUDGET_RATIO` of a token, each retry costs one; a quiet client earns one each
    `RETRY_TRICKLE_NS`. The bucket starts full, and holds `RETRY_BUDGET_TOKENS_MAX`.
    """

    __slots__ = ("_last_ns", "_tokens")

    def __init__(self, now_ns: int) -> None:
        self._tokens = float(RETRY_BUDGET_TOKENS_MAX)
        self._last_ns = now_ns

    def first_attempt(self) -> None:
        """Counts a call's first attempt."""
        self._tokens = min(float(RETRY_BUDGET_TOKENS_MAX), self._tokens + RETRY_BUDGET_RATIO)

    def take(self, now_ns: int) -> bool:
        """True when a retry may be made now; it is then paid for."""
        earned = max(0, now_ns - self._last_ns) / RETRY_TRICKLE_NS
        self._last_ns = now_ns
        self._tokens = min(float(RETRY_BUDGET_TOKENS_MAX), self._tokens + earned)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def backoff_ns(attempt: int, chance: float) -> int:
    """How long to wait before retry `attempt` (1 is the first): full jitter over an exponential cap.

    After "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015): uniform in 0..min(max, min * 2^(attempt-1)).

    Args:
        attempt: 1 for the first retry.
        chance: A random number in 0..1.
    """
    cap = min(RETRY_BACKOFF_NS_MAX, RETRY_BACKOFF_NS_MIN << min(attempt - 1, 32))
    return int(cap * chance)


class BreakerState(Enum):
    """Closed: calls pass. Open: calls fail at once. Half open: one call probes."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Stops asking a target that failed `BREAKER_FAILURES_MAX` times in a row, or was silent; probes it after a while.

    Failures that come at once cost little, and one of them may be chance. Silence costs its whole time, so the target
    is given up once it has answered nothing for `BREAKER_SILENCE_NS`, be it to one call or to several short ones.

    Each failed probe doubles the pause, up to `BREAKER_OPEN_NS_MAX`, which is short enough that a node that was only
    restarted serves again within two seconds. A probe that never reports back lets another one pass after the pause.
    """

    __slots__ = ("_failures", "_open_ns", "_silent_since_ns", "_until_ns", "state")

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._silent_since_ns = 0
        self._open_ns = BREAKER_OPEN_NS_MIN
        self._until_ns = 0

    def allows(self, now_ns: int) -> bool:
        """Whether a call may be made now. In the open state one call passes as the probe once the pause is over."""
        if self.state is BreakerState.CLOSED:
            return True
        if now_ns < self._until_ns:
            return False
        self.state = BreakerState.HALF_OPEN
        self._until_ns = now_ns + self._open_ns
        return True

    def reopens_in_ns(self, now_ns: int) -> int:
        """How long until the next call may pass; 0 when it may now."""
        return 0 if self.state is BreakerState.CLOSED else max(0, self._until_ns - now_ns)

    def is_doubted(self, now_ns: int) -> bool:
        """Whether it is open for a silence that is too young to tell a slow target from a dead one.

        A busy machine makes live targets silent for seconds. Where connections were only refused, there is no doubt.
        """
        is_open = self.state is not BreakerState.CLOSED
        return is_open and self._silent_since_ns > 0 and now_ns - self._silent_since_ns < DOUBT_NS

    def succeeded(self) -> None:
        """The target answered."""
        if not self._failures:
            return
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._silent_since_ns = 0
        self._open_ns = BREAKER_OPEN_NS_MIN

    def silent(self, since_ns: int, now_ns: int) -> bool:
        """The target has answered nothing to a call since then. Returns True when this opened the breaker."""
        if not self._silent_since_ns:
            self._silent_since_ns = since_ns
        if now_ns - self._silent_since_ns < BREAKER_SILENCE_NS and self.state is BreakerState.CLOSED:
            self._failures = max(1, self._failures)  # so that an answer counts as one
            return False
        self._failures = max(self._failures, BREAKER_FAILURES_MAX - 1)
        return self.failed(now_ns)

    def failed(self, now_ns: int) -> bool:
        """The target did not answer, or broke off. Returns True when this opened the breaker."""
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._open_ns = min(BREAKER_OPEN_NS_MAX, self._open_ns * 2)
        elif self._failures < BREAKER_FAILURES_MAX:
            return False
        was_closed = self.state is BreakerState.CLOSED
        self.state = BreakerState.OPEN
        self._until_ns = now_ns + self._open_ns
        return was_closed

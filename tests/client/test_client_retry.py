"""The retry budget, the back-off and the circuit breaker, in virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.limits import (
    BREAKER_FAILURES_MAX,
    BREAKER_OPEN_NS_MAX,
    BREAKER_OPEN_NS_MIN,
    RETRY_BACKOFF_NS_MAX,
    RETRY_BACKOFF_NS_MIN,
    RETRY_BUDGET_RATIO,
    RETRY_BUDGET_TOKENS_MAX,
    RETRY_TRICKLE_NS,
    SECOND_NS,
)
from kvstore_client.retry import BreakerState, CircuitBreaker, RetryBudget, backoff_ns


def test_a_full_budget_is_spent_and_then_refuses() -> None:
    budget = RetryBudget(now_ns=0)
    assert [budget.take(0) for _ in range(RETRY_BUDGET_TOKENS_MAX + 1)] == [True] * RETRY_BUDGET_TOKENS_MAX + [False]


def test_first_attempts_and_time_refill_the_budget() -> None:
    budget = RetryBudget(now_ns=0)
    while budget.take(0):
        pass
    for _ in range(round(1 / RETRY_BUDGET_RATIO) + 1):
        budget.first_attempt()
    assert budget.take(0)
    assert not budget.take(0)
    assert budget.take(RETRY_TRICKLE_NS)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, SECOND_NS)), max_size=200))
def test_retries_never_exceed_what_was_earned(steps: list[tuple[bool, int]]) -> None:
    budget = RetryBudget(now_ns=0)
    now, firsts, retries = 0, 0, 0
    for is_first, pause in steps:
        now += pause
        if is_first:
            firsts += 1
            budget.first_attempt()
        else:
            retries += budget.take(now)
    assert retries <= RETRY_BUDGET_TOKENS_MAX + firsts * RETRY_BUDGET_RATIO + now / RETRY_TRICKLE_NS


@given(st.integers(1, 100), st.floats(0, 1))
def test_backoff_stays_within_its_cap(attempt: int, chance: float) -> None:
    assert 0 <= backoff_ns(attempt, chance) <= min(RETRY_BACKOFF_NS_MAX, RETRY_BACKOFF_NS_MIN * 2 ** (attempt - 1))


def test_breaker_opens_after_failures_in_a_row_and_probes() -> None:
    breaker = CircuitBreaker()
    opened = [breaker.failed(0) for _ in range(BREAKER_FAILURES_MAX)]
    assert opened == [False] * (BREAKER_FAILURES_MAX - 1) + [True]
    assert not breaker.allows(BREAKER_OPEN_NS_MIN - 1)
    assert breaker.reopens_in_ns(0) == BREAKER_OPEN_NS_MIN
    assert breaker.allows(BREAKER_OPEN_NS_MIN)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.allows(BREAKER_OPEN_NS_MIN), "one probe at a time"
    breaker.succeeded()
    assert breaker.allows(BREAKER_OPEN_NS_MIN)
    assert breaker.reopens_in_ns(0) == 0


def test_a_success_between_failures_keeps_the_breaker_closed() -> None:
    breaker = CircuitBreaker()
    for _ in range(10 * BREAKER_FAILURES_MAX):
        breaker.failed(0)
        breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED


def test_failed_probes_double_the_pause_up_to_its_bound() -> None:
    breaker = CircuitBreaker()
    for _ in range(BREAKER_FAILURES_MAX):
        breaker.failed(0)
    now, pauses = 0, []
    for _ in range(8):
        pause = breaker.reopens_in_ns(now)
        pauses.append(pause)
        now += pause
        assert breaker.allows(now)
        assert not breaker.failed(now)
    assert pauses[0] == BREAKER_OPEN_NS_MIN
    assert pauses == sorted(pauses)
    assert pauses[-1] == BREAKER_OPEN_NS_MAX


def test_a_probe_that_never_reports_lets_another_one_pass() -> None:
    breaker = CircuitBreaker()
    for _ in range(BREAKER_FAILURES_MAX):
        breaker.failed(0)
    assert breaker.allows(BREAKER_OPEN_NS_MIN)
    assert breaker.allows(2 * BREAKER_OPEN_NS_MIN)

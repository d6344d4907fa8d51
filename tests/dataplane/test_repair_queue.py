"""What is copied next, from whom, and how fast: the queue and the byte budget of repair."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.limits import PULL_BACKOFF_NS_MIN, PULL_BATCH_RECORDS, PULL_FAILURES_MAX, SECOND_NS
from kvstore.server.repair import Batch, ByteBudget, PullQueue

SPACE, OTHER_SPACE = b"s" * 32, b"t" * 32


def keys(count: int, first: int = 0) -> list[bytes]:
    return [(first + at).to_bytes(32, "little") for at in range(count)]


def taken(queue: PullQueue, now_ns: int = 0, *, busy: tuple[str, ...] = ()) -> Batch:
    batch = queue.next_batch(now_ns, busy=busy)
    assert batch is not None
    return batch


def test_a_record_waits_once_whoever_names_it() -> None:
    queue = PullQueue()
    assert queue.offer(SPACE, keys(2), "a", tenant="t") == [True, True]
    assert queue.offer(SPACE, keys(3), "b", tenant="t") == [True, True, True]
    assert taken(queue).keys == tuple(keys(2))
    assert taken(queue).keys == tuple(keys(1, 2))
    assert len(queue) == 3, "what is under way is known too"
    assert queue.offer(SPACE, keys(3), "c", tenant="t") == [True, True, True]
    assert queue.next_batch(0) is None


def test_a_full_queue_refuses_what_is_new_and_knows_what_it_has() -> None:
    queue = PullQueue(records_max=4)
    assert queue.offer(SPACE, keys(3), "a", tenant="t") == [True, True, False]
    assert queue.offer(SPACE, keys(2), "a", tenant="t") == [True, True]
    queue.done(taken(queue))
    assert queue.offer(SPACE, keys(1, 2), "a", tenant="t") == [True], "an ended batch has made room"


def test_a_tenant_leaves_room_for_the_others_and_they_take_turns() -> None:
    queue = PullQueue(records_max=400)
    greedy = [queue.offer(SPACE, keys(1, at), "a", tenant="greedy")[0] for at in range(400)]
    assert sum(greedy) == 200, "alone it has half"
    assert sum(queue.offer(OTHER_SPACE, keys(400), "a", tenant="late")) == 100, "half of what is left"
    assert queue.offer(OTHER_SPACE, keys(1), "b", tenant="later") == [True], "known already, whoever asks"
    assert queue.offer(b"u" * 32, keys(1), "b", tenant="later") == [True]
    turns = [taken(queue, busy=("b",)) for _ in range(4)]
    assert [batch.tenant for batch in turns] == ["greedy", "late", "greedy", "late"]
    for batch in turns:
        queue.done(batch)
    waiting = len(queue) - 1
    assert queue.give_up("a") == waiting
    assert sum(queue.offer(SPACE, keys(400), "a", tenant="greedy")) == 200, "nothing is counted that has gone"


def test_sources_take_turns_and_a_batch_has_one_namespace() -> None:
    queue = PullQueue()
    queue.offer(SPACE, keys(PULL_BATCH_RECORDS + 1), "a", tenant="t")
    queue.offer(OTHER_SPACE, keys(1), "a", tenant="t")
    queue.offer(SPACE, keys(1, 1000), "b", tenant="t")
    batches = [taken(queue) for _ in range(4)]
    assert [batch.source for batch in batches] == ["a", "b", "a", "a"]
    assert [len(batch.keys) for batch in batches] == [PULL_BATCH_RECORDS, 1, 1, 1]
    assert [batch.namespace for batch in batches] == [SPACE, SPACE, SPACE, OTHER_SPACE]


def test_a_busy_source_is_passed_over() -> None:
    queue = PullQueue()
    queue.offer(SPACE, keys(1), "a", tenant="t")
    queue.offer(SPACE, keys(1, 1), "b", tenant="t")
    assert taken(queue, busy=("a",)).source == "b"
    assert queue.next_ns(5, busy=("a",)) is None
    assert queue.next_ns(5) == 5


def test_a_failing_source_is_left_alone_longer_each_time_and_then_given_up() -> None:
    queue = PullQueue()
    queue.offer(SPACE, keys(3), "a", tenant="t")
    now_ns = 0
    pauses = []
    for failure in range(PULL_FAILURES_MAX):
        batch = taken(queue, now_ns)
        assert batch.keys == tuple(keys(3)), "in the order that they were named in"
        lost = queue.failed(batch, now_ns)
        again_ns = queue.next_ns(now_ns)
        if again_ns is None:
            assert (failure, lost) == (PULL_FAILURES_MAX - 1, 3)
            break
        assert queue.next_batch(again_ns - 1) is None
        pauses.append(again_ns - now_ns)
        now_ns = again_ns
    assert pauses == [PULL_BACKOFF_NS_MIN << at for at in range(PULL_FAILURES_MAX - 1)]
    assert len(queue) == 0
    queue.offer(SPACE, keys(1), "a", tenant="t")
    assert taken(queue, queue.next_ns(now_ns) or 0), "it may be named again"


def test_what_a_source_could_not_give_is_asked_for_once_more() -> None:
    queue = PullQueue()
    queue.offer(SPACE, keys(2), "a", tenant="t")
    assert queue.done(taken(queue), again=keys(1)) == 0
    again = taken(queue)
    assert again.keys == tuple(keys(1))
    assert queue.done(again, again=keys(1)) == 1
    assert (len(queue), queue.next_batch(0)) == (0, None)


# --- the byte budget --------------------------------------------------------------------------------------------------
@given(
    rate=st.integers(1, 1 << 34),
    burst=st.integers(1, 1 << 26),
    steps=st.lists(st.tuples(st.integers(0, 10 * SECOND_NS), st.integers(0, 1 << 26)), max_size=60),
)
def test_no_window_of_time_takes_more_than_rate_burst_and_one_batch(
    rate: int, burst: int, steps: list[tuple[int, int]]
) -> None:
    budget = ByteBudget(bytes_second=rate, burst_bytes=burst, now_ns=0)
    now_ns = 0
    took: list[tuple[int, int]] = []
    for pause_ns, length in steps:
        now_ns += pause_ns
        if budget.ready(now_ns):
            budget.take(length, now_ns)
            took.append((now_ns, length))
    for first in range(len(took)):
        total = 0
        for at_ns, length in took[first:]:
            assert total <= rate * (at_ns - took[first][0]) // SECOND_NS + burst + max(n for _, n in took)
            total += length


@given(rate=st.integers(1, 1 << 34), debt=st.integers(1, 1 << 30))
def test_it_says_when_it_is_ready_again(rate: int, debt: int) -> None:
    budget = ByteBudget(bytes_second=rate, burst_bytes=1, now_ns=0)
    budget.take(1 + debt, 0)
    at_ns = budget.ready_at_ns(0)
    assert at_ns is not None
    assert budget.ready(at_ns)
    assert not ByteBudget(bytes_second=rate, burst_bytes=1, now_ns=0).ready_at_ns(0)
    assert at_ns <= debt * SECOND_NS // rate + 2


def test_a_budget_of_nothing_is_never_ready() -> None:
    budget = ByteBudget(bytes_second=0, burst_bytes=1 << 20, now_ns=0)
    assert not budget.ready(1 << 60)
    assert budget.ready_at_ns(1 << 60) is None

"""How a verb talks to whoever drives it: rounds of jobs, and pauses between them.

A verb is a generator. It yields jobs, as a list or a Wave, which the driver runs side by side, each on a connection of
its own, or a number of nanoseconds to wait. A job never raises for a node's trouble: its `failure` says what happened.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from kvstore.cluster.view import TargetId, View
from kvstore.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KVStoreError,
    Overloaded,
    StaleView,
    Unavailable,
)
from kvstore.limits import (
    BREAKER_PROBE_NS,
    BREAKER_SILENCE_NS,
    CONNECT_NS_MAX,
    DOWN_SILENCE_NS,
    LAST_SILENCE_NS,
    RETRIES_PER_CALL_MAX,
    VIEW_ASK_NS_MIN,
)
from kvstore.types.flow import FlowClass
from kvstore.wire.codec import unpack_plain
from kvstore.wire.messages import ViewReply, ViewRequest
from kvstore_client.connection import Connection, Steps
from kvstore_client.core import ClientCore
from kvstore_client.retry import BreakerState, backoff_ns
from kvstore_client.target import TargetLink


class Job:
    """One target's share of a call.

    Attributes:
        begins_ns: Not before, when it follows another one.
        deadline_ns: Monotonic; the connection waits until then.
        failure: Why it did not come to its end; None when it did, or has not run.
        busy_ns: How long it has run, over all tries.
        is_cut: Its patience ended before its time.
        is_last_resort: The view calls its target down, and nobody else has what is asked for. Its failure counts for
            nothing but that such targets are left alone for a while.
        is_repeated: It was run again beside the others of its round.
        is_stale: It failed on a connection that had served before, and nothing was heard: the node was restarted in
            between, so trying again at once on a fresh one says nothing about the node's health.
        persists: Nobody else has what it is for: it is repeated for as long as its target is silent, and in doubt.
        retries_max: How often it may be repeated otherwise.
        patience_ns: If nothing of the answer has come after so long, the first try is given up as Unavailable; 0 waits
            until the deadline. For jobs whose records may be asked for elsewhere.
        silence_ns: If nothing has come for so long, it is given up, whatever it was; 0 is never. See `hurry`.
        begun_on: Connection, with its link, that is taken already and on which the first run goes on; None afterwards.
    """

    __slots__ = (
        "_on",
        "begins_ns",
        "begun_on",
        "busy_ns",
        "deadline_ns",
        "failure",
        "flow",
        "is_cut",
        "is_last_resort",
        "is_repeated",
        "is_stale",
        "patience_ns",
        "persists",
        "retries_max",
        "silence_ns",
        "started_ns",
        "target",
    )

    def __init__(self, *, target: TargetId, flow: FlowClass, deadline_ns: int, retries_max: int) -> None:
        self.target = target
        self.flow = flow
        self.deadline_ns = deadline_ns
        self.retries_max = retries_max
        self.failure: KVStoreError | None = None
        self.is_cut = False
        self.is_stale = False
        self.is_last_resort = False
        self.persists = False
        self.is_repeated = False
        self.begins_ns = 0
        self.started_ns = 0
        self.busy_ns = 0
        self.patience_ns = 0
        self.silence_ns = 0
        self._on: Connection | None = None
        self.begun_on: tuple[TargetLink, Connection] | None = None

    def as_last_resort(self) -> None:
        """Before the first run: for a target that the view calls down. One try, and little time."""
        self.is_last_resort = True
        self.retries_max = 0
        self.patience_ns = DOWN_SILENCE_NS

    def hurry(self, silence_ns: int, now_ns: int) -> None:
        """Nobody needs it any more: it is given up when it says nothing for so long, from now on or later."""
        self.silence_ns = self.patience_ns = silence_ns
        if self._on is not None and not self._on.has_heard:
            self._on.wait_for_word(min(self.deadline_ns, now_ns + silence_ns), self.deadline_ns)

    def arm(self, connection: Connection) -> None:
        """From now on it is silent: after a HELLO, and before each request but the first one, of those with several."""
        if self.silence_ns:
            heard_by_ns = time.monotonic_ns() + self.silence_ns
            connection.wait_for_word(min(self.deadline_ns, heard_by_ns), self.deadline_ns)

    def run(self, connection: Connection) -> Steps:
        """Does the call on an open connection. Raises as `Connection.receive`."""
        raise NotImplementedError

    def wants_another_try(self) -> bool:
        """Whether repeating it may help."""
        return isinstance(self.failure, Unavailable | Overloaded | StaleView)


class Wave:
    """Jobs that run side by side. What follows one of them begins while the others go on.

    Attributes:
        jobs: All of them, also those that followed.
    """

    __slots__ = ("_after", "_running", "jobs")

    def __init__(self, jobs: Sequence[Job], after: Callable[[Job, bool], Sequence[Job]] | None = None) -> None:
        """
        Args:
            jobs: To begin with.
            after: Called with each job that has ended, and whether others still run: what to run now. Never raises.
        """
        self.jobs = list(jobs)
        self._after = after
        self._running = len(jobs)

    def ended(self, job: Job) -> Sequence[Job]:
        """For the driver: what follows a job; it may be the same one. Each one's `begins_ns` is waited for."""
        self._running -= 1
        if self._after is None:
            return ()
        more = self._after(job, self._running > 0)
        self._running += len(more)
        self.jobs += [one for one in more if one is not job]
        return more


T = TypeVar("T")
Round: TypeAlias = Sequence[Job]
Verb: TypeAlias = Generator["Round | Wave | int", None, T]


def perform(link: TargetLink, job: Job, connection: Connection) -> Steps:
    """Runs a job on a connection, opening it first. Failures of the node end in `job.failure`.

    Closes the connection before anything else gets out, so that no buffer is written after the call.
    """
    is_first, now_ns = not job.started_ns, time.monotonic_ns()
    job.failure = None
    job.is_stale = job.is_cut = False
    job.started_ns = now_ns
    patience_ns = job.patience_ns
    connection.pause_ns = 0
    if is_first and link.has_another_way(connection.address, now_ns):
        # it may be the way that is dead: then there is time to go by another one
        patience_ns = min(patience_ns or LAST_SILENCE_NS, max(1, (job.deadline_ns - now_ns) // 2))
        connection.pause_ns = patience_ns
    heard_by_ns = min(job.deadline_ns, now_ns + patience_ns) if patience_ns else 0
    connection.wait_for_word(heard_by_ns, job.deadline_ns)
    connection.has_heard, connection.asked_ns = False, now_ns
    is_probe = is_first and (link.breaker.state is not BreakerState.CLOSED or link.rests(connection.address))
    is_probe &= not (job.persists and link.breaker.is_doubted(now_ns))
    is_probe |= job.is_last_resort
    connection.connect_ns_max = BREAKER_PROBE_NS if is_probe else CONNECT_NS_MAX
    job._on = connection
    try:
        if connection.is_abandoned:
            yield from connection.recover()
            if connection.is_open:
                link.breaker.succeeded()  # the answer has come, if late
        if not connection.is_open:
            yield from connection.open()
            job.arm(connection)  # it may have been hurried meanwhile
        yield from job.run(connection)
        connection.belongs_to(None)  # the caller's memory is his again
        job.busy_ns += time.monotonic_ns() - now_ns
    except KVStoreError as error:
        job.failure = error
        job.busy_ns += time.monotonic_ns() - now_ns
        is_late = isinstance(error, DeadlineExceeded)
        if not (connection.is_idle or (is_late and connection.abandon())):
            connection.close()
        if is_late and (heard_by_ns or job.silence_ns) and time.monotonic_ns() < job.deadline_ns:
            job.patience_ns = 0
            job.is_cut = True
            words = f"target {link.id} at {connection.address} has said nothing for too long: {error}"
            job.failure = Unavailable(words)
    except BaseException:
        connection.close()
        raise
    finally:
        job._on = None


def settle(core: ClientCore, link: TargetLink, job: Job, connection: Connection, now_ns: int) -> None:
    """Draws the conclusions from a job that has run. The caller holds the lock that guards links."""
    failure = job.failure
    if failure is None:
        link.breaker.succeeded()
    elif job.is_last_resort and not connection.is_idle:
        link.was_unanswered(now_ns)
    elif _breaks_way(job, connection) and link.leave_address(connection.address, now_ns):
        core.counters.connections_broken += 1
        connection.close()  # whatever is still to come, comes by that way
        job.is_stale = isinstance(failure, Unavailable)  # there is another way: at once, by that
    elif job.is_cut and job.retries_max and not job.silence_ns:
        link.drop_idle()  # slow or dead? The next try begins with a HELLO, which a live node answers at once
    elif isinstance(failure, Unavailable | DeadlineExceeded) and is_silence(job, connection, now_ns):
        if link.breaker.silent(job.started_ns, now_ns):
            core.counters.breaker_opened += 1
            core.doubt_view()
            link.drop_idle()
    elif isinstance(failure, Unavailable) and not connection.is_idle:
        core.counters.connections_broken += 1
        link.drop_idle()
        job.is_stale = not connection.is_fresh and not connection.has_heard
        if not job.is_stale:
            core.doubt_view()
            core.counters.breaker_opened += link.breaker.failed(now_ns)
    else:
        link.breaker.succeeded()
    link.give_back(connection, now_ns)


def _breaks_way(job: Job, connection: Connection) -> bool:
    """Whether a job has failed for its connection, be it for the node or for the way to it."""
    if connection.is_idle:
        return False
    return isinstance(job.failure, Unavailable) or (
        isinstance(job.failure, DeadlineExceeded) and not connection.has_heard
    )


def is_silence(job: Job, connection: Connection, now_ns: int) -> bool:
    """Whether a job that ran out of time, or failed, has heard nothing for as long as it was patient."""
    if connection.has_heard or connection.is_idle:
        return False
    is_late = job.is_cut or isinstance(job.failure, DeadlineExceeded)
    return is_late or now_ns - job.started_ns >= BREAKER_SILENCE_NS


def broken_circuit(link: TargetLink, now_ns: int) -> Unavailable:
    """What a job fails with while its target's breaker is open."""
    wait_ms = link.breaker.reopens_in_ns(now_ns) // 1_000_000
    return Unavailable(
        f"target {link.id} at {', '.join(link.addresses)} failed several times in a row; "
        f"it is tried again in {wait_ms} ms{link.words_of_need()}"
    )


def late(connection: Connection) -> DeadlineExceeded:
    """What a driver throws into a job that waits on this connection when its time is over."""
    return DeadlineExceeded(f"the call's deadline passed while it waited for the node at {connection.address}")


def ensure_view(core: ClientCore, deadline_ns: int) -> Verb[None]:
    """Asks for the view when there is none, or a newer one is known of."""
    if core.wants_view(time.monotonic_ns()):
        yield from refresh_view(core, deadline_ns)


def refresh_view(core: ClientCore, deadline_ns: int) -> Verb[KVStoreError | None]:
    """Asks one source after the other until one knows the newest view that was heard of.

    Returns:
        What each source failed with when none answered, of the kind of the last. None also when only older views were
        given than the known one.
    """
    failures: list[KVStoreError] = []
    has_answer = False
    now_ns = time.monotonic_ns()
    named_epoch = core.asks_for_view(now_ns)
    if core.view is not None:
        # an old view may still be right: leave most of the time to the call itself
        deadline_ns = min(deadline_ns, now_ns + min(CONNECT_NS_MAX, max(0, deadline_ns - now_ns) // 4))
    for source in core.view_sources(now_ns):
        now_ns = time.monotonic_ns()
        left_ns = deadline_ns - now_ns
        if left_ns <= 0 and failures:
            break
        job = ViewJob(core, source, now_ns + max(left_ns // 2, min(left_ns, VIEW_ASK_NS_MIN)))
        yield [job]
        if job.view is None:
            failures += [job.failure] if job.failure is not None else []
        elif core.adopt(job.view, source=source, now_ns=time.monotonic_ns(), named_epoch=named_epoch):
            return None
        else:
            has_answer = True
    core.has_asked_all(named_epoch)
    return None if has_answer else _joined(failures)


def _joined(failures: Sequence[KVStoreError]) -> KVStoreError | None:
    """One failure that says what all said; None of none."""
    texts = list(dict.fromkeys(map(str, failures)))
    return failures[-1] if len(texts) < 2 else type(failures[-1])("; ".join(texts)) if failures else None


def first_view(core: ClientCore, deadline_ns: int) -> Verb[KVStoreError | None]:
    """As `refresh_view`; asks again, with jitter, nodes that have too much to do, or say nothing yet: many may start at
    one moment."""
    attempts = 0
    while True:
        failure = yield from refresh_view(core, deadline_ns)
        attempts += 1
        pause_ns = backoff_ns(attempts, random.random())
        may_help = isinstance(failure, Overloaded) and attempts <= RETRIES_PER_CALL_MAX
        may_help |= failure is not None and core.doubts_some(time.monotonic_ns())
        if not may_help or time.monotonic_ns() + pause_ns >= deadline_ns:
            return failure
        yield pause_ns


def is_on_this_host(core: ClientCore, deadline_ns: int) -> Verb[bool]:
    """Whether memory can be shared with some target; asks those that have not been asked."""
    yield from ensure_view(core, deadline_ns)
    links = [core.link(target) for target in core.target_ids()]
    jobs = [ViewJob(core, link.id, deadline_ns) for link in links if not link.local.is_known]
    if jobs:
        yield jobs
    return any(link.local.path for link in links)


def try_ways(core: ClientCore, deadline_ns: int) -> Verb[KVStoreError | None]:
    """Connects to each worker, and says why one cannot be reached in the way that the caller requires."""
    jobs = [ViewJob(core, target, deadline_ns) for target in core.target_ids()]
    if jobs:
        yield jobs
    return next((job.failure for job in jobs if job.failure is not None), None)


class ViewJob(Job):
    """Asks one node for the view."""

    __slots__ = ("_core", "view")

    def __init__(self, core: ClientCore, source: TargetId, deadline_ns: int) -> None:
        super().__init__(target=source, flow=core.options.flow, deadline_ns=deadline_ns, retries_max=0)
        self._core = core
        self.view: View | None = None

    def run(self, connection: Connection) -> Steps:
        """Asks for the view as a whole: the node may have been replaced by another with older epochs."""
        reply = yield from connection.ask(ViewRequest(known_epoch=0), ViewReply)
        if not reply.view:
            raise Unavailable(f"node at {connection.address} has no view yet")
        try:
            self.view = View.from_plain(unpack_plain(reply.view, what="view"))
        except InvalidRequest as error:
            raise Unavailable(f"node at {connection.address} gave a view that makes no sense: {error}") from error

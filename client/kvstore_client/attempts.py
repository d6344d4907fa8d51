"""The rules for trying again: which jobs, how often, after what pause, and what may go on meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvstore.errors import StaleView, Unavailable
from kvstore.limits import BREAKER_OPEN_NS_MIN
from kvstore_client.core import ClientCore
from kvstore_client.retry import backoff_ns
from kvstore_client.rounds import Job, Round, Verb, Wave, refresh_view

Follow: TypeAlias = Callable[[Job], Sequence[Job]]
"""What to run now that a job has ended for good, beside those that still run. Never raises."""
Need: TypeAlias = Callable[[Job], bool]


def attempt(
    core: ClientCore,
    jobs: Round,
    *,
    plans_again: bool = False,
    follow: Follow | None = None,
    is_needed: Need | None = None,
) -> Verb[None]:
    """Runs jobs, and again those for which it may help, within their deadlines and the client's retry budget.

    A job that fails while others still run is repeated beside them, once; more often only when they are through, by the
    newest view.

    Args:
        core: Of the call.
        jobs: One for each target.
        plans_again: A job that was planned with an old view is not repeated as it is: the caller plans anew.
        follow: Called for jobs that end while others of the same round run, and will not be repeated. What it returns
            belongs to the round; those that end last are left to the caller.
        is_needed: Whether a job that has failed is to be repeated: by now others may have told what it was for. As
            long as it is, a silent target is asked again while it is in doubt.
    """
    core.budget.first_attempt()
    pending: Sequence[Job] = jobs
    stale_tries = attempts = 0
    while pending:
        beside = _Beside(core, plans_again=plans_again, follow=follow, is_needed=is_needed)
        if len(pending) == 1:
            yield pending
        else:
            wave = Wave(pending, beside.after)
            yield wave
            pending = wave.jobs
        pending = [job for job in pending if beside.may_help(job)]
        if not pending:
            return
        if all(job.is_stale for job in pending) and stale_tries <= core.options.connections_per_target:
            stale_tries += 1
            continue
        attempts += 1
        now_ns = time.monotonic_ns()
        waits = [(job, _wait_ns(core, job, now_ns)) for job in pending if _has_tries(core, job, attempts, now_ns)]
        pause_ns = backoff_ns(attempts, random.random())
        pause_ns = max([pause_ns, *(wait_ns for _, wait_ns in waits if wait_ns is not None)])
        pending = [job for job, wait_ns in waits if wait_ns is not None and now_ns + pause_ns < job.deadline_ns]
        if not pending:
            return
        if not core.budget.take(now_ns):
            core.counters.retries_denied += 1
            return
        core.counters.retries += 1
        yield pause_ns
        if any(isinstance(job.failure, Unavailable | StaleView) for job in pending):
            yield from refresh_view(core, min(job.deadline_ns for job in pending))
            pending = [job for job in pending if not core.is_known_down(job.target)]


class _Beside:
    """What is run beside the jobs of one round that are not through yet."""

    __slots__ = ("_core", "_follow", "_followed", "_is_needed", "_plans_again", "_stale")

    def __init__(self, core: ClientCore, *, plans_again: bool, follow: Follow | None, is_needed: Need | None) -> None:
        self._core = core
        self._plans_again = plans_again
        self._follow = follow
        self._is_needed = is_needed
        self._stale: set[Job] = set()
        self._followed: set[Job] = set()

    def may_help(self, job: Job) -> bool:
        """Whether another try may."""
        if job in self._followed:
            return False
        if self._is_needed is not None and job.failure is not None:
            job.persists = self._is_needed(job)
            if not job.persists:
                return False
        return job.wants_another_try() and not (self._plans_again and isinstance(job.failure, StaleView))

    def after(self, job: Job, others_run: bool) -> Sequence[Job]:
        """See `Wave`."""
        if not others_run:
            return ()
        if self.may_help(job):
            if job.is_stale and job not in self._stale:
                self._stale.add(job)
                job.begins_ns = 0
                return (job,)
            if job.is_stale or job.retries_max:
                return (job,) if self._may_repeat(job) else ()
        if self._follow is None:
            return ()
        self._followed.add(job)
        return self._follow(job)

    def _may_repeat(self, job: Job) -> bool:
        """Whether it may run again now, which is paid for and paused for then."""
        core, now_ns = self._core, time.monotonic_ns()
        wait_ns = _wait_ns(core, job, now_ns)
        if job.is_repeated or not job.retries_max or isinstance(job.failure, StaleView) or wait_ns is None:
            return False
        begins_ns = now_ns + max(wait_ns, backoff_ns(1, random.random()))
        if begins_ns >= job.deadline_ns or not core.budget.take(now_ns):
            return False
        core.counters.retries += 1
        job.is_repeated = True
        job.begins_ns = begins_ns
        return True


def _has_tries(core: ClientCore, job: Job, attempts: int, now_ns: int) -> bool:
    """Whether a job may be repeated once more: as often as its breaker lets it pass while its target is doubted."""
    return attempts + job.is_repeated <= job.retries_max or (job.persists and _is_doubted(core, job, now_ns))


def _is_doubted(core: ClientCore, job: Job, now_ns: int) -> bool:
    try:
        return core.link(job.target).breaker.is_doubted(now_ns)
    except Unavailable:
        return False


def _wait_ns(core: ClientCore, job: Job, now_ns: int) -> int | None:
    """How long until the target's breaker lets another try of a job pass; None when it shall not be tried again.

    A breaker that has opened just now, or for a silence that is young, is waited for: a live target that was slow is
    not given up for that.
    """
    try:
        breaker = core.link(job.target).breaker
    except Unavailable:
        return None
    wait_ns = breaker.reopens_in_ns(now_ns)
    if wait_ns > BREAKER_OPEN_NS_MIN and not (job.persists and breaker.is_doubted(now_ns)):
        return None
    job.started_ns = job.started_ns or now_ns  # its probe may take the time of a whole connect
    return wait_ns

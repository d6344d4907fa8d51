"""Several jobs on the calling thread, in one loop over sockets; what follows one begins while the others go on."""

from __future__ import annotations

import select
import time
from typing import Final, NamedTuple, Protocol

from kvstore_client.connection import READ, Connection, Steps
from kvstore_client.rounds import Job, Wave, late, perform
from kvstore_client.target import TargetLink

EVENTS: Final = {READ: select.POLLIN}
_LOOK_NS: Final = 10_000_000
"""How often a job that is to begin beside others looks for a connection. It may not wait for one: two threads that each
hold what the other one needs would wait for ever."""


class Held(NamedTuple):
    """A job and the connection it runs on. A tuple, not a dataclass: one is made for each call."""

    job: Job
    link: TargetLink
    connection: Connection


class PutOff(Exception):
    """There is no connection for a job now; it waits until others of its round are through."""


class Holder(Protocol):
    """Who has the connections."""

    def take(self, job: Job, *, may_put_off: bool = False) -> Held | None:
        """A connection for `job`, as soon as there is one; None, with `job.failure` set, when there is none.

        Raises:
            PutOff: It may, and its target seems dead: others do not wait for it.
        """

    def take_now(self, job: Job) -> Held | None:
        """As `take`, without waiting. Raises PutOff when all connections are in use."""

    def let_go(self, held: Held) -> None:
        """The job on it has ended."""

    def pause(self, length_ns: int) -> None:
        """Waits, until the client is closed at most."""


class Together:
    """A wave in progress. `take_all`, `run`, and always `close`."""

    def __init__(self, holder: Holder, wave: Wave) -> None:
        self._holder = holder
        self._wave = wave
        self._poller = select.poll()
        self._waiting: dict[int, tuple[Held, Steps]] = {}
        self._taken: list[Held] = []
        self._failed: list[Job] = []
        self._later: list[Job] = []

    def take_all(self) -> None:
        """Takes a connection for each job, in the order of target ids: so threads that need several can't wait for each
        other in a circle. Of several jobs for one target, for the first: the others begin beside it when they can."""
        for job in sorted(self._wave.jobs, key=lambda job: job.target):
            if self._taken and self._taken[-1].job.target == job.target:
                self._later.append(job)
                continue
            try:
                held = self._holder.take(job, may_put_off=True)
            except PutOff:
                self._later.append(job)
                continue
            if held is None:
                self._failed.append(job)
            else:
                self._taken.append(held)

    def run(self) -> None:
        """Until all jobs have ended, and what follows them."""
        while self._taken:
            self._start(self._taken.pop())
        for job in self._failed:
            self._ended(job)
        while self._waiting or self._later:
            if self._later:
                self._begin_later()
            if self._waiting:
                self._look()

    def close(self) -> None:
        """Ends what has not ended, after an error."""
        for held, steps in self._waiting.values():
            steps.close()
            self._let_go(held)
        for held in self._taken:
            self._let_go(held)

    def _start(self, held: Held) -> None:
        held.connection.blocking = False
        self._go_on(held, perform(held.link, held.job, held.connection))

    def _go_on(self, held: Held, steps: Steps, *, is_late: bool = False) -> None:
        """Advances one job until it waits again, and registers what for."""
        try:
            want = steps.throw(late(held.connection)) if is_late else next(steps)
        except StopIteration:
            self._let_go(held)
            self._ended(held.job)
            return
        except BaseException:
            self._let_go(held)
            raise
        fileno = held.connection.fileno()
        self._poller.register(fileno, EVENTS.get(want, select.POLLOUT))
        self._waiting[fileno] = (held, steps)

    def _let_go(self, held: Held) -> None:
        held.connection.blocking = True
        self._holder.let_go(held)

    def _ended(self, job: Job) -> None:
        self._later += self._wave.ended(job)

    def _begin_later(self) -> None:
        """Begins what follows others, and what was put off, where there is a connection for it."""
        later, self._later = self._later, []
        now_ns = time.monotonic_ns()
        for job in later:
            try:
                if job.begins_ns > now_ns:
                    raise PutOff
                self._begin(job, self._holder.take_now(job))
            except PutOff:
                self._later.append(job)
        if self._waiting or not self._later:
            return
        first = min(self._later, key=lambda job: job.begins_ns)
        if first.begins_ns > now_ns:
            self._holder.pause(first.begins_ns - now_ns)
        else:  # nothing is held: others are in no one's way
            self._later.remove(first)
            self._begin(first, self._holder.take(first))

    def _begin(self, job: Job, held: Held | None) -> None:
        if held is None:
            self._ended(job)
        else:
            self._start(held)

    def _look(self) -> None:
        """Waits for a socket, and goes on with those that are ready or too late."""
        waiting = self._waiting
        looked_ns = time.monotonic_ns()
        first_ns = min(held.connection.deadline_ns for held, _ in waiting.values())
        for job in self._later:
            first_ns = min(first_ns, max(job.begins_ns, looked_ns + _LOOK_NS))
        for fileno, _ in self._poller.poll(wait_ms(first_ns)):
            held, steps = waiting.pop(fileno)
            self._poller.unregister(fileno)
            self._go_on(held, steps)
        now_ns = time.monotonic_ns()
        for fileno, (held, steps) in list(waiting.items()):
            # a thread that had no core for a while must not take its own silence for the node's: who has said
            # nothing yet is late only if nothing was there when we looked after its time
            until_ns = now_ns if held.connection.has_heard else looked_ns
            if held.connection.deadline_ns <= until_ns:
                del waiting[fileno]
                self._poller.unregister(fileno)
                self._go_on(held, steps, is_late=True)


def wait_ms(deadline_ns: int) -> int:
    """Milliseconds for poll, rounded up so that it does not return just before the deadline."""
    return max(0, -(-(deadline_ns - time.monotonic_ns()) // 1_000_000))

"""Drives verbs on the calling thread: one connection with the kernel waiting, several in one selector loop."""

from __future__ import annotations

import select
import threading
import time

from kvstore.cluster.view import TargetId
from kvstore.errors import Closed, DeadlineExceeded, KVStoreError, Overloaded, Unavailable
from kvstore.limits import BREAKER_PROBE_NS, CALLS_WAITING_MAX, ORPHAN_NS_MIN
from kvstore.types.flow import FlowClass
from kvstore_client.connection import Connection
from kvstore_client.core import ClientCore
from kvstore_client.retry import BreakerState
from kvstore_client.rounds import Job, Round, T, Verb, Wave, broken_circuit, late, perform, settle
from kvstore_client.target import TargetLink
from kvstore_client.together import EVENTS, Held, PutOff, Together, wait_ms


class BlockingDriver:
    """Runs verbs for any number of threads; each waits for its own.

    A thread takes its connections in the order of target ids, so that threads that need several can't wait for each
    other in a circle.
    """

    def __init__(self, core: ClientCore) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        self._closed = False

    def run(self, verb: Verb[T]) -> T:
        """The result of a verb. Raises InvalidRequest, or Closed when the client is or gets closed."""
        try:
            step = next(verb)
            while True:
                if isinstance(step, int):
                    self.pause(step)
                else:
                    self._round(step)
                if self._closed:
                    raise Closed("the client was closed during the call")
                step = verb.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            verb.close()

    def close(self) -> None:
        """Wakes every call in progress, which then raises Closed, and closes all connections."""
        with self._lock:  # a condition's own __enter__ and __exit__ are Python: a signal there would leave it locked
            self._closed = True
            for link in self._core.links():
                link.interrupt()
            self._changed.notify_all()

    def check_open(self) -> None:
        """Raises Closed."""
        if self._closed:
            raise Closed("the client is closed; make a new one")

    def pause(self, length_ns: int) -> None:
        """See `Holder`."""
        with self._lock:
            self._changed.wait_for(lambda: self._closed, length_ns / 1e9)

    def _round(self, jobs: Round | Wave) -> None:
        if not isinstance(jobs, Wave):
            if len(jobs) == 1:
                self._run_alone(jobs[0])
                return
            jobs = Wave(jobs)
        together = Together(self, jobs)
        try:
            together.take_all()
            together.run()
        finally:
            together.close()

    def take(self, job: Job, *, may_put_off: bool = False) -> Held | None:
        """See `Holder`."""
        if job.begun_on is not None:
            link, connection = job.begun_on
            job.begun_on = None
            return Held(job, link, connection)
        now_ns = time.monotonic_ns()
        try:
            with self._lock:
                link = self._core.link(job.target)
                if not link.breaker.allows(now_ns):
                    raise broken_circuit(link, now_ns)
                taken = None if self._closed else link.take(job.flow, now_ns)
                return Held(job, link, taken or self._wait_for_connection(link, job, may_put_off))
        except KVStoreError as error:
            job.failure = error
            job.is_stale = False
            return None

    def take_now(self, job: Job) -> Held | None:
        """See `Holder`."""
        now_ns = time.monotonic_ns()
        try:
            with self._lock:
                self.check_open()
                link = self._core.link(job.target)
                if not link.has_room():
                    raise PutOff
                if not link.breaker.allows(now_ns):
                    raise broken_circuit(link, now_ns)
                connection = link.take(job.flow, now_ns)
        except KVStoreError as error:
            job.failure = error
            job.is_stale = False
            return None
        assert connection is not None, "there was room for one"
        return Held(job, link, connection)

    def borrow(self, target: TargetId, now_ns: int) -> tuple[TargetLink, Connection] | None:
        """A connection to a healthy target that can serve a call at once; None: go the way over `run`.

        Give it back with `give_back`, or to a job's `begun_on`.
        """
        with self._lock:
            if self._closed:
                return None
            try:
                link = self._core.link(target)
            except Unavailable:
                return None
            if link.breaker.state is not BreakerState.CLOSED:
                return None
            connection = link.take_idle(self._core.options.flow, now_ns)
        if connection is None:
            return None
        connection.blocking = True
        return link, connection

    def take_ready(self, link: TargetLink, flow: FlowClass, now_ns: int) -> Connection | None:
        """As `borrow`, with less to decide: None in more cases. Give it back with `put_ready` or `give_back`."""
        with self._lock:
            return None if self._closed else link.take_ready(flow, now_ns)

    def put_ready(self, link: TargetLink, connection: Connection) -> None:
        """The call on a connection of `take_ready` went well."""
        with self._lock:
            if not self._closed and not self._waiting and link.put_ready(connection):
                return
        self.give_back(link, connection, connection.idle_since_ns, has_broken=False)

    def give_back(self, link: TargetLink, connection: Connection, now_ns: int, *, has_broken: bool) -> None:
        """The call on a borrowed connection is over. With one that has broken its idle siblings are closed."""
        with self._lock:
            if has_broken:
                self._core.counters.connections_broken += 1
                link.drop_idle()
            else:
                link.breaker.succeeded()
            link.give_back(connection, now_ns)
            if self._closed:
                connection.close()
            if self._waiting:
                self._changed.notify()

    def _wait_for_connection(self, link: TargetLink, job: Job, may_put_off: bool) -> Connection:
        while True:
            self.check_open()
            now_ns = time.monotonic_ns()
            connection = link.take(job.flow, now_ns)
            if connection is not None:
                return connection
            if link.take_back(now_ns):
                continue
            if self._waiting >= CALLS_WAITING_MAX:
                raise Overloaded(
                    f"{self._waiting} calls of this process wait for a connection to {link.id}, the limit is "
                    f"{CALLS_WAITING_MAX}; use fewer threads or larger batches"
                )
            if now_ns >= job.deadline_ns:
                raise DeadlineExceeded(f"all connections to {link.id} were in use until the call's deadline")
            if may_put_off and link.silent_ns(now_ns) >= BREAKER_PROBE_NS:
                raise PutOff
            link.check_word(job.patience_ns, now_ns)
            wait_ns = job.deadline_ns - now_ns
            wait_ns = min(wait_ns, BREAKER_PROBE_NS if may_put_off or job.patience_ns else ORPHAN_NS_MIN)
            self._waiting += 1
            try:
                self._changed.wait(wait_ns / 1e9)
            finally:
                self._waiting -= 1

    def let_go(self, held: Held) -> None:
        """See `Holder`."""
        with self._lock:
            settle(self._core, held.link, held.job, held.connection, time.monotonic_ns())
            if self._closed:
                held.connection.close()
            if self._waiting:
                self._changed.notify_all()  # they may wait for other targets than this one

    def _run_alone(self, job: Job) -> None:
        held = self.take(job)
        if held is None:
            return
        connection = held.connection
        connection.blocking = True
        steps = perform(held.link, job, connection)
        try:
            want = next(steps)
            while True:
                poller = select.poll()  # anew: opening a connection may go on with another socket
                poller.register(connection.fileno(), EVENTS.get(want, select.POLLOUT))
                is_ready = poller.poll(wait_ms(connection.deadline_ns))
                want = next(steps) if is_ready else steps.throw(late(connection))
        except StopIteration:
            pass
        finally:
            steps.close()
            self.let_go(held)

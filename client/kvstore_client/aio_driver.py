"""Drives verbs on an asyncio loop: the same generators as in threads, waiting by `add_reader` and `add_writer`."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress

from kvstore.errors import Closed, DeadlineExceeded, KVStoreError, Overloaded
from kvstore.limits import BREAKER_PROBE_NS, CALLS_WAITING_MAX
from kvstore_client.connection import READ, Connection
from kvstore_client.core import ClientCore
from kvstore_client.rounds import Job, Round, T, Verb, Wave, broken_circuit, late, perform, settle
from kvstore_client.target import TargetLink


class AsyncDriver:
    """Runs verbs for the tasks of one loop. A cancelled call closes its connection before the task ends."""

    def __init__(self, core: ClientCore) -> None:
        self._core = core
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._closed = False

    async def run(self, verb: Verb[T]) -> T:
        """The result of a verb. Raises InvalidRequest, or Closed when the client is or gets closed."""
        try:
            step = next(verb)
            while True:
                if isinstance(step, int):
                    await asyncio.sleep(step / 1e9)
                else:
                    await self._round(step)
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
        self._closed = True
        for link in self._core.links():
            link.interrupt()
        self._wake_all()

    async def _round(self, jobs: Round | Wave) -> None:
        if not isinstance(jobs, Wave):
            if len(jobs) == 1:
                await self._run_job(jobs[0])
                return
            jobs = Wave(jobs)
        async with asyncio.TaskGroup() as group:
            for job in list(jobs.jobs):
                group.create_task(self._run_in(group, jobs, job))

    async def _run_in(self, group: asyncio.TaskGroup, wave: Wave, job: Job) -> None:
        """Runs a job, and begins what follows it."""
        wait_ns = job.begins_ns - time.monotonic_ns() if job.begins_ns else 0
        if wait_ns > 0:
            await asyncio.sleep(wait_ns / 1e9)
        await self._run_job(job)
        for following in () if self._closed else wave.ended(job):
            group.create_task(self._run_in(group, wave, following))

    async def _run_job(self, job: Job) -> None:
        try:
            link = self._core.link(job.target)
            if not link.breaker.allows(time.monotonic_ns()):
                raise broken_circuit(link, time.monotonic_ns())
            connection = await self._take(link, job)
        except KVStoreError as error:
            job.failure = error
            job.is_stale = False
            return
        connection.blocking = False
        steps = perform(link, job, connection)
        try:
            want = next(steps)
            while True:
                is_ready = await _ready(connection, want)
                want = next(steps) if is_ready else steps.throw(late(connection))
        except StopIteration:
            pass
        finally:
            steps.close()
            settle(self._core, link, job, connection, time.monotonic_ns())
            if self._closed:
                connection.close()
            self._wake_all()

    async def _take(self, link: TargetLink, job: Job) -> Connection:
        while True:
            if self._closed:
                raise Closed("the client is closed; make a new one")
            now_ns = time.monotonic_ns()
            connection = link.take(job.flow, now_ns)
            if connection is not None:
                return connection
            if len(self._waiters) >= CALLS_WAITING_MAX:
                raise Overloaded(
                    f"{len(self._waiters)} calls of this process wait for a connection, the limit is "
                    f"{CALLS_WAITING_MAX}; use fewer tasks or larger batches"
                )
            if now_ns >= job.deadline_ns:
                raise DeadlineExceeded(f"all connections to {link.id} were in use until the call's deadline")
            link.check_word(job.patience_ns, now_ns)
            await self._wait_turn(min(job.deadline_ns, now_ns + BREAKER_PROBE_NS))

    async def _wait_turn(self, deadline_ns: int) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline_ns / 1e9):
                    await waiter
        finally:
            with suppress(ValueError):
                self._waiters.remove(waiter)

    def _wake_all(self) -> None:
        """All of them: they may wait for other targets than the one whose connection is free."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)


async def _ready(connection: Connection, want: int) -> bool:
    """Waits for the socket; False when the deadline came first, which another job may have brought nearer."""
    loop = asyncio.get_running_loop()
    fileno = connection.fileno()
    arrived: asyncio.Future[bool] = loop.create_future()
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer
        now_ns = time.monotonic_ns()
        if now_ns >= connection.deadline_ns:
            _settle_once(arrived, False)
        elif not arrived.done():
            timer = loop.call_at(min(connection.deadline_ns, now_ns + BREAKER_PROBE_NS) / 1e9, look)

    timer = loop.call_at(min(connection.deadline_ns, time.monotonic_ns() + BREAKER_PROBE_NS) / 1e9, look)
    if want == READ:
        loop.add_reader(fileno, _settle_once, arrived, True)
    else:
        loop.add_writer(fileno, _settle_once, arrived, True)
    try:
        return await arrived
    finally:
        timer.cancel()
        if want == READ:
            loop.remove_reader(fileno)
        else:
            loop.remove_writer(fileno)


def _settle_once(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)

"""One worker as its supervisor sees it: started, watched, started again with back-off, and ended."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvstore.errors import DeadlineExceeded, Internal, KVStoreError, Unavailable
from kvstore.limits import (
    CONTROL_DEADLINE_NS,
    SECOND_NS,
    WORKER_BACKOFF_NS_MAX,
    WORKER_BACKOFF_NS_MIN,
    WORKER_HEALTHY_NS,
    WORKER_PULSE_NS,
    WORKER_PULSE_WAIT_NS,
    WORKER_RECOVERY_NS,
    WORKER_SILENCES_MAX,
    WORKER_STOP_GRACE_NS,
)
from kvstore.server.admin import AdminChannel, maps_of, text_of
from kvstore.server.launch import WORKER_MODULE, WorkerLaunch
from kvstore.server.report import WorkerReport, WorkerState
from kvstore.server.tenants import TenantBook
from kvstore.wire.codec import Plain

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedTarget:
    """A drive that a worker said it owns."""

    id: str
    path: str
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """What a worker reports once it serves."""

    data: tuple[str, ...]
    boot_id: bytes
    targets: tuple[OwnedTarget, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """A worker's last sign of life: what it has moved, and how fast since the one before."""

    at_ns: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_bytes_second: float = 0.0
    received_bytes_second: float = 0.0
    lookup_keys: int = 0
    lookup_hits: int = 0

    def next(self, value: Mapping[str, Plain], now_ns: int) -> Pulse:
        """The pulse that an answer of the worker makes."""
        sent, received, keys, hits = (
            count if isinstance(count := value.get(name, 0), int) else 0
            for name in ("sent_bytes", "received_bytes", "lookup_keys", "lookup_hits")
        )
        seconds = (now_ns - self.at_ns) / SECOND_NS if self.at_ns else 0.0
        return Pulse(
            at_ns=now_ns,
            sent_bytes=sent,
            received_bytes=received,
            sent_bytes_second=(sent - self.sent_bytes) / seconds if seconds else 0.0,
            received_bytes_second=(received - self.received_bytes) / seconds if seconds else 0.0,
            lookup_keys=keys,
            lookup_hits=hits,
        )


def backoff_ns(failures: int) -> int:
    """How long to wait before the start after `failures` (1 or more) deaths in a row."""
    return min(WORKER_BACKOFF_NS_MAX, WORKER_BACKOFF_NS_MIN << min(failures - 1, 16))


class WorkerHandle:
    """Keeps one worker process running. `on_change` is called whenever `report()` would differ.

    `run` is its one task: it ends when `stop` was called and the process is gone, or raises when the first start fails.
    """

    def __init__(
        self,
        launch: WorkerLaunch,
        *,
        on_change: Callable[[], None],
        tenants: TenantBook | None = None,
        command: Sequence[str] = (sys.executable, "-m", WORKER_MODULE),
        pulse_ns: int = WORKER_PULSE_NS,
        pulse_wait_ns: int = WORKER_PULSE_WAIT_NS,
    ) -> None:
        """
        Args:
            pulse_ns, pulse_wait_ns: how often a sign of life is asked for, and how long one may take; after
                WORKER_SILENCES_MAX in a row without any answer the process is killed.
            tenants: Whom it serves, where the launch says that there are any.
        """
        self._launch = launch
        self._command = command
        self._on_change = on_change
        self._state = WorkerState.DOWN
        self._detail = "not started yet"
        self._process: Process | None = None
        self._channel: AdminChannel | None = None
        self._readiness: Readiness | None = None
        self._restarts = 0
        self.has_failed = False  # its first start; nothing more comes
        self._pulse_ns = pulse_ns
        self._pulse_wait_ns = pulse_wait_ns
        self._pulse = Pulse()
        self._tenants = tenants
        self._told_tenants: TenantBook | None = None  # this life of the process
        self._is_draining = False  # as people want it, over all lives of the process
        self._stopping = asyncio.Event()
        self._serving = asyncio.Event()

    @property
    def state(self) -> WorkerState:
        """What it does now."""
        return self._state

    @property
    def readiness(self) -> Readiness | None:
        """What it reported last; kept while it is down, None before it first served."""
        return self._readiness

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return self._restarts

    def report(self) -> WorkerReport:
        """The worker as shown to people."""
        return WorkerReport(
            rail=self._launch.rail,
            pid=self._process.pid if self._process is not None else 0,
            state=self._state,
            data=self._readiness.data if self._readiness else (),
            restarts=self._restarts,
            detail=self._detail,
            sent_bytes_second=self._pulse.sent_bytes_second,
            received_bytes_second=self._pulse.received_bytes_second,
            lookup_keys=self._pulse.lookup_keys,
            lookup_hits=self._pulse.lookup_hits,
        )

    @property
    def data_dirs(self) -> Sequence[str]:
        """The drives it was given."""
        return self._launch.data_dirs

    @property
    def channel(self) -> AdminChannel:
        """For calls to the worker. Raises Unavailable while it does not serve."""
        if self._channel is None or self._state not in (WorkerState.SERVING, WorkerState.DRAINING):
            raise Unavailable(f"worker {self._launch.rail} is {self._state.value}: {self._detail or 'try again later'}")
        return self._channel

    async def wait_serving(self) -> None:
        """Return once it serves for the first time, or has failed to."""
        await self._serving.wait()

    async def set_draining(self, draining: bool) -> None:
        """Refuse puts from now on, or take them again; also after it was started again.

        Raises Unavailable while it does not serve; it is told once it does.
        """
        self._is_draining = draining
        await self.channel.admin("drain", {"resume": not draining}, deadline_ns=CONTROL_DEADLINE_NS)
        self._enter(WorkerState.DRAINING if draining else WorkerState.SERVING, "")

    async def set_tenants(self, book: TenantBook) -> None:
        """Whom it serves from now on; while it does not serve it is told once it does."""
        self._tenants = book
        if self._channel is not None and self._state in (WorkerState.SERVING, WorkerState.DRAINING):
            try:
                await self._tell_tenants(self._channel)
            except KVStoreError as error:
                # it would go on with tokens that were taken back: one that cannot be told is started again
                log.error("worker %d was not told of the tenants (%s), killed", self._launch.rail, error)
                self.kill()

    async def _tell_tenants(self, channel: AdminChannel) -> None:
        while self._tenants is not None and self._told_tenants is not self._tenants:
            book = self._tenants  # it may be changed while the worker is told
            await channel.admin("tenants_set", book.to_plain(), deadline_ns=CONTROL_DEADLINE_NS)
            self._told_tenants = book

    async def run(self) -> None:
        """Start it, and start it again when it dies, until `stop`. Raises KVStoreError when it never served."""
        failures = 0
        while not self._stopping.is_set():
            started_ns = time.monotonic_ns()
            try:
                reason = await self._live()
            except KVStoreError as error:
                if self._readiness is None:
                    self.has_failed = True
                    self._serving.set()
                    self._enter(WorkerState.DOWN, str(error))
                    raise
                reason = str(error)
            if self._stopping.is_set():
                break
            failures = 1 if time.monotonic_ns() - started_ns > WORKER_HEALTHY_NS else failures + 1
            self._enter(WorkerState.DOWN, reason)
            delay_ns = backoff_ns(failures)
            log.error("worker %d: %s; it is started again in %.1f s", self._launch.rail, reason, delay_ns / SECOND_NS)
            await self._pause(delay_ns)
            self._restarts += 1
        self._enter(WorkerState.DOWN, "stopped")

    async def stop(self, *, within_ns: int) -> None:
        """Let calls in progress finish within the time, then end it; returns when the process is gone."""
        self._stopping.set()
        process, channel = self._process, self._channel
        if process is None or process.returncode is not None:
            return
        try:
            if channel is not None and self._state in (WorkerState.SERVING, WorkerState.DRAINING):
                await self._shut_down(channel, within_ns)
            else:
                process.terminate()  # it recovers: nothing is in progress
            async with asyncio.timeout((within_ns + WORKER_STOP_GRACE_NS) / SECOND_NS):
                await process.wait()
        except (KVStoreError, TimeoutError, ProcessLookupError) as error:
            log.warning("worker %d did not end by itself (%s), killed", self._launch.rail, error or "out of time")
            self.kill()
            await process.wait()

    async def _shut_down(self, channel: AdminChannel, within_ns: int) -> None:
        try:
            await channel.admin("shutdown", {"within_ns": within_ns}, deadline_ns=WORKER_STOP_GRACE_NS)
        except KVStoreError:
            # a signal to the whole process group drained it too: it may have closed the socket, and ends by itself
            if not channel.closed:
                raise

    def kill(self) -> None:
        """End it now. What was acknowledged as durable stays."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)

    async def _live(self) -> str:
        """One life of the process, from start to end; returns why it ended."""
        process, channel = await self._spawn()
        self._process, self._channel = process, channel
        self._told_tenants = None
        self._enter(WorkerState.RECOVERING, "reads its drives")
        try:
            await self._until_ready(process, channel)
            log.info(
                "worker %d serves on %s", self._launch.rail, ", ".join(self._readiness.data if self._readiness else ())
            )
            state = await self._drain_again(channel)
            while self._told_tenants is not self._tenants:
                await self._tell_tenants(channel)
                state = await self._drain_again(channel)
            self._serving.set()
            self._enter(state, "")
            is_silent = await self._watch(process, channel)
        finally:
            channel.close()
            self._channel = None
            self._pulse = Pulse()
            if process.returncode is None:
                process.kill()
                await process.wait()
        return f"it gave no sign of life, and {_ending(process)}" if is_silent else _ending(process)

    async def _watch(self, process: Process, channel: AdminChannel) -> bool:
        """Until the process has ended, of itself or because it does not answer any more; True for the latter.

        Each silence runs its whole time on this loop: when the node as a whole was stopped, and goes on, the worker has
        time to answer before enough of them are counted.
        """
        ended = asyncio.create_task(process.wait())
        silences = 0
        try:
            while not (await asyncio.wait((ended,), timeout=self._pulse_ns / SECOND_NS))[0]:
                heard = channel.heard
                try:
                    value = await channel.admin("pulse", {}, deadline_ns=self._pulse_wait_ns)
                    self._pulse = self._pulse.next(value, time.monotonic_ns())
                    silences = 0
                except DeadlineExceeded:
                    silences = silences + 1 if channel.heard == heard else 0
                except KVStoreError:
                    break  # it has closed its socket: it ends
                if silences >= WORKER_SILENCES_MAX and not self._stopping.is_set():
                    silence_s = silences * (self._pulse_ns + self._pulse_wait_ns) // SECOND_NS
                    log.error("worker %d has not answered for %d s, killed", self._launch.rail, silence_s)
                    self.kill()
                    await ended
                    return True
            await ended
        finally:
            ended.cancel()
        return False

    async def _drain_again(self, channel: AdminChannel) -> WorkerState:
        """A new process takes puts: tell it when the one before was drained."""
        told = False
        while told is not self._is_draining:
            told = self._is_draining  # it may be changed while the worker is told
            await channel.admin("drain", {"resume": not told}, deadline_ns=CONTROL_DEADLINE_NS)
        return WorkerState.DRAINING if told else WorkerState.SERVING

    async def _spawn(self) -> tuple[Process, AdminChannel]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            launch = replace(self._launch, admin_fd=theirs.fileno(), data_port=self._port())
            process = await asyncio.create_subprocess_exec(
                *self._command,
                launch.to_argument(),
                stdin=DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        return process, AdminChannel(ours)

    def _port(self) -> int:
        """The port that clients know already, so that they find a restarted worker again."""
        if self._readiness is None:
            return self._launch.data_port
        ports = {int(address.rpartition(":")[2]) for address in self._readiness.data}
        return ports.pop() if len(ports) == 1 else self._launch.data_port

    async def _until_ready(self, process: Process, channel: AdminChannel) -> None:
        try:
            await channel.hello(deadline_ns=WORKER_RECOVERY_NS)  # it may greet only once its drives are recovered
            await self._tell_tenants(channel)
            value = await channel.admin("ready", {}, deadline_ns=WORKER_RECOVERY_NS)
        except (DeadlineExceeded, Unavailable) as error:
            if not channel.closed:
                raise  # the worker's own words
            await _end(process)
            raise Unavailable(f"{_ending(process)} before it was ready; what it logged says why ({error})") from None
        self._readiness = _readiness(value)

    async def _pause(self, delay_ns: int) -> None:
        try:
            async with asyncio.timeout(delay_ns / SECOND_NS):
                await self._stopping.wait()
        except TimeoutError:
            pass

    def _enter(self, state: WorkerState, detail: str) -> None:
        self._state = state
        self._detail = detail
        self._on_change()


async def _end(process: Process) -> None:
    """Wait for a process that has closed its socket, and is about to end by itself."""
    try:
        async with asyncio.timeout(WORKER_STOP_GRACE_NS / SECOND_NS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _ending(process: Process) -> str:
    code = process.returncode
    assert code is not None
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"process {process.pid} {how}"


def _readiness(value: Mapping[str, Plain]) -> Readiness:
    data, boot_id = value.get("data"), value.get("boot_id")
    if not isinstance(data, list) or not all(isinstance(address, str) for address in data) or not data:
        raise Internal(f"the worker reported data addresses {data!r}")
    if not isinstance(boot_id, bytes):
        raise Internal(f"the worker reported boot id {boot_id!r}")
    return Readiness(
        data=tuple(map(str, data)), boot_id=boot_id, targets=tuple(map(_target, maps_of(value, "targets")))
    )


def _target(value: Mapping[str, Plain]) -> OwnedTarget:
    capacity_bytes = value.get("capacity_bytes")
    if not isinstance(capacity_bytes, int):
        raise Internal(f"the worker reported a target of capacity {capacity_bytes!r}")
    return OwnedTarget(id=text_of(value, "id"), path=text_of(value, "path"), capacity_bytes=capacity_bytes)

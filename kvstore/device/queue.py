"""The dispatch queue: the one place of a drive where it is decided which operation goes next.

Operations wait in one FIFO per flow class; at most `depth` are on the drive. Counts, latency and health are kept here,
because every operation of the drive passes by.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from kvstore.device.base import Device, IoKind, IoOp
from kvstore.device.health import DriveHealth, HealthMonitor, Transition
from kvstore.errors import InvalidRequest, Overloaded
from kvstore.limits import QUEUE_DEPTH_DEFAULT, QUEUE_DEPTH_MAX, QUEUED_OPS_MAX
from kvstore.telemetry.metrics import DeviceFault, DeviceMetrics
from kvstore.types.flow import FlowClass

# Bound once: reading a member of an enum costs as much as ten other attribute reads, and each operation needs it.
_READ: Final = IoKind.READ
_WRITE: Final = IoKind.WRITE

FLOWS: Final = tuple(FlowClass)


class DispatchPolicy(Protocol):
    """Decides which class is served next."""

    def pick(self, queues: Sequence[deque[IoOp]]) -> FlowClass:
        """The class whose first operation starts now. `queues` is indexed by FlowClass; at least one is not empty."""


class RoundRobin:
    """Each class with waiting operations gets its weight's worth of turns, then the next class does.

    Args:
        weights: turns per round, indexed by FlowClass, each at least 1.
    """

    def __init__(self, weights: Sequence[int] = (1,) * len(FLOWS)) -> None:
        if len(weights) != len(FLOWS) or min(weights) < 1:
            raise InvalidRequest(f"dispatch weights {weights!r}: give {len(FLOWS)} numbers, each at least 1")
        self._weights = tuple(weights)
        self._current = 0
        self._turns_left = self._weights[0]

    def pick(self, queues: Sequence[deque[IoOp]]) -> FlowClass:
        while not queues[self._current] or self._turns_left == 0:
            self._current = (self._current + 1) % len(FLOWS)
            self._turns_left = self._weights[self._current]
        self._turns_left -= 1
        return FLOWS[self._current]


class DispatchQueue:
    """The queue of one drive, driven by the thread that drives the device.

    `submit` only queues, so that a batch reaches the drive with one call: the loop calls `start` when a batch is
    complete, or `pump` once per turn, before it waits for `fileno()`.

    Args:
        device: the drive; the queue does not own it.
        depth: operations on the drive at one time.
        policy: order between classes.
        metrics: where counts go.
        health: judge of the drive's errors.
    """

    def __init__(
        self,
        device: Device,
        depth: int = QUEUE_DEPTH_DEFAULT,
        *,
        policy: DispatchPolicy | None = None,
        metrics: DeviceMetrics | None = None,
        health: HealthMonitor | None = None,
    ) -> None:
        if not 1 <= depth <= QUEUE_DEPTH_MAX:
            raise InvalidRequest(f"queue depth {depth} is out of range; use 1 to {QUEUE_DEPTH_MAX}")
        self.device = device
        self.depth = depth
        self.policy: DispatchPolicy = policy or RoundRobin()
        self.metrics = metrics or DeviceMetrics()
        self.health = health or HealthMonitor()
        self.in_flight = 0
        self.in_flight_bytes = 0
        self.queued = 0
        self.started_by_flow = [0] * len(FLOWS)
        self.in_flight_by_flow = [0] * len(FLOWS)
        self._queues: list[deque[IoOp]] = [deque() for _ in FLOWS]

    def fileno(self) -> int:
        """The device's descriptor: readable while completions wait."""
        return self.device.fileno()

    def queued_by_flow(self) -> list[int]:
        """Operations that wait, indexed by FlowClass."""
        return [len(queue) for queue in self._queues]

    def submit(self, op: IoOp) -> None:
        """Queue one operation; `start` or `pump` sends it to the drive.

        Raises:
            Overloaded: QUEUED_OPS_MAX operations wait already.
        """
        if self.queued >= QUEUED_OPS_MAX:
            raise Overloaded(f"{self.queued} operations wait for the drive, the limit is {QUEUED_OPS_MAX}; retry later")
        self._queues[op.flow].append(op)
        self.queued += 1

    def start(self, now_ns: int | None = None) -> None:
        """Send waiting operations to the drive as far as the depth allows, in one batch."""
        room = self.depth - self.in_flight
        if room <= 0 or not self.queued:
            return
        if now_ns is None:
            now_ns = time.monotonic_ns()
        batch = self._take_all() if self.queued <= room else self._take(room)
        bytes_started = 0
        started, in_flight = self.started_by_flow, self.in_flight_by_flow
        for op in batch:
            op.submitted_ns = now_ns
            bytes_started += op.length_bytes
            started[op.flow] += 1
            in_flight[op.flow] += 1
        self.in_flight += len(batch)
        self.in_flight_bytes += bytes_started
        self.device.submit(batch)

    def _take_all(self) -> list[IoOp]:
        batch: list[IoOp] = []
        for queue in self._queues:
            if queue:
                batch.extend(queue)
                queue.clear()
        self.queued = 0
        return batch

    def _take(self, count: int) -> list[IoOp]:
        pick, queues = self.policy.pick, self._queues
        self.queued -= count
        return [queues[pick(queues)].popleft() for _ in range(count)]

    def pump(self, now_ns: int | None = None) -> list[IoOp]:
        """Collect completions, start more; returns what completed, with `error` and `done_bytes` set. Never blocks."""
        if now_ns is None:
            now_ns = time.monotonic_ns()
        done = self.device.poll()
        if done:
            self._account(done, now_ns)
        if self.queued:
            self.start(now_ns)
        return done

    def _account(self, done: Sequence[IoOp], now_ns: int) -> None:
        metrics, in_flight = self.metrics, self.in_flight_by_flow
        flow_bytes = metrics.flow_bytes
        bytes_done = 0
        succeeded = False
        for op in done:
            bytes_done += op.length_bytes
            in_flight[op.flow] -= 1
            if op.error is not None:
                self._count_error(op.error, now_ns)
                continue
            succeeded = True
            moved, took_ns = op.done_bytes, now_ns - op.submitted_ns
            flow_bytes[op.flow] += moved
            if op.kind is _READ:
                metrics.reads += 1
                metrics.read_bytes += moved
                metrics.read_ns.observe(took_ns)
            elif op.kind is _WRITE:
                metrics.writes += 1
                metrics.written_bytes += moved
                metrics.write_ns.observe(took_ns)
            else:
                metrics.syncs += 1
                metrics.sync_ns.observe(took_ns)
        self.in_flight -= len(done)
        self.in_flight_bytes -= bytes_done
        if succeeded:
            self._note(self.health.note_success(now_ns))

    def _count_error(self, error: OSError, now_ns: int) -> None:
        if error.errno == errno.ENOSPC:
            kind = DeviceFault.ENOSPC
        else:
            kind = DeviceFault.EIO if error.errno == errno.EIO else DeviceFault.OTHER
        self.metrics.errors[kind] += 1
        self._note(self.health.note_error(error, now_ns))

    def _note(self, transition: Transition | None) -> None:
        if transition is not None:
            self.metrics.healthy = int(transition.after is not DriveHealth.FAILED)

    def drain(self) -> list[IoOp]:
        """Take back everything that waits and was never started, for a shutdown; what is in flight goes on."""
        return self._take_all()

    def update_gauges(self) -> None:
        """Write mode and queue state into the metrics; call before they are sent."""
        metrics, mode = self.metrics, self.device.mode
        metrics.mode, metrics.mode_reason, metrics.direct_io = mode.name, mode.reason, int(mode.direct_io)
        metrics.healthy = int(self.health.health is not DriveHealth.FAILED)
        metrics.queue_depth, metrics.in_flight, metrics.queued = self.depth, self.in_flight, self.queued

"""The dispatch queue: the one place of a drive where it is decided which operation goes next.

Operations wait in one FIFO per flow class; at most `depth` of them, and a bound of bytes, are on the drive. An idle one
gets a little first and more with each completion: the first bytes are then on their way to who asked while the next are
read, even where a drive (or the host of a virtual one) tells of all it was given at once (see `pace`). Counts, latency
and health are kept here, because every operation of the drive passes by.

An urgent write goes past what waits in classes, and past the bound of bytes: it holds commit records, or frees a
segment, and many wait for it. The bound is higher while nobody waits for a read: a drive that is given its next write
only when one has ended stands still in between.

A scattered read is one object here and as many operations as it has extents: where not all of them have room it is cut,
and handed back when its last part has come. It takes one turn of its class, as a long read does.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress
from operator import add
from typing import Final, Protocol

from kvstore.device.base import Device, IoKind, IoOp
from kvstore.device.health import DriveHealth, HealthMonitor, Transition
from kvstore.device.pace import Pace
from kvstore.device.scattered import ScatteredRead
from kvstore.errors import InvalidRequest, Overloaded
from kvstore.limits import (
    DRIVE_QUIET_NS,
    DRIVE_WRITE_BYTES_IN_FLIGHT_MAX,
    DRIVE_WRITE_BYTES_QUIET_MAX,
    QUEUE_DEPTH_DEFAULT,
    QUEUE_DEPTH_MAX,
    QUEUED_OPS_MAX,
)
from kvstore.telemetry.metrics import DeviceFault, DeviceMetrics
from kvstore.types.flow import FlowClass

# Bound once: reading a member of an enum costs as much as ten other attribute reads, and each operation needs it.
_READ: Final = IoKind.READ
_WRITE: Final = IoKind.WRITE
_BACKGROUND: Final = FlowClass.BACKGROUND

FLOWS: Final = tuple(FlowClass)
assert FLOWS[-1] is _BACKGROUND, "the classes before it are those that somebody waits for"


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
        depth: operations on the drive at one time, each extent of a scattered read counted. The bytes of all but the
            last of them stay below what `Pace` says; while no read waits, or is waited for, below
            DRIVE_WRITE_BYTES_IN_FLIGHT_MAX, and below DRIVE_WRITE_BYTES_QUIET_MAX while none has for DRIVE_QUIET_NS.
        policy: order between classes.
        metrics: where counts go.
        health: judge of the drive's errors.
        clock: monotonic ns; the queue reads it itself, as a time from the start of a turn is older than what was
            submitted in that turn.
    """

    def __init__(
        self,
        device: Device,
        depth: int = QUEUE_DEPTH_DEFAULT,
        *,
        policy: DispatchPolicy | None = None,
        metrics: DeviceMetrics | None = None,
        health: HealthMonitor | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if not 1 <= depth <= QUEUE_DEPTH_MAX:
            raise InvalidRequest(f"queue depth {depth} is out of range; use 1 to {QUEUE_DEPTH_MAX}")
        self.device = device
        self.depth = depth
        self.policy: DispatchPolicy = policy or RoundRobin()
        self.metrics = metrics or DeviceMetrics()
        self.health = health or HealthMonitor()
        self._clock = clock
        self.in_flight = 0
        self.in_flight_bytes = 0
        self.queued = 0
        self._waiting_bytes = 0  # of what is not urgent
        self._pace = Pace()
        self._read_ns = -DRIVE_QUIET_NS  # when somebody's read completed last
        self.started_by_flow = [0] * len(FLOWS)
        self.in_flight_by_flow = [0] * len(FLOWS)
        self._queues: list[deque[IoOp]] = [deque() for _ in FLOWS]
        self._foreground = self._queues[:_BACKGROUND]
        self._urgent: deque[IoOp] = deque()  # wait for nothing but depth
        self._reads = 0  # extents that wait, and those on the drive that somebody waits for
        self._is_full = False  # `start` had no room: nothing changes that before an operation is queued or ends
        self._parts: set[ScatteredRead] = set()  # on the drive, of scattered reads that were cut

    def fileno(self) -> int:
        """The device's descriptor: readable while completions wait."""
        return self.device.fileno()

    def queued_by_flow(self) -> list[int]:
        """Operations that wait, indexed by FlowClass."""
        waiting = [sum(_extents_left(op) for op in queue) for queue in self._queues]
        for op in self._urgent:
            waiting[op.flow] += 1
        return waiting

    def submit(self, op: IoOp) -> None:
        """Queue one operation; `start` or `pump` sends it to the drive.

        Raises:
            Overloaded: QUEUED_OPS_MAX operations wait already.
        """
        if self.queued >= QUEUED_OPS_MAX:
            raise Overloaded(f"{self.queued} operations wait for the drive, the limit is {QUEUED_OPS_MAX}; retry later")
        count = op.extent_count
        if op.is_urgent:
            self._urgent.append(op)
        else:
            self._queues[op.flow].append(op)
            self._waiting_bytes += op.length_bytes
            if op.kind is _READ:
                self._reads += count
        self.queued += count
        self._is_full = False

    def start(self) -> None:
        """Send waiting operations to the drive as far as the depth allows, in one batch."""
        if not self.queued or self._is_full:
            return
        room = min(self.depth - self.in_flight, self.queued)
        waiting_bytes = self._waiting_bytes
        now_ns = self._clock()
        if self._reads:
            bytes_max = self._pace.bytes_max(waiting_bytes)
        elif now_ns - self._read_ns < DRIVE_QUIET_NS:
            bytes_max = DRIVE_WRITE_BYTES_IN_FLIGHT_MAX
        else:
            bytes_max = DRIVE_WRITE_BYTES_QUIET_MAX
        bytes_room = bytes_left = bytes_max - self.in_flight_bytes
        is_shared = self._is_shared()
        if is_shared:
            self._pace.shared(now_ns)
        urgent = self._urgent
        if room <= 0 or (bytes_room <= 0 and not urgent):
            # the bound of writes grows with time, and how long ago several classes used the drive is noted in each turn
            self._is_full = self._reads > 0 and not is_shared
            return
        batch: list[IoOp] = []
        started, in_flight = self.started_by_flow, self.in_flight_by_flow
        total = 0
        while urgent and room:
            op = urgent.popleft()
            op.submitted_ns = now_ns
            bytes_left -= op.length_bytes
            started[op.flow] += 1
            in_flight[op.flow] += 1
            batch.append(op)
            room -= 1
            total += 1
        queues = self._queues
        waiting = list(compress(FLOWS, queues))
        pick = self.policy.pick if len(waiting) > 1 else None
        flow = waiting[0] if waiting else _BACKGROUND
        kept_bytes = self._pace.kept_back(waiting_bytes, bytes_left) if self._reads else 0
        while room and bytes_left > 0 and (not kept_bytes or waiting_bytes > kept_bytes):
            if pick is not None:
                flow = pick(queues)
            op = queues[flow][0]
            if op.extent_count == 1:
                queues[flow].popleft()
            else:
                op = self._cut(queues[flow], room, bytes_left)
            op.submitted_ns = now_ns
            bytes_left -= op.length_bytes
            waiting_bytes -= op.length_bytes
            count = op.extent_count
            started[flow] += count
            in_flight[flow] += count
            if flow is _BACKGROUND and op.kind is _READ:
                self._reads -= count
            batch.append(op)
            room -= count
            total += count
        self._waiting_bytes = waiting_bytes
        self.queued -= total
        self.in_flight += total
        self.in_flight_bytes += bytes_room - bytes_left
        self.device.submit(batch)

    def _is_shared(self) -> bool:
        """Whether several flow classes use the drive. Nobody waits for what is read in the background, as a scrub does
        every second: it never makes the drive a shared one."""
        users = list(map(add, map(len, self._foreground), self.in_flight_by_flow))
        return users.count(0) < len(users) - 1

    def _cut(self, queue: deque[IoOp], room: int, bytes_room: int) -> IoOp:
        """Take of the first operation, a scattered read, what fits: all that is left of it, or a part."""
        op = queue[0]
        assert isinstance(op, ScatteredRead)
        count = op.fitting(room, bytes_room)
        if count == op.extent_count:
            queue.popleft()
            return op
        part = op.cut(count)
        self._parts.add(part)
        if op.begun == op.extent_count:
            queue.popleft()
        return part

    def _join(self, done: Sequence[IoOp]) -> list[IoOp]:
        """What completed, with the wholes of parts in their place when the last part has come."""
        joined: list[IoOp] = []
        for op in done:
            if op not in self._parts:
                joined.append(op)
                continue
            assert isinstance(op, ScatteredRead)
            assert op.whole is not None
            self._parts.discard(op)
            if op.whole.join(op):
                joined.append(op.whole)
        return joined

    def pump(self) -> list[IoOp]:
        """Collect completions, start more; returns what completed, with `error` and `done_bytes` set. Never blocks."""
        done = self.device.poll()
        if done:
            self._is_full = False
            now_ns = self._clock()
            self._account(done, now_ns)
            stands = self.queued > 0 and not self.in_flight
            self._pace.answered(stands=stands, now_ns=now_ns)
            if self._parts:
                done = self._join(done)
        if self.queued:
            self.start()
        elif not self.in_flight:
            self._pace.rested()
        return done

    def _account(self, done: Sequence[IoOp], now_ns: int) -> None:
        """Count what completed; operations that went to the drive together and came back together, at once."""
        bytes_done = failed = total = reads = count = moved = 0
        kind, flow, submitted_ns, is_awaited = done[0].kind, done[0].flow, -1, False
        for op in done:
            if op.submitted_ns != submitted_ns or op.flow is not flow or op.kind is not kind:
                if count:
                    self._count_done(kind, flow, count, moved, now_ns - submitted_ns)
                kind, flow, submitted_ns = op.kind, op.flow, op.submitted_ns
                is_awaited = kind is _READ and flow is not _BACKGROUND
                count = moved = 0
            bytes_done += op.length_bytes
            extents = op.extent_count
            total += extents
            if is_awaited:
                reads += extents
            if op.error is not None:
                failed += 1
                self.in_flight_by_flow[flow] -= 1
                self._count_error(op.error, now_ns)
                continue
            if op.faults:
                bad = self._count_faults(op, now_ns)
                failed += bad
                extents -= bad
            count += extents
            moved += op.done_bytes
        if count:
            self._count_done(kind, flow, count, moved, now_ns - submitted_ns)
        if reads:
            self._reads -= reads
            self._read_ns = now_ns
        self.in_flight -= total
        self.in_flight_bytes -= bytes_done
        if failed < total:
            self._note(self.health.note_success(now_ns))

    def _count_faults(self, op: IoOp, now_ns: int) -> int:
        """Count the extents that failed; how many there were."""
        errors = [error for _, error in (op.faults or {}).values() if error is not None]
        self.in_flight_by_flow[op.flow] -= len(errors)
        for error in errors:
            self._count_error(error, now_ns)
        return len(errors)

    def _count_done(self, kind: IoKind, flow: FlowClass, count: int, moved_bytes: int, took_ns: int) -> None:
        metrics = self.metrics
        self.in_flight_by_flow[flow] -= count
        metrics.flow_bytes[flow] += moved_bytes
        if kind is _READ:
            metrics.reads += count
            metrics.read_bytes += moved_bytes
            metrics.read_ns.observe(took_ns, count)
        elif kind is _WRITE:
            metrics.writes += count
            metrics.written_bytes += moved_bytes
            metrics.write_ns.observe(took_ns, count)
        else:
            metrics.syncs += count
            metrics.sync_ns.observe(took_ns, count)

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
        self._is_full = False
        batch = list(self._urgent)
        self._urgent.clear()
        for queue in self._queues:
            begun = [op for op in queue if _extents_left(op) < op.extent_count]  # goes on as well
            batch.extend(op for op in queue if op not in begun)
            self._reads -= sum(op.extent_count for op in queue if op.kind is _READ and op not in begun)
            queue.clear()
            queue.extend(begun)
        self.queued = sum(self.queued_by_flow())
        self._waiting_bytes = sum(_bytes_left(op) for queue in self._queues for op in queue)
        return batch

    def update_gauges(self) -> None:
        """Write mode and queue state into the metrics; call before they are sent."""
        metrics, mode = self.metrics, self.device.mode
        metrics.mode, metrics.mode_reason, metrics.direct_io = mode.name, mode.reason, int(mode.direct_io)
        metrics.healthy = int(self.health.health is not DriveHealth.FAILED)
        metrics.queue_depth, metrics.in_flight, metrics.queued = self.depth, self.in_flight, self.queued


def _extents_left(op: IoOp) -> int:
    """Operations of the drive that have not been started."""
    return op.extent_count - (op.begun if isinstance(op, ScatteredRead) else 0)


def _bytes_left(op: IoOp) -> int:
    """Bytes that are on no drive yet."""
    return op.length_bytes - (op.begun_bytes if isinstance(op, ScatteredRead) else 0)

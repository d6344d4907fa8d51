"""The dispatch queue over a memory drive whose completions the test holds back."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import limits
from kvstore.device import pace
from kvstore.device import queue as dispatch
from kvstore.device.base import IoKind, IoOp, UrgentRead, UrgentWrite
from kvstore.device.health import DriveHealth, HealthMonitor
from kvstore.device.memory import MemoryDevice
from kvstore.device.queue import FLOWS, DispatchQueue, RoundRobin
from kvstore.device.scattered import ScatteredRead
from kvstore.errors import InvalidRequest, Overloaded
from kvstore.telemetry.metrics import DeviceFault
from kvstore.testing.device_suite import MIB, PAGE, aligned, write
from kvstore.testing.faulty_device import Fault, FaultAction, FaultyDevice
from kvstore.types.flow import FlowClass


@pytest.fixture
def drive() -> Iterator[FaultyDevice]:
    device = FaultyDevice(MemoryDevice(size_bytes=MIB))
    yield device
    device.close()


def reads(count: int, flow: FlowClass = FlowClass.BACKGROUND) -> list[IoOp]:
    return [IoOp(IoKind.READ, index * PAGE, [aligned(PAGE)], flow=flow, owner=index) for index in range(count)]


def test_the_depth_is_a_cap_and_order_is_kept(drive: FaultyDevice) -> None:
    queue = DispatchQueue(drive, 3)
    drive.hold()
    for op in reads(10):
        queue.submit(op)
    assert (queue.queued, queue.in_flight, drive.held) == (10, 0, 0)
    queue.start()
    assert (queue.queued, queue.in_flight, queue.in_flight_bytes, drive.held) == (7, 3, 3 * PAGE, 3)
    drive.release(2)
    assert [op.owner for op in queue.pump()] == [0, 1]
    assert (queue.queued, queue.in_flight) == (5, 3)
    drive.release()
    seen = []
    while queue.in_flight:
        seen += [op.owner for op in queue.pump()]
    assert seen == list(range(2, 10))
    assert (queue.queued, queue.in_flight, queue.in_flight_bytes) == (0, 0, 0)
    assert queue.started_by_flow[FlowClass.BACKGROUND] == 10
    assert queue.in_flight_by_flow == [0] * len(FLOWS)


def test_an_idle_drive_gets_little_first_and_more_with_each_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "DRIVE_BYTES_AT_FIRST", 2 * PAGE)
    monkeypatch.setattr(pace, "DRIVE_BYTES_IN_FLIGHT_MAX", 5 * PAGE)
    device = FaultyDevice(MemoryDevice(size_bytes=MIB))
    queue = DispatchQueue(device, 100)
    device.hold()
    for op in reads(8):
        queue.submit(op)
    queue.start()
    assert queue.in_flight == 2
    for op in reads(12):
        queue.submit(op)
    device.release(2)
    queue.pump()
    assert queue.in_flight == 4
    device.release(1)
    queue.pump()
    assert queue.in_flight == 5, "the bound"
    device.release()
    while queue.queued or queue.in_flight:
        queue.pump()
    device.hold()
    for op in reads(8):
        queue.submit(op)
    queue.start()
    assert queue.in_flight == 2, "it was idle"
    device.release()
    while queue.queued or queue.in_flight:
        queue.pump()
    device.close()


def test_an_operation_above_the_bound_of_bytes_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "DRIVE_BYTES_AT_FIRST", PAGE)
    monkeypatch.setattr(pace, "DRIVE_BYTES_IN_FLIGHT_MAX", PAGE)
    monkeypatch.setattr(pace, "DRIVE_BYTES_IN_GROUPS_MAX", PAGE)
    device = FaultyDevice(MemoryDevice(size_bytes=MIB))
    queue = DispatchQueue(device, 100)
    device.hold()
    for at in range(3):
        queue.submit(IoOp(IoKind.READ, at * 8 * PAGE, [aligned(8 * PAGE)], owner=at))
    for at in range(3):
        queue.start()
        assert queue.in_flight == 1
        device.release(1)
        assert [op.owner for op in queue.pump()] == [at]
    assert queue.in_flight_bytes == 0
    device.close()


def test_an_urgent_write_goes_past_others_and_the_bound_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "DRIVE_WRITE_BYTES_QUIET_MAX", PAGE)
    device = FaultyDevice(MemoryDevice(size_bytes=MIB))
    queue = DispatchQueue(device, 3)
    device.hold()
    for at in range(4):
        queue.submit(IoOp(IoKind.WRITE, at * 8 * PAGE, [aligned(8 * PAGE)], flow=FlowClass.WRITEBACK, owner=at))
    queue.start()
    assert queue.in_flight == 1
    for at in range(4, 8):
        queue.submit(UrgentWrite(at * 8 * PAGE, [aligned(PAGE)], flow=FlowClass.WRITEBACK, owner=at))
    queue.start()
    assert (queue.in_flight, queue.in_flight_bytes, queue.queued) == (3, 10 * PAGE, 5)
    assert queue.queued_by_flow()[FlowClass.WRITEBACK] == 5
    device.release()
    ends: list[int] = []
    while queue.queued or queue.in_flight:
        ends += [op.owner for op in queue.pump()]
    assert ends == [0, 4, 5, 6, 7, 1, 2, 3]
    assert (queue.in_flight_bytes, queue.in_flight_by_flow) == (0, [0] * len(FLOWS))
    queue.submit(UrgentWrite(0, [aligned(PAGE)], flow=FlowClass.BACKGROUND, owner=8))
    assert [op.owner for op in queue.drain()] == [8]
    device.close()


def test_a_flood_of_short_records_takes_turns_with_reads(drive: FaultyDevice) -> None:
    """They are as short as a block of the log, which does go first."""
    queue = DispatchQueue(drive, 4)
    for at in range(40):
        queue.submit(IoOp(IoKind.WRITE, at * PAGE, [aligned(PAGE)], flow=FlowClass.WRITEBACK, owner="record"))
    for at in range(4):
        queue.submit(IoOp(IoKind.READ, at * PAGE, [aligned(PAGE)], flow=FlowClass.DECODE_READ, owner="read"))
    queue.submit(UrgentWrite(100 * PAGE, [aligned(PAGE)], flow=FlowClass.WRITEBACK, owner="log"))
    order: list[str] = []
    while queue.queued or queue.in_flight:
        order += [op.owner for op in queue.pump()]
    assert order[:9] == ["log"] + ["read", "record"] * 4
    assert order[9:] == ["record"] * 36


@pytest.mark.parametrize("flow", [FlowClass.DECODE_READ, FlowClass.BACKGROUND])
def test_more_bytes_of_writes_are_on_the_drive_while_no_read_waits(
    flow: FlowClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "DRIVE_BYTES_AT_FIRST", PAGE)
    monkeypatch.setattr(pace, "DRIVE_BYTES_IN_FLIGHT_MAX", PAGE)
    monkeypatch.setattr(pace, "DRIVE_BYTES_IN_GROUPS_MAX", PAGE)
    monkeypatch.setattr(dispatch, "DRIVE_WRITE_BYTES_QUIET_MAX", 3 * PAGE)
    monkeypatch.setattr(dispatch, "DRIVE_WRITE_BYTES_IN_FLIGHT_MAX", 3 * PAGE)
    device = FaultyDevice(MemoryDevice(size_bytes=MIB))
    queue = DispatchQueue(device, 100)
    device.hold()
    for at in range(9):
        queue.submit(IoOp(IoKind.WRITE, at * PAGE, [aligned(PAGE)], flow=FlowClass.WRITEBACK))
    queue.start()
    assert queue.in_flight == 3
    queue.submit(reads(1, flow)[0])
    device.release(2)
    queue.pump()
    assert (queue.in_flight, queue.queued) == (1, 7), "a read waits"
    while not queue.in_flight_by_flow[flow]:
        device.release(1)
        queue.pump()
    assert queue.in_flight == 1
    queue.start()
    assert queue.in_flight == (1 if flow is FlowClass.DECODE_READ else 3), "nobody waits for one of the background"
    device.release()
    while queue.queued or queue.in_flight:
        queue.pump()
    assert queue.in_flight_bytes == 0
    device.close()


def test_still_more_while_nobody_has_read_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "DRIVE_WRITE_BYTES_IN_FLIGHT_MAX", 2 * PAGE)
    monkeypatch.setattr(dispatch, "DRIVE_WRITE_BYTES_QUIET_MAX", 5 * PAGE)
    device = FaultyDevice(MemoryDevice(size_bytes=MIB))
    now_ns = limits.DRIVE_QUIET_NS
    queue = DispatchQueue(device, 100, clock=lambda: now_ns)

    def flood(count: int) -> int:
        """How many of so many writes are on the drive together at first."""
        device.hold()
        for at in range(count):
            queue.submit(IoOp(IoKind.WRITE, at * PAGE, [aligned(PAGE)], flow=FlowClass.WRITEBACK))
        queue.start()
        found = queue.in_flight
        device.release()
        while queue.queued or queue.in_flight:
            queue.pump()
        return found

    def read(flow: FlowClass) -> None:
        queue.submit(reads(1, flow)[0])
        while queue.queued or queue.in_flight:
            queue.pump()

    assert flood(9) == 5, "nobody has read yet"
    read(FlowClass.BACKGROUND)
    assert flood(9) == 5, "nobody waits for one of the background"
    read(FlowClass.PREFILL_READ)
    now_ns += limits.DRIVE_QUIET_NS - 1
    assert flood(9) == 2
    now_ns += 1
    assert flood(9) == 5
    device.close()


def test_writes_that_had_no_room_go_when_nobody_has_read_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "DRIVE_WRITE_BYTES_IN_FLIGHT_MAX", 2 * PAGE)
    monkeypatch.setattr(dispatch, "DRIVE_WRITE_BYTES_QUIET_MAX", 5 * PAGE)
    device = FaultyDevice(MemoryDevice(size_bytes=MIB))
    now_ns = limits.DRIVE_QUIET_NS
    queue = DispatchQueue(device, 100, clock=lambda: now_ns)
    queue.submit(reads(1, FlowClass.DECODE_READ)[0])
    while queue.queued or queue.in_flight:
        queue.pump()
    device.hold()
    for at in range(9):
        queue.submit(IoOp(IoKind.WRITE, at * PAGE, [aligned(PAGE)], flow=FlowClass.WRITEBACK))
    for wait_ns, found in ((0, 2), (limits.DRIVE_QUIET_NS - 1, 2), (1, 5)):
        now_ns += wait_ns
        queue.start()
        assert queue.in_flight == found, "nothing was queued and nothing ended"
    device.release()
    device.close()


def test_a_victims_index_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "DRIVE_WRITE_BYTES_QUIET_MAX", 2 * PAGE)
    device = FaultyDevice(MemoryDevice(size_bytes=MIB))
    queue = DispatchQueue(device, 100)
    device.hold()
    for at in range(4):
        queue.submit(IoOp(IoKind.WRITE, at * PAGE, [aligned(PAGE)], flow=FlowClass.WRITEBACK, owner=at))
    queue.start()
    queue.submit(UrgentRead(8 * PAGE, [aligned(PAGE)]))
    queue.start()
    assert queue.in_flight == 3
    device.release(2)
    assert [op.owner for op in queue.pump()] == [0, 1]
    assert queue.in_flight == 2, "writes go on as if there were no read"
    device.release()
    while queue.queued or queue.in_flight:
        queue.pump()
    assert (queue.in_flight_bytes, queue.in_flight_by_flow) == (0, [0] * len(FLOWS))
    device.close()


def test_what_comes_back_together_is_counted_one_by_one(drive: FaultyDevice) -> None:
    queue = DispatchQueue(drive, 100)
    mixed = reads(3) + reads(2, FlowClass.DECODE_READ)
    mixed.insert(2, IoOp(IoKind.WRITE, 0, [aligned(PAGE)]))
    mixed.insert(4, IoOp(IoKind.SYNC, 0, []))
    drive.inject(Fault(action=FaultAction.ERROR, kind=IoKind.READ, skip=1, times=1, errno_code=errno.EIO))
    for op in mixed:
        queue.submit(op)
    while queue.queued or queue.in_flight:
        queue.pump()
    metrics = queue.metrics
    assert (metrics.reads, metrics.writes, metrics.syncs) == (4, 1, 1)
    assert (metrics.read_bytes, metrics.written_bytes) == (4 * PAGE, PAGE)
    assert sum(metrics.read_ns.counts) == 4
    assert metrics.errors[DeviceFault.EIO] == 1
    assert sum(metrics.flow_bytes) == 5 * PAGE
    assert queue.in_flight_by_flow == [0] * len(FLOWS)
    assert queue.in_flight_bytes == 0


def scattered(
    extents: list[tuple[int, int]], flow: FlowClass = FlowClass.DECODE_READ, owner: object = None
) -> ScatteredRead:
    """Extents given as (page, pages)."""
    memory = aligned(sum(pages for _, pages in extents) * PAGE)
    offsets, lengths = [page * PAGE for page, _ in extents], [pages * PAGE for _, pages in extents]
    return ScatteredRead(offsets, lengths, memory, flow=flow, owner=owner)


def test_a_scattered_read_counts_as_its_extents(drive: FaultyDevice) -> None:
    queue = DispatchQueue(drive, 100)
    drive.inject(Fault(action=FaultAction.ERROR, kind=IoKind.READ, start=PAGE, end=2 * PAGE, errno_code=errno.EIO))
    drive.hold()
    op = scattered([(0, 1), (1, 1), (4, 3)])
    queue.submit(op)
    queue.submit(reads(1)[0])
    assert (queue.queued, queue.queued_by_flow()[FlowClass.DECODE_READ]) == (4, 3)
    queue.start()
    assert (queue.queued, queue.in_flight, queue.in_flight_bytes) == (0, 4, 6 * PAGE)
    assert queue.started_by_flow[FlowClass.DECODE_READ] == 3
    drive.release()
    done = queue.pump()
    assert len(done) == 2
    assert op in done
    assert op.faults is not None
    assert list(op.faults) == [1]
    metrics = queue.metrics
    assert (metrics.reads, metrics.read_bytes, metrics.errors[DeviceFault.EIO]) == (3, 5 * PAGE, 1)
    assert sum(metrics.read_ns.counts) == 3
    assert queue.in_flight_by_flow == [0] * len(FLOWS)
    assert (queue.in_flight, queue.in_flight_bytes) == (0, 0)


def test_a_scattered_read_without_room_is_cut(drive: FaultyDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "DRIVE_BYTES_AT_FIRST", 3 * PAGE)
    monkeypatch.setattr(pace, "DRIVE_BYTES_IN_FLIGHT_MAX", 100 * PAGE)
    queue = DispatchQueue(drive, 4)
    drive.inject(Fault(action=FaultAction.ERROR, kind=IoKind.READ, start=30 * PAGE, end=31 * PAGE))
    drive.hold()
    op = scattered([(0, 2), (10, 2), (20, 1), (30, 1), (40, 1), (50, 1), (60, 1)], owner="mine")
    queue.submit(op)
    queue.start()
    assert (queue.in_flight, queue.in_flight_bytes, queue.queued) == (2, 4 * PAGE, 5), "the bound of bytes"
    assert queue.drain() == []
    assert queue.queued == 5
    drive.release(1)
    assert queue.pump() == []
    assert (queue.in_flight, queue.queued) == (4, 1), "the depth"
    drive.release()
    done = []
    while queue.in_flight or queue.queued:
        done += queue.pump()
    assert done == [op]
    assert op.faults is not None
    assert list(op.faults) == [3]
    assert op.done_bytes == 8 * PAGE
    assert op.submitted_ns > 0
    queue.submit(op)  # it may be used again
    queue.start()
    while queue.in_flight or queue.queued:
        done += queue.pump()
    assert (done, op.faults, op.done_bytes) == ([op, op], None, 9 * PAGE)


@given(
    groups=st.lists(
        st.lists(st.tuples(st.integers(0, 200), st.integers(1, 4)), min_size=1, max_size=12), min_size=1, max_size=8
    ),
    singles=st.integers(0, 6),
    depth=st.integers(1, 10),
    shuffle=st.booleans(),
)
def test_scattered_reads_come_back_once_and_right(
    groups: list[list[tuple[int, int]]], singles: int, depth: int, shuffle: bool
) -> None:
    inner = MemoryDevice(size_bytes=MIB)
    data = b"".join(page.to_bytes(4, "little") * (PAGE // 4) for page in range(MIB // PAGE))
    write(inner, 0, memoryview(data))
    device = FaultyDevice(inner, seed=1, shuffle=shuffle)
    queue = DispatchQueue(device, depth)
    ops: list[IoOp] = [scattered(extents) for extents in groups]
    ops += reads(singles, FlowClass.WRITEBACK)
    for op in ops:
        queue.submit(op)
    done: list[IoOp] = []
    while queue.queued or queue.in_flight:
        done += queue.pump()
        assert queue.in_flight <= depth
        assert sum(op.extent_count for op, _ in device._due) == queue.in_flight
    assert sorted(map(id, done)) == sorted(map(id, ops))
    for op, extents in zip(ops, groups, strict=False):
        assert op.buffers[0] == b"".join(data[page * PAGE : (page + pages) * PAGE] for page, pages in extents)
        assert op.done_bytes == op.length_bytes
    assert queue.in_flight_by_flow == [0] * len(FLOWS)
    assert (queue.in_flight, queue.in_flight_bytes, queue.queued) == (0, 0, 0)
    device.close()


class AskingQueue(DispatchQueue):
    """Looks for room whenever it is asked to start something."""

    def start(self) -> None:
        self._is_full = False
        super().start()


@given(
    script=st.lists(
        st.tuples(
            st.sampled_from(["read", "write", "urgent", "scattered", "start", "pump", "drain"]),
            st.integers(0, 4),
            st.integers(1, 5),
        ),
        min_size=40,
        max_size=80,
    ),
    flows=st.sampled_from([FLOWS[:1], (FlowClass.DECODE_READ, FlowClass.BACKGROUND), FLOWS]),
    step_ns=st.sampled_from([limits.MS_NS, limits.SECOND_NS // 3, 4 * limits.SECOND_NS]),
    depth=st.integers(1, 8),
)
def test_a_full_drive_is_asked_again_when_that_can_matter(
    script: list[tuple[str, int, int]], flows: tuple[FlowClass, ...], step_ns: int, depth: int
) -> None:
    """What goes to the drive, and when, is as if each `start` looked for room."""
    told: list[list[object]] = []
    for kind_of_queue in (DispatchQueue, AskingQueue):
        device = FaultyDevice(MemoryDevice(size_bytes=MIB), seed=1)
        device.hold()
        now = [limits.SECOND_NS]
        queue = kind_of_queue(device, depth, clock=lambda now=now: now[0])
        seen: list[object] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pace, "DRIVE_BYTES_AT_FIRST", PAGE)
            patch.setattr(pace, "DRIVE_BYTES_IN_FLIGHT_MAX", 6 * PAGE)
            patch.setattr(pace, "DRIVE_BYTES_IN_GROUPS_MAX", 12 * PAGE)
            patch.setattr(pace, "DRIVE_LAST_GROUP_BYTES", 3 * PAGE)
            patch.setattr(dispatch, "DRIVE_WRITE_BYTES_IN_FLIGHT_MAX", 8 * PAGE)
            patch.setattr(dispatch, "DRIVE_WRITE_BYTES_QUIET_MAX", 16 * PAGE)
            for number, (step, which, pages) in enumerate(script):
                now[0] += step_ns
                flow = flows[which % len(flows)]
                if step == "start":
                    for _ in range(pages):
                        queue.start()
                        now[0] += step_ns
                elif step == "pump":
                    device.release(pages)
                    seen.append([op.owner for op in queue.pump()])
                elif step == "drain":
                    seen.append([op.owner for op in queue.drain()])
                elif step == "scattered":
                    queue.submit(scattered([(at, 1) for at in range(pages)], flow, number))
                elif step == "urgent":
                    queue.submit(UrgentWrite(0, [aligned(PAGE)], flow=flow, owner=number))
                else:
                    queue.submit(IoOp(IoKind(step), 0, [aligned(pages * PAGE)], flow=flow, owner=number))
                seen.append((queue.in_flight, queue.in_flight_bytes, queue.queued, vars(queue._pace).copy()))
        told.append(seen)
        device.close()
    assert told[0] == told[1]


def test_classes_take_turns(drive: FaultyDevice) -> None:
    queue = DispatchQueue(drive, 1)
    for flow in (FlowClass.BACKGROUND, FlowClass.DECODE_READ, FlowClass.WRITEBACK):
        for op in reads(3, flow):
            queue.submit(op)
    assert queue.queued_by_flow() == [3, 0, 0, 3, 3]
    order: list[FlowClass] = []
    while queue.queued or queue.in_flight:
        order += [op.flow for op in queue.pump()]
    assert order == [FlowClass.DECODE_READ, FlowClass.WRITEBACK, FlowClass.BACKGROUND] * 3


def test_weights_are_turns_per_round(drive: FaultyDevice) -> None:
    queue = DispatchQueue(drive, 1, policy=RoundRobin((3, 1, 1, 1, 1)))
    for flow in (FlowClass.BACKGROUND, FlowClass.DECODE_READ):
        for op in reads(4, flow):
            queue.submit(op)
    order: list[FlowClass] = []
    while queue.queued or queue.in_flight:
        order += [op.flow for op in queue.pump()]
    decode, background = FlowClass.DECODE_READ, FlowClass.BACKGROUND
    assert order == [decode, decode, decode, background, decode, background, background, background]


@given(counts=st.lists(st.integers(0, 6), min_size=5, max_size=5), depth=st.integers(1, 8))
def test_everything_comes_back_once_and_in_order_of_its_class(counts: list[int], depth: int) -> None:
    device = FaultyDevice(MemoryDevice(size_bytes=MIB))
    queue = DispatchQueue(device, depth)
    for flow, count in zip(FLOWS, counts, strict=True):
        for op in reads(count, flow):
            queue.submit(op)
    seen: list[list[int]] = [[] for _ in FLOWS]
    while queue.queued or queue.in_flight:
        for op in queue.pump():
            seen[op.flow].append(op.owner)
        assert queue.in_flight <= depth
    assert seen == [list(range(count)) for count in counts]
    device.close()


def test_counts_and_latency(drive: FaultyDevice) -> None:
    times = iter([1000, 5000])
    queue = DispatchQueue(drive, 4, clock=lambda: next(times))
    queue.submit(IoOp(IoKind.WRITE, 0, [aligned(PAGE)], flow=FlowClass.WRITEBACK))
    queue.submit(IoOp(IoKind.READ, 0, [aligned(2 * PAGE)], flow=FlowClass.DECODE_READ))
    queue.submit(IoOp(IoKind.SYNC, 0, []))
    queue.start()
    assert len(queue.pump()) == 3
    metrics = queue.metrics
    assert (metrics.reads, metrics.writes, metrics.syncs) == (1, 1, 1)
    assert (metrics.read_bytes, metrics.written_bytes) == (2 * PAGE, PAGE)
    assert metrics.flow_bytes == [2 * PAGE, 0, 0, PAGE, 0]
    assert metrics.read_ns.total_ns == metrics.write_ns.total_ns == metrics.sync_ns.total_ns == 4000
    queue.update_gauges()
    assert (metrics.mode, metrics.healthy, metrics.queue_depth) == ("memory", 1, 4)


def test_errors_are_counted_and_fail_the_drive(drive: FaultyDevice) -> None:
    queue = DispatchQueue(drive, 8, health=HealthMonitor(failed_after=3))
    drive.inject(Fault(action=FaultAction.ERROR, errno_code=errno.ENOSPC))
    drive.inject(Fault(action=FaultAction.ERROR, times=3))
    for op in reads(4):
        queue.submit(op)
    queue.start()
    done = queue.pump()
    assert all(op.error is not None for op in done)
    assert queue.metrics.errors[DeviceFault.ENOSPC] == 1
    assert queue.metrics.errors[DeviceFault.EIO] == 3
    assert queue.health.health is DriveHealth.FAILED
    assert queue.metrics.healthy == 0
    queue.submit(reads(1)[0])
    queue.start()
    queue.pump()
    assert queue.metrics.healthy == 1  # a trial went well: suspect, and served


def test_the_queue_is_bounded(drive: FaultyDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.device.queue.QUEUED_OPS_MAX", 3)
    queue = DispatchQueue(drive, 1)
    for op in reads(3):
        queue.submit(op)
    with pytest.raises(Overloaded, match="the limit is 3"):
        queue.submit(reads(1)[0])
    assert [op.owner for op in queue.drain()] == [0, 1, 2]
    assert queue.queued == 0


@pytest.mark.parametrize("depth", [0, -1, limits.QUEUE_DEPTH_MAX + 1])
def test_an_impossible_depth(drive: FaultyDevice, depth: int) -> None:
    with pytest.raises(InvalidRequest, match="out of range"):
        DispatchQueue(drive, depth)


@pytest.mark.parametrize("weights", [(1, 1), (0, 1, 1, 1, 1)])
def test_impossible_weights(weights: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="weights"):
        RoundRobin(weights)

"""How many bytes a drive is given at one time."""

from __future__ import annotations

from kvstore.device.base import IoKind, IoOp
from kvstore.device.memory import MemoryDevice
from kvstore.device.pace import Pace
from kvstore.device.queue import DispatchQueue
from kvstore.limits import (
    DRIVE_ALONE_NS,
    DRIVE_BYTES_AT_FIRST,
    DRIVE_BYTES_IN_FLIGHT_MAX,
    DRIVE_BYTES_IN_GROUPS_MAX,
    DRIVE_LAST_GROUP_BYTES,
    SECOND_NS,
    MiB,
)
from kvstore.testing.device_suite import aligned
from kvstore.testing.faulty_device import FaultyDevice
from kvstore.types.flow import FlowClass


def risen() -> Pace:
    """Of a drive that stood still again and again."""
    pace = Pace()
    pace.bytes_max(64 * MiB)
    for _ in range(8):
        pace.answered(stands=True, now_ns=0)
    assert pace.bytes_max(0) == DRIVE_BYTES_IN_GROUPS_MAX
    return pace


def test_an_idle_drive_gets_a_quarter_of_what_waits() -> None:
    for waiting, first in (
        (4096, DRIVE_BYTES_AT_FIRST),
        (2 * DRIVE_BYTES_AT_FIRST, DRIVE_BYTES_AT_FIRST),
        (12 * MiB, 3 * MiB),
        (1 << 40, DRIVE_BYTES_IN_FLIGHT_MAX),
    ):
        pace = Pace()
        assert pace.bytes_max(waiting) == first
        assert pace.bytes_max(1 << 40) == first, "it is not idle any more"
        pace.rested()
        assert pace.bytes_max(4096) == DRIVE_BYTES_AT_FIRST


def test_a_drive_that_answers_one_by_one_gets_no_more_than_others_can_wait_for() -> None:
    pace = Pace()
    pace.bytes_max(4096)
    for _ in range(8):
        pace.answered(stands=False, now_ns=0)
    assert pace.bytes_max(64 * MiB) == DRIVE_BYTES_IN_FLIGHT_MAX
    assert pace.kept_back(MiB, MiB) == 0


def test_a_drive_that_stands_still_gets_more_until_it_answers_otherwise() -> None:
    pace = risen()
    pace.answered(stands=False, now_ns=0)
    assert pace.bytes_max(0) == DRIVE_BYTES_IN_FLIGHT_MAX


def test_a_drive_that_classes_share_gets_no_more() -> None:
    pace = risen()
    pace.shared(5)
    pace.answered(stands=True, now_ns=5 + DRIVE_ALONE_NS - 1)
    assert pace.bytes_max(0) == DRIVE_BYTES_IN_FLIGHT_MAX
    pace.answered(stands=True, now_ns=5 + DRIVE_ALONE_NS)
    assert pace.bytes_max(0) == DRIVE_BYTES_IN_GROUPS_MAX


def test_who_comes_every_few_seconds_waits_behind_no_more() -> None:
    pace = risen()
    for seconds in range(0, 60, 5):
        pace.shared(seconds * SECOND_NS)
        pace.answered(stands=True, now_ns=(seconds + 5) * SECOND_NS - 1)
        assert pace.bytes_max(0) == DRIVE_BYTES_IN_FLIGHT_MAX


def test_a_quarter_of_the_last_is_kept_back_where_a_drive_answers_in_groups() -> None:
    pace = risen()
    assert pace.kept_back(4 * MiB, 4 * MiB - 1) == 0, "it is not the last"
    assert pace.kept_back(DRIVE_LAST_GROUP_BYTES, 8 * MiB) == 0, "that is little enough"
    assert pace.kept_back(4 * MiB, 4 * MiB) == MiB
    assert pace.kept_back(MiB, 8 * MiB) == MiB, "until something has ended"
    pace.answered(stands=True, now_ns=0)
    assert pace.kept_back(MiB, 8 * MiB) == 0


def test_the_queue_gives_more_to_a_drive_that_tells_of_all_at_once() -> None:
    device = FaultyDevice(MemoryDevice(size_bytes=32 * MiB))
    queue = DispatchQueue(device, 100)
    device.hold()
    for at in range(26):
        queue.submit(IoOp(IoKind.READ, at * MiB, [aligned(MiB)], flow=FlowClass.DECODE_READ))
    queue.start()
    groups = [queue.in_flight]
    while queue.in_flight:
        device.release(queue.in_flight)
        queue.pump()
        groups.append(queue.in_flight)
    assert groups == [4, 8, 8, 5, 1, 0]
    assert queue.in_flight_bytes == 0
    device.close()


def test_what_nobody_waits_for_does_not_make_the_groups_smaller() -> None:
    """A scrub reads every second, and others are thought of for longer than that."""
    device = FaultyDevice(MemoryDevice(size_bytes=64 * MiB))
    queue = DispatchQueue(device, 100)
    device.hold()
    for at in range(40):
        queue.submit(IoOp(IoKind.READ, at * MiB, [aligned(MiB)], flow=FlowClass.DECODE_READ))
    queue.submit(IoOp(IoKind.READ, 0, [aligned(MiB)], flow=FlowClass.BACKGROUND))
    queue.start()
    groups = [queue.in_flight]
    while queue.in_flight:
        device.release(queue.in_flight)
        queue.pump()
        groups.append(queue.in_flight)
    assert max(groups) == DRIVE_BYTES_IN_GROUPS_MAX // MiB
    device.close()


def test_the_queue_gives_no_more_while_another_class_waits() -> None:
    device = FaultyDevice(MemoryDevice(size_bytes=32 * MiB))
    queue = DispatchQueue(device, 100)
    device.hold()
    for at in range(26):
        flow = FlowClass.DECODE_READ if at % 2 else FlowClass.PREFETCH
        queue.submit(IoOp(IoKind.READ, at * MiB, [aligned(MiB)], flow=flow))
    queue.start()
    while queue.in_flight:
        assert queue.in_flight <= 4
        device.release(queue.in_flight)
        queue.pump()
    device.close()


def test_who_waits_alone_behind_what_another_class_has_on_the_drive_shares_it() -> None:
    device = FaultyDevice(MemoryDevice(size_bytes=64 * MiB))
    queue = DispatchQueue(device, 100, clock=lambda: DRIVE_ALONE_NS)

    def flood(count: int) -> None:
        for at in range(count):
            queue.submit(IoOp(IoKind.READ, at * MiB, [aligned(MiB)], flow=FlowClass.PREFILL_READ))
        queue.start()

    device.hold()
    flood(20)
    while queue.queued:
        device.release(queue.in_flight)
        queue.pump()
    queue.submit(IoOp(IoKind.READ, 0, [aligned(4096)], flow=FlowClass.DECODE_READ))
    queue.start()
    flood(30)
    while queue.queued:
        device.release(queue.in_flight)
        queue.pump()
        assert queue.in_flight <= 4, "another read of the class may come at any time"
    device.close()


def test_operations_of_no_bytes_are_not_kept_back() -> None:
    queue = DispatchQueue(MemoryDevice(size_bytes=MiB), 8)
    queue.submit(IoOp(IoKind.READ, 0, [aligned(4096)]))
    queue.submit(IoOp(IoKind.SYNC, 0, []))
    queue.start()
    assert len(queue.pump()) == 2

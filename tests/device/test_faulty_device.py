"""The faults are the ones they claim to be: a fault that does nothing would make every other test worthless."""

from __future__ import annotations

import errno
import select
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.device.base import IoKind, IoOp
from kvstore.device.memory import MemoryDevice
from kvstore.device.scattered import ScatteredRead
from kvstore.errors import Closed
from kvstore.testing.device_suite import MIB, PAGE, aligned, finish, random_bytes, read, run, sync, write
from kvstore.testing.faulty_device import Fault, FaultAction, FaultyDevice, Survival

OLD, NEW = b"\x11" * (2 * PAGE), b"\x22" * (2 * PAGE)


@pytest.fixture
def drive() -> Iterator[FaultyDevice]:
    device = FaultyDevice(MemoryDevice(size_bytes=MIB), seed=5)
    write(device, 0, memoryview(OLD))
    yield device
    device.close()


def content(device: FaultyDevice, offset: int = 0, length_bytes: int = 2 * PAGE) -> bytes:
    back = aligned(length_bytes)
    read(device, offset, back)
    return bytes(back)


def test_an_error_strikes_as_often_as_told_and_where_told(drive: FaultyDevice) -> None:
    drive.inject(Fault(action=FaultAction.ERROR, kind=IoKind.READ, start=PAGE, end=2 * PAGE, skip=1, times=2))
    results = []
    for _ in range(5):
        first = IoOp(IoKind.READ, 0, [aligned(PAGE)])
        second = IoOp(IoKind.READ, PAGE, [aligned(PAGE)])
        run(drive, [first, second])
        assert first.error is None
        results.append(second.error and second.error.errno)
    assert results == [None, errno.EIO, errno.EIO, None, None]
    assert drive.counts[FaultAction.ERROR] == 2


def test_an_error_for_ever(drive: FaultyDevice) -> None:
    drive.inject(Fault(action=FaultAction.ERROR, times=None, errno_code=errno.EAGAIN))
    for kind in IoKind:
        (op,) = run(drive, [IoOp(kind, 0, [] if kind is IoKind.SYNC else [aligned(PAGE)])])
        assert op.error is not None
        assert op.error.errno == errno.EAGAIN
    drive.clear()
    assert content(drive) == OLD


def test_a_short_read(drive: FaultyDevice) -> None:
    drive.inject(Fault(action=FaultAction.SHORT, keep_bytes=100))
    assert read(drive, 0, aligned(2 * PAGE)) == 100
    assert content(drive) == OLD


@pytest.mark.parametrize("keep_bytes", [0, 512, 700, PAGE, PAGE + 1])
def test_a_torn_write(drive: FaultyDevice, keep_bytes: int) -> None:
    drive.inject(Fault(action=FaultAction.TORN, keep_bytes=keep_bytes))
    write(drive, 0, memoryview(NEW))
    assert content(drive) == NEW[:keep_bytes] + OLD[keep_bytes:]


def test_a_lost_write(drive: FaultyDevice) -> None:
    drive.inject(Fault(action=FaultAction.LOST))
    write(drive, 0, memoryview(NEW))
    assert content(drive) == OLD


def test_misdirected_operations(drive: FaultyDevice) -> None:
    drive.inject(Fault(action=FaultAction.MISDIRECTED, kind=IoKind.WRITE, shift_bytes=4 * PAGE))
    write(drive, 0, memoryview(NEW))
    assert content(drive) == OLD
    assert content(drive, 4 * PAGE) == NEW
    drive.inject(Fault(action=FaultAction.MISDIRECTED, kind=IoKind.READ, shift_bytes=4 * PAGE))
    assert content(drive) == NEW


def test_a_bit_flips_on_the_way_or_for_good(drive: FaultyDevice) -> None:
    drive.inject(Fault(action=FaultAction.FLIP, kind=IoKind.READ, bit=8 * PAGE + 3))
    wrong = content(drive)
    assert [i for i in range(len(OLD)) if wrong[i] != OLD[i]] == [PAGE]
    assert content(drive) == OLD
    drive.inject(Fault(action=FaultAction.FLIP, kind=IoKind.WRITE, bit=0))
    write(drive, 0, memoryview(NEW))
    assert content(drive)[0] == NEW[0] ^ 1
    drive.flip_at_rest(PAGE + 7, 6)
    assert content(drive)[PAGE + 7] == NEW[0] ^ 64


def test_a_full_drive(drive: FaultyDevice) -> None:
    drive.full = True
    with pytest.raises(OSError) as full:
        drive.allocate(0, PAGE)
    assert full.value.errno == errno.ENOSPC
    drive.clear()
    drive.allocate(0, PAGE)


def test_held_completions_come_when_released(drive: FaultyDevice) -> None:
    drive.hold()
    ops = [IoOp(IoKind.READ, index * PAGE, [aligned(PAGE)], owner=index) for index in range(4)]
    drive.submit(ops)
    poller = select.poll()
    poller.register(drive.fileno(), select.POLLIN)
    assert poller.poll(0) == []
    assert drive.poll() == []
    drive.release(1)
    assert [op.owner for op in finish(drive, 1)] == [0]
    assert poller.poll(0) == []
    drive.release()
    assert [op.owner for op in finish(drive, 3)] == [1, 2, 3]


def test_completions_out_of_order_are_the_same_for_one_seed() -> None:
    def order(seed: int) -> list[int]:
        device = FaultyDevice(MemoryDevice(size_bytes=MIB), seed=seed, shuffle=True)
        done = run(device, [IoOp(IoKind.READ, 0, [aligned(PAGE)], owner=index) for index in range(20)])
        device.close()
        return [op.owner for op in done]

    assert order(1) == order(1)
    assert order(1) != list(range(20))
    assert sorted(order(1)) == list(range(20))


def test_random_rates_strike_about_as_often_as_told() -> None:
    device = FaultyDevice(MemoryDevice(size_bytes=MIB), seed=7, rates={FaultAction.ERROR: 0.5, FaultAction.FLIP: 0.1})
    ops = run(device, [IoOp(IoKind.READ, 0, [aligned(PAGE)]) for _ in range(400)])
    failed = sum(op.error is not None for op in ops)
    assert 150 < failed < 250
    assert failed == device.counts[FaultAction.ERROR]
    assert device.counts[FaultAction.FLIP] > 0
    device.close()


# ---- crashes ------------------------------------------------------------------------------------------------------


def crashing() -> FaultyDevice:
    device = FaultyDevice(MemoryDevice(size_bytes=MIB), seed=11, remember_unsynced=True)
    write(device, 0, memoryview(OLD))
    sync(device)
    return device


def test_after_a_kill_what_completed_is_there() -> None:
    device = crashing()
    write(device, 0, memoryview(NEW))
    after = device.crash()
    with pytest.raises(Closed):
        device.poll()
    assert content(after) == NEW
    after.close()


def test_after_a_power_cut_only_what_was_synced_is_there() -> None:
    device = crashing()
    write(device, 0, memoryview(NEW))
    write(device, PAGE, memoryview(NEW))
    after = device.crash(Survival.NONE)
    assert content(after, 0, 4 * PAGE) == OLD + bytes(2 * PAGE)
    write(after, 0, memoryview(NEW))
    sync(after)
    last = after.crash(Survival.NONE)
    assert content(last) == NEW
    last.close()


def test_a_sync_does_not_cover_writes_that_complete_after_it_was_submitted() -> None:
    device = crashing()
    device.hold()
    late = IoOp(IoKind.WRITE, 0, [memoryview(NEW)])
    device.submit([late])
    device.submit([IoOp(IoKind.SYNC, 0, [])])
    device.release()
    finish(device, 2)
    after = device.crash(Survival.NONE)
    assert content(after) == OLD
    after.close()


def test_writes_in_flight_land_in_part_or_not() -> None:
    seen = set()
    for seed in range(40):
        device = FaultyDevice(MemoryDevice(size_bytes=MIB), seed=seed)
        write(device, 0, memoryview(OLD))
        device.hold()
        device.submit([IoOp(IoKind.WRITE, 0, [memoryview(NEW)])])
        after = device.crash()
        got = content(after)
        edge = got.count(NEW[0])
        if got == OLD[:PAGE] + NEW[PAGE:]:
            seen.add("second page")
        else:
            assert got == NEW[:edge] + OLD[edge:]
            assert edge % 512 == 0
            seen.add("none" if edge == 0 else "all" if edge == len(NEW) else "part")
        after.close()
    assert seen == {"none", "all", "part", "second page"}


@given(
    writes=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 3), st.booleans()), max_size=12),
    seed=st.integers(0, 1000),
)
def test_after_a_power_cut_every_page_is_some_version_since_the_sync(
    writes: list[tuple[int, int, bool]], seed: int
) -> None:
    """Each page holds what it had at the last sync or what any write since has put there."""
    device = FaultyDevice(MemoryDevice(size_bytes=MIB), seed=seed, remember_unsynced=True)
    possible = [{bytes(PAGE)} for _ in range(10)]
    for number, (page, pages, synced) in enumerate(writes):
        data = random_bytes(pages * PAGE, number)
        write(device, page * PAGE, memoryview(data))
        for index in range(pages):
            possible[page + index].add(data[index * PAGE : (index + 1) * PAGE])
        if synced:
            sync(device)
            possible = [{content(device, index * PAGE, PAGE)} for index in range(10)]
    after = device.crash(Survival.SOME)
    for index in range(10):
        assert content(after, index * PAGE, PAGE) in possible[index]
    after.close()


def test_faults_strike_single_extents(drive: FaultyDevice) -> None:
    """Of a scattered read: as many as told, where told; the others are not touched."""
    drive.inject(Fault(action=FaultAction.ERROR, kind=IoKind.READ, start=PAGE, end=2 * PAGE, times=1))
    drive.inject(Fault(action=FaultAction.SHORT, kind=IoKind.READ, start=5 * PAGE, end=6 * PAGE, keep_bytes=512))
    drive.inject(Fault(action=FaultAction.FLIP, kind=IoKind.READ, start=0, end=PAGE, skip=1, bit=3))
    memory = aligned(5 * PAGE)
    op = ScatteredRead([0, PAGE, 5 * PAGE, 0, PAGE], [PAGE] * 5, memory)
    assert run(drive, [op]) == [op]
    assert op.faults is not None
    assert op.faults[2] == (512, None)
    came_bytes, error = op.faults[1]
    assert error is not None
    assert (came_bytes, error.errno, sorted(op.faults)) == (0, errno.EIO, [1, 2])
    assert op.done_bytes == 3 * PAGE + 512
    assert memory[:PAGE] == OLD[:PAGE]
    assert memory[3 * PAGE] == OLD[0] ^ 8
    assert memory[3 * PAGE + 1 : 4 * PAGE] == OLD[1:PAGE]
    assert memory[4 * PAGE :] == OLD[PAGE:]

"""Faults of real drives and file systems: EIO from a drive that lost its end, and a file system that fills up."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.device.base import Device, IoKind, IoOp
from kvstore.device.health import DriveHealth, HealthMonitor
from kvstore.device.probe import open_device
from kvstore.device.queue import DispatchQueue
from kvstore.telemetry.metrics import DeviceFault
from kvstore.testing.device_suite import MIB, PAGE, aligned, random_bytes, read, run, write
from kvstore.testing.loop_lab import LoopLab
from kvstore.types.flow import FlowClass

DRIVE_BYTES = 8 * MIB
KEPT_BYTES = 2 * MIB


@pytest.fixture(params=["uring", "threads"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lab(loop_lab: LoopLab, tmp_path: Path) -> Iterator[LoopLab]:
    """A lab for one test alone."""
    own = LoopLab(tmp_path)
    yield own
    own.close()


def test_real_io_errors_reach_the_caller_and_fail_the_drive(lab: LoopLab, mode: str) -> None:
    image = lab.image("broken", DRIVE_BYTES // MIB)
    device = open_device(lab.loop(image, sector_bytes=512), size_bytes=0, mode=mode)
    data = random_bytes(DRIVE_BYTES, 1)
    write(device, 0, memoryview(data))
    os.truncate(image, KEPT_BYTES)  # the drive still claims all its sectors, and has lost most of them

    back = aligned(MIB)
    assert read(device, MIB, back) == MIB
    assert back == data[MIB : 2 * MIB]
    lost = [IoOp(IoKind.READ, offset, [aligned(PAGE)]) for offset in range(KEPT_BYTES, DRIVE_BYTES, MIB)]
    for op in run(device, lost):
        assert op.error is not None
        assert op.error.errno == errno.EIO
        assert f"read of 4096 bytes at {op.offset}" in str(op.error)
    assert read(device, 0, back) == MIB  # the rest of the drive is as good as before

    queue = DispatchQueue(device, 2, health=HealthMonitor(failed_after=len(lost)))
    for op in lost:
        queue.submit(op)
    done = 0
    while done < len(lost):
        done += len(queue.pump())
    assert queue.metrics.errors[DeviceFault.EIO] == len(lost)
    assert queue.health.health is DriveHealth.FAILED
    device.close()


@pytest.fixture
def tiny(lab: LoopLab, mode: str) -> Iterator[Device]:
    """A drive of 64 MiB in a file system of 16."""
    folder = lab.file_system("ext4", size_mib=16, sector_bytes=512, name="tiny")
    device = open_device(folder / "data", size_bytes=64 * MIB, mode=mode)
    yield device
    device.close()


def fill(device: Device) -> list[int]:
    """Allocate by the MiB until the file system is full; the offsets that were granted."""
    granted: list[int] = []
    for offset in range(0, 64 * MIB, MIB):
        try:
            device.allocate(offset, MIB)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return granted
        granted.append(offset)
    raise AssertionError("16 MiB held 64")


def test_a_full_file_system_says_so_and_takes_space_back(tiny: Device, lab: LoopLab) -> None:
    granted = fill(tiny)
    assert 8 <= len(granted) < 16
    assert len(granted) * MIB <= tiny.allocated_bytes() <= 16 * MIB
    data = random_bytes(MIB, 2)
    for offset in granted:  # what was reserved can be written when all else is full
        write(tiny, offset, memoryview(data))
    tiny.discard(granted[0], MIB)
    tiny.allocate(20 * MIB, MIB)
    back = aligned(MIB)
    read(tiny, granted[-1], back)
    assert back == data


def test_a_foreign_file_takes_space_and_gives_it_back(tiny: Device, lab: LoopLab) -> None:
    foreign = lab.folder / "tiny" / "foreign"
    with foreign.open("wb") as file:
        file.write(bytes(8 * MIB))
        os.fsync(file.fileno())
    few = fill(tiny)
    assert len(few) <= 7
    foreign.unlink()
    more = fill(tiny)
    assert len(more) > len(few)


def test_a_write_without_space_is_an_error_of_its_own(tiny: Device) -> None:
    """A write into a hole that nothing was reserved for, on a full file system: ENOSPC, or short; never silence."""
    fill(tiny)
    queue = DispatchQueue(tiny, 4)
    for index in range(8):
        queue.submit(IoOp(IoKind.WRITE, 40 * MIB + index * MIB, [aligned(MIB)], flow=FlowClass.WRITEBACK, owner=index))
    done: list[IoOp] = []
    while len(done) < 8:
        done += queue.pump()
    assert any(op.error is not None and op.error.errno == errno.ENOSPC for op in done)
    assert all(op.error is not None or op.done_bytes == MIB for op in done)
    assert queue.health.health is DriveHealth.OK  # a full file system is not a broken drive

"""Devices that need no file system: memory, and the faulty wrapper with no fault armed."""

from __future__ import annotations

import errno

import pytest

from kvstore.device.base import Device
from kvstore.device.memory import MemoryDevice
from kvstore.errors import InvalidRequest
from kvstore.testing.device_suite import DEVICE_BYTES, MIB, DeviceSuite, aligned, read, write
from kvstore.testing.faulty_device import FaultyDevice


class TestMemoryDevice(DeviceSuite):
    keeps_bytes = False
    expected_mode = "memory"

    def open(self) -> Device:
        return MemoryDevice(size_bytes=DEVICE_BYTES)


class TestFaultyDeviceWithoutFaults(DeviceSuite):
    keeps_bytes = False

    def open(self) -> Device:
        return FaultyDevice(MemoryDevice(size_bytes=DEVICE_BYTES))


class TestFaultyDeviceThatShuffles(DeviceSuite):
    keeps_bytes = False

    def open(self) -> Device:
        inner = MemoryDevice(size_bytes=DEVICE_BYTES)
        return FaultyDevice(inner, seed=3, shuffle=True, remember_unsynced=True)


def test_a_memory_device_has_bounded_space() -> None:
    device = MemoryDevice(size_bytes=8 * MIB, space_bytes=2 * MIB)
    device.allocate(0, MIB)
    device.allocate(0, MIB)  # it is there already
    device.allocate(4 * MIB, MIB)
    with pytest.raises(OSError) as full:
        device.allocate(MIB, MIB)
    assert full.value.errno == errno.ENOSPC
    device.discard(0, MIB)
    device.allocate(MIB, MIB)
    assert device.allocated_bytes() == 2 * MIB
    device.close()


def test_a_write_without_space_fails_and_changes_nothing() -> None:
    device = MemoryDevice(size_bytes=8 * MIB, space_bytes=MIB)
    write(device, 0, aligned(MIB))
    full = aligned(MIB)
    full[:] = b"\xff" * MIB
    with pytest.raises(AssertionError, match="do not fit"):
        write(device, MIB, full)
    back = aligned(MIB)
    assert read(device, MIB, back) == MIB
    assert not any(back)
    device.close()


@pytest.mark.parametrize("size_bytes", [0, -4096, 4095, 6000])
def test_a_memory_device_of_an_odd_size_is_refused(size_bytes: int) -> None:
    with pytest.raises(InvalidRequest, match="multiple of 4096"):
        MemoryDevice(size_bytes=size_bytes)

"""Choosing how the bytes of a drive are moved, by trying it on that very file."""

from __future__ import annotations

from pathlib import Path

from kvstore.device.base import Device
from kvstore.device.file import open_data_file
from kvstore.device.threads import ThreadsDevice
from kvstore.limits import DEVICE_LOCK_WAIT_NS, QUEUE_DEPTH_DEFAULT


def open_device(
    path: str | Path,
    *,
    size_bytes: int,
    mode: str = "auto",
    depth: int = QUEUE_DEPTH_DEFAULT,
    create: bool = True,
    lock_wait_ns: int = DEVICE_LOCK_WAIT_NS,
) -> Device:
    """Open the drive at `path`."""
    file = open_data_file(path, size_bytes=size_bytes, create=create, lock_wait_ns=lock_wait_ns)
    return ThreadsDevice(file, depth=depth, reason="the thread pool")

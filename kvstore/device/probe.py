"""Choosing how the bytes of a drive are moved, by trying it on that very file.

io_uring first, the thread pool where io_uring does not work; never silently: the reason ends up in `Device.mode`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvstore.device.base import Device
from kvstore.device.file import DataFile, open_data_file
from kvstore.device.threads import ThreadsDevice
from kvstore.device.uring import UringDevice
from kvstore.device.uring_probe import make_ring, probe_uring
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.limits import DEVICE_LOCK_WAIT_NS, QUEUE_DEPTH_DEFAULT, QUEUE_DEPTH_MAX
from kvstore.telemetry.metrics import DeviceMetrics

MODES: Final = ("auto", "uring", "threads")


def open_device(
    path: str | Path,
    *,
    size_bytes: int,
    mode: str = "auto",
    depth: int = QUEUE_DEPTH_DEFAULT,
    create: bool = True,
    lock_wait_ns: int = DEVICE_LOCK_WAIT_NS,
    direct_io: bool = True,
    read_only: bool = False,
    metrics: DeviceMetrics | None = None,
) -> Device:
    """Open, lock and drive a regular file or block device.

    Args:
        path: the data file.
        size_bytes: capacity, a multiple of 4096; 0 takes the size found.
        mode: "auto" takes the best that works; any other name of MODES is taken or refused.
        depth: operations in flight, 1 to QUEUE_DEPTH_MAX; more may be submitted and wait.
        create: make a missing file.
        lock_wait_ns: how long the last owner may take to let go.
        direct_io: bypass the page cache where the file system can.
        read_only: see `open_data_file`.
        metrics: where the device counts what it had to repeat.

    Raises:
        InvalidRequest: a wrong argument, or a path that cannot be a data file.
        Unavailable: another process has the file, or the mode asked for does not work here; the message says what is
            missing and the fix.
    """
    if mode not in MODES:
        raise InvalidRequest(f"device mode {mode!r} is unknown; use one of: {', '.join(MODES)}")
    if not 1 <= depth <= QUEUE_DEPTH_MAX:
        raise InvalidRequest(f"queue depth {depth} is out of range; use 1 to {QUEUE_DEPTH_MAX}")
    file = open_data_file(
        path,
        size_bytes=size_bytes,
        create=create,
        lock_wait_ns=lock_wait_ns,
        direct_io=direct_io,
        read_only=read_only,
    )
    try:
        return _drive(file, mode=mode, depth=depth, metrics=metrics)
    except BaseException:
        file.close()
        raise


def _drive(file: DataFile, *, mode: str, depth: int, metrics: DeviceMetrics | None) -> Device:
    if mode == "threads":
        return ThreadsDevice(file, depth=depth, metrics=metrics, reason="threads, as asked for")
    try:
        abilities = probe_uring(file)
        ring = make_ring(file, depth=depth)
    except Unavailable as error:
        if mode == "uring":
            raise Unavailable(f"device mode uring does not work for {file.path}: {error}") from error
        return ThreadsDevice(file, depth=depth, metrics=metrics, reason=f"threads, because {error}")
    reason = "io_uring, as asked for" if mode == "uring" else "io_uring works on this file"
    return UringDevice(file, ring, abilities=abilities, reason=reason, metrics=metrics)

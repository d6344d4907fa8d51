"""From a device to a store's superblock: made on an empty drive, checked, repaired, and fitted to the capacity."""

from __future__ import annotations

import logging
import os
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvstore.device.base import Device
from kvstore.engine.blocking import BlockingIo, pages
from kvstore.engine.format import UUID_BYTES, Superblock
from kvstore.engine.identity import NO_CLUSTER, check_cluster
from kvstore.engine.superblock import (
    change_capacity,
    clear_fresh,
    plan_superblock,
    read_superblock,
    refuse_foreign,
    repair_superblocks,
    write_superblocks,
)
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.limits import PAGE_BYTES
from kvstore.telemetry.metrics import EngineMetrics

DATA_FILE: Final = "kvstore.data"

_log = logging.getLogger(__name__)


def prepare_drive(
    device: Device,
    *,
    name: str,
    capacity_bytes: int = 0,
    segment_bytes: int = 0,
    cluster_id: bytes = bytes(UUID_BYTES),
    metrics: EngineMetrics | None = None,
) -> Superblock:
    """The superblock of a drive, made if the drive is empty.

    Args:
        name: for messages, e.g. the path.
        capacity_bytes: 0 takes the device's size. Another one than before grows or shrinks the store; records in
            segments beyond the new end are lost.
        segment_bytes: for a new store; 0 takes the default. An existing store keeps its own.
        cluster_id: whose the drive is from now on; zeros leave it as it is.
        metrics: damaged copies are counted here.

    Raises:
        FormatUnsupported: something else is on the drive, a newer format, or it is of another cluster.
        InvalidRequest: the capacity is out of bounds.
        Unavailable: the drive fails.
    """
    capacity = (capacity_bytes or device.size_bytes) // PAGE_BYTES * PAGE_BYTES
    if capacity > device.size_bytes:
        raise InvalidRequest(f"{name}: capacity {capacity} bytes is above the {device.size_bytes} it has; lower it")
    io = BlockingIo(device)
    try:
        found = read_superblock(io)
        if found is None:
            refuse_foreign(io, name)
            clear_fresh(io)
            superblock = plan_superblock(
                capacity_bytes=capacity, segment_bytes=segment_bytes, cluster_id=cluster_id, created_ns=time.time_ns()
            )
            device.allocate(0, superblock.segments_offset)
            write_superblocks(io, superblock)
            return superblock
        if found.bad_copies:
            _log.warning("%s: superblock copy %s was damaged and is written anew", name, found.bad_copies)
            repair_superblocks(io, found)
            if metrics is not None:
                metrics.recovery_bad_structures += len(found.bad_copies)
        superblock = _claim(io, found.superblock, cluster_id, name)
        return superblock if superblock.capacity_bytes == capacity else _resize(io, superblock, capacity)
    except OSError as error:
        raise Unavailable(f"{name}: the drive failed while it was opened ({error}); check it") from error


def _claim(io: BlockingIo, superblock: Superblock, cluster_id: bytes, name: str) -> Superblock:
    """A store without cluster becomes one of this cluster; raises FormatUnsupported for one of another."""
    check_cluster(superblock, cluster_id, name)
    if cluster_id in (NO_CLUSTER, superblock.cluster_id):
        return superblock
    claimed = replace(superblock, cluster_id=cluster_id, revision=superblock.revision + 1)
    write_superblocks(io, claimed)
    return claimed


def _resize(io: BlockingIo, old: Superblock, capacity_bytes: int) -> Superblock:
    """Fit the store to another capacity."""
    new = change_capacity(old, capacity_bytes)
    _log.info("capacity goes from %d to %d bytes", old.capacity_bytes, new.capacity_bytes)
    for segment in range(old.segment_count, new.segment_count):
        _erase(io, new, segment)
    write_superblocks(io, new)
    start = new.segments_offset + new.segment_count * new.segment_bytes
    length = (old.segment_count - new.segment_count) * old.segment_bytes
    if length > 0:
        try:
            io.device.discard(start, length)
        except (OSError, ValueError) as error:
            _log.warning("%d bytes behind the new end could not be given back: %s", length, error)
    return new


def _erase(io: BlockingIo, superblock: Superblock, segment: int) -> None:
    """What an earlier, larger capacity left in a segment must not come back: its tombstones are gone."""
    start = superblock.segments_offset + segment * superblock.segment_bytes
    for offset in (start + superblock.segment_bytes - PAGE_BYTES, start):
        if any(io.read(offset, PAGE_BYTES).cast("Q")):
            io.write(offset, pages(PAGE_BYTES))


def data_file(path: str | Path) -> Path:
    """Where the bytes of a store are: DATA_FILE in a folder, or the file or block device itself."""
    path = Path(path)
    return path / DATA_FILE if path.is_dir() else path


def is_block_device(path: Path) -> bool:
    """Whether a path names a block device; False for what is not there."""
    try:
        return stat.S_ISBLK(os.stat(path).st_mode)
    except FileNotFoundError:
        return False

"""The drives of one worker: opened, described, and joined into one engine."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvstore.device.health import DriveHealth
from kvstore.engine.api import Engine
from kvstore.engine.drive import data_file
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.engine.identity import hand_over_drive
from kvstore.errors import KVStoreError, Unavailable
from kvstore.limits import SECOND_NS, STAGING_BYTES_MIN, MiB
from kvstore.server.drive_set import DriveSet
from kvstore.server.launch import WorkerLaunch
from kvstore.server.store_file import StoreFile
from kvstore.wire.codec import Plain

log = logging.getLogger(__name__)

_PROGRESS_NS = 5 * SECOND_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """One drive with its store.

    Attributes:
        id: the target's name, which stays with the drive wherever it is plugged in.
        file: of its store, as it was when that was opened; None on a raw device.
    """

    id: str
    path: str
    engine: DriveEngine
    file: StoreFile | None = None

    @property
    def loss(self) -> str:
        """Why what it holds is lost when the worker ends, and what to do; "" when it is not."""
        if self.file is None or self.file.is_there():
            return ""
        return (
            f"{self.file.path} was removed or replaced while it is in use: what it holds is served on, and is lost "
            "when this process ends; hand it on with `kvstore drain`, or copy it away, then start the node again"
        )

    def state(self) -> tuple[str, str]:
        """A word for how it is, as `DriveState` has them, and the details for people."""
        engine = self.engine
        if not engine.takes_puts:
            reason = engine.store.write_fault or engine.health_reason
            if os.strerror(errno.EROFS) in reason:
                return "read-only", f"{reason}; what it holds is served; mount it for writing"
            return "failed", f"{reason}; replace it; what cannot be read is a miss meanwhile"
        if loss := self.loss:
            return "suspect", loss
        if engine.health is DriveHealth.SUSPECT:
            return "suspect", f"{engine.health_reason}; it may be dying"
        if engine.store.allocator.is_short_of_space:
            capacity_bytes = engine.store.superblock.capacity_bytes
            return "serving", (
                f"its file system is full: free space on it, or lower its capacity of {capacity_bytes // MiB} MiB"
            )
        return "serving", ""

    def describe(self) -> dict[str, Plain]:
        """How it is, for people."""
        metrics, mode = self.engine.metrics, self.engine.device.mode
        state, detail = self.state()
        return {
            "path": self.path,
            "id": self.id,
            "state": state,
            "detail": detail,
            "mode": f"{mode.name}, {'direct I/O' if mode.direct_io else 'page cache'}",
            "capacity_bytes": metrics.capacity_bytes,
            "allocated_bytes": metrics.allocated_bytes,
            "live_bytes": metrics.live_bytes,
            "records": metrics.records,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveFault:
    """A drive that could not be opened, and why."""

    path: str
    detail: str


def open_drives(launch: WorkerLaunch) -> tuple[list[Drive], list[DriveFault]]:
    """Recovers every drive of a worker, one after the other; what is wrong with one does not stop the others.

    Raises:
        InvalidRequest, FormatUnsupported, Unavailable: None can be opened; what the first one said.
    """
    count = len(launch.data_dirs)
    settings = EngineSettings(
        capacity_bytes=launch.capacity_bytes,
        segment_bytes=launch.segment_bytes,
        cache_bytes=launch.cache_bytes // count,
        staging_bytes=max(launch.staging_bytes // count, STAGING_BYTES_MIN),
        amplification_max=launch.write_amplification_max,
        endurance_bytes_day=launch.endurance_bytes_day,
        device=launch.device,
        queue_depth=launch.queue_depth,
        cluster_id=bytes.fromhex(launch.cluster_id),
        warming=True,  # a node that starts again has clients waiting
    )
    drives: list[Drive] = []
    faults: list[DriveFault] = []
    first: KVStoreError | None = None
    with ExitStack() as opened:
        for path in launch.data_dirs:
            try:
                _hand_over(path, launch)
                engine = _open(path, settings)
            except KVStoreError as error:
                log.error("drive %s is not used: %s", path, error)
                first = first or error
                faults.append(DriveFault(path=path, detail=str(error)))
                continue
            opened.callback(engine.close, within_ns=0)
            engine.store.scrubber.bytes_second = launch.scrub_bytes_second
            disk_id = engine.store.superblock.disk_id.hex()
            drives.append(Drive(id=disk_id, path=path, engine=engine, file=StoreFile.of(path)))
        if first is not None and not drives:
            raise first
        opened.pop_all()
    return drives, faults


def joined(drives: Sequence[Drive]) -> Engine:
    """The one engine that the data plane serves."""
    if len(drives) == 1:
        return drives[0].engine
    return DriveSet([(drive.id, drive.engine) for drive in drives])


def _hand_over(path: str, launch: WorkerLaunch) -> None:
    """A drive of the node from before it joined its cluster becomes the cluster's."""
    try:
        own_id, cluster_id = bytes.fromhex(launch.own_id), bytes.fromhex(launch.cluster_id)
        hand_over_drive(data_file(path), own_id=own_id, cluster_id=cluster_id)
    except OSError as error:
        raise Unavailable(f"drive {path} cannot be read: {error.strerror or error}; check the device") from None


def _open(path: str, settings: EngineSettings) -> DriveEngine:
    began_ns = told_ns = time.monotonic_ns()

    def on_progress(done: int, total: int) -> None:
        nonlocal told_ns
        now_ns = time.monotonic_ns()
        if now_ns - told_ns > _PROGRESS_NS:
            told_ns = now_ns
            log.info("%s: recovery has read %d of %d segments", path, done, total)

    try:
        engine = DriveEngine.open(path, settings, now_ns=began_ns, on_progress=on_progress)
    except OSError as error:
        raise Unavailable(f"drive {path} cannot be opened: {error.strerror or error}; check the device") from None
    mode = engine.device.mode
    log.info(
        "%s: opened in %.2f s (device, memory, recovery), %d records; %s (%s), capacity %d MiB",
        path,
        (time.monotonic_ns() - began_ns) / SECOND_NS,
        len(engine.catalog.index),
        mode.name,
        mode.reason,
        engine.store.superblock.capacity_bytes // MiB,
    )
    return engine

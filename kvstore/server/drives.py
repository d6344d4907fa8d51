"""The drives of one worker: opened, described, and joined into one engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvstore.engine.api import Engine
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.errors import Unavailable
from kvstore.limits import SECOND_NS, STAGING_BYTES_MIN, MiB
from kvstore.server.drive_set import DriveSet
from kvstore.server.launch import WorkerLaunch

log = logging.getLogger(__name__)

_PROGRESS_NS = 5 * SECOND_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """One drive with its store. `id` is the target's name, which stays with the drive wherever it is plugged in."""

    id: str
    path: str
    engine: DriveEngine


def open_drives(launch: WorkerLaunch) -> list[Drive]:
    """Recovers every drive of a worker, one after the other.

    Raises:
        InvalidRequest, FormatUnsupported, Unavailable: One cannot be opened; none is left open.
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
        warming=True,  # a node that starts again has clients waiting
    )
    drives: list[Drive] = []
    with ExitStack() as opened:
        for path in launch.data_dirs:
            engine = _open(path, settings)
            opened.callback(engine.close, within_ns=0)
            engine.store.scrubber.bytes_second = launch.scrub_bytes_second
            drives.append(Drive(id=engine.store.superblock.disk_id.hex(), path=path, engine=engine))
        opened.pop_all()
    return drives


def joined(drives: Sequence[Drive]) -> Engine:
    """The one engine that the data plane serves."""
    if len(drives) == 1:
        return drives[0].engine
    return DriveSet([(drive.id, drive.engine) for drive in drives])


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

"""What the workers say of themselves, gathered: metrics, what tenants use, how the drives are."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.errors import Internal, KVStoreError
from kvstore.limits import CONTROL_DEADLINE_NS
from kvstore.server.admin import maps_of, text_of
from kvstore.server.drive_record import DriveVerdict
from kvstore.server.report import DriveReport, DriveState
from kvstore.server.worker_handle import WorkerHandle
from kvstore.telemetry.registry import RoomSnapshot, Snapshot, merge
from kvstore.wire.codec import Plain

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of all workers that answered; `uses` has a row for each tenant and worker."""

    numbers: Snapshot
    uses: tuple[Mapping[str, Plain], ...]
    drives: tuple[DriveReport, ...]


async def measure(
    workers: Sequence[WorkerHandle], own: dict[str, RoomSnapshot], refused: Sequence[DriveVerdict]
) -> Measured:
    """Ask every worker; one that does not answer is left out, and its drives are shown as down.

    Args:
        own: the supervisor's metrics.
        refused: drives that were given to no worker, and why.
    """
    snapshots = [own]
    uses: list[Mapping[str, Plain]] = []
    drives = [_refused(verdict) for verdict in refused]
    for worker in workers:
        try:
            value = await worker.channel.admin("stats", {}, deadline_ns=CONTROL_DEADLINE_NS)
            snapshots.append(_snapshot(value.get("metrics")))
            uses += maps_of(value, "tenants")
            drives += [_drive(row, worker) for row in maps_of(value, "drives")]
        except KVStoreError as error:
            log.debug("no metrics: %s", error)
            drives += _silent(worker)
    return Measured(
        numbers=merge(snapshots), uses=tuple(uses), drives=tuple(sorted(drives, key=lambda drive: drive.path))
    )


def _refused(verdict: DriveVerdict) -> DriveReport:
    return DriveReport(path=verdict.path, id=verdict.disk_id, rail=0, state=verdict.state, detail=verdict.detail)


def _silent(worker: WorkerHandle) -> list[DriveReport]:
    """The drives of a worker that does not answer."""
    report = worker.report()
    ids = {owned.path: owned.id for owned in worker.readiness.targets} if worker.readiness else {}
    return [
        DriveReport(path=path, id=ids.get(path, ""), rail=report.rail, state=DriveState.DOWN, detail=report.detail)
        for path in worker.data_dirs
    ]


def _drive(row: Mapping[str, Plain], worker: WorkerHandle) -> DriveReport:
    state = text_of(row, "state")
    if state not in DriveState.__members__.values():
        raise Internal(f"a worker described a drive as {row!r:.200}")
    return DriveReport(
        path=text_of(row, "path"),
        id=text_of(row, "id"),
        rail=worker.report().rail,
        state=DriveState(state),
        detail=text_of(row, "detail"),
        mode=text_of(row, "mode"),
        capacity_bytes=_count(row, "capacity_bytes"),
        allocated_bytes=_count(row, "allocated_bytes"),
        live_bytes=_count(row, "live_bytes"),
        records=_count(row, "records"),
    )


def _count(row: Mapping[str, Plain], name: str) -> int:
    value = row.get(name, 0)
    return value if isinstance(value, int) else 0


def _snapshot(value: object) -> dict[str, RoomSnapshot]:
    if not isinstance(value, dict) or not all(isinstance(room, dict) for room in value.values()):
        raise Internal("the worker's metrics are not a map of maps")
    return value

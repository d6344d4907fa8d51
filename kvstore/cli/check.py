"""`kvstore check`: verify a data folder of a node that does not run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvstore.cli.screen import Screen
from kvstore.device.probe import open_device
from kvstore.engine.check import CheckReport, check_drive
from kvstore.engine.drive import data_file
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.limits import SECOND_NS
from kvstore.server.summary import words_of_bytes

CLEAN: Final = 0
DAMAGED: Final = 1
_LOCK_WAIT_NS: Final = SECOND_NS
_COMPLAINTS_SHOWN_MAX: Final = 20


def check_data_dir(path: Path, *, as_json: bool) -> int:
    """Verify every record and print what was found.

    Returns:
        Exit status: CLEAN only if nothing is damaged.

    Raises:
        InvalidRequest: there is no data at `path`, or it may not be read.
        Unavailable: a node has it open, or the drive cannot be read.
        FormatUnsupported: what is there is no store, or of a newer format.
    """
    try:
        file = data_file(path)
        is_there = file.exists()
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be looked at ({error.strerror}); run this as the node's user or root"
        ) from None
    if not is_there:
        raise InvalidRequest(f"{path} holds no data: {file} does not exist; name the data_dir of a node")
    if as_json:
        report = _check(file, lambda _done, _all: None)
        print(json.dumps(report.as_json(), indent=2))
    else:
        screen = Screen()
        with screen.step(f"check {file}") as tell:
            report = _check(file, lambda done, total: tell(f"{done} of {total} records"))
        _show(screen, report)
    return CLEAN if report.clean else DAMAGED


def _check(file: Path, on_progress: Callable[[int, int], None]) -> CheckReport:
    device = open_device(file, size_bytes=0, mode="threads", create=False, lock_wait_ns=_LOCK_WAIT_NS, read_only=True)
    try:
        return check_drive(device, name=str(file), on_progress=on_progress)
    except OSError as error:
        raise Unavailable(f"{file} cannot be read: {error.strerror}; the drive may be failing") from error
    finally:
        device.close()


def _show(screen: Screen, report: CheckReport) -> None:
    facts = [
        ("result", "clean" if report.clean else "DAMAGED"),
        ("records", f"{report.records}, {words_of_bytes(report.live_bytes)} live, {report.namespaces} namespaces"),
        ("bad records", f"{report.bad_records}, and {report.unreadable_records} that could not be read"),
        ("bad structures", _structures(report)),
        (
            "not served",
            f"{report.dropped} dropped, {report.buried} deleted or quarantined, {report.twins} older copies",
        ),
        ("orphans", str(report.orphans)),
        ("segments", f"{report.segments} of {report.segment_count} used, {report.open_segments} not sealed"),
        ("space", f"{words_of_bytes(report.allocated_bytes)} allocated of {words_of_bytes(report.capacity_bytes)}"),
    ]
    screen.table("", facts)
    for complaint in report.complaints[:_COMPLAINTS_SHOWN_MAX]:
        screen.fail(complaint)
    hidden = report.bad_records + report.unreadable_records - _COMPLAINTS_SHOWN_MAX
    if hidden > 0:
        screen.line(f"and {hidden} more; --json shows them up to its bound")


def _structures(report: CheckReport) -> str:
    return (
        f"{report.bad_superblocks} superblock copies, {report.bad_log_blocks} log blocks, "
        f"{report.bad_index_blocks} index blocks, {report.bad_headers} segment headers, "
        f"{report.bad_footers} segment footers, "
        f"{report.bad_manifests} manifests"
    )

"""Reports as tables for people, and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from kvstore.cli.cluster_explain import ClusterAnswer
from kvstore.cli.cluster_status import NodeAnswer, TargetLine, relay_rows
from kvstore.cli.columns import Column, Kind
from kvstore.cli.screen import Screen
from kvstore.cluster.view import View
from kvstore.server.report import (
    Answer,
    DriveReport,
    DriveState,
    KeyAnswer,
    NamespaceAnswer,
    NamespacePage,
    NodeReport,
    TenantReport,
)
from kvstore.server.summary import summary_lines, words_of_bytes, words_of_count
from kvstore.telemetry.registry import named

_DIGEST_CHARACTERS = 16
_KEYS_SHOWN_MAX = 20
_TARGET_CHARACTERS_MIN = 8
_RATES = (Column(header="out/s", is_number=True), Column(header="in/s", is_number=True))
_SPACE = (Column(header="capacity", is_number=True), Column(header="used", is_number=True))
_HIT_RATE = Column(header="hit rate", is_number=True)
_WORKER_COLUMNS = (
    Column(header="worker", is_number=True),
    Column(header="state"),
    Column(header="pid", is_number=True),
    Column(header="restarts", is_number=True),
    Column(header="data", kind=Kind.TEXT),
    Column(header="detail", kind=Kind.NOTE),
)
_DRIVE_COLUMNS = (
    Column(header="target"),
    Column(header="drive", kind=Kind.NOTE),
    Column(header="state"),
    *_SPACE,
    _HIT_RATE,
    *_RATES,
    Column(header="device"),
    Column(header="what to do", kind=Kind.NOTE),
)
_SILENT_COLUMNS = (
    Column(header="node without an answer"),
    Column(header="gRPC"),
    Column(header="why", kind=Kind.NOTE),
)
_DIFFERENCE_COLUMNS = (
    Column(header="field"),
    Column(header="asked", kind=Kind.TEXT),
    Column(header="stored", kind=Kind.TEXT),
)
_KEY_COLUMNS = (
    Column(header="chunk", is_number=True),
    Column(header="key"),
    Column(header="status"),
    Column(header="why", kind=Kind.TEXT),
)
_TARGET_COLUMNS = (
    Column(header="node", kind=Kind.HEADING),
    Column(header="address", kind=Kind.HEADING),
    Column(header="epoch", kind=Kind.HEADING, is_number=True),
    Column(header="target"),
    Column(header="state"),
    *_SPACE,
    _HIT_RATE,
    *_RATES,
    Column(header="device"),
    Column(header="drive", kind=Kind.NOTE),
    Column(header="what is wrong", kind=Kind.NOTE),
)


def json_text(value: object) -> str:
    """A report as JSON: dataclasses as objects, bytes as hex, enums as their value, what is counted by its name."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False)


def json_line(value: object) -> str:
    """The same on one line."""
    return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        plain = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return plain | {"numbers": named(value.numbers)} if isinstance(value, NodeReport) else plain
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def show_status(
    screen: Screen,
    report: NodeReport,
    view: View,
    answers: Sequence[NodeAnswer] = (),
    lines: Sequence[TargetLine] = (),
) -> None:
    """The node, its workers, its drives, and what is in its cluster.

    Args:
        answers: of all nodes of the cluster; none for a node on its own.
        lines: the targets of the cluster.
    """
    screen.table("", [(line.name, line.value) for line in summary_lines(report)])
    workers = [
        (str(worker.rail), worker.state, str(worker.pid), str(worker.restarts), ", ".join(worker.data), worker.detail)
        for worker in report.workers
    ]
    screen.grid("", _WORKER_COLUMNS, workers)
    if report.drives:
        names = _short_names([drive.id for drive in report.drives])
        screen.grid("", _DRIVE_COLUMNS, [_drive_row(drive, report, names) for drive in report.drives])
    own = {drive.id for drive in report.drives}
    others = [target for target in view.targets if target.id not in own]
    if answers:
        _show_cluster(screen, view, answers, lines)
    elif others:
        names = _short_names([target.id for target in view.targets])
        targets = [(names[one.id], one.state, ", ".join(one.data), f"{one.weight:.2f}") for one in others]
        screen.grid("", ("target", "state", Column(header="data", kind=Kind.TEXT), "weight"), targets)
    if report.numbers and report.tenants:
        show_tenants(screen, report.tenants)


def _show_cluster(screen: Screen, view: View, answers: Sequence[NodeAnswer], lines: Sequence[TargetLine]) -> None:
    counts = f"{words_of_count(len(answers), 'node')}, {words_of_count(len(view.targets), 'target')}"
    title = f"cluster {view.cluster}: {counts}, epoch {view.epoch}"
    names = _short_names([line.id for line in lines])
    screen.grid(title, _TARGET_COLUMNS, [_target_row(line, names) for line in lines])
    silent = [(answer.node_id, answer.grpc, answer.failure) for answer in answers if answer.report is None]
    if silent:
        screen.grid("", _SILENT_COLUMNS, silent)
    if view.relays:
        columns = ("node", "relay", "state", Column(header="data", kind=Kind.TEXT), "label")
        screen.grid("", columns, relay_rows(view.relays))


def _short_names(ids: Sequence[str]) -> dict[str, str]:
    """The beginning of each id, as long as it takes to tell all of them apart."""
    known = set(ids)
    length = _TARGET_CHARACTERS_MIN
    while len({one[:length] for one in known}) < len(known):
        length += 1
    return {one: one[:length] or "none" for one in known}


def _target_row(line: TargetLine, names: Mapping[str, str]) -> tuple[str, ...]:
    used = line.used_bytes
    return (
        line.node_id,
        line.grpc,
        str(line.epoch) if line.epoch else "",
        names[line.id],
        line.state or "in no view",
        words_of_bytes(line.capacity_bytes) if line.capacity_bytes else "",
        *_use_cells(
            used,
            line.capacity_bytes,
            hits=line.hits,
            keys=line.keys,
            sent=line.sent_bytes_second,
            received=line.received_bytes_second,
        ),
        line.mode,
        "" if line.drive == DriveState.SERVING else line.drive,
        line.detail,
    )


def _use_cells(
    used: int | None, capacity_bytes: int, *, hits: int, keys: int, sent: float, received: float
) -> tuple[str, str, str, str]:
    """How full it is, hit rate, and throughput; empty where it is not known."""
    if used is None:
        return "", "", "", ""
    return (
        f"{100 * used / capacity_bytes:.1f} %",
        f"{100 * hits / keys:.0f} %" if keys else "",
        words_of_bytes(sent),
        words_of_bytes(received),
    )


def _drive_row(drive: DriveReport, report: NodeReport, names: Mapping[str, str]) -> tuple[str, ...]:
    """A drive as a target: hit rate and throughput are its worker's, which is asked for keys, not for drives."""
    worker = next((one for one in report.workers if one.rail == drive.rail), None)
    is_open = bool(drive.capacity_bytes)
    return (
        names[drive.id],
        drive.path,
        "fenced" if report.fence and drive.state is DriveState.SERVING else drive.state,
        words_of_bytes(drive.capacity_bytes) if is_open else "",
        *_use_cells(
            drive.live_bytes if is_open else None,
            drive.capacity_bytes,
            hits=worker.lookup_hits if worker else 0,
            keys=worker.lookup_keys if worker else 0,
            sent=worker.sent_bytes_second if worker else 0.0,
            received=worker.received_bytes_second if worker else 0.0,
        ),
        drive.mode,
        drive.detail,
    )


def show_tenants(screen: Screen, uses: Sequence[TenantReport]) -> None:
    """One line for each tenant; in a cluster with what it uses there in all, and this node's share of the quota."""
    is_shared = any(use.share_bytes for use in uses)
    rows = [
        (
            use.name,
            words_of_bytes(use.used_bytes),
            words_of_bytes(use.quota_bytes) if use.quota_bytes else "none",
            *((words_of_bytes(use.cluster_used_bytes), words_of_bytes(use.share_bytes)) if is_shared else ()),
            str(use.records),
            str(use.refused_records),
            f"{use.weight:g}",
        )
        for use in uses
    ]
    shared = ("used in the cluster", "share here") if is_shared else ()
    numbers = ("used", "quota", *shared, "records", "refused", "weight")
    screen.grid("", ("tenant", *(Column(header=name, is_number=True) for name in numbers)), rows)


def show_namespaces(screen: Screen, page: NamespacePage) -> None:
    """One line for each namespace."""
    rows = [
        (
            item.digest.hex()[:_DIGEST_CHARACTERS],
            item.model,
            item.weights,
            f"{item.adapter} {item.adapter_revision}".strip(),
            item.layout,
            f"{item.generation}{' (dropped before)' if item.dropped else ''}",
        )
        for item in page.namespaces
    ]
    screen.grid("", ("digest", "model", "weights", "adapter", "layout", "generation"), rows)
    if page.next:
        screen.line(f"more with --after {page.next.hex()}")


def show_answer(screen: Screen, answer: Answer | ClusterAnswer) -> None:
    """The summary, then what each namespace tells."""
    screen.line(answer.summary)
    for namespace in answer.namespaces:
        _show_namespace_answer(screen, namespace)
    if isinstance(answer, ClusterAnswer):
        silent = [(one.node_id, one.grpc, one.failure) for one in answer.nodes if one.answer is None]
        if silent:
            screen.grid("", _SILENT_COLUMNS, silent)


def _show_namespace_answer(screen: Screen, answer: NamespaceAnswer) -> None:
    namespace = answer.namespace
    title = f"namespace {namespace.digest.hex()[:_DIGEST_CHARACTERS]}: {namespace.model}, {namespace.layout}"
    if answer.differences:
        rows = [(item.field, item.asked, item.stored) for item in answer.differences]
        screen.grid(title, _DIFFERENCE_COLUMNS, rows)
    if answer.keys:
        lines = [_key_row(at, key) for at, key in enumerate(answer.keys[:_KEYS_SHOWN_MAX])]
        screen.grid("" if answer.differences else title, _KEY_COLUMNS, lines)
    if len(answer.keys) > _KEYS_SHOWN_MAX:
        screen.line(f"and {len(answer.keys) - _KEYS_SHOWN_MAX} more; --json shows all")


def _key_row(at: int, key: KeyAnswer) -> tuple[str, str, str, str]:
    return str(at), key.key.hex()[:_DIGEST_CHARACTERS], key.status, key.text

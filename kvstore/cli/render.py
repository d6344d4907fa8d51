"""Reports as tables for people, and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from kvstore.cli.cluster_status import NodeAnswer, TargetLine, relay_rows
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

_DIGEST_CHARACTERS = 16
_KEYS_SHOWN_MAX = 20
_DRIVE_HEADERS = (
    "target",
    "drive",
    "state",
    "capacity",
    "used",
    "hit rate",
    "throughput",
    "device",
    "epoch",
    "what to do",
)
_TARGET_HEADERS = (
    "node",
    "target",
    "state",
    "drive",
    "capacity",
    "used",
    "hit rate",
    "throughput",
    "device",
    "epoch",
    "what is wrong",
)


def json_text(value: object) -> str:
    """A report as JSON: dataclasses as objects, bytes as hex, enums as their value."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False)


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(item) for name, item in asdict(value).items()}
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
        (str(worker.rail), worker.state, str(worker.pid), ", ".join(worker.data), str(worker.restarts), worker.detail)
        for worker in report.workers
    ]
    screen.grid("", ("worker", "state", "pid", "data", "restarts", "detail"), workers)
    if report.drives:
        screen.grid("", _DRIVE_HEADERS, [_drive_row(drive, report) for drive in report.drives])
    own = {drive.id for drive in report.drives}
    others = [target for target in view.targets if target.id not in own]
    if answers:
        _show_cluster(screen, view, answers, lines)
    elif others:
        targets = [(target.id, target.state, ", ".join(target.data), f"{target.weight:.2f}") for target in others]
        screen.grid("", ("target", "state", "data", "weight"), targets)
    if report.numbers and report.tenants:
        show_tenants(screen, report.tenants)


def _show_cluster(screen: Screen, view: View, answers: Sequence[NodeAnswer], lines: Sequence[TargetLine]) -> None:
    counts = f"{words_of_count(len(answers), 'node')}, {words_of_count(len(view.targets), 'target')}"
    title = f"cluster {view.cluster}: {counts}, epoch {view.epoch}"
    screen.grid(title, _TARGET_HEADERS, [_target_row(line) for line in lines])
    silent = [(answer.node_id, answer.grpc, answer.failure) for answer in answers if answer.report is None]
    if silent:
        screen.grid("", ("node without an answer", "gRPC", "why"), silent)
    if view.relays:
        screen.grid("", ("node", "relay", "state", "data", "label"), relay_rows(view.relays))


def _target_row(line: TargetLine) -> tuple[str, ...]:
    used = line.used_bytes
    return (
        line.node_id,
        line.id[:_DIGEST_CHARACTERS] or "none",
        line.state or "not in the view",
        line.drive or "not known",
        words_of_bytes(line.capacity_bytes) if line.capacity_bytes else "",
        f"{words_of_bytes(used)} ({100 * used / line.capacity_bytes:.0f} %)" if used is not None else "",
        f"{100 * line.hits / line.keys:.0f} %" if line.keys else "",
        f"{words_of_bytes(line.sent_bytes_second)}/s out, {words_of_bytes(line.received_bytes_second)}/s in"
        if used is not None
        else "",
        line.mode,
        str(line.epoch) if line.epoch else "",
        line.detail,
    )


def _drive_row(drive: DriveReport, report: NodeReport) -> tuple[str, ...]:
    """A drive as a target: hit rate and throughput are its worker's, which is asked for keys, not for drives."""
    worker = next((one for one in report.workers if one.rail == drive.rail), None)
    hits, keys = (worker.lookup_hits, worker.lookup_keys) if worker else (0, 0)
    sent, received = (worker.sent_bytes_second, worker.received_bytes_second) if worker else (0.0, 0.0)
    is_open = bool(drive.capacity_bytes)
    return (
        drive.id[:_DIGEST_CHARACTERS] or "none",
        drive.path,
        "fenced" if report.fence and drive.state is DriveState.SERVING else drive.state,
        words_of_bytes(drive.capacity_bytes) if is_open else "",
        f"{words_of_bytes(drive.live_bytes)} ({100 * drive.live_bytes / drive.capacity_bytes:.0f} %)"
        if is_open
        else "",
        f"{100 * hits / keys:.0f} %" if is_open and keys else "",
        f"{words_of_bytes(sent)}/s out, {words_of_bytes(received)}/s in" if is_open else "",
        drive.mode,
        str(report.epoch),
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
    screen.grid("", ("tenant", "used", "quota", *shared, "records", "refused", "weight"), rows)


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


def show_answer(screen: Screen, answer: Answer) -> None:
    """The summary, then what each namespace tells."""
    screen.line(answer.summary)
    for namespace in answer.namespaces:
        _show_namespace_answer(screen, namespace)


def _show_namespace_answer(screen: Screen, answer: NamespaceAnswer) -> None:
    namespace = answer.namespace
    title = f"namespace {namespace.digest.hex()[:_DIGEST_CHARACTERS]}: {namespace.model}, {namespace.layout}"
    if answer.differences:
        rows = [(item.field, item.asked, item.stored) for item in answer.differences]
        screen.grid(title, ("field", "asked", "stored"), rows)
    if answer.keys:
        lines = [_key_row(at, key) for at, key in enumerate(answer.keys[:_KEYS_SHOWN_MAX])]
        screen.grid("" if answer.differences else title, ("chunk", "key", "status", "why"), lines)
    if len(answer.keys) > _KEYS_SHOWN_MAX:
        screen.line(f"and {len(answer.keys) - _KEYS_SHOWN_MAX} more; --json shows all")


def _key_row(at: int, key: KeyAnswer) -> tuple[str, str, str, str]:
    return str(at), key.key.hex()[:_DIGEST_CHARACTERS], key.status, key.text

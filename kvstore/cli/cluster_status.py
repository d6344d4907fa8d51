"""`kvstore status` over a cluster: every node is asked at once, and one that does not answer is shown as such."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from kvstore.cluster.view import Relay, Target, View
from kvstore.errors import KVStoreError
from kvstore.limits import STATUS_NODES_AT_ONCE
from kvstore.server.report import DriveReport, DriveState, NodeReport, NodeWhere, WorkerReport

_SILENT: Final = "no answer"
_FENCED: Final = "fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """What a node said of itself; `failure` says why there is no report."""

    node_id: str
    grpc: str
    report: NodeReport | None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLine:
    """One target of the cluster.

    Attributes:
        state: as the view has it: joining, serving, draining, recovering or down.
        drive: how its node says the drive is, "fenced" where that is all that is wrong; "no answer" of a node that
            does not, "" of one that cannot be asked.
        hits, keys: looked up at its worker since that started.
        epoch: of its node's view; 0 where that is not known.
        grpc: address of its node, for `kvstore drain --node` and the like; "" where it is not known.
        detail: what is wrong, and what to do.
    """

    node_id: str
    id: str
    state: str
    drive: str
    data: tuple[str, ...]
    capacity_bytes: int
    used_bytes: int | None = None
    hits: int = 0
    keys: int = 0
    sent_bytes_second: float = 0.0
    received_bytes_second: float = 0.0
    mode: str = ""
    epoch: int = 0
    grpc: str = ""
    detail: str = ""


def ask_all(own: NodeReport, nodes: Sequence[NodeWhere], ask: Callable[[str], NodeReport]) -> tuple[NodeAnswer, ...]:
    """Every node of the cluster, by id; `own` has answered already.

    Args:
        ask: asks the node at a gRPC address, within a deadline. Called on several threads.
    """

    def answer_of(node: NodeWhere) -> NodeAnswer:
        if node.node_id == own.node_id:
            return NodeAnswer(node_id=own.node_id, grpc=own.grpc, report=own)
        try:
            return NodeAnswer(node_id=node.node_id, grpc=node.grpc, report=ask(node.grpc))
        except KVStoreError as error:
            return NodeAnswer(node_id=node.node_id, grpc=node.grpc, report=None, failure=str(error))

    with ThreadPoolExecutor(STATUS_NODES_AT_ONCE) as threads:
        return tuple(threads.map(answer_of, nodes))


def target_lines(view: View, answers: Sequence[NodeAnswer]) -> tuple[TargetLine, ...]:
    """All targets: those of the view, then drives that are in no view because something is wrong with them."""
    by_node = {answer.node_id: answer for answer in answers}
    drives = {
        drive.id: (answer.report, drive)
        for answer in answers
        if answer.report is not None
        for drive in answer.report.drives
        if drive.id
    }
    lines = [_line_of(target, drives, by_node.get(target.node_id)) for target in view.targets]
    known = {target.id for target in view.targets}
    for answer in answers:
        report = answer.report
        if report is not None:
            lines += [_outside(report, drive) for drive in report.drives if drive.id not in known]
    return tuple(sorted(lines, key=lambda line: (line.node_id, line.id)))


def _line_of(
    target: Target, drives: Mapping[str, tuple[NodeReport, DriveReport]], answer: NodeAnswer | None
) -> TargetLine:
    found = drives.get(target.id)
    if found is None:
        return TargetLine(
            node_id=target.node_id,
            id=target.id,
            state=target.state,
            drive=_SILENT if answer is not None and answer.report is None else "",
            data=target.data,
            capacity_bytes=target.capacity_bytes,
            grpc=answer.grpc if answer is not None else "",
            detail=answer.failure if answer is not None else "its node is not registered",
        )
    report, drive = found
    return _answered(report, drive, state=target.state, data=target.data)


def _outside(report: NodeReport, drive: DriveReport) -> TargetLine:
    return _answered(report, drive, state="", data=())


def _answered(report: NodeReport, drive: DriveReport, *, state: str, data: tuple[str, ...]) -> TargetLine:
    """Hit rate and throughput are the worker's, which is asked for keys, not for drives."""
    worker: WorkerReport | None = next((one for one in report.workers if one.rail == drive.rail), None)
    is_open = worker is not None and drive.capacity_bytes > 0
    is_fenced = bool(report.fence) and drive.state is DriveState.SERVING
    wrong = (f"{drive.path}: {drive.detail}" if drive.detail else "", f"{_FENCED}: {report.fence}" if is_fenced else "")
    return TargetLine(
        node_id=report.node_id,
        id=drive.id,
        state=state,
        drive=_FENCED if is_fenced else drive.state,
        data=data,
        capacity_bytes=drive.capacity_bytes,
        used_bytes=drive.live_bytes if is_open else None,
        hits=worker.lookup_hits if is_open and worker else 0,
        keys=worker.lookup_keys if is_open and worker else 0,
        sent_bytes_second=worker.sent_bytes_second if is_open and worker else 0.0,
        received_bytes_second=worker.received_bytes_second if is_open and worker else 0.0,
        mode=drive.mode,
        epoch=report.epoch,
        grpc=report.grpc,
        detail="; ".join(filter(None, wrong)),
    )


def relay_rows(relays: Sequence[Relay]) -> list[tuple[str, ...]]:
    """One row for each relay: node, id, state, addresses, label."""
    return [(relay.node_id, relay.id, relay.state, ", ".join(relay.data), relay.label) for relay in relays]

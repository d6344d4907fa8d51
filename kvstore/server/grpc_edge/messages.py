"""Our values as protobuf messages and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstore.cluster.view import View, decode_view, encode_view
from kvstore.limits import SECOND_NS
from kvstore.server.report import (
    Answer,
    Difference,
    Drained,
    DriveReport,
    DriveState,
    KeyAnswer,
    NamespaceAnswer,
    NamespaceReport,
    NodeReport,
    NodeState,
    NodeWhere,
    TenantReport,
    WorkerReport,
    WorkerState,
)
from kvstore.telemetry.instruments import LATENCY_BOUNDS_NS
from kvstore.telemetry.registry import Snapshot, Value
from kvstore.v1 import control_pb2 as pb

_INT64_MAX = 2**63 - 1


def view_message(view: View) -> pb.View:
    """Inverse of `view_value`."""
    targets = [
        pb.Target(id=target.id, data=target.data, weight=target.weight, state=target.state) for target in view.targets
    ]
    return pb.View(epoch=view.epoch, node_id=view.node_id, targets=targets, document=encode_view(view))


def view_value(message: pb.View) -> View:
    """Inverse of `view_message`. Raises InvalidRequest when the view makes no sense to this version."""
    return decode_view(message.document)


def stats_message(report: NodeReport) -> pb.Stats:
    """Inverse of `stats_value`."""
    return pb.Stats(
        node_id=report.node_id,
        version=report.version,
        state=report.state,
        epoch=report.epoch,
        uptime_seconds=report.uptime_seconds,
        workers=[_worker_message(worker) for worker in report.workers],
        numbers=list(_number_messages(report.numbers)),
        grpc=report.grpc,
        metrics=report.metrics,
        pid=report.pid,
        drives=[_drive_message(drive) for drive in report.drives],
        tenants=[_tenant_message(use) for use in report.tenants],
        nodes=[pb.NodeWhere(node_id=node.node_id, grpc=node.grpc, version=node.version) for node in report.nodes],
        fence=report.fence,
    )


def stats_value(message: pb.Stats) -> NodeReport:
    """Inverse of `stats_message`."""
    return NodeReport(
        node_id=message.node_id,
        version=message.version,
        state=NodeState(message.state),
        epoch=message.epoch,
        uptime_seconds=message.uptime_seconds,
        pid=message.pid,
        grpc=message.grpc,
        metrics=message.metrics,
        workers=tuple(map(_worker_value, message.workers)),
        numbers=_snapshot(message.numbers),
        drives=tuple(map(_drive_value, message.drives)),
        tenants=tuple(map(_tenant_value, message.tenants)),
        nodes=tuple(NodeWhere(node_id=node.node_id, grpc=node.grpc, version=node.version) for node in message.nodes),
        fence=message.fence,
    )


def _worker_message(worker: WorkerReport) -> pb.Worker:
    return pb.Worker(
        rail=worker.rail,
        pid=worker.pid,
        state=worker.state,
        data=worker.data,
        restarts=worker.restarts,
        detail=worker.detail,
        sent_bytes_second=worker.sent_bytes_second,
        received_bytes_second=worker.received_bytes_second,
        lookup_keys=worker.lookup_keys,
        lookup_hits=worker.lookup_hits,
    )


def _worker_value(message: pb.Worker) -> WorkerReport:
    return WorkerReport(
        rail=message.rail,
        pid=message.pid,
        state=WorkerState(message.state),
        data=tuple(message.data),
        restarts=message.restarts,
        detail=message.detail,
        sent_bytes_second=message.sent_bytes_second,
        received_bytes_second=message.received_bytes_second,
        lookup_keys=message.lookup_keys,
        lookup_hits=message.lookup_hits,
    )


def _drive_message(drive: DriveReport) -> pb.Drive:
    return pb.Drive(
        path=drive.path,
        id=drive.id,
        rail=drive.rail,
        state=drive.state,
        detail=drive.detail,
        capacity_bytes=drive.capacity_bytes,
        allocated_bytes=drive.allocated_bytes,
        live_bytes=drive.live_bytes,
        records=drive.records,
        mode=drive.mode,
    )


def _drive_value(message: pb.Drive) -> DriveReport:
    return DriveReport(
        path=message.path,
        id=message.id,
        rail=message.rail,
        state=DriveState(message.state),
        detail=message.detail,
        capacity_bytes=message.capacity_bytes,
        allocated_bytes=message.allocated_bytes,
        live_bytes=message.live_bytes,
        records=message.records,
        mode=message.mode,
    )


def _tenant_message(use: TenantReport) -> pb.TenantUse:
    return pb.TenantUse(
        name=use.name,
        quota_bytes=use.quota_bytes,
        used_bytes=use.used_bytes,
        records=use.records,
        refused_records=use.refused_records,
        weight=use.weight,
        share_bytes=use.share_bytes,
        cluster_used_bytes=use.cluster_used_bytes,
    )


def _tenant_value(message: pb.TenantUse) -> TenantReport:
    return TenantReport(
        name=message.name,
        quota_bytes=message.quota_bytes,
        used_bytes=message.used_bytes,
        records=message.records,
        refused_records=message.refused_records,
        weight=message.weight,
        share_bytes=message.share_bytes,
        cluster_used_bytes=message.cluster_used_bytes,
    )


def _number_messages(snapshot: Snapshot) -> Iterator[pb.Number]:
    for room, values in snapshot.items():
        for field, value in values.items():
            yield _number_message(f"{room}.{field}", value)


def _number_message(name: str, value: Value) -> pb.Number:
    match value:
        case str():
            return pb.Number(name=name, text=value)
        case float():
            return pb.Number(name=name, real=value)
        case int():
            return pb.Number(name=name, integer=min(value, _INT64_MAX))
        case list():
            return pb.Number(name=name, list=pb.Integers(values=value))
        case dict():
            counts, total_ns = value["counts"], value["total_ns"]
            assert isinstance(counts, list)
            assert isinstance(total_ns, int)
            histogram = pb.Histogram(counts=counts, bounds_ns=LATENCY_BOUNDS_NS, total_ns=total_ns)
            return pb.Number(name=name, histogram=histogram)


def _snapshot(numbers: Iterable[pb.Number]) -> Snapshot:
    snapshot: Snapshot = {}
    for number in numbers:
        room, _, field = number.name.partition(".")
        snapshot.setdefault(room, {})[field] = _number_value(number)
    return snapshot


def _number_value(number: pb.Number) -> Value:
    match number.WhichOneof("value"):
        case "text":
            return number.text
        case "real":
            return number.real
        case "list":
            return list(number.list.values)
        case "histogram":
            return {"counts": list(number.histogram.counts), "total_ns": number.histogram.total_ns}
    return number.integer


def namespace_message(namespace: NamespaceReport) -> pb.NamespaceInfo:
    """Inverse of `namespace_value`."""
    return pb.NamespaceInfo(
        digest=namespace.digest,
        tenant=namespace.tenant,
        model=namespace.model,
        weights=namespace.weights,
        adapter=namespace.adapter,
        adapter_revision=namespace.adapter_revision,
        layout=namespace.layout,
        layout_digest=namespace.layout_digest,
        generation=namespace.generation,
        dropped=namespace.dropped,
        manifest=namespace.manifest,
    )


def namespace_value(message: pb.NamespaceInfo) -> NamespaceReport:
    """Inverse of `namespace_message`."""
    return NamespaceReport(
        digest=message.digest,
        tenant=message.tenant,
        model=message.model,
        weights=message.weights,
        adapter=message.adapter,
        adapter_revision=message.adapter_revision,
        layout=message.layout,
        layout_digest=message.layout_digest,
        generation=message.generation,
        dropped=message.dropped,
        manifest=message.manifest,
    )


def drained_message(drained: Drained) -> pb.DrainResponse:
    """Inverse of `drained_value`."""
    return pb.DrainResponse(
        draining=drained.draining,
        done=drained.done,
        handed_on=drained.handed_on,
        left_behind=drained.left_behind,
        receivers=drained.receivers,
    )


def drained_value(message: pb.DrainResponse) -> Drained:
    """Inverse of `drained_message`."""
    return Drained(
        draining=message.draining,
        done=message.done,
        handed_on=message.handed_on,
        left_behind=message.left_behind,
        receivers=message.receivers,
    )


def answer_message(answer: Answer) -> pb.ExplainResponse:
    """Inverse of `answer_value`."""
    return pb.ExplainResponse(
        summary=answer.summary,
        namespace_known=answer.namespace_known,
        namespaces=[_namespace_answer_message(namespace) for namespace in answer.namespaces],
    )


def _namespace_answer_message(answer: NamespaceAnswer) -> pb.NamespaceExplanation:
    return pb.NamespaceExplanation(
        namespace=namespace_message(answer.namespace),
        differences=[
            pb.FieldDifference(field=item.field, asked=item.asked, stored=item.stored) for item in answer.differences
        ],
        keys=[
            pb.KeyExplanation(key=item.key, status=item.status, text=item.text, ago_ns=item.ago_ns)
            for item in answer.keys
        ],
    )


def answer_value(message: pb.ExplainResponse) -> Answer:
    """Inverse of `answer_message`."""
    return Answer(
        summary=message.summary,
        namespace_known=message.namespace_known,
        namespaces=tuple(map(_namespace_answer_value, message.namespaces)),
    )


def _namespace_answer_value(message: pb.NamespaceExplanation) -> NamespaceAnswer:
    return NamespaceAnswer(
        namespace=namespace_value(message.namespace),
        differences=tuple(
            Difference(field=item.field, asked=item.asked, stored=item.stored) for item in message.differences
        ),
        keys=tuple(
            KeyAnswer(key=item.key, status=item.status, text=item.text, ago_ns=item.ago_ns) for item in message.keys
        ),
    )


def seconds_left_ns(seconds: float | None, default_ns: int) -> int:
    """A call's time in ns: what its client gave (None: nothing), at most `default_ns`."""
    return default_ns if seconds is None else max(1, min(default_ns, int(seconds * SECOND_NS)))

"""What a node says about itself: values that gRPC, the status page and the command line share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvstore.telemetry.registry import Snapshot


class NodeState(StrEnum):
    """What the node as a whole does now."""

    RECOVERING = "recovering"
    SERVING = "serving"
    DEGRADED = "degraded"
    DRAINING = "draining"
    DOWN = "down"


class WorkerState(StrEnum):
    """What one worker does now."""

    RECOVERING = "recovering"
    SERVING = "serving"
    DRAINING = "draining"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One worker. `detail` says why it is down; `restarts` counts how often it was started again.

    Rates are of the last seconds, lookups since it started.
    """

    rail: int
    pid: int
    state: WorkerState
    data: tuple[str, ...]
    restarts: int
    detail: str
    sent_bytes_second: float = 0.0
    received_bytes_second: float = 0.0
    lookup_keys: int = 0
    lookup_hits: int = 0


class DriveState(StrEnum):
    """How one drive is."""

    SERVING = "serving"
    SUSPECT = "suspect"
    FAILED = "failed"
    READ_ONLY = "read-only"
    FOREIGN = "foreign"
    EMPTY = "empty"
    UNUSABLE = "unusable"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveReport:
    """One data folder or device of the node. `detail` says what is wrong with it and what to do; `id` is its target."""

    path: str
    id: str
    rail: int
    state: DriveState
    detail: str
    capacity_bytes: int = 0
    allocated_bytes: int = 0
    live_bytes: int = 0
    records: int = 0
    mode: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantReport:
    """What a tenant uses of the node: padded bytes of its records on the SSDs, and puts refused for its quota.

    `quota_bytes` is of the node, or in a cluster of all its nodes; then `share_bytes` of it are this node's, and
    `cluster_used_bytes` are used over all of them. Both are 0 elsewhere.
    """

    name: str
    quota_bytes: int
    used_bytes: int
    records: int
    refused_records: int
    weight: float
    share_bytes: int = 0
    cluster_used_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """A tenant's quota of its cluster, what it has there in all, and how much of the quota is this node's to give."""

    quota_bytes: int
    share_bytes: int
    cluster_used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWhere:
    """A node of the cluster, and where it can be asked: `grpc` is "host:port"."""

    node_id: str
    grpc: str
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """The node, its workers, and the sum of their metrics. `nodes` are those of its cluster, itself among them.

    `fence` says why the cluster lets the node take no writes, whatever its state; "" when it may.
    """

    node_id: str
    version: str
    state: NodeState
    epoch: int
    uptime_seconds: float
    pid: int
    grpc: str
    metrics: str
    workers: tuple[WorkerReport, ...]
    numbers: Snapshot
    drives: tuple[DriveReport, ...] = ()
    tenants: tuple[TenantReport, ...] = ()
    nodes: tuple[NodeWhere, ...] = ()
    fence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceReport:
    """A namespace that a node knows.

    `layout` is a short description for people; `dropped` says that an older generation of it was dropped.
    """

    digest: bytes
    tenant: str
    model: str
    weights: str
    adapter: str
    adapter_revision: str
    layout: str
    layout_digest: bytes
    generation: int
    dropped: bool
    manifest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespacePage:
    """Some namespaces in the order of digests; `next` is where to go on, empty at the end."""

    namespaces: tuple[NamespaceReport, ...]
    next: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """What became of a drop.

    Attributes:
        dropped: False when nobody knows such a namespace.
        unreached: Workers that were not told, and why; they hear of it when they are back.
    """

    dropped: bool
    unreached: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """One status byte per key, and the length of the hit prefix."""

    statuses: bytes
    prefix: int
    namespace_known: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Of which tenant, namespace and keys somebody asks "why was this a miss?". Empty fields are not compared."""

    tenant: str
    namespace: bytes = b""
    manifest: bytes = b""
    model: str = ""
    weights: str = ""
    adapter: str = ""
    adapter_revision: str = ""
    layout_digest: bytes = b""
    keys: bytes = b""
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """How far a node has handed on what it holds, so far.

    Attributes:
        draining: puts are refused; the others are of use only then.
        done: every worker has said that it has nothing (more) to hand on.
        handed_on: records that other nodes have been seen to hold, once for each node that is to have one.
        left_behind: records that nobody took.
        receivers: other nodes that serve; without any, nothing can be handed on.
    """

    draining: bool
    done: bool = False
    handed_on: int = 0
    left_behind: int = 0
    receivers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyAnswer:
    """Why one key is what it is. `status` is "hit" or a miss reason; `ago_ns` is 0 where the time is not known."""

    key: bytes
    status: str
    text: str
    ago_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field in which what was asked differs from what is stored."""

    field: str
    asked: str
    stored: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceAnswer:
    """One namespace of the tenant: how it differs from what was asked, and what became of the keys in it."""

    namespace: NamespaceReport
    differences: tuple[Difference, ...]
    keys: tuple[KeyAnswer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a `Question`: one sentence, then the namespaces, most alike first."""

    summary: str
    namespace_known: bool
    namespaces: tuple[NamespaceAnswer, ...]

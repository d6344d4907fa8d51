from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetViewRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchViewRequest(_message.Message):
    __slots__ = ("known_epoch",)
    KNOWN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    known_epoch: int
    def __init__(self, known_epoch: _Optional[int] = ...) -> None: ...

class Target(_message.Message):
    __slots__ = ("id", "data", "weight", "state")
    ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    id: str
    data: _containers.RepeatedScalarFieldContainer[str]
    weight: float
    state: str
    def __init__(self, id: _Optional[str] = ..., data: _Optional[_Iterable[str]] = ..., weight: _Optional[float] = ..., state: _Optional[str] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("epoch", "node_id", "targets", "document")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    node_id: str
    targets: _containers.RepeatedCompositeFieldContainer[Target]
    document: str
    def __init__(self, epoch: _Optional[int] = ..., node_id: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[Target, _Mapping]]] = ..., document: _Optional[str] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("counts", "bounds_ns", "total_ns")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    bounds_ns: _containers.RepeatedScalarFieldContainer[int]
    total_ns: int
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., bounds_ns: _Optional[_Iterable[int]] = ..., total_ns: _Optional[int] = ...) -> None: ...

class Integers(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[int]] = ...) -> None: ...

class Number(_message.Message):
    __slots__ = ("name", "integer", "real", "text", "histogram", "list")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    name: str
    integer: int
    real: float
    text: str
    histogram: Histogram
    list: Integers
    def __init__(self, name: _Optional[str] = ..., integer: _Optional[int] = ..., real: _Optional[float] = ..., text: _Optional[str] = ..., histogram: _Optional[_Union[Histogram, _Mapping]] = ..., list: _Optional[_Union[Integers, _Mapping]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("rail", "pid", "state", "data", "restarts", "detail", "sent_bytes_second", "received_bytes_second", "lookup_keys", "lookup_hits")
    RAIL_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_SECOND_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_SECOND_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_KEYS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_HITS_FIELD_NUMBER: _ClassVar[int]
    rail: int
    pid: int
    state: str
    data: _containers.RepeatedScalarFieldContainer[str]
    restarts: int
    detail: str
    sent_bytes_second: float
    received_bytes_second: float
    lookup_keys: int
    lookup_hits: int
    def __init__(self, rail: _Optional[int] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., data: _Optional[_Iterable[str]] = ..., restarts: _Optional[int] = ..., detail: _Optional[str] = ..., sent_bytes_second: _Optional[float] = ..., received_bytes_second: _Optional[float] = ..., lookup_keys: _Optional[int] = ..., lookup_hits: _Optional[int] = ...) -> None: ...

class Drive(_message.Message):
    __slots__ = ("path", "id", "rail", "state", "detail", "capacity_bytes", "allocated_bytes", "live_bytes", "records", "mode")
    PATH_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RAIL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    path: str
    id: str
    rail: int
    state: str
    detail: str
    capacity_bytes: int
    allocated_bytes: int
    live_bytes: int
    records: int
    mode: str
    def __init__(self, path: _Optional[str] = ..., id: _Optional[str] = ..., rail: _Optional[int] = ..., state: _Optional[str] = ..., detail: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., allocated_bytes: _Optional[int] = ..., live_bytes: _Optional[int] = ..., records: _Optional[int] = ..., mode: _Optional[str] = ...) -> None: ...

class TenantUse(_message.Message):
    __slots__ = ("name", "quota_bytes", "used_bytes", "records", "refused_records", "weight", "share_bytes", "cluster_used_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_RECORDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SHARE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    quota_bytes: int
    used_bytes: int
    records: int
    refused_records: int
    weight: float
    share_bytes: int
    cluster_used_bytes: int
    def __init__(self, name: _Optional[str] = ..., quota_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., records: _Optional[int] = ..., refused_records: _Optional[int] = ..., weight: _Optional[float] = ..., share_bytes: _Optional[int] = ..., cluster_used_bytes: _Optional[int] = ...) -> None: ...

class NodeWhere(_message.Message):
    __slots__ = ("node_id", "grpc", "version")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    GRPC_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    grpc: str
    version: str
    def __init__(self, node_id: _Optional[str] = ..., grpc: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class Stats(_message.Message):
    __slots__ = ("node_id", "version", "state", "epoch", "uptime_seconds", "workers", "numbers", "grpc", "metrics", "pid", "drives", "tenants", "nodes", "fence")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    GRPC_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DRIVES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    version: str
    state: str
    epoch: int
    uptime_seconds: float
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    numbers: _containers.RepeatedCompositeFieldContainer[Number]
    grpc: str
    metrics: str
    pid: int
    drives: _containers.RepeatedCompositeFieldContainer[Drive]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUse]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeWhere]
    fence: str
    def __init__(self, node_id: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., numbers: _Optional[_Iterable[_Union[Number, _Mapping]]] = ..., grpc: _Optional[str] = ..., metrics: _Optional[str] = ..., pid: _Optional[int] = ..., drives: _Optional[_Iterable[_Union[Drive, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantUse, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[NodeWhere, _Mapping]]] = ..., fence: _Optional[str] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ("tenant", "limit", "after")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    limit: int
    after: bytes
    def __init__(self, tenant: _Optional[str] = ..., limit: _Optional[int] = ..., after: _Optional[bytes] = ...) -> None: ...

class NamespaceInfo(_message.Message):
    __slots__ = ("digest", "tenant", "model", "weights", "adapter", "adapter_revision", "layout", "layout_digest", "generation", "dropped", "manifest")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_REVISION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
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
    def __init__(self, digest: _Optional[bytes] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., weights: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_revision: _Optional[str] = ..., layout: _Optional[str] = ..., layout_digest: _Optional[bytes] = ..., generation: _Optional[int] = ..., dropped: bool = ..., manifest: _Optional[bytes] = ...) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("namespaces", "next")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceInfo]
    next: bytes
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceInfo, _Mapping]]] = ..., next: _Optional[bytes] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("namespace", "keys", "count")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: bytes
    count: bool
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., count: bool = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("statuses", "prefix", "namespace_known")
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_KNOWN_FIELD_NUMBER: _ClassVar[int]
    statuses: bytes
    prefix: int
    namespace_known: bool
    def __init__(self, statuses: _Optional[bytes] = ..., prefix: _Optional[int] = ..., namespace_known: bool = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("tenant", "namespace", "manifest", "model", "weights", "adapter", "adapter_revision", "keys", "tokens", "layout_digest")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_REVISION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace: bytes
    manifest: bytes
    model: str
    weights: str
    adapter: str
    adapter_revision: str
    keys: bytes
    tokens: _containers.RepeatedScalarFieldContainer[int]
    layout_digest: bytes
    def __init__(self, tenant: _Optional[str] = ..., namespace: _Optional[bytes] = ..., manifest: _Optional[bytes] = ..., model: _Optional[str] = ..., weights: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_revision: _Optional[str] = ..., keys: _Optional[bytes] = ..., tokens: _Optional[_Iterable[int]] = ..., layout_digest: _Optional[bytes] = ...) -> None: ...

class KeyExplanation(_message.Message):
    __slots__ = ("key", "status", "text", "ago_ns")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AGO_NS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    status: str
    text: str
    ago_ns: int
    def __init__(self, key: _Optional[bytes] = ..., status: _Optional[str] = ..., text: _Optional[str] = ..., ago_ns: _Optional[int] = ...) -> None: ...

class FieldDifference(_message.Message):
    __slots__ = ("field", "asked", "stored")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    field: str
    asked: str
    stored: str
    def __init__(self, field: _Optional[str] = ..., asked: _Optional[str] = ..., stored: _Optional[str] = ...) -> None: ...

class NamespaceExplanation(_message.Message):
    __slots__ = ("namespace", "differences", "keys")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace: NamespaceInfo
    differences: _containers.RepeatedCompositeFieldContainer[FieldDifference]
    keys: _containers.RepeatedCompositeFieldContainer[KeyExplanation]
    def __init__(self, namespace: _Optional[_Union[NamespaceInfo, _Mapping]] = ..., differences: _Optional[_Iterable[_Union[FieldDifference, _Mapping]]] = ..., keys: _Optional[_Iterable[_Union[KeyExplanation, _Mapping]]] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("summary", "namespace_known", "namespaces")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_KNOWN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    summary: str
    namespace_known: bool
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceExplanation]
    def __init__(self, summary: _Optional[str] = ..., namespace_known: bool = ..., namespaces: _Optional[_Iterable[_Union[NamespaceExplanation, _Mapping]]] = ...) -> None: ...

class DropNamespaceRequest(_message.Message):
    __slots__ = ("tenant", "namespace", "manifest")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace: bytes
    manifest: bytes
    def __init__(self, tenant: _Optional[str] = ..., namespace: _Optional[bytes] = ..., manifest: _Optional[bytes] = ...) -> None: ...

class DropNamespaceResponse(_message.Message):
    __slots__ = ("dropped", "unreached")
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
    dropped: bool
    unreached: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, dropped: bool = ..., unreached: _Optional[_Iterable[str]] = ...) -> None: ...

class ScrubRequest(_message.Message):
    __slots__ = ("bytes_second",)
    BYTES_SECOND_FIELD_NUMBER: _ClassVar[int]
    bytes_second: int
    def __init__(self, bytes_second: _Optional[int] = ...) -> None: ...

class ScrubResponse(_message.Message):
    __slots__ = ("started",)
    STARTED_FIELD_NUMBER: _ClassVar[int]
    started: bool
    def __init__(self, started: bool = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("resume",)
    RESUME_FIELD_NUMBER: _ClassVar[int]
    resume: bool
    def __init__(self, resume: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("draining", "done", "handed_on", "left_behind", "receivers")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    HANDED_ON_FIELD_NUMBER: _ClassVar[int]
    LEFT_BEHIND_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    done: bool
    handed_on: int
    left_behind: int
    receivers: int
    def __init__(self, draining: bool = ..., done: bool = ..., handed_on: _Optional[int] = ..., left_behind: _Optional[int] = ..., receivers: _Optional[int] = ...) -> None: ...

class ReloadTenantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadTenantsResponse(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: int
    def __init__(self, tenants: _Optional[int] = ...) -> None: ...

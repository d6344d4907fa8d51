"""The numbers of each room. Increment them in place: `metrics.lookup_keys += n`, `metrics.get_ns.observe(took_ns)`.

One instance belongs to one thread. Lists are indexed with the enum named beside them, e.g.
`metrics.sent_bytes[flow] += n` or `metrics.misses[reason] += 1` (index 0 of the reason lists is never used).
"""

# ruff: noqa: RUF009 -- the calls in the dataclasses are `dataclasses.field` under names that say what a number is
from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvstore import errors
from kvstore.limits import SECOND_NS
from kvstore.telemetry.instruments import (
    Histogram,
    Merge,
    counter,
    counter_by,
    gauge,
    gauge_by,
    info,
    latency,
)
from kvstore.types.flow import FlowClass
from kvstore.types.results import MissReason, RefusedReason


class Verb(IntEnum):
    """Kinds of calls that are counted apart; the index into `DataplaneMetrics.calls`."""

    MATCH = 0
    GET = 1
    PUT = 2
    WRITER = 3
    WAIT = 4
    DELETE = 5
    DROP = 6
    PREFETCH = 7
    OTHER = 8


class PinAge(IntEnum):
    """Buckets of `EngineMetrics.pins`."""

    UNDER_10_S = 0
    UNDER_60_S = 1
    UNDER_300_S = 2
    OLDER = 3


class DeniedKind(IntEnum):
    """Kinds of `DataplaneMetrics.denied`."""

    NO_TOKEN = 0
    WRONG_TOKEN = 1
    REVOKED = 2
    SCOPE = 3
    FOREIGN_NAMESPACE = 4


class PullEnd(IntEnum):
    """How a record ended that another node was said to have: `DataplaneMetrics.pulls`."""

    PULLED = 0
    HELD = 1
    ABSENT = 2
    DELETED = 3
    REFUSED = 4
    FAILED = 5
    GIVEN_UP = 6


class DeviceFault(IntEnum):
    """Kinds of `DeviceMetrics.errors`."""

    EIO = 0
    ENOSPC = 1
    OTHER = 2


ERROR_KINDS: Final[tuple[type[errors.KVStoreError], ...]] = (
    errors.InvalidRequest,
    errors.Denied,
    errors.UnknownNamespace,
    errors.Overloaded,
    errors.Unavailable,
    errors.DeadlineExceeded,
    errors.StaleView,
    errors.LeaseExpired,
    errors.OutcomeUnknown,
    errors.ChecksumMismatch,
    errors.FormatUnsupported,
    errors.NoSpace,
    errors.Closed,
    errors.Internal,
)
"""The order of the `errors` lists."""

_ERROR_INDEX: Final = {kind: index for index, kind in enumerate(ERROR_KINDS)}


def error_index(error: BaseException) -> int:
    """Where an error counts in an `errors` list: its own class, else the nearest ancestor there, else Internal."""
    for ancestor in type(error).__mro__:
        if ancestor in _ERROR_INDEX:
            return _ERROR_INDEX[ancestor]
    return _ERROR_INDEX[errors.Internal]


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


_FLOWS: Final = [flow.name.lower() for flow in FlowClass]
_ERRORS: Final = [_snake(kind.__name__) for kind in ERROR_KINDS]
_NS: Final = 1 / SECOND_NS


def _by_code(codes: type[IntEnum]) -> list[str]:
    """Names so that the code itself is the index; codes that do not exist are blank and not rendered."""
    names = [""] * (max(codes) + 1)
    for member in codes:
        names[member] = member.name.lower()
    return names


_MISSES: Final = _by_code(MissReason)
_REFUSALS: Final = _by_code(RefusedReason)
_VERBS: Final = [verb.name.lower() for verb in Verb]
_PIN_AGES: Final = [age.name.lower() for age in PinAge]
_DENIALS: Final = [kind.name.lower() for kind in DeniedKind]
_PULLS: Final = [end.name.lower() for end in PullEnd]
_FAULTS: Final = [fault.name.lower() for fault in DeviceFault]


@dataclass(slots=True)
class EngineMetrics:
    """The store of one drive."""

    # space
    capacity_bytes: int = gauge(
        "kvstore_capacity_bytes", "Bytes the drive may use, lowered while the file system is full"
    )
    allocated_bytes: int = gauge("kvstore_allocated_bytes", "Bytes in use on the drive, as du counts them")
    live_bytes: int = gauge("kvstore_live_bytes", "Padded bytes of all valid records")
    records: int = gauge("kvstore_records", "Valid records")
    index_bytes: int = gauge("kvstore_index_bytes", "Memory of the index")
    namespaces: int = gauge("kvstore_namespaces", "Namespaces known")
    segments_used: int = gauge("kvstore_segments", "Segments of the drive", state="used")
    segments_free: int = gauge("kvstore_segments", "Segments of the drive", state="free")
    segments_bad: int = gauge("kvstore_segments", "Segments of the drive", state="bad")
    # cache and staging memory
    cache_hits: int = counter("kvstore_cache_records", "Records asked of the RAM cache", result="hit")
    cache_misses: int = counter("kvstore_cache_records", "Records asked of the RAM cache", result="miss")
    cache_bytes: int = gauge("kvstore_cache_bytes", "Bytes in the RAM cache")
    cache_capacity_bytes: int = gauge("kvstore_cache_capacity_bytes", "Bytes the RAM cache may use")
    cache_evictions: int = counter("kvstore_cache_evictions", "Records dropped from the RAM cache")
    staging_bytes: int = gauge("kvstore_staging_bytes", "Arena memory of transfers in progress")
    grants_waiting: int = gauge("kvstore_grants_waiting", "Puts that wait for memory")
    # reads
    reads_waiting: int = gauge("kvstore_reads_waiting", "Reads that wait for memory")
    read_records: int = counter("kvstore_read_records", "Records read from the drive")
    read_shared: int = counter("kvstore_read_shared", "Readers that joined a read in progress of the same record")
    read_ios: int = counter("kvstore_read_ios", "Device reads for records, after joining neighbours")
    # writes
    stored_records: int = counter("kvstore_stored_records", "Records made durable")
    stored_bytes: int = counter("kvstore_stored_bytes", "Payload bytes of records made durable")
    exists_records: int = counter("kvstore_exists_records", "Puts of records that were there already")
    differing_records: int = counter(
        "kvstore_differing_records",
        "Puts seen to differ from what is stored under the key: in length, or by the CRC table of their offer",
    )
    refusals: list[int] = counter_by("kvstore_refused_records", "Puts refused", label="reason", values=_REFUSALS)
    orphan_puts: int = counter("kvstore_orphan_puts", "Unfinished puts whose owner died or ran out of time")
    open_writers: int = gauge("kvstore_open_writers", "Layer-wise writers in progress")
    written_bytes: int = counter("kvstore_engine_written_bytes", "Bytes written to the drive, by cause", cause="put")
    reinserted_bytes: int = counter(
        "kvstore_engine_written_bytes", "Bytes written to the drive, by cause", cause="reinsert"
    )
    log_bytes: int = counter("kvstore_engine_written_bytes", "Bytes written to the drive, by cause", cause="log")
    write_amplification: float = gauge(
        "kvstore_write_amplification", "Bytes written over bytes put, since the start", merge=Merge.MAX
    )
    written_bytes_day: int = gauge("kvstore_written_bytes_day", "Bytes written in the last 24 hours")
    endurance_bytes_day: int = gauge("kvstore_endurance_bytes_day", "Bytes a day the drive is rated for; 0 is not set")
    # eviction and pins
    eviction_age_ns: int = gauge(
        "kvstore_eviction_age_seconds", "Time since the last access of what is evicted now", merge=Merge.MIN, scale=_NS
    )
    evicted_records: int = counter("kvstore_evicted_records", "Records evicted")
    evicted_bytes: int = counter("kvstore_evicted_bytes", "Padded bytes of records evicted")
    evicted_segments: int = counter("kvstore_evicted_segments", "Segments evicted")
    erase_retries: int = counter(
        "kvstore_erase_retries", "Times that a segment which the drive would not erase was tried again"
    )
    reinserted_records: int = counter("kvstore_reinserted_records", "Records moved out of an evicted segment")
    pins: list[int] = gauge_by("kvstore_pins", "Pins held, by age", label="age", values=_PIN_AGES)
    pinned_bytes: int = gauge("kvstore_pinned_bytes", "Bytes held by pins")
    pins_refused: int = counter("kvstore_pins_refused", "Matches that were answered without a pin, over the bound")
    # integrity
    checksum_errors_read: int = counter("kvstore_checksum_errors", "Checksum mismatches, by place", place="drive")
    checksum_errors_received: int = counter(
        "kvstore_checksum_errors", "Checksum mismatches, by place", place="received"
    )
    checksum_errors_reported: int = counter("kvstore_checksum_errors", "Checksum mismatches, by place", place="client")
    checksum_errors_memory: int = counter("kvstore_checksum_errors", "Checksum mismatches, by place", place="memory")
    key_collisions: int = counter("kvstore_key_collisions", "Index hits whose full key differed: answered as a miss")
    quarantined_records: int = counter("kvstore_quarantined_records", "Records taken out for a bad checksum")
    scrubbed_records: int = counter("kvstore_scrubbed_records", "Records verified by scrub")
    scrubbed_bytes: int = counter("kvstore_scrubbed_bytes", "Bytes verified by scrub")
    scrub_errors: int = counter("kvstore_scrub_errors", "Records that scrub found bad")
    scrub_rounds: int = counter("kvstore_scrub_rounds", "Times that scrub went through the whole drive")
    scrub_progress: float = gauge(
        "kvstore_scrub_progress_ratio", "Share of the current scrub round that is done", merge=Merge.MIN
    )
    # recovery
    recovery_ns: int = gauge("kvstore_recovery_seconds", "How long the last start took", merge=Merge.MAX, scale=_NS)
    recovered_records: int = gauge("kvstore_recovered_records", "Records found by the last start")
    recovery_lost_records: int = gauge(
        "kvstore_recovery_lost_records", "Records of unknown namespaces, and those the index had no room for"
    )
    recovery_bad_structures: int = gauge(
        "kvstore_recovery_bad_structures",
        "Superblocks, log and index blocks, segment headers, footers and manifests that the last start found damaged",
    )


@dataclass(slots=True)
class DeviceMetrics:
    """One drive and its dispatch queue."""

    mode: str = info("kvstore_device_mode", "How bytes are moved: uring, threads or memory", label="mode")
    mode_reason: str = info("kvstore_device_mode", "How bytes are moved: uring, threads or memory", label="reason")
    direct_io: int = gauge("kvstore_device_direct_io", "1 when the page cache is bypassed", merge=Merge.MIN)
    healthy: int = gauge(
        "kvstore_device_healthy",
        "0 when the drive takes no puts: it failed too often to be trusted, its log cannot be written, or its file was "
        "removed",
        merge=Merge.MIN,
    )
    queue_depth: int = gauge("kvstore_device_queue_depth", "Operations the drive may have in flight")
    in_flight: int = gauge("kvstore_device_in_flight", "Operations in flight")
    queued: int = gauge("kvstore_device_queued", "Operations that wait in the dispatch queue")
    reads: int = counter("kvstore_device_ops", "Operations completed", op="read")
    writes: int = counter("kvstore_device_ops", "Operations completed", op="write")
    syncs: int = counter("kvstore_device_ops", "Operations completed", op="sync")
    read_bytes: int = counter("kvstore_device_bytes", "Bytes moved", op="read")
    written_bytes: int = counter("kvstore_device_bytes", "Bytes moved", op="write")
    flow_bytes: list[int] = counter_by("kvstore_device_flow_bytes", "Bytes moved, by flow", label="flow", values=_FLOWS)
    errors: list[int] = counter_by("kvstore_device_errors", "Operations that failed", label="kind", values=_FAULTS)
    retries: int = counter("kvstore_device_retries", "Operations submitted again: short transfers, EINTR, EAGAIN")
    read_ns: Histogram = latency("kvstore_device_seconds", "Time from submission to completion", op="read")
    write_ns: Histogram = latency("kvstore_device_seconds", "Time from submission to completion", op="write")
    sync_ns: Histogram = latency("kvstore_device_seconds", "Time from submission to completion", op="sync")


@dataclass(slots=True)
class DataplaneMetrics:
    """What clients ask of a worker. Hits are counted on lookups only; what a get failed to load is counted apart."""

    connections: int = gauge("kvstore_connections", "Client connections open")
    shared_connections: int = gauge(
        "kvstore_connections_shared", "Of them those over a Unix socket, that can share memory"
    )
    rdma_connections: int = gauge("kvstore_connections_rdma", "Of them those on which RDMA was agreed on")
    shared_bytes: int = gauge("kvstore_shared_memory_bytes", "Memory of clients that is mapped here")
    shared_from_drive: int = counter(
        "kvstore_shared_moved_bytes", "Payload that went by memory of clients, by who moved it", way="from_drive"
    )
    shared_copied_in: int = counter(
        "kvstore_shared_moved_bytes", "Payload that went by memory of clients, by who moved it", way="copied_in"
    )
    shared_copied_out: int = counter(
        "kvstore_shared_moved_bytes", "Payload that went by memory of clients, by who moved it", way="copied_out"
    )
    accepted: int = counter("kvstore_connections_accepted", "Client connections accepted")
    rejected: int = counter("kvstore_connections_rejected", "Client connections refused over the bound")
    calls: list[int] = counter_by("kvstore_calls", "Calls by verb", label="verb", values=_VERBS)
    calls_active: int = gauge("kvstore_calls_active", "Calls in progress")
    lookup_keys: int = counter("kvstore_lookup_keys", "Keys asked by lookups that count")
    lookup_hits: int = counter("kvstore_lookup_hits", "Keys of those lookups that were there")
    lookups: int = counter("kvstore_lookups", "Lookups")
    loaded_records: int = counter("kvstore_load_records", "Records of gets, sent whole or not", result="loaded")
    failed_records: int = counter("kvstore_load_records", "Records of gets, sent whole or not", result="failed")
    misses: list[int] = counter_by(
        "kvstore_load_misses", "Records of gets that were not sent", label="reason", values=_MISSES
    )
    received_bytes: list[int] = counter_by("kvstore_received_bytes", "Payload received", label="flow", values=_FLOWS)
    sent_bytes: list[int] = counter_by("kvstore_sent_bytes", "Payload sent", label="flow", values=_FLOWS)
    errors: list[int] = counter_by("kvstore_errors", "Calls answered with an error", label="kind", values=_ERRORS)
    denied: list[int] = counter_by("kvstore_denied", "What tokens did not allow", label="kind", values=_DENIALS)
    pulls: list[int] = counter_by(
        "kvstore_pull_records", "Records to be copied from other nodes, by how that ended", label="end", values=_PULLS
    )
    pulled_bytes: int = counter("kvstore_pull_bytes", "Payload received from other nodes for copies")
    pull_queue: int = gauge("kvstore_pull_queue", "Records that wait to be copied to this node")
    protocol_errors: int = counter("kvstore_protocol_errors", "Malformed, oversized or unknown frames")
    deadlines: int = counter("kvstore_deadlines_exceeded", "Calls that ended at their deadline")
    cancelled: int = counter("kvstore_calls_cancelled", "Calls that their client cancelled or left")
    match_ns: Histogram = latency("kvstore_call_seconds", "Time from request to last byte queued", verb="match")
    get_ns: Histogram = latency("kvstore_call_seconds", "Time from request to last byte queued", verb="get")
    put_ns: Histogram = latency("kvstore_call_seconds", "Time from request to last byte queued", verb="put")


@dataclass(slots=True)
class RdmaMetrics:
    """RDMA of a worker: whether it is there, and what went by it."""

    choice: str = info("kvstore_rdma_choice", "How payload travels, and why", label="choice")
    fallbacks: int = counter("kvstore_rdma_fallbacks", "Starts that took TCP because RDMA could not be had")
    pairs: int = gauge("kvstore_rdma_pairs", "Queue pairs that exist")
    pairs_broken: int = counter("kvstore_rdma_pairs_broken", "Queue pairs that ended by themselves")
    mtu_bytes: int = gauge(
        "kvstore_rdma_path_mtu_bytes", "Path MTU of the queue pair that was made last", merge=Merge.MAX
    )
    pairs_closing: int = gauge("kvstore_rdma_pairs_closing", "Queue pairs that the device has not let go of yet")
    placed_bytes: int = counter("kvstore_rdma_placed_bytes", "Payload written into clients' memory")
    pulled_bytes: int = counter("kvstore_rdma_pulled_bytes", "Payload read out of clients' memory")
    fallback_bytes: int = counter(
        "kvstore_rdma_fallback_bytes", "Payload of such calls that went in frames all the same"
    )


@dataclass(slots=True)
class ProcessMetrics:
    """A worker as the kernel sees it; filled by `kvstore.telemetry.process.measure`."""

    cpu_ns: int = gauge("kvstore_worker_cpu_seconds", "CPU time used", scale=_NS)
    resident_bytes: int = gauge("kvstore_worker_resident_bytes", "Resident memory")
    open_files: int = gauge("kvstore_worker_open_files", "Open file descriptors")
    uptime_ns: int = gauge("kvstore_worker_uptime_seconds", "Time since the worker started", merge=Merge.MIN, scale=_NS)


@dataclass(slots=True)
class SupervisorMetrics:
    """The supervisor: health, workers, gRPC."""

    serving: int = gauge("kvstore_serving", "1 when all workers serve", merge=Merge.MIN)
    epoch: int = gauge("kvstore_view_epoch", "Epoch of the view", merge=Merge.MAX)
    workers: int = gauge("kvstore_workers", "Workers that serve")
    worker_restarts: int = counter("kvstore_worker_restarts", "Workers started again after they died")
    grpc_calls: int = counter("kvstore_grpc_calls", "gRPC calls answered")
    grpc_errors: list[int] = counter_by("kvstore_grpc_errors", "gRPC calls that failed", label="kind", values=_ERRORS)
    edge_connections: int = gauge("kvstore_edge_connections", "Connections on the gRPC port")
    edge_wire_calls: int = counter("kvstore_edge_wire_calls", "HELLO and VIEW frames answered on the gRPC port")


ROOMS: Final[dict[str, type]] = {
    "engine": EngineMetrics,
    "device": DeviceMetrics,
    "dataplane": DataplaneMetrics,
    "rdma": RdmaMetrics,
    "process": ProcessMetrics,
    "supervisor": SupervisorMetrics,
}
"""The rooms that a node shows, by the name they have in a snapshot."""

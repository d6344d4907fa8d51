"""The few lines that tell a person how a node is: the same for the status page and `kvstore status`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.limits import SECOND_NS, KiB
from kvstore.server.report import DriveState, NodeReport, NodeState
from kvstore.telemetry.registry import Snapshot, number, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One fact: `name`, and its value in words."""

    name: str
    value: str


def summary_lines(report: NodeReport) -> Iterator[Line]:
    """What the node is, holds and does, most important first."""
    numbers = report.numbers
    if report.fence:
        yield Line(name="state", value=f"fenced, up for {words_of_seconds(report.uptime_seconds)}")
        yield Line(name="fenced", value=f"refuses puts, deletes and drops, serves reads: {report.fence}")
    else:
        yield Line(name="state", value=f"{report.state} for {words_of_seconds(report.uptime_seconds)}")
    yield Line(name="node", value=f"{report.node_id}, kvstore {report.version}, pid {report.pid}, view {report.epoch}")
    yield Line(name="addresses", value=f"gRPC {report.grpc}, metrics {report.metrics}")
    if not numbers:
        yield from _own_lines(report)  # all that a tenant is told
        return
    yield Line(name="device", value=_device(report))
    wrong = [drive for drive in report.drives if drive.state is not DriveState.SERVING]
    for drive in wrong:
        yield Line(name=f"drive {drive.path}", value=f"{drive.state}: {drive.detail}")
    if "engine" not in numbers:
        # zeros would read as facts: as if everything were gone
        yield Line(name="stored", value=_words_of_unknown(report))
        return
    yield Line(name="stored", value=_stored(report))
    yield Line(name="RAM cache", value=_cache(report))
    yield Line(name="lookups", value=_lookups(report))
    yield Line(
        name="traffic", value=f"{_bytes(numbers, 'sent_bytes')} sent, {_bytes(numbers, 'received_bytes')} received"
    )
    yield Line(name="transport", value=_transport(report))
    yield Line(name="shared memory", value=_shared_memory(numbers))
    yield Line(name="eviction", value=_eviction(report))
    yield Line(name="writes", value=_writes(report))
    yield Line(name="integrity", value=_integrity(report))
    yield Line(name="connections", value=_connections(numbers))


def _own_lines(report: NodeReport) -> Iterator[Line]:
    for use in report.tenants:
        quota = f" of {words_of_bytes(use.quota_bytes)}" if use.quota_bytes else ""
        used = f"{words_of_bytes(use.used_bytes)}{quota} used"
        if use.share_bytes:
            used = f"{words_of_bytes(use.cluster_used_bytes)}{quota} used, {words_of_bytes(use.used_bytes)} of it here"
        yield Line(name=f"tenant {use.name}", value=f"{used}, {words_of_count(use.records, 'record')}")


def words_of_bytes(size_bytes: float) -> str:
    """A size for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < KiB:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= KiB
    return f"{size_bytes:.1f} TiB"


def words_of_seconds(seconds: float) -> str:
    """A duration for people, in the largest unit that fits: "3.5 h"."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def _bytes(numbers: Snapshot, field: str) -> str:
    return words_of_bytes(number(numbers, "dataplane", field))


def words_of_count(count: float, name: str) -> str:
    """So many of something: "1 record", "2 records"."""
    return f"{count:.0f} {name}" if count == 1 else f"{count:.0f} {name}s"


def _words_of_unknown(report: NodeReport) -> str:
    if report.state is NodeState.RECOVERING:
        return "recovering: the drives are being read"
    return "not known (no worker answers)"


def _device(report: NodeReport) -> str:
    mode = text(report.numbers, "device", "mode")
    if not mode:
        return _words_of_unknown(report)
    direct = "direct I/O" if number(report.numbers, "device", "direct_io") else "through the page cache"
    return f"{mode}, {direct}: {text(report.numbers, 'device', 'mode_reason')}"


def _stored(report: NodeReport) -> str:
    live, allocated, capacity = (
        words_of_bytes(number(report.numbers, "engine", name))
        for name in ("live_bytes", "allocated_bytes", "capacity_bytes")
    )
    records = words_of_count(number(report.numbers, "engine", "records"), "record")
    return f"{records}, {live} live, {allocated} allocated of {capacity}"


def _cache(report: NodeReport) -> str:
    capacity = number(report.numbers, "engine", "cache_capacity_bytes")
    if not capacity:
        return "off"
    used = words_of_bytes(number(report.numbers, "engine", "cache_bytes"))
    hits, misses = (number(report.numbers, "engine", name) for name in ("cache_hits", "cache_misses"))
    return f"{used} of {words_of_bytes(capacity)}, {_share(hits, hits + misses)} of reads"


def _lookups(report: NodeReport) -> str:
    asked, hits = (number(report.numbers, "dataplane", name) for name in ("lookup_keys", "lookup_hits"))
    failed = number(report.numbers, "dataplane", "failed_records")
    return f"{hits:.0f} hits of {asked:.0f} keys asked ({_share(hits, asked)}), {failed:.0f} failed loads"


def _transport(report: NodeReport) -> str:
    choice = text(report.numbers, "rdma", "choice")
    if not choice.startswith("RDMA"):
        return choice or _words_of_unknown(report)
    placed, pulled, framed = (
        words_of_bytes(number(report.numbers, "rdma", name))
        for name in ("placed_bytes", "pulled_bytes", "fallback_bytes")
    )
    return f"{choice}; {placed} placed, {pulled} pulled, {framed} in frames instead"


def _shared_memory(numbers: Snapshot) -> str:
    mapped, from_drive, copied_in, copied_out = (
        _bytes(numbers, name) for name in ("shared_bytes", "shared_from_drive", "shared_copied_in", "shared_copied_out")
    )
    return f"{mapped} of clients; {from_drive} read into it by drives, {copied_in} copied in, {copied_out} out"


def _connections(numbers: Snapshot) -> str:
    total, shared, rdma = (
        number(numbers, "dataplane", name) for name in ("connections", "shared_connections", "rdma_connections")
    )
    return f"{total:.0f}: {max(total - shared - rdma, 0):.0f} by TCP, {shared:.0f} by shared memory, {rdma:.0f} by RDMA"


def _eviction(report: NodeReport) -> str:
    evicted = number(report.numbers, "engine", "evicted_records")
    age = number(report.numbers, "engine", "eviction_age_ns") / SECOND_NS
    return f"{words_of_count(evicted, 'record')} evicted" + (f", now of age {words_of_seconds(age)}" if age else "")


def _writes(report: NodeReport) -> str:
    amplification = number(report.numbers, "engine", "write_amplification")
    day = number(report.numbers, "engine", "written_bytes_day")
    endurance = number(report.numbers, "engine", "endurance_bytes_day")
    rated = f", {_share(day, endurance)} of the rated endurance" if endurance else ""
    return f"{words_of_bytes(day)} in the last day{rated}, write amplification {amplification:.2f}"


def _integrity(report: NodeReport) -> str:
    quarantined, scrubbed, bad = (
        number(report.numbers, "engine", name) for name in ("quarantined_records", "scrubbed_records", "scrub_errors")
    )
    progress = number(report.numbers, "engine", "scrub_progress")
    scrub = f"{scrubbed:.0f} scrubbed since the start ({100 * progress:.0f} % of this round), {bad:.0f} found bad"
    return f"{words_of_count(quarantined, 'record')} quarantined, {scrub}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"

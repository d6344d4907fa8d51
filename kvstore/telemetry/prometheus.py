"""Snapshots in the words of Prometheus: the one file that imports prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from kvstore.limits import SECOND_NS
from kvstore.telemetry.instruments import LATENCY_BOUNDS_NS, Instrument, Kind, instruments_of
from kvstore.telemetry.metrics import ROOMS
from kvstore.telemetry.registry import RoomSnapshot, Value
from kvstore.telemetry.tenants import TenantNumbers, bounded

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_FAMILIES: Final = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


def render(snapshot: Mapping[str, RoomSnapshot], tenants: Sequence[TenantNumbers] = ()) -> bytes:
    """The text exposition of one snapshot, of type `CONTENT_TYPE`. Rooms that are missing are left out."""
    registry = CollectorRegistry()
    registry.register(_Collector(snapshot))
    registry.register(_TenantCollector(tenants))
    return generate_latest(registry)


class _TenantCollector:
    def __init__(self, tenants: Sequence[TenantNumbers]) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        used = GaugeMetricFamily("kvstore_tenant_used_bytes", "Padded bytes of a tenant's records", labels=["tenant"])
        may_have = "What it may have here; 0 is no quota"
        quota = GaugeMetricFamily("kvstore_tenant_quota_bytes", may_have, labels=["tenant"])
        refused = CounterMetricFamily("kvstore_tenant_refused_records", "Puts over the quota", labels=["tenant"])
        for tenant in bounded(self._tenants):
            used.add_metric([tenant.name], tenant.used_bytes)
            quota.add_metric([tenant.name], tenant.quota_bytes)
            refused.add_metric([tenant.name], tenant.refused_records)
        yield from (used, quota, refused)


class _Collector:
    def __init__(self, snapshot: Mapping[str, RoomSnapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        infos: dict[str, dict[str, str]] = {}
        for room, values in self._snapshot.items():
            for field_name, instrument in instruments_of(ROOMS[room]).items():
                value = values.get(field_name)
                if value is None:
                    continue
                if instrument.kind is Kind.INFO:
                    infos.setdefault(instrument.family, {})[instrument.index_label] = str(value)
                else:
                    _add(families, instrument, value)
        yield from families.values()
        for family, labels in infos.items():
            yield InfoMetricFamily(family, "Constant 1; the labels say what is chosen, and why", value=labels)


def _add(families: dict[str, Metric], instrument: Instrument, value: Value) -> None:
    family = families.get(instrument.family)
    names = [instrument.index_label] if instrument.index_label else [name for name, _ in instrument.labels]
    if family is None:
        family = _FAMILIES[instrument.kind](instrument.family, instrument.help, labels=names)
        families[instrument.family] = family
    fixed = [label for _, label in instrument.labels]
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, dict)
        _add_histogram(family, fixed, value)
    elif isinstance(family, CounterMetricFamily | GaugeMetricFamily):
        if isinstance(value, list):
            for label, count in zip(instrument.index_values, value, strict=True):
                if label:
                    family.add_metric([label], count * instrument.scale)
        else:
            assert isinstance(value, int | float)
            family.add_metric(fixed, value * instrument.scale)


def _add_histogram(family: HistogramMetricFamily, labels: list[str], value: dict[str, int | list[int]]) -> None:
    counts, total_ns = value["counts"], value["total_ns"]
    assert isinstance(counts, list)
    assert isinstance(total_ns, int)
    below = 0
    buckets: list[tuple[str, float]] = []
    for bound_ns, count in zip((*LATENCY_BOUNDS_NS, None), counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound_ns is None else str(bound_ns / SECOND_NS), below))
    family.add_metric(labels, buckets, sum_value=total_ns / SECOND_NS)

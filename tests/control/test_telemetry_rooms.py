"""Metrics: what a snapshot holds, how processes are summed, and what Prometheus reads."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore import errors
from kvstore.limits import MS_NS, SERIES_MAX
from kvstore.telemetry import process, prometheus
from kvstore.telemetry.instruments import LATENCY_BOUNDS_NS, Histogram, Kind, instruments_of
from kvstore.telemetry.metrics import (
    ERROR_KINDS,
    ROOMS,
    DataplaneMetrics,
    DeviceFault,
    DeviceMetrics,
    EngineMetrics,
    PinAge,
    ProcessMetrics,
    Verb,
    error_index,
)
from kvstore.telemetry.registry import Registry, merge, named, number, text
from kvstore.types.flow import FlowClass
from kvstore.types.results import MissReason, RefusedReason
from kvstore.wire.codec import pack_plain, unpack_plain


def rendered(*rooms: object) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples of the text that a scraper would read: (name, labels) to value."""
    registry = Registry()
    for room in rooms:
        registry.add(room)
    page = prometheus.render(registry.snapshot()).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
def test_every_field_of_a_room_has_a_meaning(room: type) -> None:
    meanings = instruments_of(room)
    assert meanings.keys() == {declared.name for declared in fields(room)}
    for name, meaning in meanings.items():
        assert re.fullmatch(r"kvstore_[a-z_]+[a-z]", meaning.family), name
        assert meaning.help, name
        assert meaning.kind is not Kind.HISTOGRAM or meaning.family.endswith("_seconds"), name


def test_one_family_has_one_kind_one_help_and_one_set_of_labels() -> None:
    seen: dict[str, tuple[object, ...]] = {}
    for room in ROOMS.values():
        for meaning in instruments_of(room).values():
            if meaning.kind is Kind.INFO:
                continue
            shape = (meaning.kind, meaning.help, [name for name, _ in meaning.labels], meaning.index_label)
            assert seen.setdefault(meaning.family, shape) == shape


def test_all_rooms_together_stay_below_the_bound_of_series() -> None:
    samples = rendered(*(room() for room in ROOMS.values()))
    assert 200 < len(samples) < SERIES_MAX


def test_lists_are_indexed_by_their_enum() -> None:
    engine, plane, device = EngineMetrics(), DataplaneMetrics(), DeviceMetrics()
    engine.refusals[RefusedReason.DRAINING] += 2
    engine.pins[PinAge.OLDER] = 3
    plane.misses[MissReason.EVICTED] += 4
    plane.calls[Verb.PREFETCH] += 5
    plane.sent_bytes[FlowClass.WRITEBACK] += 6
    device.errors[DeviceFault.ENOSPC] += 7
    samples = rendered(engine, plane, device)
    assert samples["kvstore_refused_records_total", (("reason", "draining"),)] == 2
    assert samples["kvstore_pins", (("age", "older"),)] == 3
    assert samples["kvstore_load_misses_total", (("reason", "evicted"),)] == 4
    assert samples["kvstore_calls_total", (("verb", "prefetch"),)] == 5
    assert samples["kvstore_sent_bytes_total", (("flow", "writeback"),)] == 6
    assert samples["kvstore_device_errors_total", (("kind", "enospc"),)] == 7


def test_lookups_and_failed_loads_are_counted_apart() -> None:
    plane = DataplaneMetrics(lookup_keys=40, lookup_hits=20, lookups=10, loaded_records=19, failed_records=1)
    samples = rendered(plane)
    assert samples["kvstore_lookup_keys_total", ()] == 40
    assert samples["kvstore_lookup_hits_total", ()] == 20
    assert samples["kvstore_load_records_total", (("result", "failed"),)] == 1


def test_a_histogram_is_cumulative_in_seconds() -> None:
    plane = DataplaneMetrics()
    for duration_ns in (1, MS_NS, MS_NS + 1, 10**12):
        plane.get_ns.observe(duration_ns)
    samples = rendered(plane)
    verb = ("verb", "get")
    assert samples["kvstore_call_seconds_bucket", (("le", "0.001"), verb)] == 2
    assert samples["kvstore_call_seconds_bucket", (("le", "0.005"), verb)] == 3
    assert samples["kvstore_call_seconds_bucket", (("le", "+Inf"), verb)] == 4
    assert samples["kvstore_call_seconds_count", (verb,)] == 4
    assert samples["kvstore_call_seconds_sum", (verb,)] == pytest.approx(1000.002, abs=1e-3)


def test_bounds_of_latency_ascend() -> None:
    assert list(LATENCY_BOUNDS_NS) == sorted(set(LATENCY_BOUNDS_NS))
    assert len(Histogram().counts) == len(LATENCY_BOUNDS_NS) + 1


def test_the_device_mode_is_shown_with_its_reason() -> None:
    samples = rendered(DeviceMetrics(mode="threads", mode_reason='io_uring_setup: EPERM, so "threads"', direct_io=1))
    labels = (("mode", "threads"), ("reason", 'io_uring_setup: EPERM, so "threads"'))
    assert samples["kvstore_device_mode_info", labels] == 1
    assert samples["kvstore_device_direct_io", ()] == 1


def test_processes_are_summed_by_the_meaning_of_each_field() -> None:
    first, second = Registry(), Registry()
    first.add(EngineMetrics(live_bytes=1, eviction_age_ns=5, write_amplification=1.1, refusals=[1] * 42))
    second.add(EngineMetrics(live_bytes=2, eviction_age_ns=3, write_amplification=1.2, refusals=[2] * 42))
    second.add(DeviceMetrics(mode="uring"))
    second.add(DeviceMetrics(mode="threads", direct_io=1))
    total = merge([first.snapshot(), second.snapshot()])
    assert number(total, "engine", "live_bytes") == 3
    assert number(total, "engine", "eviction_age_ns") == 3
    assert number(total, "engine", "write_amplification") == 1.2
    assert total["engine"]["refusals"] == [3] * 42
    assert text(total, "device", "mode") == "uring, threads"
    assert number(total, "device", "direct_io") == 0
    assert number(total, "nothing", "here") == 0


def test_a_snapshot_is_a_copy_and_travels_by_msgpack() -> None:
    registry, plane = Registry(), DataplaneMetrics()
    registry.add(plane)
    snapshot = registry.snapshot()
    plane.calls[Verb.GET] += 1
    plane.get_ns.observe(1)
    assert number(snapshot, "dataplane", "calls") == 0
    assert unpack_plain(pack_plain(registry.snapshot()), what="snapshot") == registry.snapshot()
    assert snapshot != registry.snapshot()


def test_for_programs_each_count_has_its_name() -> None:
    registry, plane = Registry(), DataplaneMetrics()
    registry.add(plane)
    plane.calls[Verb.GET] += 2
    plane.misses[MissReason.EVICTED] += 3
    plane.get_ns.observe(80_000, 4)
    found = named(registry.snapshot() | {"garden": {"trees": 3}})
    assert set(found) == {"dataplane"}
    room = found["dataplane"]
    assert room["calls"] == {verb.name.lower(): 2 * (verb is Verb.GET) for verb in Verb}
    assert room["misses"] == {reason.name.lower(): 3 * (reason is MissReason.EVICTED) for reason in MissReason}
    assert room["get_ns"]["total_ns"] == 320_000
    assert (room["get_ns"]["counts"]["0.0001"], room["get_ns"]["counts"]["+Inf"]) == (4, 0)
    assert not [value for value in room.values() if isinstance(value, list)]


def test_an_unknown_room_or_field_of_a_newer_worker_is_left_out() -> None:
    assert merge([{"engine": {"live_bytes": 1, "smell": 2}, "garden": {"trees": 3}}]) == {"engine": {"live_bytes": 1}}


def test_an_error_counts_as_its_own_kind_or_its_nearest_ancestor() -> None:
    assert ERROR_KINDS[error_index(errors.Overloaded("x"))] is errors.Overloaded
    assert ERROR_KINDS[error_index(errors.QuotaExceeded("x"))] is errors.NoSpace
    assert ERROR_KINDS[error_index(errors.ForkedClient("x"))] is errors.Closed
    assert ERROR_KINDS[error_index(ZeroDivisionError())] is errors.Internal


def test_every_class_of_error_that_can_be_raised_has_a_kind() -> None:
    roots = {errors.KVStoreError, errors.Retryable}
    concrete = {
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KVStoreError)
    }
    for kind in concrete - roots:
        assert issubclass(kind, ERROR_KINDS[error_index(kind("x"))])


def test_the_process_measures_itself() -> None:
    metrics = ProcessMetrics()
    process.measure(metrics)
    assert metrics.cpu_ns > 0
    assert metrics.resident_bytes > 1_000_000
    assert metrics.open_files >= 3

"""What tenants use: gathered from workers, bounded in metrics, and kept below the quota on a whole node."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.errors import Internal
from kvstore.limits import SERIES_MAX, TENANT_SERIES_MAX, KiB, MiB
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.server.tenant_uses import gathered
from kvstore.server.tenants import Tenant, TenantBook, hash_of
from kvstore.telemetry import prometheus
from kvstore.telemetry.metrics import ROOMS
from kvstore.telemetry.registry import Registry
from kvstore.telemetry.tenants import OTHERS, TenantNumbers, bounded
from kvstore.testing.serve_process import ServeProcess
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Refused, RefusedReason, Stored
from kvstore_client import KVClient

QUOTA = 8 * MiB
TOKEN = "the token of a tenant with a quota"
ROOT = "the token of an administrator"


def numbers(count: int) -> list[TenantNumbers]:
    return [
        TenantNumbers(name=f"t{at}", used_bytes=at * 10, quota_bytes=100, refused_records=at) for at in range(count)
    ]


def test_rows_of_several_workers_are_summed_by_tenant() -> None:
    book = TenantBook([Tenant(name="a", quota_bytes=7, weight=2.0), Tenant(name="idle")])
    rows = [{"name": name, "used_bytes": 10, "records": 2, "refused_records": 1} for name in ("a", "gone", "a")]
    found = {use.name: use for use in gathered(rows, book)}
    assert list(found) == ["a", "gone", "idle"]
    assert (found["a"].used_bytes, found["a"].records, found["a"].quota_bytes, found["a"].weight) == (20, 4, 7, 2.0)
    assert found["gone"].used_bytes == 10, "a tenant that left the file is still shown"
    assert gathered([], None) == ()
    with pytest.raises(Internal):
        gathered([{"name": "a"}], book)


def test_series_stay_bounded_and_lose_nothing() -> None:
    shown = list(bounded(numbers(TENANT_SERIES_MAX + 5)))
    assert len(shown) == TENANT_SERIES_MAX + 1
    assert shown[-1].name == OTHERS
    assert sum(one.used_bytes for one in shown) == sum(one.used_bytes for one in numbers(TENANT_SERIES_MAX + 5))
    assert list(bounded(numbers(2))) == sorted(numbers(2), key=lambda one: -one.used_bytes)


def test_all_rooms_with_all_tenants_stay_below_the_bound_of_series() -> None:
    registry = Registry()
    for room in ROOMS.values():
        registry.add(room())
    page = prometheus.render(registry.snapshot(), numbers(300)).decode()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    assert len(samples) < SERIES_MAX


def tenants_file(folder: Path, quota: int) -> Path:
    path = folder / "tenants.json"
    rows = [
        {"name": "small", "quota": quota, "tokens": [{"scopes": ["read", "write"], "sha256": sha256_of(TOKEN)}]},
        {"name": "operators", "tokens": [{"scopes": ["admin"], "sha256": sha256_of(ROOT)}]},
    ]
    path.write_text(json.dumps({"tenants": rows}))
    return path


def sha256_of(token: str) -> str:
    return hash_of(token.encode()).hex()


def test_a_node_keeps_a_tenant_to_its_quota(tmp_path: Path) -> None:
    path = tenants_file(tmp_path, QUOTA)
    layout = KVLayout.opaque(chunk_bytes=1 * MiB, chunk_tokens=16)
    with ServeProcess(tmp_path, "--tenants", str(path), "--segment-bytes", "1MiB") as process:
        ready = process.wait_ready()
        with (
            KVClient.connect(ready.grpc, token=TOKEN, deadline=20) as client,
            ControlClient(ready.grpc, token=ROOT.encode()) as control,
        ):
            ns = client.namespace(Namespace(tenant="small", model="m", weights="w", layout=layout))
            keys = ns.keys(range(16 * 300))
            outcomes = [ns.put(keys[at : at + 1], [os.urandom(60 * KiB)])[0] for at in range(300)]
            assert all(
                isinstance(one, Stored) or (isinstance(one, Refused) and one.reason is RefusedReason.QUOTA)
                for one in outcomes
            )
            assert isinstance(outcomes[-1], Stored), "its oldest make room"
            use = next(one for one in control.report().tenants if one.name == "small")
            assert 0 < use.used_bytes <= QUOTA
            assert use.quota_bytes == QUOTA
            assert use.refused_records == sum(isinstance(one, Refused) for one in outcomes)
            assert sum(ns.contains(keys)) == use.records

            tenants_file(tmp_path, MiB // 2)
            control.reload_tenants()
            refused = ns.put(keys[:1], [os.urandom(800 * KiB)])[0]
            assert isinstance(refused, Refused), "a quota that shrinks holds at once"
            assert refused.reason is RefusedReason.QUOTA
            assert "quota" in refused.detail

            request = urllib.request.Request(f"http://{ready.metrics}/metrics")
            request.add_header("Authorization", f"Bearer {ROOT}")
            with urllib.request.urlopen(request, timeout=10) as response:
                page = response.read().decode()
            assert f'kvstore_tenant_quota_bytes{{tenant="small"}} {float(MiB // 2)}' in page

"""The control plane over a node that holds chunks: hit rate, lookups, explanations, drop, and the space they take."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.limits import SECOND_NS, WORKER_PULSE_NS, MiB
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.server.report import Question
from kvstore.server.summary import summary_lines
from kvstore.telemetry.registry import number
from kvstore.testing.serve_process import Ready, ServeProcess
from kvstore_client import Hit, KVClient, KVLayout, Namespace, Stored

CHUNK_BYTES = 64 * 1024
PULSES = 1.5  # the supervisor asks its workers for their numbers so often
LAYOUT = KVLayout.opaque(chunk_bytes=CHUNK_BYTES, chunk_tokens=4)
MINE = Namespace(tenant="acme", model="org/m", weights="sha256:1", layout=LAYOUT)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """One node for all tests here; each has a tenant of its own."""
    with ServeProcess(tmp_path_factory.mktemp("node")) as process:
        process.wait_ready()
        yield process


@pytest.fixture
def ready(node: ServeProcess) -> Ready:
    return node.wait_ready()


@pytest.fixture
def mine(request: pytest.FixtureRequest) -> Namespace:
    """The namespace of this test."""
    return replace(MINE, tenant=request.node.name)


@pytest.fixture
def control(ready: Ready) -> Iterator[ControlClient]:
    with ControlClient(ready.grpc) as found:
        yield found


@pytest.fixture
def client(ready: Ready) -> Iterator[KVClient]:
    with KVClient.connect(ready.grpc) as found:
        yield found


def tokens(run: int, chunks: int) -> list[int]:
    """Token ids of `chunks` chunks that no other run shares."""
    return [run * 1000 + token for token in range(4 * chunks)]


def put(client: KVClient, namespace: Namespace, run: int, chunks: int) -> bytes:
    """Store the chunks of a run durably; their digests."""
    bound = client.namespace(namespace)
    keys = bound.keys(tokens(run, chunks))
    results = bound.put(keys, [bytes([run]) * CHUNK_BYTES for _ in keys], wait="durable")
    assert all(isinstance(result, Stored) for result in results), results
    return keys.digests


def test_the_hit_rate_counts_keys_of_lookups_and_nothing_else(
    mine: Namespace, ready: Ready, control: ControlClient, client: KVClient
) -> None:
    bound = client.namespace(mine)
    put(client, mine, 1, 4)
    put(client, mine, 2, 2)
    for run, times in ((1, 3), (2, 4), (3, 3)):
        for _ in range(times):
            with bound.match(bound.keys(tokens(run, 4))):
                pass
    control.lookup(mine.digest, bound.keys(tokens(1, 4)).digests)  # a router's question does not count
    keys = bound.keys(tokens(3, 2))
    bound.get_into(keys, [bytearray(CHUNK_BYTES) for _ in keys])  # nor does a load, also when it fails
    numbers = control.report().numbers
    assert number(numbers, "dataplane", "lookup_hits") == 20
    assert number(numbers, "dataplane", "lookup_keys") == 40
    assert number(numbers, "dataplane", "lookups") == 10
    assert number(numbers, "dataplane", "failed_records") == 2
    with urllib.request.urlopen(f"http://{ready.metrics}/metrics", timeout=30) as response:
        families = {family.name: family for family in text_string_to_metric_families(response.read().decode())}
    assert families["kvstore_lookup_hits"].samples[0].value == 20
    assert families["kvstore_lookup_keys"].samples[0].value == 40
    control.lookup(mine.digest, bound.keys(tokens(1, 4)).digests, count=True)
    assert number(control.report().numbers, "dataplane", "lookup_hits") == 24


def test_counters_stand_still_while_nobody_asks(mine: Namespace, ready: Ready, client: KVClient) -> None:
    def counters() -> dict[str, float]:
        with urllib.request.urlopen(f"http://{ready.metrics}/metrics", timeout=30) as response:
            page = response.read().decode()
        return {
            f"{sample.name}{sample.labels}": sample.value
            for family in text_string_to_metric_families(page)
            if family.type in ("counter", "histogram")
            # but for what a scrape costs itself, the processor's time and the scrub, which goes on
            and not family.name.startswith(("kvstore_grpc", "kvstore_edge", "kvstore_process", "kvstore_scrub"))
            for sample in family.samples
        }

    bound = client.namespace(mine)
    put(client, mine, 1, 4)
    with bound.match(bound.keys(tokens(1, 6))) as match:
        bound.get_into(bound.keys(tokens(1, 4)), [bytearray(CHUNK_BYTES) for _ in range(match.chunks)])
    time.sleep(PULSES * WORKER_PULSE_NS / SECOND_NS)  # what the put left to do, such as its log block, is done
    before = counters()
    time.sleep(PULSES * WORKER_PULSE_NS / SECOND_NS)
    after = counters()
    assert before["kvstore_lookup_keys_total{}"] > 0
    assert before["kvstore_device_ops_total{'op': 'write'}"] > 0
    assert {name: (value, after[name]) for name, value in before.items() if after[name] != value} == {}


def test_routers_ask_for_keys_over_grpc(mine: Namespace, control: ControlClient, client: KVClient) -> None:
    stored = put(client, mine, 1, 3)
    found = control.lookup(mine.digest, stored + client.namespace(mine).keys(tokens(2, 1)).digests)
    assert found.namespace_known
    assert found.statuses == bytes([0, 0, 0, 1])
    assert found.prefix == 3


def test_namespaces_are_listed_page_by_page_within_their_tenant(
    mine: Namespace, control: ControlClient, client: KVClient
) -> None:
    salted = [replace(mine, salt=bytes([salt])) for salt in range(60)]
    for namespace in (*salted, replace(mine, tenant="other")):
        put(client, namespace, 1, 1)
    found, after = [], b""
    while True:
        page = control.namespaces(mine.tenant, after=after, limit=25)
        found += page.namespaces
        after = page.next
        if not after:
            break
    assert [item.digest for item in found] == sorted(namespace.digest for namespace in salted)
    assert {item.model for item in found} == {"org/m"}
    assert [item.tenant for item in control.namespaces("other").namespaces] == ["other"]
    assert control.namespaces("nobody").namespaces == ()


def test_explain_finds_the_field_that_differs(mine: Namespace, control: ControlClient, client: KVClient) -> None:
    put(client, mine, 1, 3)
    other = replace(mine, weights="sha256:2", salt=b"another")
    answer = control.explain(Question(tenant=mine.tenant, manifest=other.manifest(), tokens=tuple(tokens(1, 3))))
    assert not answer.namespace_known
    (nearest,) = answer.namespaces
    assert [item.field for item in nearest.differences] == ["weights", "salt"]
    assert [key.status for key in nearest.keys] == ["hit"] * 3
    assert control.explain(Question(tenant="somebody else", model="org/m")).namespaces == ()


def test_explain_tells_stored_deleted_and_never_written(
    mine: Namespace, control: ControlClient, client: KVClient
) -> None:
    put(client, mine, 1, 3)
    bound = client.namespace(mine)
    bound.delete(bound.keys(tokens(1, 3))[1:2])
    answer = control.explain(Question(tenant=mine.tenant, namespace=mine.digest, tokens=tuple(tokens(1, 4))))
    (known,) = answer.namespaces
    assert [key.status for key in known.keys] == ["hit", "absent", "hit", "absent"]
    assert "deleted" in known.keys[1].text
    assert "never written" in known.keys[3].text
    assert answer.summary.startswith("2 of 4 chunks are stored; the first miss is chunk 1: deleted")


def test_explain_tells_what_was_evicted(mine: Namespace, control: ControlClient, client: KVClient) -> None:
    first = put(client, mine, 1, 8)
    for run in range(2, 150):
        put(client, mine, run, 8)
    answer = control.explain(Question(tenant=mine.tenant, namespace=mine.digest, keys=first))
    assert {key.status for key in answer.namespaces[0].keys} == {"evicted"}
    assert "evicted" in answer.summary
    numbers = control.report().numbers
    assert number(numbers, "engine", "evicted_records") > 0
    assert number(numbers, "engine", "eviction_age_ns") >= 0
    assert number(numbers, "engine", "allocated_bytes") <= 64 * MiB


def test_a_dropped_namespace_is_hidden_at_once_and_only_for_its_tenant(
    mine: Namespace, control: ControlClient, client: KVClient
) -> None:
    before = number(control.report().numbers, "engine", "records")
    stored = put(client, mine, 1, 3)
    assert not control.drop("other", mine.digest).dropped, "another tenant must not learn that it exists"
    assert control.lookup(mine.digest, stored).prefix == 3
    assert control.drop(mine.tenant, mine.digest).dropped
    assert control.lookup(mine.digest, stored).prefix == 0
    answer = control.explain(Question(tenant=mine.tenant, namespace=mine.digest, keys=stored))
    assert {"drop of the namespace" in key.text for key in answer.namespaces[0].keys} == {True}
    assert number(control.report().numbers, "engine", "records") == before, "what is hidden is not stored any more"
    assert put(client, mine, 1, 3) == stored
    assert control.lookup(mine.digest, stored).prefix == 3


def test_a_drained_node_refuses_puts_and_serves_gets(mine: Namespace, control: ControlClient, client: KVClient) -> None:
    put(client, mine, 1, 2)
    control.drain()
    bound = client.namespace(mine)
    buffer = bytearray(CHUNK_BYTES)
    (refused,) = bound.put(bound.keys(tokens(2, 1)), [buffer], wait="durable")
    assert "DRAINING" in repr(refused)
    keys = bound.keys(tokens(1, 2))
    with bound.match(keys) as match:
        assert match.chunks == 2
    bound.get_into(keys[:1], [buffer])
    assert buffer == bytes([1]) * CHUNK_BYTES
    control.drain(resume=True)
    put(client, mine, 2, 1)


def test_a_scrub_reads_what_lies_in_sealed_segments(mine: Namespace, control: ControlClient, client: KVClient) -> None:
    put(client, mine, 1, 60)
    control.scrub()
    for _ in range(1_000):
        numbers = control.report().numbers
        if number(numbers, "engine", "scrubbed_records") >= 40:
            break
    assert number(numbers, "engine", "scrubbed_records") >= 40
    assert number(numbers, "engine", "scrub_errors") == 0


def test_the_command_line_explains_and_checks_the_same(
    mine: Namespace, node: ServeProcess, client: KVClient, ready: Ready
) -> None:
    put(client, mine, 1, 2)
    ids = ",".join(map(str, tokens(1, 3)))
    command = [sys.executable, "-m", "kvstore", "explain", "--node", ready.grpc, "--tenant", mine.tenant]
    command += ["--tokens", ids, "--model", "org/m", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(done.stdout)
    assert [key["status"] for key in answer["namespaces"][0]["keys"]] == ["hit", "hit", "absent"]
    command = [sys.executable, "-m", "kvstore", "check", str(node.log_path.parent / "data")]
    busy = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert busy.returncode == 3, "a running node holds its drive"


def test_everything_is_there_after_a_stop_and_check_is_clean(tmp_path: Path) -> None:
    names = ["org/model-SEP-name", "org/model/name", "@@x", "a@1@0", "..", "a\x00b", "mo\u0308del", "m\u00f6del"]
    names.append("\u8a9e" * 341)  # 1,023 bytes
    awkward = [replace(MINE, tenant="names", model=name) for name in names]
    with ServeProcess(tmp_path, "--drive-endurance", "1TiB") as process:
        ready = process.wait_ready()
        with KVClient.connect(ready.grpc) as client:
            stored = put(client, MINE, 1, 20)
            for run, namespace in enumerate(awkward):
                put(client, namespace, run, 1)
        with ControlClient(ready.grpc) as control:
            report = control.report()
        assert number(report.numbers, "engine", "endurance_bytes_day") == 1 << 40
        assert number(report.numbers, "engine", "written_bytes_day") >= 29 * CHUNK_BYTES
        assert "of the rated endurance" in {line.name: line.value for line in summary_lines(report)}["writes"]
        process.terminate()
        assert process.wait_exit() == 0, process.log
    command = [sys.executable, "-m", "kvstore", "check", str(tmp_path / "data"), "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
    assert report["clean"]
    assert report["records"] == 29
    with (
        ServeProcess(tmp_path) as process,
        ControlClient(process.wait_ready().grpc) as control,
        KVClient.connect(process.wait_ready().grpc) as client,
    ):
        assert sorted(item.model for item in control.namespaces("names").namespaces) == sorted(names)
        for run, namespace in enumerate(awkward):
            bound, buffer = client.namespace(namespace), bytearray(CHUNK_BYTES)
            keys = bound.keys(tokens(run, 1))
            assert isinstance(bound.get_into(keys, [buffer])[0], Hit)
            assert buffer == bytes([run]) * CHUNK_BYTES
        assert {path.name for path in tmp_path.iterdir()} == {"data", "ready.json", "serve.log"}
        assert not [path for path in tmp_path.rglob("*") if "SEP" in path.name or "m\u00f6del" in path.name]
        assert control.lookup(MINE.digest, stored).prefix == 20
        assert number(control.report().numbers, "engine", "live_bytes") == report["live_bytes"]

"""A node of two rails: two workers, each with a drive and a rail of its own, behind one control plane."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from kvstore import errors
from kvstore.limits import SECOND_NS
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.server.report import Dropped, NodeState, Question
from kvstore.telemetry.registry import number
from kvstore.testing.serve_process import Ready, ServeProcess
from kvstore.types.results import MissReason
from kvstore_client import KVClient, KVLayout, Namespace, Stored

LAYOUT = KVLayout.opaque(chunk_bytes=4096, chunk_tokens=4, run_bytes=4096)
MINE = Namespace(tenant="acme", model="org/m", weights="sha256:1", layout=LAYOUT)
CHUNKS = 64
LOOKUP_COUNTERS = ("lookups", "lookup_keys", "lookup_hits")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    folder = tmp_path_factory.mktemp("node")
    arguments = (
        "--data-dir",
        f"{folder / 'a'},{folder / 'b'}",
        "--capacity",
        "128MiB",
        "--host",
        "127.0.0.1,127.0.0.2",
    )
    with ServeProcess(folder, *arguments) as process:
        yield process.wait_ready()


@pytest.fixture
def control(ready: Ready) -> Iterator[ControlClient]:
    with ControlClient(ready.grpc) as found:
        yield found


def test_each_rail_has_a_worker_an_address_and_a_target(ready: Ready, control: ControlClient) -> None:
    assert [address.split(":")[0] for address in ready.data] == ["127.0.0.1", "127.0.0.2", "127.0.0.2", "127.0.0.1"]
    report = control.report()
    assert len({worker.pid for worker in report.workers}) == 2
    assert {target.data for target in control.view().targets} == {tuple(ready.data[:2]), tuple(ready.data[2:])}
    port = ready.grpc.rpartition(":")[2]
    with ControlClient(f"127.0.0.2:{port}") as other_rail:
        assert other_rail.view() == control.view()


def test_chunks_of_both_rails_are_seen_as_one_node(ready: Ready, control: ControlClient) -> None:
    with KVClient.connect(ready.grpc) as client:
        bound = client.namespace(MINE)
        keys = bound.keys(list(range(4 * CHUNKS)))
        results = bound.put(keys, [bytes([at]) * 4096 for at in range(CHUNKS)], wait="durable")
        assert all(isinstance(result, Stored) for result in results)
    found = control.lookup(MINE.digest, keys.digests + bytes(32))
    assert found.statuses == bytes(CHUNKS) + b"\x01"
    before = control.report().numbers
    assert number(before, "engine", "records") == CHUNKS + 1, "the first run, which everybody shares, has two copies"
    control.lookup(MINE.digest, keys.digests + bytes(32), count=True)
    after = control.report().numbers
    counted = [number(after, "dataplane", name) - number(before, "dataplane", name) for name in LOOKUP_COUNTERS]
    assert counted == [1, CHUNKS + 1, CHUNKS], "once, not on each worker"
    answer = control.explain(Question(tenant="acme", namespace=MINE.digest, keys=keys.digests))
    assert {key.status for key in answer.namespaces[0].keys} == {"hit"}
    assert len(control.namespaces("acme").namespaces) == 1


def test_one_dead_worker_degrades_the_node_and_its_loss_is_told(ready: Ready, control: ControlClient) -> None:
    worker = control.report().workers[1]
    known = control.view().epoch
    os.kill(worker.pid, signal.SIGKILL)
    states = set()
    for _ in control.views(known, deadline_ns=60 * SECOND_NS):
        # never fails, whatever state the second worker is in; nothing of this namespace was ever there
        assert set(control.lookup(bytes(32), bytes(64)).statuses) <= {MissReason.ABSENT, MissReason.UNAVAILABLE}
        report = control.report()
        states.add(report.state)
        if report.state is NodeState.SERVING and report.workers[1].restarts == 1:
            break
    assert states & {NodeState.DEGRADED, NodeState.RECOVERING}
    assert control.drop("acme", MINE.digest) == Dropped(dropped=True)
    with pytest.raises(errors.InvalidRequest):
        control.drop("acme", b"")


def test_a_namespace_that_one_worker_never_saw_is_explained(ready: Ready, control: ControlClient) -> None:
    lonely = Namespace(tenant="acme", model="of one chunk", weights="sha256:1", layout=LAYOUT)
    with KVClient.connect(ready.grpc) as client:
        bound = client.namespace(lonely)
        keys = bound.keys(list(range(12)))
        assert [type(one) for one in bound.put(keys[1:2], [b"x" * 100])] == [Stored]  # no head run: one copy of it
        answer = control.explain(Question(tenant="acme", namespace=lonely.digest, keys=keys.digests))
        assert bound.delete(keys[1:2])  # other tests count what there is
    (namespace,) = answer.namespaces
    assert [key.status for key in namespace.keys] == ["absent", "hit", "absent"]
    assert all(key.text or key.status == "hit" for key in namespace.keys)

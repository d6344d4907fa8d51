"""Real nodes in one cluster: any of them serves the view, clients reach all, and what happens without etcd."""

from __future__ import annotations

import base64
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from kvstore.cluster.view import TargetState, View
from kvstore.errors import KVStoreError
from kvstore.limits import DIGEST_BYTES
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.testing.etcd_process import EtcdProcess
from kvstore.testing.node_line import NodeLine
from kvstore.testing.serve_process import ServeProcess
from kvstore.types.results import MissReason, RefusedReason
from kvstore_client import Exists, Hit, KVClient, KVLayout, Miss, Namespace, Stored
from kvstore_client.client import BoundNamespace

CHUNK_BYTES = 64 * 1024
CHUNKS = 24
WAIT_SECONDS = 60.0
SPACE = Namespace(
    tenant="default",
    model="m",
    weights="w",
    layout=KVLayout.opaque(chunk_bytes=CHUNK_BYTES, chunk_tokens=1, run_bytes=CHUNK_BYTES),
)
"""Every chunk is a run of its own, so that they go to both nodes."""


def until(check: Callable[[], bool], words: str) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not check():
        assert time.monotonic() < end, words
        time.sleep(0.05)


class Nodes:
    """Two nodes of one cluster on an etcd that only they use."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.etcd = stack.enter_context(EtcdProcess(folder / "etcd"))
        self.nodes: dict[str, ServeProcess] = {}
        for name in ("a", "b"):
            self.start(name)

    def start(self, name: str) -> None:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        (folder / "ready.json").unlink(missing_ok=True)  # of a life that was killed
        place = ("--cluster", f"etcd://{self.etcd.members}/served", "--node-id", name, "--node-label", f"rack-{name}")
        node = self._stack.enter_context(ServeProcess(folder, *place, "--lease-ttl", "2s"))
        self.nodes[name] = node
        node.wait_ready()

    def view(self, name: str) -> View:
        """As the node serves it on the data plane."""
        with KVClient.connect(self.nodes[name].wait_ready().data[0]) as client:
            view = client.session().core.view
            assert view is not None
            return view

    def states(self, name: str) -> dict[str, TargetState]:
        try:
            return {target.node_id: target.state for target in self.view(name).targets}
        except KVStoreError:
            return {}

    def settled(self) -> bool:
        """Both see both, with one epoch."""
        wanted = (TargetState.SERVING, TargetState.JOINING)
        states = [self.states(name) for name in self.nodes]
        return all(
            seen.keys() == self.nodes.keys() and all(state in wanted for state in seen.values()) for seen in states
        )


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        found = Nodes(tmp_path, stack)
        until(found.settled, "both nodes are in the view of both")
        yield found


def spread(client: KVClient) -> BoundNamespace:
    return client.namespace(SPACE)


def put_all(client: KVClient, first: int = 0) -> list[object]:
    namespace = spread(client)
    keys = namespace.keys(list(range(first, first + CHUNKS)))
    return list(namespace.put(keys, [bytes([first + at]) * CHUNK_BYTES for at in range(CHUNKS)]))


def hits(client: KVClient, first: int = 0) -> int:
    namespace = spread(client)
    keys = namespace.keys(list(range(first, first + CHUNKS)))
    buffers = [bytearray(CHUNK_BYTES) for _ in range(CHUNKS)]
    results = namespace.get_into(keys, buffers)
    for at, result in enumerate(results):
        assert not isinstance(result, Hit) or buffers[at] == bytes([first + at]) * CHUNK_BYTES
    return sum(isinstance(result, Hit) for result in results)


def stored(results: list[object]) -> bool:
    """Each is there now, by this put or one before it."""
    return all(isinstance(result, Stored | Exists) for result in results)


def test_two_nodes_serve_one_view_and_share_the_runs(nodes: Nodes) -> None:
    view = nodes.view("a")
    assert {target.label for target in view.targets} == {"rack-a", "rack-b"}
    assert view.cluster == "served"
    with ControlClient(nodes.nodes["b"].wait_ready().grpc) as control:
        assert {target.id for target in control.view().targets} == {target.id for target in view.targets}
        assert control.report().node_id == "b"
    with KVClient.connect(nodes.nodes["a"].wait_ready().grpc) as client:
        assert stored(put_all(client))
        assert hits(client) == CHUNKS
    for name in nodes.nodes:
        with ControlClient(nodes.nodes[name].wait_ready().grpc) as control:
            (namespace,) = control.namespaces("default").namespaces
            assert namespace.model == "m"  # some runs went to each


def entries(etcd: EtcdProcess) -> dict[str, int]:
    """All that etcd holds: the bytes of each entry, by its key."""
    everything = base64.b64encode(b"\0").decode()
    found = etcd.post(0, "/v3/kv/range", {"key": everything, "range_end": everything})["kvs"]
    assert isinstance(found, list)
    return {base64.b64decode(one["key"]).decode(): len(one["value"]) for one in found}


def test_etcd_holds_nothing_of_chunks_or_namespaces(nodes: Nodes) -> None:
    with KVClient.connect(nodes.nodes["a"].wait_ready().grpc) as client:
        assert stored(put_all(client))
        before = entries(nodes.etcd)
        assert any(key.startswith("/kvstore/served/") or "served" in key for key in before)
        for number in range(20):
            space = client.namespace(replace(SPACE, model=f"m{number}"))
            keys = space.keys(list(range(500)))
            assert stored(list(space.put(keys, [b"%d" % at for at in range(500)])))
            assert all(isinstance(one, Hit) for one in space.delete(keys[:100]))
        until(nodes.settled, "nothing is on its way")
        after = entries(nodes.etcd)
    assert after.keys() == before.keys(), "10,000 chunks in 20 namespaces"
    assert sum(after.values()) < sum(before.values()) + 1000


def test_without_etcd_reads_go_on_and_writes_are_refused_until_it_is_back(nodes: Nodes) -> None:
    with KVClient.connect(nodes.nodes["a"].wait_ready().data[0]) as client:
        assert stored(put_all(client))
        epoch = nodes.view("a").epoch
        nodes.etcd.kill_all()
        until(lambda: all("fenced" in str(result) for result in put_all(client, 50)), "both refuse writes")
        namespace = spread(client)
        keys = namespace.keys(list(range(CHUNKS)))
        deleted = namespace.delete(keys, deadline=10)
        assert {result.reason for result in deleted if isinstance(result, Miss)} == {MissReason.UNAVAILABLE}
        assert not any(isinstance(result, Hit) for result in deleted)
        assert not namespace.drop(deadline=10)
        assert hits(client) == CHUNKS
        nodes.etcd.wipe()
        until(nodes.settled, "both nodes register anew")
        until(lambda: stored(put_all(client, 150)), "writes go on")
        assert hits(client) == CHUNKS
        assert nodes.view("a").epoch >= epoch


def test_a_node_that_is_killed_comes_back_with_what_it_had(nodes: Nodes) -> None:
    with KVClient.connect([node.wait_ready().data[0] for node in nodes.nodes.values()]) as client:
        assert stored(put_all(client))
        nodes.nodes["b"].kill_supervisor()
        until(lambda: nodes.states("a").get("b") is TargetState.DOWN, "the other one sees that it is gone")
        nodes.start("b")
        until(nodes.settled, "it is back")
        until(lambda: hits(client) == CHUNKS, "everything is there again, for a client that was not restarted")


def test_a_node_that_ends_says_so_and_starts_on_its_last_view_without_etcd(nodes: Nodes) -> None:
    epoch = nodes.view("b").epoch
    nodes.nodes["b"].terminate()
    assert nodes.nodes["b"].wait_exit() == 0
    until(lambda: nodes.states("a").get("b") is TargetState.DOWN, "it has said goodbye")
    nodes.etcd.kill_all()
    nodes.start("b")
    assert nodes.view("b").epoch >= epoch
    assert nodes.states("b").keys() == {"a", "b"}


def test_a_worker_whose_supervisor_is_frozen_takes_no_writes(nodes: Nodes) -> None:
    """Asked of the node itself: a client that is refused there writes to the other one."""
    fresh = (number.to_bytes(DIGEST_BYTES, "little") for number in count())
    with KVClient.connect([node.wait_ready().data[0] for node in nodes.nodes.values()]) as client:
        assert stored(put_all(client))
        with closing(NodeLine(nodes.nodes["b"].wait_ready().data[0], SPACE)) as line:
            held = [key.digest for key in spread(client).keys(list(range(CHUNKS))) if line.get(key.digest)[0] == 0]
            assert held
            frozen = nodes.nodes["b"].process
            frozen.send_signal(signal.SIGSTOP)
            try:
                until(lambda: line.put(next(fresh), b"late")[0] == RefusedReason.FENCED, "it stops by itself")
                assert all(line.get(key)[0] == 0 for key in held), "reads go on"
            finally:
                frozen.send_signal(signal.SIGCONT)
        until(nodes.settled, "it registers again")
        until(lambda: stored(put_all(client, 100)), "writes go on")
        until(lambda: hits(client) == CHUNKS, "everything is there")

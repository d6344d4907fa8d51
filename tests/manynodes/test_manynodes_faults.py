"""Everything that may happen to one node, to its network or to etcd, under traffic: nothing is lost but time.

Three nodes and a three-member etcd, each in a network of its own. No client is ever restarted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvstore.cluster.view import TargetState
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.testing.cluster_lab import ClusterLab, LabOptions, until
from kvstore.types.results import Exists, Refused, Stored
from kvstore_bench.chains import Chains, ChainShape
from kvstore_bench.cluster_faults import faults
from kvstore_bench.traffic import Traffic
from kvstore_client import KVClient
from tests.manynodes.filled_cluster import Cluster, filled

SEED = 34
DEADLINE_S = 2.0
SLACK_S = 1.5
"""What a thread may wait for a core of a busy machine after its call was given up: the deadline is the promise."""
HIT_WITHIN_S = 30.0
SPREAD = ChainShape(tokens=4_096, runs=32)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = LabOptions(capacity="256MiB")
    folder = tmp_path_factory.mktemp("faults")
    lab = ClusterLab(folder, nodes=3, etcd_members=3, in_namespaces=True, options=options)
    with filled(lab, Chains(count=6, seed=SEED, shape=ChainShape(tokens=8_192, runs=8))) as made:
        yield made


def writes_everywhere(cluster: Cluster, seed: int) -> bool:
    """A chain of so many runs goes to every node."""
    fresh = Chains(count=1, seed=seed, shape=SPREAD, model="spread")
    return all(isinstance(one, Stored | Exists) for one in fresh.put(cluster.client, deadline=DEADLINE_S))


def is_refused_everywhere(cluster: Cluster, seed: int) -> bool:
    """A node that nobody vouches for takes nothing; `seed` is that of chains that are asked for no more."""
    fresh = Chains(count=1, seed=-seed, shape=SPREAD, model="spread")
    return all(isinstance(one, Refused) for one in fresh.put(cluster.client, deadline=DEADLINE_S))


@pytest.mark.parametrize("at", range(len(faults())), ids=[fault.name.replace(" ", "-") for fault in faults()])
def test_nothing_is_lost_but_time(cluster: Cluster, at: int) -> None:
    fault, seed, lab = faults()[at], SEED + 1_000 * at, cluster.lab
    lab.wait_settled()
    victim = f"n{at % 3}"
    with Traffic(cluster.client, cluster.chains, seed=seed, deadline_s=DEADLINE_S) as traffic:
        until(lambda: len(traffic.calls) >= 20, "traffic runs")
        fault.strike(lab, victim)
        fault.sink_in(lab, victim)
        struck_s = time.monotonic()
        until(lambda: len(traffic.ended_since(struck_s, "get")) >= 10, "reads go on")
        if fault.fences_all:
            until(lambda: is_refused_everywhere(cluster, seed), "no node takes writes")
        traffic.check()
        if not fault.loses:
            assert cluster.chains.usable(cluster.client).share == 1.0, f"seed {seed}: reads need no etcd"
        fault.mend(lab, victim)
        lab.wait_settled()
        until(lambda: cluster.chains.read(cluster.client).share == 1.0, "all is there again", seconds=HIT_WITHIN_S)
        until(lambda: writes_everywhere(cluster, seed), "writes reach every node", seconds=HIT_WITHIN_S)
        traffic.check()
    late = [call for call in traffic.calls if call.seconds > DEADLINE_S + SLACK_S]
    assert not late, f"seed {seed}: past the deadline of {DEADLINE_S} s: {late}"
    assert traffic.check_written(cluster.client) > 0.9, f"seed {seed}: what was acknowledged is there"


def refuses_all(cluster: Cluster, name: str, seed: int) -> None:
    """Put through a client that knows only this node, and begins with its view; then ask the node what it holds."""
    fresh = Chains(count=1, seed=seed, shape=SPREAD, model="spread")
    (chain,) = fresh.keys
    with KVClient.connect(cluster.lab.data_addresses([name]), lazy=True) as client:
        for _ in range(3):
            fresh.put(client, deadline=DEADLINE_S)  # it is refused there, and may be stored elsewhere by a newer view
    held = cluster.lab.lookup(name, fresh.namespace.digest, b"".join(key.digest for key in chain))
    assert held is not None
    assert 0 not in held, f"seed {seed}: {name} is fenced, and has taken {held.count(0)} chunks"


def test_a_fenced_node_accepts_no_write(cluster: Cluster) -> None:
    lab = cluster.lab
    lab.wait_settled()
    lab.partition("n1", "etcd")
    lab.wait_state("n1", TargetState.DOWN)
    refuses_all(cluster, "n1", SEED + 50_000)
    lab.stop("n1")
    lab.cont("n1")
    refuses_all(cluster, "n1", SEED + 50_001)
    lab.heal("n1", "etcd")
    lab.wait_settled()
    until(lambda: writes_everywhere(cluster, SEED + 50_002), "it takes writes again")


def only_on(cluster: Cluster, name: str) -> int:
    """How many chunks of the chains lie on that node alone."""
    held = {
        other: [
            cluster.lab.lookup(other, cluster.chains.namespace.digest, chain.digests) for chain in cluster.chains.keys
        ]
        for other in cluster.lab.running()
    }
    count = 0
    for at, chain in enumerate(cluster.chains.keys):
        for chunk in range(len(chain)):
            holders = {other for other, found in held.items() if (statuses := found[at]) and statuses[chunk] == 0}
            count += holders == {name}
    return count


def test_a_fenced_node_goes_on_serving_reads_and_refuses_writes(cluster: Cluster) -> None:
    """Also what lies on no other node, to clients of the cluster's view and to those who have the fenced node's."""
    lab, chains = cluster.lab, cluster.chains
    lab.wait_settled()
    assert chains.usable(cluster.client).share == 1.0
    assert only_on(cluster, "n1"), f"seed {SEED}: the tails of some chain"
    lab.partition("n1", "etcd")
    try:
        lab.wait_state("n1", TargetState.DOWN)
        fence = until_fenced(lab, "n1")
        assert "lease" in fence
        for addresses in (lab.data_addresses(["n0", "n2"]), lab.data_addresses(["n1"])):
            with KVClient.connect(addresses) as client:
                until(lambda client=client: chains.read(client).share == 1.0, "everything is read, while it is fenced")
        assert chains.usable(cluster.client).share == 1.0, "and by the client that was there before"
        refuses_all(cluster, "n1", SEED + 53_000)
    finally:
        lab.heal("n1", "etcd")
    lab.wait_settled()
    until(lambda: writes_everywhere(cluster, SEED + 53_001), "it takes writes again")


def until_fenced(lab: ClusterLab, name: str) -> str:
    """Waits until a node says that it is fenced; why, in its words."""
    said: list[str] = []

    def asked() -> bool:
        with ControlClient(lab.nodes[name].addresses.grpc) as control:
            said.append(control.report().fence)
        return bool(said[-1])

    until(asked, f"{name} is fenced")
    return said[-1]


def test_a_node_that_was_frozen_past_its_lease_wakes_up_fenced(cluster: Cluster) -> None:
    lab = cluster.lab
    lab.wait_settled()
    lab.stop("n2")
    lab.wait_state("n2", TargetState.DOWN)
    lab.partition("n2", "etcd")
    lab.cont("n2")
    refuses_all(cluster, "n2", SEED + 51_000)
    cluster.chains.read(cluster.client)  # raises on a wrong byte
    lab.heal("n2", "etcd")
    lab.wait_settled()
    until(lambda: writes_everywhere(cluster, SEED + 51_001), "it takes writes again")


def test_another_node_on_a_reused_address_is_not_taken_for_the_one_before(cluster: Cluster) -> None:
    lab = cluster.lab
    lab.wait_settled()
    before = cluster.chains.usable(cluster.client)
    assert before.share == 1.0
    lab.kill("n0")
    lab.add("x0", at="n0")
    lab.wait_settled()
    found = cluster.chains.read(cluster.client)  # raises on a wrong byte
    assert found.share < 1.0
    until(lambda: writes_everywhere(cluster, SEED + 52_000), "the new one takes writes")
    lab.kill("x0")
    lab.start("n0")
    lab.wait_settled()
    until(lambda: cluster.chains.read(cluster.client).share == 1.0, "the drive that came back has what it had")

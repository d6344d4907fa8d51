"""Real nodes that keep copies by themselves: lost replicas, what a drained node held, and deletes that stay deletes.

The tests of this module share one cluster and run in their order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cluster.view import TargetState
from kvstore.testing.cluster_lab import ClusterLab, LabOptions, until
from kvstore_bench.chains import Chains, ChainShape
from kvstore_client import KVClient
from tests.manynodes.filled_cluster import Cluster, filled

SEED = 34
SHAPE = ChainShape(tokens=8_192, chunk_tokens=256, chunk_bytes=16_384, runs=4)
CHAINS = 12
NAMES = ("n0", "n1", "n2", "n3")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("copies")
    lab = ClusterLab(folder, nodes=NAMES, options=LabOptions(drain_timeout="5s"))
    with filled(lab, Chains(count=CHAINS, seed=SEED, shape=SHAPE)) as made:
        yield made


def head_keys(chains: Chains) -> bytes:
    """Record keys of the first run of each chain."""
    count = chains.layout.chunks_per_run
    return b"".join(key.digest for chain in chains.keys for key in chain[:count])


def copies_of(lab: ClusterLab, chains: Chains, keys: bytes, *, without: str = "") -> list[int]:
    """On how many nodes each record lies, as the nodes themselves say."""
    counts = [0] * (len(keys) // 32)
    for name in lab.running():
        if name != without:
            statuses = lab.lookup(name, chains.namespace.digest, keys)
            assert statuses is not None, f"node {name} does not answer"
            counts = [count + (not status) for count, status in zip(counts, statuses, strict=True)]
    return counts


def test_replicas_of_head_runs_that_a_dead_node_had_come_back(cluster: Cluster) -> None:
    lab, chains = cluster.lab, cluster.chains
    heads = head_keys(chains)
    assert set(copies_of(lab, chains, heads)) == {2}
    lab.kill("n3")
    until(lambda: lab.states("n0").get("n3") is TargetState.DOWN, "n3 is known to be dead")
    assert 1 in copies_of(lab, chains, heads), "some had a copy there"
    until(lambda: min(copies_of(lab, chains, heads)) >= 2, f"seed {SEED}: each head has two live copies again")
    lab.start("n3")
    lab.wait_settled()
    assert chains.read(cluster.client).share == 1.0


def test_all_that_a_drained_node_held_is_found_elsewhere(cluster: Cluster) -> None:
    lab, chains = cluster.lab, cluster.chains
    everything = b"".join(key.digest for chain in chains.keys for key in chain)
    held = lab.lookup("n3", chains.namespace.digest, everything)
    assert held is not None
    done = lab.drain("n3")
    assert done.returncode == 0, (done.stdout, done.stderr)
    told = json.loads(lab.drain("n3", "--json").stdout)
    assert (told["done"], told["left_behind"]) == (True, 0)
    assert told["handed_on"] >= held.count(0) > 0, "each record once for each node that is to have it"
    assert done.stdout == f"draining: handed on {told['handed_on']} records\n"
    assert min(copies_of(lab, chains, everything, without="n3")) >= 1, f"seed {SEED}: {lab.log('n3')[-2000:]}"
    assert chains.read(cluster.client).share == 1.0, "while it still serves"
    lab.terminate("n3")
    assert lab.wait_exit("n3") == 0
    until(lambda: "n3" not in lab.states("n0"), "it has left the view")
    assert chains.read(cluster.client).share == 1.0, f"seed {SEED}: nothing was lost with it"


def test_what_was_deleted_while_a_node_was_away_does_not_come_back_with_it(cluster: Cluster) -> None:
    lab, chains = cluster.lab, cluster.chains
    chain = chains.keys[0]
    keys = b"".join(key.digest for key in chain)
    with_all = {name: lab.lookup(name, chains.namespace.digest, keys) or b"" for name in lab.running()}
    away = max(with_all, key=lambda name: with_all[name].count(0))
    assert 0 in with_all[away]
    lab.kill(away)
    other = next(name for name in lab.running() if name != away)
    until(lambda: lab.states(other).get(away) is TargetState.DOWN, f"{away} is known to be dead")
    cluster.client.namespace(chains.namespace).delete(chain)
    lab.start(away)
    lab.wait_settled()

    def is_gone() -> bool:
        return max(copies_of(lab, chains, keys)) == 0

    until(is_gone, f"seed {SEED}: {away} has heard of the delete")
    assert not any(cluster.client.namespace(chains.namespace).contains(chain))
    assert chains.read(cluster.client).tokens[1:] == (SHAPE.tokens,) * (CHAINS - 1), "all else is there"
    assert is_gone()


def test_a_drain_that_is_not_done_or_that_nobody_takes_says_so(tmp_path: Path) -> None:
    options = LabOptions(drain_timeout="5s", arguments=("--repair-rate", "0"))  # nobody ever fetches anything
    with ClusterLab(tmp_path, nodes=("n0", "n1"), options=options) as lab:
        lab.wait_settled()
        chains = Chains(count=2, seed=SEED, shape=SHAPE)
        with KVClient.connect(lab.data_addresses()) as client:
            chains.put_all(client)
        soon = lab.drain("n0", "--timeout", "3s")
        assert soon.returncode == 3, (soon.stdout, soon.stderr)
        assert soon.stdout.startswith("draining, but not done yet: ")
        assert soon.stdout.endswith(" handed on, 0 not taken so far; it goes on: run it again\n")
        over = lab.drain("n0", "--json")  # waits for longer than other commands may
        assert over.returncode == 1, (over.stdout, over.stderr)
        told = json.loads(over.stdout)
        left, heads = told.pop("left_behind"), told.pop("handed_on")  # of head runs both have a copy from the start
        assert told == {"draining": True, "done": True, "receivers": 1}
        assert left > 0
        assert f"handed on {heads} records, {left} were not taken" in lab.drain("n0").stdout

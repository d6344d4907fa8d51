"""Copies over three nodes: how many lie where, and that a node which was away gets those that it missed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvstore.cluster.view import TargetState
from kvstore.testing.cluster_lab import ClusterLab, until
from kvstore.types.keys import KeyChain
from kvstore_bench.chains import Chains, ChainShape
from kvstore_client import KVClient

SEED = 11
SHAPE = ChainShape(tokens=2_048, runs=4)
CHAINS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    lab: ClusterLab
    client: KVClient

    def holders(self, chains: Chains, keys: KeyChain) -> dict[bytes, set[str]]:
        """Which running nodes hold each key; asked of the nodes themselves."""
        blob = b"".join(key.digest for key in keys)
        found: dict[bytes, set[str]] = {key.digest: set() for key in keys}
        for name in self.lab.running():
            statuses = self.lab.lookup(name, chains.namespace.digest, blob)
            assert statuses is not None, f"node {name} does not answer"
            for key, status in zip(keys, statuses, strict=True):
                if status == 0:
                    found[key.digest].add(name)
        return found

    def copies(self, chains: Chains, *, of_heads: bool) -> list[int]:
        """How many nodes hold each chunk: those of the first run of each chain, or the others."""
        step = chains.layout.chunks_per_run
        parts = [chain[:step] if of_heads else chain[step:] for chain in chains.keys]
        return [len(nodes) for part in parts for nodes in self.holders(chains, part).values()]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ClusterLab(tmp_path_factory.mktemp("copies"), nodes=3, etcd_members=3) as lab:
        lab.wait_settled()
        with KVClient.connect(lab.data_addresses()) as client:
            yield Cluster(lab=lab, client=client)


def test_head_runs_lie_on_two_nodes_and_others_on_one(cluster: Cluster) -> None:
    chains = Chains(count=CHAINS, seed=SEED, shape=SHAPE)
    chains.put_all(cluster.client)
    assert set(cluster.copies(chains, of_heads=True)) == {2}
    assert set(cluster.copies(chains, of_heads=False)) == {1}


def test_copies_that_a_dead_node_missed_are_made_when_it_is_back(cluster: Cluster) -> None:
    lab = cluster.lab
    lab.kill("n1")
    lab.wait_state("n1", TargetState.DOWN)
    cluster.client.refresh()
    chains = Chains(count=CHAINS, seed=SEED + 1, shape=SHAPE)
    chains.put_all(cluster.client)
    assert set(cluster.copies(chains, of_heads=True)) == {2}
    lab.start("n1")
    lab.wait_settled()

    def repaired() -> bool:
        return any("n1" in nodes for chain in chains.keys for nodes in cluster.holders(chains, chain).values())

    until(repaired, f"seed {SEED}: the node that was away gets copies of what was written meanwhile")
    assert chains.read(cluster.client).share == 1.0

"""Drops through the control plane of one node: every node hides the namespace, also those that were away."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.server.grpc_edge.client import ControlClient
from kvstore.server.report import Dropped
from kvstore.testing.cluster_lab import ClusterLab, until
from kvstore_bench.chains import Chains, ChainShape
from kvstore_client import KVClient

NAMES = ("n0", "n1", "n2")
SHAPE = ChainShape(tokens=4_096, runs=16)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterLab]:
    with ClusterLab(tmp_path_factory.mktemp("drops"), nodes=NAMES, etcd_members=1) as made:
        yield made


def written(lab: ClusterLab, seed: int, *, shape: ChainShape = SHAPE) -> Chains:
    """A chain that is stored, in a namespace of its own."""
    lab.wait_settled()
    chains = Chains(count=1, seed=seed, shape=shape, model=f"dropped {seed}")
    with KVClient.connect(lab.data_addresses()) as client:
        chains.put_all(client)
    return chains


def held(lab: ClusterLab, name: str, chains: Chains) -> int:
    """How many chunks lie on a node, by its own word."""
    found = lab.lookup(name, chains.namespace.digest, chains.keys[0].digests)
    assert found is not None, f"{name} does not answer"
    return found.count(0)


def control(lab: ClusterLab, name: str) -> ControlClient:
    return ControlClient(lab.nodes[name].addresses.grpc)


def test_a_drop_at_one_node_hides_the_namespace_on_all_and_on_one_that_was_away(lab: ClusterLab) -> None:
    chains, other = written(lab, 1), written(lab, 2)
    assert all(held(lab, name, chains) for name in NAMES)
    lab.kill("n2")
    with control(lab, "n0") as asked:
        assert asked.drop("default", chains.namespace.digest).dropped
    assert [held(lab, name, chains) for name in ("n0", "n1")] == [0, 0]
    lab.start("n2")
    lab.wait_settled()
    until(lambda: held(lab, "n2", chains) == 0, "the one that was away hears of it")
    assert all(held(lab, name, other) for name in NAMES), "nothing else is hidden"
    with KVClient.connect(lab.data_addresses()) as client:
        assert chains.read(client).share == 0.0
        assert other.read(client).share == 1.0


def test_who_is_asked_need_not_hold_the_namespace_itself(lab: ClusterLab) -> None:
    chains = written(lab, 3, shape=ChainShape(tokens=256, runs=1))
    holders = [name for name in NAMES if held(lab, name, chains)]
    (empty,) = set(NAMES) - set(holders)
    with control(lab, empty) as asked:
        assert asked.drop("somebody", chains.namespace.digest) == Dropped(dropped=False), "another tenant's"
        assert all(held(lab, name, chains) for name in holders)
        assert asked.drop("default", chains.namespace.digest) == Dropped(dropped=True)
    assert [held(lab, name, chains) for name in holders] == [0, 0]


def test_a_drop_with_its_manifest_reaches_holders_that_are_all_away(lab: ClusterLab, tmp_path: Path) -> None:
    """By the command; the node that remembers has never heard of the namespace before."""
    chains = written(lab, 4, shape=ChainShape(tokens=256, runs=1))
    holders = [name for name in NAMES if held(lab, name, chains)]
    (empty,) = set(NAMES) - set(holders)
    for name in holders:
        lab.kill(name)
    (tmp_path / "manifest").write_bytes(chains.namespace.manifest())
    command = [sys.executable, "-m", "kvstore", "drop", "--manifest", str(tmp_path / "manifest"), "--json"]
    node = ("--node", lab.nodes[empty].addresses.grpc)
    done = subprocess.run([*command, *node], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dropped"] is True
    for name in holders:
        lab.start(name)
    lab.wait_settled()
    for name in holders:
        until(lambda name=name: held(lab, name, chains) == 0, f"{name} hears of it")


def test_a_scrub_of_every_node_is_one_command(lab: ClusterLab) -> None:
    lab.wait_settled()
    command = [sys.executable, "-m", "kvstore", "scrub", "--every-node", "--json"]
    node = ("--node", lab.nodes["n1"].addresses.grpc)
    done = subprocess.run([*command, *node], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert [one["node_id"] for one in json.loads(done.stdout)["nodes"]] == list(NAMES)
    lab.kill("n2")
    done = subprocess.run([*command[:-1], *node], capture_output=True, text=True, timeout=60, check=False)
    assert "no answer from n2" in done.stdout
    assert done.returncode != 0
    lab.start("n2")

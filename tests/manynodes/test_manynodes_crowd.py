"""Clients and their ports."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvstore.testing.cluster_lab import ClusterLab
from kvstore_bench.chains import Chains, ChainShape
from kvstore_client import KVClient

SEED = 36
LOCAL_PORTS = 100
TRANSFERS = 1_000

FEW_PORTS = """
import sys
from pathlib import Path
from kvstore_bench.chains import Chains, ChainShape
from kvstore_client import Hit, KVClient

seed, ports, transfers, *addresses = sys.argv[1:]
Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(f"40000 {40000 + int(ports) - 1}")
chains = Chains(count=4, seed=int(seed), shape=ChainShape(tokens=8_192, runs=8))
with KVClient.connect(addresses) as client:
    bound = client.namespace(chains.namespace)
    for at in range(int(transfers)):
        chain = chains.keys[at % len(chains.keys)]
        outcomes = chains.read_chain(bound, chain[at % 100 : at % 100 + 16])
        assert all(isinstance(one, Hit) for one in outcomes), (at, outcomes)
print("done")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    lab: ClusterLab
    chains: Chains


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ClusterLab(tmp_path_factory.mktemp("crowd"), nodes=3, in_namespaces=True) as lab:
        lab.wait_settled()
        chains = Chains(count=4, seed=SEED, shape=ChainShape(tokens=8_192, runs=8))
        with KVClient.connect(lab.data_addresses()) as client:
            chains.put_all(client)
        yield Cluster(lab=lab, chains=chains)


def test_a_client_with_few_ports_does_not_use_them_up(cluster: Cluster) -> None:
    lab = cluster.lab
    assert lab.net is not None
    place = lab.net.add("narrow")
    arguments = ("-c", FEW_PORTS, str(SEED), str(LOCAL_PORTS), str(TRANSFERS), *lab.data_addresses())
    done = subprocess.run(lab.command_in(place, *arguments), capture_output=True, text=True, timeout=100)
    assert done.stdout == "done\n", done.stderr

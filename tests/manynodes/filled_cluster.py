"""A cluster of real nodes with some prefixes in it, and a client of it: what the modules of this room begin with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.testing.cluster_lab import ClusterLab
from kvstore_bench.chains import Chains
from kvstore_client import KVClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    lab: ClusterLab
    client: KVClient
    chains: Chains


@contextmanager
def filled(lab: ClusterLab, chains: Chains) -> Iterator[Cluster]:
    """The nodes know each other, and hold the chains."""
    with lab:
        lab.wait_settled()
        with KVClient.connect(lab.data_addresses()) as client:
            chains.put_all(client)
            yield Cluster(lab=lab, client=client, chains=chains)

"""Both cluster stores against the one suite."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from kvstore.cluster.charter import PEER_TOKEN_NAME, draw
from kvstore.cluster.etcd_client import EtcdClient
from kvstore.cluster.etcd_store import EtcdClusterStore
from kvstore.cluster.file_store import FileClusterStore
from kvstore.cluster.store import ClusterStore
from kvstore.cluster.store_address import EtcdAddress, EtcdSecrets
from kvstore.testing.cluster_suite import ClusterStoreSuite
from kvstore.testing.etcd_process import EtcdProcess

_numbers = itertools.count()


class TestFileClusterStore(ClusterStoreSuite):
    """In a file."""

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "cluster.json"

    def open(self) -> ClusterStore:
        return FileClusterStore(self.path, clock=time.monotonic_ns)

    reopen = open

    def test_its_file_is_for_its_owner_only(self) -> None:
        async def body(store: ClusterStore) -> None:
            await draw(store, PEER_TOKEN_NAME, "a secret of the nodes")
            assert self.path.stat().st_mode & 0o777 == 0o600

        self.run(body)


class TestEtcdClusterStore(ClusterStoreSuite):
    """On a real etcd."""

    @pytest.fixture(autouse=True)
    def place(self, shared_etcd: EtcdProcess) -> None:
        self.address = EtcdAddress(members=tuple(shared_etcd.members.split(",")), cluster=f"suite-{next(_numbers)}")

    def open(self) -> ClusterStore:
        return EtcdClusterStore(EtcdClient(self.address, EtcdSecrets()), cluster=self.address.cluster)

    reopen = open

"""One etcd for all tests that do not hurt it: a cluster name of its own keeps each apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.testing.etcd_process import EtcdProcess


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd

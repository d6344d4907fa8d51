"""The scripted devices keep the promises of the real ones."""

from __future__ import annotations

import pytest

from kvstore.testing.fake_verbs import FakeFabric, FakeHardware
from kvstore.testing.rdma_suite import RdmaSuite
from kvstore.testing.verbs_suite import Ground, VerbsSuite


def two_devices() -> FakeFabric:
    gids = [bytes.fromhex(f"00000000000000000000ffff0a4d000{host}") for host in (1, 2)]
    return FakeFabric({f"fake{host}": FakeHardware(gids={1: gid}) for host, gid in enumerate(gids)})


class TestFakeVerbs(VerbsSuite):
    @pytest.fixture
    def ground(self) -> Ground:
        return Ground(verbs=two_devices(), names=("fake0", "fake1"), gid_index=1)


class TestFakeChannel(RdmaSuite):
    @pytest.fixture
    def ground(self) -> Ground:
        return Ground(verbs=two_devices(), names=("fake0", "fake1"), gid_index=1)

"""Both verbs libraries on the kernel's software RDMA."""

from __future__ import annotations

import pytest

from kvstore.testing.verbs_suite import End, Ground, VerbsSuite
from kvstore.transport.rdma import pair_handle
from kvstore.transport.rdma.backends import Backend, open_verbs
from tests.rdma.network import GID_INDEX


class OnDevices(VerbsSuite):
    def test_a_pair_is_destroyed_without_the_library(
        self, ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Which would hold the GIL meanwhile; and the library knows that it is gone."""
        here, there = ends
        statuses: list[int | None] = []
        destroy = pair_handle.destroy_unlocked

        def record(pair: object, number: int) -> int | None:
            statuses.append(destroy(pair, number))
            return statuses[-1]

        monkeypatch.setattr(type(here.pair).__module__ + ".destroy_unlocked", record)
        for end in (here, there):
            end.pair.close()
            end.pair.close()
        assert statuses == [0, None, 0, None]


class TestIbverbs(OnDevices):
    @pytest.fixture
    def ground(self) -> Ground:
        return Ground(verbs=open_verbs(Backend.IBVERBS), names=("rxe0", "rxe1"), gid_index=GID_INDEX)


class TestPyverbs(OnDevices):
    @pytest.fixture
    def ground(self) -> Ground:
        return Ground(verbs=open_verbs(Backend.PYVERBS), names=("rxe0", "rxe1"), gid_index=GID_INDEX)

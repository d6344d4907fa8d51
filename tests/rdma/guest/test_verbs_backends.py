"""Both verbs libraries on the kernel's software RDMA."""

from __future__ import annotations

import pytest

from kvstore.testing.verbs_suite import Ground, VerbsSuite
from kvstore.transport.rdma.backends import Backend, open_verbs
from tests.rdma.network import GID_INDEX


class TestIbverbs(VerbsSuite):
    @pytest.fixture
    def ground(self) -> Ground:
        return Ground(verbs=open_verbs(Backend.IBVERBS), names=("rxe0", "rxe1"), gid_index=GID_INDEX)


class TestPyverbs(VerbsSuite):
    @pytest.fixture
    def ground(self) -> Ground:
        return Ground(verbs=open_verbs(Backend.PYVERBS), names=("rxe0", "rxe1"), gid_index=GID_INDEX)

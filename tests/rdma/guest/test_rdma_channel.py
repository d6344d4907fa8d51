"""The data path passes the transport's conformance suite on the kernel's software RDMA, with both libraries."""

from __future__ import annotations

import pytest

from kvstore.testing.rdma_suite import USUAL, RdmaSuite
from kvstore.testing.transport_suite import SIZES, Client
from kvstore.testing.verbs_suite import Ground
from kvstore.transport.rdma.backends import Backend, open_verbs
from tests.rdma.network import GID_INDEX


class OnDevices(RdmaSuite):
    """Slow sockets are another suite's: frames carry descriptors only here. All sizes share one connection."""

    @pytest.mark.parametrize(("skew", "fragment_bytes"), [(0, 1 << 30), (1, 10_000), (511, 65_536)])
    def test_what_is_delivered_arrives_exactly(self, skew: int, fragment_bytes: int) -> None:
        joint = self.join(USUAL)
        for item, length_bytes in enumerate(SIZES):
            client = Client(skew=skew, fragment_bytes=fragment_bytes)
            joint.receive_into(client.views)
            data = bytearray(content(item, length_bytes))
            self.deliver(joint, item, data)
            assert client.data(item, length_bytes) == content(item, length_bytes)
        assert joint.lab.placed_bytes == sum(SIZES)
        assert joint.lab.fallback_bytes == 0
        joint.close()

    @pytest.mark.parametrize("fragment_bytes", [1 << 30, 10_000])
    def test_what_is_fetched_arrives_exactly(self, fragment_bytes: int) -> None:
        super().test_what_is_fetched_arrives_exactly(USUAL, fragment_bytes)


def content(item: int, length_bytes: int) -> bytes:
    """Bytes that repeat at no power of two."""
    return (bytes(range(item, 251)) * (length_bytes // 200 + 2))[:length_bytes]


class TestIbverbsChannel(OnDevices):
    @pytest.fixture
    def ground(self) -> Ground:
        return Ground(verbs=open_verbs(Backend.IBVERBS), names=("rxe0", "rxe1"), gid_index=GID_INDEX)


class TestPyverbsChannel(OnDevices):
    @pytest.fixture
    def ground(self) -> Ground:
        return Ground(verbs=open_verbs(Backend.PYVERBS), names=("rxe0", "rxe1"), gid_index=GID_INDEX)

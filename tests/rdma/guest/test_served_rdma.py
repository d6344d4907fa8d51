"""RDMA passes the suite that TCP and shared memory pass (../test_served_ways.py): node and client on two machines."""

from __future__ import annotations

import pytest

from tests.rdma.served_suite import Node, ServedSuite


class TestRdma(ServedSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def node(cls, node_elsewhere: Node) -> Node:
        """That of `served.py`."""
        return node_elsewhere

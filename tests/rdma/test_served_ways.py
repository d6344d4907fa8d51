"""TCP and shared memory pass the suite that RDMA passes in the virtual machines (guest/test_served_rdma.py)."""

from __future__ import annotations

from tests.rdma.served_suite import ServedSuite, Way


class TestTcp(ServedSuite):
    way = Way(transport="tcp", says="tcp: transport tcp is set")


class TestTcpFromTheDrive(TestTcp):
    cache = "0"


class TestSharedMemory(ServedSuite):
    way = Way(transport="shm", says="shm")


class TestSharedMemoryFromTheDrive(TestSharedMemory):
    cache = "0"

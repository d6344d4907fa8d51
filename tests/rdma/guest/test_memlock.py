"""Locked memory is short: the refusal says which limit and what to do, and a small start works."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time

import pytest

from kvstore.errors import Unavailable
from kvstore.server.launch import RdmaMode
from kvstore.server.rdma import RdmaWish, start_rdma
from kvstore.telemetry.metrics import RdmaMetrics
from kvstore.testing.rdma_lab import client_rail
from kvstore.transport.rdma.backends import LIBRARY_VARIABLE, Backend, open_verbs
from kvstore.transport.rdma.regions import RegionCache
from kvstore.transport.rdma.verbs import Access
from tests.rdma.network import GID_INDEX

LIMIT_BYTES = 8 << 20


@pytest.mark.parametrize("backend", ["ibverbs", "pyverbs"])
def test_more_than_may_be_locked(backend: str) -> None:
    # root without the capability that frees it from the limit
    confined = ["setpriv", "--bounding-set", "-ipc_lock", "prlimit", f"--memlock={LIMIT_BYTES}"]
    command = [*confined, sys.executable, "-m", "tests.rdma.guest.test_memlock", backend]
    environment = os.environ | {LIBRARY_VARIABLE: backend}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ulimit -l unlimited" in done.stdout
    assert "LimitMEMLOCK" in done.stdout
    assert "IPC_LOCK" in done.stdout
    assert "4 MiB are registered\n" in done.stdout
    assert "a node: transport rdma cannot be had" in done.stdout
    assert "falls back: True, TCP: " in done.stdout


def confined(backend: Backend) -> None:
    """Registers too much, then little."""
    rail = client_rail(open_verbs(backend), "rxe0", GID_INDEX)
    cache = RegionCache(
        lambda address, length: rail.register(address, length, Access.LOCAL_WRITE | Access.REMOTE_WRITE),
        region_bytes_max=1 << 30,
        on_close=lambda ids: None,
    )
    much, little = mmap.mmap(-1, 64 << 20), mmap.mmap(-1, 4 << 20)
    try:
        cache.hold(memoryview(much))
    except Unavailable as error:
        print(error)
    cache.release(cache.hold(memoryview(little)))
    print(f"{cache.registered_bytes >> 20} MiB are registered")
    cache.close()
    rail.close()
    as_node(memoryview(much))


def as_node(arena: memoryview) -> None:
    """A node whose staging is too much ends where RDMA is required, and goes on without it where not."""
    metrics = RdmaMetrics()
    try:
        start_rdma(RdmaWish(mode=RdmaMode.REQUIRED), [arena], metrics, time.monotonic_ns)
    except Unavailable as error:
        print("a node:", error)
    service = start_rdma(RdmaWish(mode=RdmaMode.AUTO), [arena], metrics, time.monotonic_ns)
    print(f"falls back: {service is None}, {metrics.choice}")


if __name__ == "__main__":
    confined(Backend(sys.argv[1]))

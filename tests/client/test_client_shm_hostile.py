"""A client takes pages away from its shared memory while a real node copies to and from it, and a drive reads there.

What else a hostile client may try (descriptors, sizes, seals, places, bounds) is in test_client_shm.py and in
tests/dataplane/test_transport_shm.py; what a dying one leaves behind is in test_client_shm.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from kvstore.limits import KiB
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.testing.metrics_page import wait_for_metric
from kvstore.testing.serve_process import Ready, ServeProcess
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore_client import Hit, KVClient, Stored

CHUNK = 256 * KiB
ROUNDS = 40

HOSTILE = """
    import ctypes, os, sys, threading
    from kvstore_client import KVClient, KVLayout, Namespace
    client = KVClient.connect(sys.argv[1], transport="shm")
    layout = KVLayout.opaque(chunk_bytes={chunk}, chunk_tokens=16)
    ns = client.namespace(Namespace(tenant="default", model="hostile", weights="w", layout=layout))
    memory = client.alloc(16 * {chunk}, prefault=True)
    memory[:] = os.urandom(len(memory))
    buffers = [memory[at : at + {chunk}] for at in range(0, len(memory), {chunk})]
    keys = ns.keys(list(range(256)))
    ns.put(keys, buffers)
    (whole,) = client.memory._by_start
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    is_over = threading.Event()

    def take_pages_away():
        while not is_over.is_set():
            assert libc.fallocate(whole.fd, 3, 0, len(memory)) == 0  # KEEP_SIZE | PUNCH_HOLE, fallocate(2)
            try:
                os.ftruncate(whole.fd, 0)
            except OSError:
                continue
            raise SystemExit("it could be made shorter")

    taking = threading.Thread(target=take_pages_away)
    taking.start()
    for round in range({rounds}):
        ns.get_into(keys, buffers)
        ns.put(ns.keys_from_hashes([os.urandom(32) for _ in buffers], algorithm="x"), buffers)
    is_over.set()
    taking.join()
    print("done")
"""


@pytest.fixture(scope="module", params=["drive", "cache"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    cache = "0" if request.param == "drive" else "64MiB"
    with ServeProcess(tmp_path_factory.mktemp("node"), "--cache", cache, "--capacity", "512MiB") as process:
        yield process.wait_ready()


def test_pages_that_are_taken_away_meanwhile_harm_nobody_else(served: Ready) -> None:
    with ControlClient(served.grpc) as control:
        (before,) = control.report().workers
    with KVClient.connect(served.grpc, transport="shm") as client:
        layout = KVLayout.opaque(chunk_bytes=CHUNK, chunk_tokens=16)
        ns = client.namespace(Namespace(tenant="default", model=os.urandom(4).hex(), weights="w", layout=layout))
        memory = client.alloc(4 * CHUNK)
        memory[:] = expected = os.urandom(4 * CHUNK)
        buffers = [memory[at : at + CHUNK] for at in range(0, 4 * CHUNK, CHUNK)]
        keys = ns.keys(list(range(64)))
        assert all(isinstance(one, Stored) for one in ns.put(keys, buffers))
        script = textwrap.dedent(HOSTILE.format(chunk=CHUNK, rounds=ROUNDS))
        done = subprocess.run(
            [sys.executable, "-c", script, served.grpc], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.stdout == "done\n", done.stderr
        memory[:] = bytes(len(memory))
        assert all(isinstance(one, Hit) for one in ns.get_into(keys, buffers))
        assert memory == expected
    with ControlClient(served.grpc) as control:
        (after,) = control.report().workers
    assert (after.pid, after.restarts) == (before.pid, before.restarts), "no SIGBUS has reached the worker"
    wait_for_metric(served, "kvstore_shared_memory_bytes", 0)
    wait_for_metric(served, "kvstore_staging_bytes", 0)

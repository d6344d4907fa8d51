"""How much memory one process may share with a real node: the bound itself, and what it leaves to others."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvstore.errors import Overloaded
from kvstore.limits import REGION_BYTES_PER_CLIENT_MAX, SECOND_NS, KiB, MiB
from kvstore.testing.metrics_page import wait_for_metric
from kvstore.testing.serve_process import ServeProcess
from kvstore.transport.shm import create_memory
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.wire.messages import End
from kvstore.wire.shared import Region
from kvstore_client import Hit, KVClient, Stored
from kvstore_client.connection import Connection

CHUNK = 64 * KiB
REGION_BYTES = 256 * MiB
FIRST_NUMBER = 10_000  # none that the client gives by itself

OTHER = """
    import os, sys
    from kvstore_client import Hit, KVClient, KVLayout, Namespace
    with KVClient.connect(sys.argv[1], transport="shm") as client:
        layout = KVLayout.opaque(chunk_bytes={chunk}, chunk_tokens=16)
        ns = client.namespace(Namespace(tenant="default", model="share", weights="w", layout=layout))
        memory = client.alloc({chunk})
        (found,) = ns.get_into(ns.keys(list(range(16))), [memory])
        assert isinstance(found, Hit) and bytes(memory) == bytes({chunk}), found
        assert len(client.memory.numbers) == 1
        (target,) = client.transports().values()
        print(target)
"""


def share(connection: Connection, number: int, fd: int) -> None:
    """Tells the node of memory."""
    connection.blocking = True
    connection.deadline_ns = time.monotonic_ns() + 30 * SECOND_NS
    for _ in connection.ask_with_descriptor(Region(region=number, length_bytes=REGION_BYTES), End, fd):
        pass


def test_a_process_shares_up_to_its_bound_and_others_are_served(tmp_path: Path) -> None:
    with ServeProcess(tmp_path, "--cache", "64MiB", "--capacity", "256MiB") as process:
        ready = process.wait_ready()
        with KVClient.connect(ready.grpc, transport="shm") as client:
            layout = KVLayout.opaque(chunk_bytes=CHUNK, chunk_tokens=16)
            ns = client.namespace(Namespace(tenant="default", model="share", weights="w", layout=layout))
            keys = ns.keys(list(range(16)))
            memory = client.alloc(CHUNK)
            assert all(isinstance(one, Stored) for one in ns.put(keys, [memory]))
            assert all(isinstance(one, Hit) for one in ns.get_into(keys, [memory]))
            session = client.session()
            target = session.core.reader
            assert isinstance(target, str)
            taken = session.driver.borrow(target, time.monotonic_ns())
            assert taken is not None
            link, connection = taken
            fd = create_memory(REGION_BYTES)
            try:
                # the same pages under many numbers: what counts is what is mapped
                fitting = (REGION_BYTES_PER_CLIENT_MAX - CHUNK) // REGION_BYTES
                for number in range(fitting):
                    share(connection, FIRST_NUMBER + number, fd)
                with pytest.raises(Overloaded, match=f"limit of {REGION_BYTES_PER_CLIENT_MAX}"):
                    share(connection, FIRST_NUMBER + fitting, fd)
                script = textwrap.dedent(OTHER.format(chunk=CHUNK))
                done = subprocess.run(
                    [sys.executable, "-c", script, ready.grpc], capture_output=True, text=True, timeout=60, check=False
                )
                assert done.stdout == "shm\n", done.stderr
            finally:
                os.close(fd)
                session.driver.give_back(link, connection, time.monotonic_ns(), has_broken=False)
            assert all(isinstance(one, Hit) for one in ns.get_into(keys, [memory])), "and so is this one, as before"
        wait_for_metric(ready, "kvstore_shared_memory_bytes", 0)

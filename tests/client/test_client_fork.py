"""A fork is noticed: the child opens connections of its own, the parent's stay as they are."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest

from kvstore.errors import ForkedClient
from kvstore.testing.forked import in_child
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore_client import Hit, KVClient, Stored

TOKENS = list(range(64))


def read(ns, keys) -> None:
    memory = [bytearray(5000) for _ in keys]
    assert all(isinstance(one, Hit) for one in ns.get_into(keys, memory))
    assert all(bytes(one) == bytes([at]) * 5000 for at, one in enumerate(memory))


@pytest.fixture
def ns(node, opaque):
    with KVClient.connect(node.address) as client:
        ns = client.namespace(opaque)
        keys = ns.keys(TOKENS)
        assert all(isinstance(one, Stored) for one in ns.put(keys, [bytes([at]) * 5000 for at in range(4)]))
        read(ns, keys)
        yield ns


def test_a_forked_child_reads_with_connections_of_its_own(node, ns) -> None:
    keys = ns.keys(TOKENS)
    links = len(node.links)
    for _ in range(2):
        in_child(lambda: read(ns, keys))
    assert len({hello.client_id for hello in node.hellos}) == 3
    opened = len(node.links)
    read(ns, keys)
    assert len(node.links) == opened, "the parent goes on with the connection that it had"
    assert opened > links


def test_a_child_may_close_its_client(node, ns) -> None:
    keys = ns.keys(TOKENS)

    def work() -> None:
        read(ns, keys)
        ns._client.close()

    in_child(work)
    read(ns, keys)


def test_a_fork_while_another_thread_is_in_a_call(node, ns) -> None:
    keys = ns.keys(TOKENS)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            read(ns, keys)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            in_child(lambda: read(ns, keys))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    read(ns, keys)


def test_pins_and_writers_stay_with_the_parent(node, ns) -> None:
    keys = ns.keys(TOKENS)
    more = ns.keys([9] * 16)
    with ns.match(keys) as found, ns.writer(more, lengths=[3]) as writer:

        def work() -> None:
            found.release()
            with pytest.raises(ForkedClient):
                writer.write(0, b"abc")
            writer.abort()

        in_child(work)
        assert len(node.pins) == 1
        writer.write(0, b"abc")
        assert isinstance(writer.commit()[0], Stored)
    assert not node.pins


def child_of_multiprocessing(address: str, layout: KVLayout, ns) -> None:
    if ns is None:
        namespace = Namespace(tenant="default", model="opaque", weights="w1", layout=layout)
        ns = KVClient.connect(address).namespace(namespace)
    read(ns, ns.keys(TOKENS))


def test_multiprocessing_fork(node, ns) -> None:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=child_of_multiprocessing, args=(node.address, ns.layout, ns))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    read(ns, ns.keys(TOKENS))


SPAWNED = """
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore_client import Hit, KVClient
import multiprocessing, sys

def read(address):
    layout = KVLayout.opaque(chunk_bytes=300_000, chunk_tokens=16)
    ns = KVClient.connect(address).namespace(Namespace(tenant="default", model="opaque", weights="w1", layout=layout))
    memory = [bytearray(5000) for _ in range(4)]
    assert all(isinstance(one, Hit) for one in ns.get_into(ns.keys(list(range(64))), memory))

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=read, args=(sys.argv[1],))
    process.start()
    process.join(60)
    sys.exit(process.exitcode)
"""


def test_multiprocessing_spawn(node, ns, tmp_path) -> None:
    import subprocess
    import sys

    program = tmp_path / "spawned.py"
    program.write_text(SPAWNED)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, str(program), node.address], check=True, timeout=90, env=environment)

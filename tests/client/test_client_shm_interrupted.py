"""Ctrl-C or a close between a read that was begun the short way and the job that is to finish it: nothing is left."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvstore.errors import Closed
from kvstore.limits import KiB
from kvstore.testing.serve_process import Ready, ServeProcess
from kvstore.types.keys import KeyChain
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore_client import Hit, KVClient, Miss, Stored, namespace_handle, placed_inflow, placed_lane
from kvstore_client.connection import Connection
from kvstore_client.loads import Begun
from kvstore_client.namespace_handle import BoundNamespace
from kvstore_client.placed_lane import PlacedLane
from kvstore_client.shm import address_of

SIZE = 64 * KiB
COUNT = 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    with ServeProcess(tmp_path_factory.mktemp("node"), "--cache", "64MiB") as process:
        yield process.wait_ready()


def ready_for_short_ways(client: KVClient, count: int) -> tuple[BoundNamespace, KeyChain, list[memoryview]]:
    """A namespace, keys of which the first `count` are stored, and pieces of memory of `alloc` for them."""
    layout = KVLayout.opaque(chunk_bytes=SIZE, chunk_tokens=16)
    ns = client.namespace(Namespace(tenant="default", model=os.urandom(4).hex(), weights="w", layout=layout))
    keys = ns.keys(list(range(32 * COUNT)))
    memory = client.alloc(COUNT * SIZE)
    into = [memory[at * SIZE : (at + 1) * SIZE] for at in range(count)]
    assert all(isinstance(one, Stored) for one in ns.put(keys[:count], into))
    for _ in range(3):  # until everything is known that the short ways need
        assert all(isinstance(one, Hit) for one in ns.get_into(keys[:count], into))
    return ns, keys, into


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("count", [1, COUNT])
def test_the_connection_is_given_back_and_no_late_byte_is_seen(
    served: Ready, monkeypatch: pytest.MonkeyPatch, transport: str, count: int
) -> None:
    with KVClient.connect(served.grpc, transport=transport) as client:
        ns, keys, into = ready_for_short_ways(client, count)
        core = client.session().core
        patches = len(core.memory.find(address_of(into[0]), 1)[0].patches) if transport == "shm" else 0  # type: ignore[index]

        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(namespace_handle, "incoming_records", interrupted)
            for _ in range(3):
                with pytest.raises(KeyboardInterrupt):
                    ns.get_into(keys[COUNT : COUNT + count], into)  # misses: not what the short ways expect
        for link in core.links():
            assert not link._in_use, "the connection is given back"
        if transport == "shm":
            whole = [one for one in core.memory._by_start if one.address <= address_of(into[0])][-1]
            assert len(whole.patches) > patches, "the node may still write to the pages that were there"
        assert all(isinstance(one, Hit) for one in ns.get_into(keys[:count], into))
        assert all(isinstance(one, Miss) for one in ns.get_into(keys[COUNT : COUNT + count], into))


@pytest.mark.parametrize("count", [1, COUNT])
@pytest.mark.parametrize("where", ["receive", "hand over"])
def test_a_second_signal_in_the_clean_up_leaves_no_place_to_the_node(
    served: Ready, monkeypatch: pytest.MonkeyPatch, count: int, where: str
) -> None:
    with KVClient.connect(served.grpc, transport="shm") as client:
        ns, keys, into = ready_for_short_ways(client, count)
        core = client.session().core
        numbers = [core.memory.find(address_of(one), SIZE)[0].number for one in into]  # type: ignore[index]
        close, closed = Connection.close, []

        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        def interrupted_once(connection: Connection) -> None:
            if not closed:
                closed.append(connection)
                raise KeyboardInterrupt
            close(connection)

        with monkeypatch.context() as patched:
            patched.setattr(Connection, "close", interrupted_once)
            if where == "hand over":
                patched.setattr(namespace_handle, "incoming_records", interrupted)
            elif count == 1:
                patched.setattr(placed_lane, "crcs_match", interrupted)
            else:
                patched.setattr(placed_inflow, "crcs_match_far", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ns.get_into(keys[COUNT : COUNT + count] if where == "hand over" else keys[:count], into)
        assert closed, "the clean-up was interrupted, too"
        now = [core.memory.find(address_of(one), SIZE) for one in into]
        assert all(one is None or one[0].number != before for one, before in zip(now, numbers, strict=True))
        assert all(isinstance(one, Hit) for one in ns.get_into(keys[:count], into))


def test_a_client_that_is_closed_then_gives_the_connection_back(served: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    with KVClient.connect(served.grpc, transport="shm") as client:
        layout = KVLayout.opaque(chunk_bytes=SIZE, chunk_tokens=16)
        ns = client.namespace(Namespace(tenant="default", model=os.urandom(4).hex(), weights="w", layout=layout))
        keys = ns.keys(list(range(32)))
        memory = client.alloc(SIZE)
        assert all(isinstance(one, Stored) for one in ns.put(keys[:1], [memory]))
        for _ in range(3):
            assert all(isinstance(one, Hit) for one in ns.get_into(keys[:1], [memory]))
        core = client.session().core
        begun = []

        def read_and_close(lane: PlacedLane, key: bytes, view: memoryview) -> object:
            begun.append(read(lane, key, view))
            client.close()
            return begun[0]

        read = PlacedLane.read
        monkeypatch.setattr(PlacedLane, "read", read_and_close)
        with pytest.raises(Closed):
            ns.get_into(keys[1:], [memory])  # a miss: not what the short way expects
        assert isinstance(begun[0], Begun)
        for link in core.links():
            assert not link._in_use

"""Whom memory is not shared with: nodes of another host, and processes of another user."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.testing.forked import in_child
from kvstore.testing.serve_process import Ready, ServeProcess
from kvstore_client import Hit, KVClient, KVLayout, Namespace, Refused, Stored
from kvstore_client.namespace_handle import BoundNamespace

CHUNK_BYTES = 64 * 1024
NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    with ServeProcess(tmp_path_factory.mktemp("node"), "--capacity", "256MiB") as process:
        yield process.wait_ready()


def bound(client: KVClient, model: str) -> BoundNamespace:
    layout = KVLayout.opaque(chunk_bytes=CHUNK_BYTES, chunk_tokens=16)
    return client.namespace(Namespace(tenant="default", model=model, weights="w", layout=layout))


def goes_by_tcp(client: KVClient, model: str, words: str) -> None:
    """Puts and gets go well, with memory of `alloc` too, and the client says why they share none."""
    ns = bound(client, model)
    keys, memory = ns.keys(list(range(16))), client.alloc(CHUNK_BYTES)
    memory[:] = os.urandom(CHUNK_BYTES)
    value = bytes(memory)
    assert all(isinstance(one, Stored) for one in ns.put(keys, [memory]))
    memory[:] = bytes(CHUNK_BYTES)
    assert all(isinstance(one, Hit) for one in ns.get_into(keys, [memory]))
    assert bytes(memory) == value
    told = list(client.transports().values())
    assert all(words in one for one in told), told


def as_another_user(work: Callable[[], None]) -> None:
    """Runs `work` in a child that belongs to nobody."""

    def become_and_work() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        work()

    in_child(become_and_work)


def test_a_node_of_another_host_is_reached_by_tcp(served: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_client.shm_ways.host_id", lambda: "0" * 32)
    with KVClient.connect(served.grpc, transport="auto") as client:
        goes_by_tcp(client, "host", "another host")
        assert client.stats()["shm_fallbacks"] == 0, "as most do: nothing is missing there"
    with KVClient.connect(served.grpc, transport="shm") as client:
        ns = bound(client, "host shm")
        (result,) = ns.put(ns.keys(list(range(16))), [bytes(CHUNK_BYTES)])
        assert isinstance(result, Refused)
        assert "another host" in result.detail


def test_another_user_does_not_reach_the_socket(served: Ready) -> None:
    def work() -> None:
        with KVClient.connect(served.grpc, transport="auto") as client:
            goes_by_tcp(client, "user", "cannot be reached")

    as_another_user(work)


@pytest.mark.parametrize("is_honest", [True, False])
def test_another_user_who_reaches_the_socket_shares_nothing(
    served: Ready, monkeypatch: pytest.MonkeyPatch, is_honest: bool
) -> None:
    with KVClient.connect(served.grpc, transport="auto") as client:
        ns = bound(client, "own")
        ns.contains(ns.keys(list(range(16))))
        core = client.session().core
        (path,) = (Path(core.link(target).local.path) for target in core.target_ids())
    opened = [one for one in (path, *path.parents) if len(one.parts) > 2]
    modes = [one.stat().st_mode & 0o7777 for one in opened]
    for one in opened:
        one.chmod(0o777)

    if not is_honest:
        monkeypatch.setattr("kvstore_client.shm_ways._is_served_by", lambda peer: True)

    def work() -> None:
        with KVClient.connect(served.grpc, transport="auto") as client:
            if is_honest:
                goes_by_tcp(client, "honest", "shares memory with its user 0 and root alone")
                return
            ns = bound(client, "denied")
            (result,) = ns.put(ns.keys(list(range(16))), [bytes(CHUNK_BYTES)])
            assert isinstance(result, Refused), result
            assert f"of user {NOBODY} may not share memory" in result.detail

    try:
        as_another_user(work)
    finally:
        for one, mode in zip(opened, modes, strict=True):
            one.chmod(mode)

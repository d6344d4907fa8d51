"""Host names: found like addresses, refused when unknown, and never waited for beyond the deadline."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from kvstore.errors import KVStoreError, Overloaded, Unavailable
from kvstore.limits import NAME_LOOKUPS_MAX
from kvstore_client import AsyncKVClient, KVClient
from kvstore_client.names import NameWait, numeric_endpoints


@pytest.fixture
def silent_names(monkeypatch):
    """A name server that answers only when the test ends."""
    answer = threading.Event()
    asked: list[str] = []
    real = socket.getaddrinfo

    def slow(host, *args, flags=0, **kwargs):
        if not flags & socket.AI_NUMERICHOST:
            asked.append(host)
            answer.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "too late")
        return real(host, *args, flags=flags, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    yield asked
    answer.set()
    for thread in threading.enumerate():
        if thread.name.startswith("kvstore-lookup-"):
            thread.join(10)  # those still running would count in the next test


def name_of(node) -> str:
    return "localhost:" + node.address.rpartition(":")[2]


def test_a_name_is_as_good_as_an_address(node) -> None:
    with KVClient.connect(name_of(node), deadline=20):
        pass


def test_a_name_serves_the_async_client_too(node) -> None:
    async def connect() -> None:
        client = await AsyncKVClient.connect(name_of(node), deadline=20)
        client.close()

    asyncio.run(connect())


def test_an_unknown_name_says_so() -> None:
    with pytest.raises(Unavailable, match=r"nowhere\.invalid:7400 .*name is not known"):
        KVClient.connect("nowhere.invalid:7400", deadline=20)


def test_each_of_several_addresses_says_what_is_wrong_with_it() -> None:
    with pytest.raises(Unavailable) as caught:
        KVClient.connect(["127.0.0.1:1", "nowhere.invalid:7400"], deadline=20)
    assert "127.0.0.1:1 cannot be reached: Connection refused; does `kvstore serve` run there?" in str(caught.value)
    assert "nowhere.invalid:7400" in str(caught.value)


def test_a_name_server_that_is_silent_costs_the_deadline_only(silent_names) -> None:
    began = time.monotonic()
    with pytest.raises(KVStoreError):
        KVClient.connect("some.host.example:7400", deadline=0.2)
    assert time.monotonic() - began < 30, "it waited for the name server"
    with pytest.raises(KVStoreError):
        KVClient.connect("some.host.example:7400", deadline=0.2)
    assert silent_names == ["some.host.example"], "the second call joins the lookup that is running"


def test_a_silent_name_server_does_not_stop_the_event_loop(silent_names) -> None:
    async def connect() -> int:
        turns = 0
        task = asyncio.create_task(AsyncKVClient.connect("other.host.example:7400", deadline=0.2))
        while not task.done():
            turns += 1
            await asyncio.sleep(0.001)
        with pytest.raises(KVStoreError):
            task.result()
        return turns

    assert asyncio.run(connect()) > 3


def test_lookups_are_bounded(silent_names) -> None:
    waits = [NameWait(f"host{at}.example", 1) for at in range(NAME_LOOKUPS_MAX)]
    with pytest.raises(Overloaded, match=f"the limit is {NAME_LOOKUPS_MAX}"):
        NameWait("one.more.example", 1)
    again = NameWait("host0.example", 1)
    for wait in (*waits, again):
        assert not wait.is_over
        wait.done.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.0.0.1"])
def test_addresses_ask_nobody(host: str, silent_names) -> None:
    assert numeric_endpoints(host, 80)
    assert not silent_names

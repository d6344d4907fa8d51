"""Connections to other workers: which are opened and which end, whatever stands in the view."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvstore.cluster.view import Target, TargetState
from kvstore.errors import KVStoreError, Unavailable
from kvstore.limits import PEER_LOOKUPS_MAX, SECOND_NS
from kvstore.server.errand import Errand
from kvstore.server.loop import Loop
from kvstore.server.peer import Greeting
from kvstore.server.peers import Peers, numeric, split_address
from kvstore.wire.messages import End
from kvstore.wire.replicas import Pull

MESSAGE = Pull(namespace=bytes(32), keys=b"k" * 32, source="a")


class Asker:
    """Peers on a loop of their own, and how their calls ended."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.peers = Peers(self.loop, greeting=lambda: Greeting(client_id=b"c" * 16), clock=lambda: 0)
        self.errors: list[KVStoreError] = []

    def ask(self, *data: str) -> None:
        target = Target(id="a", data=data, weight=1.0, state=TargetState.SERVING, node_id="a", boot_id="")
        self.peers.ask(target, Errand(MESSAGE, End, lambda _: None, self.errors.append))

    def turn_until_failed(self, count: int) -> None:
        while len(self.errors) < count:
            self.loop.turn(SECOND_NS, lambda: None)


@pytest.fixture
def asker() -> Iterator[Asker]:
    made = Asker()
    yield made
    made.peers.close()
    made.loop.close()


@pytest.mark.parametrize("address", ["a..b:7000", f"{'x' * 70}:7000", "ex\N{LATIN SMALL LETTER A WITH DIAERESIS}..:1"])
def test_what_cannot_be_a_name_fails_the_call_and_nothing_else(asker: Asker, address: str) -> None:
    for count in range(1, PEER_LOOKUPS_MAX + 2):  # each look-up makes room for the next
        asker.ask(address)
        asker.turn_until_failed(count)
    assert {type(error) for error in asker.errors} == {Unavailable}


@pytest.mark.parametrize(
    "address", ["127.0.0.1:99999", "127.0.0.1:\N{SUPERSCRIPT TWO}", "127.0.0.1", "127.0.0.1:" + "9" * 5000]
)
def test_a_port_that_cannot_be_is_none(address: str) -> None:
    assert split_address(address)[1] == 0
    assert (numeric(address) or (0, ("", 0)))[1][1] == 0


def test_a_connection_that_another_rail_made_meanwhile_is_used(asker: Asker) -> None:
    """A name may be looked up for long, and the worker be reached by another address by then."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        data = (f"localhost:{port}", f"127.0.0.1:{port}")
        asker.ask(*data)
        asker.peers._rails[data] = 1
        asker.ask(*data)
        (peer,) = asker.peers._peers.values()
        while asker.peers._waiting:
            asker.loop.turn(SECOND_NS, lambda: None)
        assert list(asker.peers._peers.values()) == [peer], "nobody would end the one that is forgotten"
        asker.peers.close()
        assert len(asker.errors) == 2

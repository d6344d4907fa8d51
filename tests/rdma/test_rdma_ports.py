"""A client's RDMA ports: opened once each, by whoever asks first, without keeping others waiting."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.errors import Closed, Unavailable
from kvstore.testing.fake_verbs import FakeFabric, FakeHardware
from kvstore.testing.rdma_lab import client_rail
from kvstore.testing.rdma_town import GID_INDEX, gid
from kvstore_client.rdma import RdmaPort, RdmaPorts
from kvstore_client.stats import Counters

WAIT_S = 60


class Bench:
    """Ports whose devices open when a test lets them."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.ports = RdmaPorts(self.counters, self._open)
        self.fabric = FakeFabric({name: FakeHardware(gids={GID_INDEX: gid(1)}) for name in ("a", "b")})
        self.asked: list[str] = []
        self.may_open = {host: threading.Event() for host in ("slow", "quick", "alias", "broken")}
        self.has_asked = threading.Event()

    def _open(self, host: str) -> RdmaPort:
        self.asked.append(host)
        self.has_asked.set()
        assert self.may_open[host].wait(WAIT_S)
        if host == "broken":
            raise Unavailable("no port has this address")
        name = "b" if host == "quick" else "a"
        return RdmaPort(client_rail(self.fabric, name, GID_INDEX), f"{name}:1")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_device_that_is_slow_to_open_keeps_only_those_waiting_who_need_it(bench: Bench) -> None:
    with ThreadPoolExecutor(3) as pool:
        slow = [pool.submit(bench.ports.port_for, "slow") for _ in range(3)]
        assert bench.has_asked.wait(WAIT_S)
        bench.may_open["quick"].set()
        assert bench.ports.port_for("quick").name == "b:1"
        bench.ports.close_idle()
        assert not any(one.done() for one in slow)
        bench.may_open["slow"].set()
        assert len({one.result(WAIT_S) for one in slow}) == 1
    assert bench.asked == ["slow", "quick"]
    bench.ports.close()
    assert not bench.fabric.regions


def test_addresses_of_one_port_share_it(bench: Bench) -> None:
    for event in bench.may_open.values():
        event.set()
    assert bench.ports.port_for("slow") is bench.ports.port_for("alias")
    assert len(bench.fabric.regions) == 1, "the second was closed again"
    bench.ports.close()
    assert not bench.fabric.regions


def test_what_cannot_be_opened_is_said_once_and_not_tried_again(bench: Bench) -> None:
    bench.may_open["broken"].set()
    for _ in range(3):
        with pytest.raises(Unavailable, match="no port has this address"):
            bench.ports.port_for("broken")
    assert bench.asked == ["broken"]
    assert bench.counters.rdma_fallbacks == 1


def test_a_port_that_opens_behind_the_close_is_closed_at_once(bench: Bench) -> None:
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(bench.ports.port_for, "slow")
        assert bench.has_asked.wait(WAIT_S)
        bench.ports.close()
        bench.may_open["slow"].set()
        late.result(WAIT_S)
    assert not bench.fabric.regions
    with pytest.raises(Closed):
        bench.ports.port_for("quick")

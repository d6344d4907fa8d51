"""RDMA: GIDs, MTUs, port flaps and memory limits (tests/vectors/rdma_choice.json), read from a fake /sys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.doctor.finding import Status
from kvstore.doctor.rdma import check_rdma, read_rdma
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.limits import PAGE_BYTES
from kvstore.testing.fake_system import FakeSystem
from kvstore.transport.rdma_choice import (
    PATH_MTUS_BYTES,
    ROCE_V2,
    GidEntry,
    RdmaPort,
    choose_gid,
    choose_port,
    path_mtu_bytes,
    path_mtu_of_netdev,
)
from kvstore.transport.rdma_ports import RDMA_CLASS
from kvstore.transport.rdma_regions import RegionLimits, plan_regions

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "rdma_choice.json").read_text())


def by_name(entry: dict[str, Any]) -> str:
    return str(entry["name"])


def build(fake: FakeSystem, vector: dict[str, Any]) -> None:
    """The machine of a vector, as the kernel lays it out (sysfs-class-infiniband)."""
    for netdev, values in vector["netdevs"].items():
        fake.put({f"/sys/class/net/{netdev}/{name}": str(value) for name, value in values.items()})
    for port in vector["ports"]:
        folder = f"{RDMA_CLASS}/{port['device']}/ports/{port['port']}"
        fake.put({f"{folder}/{name}": port.get(name, "0x0") for name in ("link_layer", "state", "rate", "lid")})
        fake.put({f"{folder}/gids/{index}": "0000:" * 7 + "0000" for index in range(8)})
        for index, entry in port["gids"].items():
            fake.put({f"{folder}/gids/{index}": entry["gid"], f"{folder}/gid_attrs/types/{index}": entry["type"]})
            if "netdev" in entry:
                fake.put({f"{folder}/gid_attrs/ndevs/{index}": entry["netdev"]})


def read(fake: FakeSystem, vector: dict[str, Any]) -> tuple[RdmaPort, ...]:
    build(fake, vector)
    return read_rdma(fake, transport="auto", hosts=()).ports


@pytest.mark.parametrize("vector", VECTORS["gids"], ids=by_name)
def test_the_choice_of_gid_and_port(fake: FakeSystem, vector: dict[str, Any]) -> None:
    ports = read(fake, vector)
    options = {"wanted_gid": vector.get("wanted_gid", ""), "hosts": vector.get("hosts", ())}
    if "error" in vector:
        with pytest.raises(InvalidRequest if "wanted_gid" in vector else Unavailable) as refused:
            choose_port(ports, **options)
        assert [words for words in vector["error"] if words not in str(refused.value)] == []
        return
    choice = choose_port(ports, **options)
    found = {
        "port": choice.port.name,
        "gid": choice.gid.index,
        "uses_lid": choice.gid.uses_lid,
        "mtu": choice.port.mtu_bytes,
    }
    assert found == vector["choice"]
    assert [words for words in vector["reason"] if words not in choice.reason] == []


@pytest.mark.parametrize("vector", VECTORS["flaps"], ids=by_name)
def test_a_port_goes_down_and_comes_back(fake: FakeSystem, vector: dict[str, Any]) -> None:
    ports = read(fake, vector)
    if "error" in vector:
        with pytest.raises(Unavailable) as refused:
            choose_port(ports)
        assert [words for words in vector["error"] if words not in str(refused.value)] == []
    else:
        choice = choose_port(ports)
        assert choice.port.name == vector["down"]
        name, reason = choice.passed_over[0]
        assert name == vector["passed_over"][0]
        assert vector["passed_over"][1] in reason
    if vector["up"]:
        fake.put({f"{RDMA_CLASS}/mlx5_0/ports/1/state": "4: ACTIVE"})
        assert choose_port(read_rdma(fake, transport="auto", hosts=()).ports).port.name == vector["up"]


@pytest.mark.parametrize("vector", VECTORS["mtus"])
def test_the_path_mtu_is_the_lesser(vector: dict[str, Any]) -> None:
    if vector["path"] is None:
        with pytest.raises(InvalidRequest, match="it must be one of 256"):
            path_mtu_bytes(vector["local"], vector["peer"])
    else:
        assert path_mtu_bytes(vector["local"], vector["peer"]) == vector["path"]
        assert path_mtu_bytes(vector["peer"], vector["local"]) == vector["path"]


@pytest.mark.parametrize("vector", VECTORS["netdev_mtus"])
def test_the_path_mtu_of_a_network_device(vector: dict[str, Any]) -> None:
    assert path_mtu_of_netdev(vector["netdev"]) == vector["path"]


@pytest.mark.parametrize("vector", VECTORS["regions"], ids=by_name)
def test_memory_is_cut_into_regions(vector: dict[str, Any]) -> None:
    limits = RegionLimits(
        memlock_bytes=vector["memlock"], region_bytes_max=vector["max_mr_size"], regions_max=vector["max_mr"]
    )
    plan = plan_regions(vector["wanted"], limits)
    assert list(plan.piece_bytes) == vector["pieces"]
    assert [words for words in vector["shortfall"] if words not in plan.shortfall] == []
    assert bool(plan.shortfall) == bool(vector["shortfall"])


@given(
    st.integers(0, 1 << 34),
    st.one_of(st.none(), st.integers(0, 1 << 34)),
    st.integers(0, 1 << 30),
    st.integers(0, 64),
)
def test_regions_keep_within_every_limit(wanted: int, memlock: int | None, region: int, regions: int) -> None:
    limits = RegionLimits(memlock_bytes=memlock, region_bytes_max=region, regions_max=regions)
    plan = plan_regions(wanted, limits)
    assert all(0 < piece <= region and piece % PAGE_BYTES == 0 for piece in plan.piece_bytes)
    assert len(plan.piece_bytes) <= regions
    assert memlock is None or plan.usable_bytes <= memlock
    assert plan.usable_bytes <= plan.wanted_bytes
    assert (plan.usable_bytes == plan.wanted_bytes) == (not plan.shortfall)


GOOD_GIDS = ("::ffff:10.0.0.1", "::ffff:10.0.0.2", "fd00::1")
ADDRESSES = st.sampled_from(
    ("::ffff:10.0.0.1", "::ffff:10.0.0.2", "fd00::1", "fe80::1", "::ffff:169.254.1.1", "ff02::1")
)
ENTRIES = st.lists(
    st.tuples(ADDRESSES, st.sampled_from((ROCE_V2, "IB/RoCE v1")), st.sampled_from(("eth1", "")), st.booleans()),
    max_size=6,
)


@given(ENTRIES)
def test_the_rule_never_takes_what_peers_cannot_reach(entries: list[tuple[str, str, str, bool]]) -> None:
    gids = tuple(
        GidEntry(index=index, gid=gid, type=kind, netdev=netdev, netdev_is_up=up)
        for index, (gid, kind, netdev, up) in enumerate(entries)
    )
    port = RdmaPort(device="mlx5_0", port=1, link_layer="Ethernet", state="ACTIVE", gids=gids)
    good = [entry for entry in gids if entry.gid in GOOD_GIDS and entry.type == ROCE_V2 and entry.netdev]
    if not any(entry.netdev_is_up for entry in good):
        with pytest.raises(Unavailable) as refused:
            choose_gid(port)
        assert all(f"{entry.index} " in str(refused.value) for entry in gids)
        return
    choice = choose_gid(port)
    taken = gids[choice.index]
    assert taken.gid == choice.gid
    assert (taken.type, taken.netdev, taken.netdev_is_up) == (ROCE_V2, "eth1", True)
    assert taken.gid in GOOD_GIDS


def port_of(device: str, rate: float, address: str) -> RdmaPort:
    entry = GidEntry(index=1, gid=address, type=ROCE_V2, netdev="eth1")
    return RdmaPort(
        device=device, port=1, link_layer="Ethernet", state="ACTIVE", rate_gbits=rate, mtu_bytes=4096, gids=(entry,)
    )


def test_ports_are_ranked_by_address_then_rate_then_name() -> None:
    ports = [port_of("b", 100, "::ffff:10.0.0.1"), port_of("a", 100, "fd00::1"), port_of("c", 400, "::ffff:10.0.0.3")]
    assert choose_port(ports).port.device == "c"
    assert "fastest" in choose_port(ports).reason
    assert choose_port(ports[:2]).port.device == "a"
    chosen = choose_port(ports, hosts=["node.example", "10.0.0.1"])
    assert chosen.port.device == "b"
    assert dict(chosen.passed_over)["c:1"].startswith("has none of the addresses")
    assert choose_port(ports, wanted_port="b").port.device == "b"
    assert choose_port(ports, wanted_port="b:1").reason.startswith("b:1, as set")
    with pytest.raises(InvalidRequest, match="'d' is not here; there are: b:1, a:1, c:1"):
        choose_port(ports, wanted_port="d")


def test_the_doctor_shows_ports_and_choice(fake: FakeSystem) -> None:
    build(fake, VECTORS["gids"][0])
    port, choice = check_rdma(read_rdma(fake, transport="auto", hosts=()))
    assert (port.check, port.subject, port.status) == ("rdma_port", "mlx5_0:1", Status.OK)
    assert "ACTIVE, Ethernet, 100 Gbit/s, path MTU 4096" in port.found
    assert "3 26.208.8.250 (RoCE v2, no network device here)" in port.found
    assert (choice.check, choice.status) == ("rdma_choice", Status.OK)
    assert choice.found == "mlx5_0:1, GID 7 (10.14.1.72), path MTU 4096"
    assert "passed over" in choice.reason


def test_a_small_mtu_and_a_port_that_is_down_are_warnings(fake: FakeSystem) -> None:
    build(fake, VECTORS["flaps"][0])
    fake.put({"/sys/class/net/eth2/mtu": "1500"})
    down, small, choice = check_rdma(read_rdma(fake, transport="auto", hosts=()))
    assert down.status is small.status is Status.WARNING
    assert down.fix
    assert "ip link set dev eth1 up" in down.fix.shell
    assert small.fix
    assert small.fix.shell.startswith("ip link set dev eth2 mtu 4200")
    assert "4 times as many packets" in small.reason
    assert choice.status is Status.OK
    assert "not mlx5_0:1: state DOWN" in choice.reason


@pytest.mark.parametrize(("transport", "status"), [("tcp", Status.OK), ("auto", Status.OK), ("rdma", Status.FAILING)])
def test_no_device(fake: FakeSystem, transport: str, status: Status) -> None:
    (choice,) = check_rdma(read_rdma(fake, transport=transport, hosts=()))
    assert choice.status is status
    assert ("payload travels over TCP" in choice.reason) == (transport == "auto")


def test_a_device_that_cannot_be_used_is_said_even_when_tcp_will_do(fake: FakeSystem) -> None:
    build(fake, VECTORS["gids"][3])
    *_, choice = check_rdma(read_rdma(fake, transport="auto", hosts=()))
    assert choice.status is Status.WARNING
    assert "its GID table is empty" in choice.reason
    *_, choice = check_rdma(read_rdma(fake, transport="rdma", hosts=()))
    assert choice.status is Status.FAILING


@given(st.text(alphabet="0123456789abcdefx:. /ACTIVE", max_size=20))
def test_what_sys_says_wrongly_is_no_crash(tmp_path_factory: pytest.TempPathFactory, garbage: str) -> None:
    fake = FakeSystem(tmp_path_factory.mktemp("machine"))
    folder = f"{RDMA_CLASS}/x/ports/1"
    names = ("link_layer", "state", "lid", "rate", "gids/0", "gid_attrs/types/0", "gid_attrs/ndevs/0")
    fake.put({f"{folder}/{name}": garbage for name in names})
    facts = read_rdma(fake, transport="auto", hosts=())
    try:
        check_rdma(facts)
    except KVStoreError as error:
        pytest.fail(f"an error reached the table: {error}")


def test_path_mtus_are_those_of_the_verbs() -> None:
    assert PATH_MTUS_BYTES == (256, 512, 1024, 2048, 4096)

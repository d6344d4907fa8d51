"""NUMA nodes and PCIe paths of NICs, drives and GPUs: a server of files with two sockets, and this machine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.doctor.finding import Finding, Status
from kvstore.doctor.system import LinuxSystem
from kvstore.doctor.topology import check_topology, read_topology
from kvstore.testing.fake_system import FakeSystem

SWITCH = "/sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0"
OTHER = "/sys/devices/pci0000:97/0000:97:01.0"


def pci(folder: str, *, node: int, speed: str = "32.0 GT/s PCIe", width: int = 4) -> dict[str, str]:
    return {
        f"{folder}/numa_node": str(node),
        f"{folder}/current_link_speed": speed,
        f"{folder}/max_link_speed": "32.0 GT/s PCIe",
        f"{folder}/current_link_width": str(width),
        f"{folder}/max_link_width": "4",
    }


def put_server(fake: FakeSystem) -> None:
    """Socket 0: a NIC, a GPU and a drive behind one switch; socket 1: another NIC and drive; and devices of no bus."""
    nic, gpu, near = f"{SWITCH}/0000:18:00.0", f"{SWITCH}/0000:19:00.0", f"{SWITCH}/0000:1a:00.0"
    far_nic, far = f"{OTHER}/0000:98:00.0", f"{OTHER}/0000:99:00.0"
    for folder, node in ((nic, 0), (near, 0), (far_nic, 1), (far, 1)):
        fake.put(pci(folder, node=node))
    fake.put(pci(gpu, node=0) | {f"{gpu}/class": "0x030200", f"{gpu}/vendor": "0x10de"})
    fake.put(
        {
            f"{nic}/net/eth0/device": f"-> {nic}",
            f"{far_nic}/net/eth1/device": f"-> {far_nic}",
            "/sys/class/net/eth0": f"-> {nic}/net/eth0",
            "/sys/class/net/eth1": f"-> {far_nic}/net/eth1",
            "/sys/devices/virtual/net/lo/mtu": "65536",
            "/sys/class/net/lo": "-> /sys/devices/virtual/net/lo",
            f"{near}/nvme/nvme0/nvme0n1/size": "1",
            f"{far}/nvme/nvme1/nvme1n1/size": "1",
            "/sys/block/nvme0n1": f"-> {near}/nvme/nvme0/nvme0n1",
            "/sys/block/nvme1n1": f"-> {far}/nvme/nvme1/nvme1n1",
            "/sys/devices/virtual/block/loop0/size": "0",
            "/sys/block/loop0": "-> /sys/devices/virtual/block/loop0",
            "/sys/bus/pci/devices/0000:19:00.0": f"-> {gpu}",
            f"{far_nic}/infiniband/mlx5_0/device": f"-> {far_nic}",
            "/sys/class/infiniband/mlx5_0": f"-> {far_nic}/infiniband/mlx5_0",
            "/sys/class/infiniband/rxe0/ports/1/state": "4: ACTIVE",
        }
    )


def examined(fake: FakeSystem, *, netdevs: Sequence[str], drives: Sequence[str]) -> dict[str, Finding]:
    places = read_topology(fake, netdevs=netdevs, drives=drives)
    return {one.subject: one for one in check_topology(places)}


def test_where_everything_sits(fake: FakeSystem) -> None:
    put_server(fake)
    found = examined(fake, netdevs=("eth0",), drives=("nvme0n1",))
    assert list(found) == [
        "nic eth0",
        "nic eth1",
        "rdma mlx5_0",
        "drive nvme0n1",
        "drive nvme1n1",
        "gpu 0000:19:00.0",
    ]
    assert {one.status for one in found.values()} == {Status.OK}
    assert found["drive nvme0n1"].found == (
        "NUMA node 0, path 0000:16:01.0 > 0000:17:00.0 > 0000:1a:00.0, link 32.0 GT/s x4, used by this node"
    )
    assert found["gpu 0000:19:00.0"].reason == "nearest NIC: eth0 (2 shared steps of the path)"


def test_a_drive_on_the_other_socket(fake: FakeSystem) -> None:
    put_server(fake)
    finding = examined(fake, netdevs=("eth0",), drives=("nvme1n1",))["drive nvme1n1"]
    assert finding.status is Status.WARNING
    assert finding.needed == "NUMA node 0, where eth0 is"
    assert finding.fix
    assert "numactl --cpunodebind=0" in finding.fix.shell
    both = examined(fake, netdevs=("eth0", "eth1"), drives=("nvme0n1", "nvme1n1"))
    assert {one.status for one in both.values()} == {Status.OK}


@pytest.mark.parametrize(("speed", "width"), [("16.0 GT/s PCIe", 4), ("32.0 GT/s PCIe", 2)])
def test_a_link_below_its_maximum(fake: FakeSystem, speed: str, width: int) -> None:
    put_server(fake)
    fake.put(pci(f"{SWITCH}/0000:1a:00.0", node=0, speed=speed, width=width))
    finding = examined(fake, netdevs=("eth0",), drives=("nvme0n1",))["drive nvme0n1"]
    assert finding.status is Status.WARNING
    assert finding.needed == "PCIe link 32.0 GT/s x4"
    assert finding.fix
    assert "0000:1a:00.0" in finding.fix.shell


def test_gpus_of_others_are_not_listed(fake: FakeSystem) -> None:
    put_server(fake)
    fake.put({f"{SWITCH}/0000:19:00.0/vendor": "0x1a03"})  # the picture of a management controller
    assert "gpu 0000:19:00.0" not in examined(fake, netdevs=(), drives=())


def test_a_machine_that_tells_nothing(fake: FakeSystem) -> None:
    assert examined(fake, netdevs=("eth0",), drives=("sda",)) == {}


def test_this_machine() -> None:
    system = LinuxSystem()
    found = check_topology(read_topology(system, netdevs=(), drives=()))
    real = [name for name in system.names("/sys/block") if "/virtual/" not in (system.real(f"/sys/block/{name}") or "")]
    assert [one.subject for one in found if one.subject.startswith("drive ")] == [f"drive {name}" for name in real]

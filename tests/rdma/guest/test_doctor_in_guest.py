"""What the doctor finds of real RDMA devices: the tables that the kernel shows of its software RDMA."""

from __future__ import annotations

from dataclasses import replace

from kvstore.doctor.finding import Status
from kvstore.doctor.rdma import check_choice, check_rdma, read_rdma
from kvstore.doctor.system import LinuxSystem
from kvstore.transport.rdma_choice import ROCE_V2, choose_port, gid_text
from tests.rdma.network import ADDRESSES, GID_INDEX


def test_both_devices_with_their_tables_and_the_choice() -> None:
    facts = read_rdma(LinuxSystem(), transport="rdma", hosts=())  # a thousand entries each: read once
    assert [port.name for port in facts.ports] == ["rxe0:1", "rxe1:1"]
    assert {finding.status for finding in check_rdma(facts)} == {Status.OK}
    for port, address, netdev in zip(facts.ports, ADDRESSES, ("eth0", "eth1"), strict=True):
        assert (port.link_layer, port.state, port.mtu_bytes) == ("Ethernet", "ACTIVE", 4096)
        entry = next(entry for entry in port.gids if entry.index == GID_INDEX)
        assert (gid_text(entry.gid), entry.type, entry.netdev) == (address, ROCE_V2, netdev)
        assert entry.netdev_is_up
        choice = choose_port(facts.ports, hosts=(address,))
        assert (choice.port.device, choice.gid.index) == (port.device, GID_INDEX)
    found = check_choice(replace(facts, hosts=(ADDRESSES[1],))).found
    assert found == f"rxe1:1, GID {GID_INDEX} ({ADDRESSES[1]}), path MTU 4096"

"""RDMA devices: their ports, GIDs and MTU as /sys shows them, and which one a node takes, with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.doctor.finding import Finding, Fix, Status
from kvstore.doctor.system import System
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.transport.rdma_choice import (
    ETHERNET,
    PATH_MTUS_BYTES,
    RdmaPort,
    choose_port,
    describe_table,
    gid_text,
)
from kvstore.transport.rdma_ports import read_ports

_JUMBO_MTU_BYTES: Final = 4200


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaFacts:
    """What there is, and what is wanted.

    Attributes:
        ports: of all devices, by name.
        transport: the setting: "tcp", "auto" or "rdma".
        hosts: addresses that the node listens on.
    """

    ports: tuple[RdmaPort, ...]
    transport: str
    hosts: tuple[str, ...]


def read_rdma(system: System, *, transport: str, hosts: Sequence[str]) -> RdmaFacts:
    """Read the devices below /sys/class/infiniband (Documentation/ABI/stable/sysfs-class-infiniband)."""
    return RdmaFacts(ports=read_ports(system), transport=transport, hosts=tuple(hosts))


def check_rdma(facts: RdmaFacts) -> list[Finding]:
    """A line for each port, and one for the choice."""
    return [*(check_port(port, facts) for port in facts.ports), check_choice(facts)]


def check_port(port: RdmaPort, facts: RdmaFacts) -> Finding:
    """Whether a port is up and carries large packets."""
    found = f"{port.state}, {port.link_layer}, {port.rate_gbits:g} Gbit/s, path MTU {port.mtu_bytes or 'not in /sys'}"
    found += f", LID {port.lid}" if port.lid else ""
    found += f"; GIDs: {describe_table(port.gids)}" if port.gids or port.link_layer == ETHERNET else ""
    status, reason, fix = Status.OK, "", None
    netdev = next((entry.netdev for entry in port.gids if entry.netdev), "")
    if port.state != "ACTIVE":
        status = Status.WARNING
        reason = "the port is not up: its queue pairs would fail, and payload takes other ports or TCP"
        up = f"ip link set dev {netdev or 'NETDEV'} up"
        fix = Fix(
            shell=f"check cable and switch, then {up}; on InfiniBand start a subnet manager (opensm)",
            systemd=f"a .network file of systemd-networkd with ActivationPolicy=always-up for {netdev or 'NETDEV'}",
            kubernetes="take the node out of the pool of this resource until the port is up; `rdma link` on the node",
        )
    elif port.mtu_bytes is not None and port.mtu_bytes < PATH_MTUS_BYTES[-1]:
        status = Status.WARNING
        reason = f"{PATH_MTUS_BYTES[-1] // max(port.mtu_bytes, 1)} times as many packets as with a path MTU of 4096"
        fix = Fix(
            shell=f"ip link set dev {netdev} mtu {_JUMBO_MTU_BYTES} (or 9000), on both ends and on the switch",
            systemd=f"in a .link or .network file for {netdev}: MTUBytes={_JUMBO_MTU_BYTES}",
            kubernetes='"mtu": 9000 in the NetworkAttachmentDefinition (or host setting) of the RDMA network',
        )
    return Finding(
        check="rdma_port",
        subject=port.name,
        status=status,
        found=found,
        needed="ACTIVE, path MTU 4096",
        reason=reason,
        fix=fix,
    )


def check_choice(facts: RdmaFacts) -> Finding:
    """Which port and GID the node takes, or why it stays with TCP."""
    if facts.transport in ("tcp", "shm"):
        return Finding(
            check="rdma_choice",
            status=Status.OK,
            found="none",
            needed="none",
            reason=f"transport is {facts.transport}, as set",
        )
    needed = "a port in state ACTIVE with a routable RoCE v2 GID, or InfiniBand with a LID"
    try:
        choice = choose_port(facts.ports, hosts=facts.hosts)
    except (Unavailable, InvalidRequest) as error:
        wanted = facts.transport == "rdma"
        calm = not facts.ports and not wanted
        return Finding(
            check="rdma_choice",
            status=Status.FAILING if wanted else Status.OK if calm else Status.WARNING,
            found="none",
            needed=needed if wanted or facts.ports else "none: transport is auto",
            reason=f"{error}; payload travels over TCP" if not wanted else str(error),
            fix=None
            if calm
            else Fix(
                shell="rdma link (iproute2) shows the ports; mend what the reason says, or pass --transport tcp",
                systemd="Environment=KVSTORE_TRANSPORT=tcp, or mend what the reason says",
                kubernetes="request the RDMA resource of your device plugin (such as rdma/hca: 1) for the pod, "
                "or set transport: tcp",
            ),
        )
    gid = choice.gid
    address = f"LID {choice.port.lid}" if gid.uses_lid else f"GID {gid.index} ({gid_text(gid.gid)})"
    passed = "; ".join(f"not {name}: {why}" for name, why in choice.passed_over)
    return Finding(
        check="rdma_choice",
        status=Status.OK,
        found=f"{choice.port.name}, {address}, path MTU {choice.port.mtu_bytes or 'by the port'}",
        needed=needed,
        reason="; ".join(filter(None, (choice.reason, passed))),
    )

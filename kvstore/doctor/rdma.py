"""RDMA devices: their ports, GIDs and MTU as /sys shows them, and which one a node takes, with its reason."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.doctor.finding import Finding, Fix, Status
from kvstore.doctor.system import System, whole_number
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.transport.rdma_choice import (
    ETHERNET,
    PATH_MTUS_BYTES,
    GidEntry,
    RdmaPort,
    choose_port,
    describe_table,
    gid_text,
    path_mtu_of_netdev,
)

RDMA_CLASS: Final = "/sys/class/infiniband"
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
    ports = [
        _read_port(system, device, int(number))
        for device in system.names(RDMA_CLASS)
        for number in system.names(f"{RDMA_CLASS}/{device}/ports")
        if number.isdigit()
    ]
    return RdmaFacts(ports=tuple(ports), transport=transport, hosts=tuple(hosts))


def _read_port(system: System, device: str, number: int) -> RdmaPort:
    folder = f"{RDMA_CLASS}/{device}/ports/{number}"
    link_layer = system.text(f"{folder}/link_layer") or ""
    gids = tuple(_read_gids(system, folder))
    return RdmaPort(
        device=device,
        port=number,
        link_layer=link_layer,
        state=_after_colon(system.text(f"{folder}/state")),  # "4: ACTIVE"
        lid=whole_number(system.text(f"{folder}/lid"), base=16) or 0,  # "0x0"
        rate_gbits=_rate(system.text(f"{folder}/rate")),  # "100 Gb/sec (4X EDR)"
        mtu_bytes=_mtu(system, gids) if link_layer == ETHERNET else None,
        gids=gids,
    )


def _read_gids(system: System, folder: str) -> list[GidEntry]:
    entries: list[GidEntry] = []
    for name in sorted((name for name in system.names(f"{folder}/gids") if name.isdigit()), key=int):
        gid = _gid(system.text(f"{folder}/gids/{name}"))
        if gid is None:
            continue
        netdev = system.text(f"{folder}/gid_attrs/ndevs/{name}") or ""
        if netdev and netdev not in system.names("/sys/class/net"):
            netdev = ""  # of another network namespace
        entries.append(
            GidEntry(
                index=int(name),
                gid=str(gid),
                type=system.text(f"{folder}/gid_attrs/types/{name}") or "",
                netdev=netdev,
                netdev_is_up=system.text(f"/sys/class/net/{netdev}/operstate") != "down" if netdev else False,
            )
        )
    return entries


def _mtu(system: System, gids: Sequence[GidEntry]) -> int | None:
    mtus = [whole_number(system.text(f"/sys/class/net/{entry.netdev}/mtu")) for entry in gids if entry.netdev]
    return min((path_mtu_of_netdev(mtu) for mtu in mtus if mtu), default=None)


def _gid(text: str | None) -> ipaddress.IPv6Address | None:
    """None for an empty entry: all zeros, or not readable."""
    try:
        gid = ipaddress.IPv6Address(text or "::")
    except ValueError:
        return None
    return gid if int(gid) else None


def _after_colon(text: str | None) -> str:
    return (text or "").partition(":")[2].strip() or "unknown"


def _rate(text: str | None) -> float:
    match = re.match(r"([0-9.]+)\s*Gb/sec", text or "")
    return float(match[1]) if match else 0


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
    if facts.transport == "tcp":
        return Finding(
            check="rdma_choice", status=Status.OK, found="none", needed="none", reason="transport is tcp, as set"
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

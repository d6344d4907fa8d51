"""Which RDMA port, GID and path MTU are used, and why: pure decisions over what /sys or a verbs library tells.

The RDMA transport takes the choice, `kvstore doctor` shows it; both say the same reason. Nothing here reads a device.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.errors import InvalidRequest, Unavailable

ETHERNET: Final = "Ethernet"  # link_layer in /sys: RoCE
INFINIBAND: Final = "InfiniBand"
ROCE_V2: Final = "RoCE v2"  # gid_attrs/types in /sys; the other one is "IB/RoCE v1"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

PATH_MTUS_BYTES: Final = (256, 512, 1024, 2048, 4096)  # enum ib_mtu
_ROCE_HEADERS_BYTES: Final = 40 + 8 + 12 + 4 + 28 + 4
"""GRH, UDP, BTH, XRC, atomic header, ICRC: what iboe_get_mtu() of the kernel takes off (include/rdma/ib_addr.h)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GidEntry:
    """One line of a port's GID table.

    Attributes:
        index: its place in the table.
        gid: 16 bytes as IPv6 text; an IPv4 address is mapped into it, "::ffff:10.0.0.1" or "::ffff:a00:1".
        type: "RoCE v2" or "IB/RoCE v1".
        netdev: network device that carries the address; "" where none here does.
        netdev_is_up: that device has a carrier.
    """

    index: int
    gid: str
    type: str
    netdev: str = ""
    netdev_is_up: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of an RDMA device.

    Attributes:
        device: "mlx5_0".
        port: from 1.
        link_layer: ETHERNET or INFINIBAND.
        state: "ACTIVE", "DOWN", "INIT" or "ARMED".
        lid: local identifier of InfiniBand; 0 on Ethernet.
        rate_gbits: what the link carries, in Gbit/s; 0 is not known.
        mtu_bytes: path MTU that the port can do now; None is not known (/sys has it only by way of a network device).
        gids: entries that are not empty, by index.
    """

    device: str
    port: int
    link_layer: str
    state: str
    lid: int = 0
    rate_gbits: float = 0
    mtu_bytes: int | None = None
    gids: tuple[GidEntry, ...] = ()

    @property
    def name(self) -> str:
        """ "mlx5_0:1"."""
        return f"{self.device}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GidChoice:
    """How peers address a port.

    Attributes:
        index: of the GID; on InfiniBand inside one subnet it is not used, the LID is.
        gid: as IPv6 text; "" with the LID alone.
        uses_lid: InfiniBand: no global route header is needed.
        reason: one clause for people.
    """

    index: int
    gid: str
    uses_lid: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PortChoice:
    """The port that is used.

    Attributes:
        port, gid: what was chosen.
        reason: one sentence for people: why this one, and why not the others.
        passed_over: names of the ports that were not taken, each with its reason.
    """

    port: RdmaPort
    gid: GidChoice
    reason: str
    passed_over: tuple[tuple[str, str], ...]


def choose_gid(port: RdmaPort, *, wanted: str = "", hosts: Sequence[str] = ()) -> GidChoice:
    """The GID by which peers reach this port.

    A setting wins. Else InfiniBand uses its LID, and Ethernet the first RoCE v2 entry with a network device that is up
    and an address that routers carry: those of `hosts` first, then IPv4 before IPv6, then by index. RoCE v1 and
    link-local addresses do not leave their segment, and an entry without network device is somebody else's (a VM's or
    a container's): they are taken only when asked for.

    Args:
        port: with its table.
        wanted: index ("3") or address ("10.14.1.72", "fd00::1") from the settings; "" lets the rule choose.
        hosts: addresses that this node listens on; others than IP addresses are ignored.

    Raises:
        InvalidRequest: `wanted` is not in the table; the message lists the table.
        Unavailable: nothing in the table can be used; the message lists the table, each entry with its fault, and the
            fix.
    """
    if wanted:
        return _wanted_gid(port, wanted)
    if port.link_layer == INFINIBAND:
        if port.lid:
            return GidChoice(
                index=0, gid="", uses_lid=True, reason=f"InfiniBand: peers in the subnet use LID {port.lid}"
            )
        raise Unavailable(
            f"{port.name} is an InfiniBand port without LID (state {port.state}): no subnet manager has set it up; "
            "start opensm on a host of this fabric, or enable the switch's"
        )
    ours = _addresses(hosts)
    usable = [entry for entry in port.gids if not _fault(entry)]
    if not usable:
        raise Unavailable(
            f"{port.name} has no GID that peers could use: {describe_table(port.gids)}; "
            f"{_fix_of_table(port)}, or set the GID index"
        )

    def rank(entry: GidEntry) -> tuple[bool, bool, int]:
        address = _plain(entry.gid)
        return address not in ours, address.version == 6, entry.index

    best = min(usable, key=rank)
    return GidChoice(index=best.index, gid=best.gid, uses_lid=False, reason=_why(best, usable, port.gids, ours))


def choose_port(
    ports: Sequence[RdmaPort], *, wanted_port: str = "", wanted_gid: str = "", hosts: Sequence[str] = ()
) -> PortChoice:
    """The port for one rail.

    A setting wins. Else ACTIVE ports with a usable GID: one that has an address of `hosts` first, then the fastest,
    then by name and number, so that every start chooses alike.

    Args:
        ports: of all RDMA devices of this machine.
        wanted_port: "mlx5_0" or "mlx5_0:1" from the settings; "" lets the rule choose.
        wanted_gid: as `wanted` of `choose_gid`.
        hosts: addresses that the rail listens on.

    Raises:
        InvalidRequest: a setting names what is not there.
        Unavailable: no port can be used; the message lists each with its fault and the fix.
    """
    candidates = [port for port in ports if not wanted_port or wanted_port in (port.device, port.name)]
    if wanted_port and not candidates:
        raise InvalidRequest(
            f"RDMA port {wanted_port!r} is not here; there are: {', '.join(port.name for port in ports) or 'none'}"
        )
    if not ports:
        raise Unavailable(
            "no RDMA device: /sys/class/infiniband is missing or empty; load the driver of the NIC (mlx5_ib, irdma, "
            "bnxt_re, rdma_rxe), in a container pass /dev/infiniband and the device's resource"
        )
    usable: list[tuple[RdmaPort, GidChoice]] = []
    faults: list[tuple[str, str]] = []
    wrong = False
    for port in candidates:
        if port.state != "ACTIVE":
            faults.append((port.name, f"state {port.state}, not ACTIVE: check cable, switch and `ip link set ... up`"))
            continue
        try:
            usable.append((port, choose_gid(port, wanted=wanted_gid, hosts=hosts)))
        except (InvalidRequest, Unavailable) as error:
            faults.append((port.name, str(error)))
            wrong = isinstance(error, InvalidRequest)
    if not usable and wrong:
        raise InvalidRequest("; ".join(fault for _, fault in faults))
    if not usable:
        raise Unavailable("no RDMA port can be used: " + "; ".join(f"{name}: {fault}" for name, fault in faults))
    ours = _addresses(hosts)

    def rank(one: tuple[RdmaPort, GidChoice]) -> tuple[bool, float, str, int]:
        port, _ = one
        return not _has(port, ours), -port.rate_gbits, port.device, port.port

    ranked = sorted(usable, key=rank)
    port, gid = ranked[0]
    faults += [(other.name, _why_later(port, other, ours)) for other, _ in ranked[1:]]
    return PortChoice(
        port=port, gid=gid, reason=_why_port(port, gid, wanted_port, ranked, ours), passed_over=tuple(faults)
    )


def path_mtu_bytes(local_bytes: int, peer_bytes: int) -> int:
    """The MTU that both ends of a queue pair set: the lesser of what their ports can do.

    Raises:
        InvalidRequest: one of them is no path MTU.
    """
    for whose, value in (("local", local_bytes), ("peer's", peer_bytes)):
        if value not in PATH_MTUS_BYTES:
            raise InvalidRequest(
                f"the {whose} path MTU is {value} bytes; it must be one of {', '.join(map(str, PATH_MTUS_BYTES))}"
            )
    return min(local_bytes, peer_bytes)


def path_mtu_of_netdev(netdev_mtu_bytes: int) -> int:
    """The path MTU that RoCE gets out of a network device's MTU: 1024 of 1500, 4096 of 4192 or more; 0 is too small."""
    room = netdev_mtu_bytes - _ROCE_HEADERS_BYTES
    return max((mtu for mtu in PATH_MTUS_BYTES if mtu <= room), default=0)


def describe_table(gids: Iterable[GidEntry]) -> str:
    """A GID table in one line, each entry with what speaks against it."""
    lines = [
        f"{entry.index} {gid_text(entry.gid)} ({', '.join(filter(None, (entry.type, entry.netdev, _fault(entry))))})"
        for entry in gids
    ]
    return "; ".join(lines) or "its GID table is empty"


def gid_text(gid: str) -> str:
    """A GID for people: an IPv4 address as such, else IPv6 in its short form."""
    return str(_plain(gid))


def _wanted_gid(port: RdmaPort, wanted: str) -> GidChoice:
    address = _address(wanted)
    for entry in port.gids:
        if wanted == str(entry.index) or (address is not None and address == _plain(entry.gid)):
            return GidChoice(index=entry.index, gid=entry.gid, uses_lid=False, reason=f"GID {wanted}, as set")
    raise InvalidRequest(f"GID {wanted!r} is not in the table of {port.name}: {describe_table(port.gids)}")


def _fault(entry: GidEntry) -> str:
    """Why the rule does not take an entry; "" where it may."""
    address = _plain(entry.gid)
    if address.is_link_local:
        return "link-local"
    if address.is_loopback or address.is_multicast or address.is_unspecified:
        return "no unicast address"
    if entry.type != ROCE_V2:
        return "not routable"
    if not entry.netdev:
        return "no network device here"
    return "" if entry.netdev_is_up else "its network device is down"


def _fix_of_table(port: RdmaPort) -> str:
    down = next((entry.netdev for entry in port.gids if entry.netdev and not entry.netdev_is_up), "")
    if down:
        return f"ip link set dev {down} up"
    netdev = next((entry.netdev for entry in port.gids if entry.netdev), "NETDEV")
    return f"give its network device a routable address (ip address add ADDRESS/PREFIX dev {netdev})"


def _why(
    best: GidEntry,
    usable: Sequence[GidEntry],
    table: Sequence[GidEntry],
    ours: frozenset[Address],
) -> str:
    address = _plain(best.gid)
    why = "an address that this node listens on" if address in ours else f"the first routable IPv{address.version}"
    others = [f"{entry.index} {_fault(entry)}" for entry in table if entry not in usable]
    others += [f"{entry.index} comes later" for entry in usable if entry is not best]
    passed = f"; passed over: {', '.join(others)}" if others else ""
    return f"{address} on {best.netdev}, {best.type}: {why}{passed}"


def _has(port: RdmaPort, ours: frozenset[Address]) -> bool:
    return any(_plain(entry.gid) in ours for entry in port.gids)


def _why_later(best: RdmaPort, other: RdmaPort, ours: frozenset[Address]) -> str:
    if _has(best, ours) and not _has(other, ours):
        return f"has none of the addresses that this node listens on; {best.name} has"
    if other.rate_gbits < best.rate_gbits:
        return f"{other.rate_gbits:g} Gbit/s, slower than {best.name}"
    return f"comes after {best.name}"


def _why_port(
    port: RdmaPort,
    gid: GidChoice,
    wanted_port: str,
    ranked: Sequence[tuple[RdmaPort, GidChoice]],
    ours: frozenset[Address],
) -> str:
    if wanted_port:
        why = "as set"
    elif len(ranked) == 1:
        why = "the only usable port"
    elif _has(port, ours):
        why = "has an address that this node listens on"
    else:
        slower = any(other.rate_gbits < port.rate_gbits for other, _ in ranked[1:])
        why = "the fastest usable port" if slower else "the first usable port by name"
    return f"{port.name}, {why}; GID {gid.index}: {gid.reason}"


def _addresses(hosts: Iterable[str]) -> frozenset[Address]:
    """Those of `hosts` that are addresses; names are not resolved."""
    return frozenset(address for host in hosts if (address := _address(host)) is not None)


def _address(text: str) -> Address | None:
    try:
        return _plain(text)
    except ValueError:
        return None


def _plain(text: str) -> Address:
    """The address of a GID or host; IPv4 where it is mapped into IPv6."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address

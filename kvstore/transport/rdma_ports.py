"""RDMA devices: their ports, GIDs and MTU as /sys shows them (Documentation/ABI/stable/sysfs-class-infiniband)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

from kvstore.device.host_files import Files, whole_number
from kvstore.transport.rdma_choice import ETHERNET, GidEntry, RdmaPort, path_mtu_of_netdev

RDMA_CLASS: Final = "/sys/class/infiniband"


def read_ports(files: Files) -> tuple[RdmaPort, ...]:
    """The ports of all devices, by name."""
    return tuple(
        _read_port(files, device, int(number))
        for device in files.names(RDMA_CLASS)
        for number in files.names(f"{RDMA_CLASS}/{device}/ports")
        if number.isdigit()
    )


def _read_port(files: Files, device: str, number: int) -> RdmaPort:
    folder = f"{RDMA_CLASS}/{device}/ports/{number}"
    link_layer = files.text(f"{folder}/link_layer") or ""
    gids = tuple(_read_gids(files, folder))
    return RdmaPort(
        device=device,
        port=number,
        link_layer=link_layer,
        state=_after_colon(files.text(f"{folder}/state")),  # "4: ACTIVE"
        lid=whole_number(files.text(f"{folder}/lid"), base=16) or 0,  # "0x0"
        rate_gbits=_rate(files.text(f"{folder}/rate")),  # "100 Gb/sec (4X EDR)"
        mtu_bytes=_mtu(files, gids) if link_layer == ETHERNET else None,
        gids=gids,
    )


def _read_gids(files: Files, folder: str) -> list[GidEntry]:
    entries: list[GidEntry] = []
    for name in sorted((name for name in files.names(f"{folder}/gids") if name.isdigit()), key=int):
        gid = _gid(files.text(f"{folder}/gids/{name}"))
        if gid is None:
            continue
        netdev = files.text(f"{folder}/gid_attrs/ndevs/{name}") or ""
        if netdev and netdev not in files.names("/sys/class/net"):
            netdev = ""  # of another network namespace
        entries.append(
            GidEntry(
                index=int(name),
                gid=str(gid),
                type=files.text(f"{folder}/gid_attrs/types/{name}") or "",
                netdev=netdev,
                netdev_is_up=files.text(f"/sys/class/net/{netdev}/operstate") != "down" if netdev else False,
            )
        )
    return entries


def _mtu(files: Files, gids: Sequence[GidEntry]) -> int | None:
    mtus = [whole_number(files.text(f"/sys/class/net/{entry.netdev}/mtu")) for entry in gids if entry.netdev]
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

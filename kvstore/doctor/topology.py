"""Where NICs, RDMA devices, drives and GPUs sit: NUMA node, PCIe path and link, from /sys alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from kvstore.device.host_files import whole_number
from kvstore.doctor.finding import Finding, Fix, Status
from kvstore.doctor.system import System
from kvstore.transport.rdma_ports import RDMA_CLASS

_PCI_ADDRESS: Final = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_PCI: Final = "/sys/bus/pci/devices"
_GPU_CLASSES: Final = ("0x0300", "0x0302", "0x1200")  # VGA, 3D controller, processing accelerator (PCI code list)
_GPU_VENDORS: Final = frozenset(("0x10de", "0x1002", "0x8086", "0x1da3"))  # NVIDIA, AMD, Intel, Habana


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOnBus:
    """Where one device sits.

    Attributes:
        kind: "nic", "rdma", "drive" or "gpu".
        name: "eth0", "mlx5_0", "nvme0n1", "0000:17:00.0".
        numa_node: None where there is one node only, or it is not told.
        path: PCI addresses from the root to the device; empty for what is no PCI device.
        link: "16.0 GT/s PCIe x4" as it runs now; "" where it is not told.
        link_max: what it could run at.
        is_served: the node uses it.
    """

    kind: str
    name: str
    numa_node: int | None
    path: tuple[str, ...]
    link: str = ""
    link_max: str = ""
    is_served: bool = False


def read_topology(system: System, *, netdevs: Sequence[str], drives: Iterable[str]) -> list[PlaceOnBus]:
    """NICs, RDMA devices, drives and GPUs of the machine; `netdevs` and `drives` are those that the node uses."""
    used = set(drives)
    places = [
        _place(system, "nic", name, f"/sys/class/net/{name}/device", is_served=name in netdevs)
        for name in system.names("/sys/class/net")
        if system.real(f"/sys/class/net/{name}/device")
    ]
    places += [
        _place(system, "rdma", name, f"{RDMA_CLASS}/{name}/device", is_served=False)
        for name in system.names(RDMA_CLASS)
        if system.real(f"{RDMA_CLASS}/{name}/device")  # a software device has none
    ]
    places += [
        _place(system, "drive", name, f"/sys/block/{name}", is_served=name in used)
        for name in system.names("/sys/block")
        if "/virtual/" not in (system.real(f"/sys/block/{name}") or "/virtual/")
    ]
    places += [
        _place(system, "gpu", address, f"{_PCI}/{address}", is_served=False)
        for address in system.names(_PCI)
        if (system.text(f"{_PCI}/{address}/class") or "").startswith(_GPU_CLASSES)
        and system.text(f"{_PCI}/{address}/vendor") in _GPU_VENDORS
    ]
    return places


def _place(system: System, kind: str, name: str, link: str, *, is_served: bool) -> PlaceOnBus:
    real = system.real(link) or ""
    path = tuple(piece for piece in real.split("/") if _PCI_ADDRESS.fullmatch(piece))
    # the last PCI device on the way is the one whose link counts; virtio and nvme have layers of their own above it
    folder = real[: real.rindex(path[-1]) + len(path[-1])] if path else real
    node = whole_number(system.text(f"{folder}/numa_node"))
    return PlaceOnBus(
        kind=kind,
        name=name,
        numa_node=node if node is not None and node >= 0 else None,
        path=path,
        link=_link(system, folder, "current"),
        link_max=_link(system, folder, "max"),
        is_served=is_served,
    )


def _link(system: System, folder: str, which: str) -> str:
    speed = system.text(f"{folder}/{which}_link_speed")
    width = system.text(f"{folder}/{which}_link_width")
    if not speed or not width or width in ("0", "255") or "nknown" in speed:
        return ""
    return f"{speed.removesuffix(' PCIe')} x{width}"


def check_topology(places: Sequence[PlaceOnBus]) -> list[Finding]:
    """A line for each device."""
    return [check_place(place, places) for place in places]


def check_place(place: PlaceOnBus, places: Sequence[PlaceOnBus]) -> Finding:
    """Whether a device runs at its full link, and sits beside what it works with."""
    status, reason, needed, fix = Status.OK, "", "PCIe link at its maximum", None
    far = _far_nic(place, places)
    if place.link and place.link_max and place.link != place.link_max and place.kind != "gpu":
        status = Status.WARNING
        needed = f"PCIe link {place.link_max}"
        reason = "the link runs below what the device can: a slot with fewer lanes, a riser, or errors at training"
        fix = Fix(
            shell=f"lspci -vv -s {place.path[-1]} (LnkSta, LnkCap); move it to a slot of that width, seat it again, "
            "update its firmware",
            systemd="the same; a unit cannot widen a link",
            kubernetes="cordon the node and mend it, or label it for other work",
        )
    elif far is not None:
        status = Status.WARNING
        needed = f"NUMA node {far.numa_node}, where {far.name} is"
        reason = f"each byte between {place.name} and {far.name} crosses the link between the sockets"
        fix = _numa_fix(place, far)
    elif place.kind == "gpu":
        nic = _nearest(place, [one for one in places if one.kind in ("rdma", "nic")])
        needed = "for information"
        reason = f"nearest NIC: {nic.name} ({_common(place, nic)} shared steps of the path)" if nic else "no NIC"
    link = f", link {place.link}" if place.link else ""
    used = ", used by this node" if place.is_served else ""
    node = f"NUMA node {place.numa_node}" if place.numa_node is not None else "NUMA node not told (one node)"
    return Finding(
        check="topology",
        subject=f"{place.kind} {place.name}",
        status=status,
        found=f"{node}, path {' > '.join(place.path) or 'not on PCIe'}{link}{used}",
        needed=needed,
        reason=reason,
        fix=fix,
    )


def _far_nic(place: PlaceOnBus, places: Sequence[PlaceOnBus]) -> PlaceOnBus | None:
    """For a drive of this node: its NIC, when none of them is on the drive's NUMA node."""
    if place.kind != "drive" or not place.is_served or place.numa_node is None:
        return None
    nics = [one for one in places if one.kind == "nic" and one.is_served and one.numa_node is not None]
    return nics[0] if nics and all(nic.numa_node != place.numa_node for nic in nics) else None


def _numa_fix(drive: PlaceOnBus, nic: PlaceOnBus) -> Fix:
    return Fix(
        shell=f"serve that drive through a NIC of NUMA node {drive.numa_node} (--host with its address: one worker for "
        f"each address), or numactl --cpunodebind={nic.numa_node} --membind={nic.numa_node} kvstore serve ...",
        systemd=f"NUMAPolicy=bind and NUMAMask={nic.numa_node}, with CPUAffinity=numa",
        kubernetes="topologyManagerPolicy: single-numa-node and cpuManagerPolicy: static in the kubelet, and requests "
        "equal to limits",
    )


def _nearest(place: PlaceOnBus, others: Sequence[PlaceOnBus]) -> PlaceOnBus | None:
    on_bus = [one for one in others if one.path]
    return max(on_bus, key=lambda one: (_common(place, one), one.numa_node == place.numa_node), default=None)


def _common(one: PlaceOnBus, other: PlaceOnBus) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.path, other.path, strict=False)))

"""Ports and advertised addresses: free, allowed, and reached by the names that clients are told."""

from __future__ import annotations

import errno
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.device.host_files import whole_number
from kvstore.doctor.finding import Finding, Fix, Status
from kvstore.doctor.sockets import Dialled, Holder, dial_back, holder_of, try_listen
from kvstore.doctor.system import System
from kvstore.limits import MS_NS

_EPHEMERAL: Final = "/proc/sys/net/ipv4/ip_local_port_range"
_RESERVED: Final = "/proc/sys/net/ipv4/ip_local_reserved_ports"


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFacts:
    """One port on one address.

    Attributes:
        setting: "grpc_port", "data_port" or "metrics_port".
        host, port: where the node will listen; port 0 is any free one.
        failure: errno of trying to listen; 0 when it can.
        holder: who listens there when it is in use; None when it cannot be told.
        is_reserved: it is kept out of that range (sysctl ip_local_reserved_ports).
        is_another: the holder is a node, of other data dirs than the settings name.
        ephemeral: range of ports that outgoing connections may take.
    """

    setting: str
    host: str
    port: int
    failure: int
    holder: Holder | None
    ephemeral: tuple[int, int]
    is_reserved: bool = False
    is_another: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvertisedFacts:
    """One address that clients are told.

    Attributes:
        host: the name or address.
        port: of the data plane, or 0 for any.
        listens_everywhere: the node listens on a wildcard.
        dialled: what came of connecting to it from here.
    """

    host: str
    port: int
    listens_everywhere: bool
    dialled: Dialled


def read_ports(
    system: System, *, hosts: Sequence[str], ports: Sequence[tuple[str, int]], data_dirs: Sequence[str] = ()
) -> list[PortFacts]:
    """Try to listen on each port of each host, as the node will; `data_dirs` tell it from other nodes."""
    own = {os.path.realpath(path) for path in data_dirs}
    low, high = (whole_number(word) or 0 for word in [*(system.text(_EPHEMERAL) or "").split(), "0", "0"][:2])
    reserved = _ranges(system.text(_RESERVED) or "")
    facts: list[PortFacts] = []
    for setting, port in ports:
        for host in dict.fromkeys(hosts):
            failure = try_listen(host, port)
            holder = holder_of(system, port) if failure == errno.EADDRINUSE else None
            facts.append(
                PortFacts(
                    setting=setting,
                    host=host,
                    port=port,
                    failure=failure,
                    holder=holder,
                    ephemeral=(low, high),
                    is_reserved=any(first <= port <= last for first, last in reserved),
                    is_another=bool(own and holder and holder.data_dirs and not own & set(holder.data_dirs)),
                )
            )
    return facts


def _ranges(text: str) -> list[tuple[int, int]]:
    """First and last port of each range of a list such as "8080,9148-9150" (kernel, ip-sysctl.rst)."""
    ends = [entry.partition("-") for entry in text.split(",")]
    numbers = [(whole_number(first), whole_number(last or first)) for first, _, last in ends]
    return [(first, last) for first, last in numbers if first is not None and last is not None]


def read_advertised(*, hosts: Sequence[str], advertise: str, port: int) -> list[AdvertisedFacts]:
    """Dial back each address that clients are told: `advertise`, and each host that is none of the wildcards."""
    everywhere = next((host for host in hosts if _is_wildcard(host)), "")
    told = [host for host in dict.fromkeys(hosts) if not _is_wildcard(host)]
    if advertise:
        told.append(advertise)
    return [
        AdvertisedFacts(
            host=host,
            port=port,
            listens_everywhere=bool(everywhere),
            dialled=dial_back(host, everywhere or (hosts[0] if host == advertise else host), port),
        )
        for host in dict.fromkeys(told)
    ]


def check_port(facts: PortFacts) -> Finding:
    """Whether the node can listen there."""
    flag = f"--{facts.setting.replace('_', '-')}"
    where = f"{facts.setting} {facts.port} on {facts.host}"
    needed = "free, or held by this node"
    if not facts.failure:
        low, high = facts.ephemeral
        taken_by_chance = facts.port and not facts.is_reserved and low <= facts.port <= high
        return Finding(
            check="port",
            subject=where,
            status=Status.WARNING if taken_by_chance else Status.OK,
            found="free" if facts.port else "any free one",
            needed=f"free, and outside of {low}-{high}" if taken_by_chance else needed,
            reason="an outgoing connection of any program may take it before the node starts"
            if taken_by_chance
            else "",
            fix=Fix(
                shell=f"pass a {flag} below {low}, or: sysctl -w "
                f'net.ipv4.ip_local_reserved_ports="{facts.port},$(cat {_RESERVED})"',
                systemd=f"Environment=KVSTORE_{facts.setting.upper()}=PORT with one below {low}",
                kubernetes=f"a port below {low}, or safe sysctl net.ipv4.ip_local_reserved_ports in the pod",
            )
            if taken_by_chance
            else None,
        )
    if facts.failure == errno.EADDRINUSE and facts.holder and facts.holder.is_node and not facts.is_another:
        return Finding(
            check="port",
            subject=where,
            status=Status.OK,
            found=f"held by process {facts.holder.pid} ({facts.holder.command[:60]})",
            needed=needed,
            reason="a kvstore node runs here; a second one would be refused",
        )
    return Finding(
        check="port",
        subject=where,
        status=Status.FAILING,
        found=_words_of_failure(facts),
        needed=needed,
        reason=f"a kvstore node of other data dirs: {', '.join(facts.holder.data_dirs)}"
        if facts.holder and facts.is_another
        else "",
        fix=_fix_of_port(facts, flag),
    )


def _words_of_failure(facts: PortFacts) -> str:
    if facts.failure != errno.EADDRINUSE:
        return os.strerror(facts.failure)
    if facts.holder is None:
        return "in use by a process that is not visible to this user"
    return f"in use by process {facts.holder.pid} ({facts.holder.command[:60]})"


def _fix_of_port(facts: PortFacts, flag: str) -> Fix:
    variable = f"KVSTORE_{facts.setting.upper()}"
    if facts.failure == errno.EACCES:
        return Fix(
            shell=f"pass a {flag} of 1024 or more, or: sysctl -w net.ipv4.ip_unprivileged_port_start={facts.port}",
            systemd="AmbientCapabilities=CAP_NET_BIND_SERVICE",
            kubernetes='securityContext.capabilities.add: ["NET_BIND_SERVICE"], or a port of 1024 or more',
        )
    if facts.failure == errno.EADDRNOTAVAIL:
        return Fix(
            shell="ip -brief address shows this machine's addresses; pass one of them as --host",
            systemd="After=network-online.target and Wants=network-online.target in [Unit], and the right KVSTORE_HOST",
            kubernetes='host: "0.0.0.0" with advertise: "$(POD_IP)" (fieldRef status.podIP)',
        )
    return Fix(
        shell=f"end that process, or pass another {flag} (0 is any free one)",
        systemd=f"Environment={variable}=PORT with a free one",
        kubernetes="another port in the values; with hostNetwork two pods on one node need different ports",
    )


def check_advertised(facts: AdvertisedFacts) -> Finding:
    """Whether clients that use this address arrive at this node."""
    dialled = facts.dialled
    status, reason = Status.OK, ""
    found = f"{dialled.address} answers in {dialled.took_ns / MS_NS:.1f} ms"
    if not dialled.address:
        status, found = Status.FAILING, dialled.problem
        reason = "clients could not find this node"
    elif dialled.problem.startswith("no answer"):
        status, found = Status.WARNING, f"{dialled.address}: {dialled.problem}"
        reason = "a firewall, or a gateway that does not turn connections round; clients elsewhere may arrive"
    elif dialled.problem:
        status, found = Status.FAILING, f"{dialled.address}: {dialled.problem}"
        reason = "clients would see the same"
    elif dialled.is_ours is False:
        status, found = Status.FAILING, f"{dialled.address}: another program or machine answers"
        reason = "clients would speak with somebody else"
    elif facts.listens_everywhere and _is_loopback(dialled.address):
        status, found = Status.WARNING, f"{dialled.address}, a loopback address"
        reason = "the node listens for other machines, but tells them an address that is their own"
    return Finding(
        check="advertised",
        subject=f"{facts.host}:{facts.port}" if facts.port else facts.host,
        status=status,
        found=found,
        needed="reaches this node when dialled",
        reason=reason,
        fix=None
        if status is Status.OK
        else Fix(
            shell="pass --advertise with an address that `ip -brief address` shows, and open the port "
            f"(nft add rule inet filter input tcp dport {facts.port or 'PORT'} accept)",
            systemd="Environment=KVSTORE_ADVERTISE=ADDRESS; After=network-online.target nss-lookup.target in [Unit]",
            kubernetes='advertise: "$(POD_IP)" (fieldRef status.podIP), not the name of a Service; a NetworkPolicy '
            "that allows the ports",
        ),
    )


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False

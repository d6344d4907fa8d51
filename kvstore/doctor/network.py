"""The TCP side of a machine: congestion control, buffers, and whether its queues would honour flow classes."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.device.host_files import whole_number
from kvstore.doctor.finding import Finding, Fix, Status, words_of_bytes
from kvstore.doctor.system import System
from kvstore.doctor.tables import Filter, Qdisc, Rule, read_addresses, read_filters, read_qdiscs, read_rules
from kvstore.limits import MiB

_IPV4: Final = "/proc/sys/net/ipv4"
_CORE: Final = "/proc/sys/net/core"
_GOOD_CONTROLS: Final = ("bbr", "cubic", "dctcp")
TCP_BUFFER_BYTES_NEEDED: Final = 4 * MiB
"""Bandwidth times delay of 100 Gbit/s over 300 us, and what Linux gives by itself on machines with memory (tcp(7))."""
BACKLOG_NEEDED: Final = 1_024
"""Connections that may come at once: all workers of a fleet start together."""

_BY_FILTER: Final = frozenset(("htb", "hfsc", "drr", "qfq", "ets", "prio"))
"""Have classes, and ask their filters which: prio, and ets by their priority map, too."""
_BY_PRIORITY: Final = frozenset(("pfifo_fast", "mqprio", "taprio"))
"""Have bands for the priority of a socket (SO_PRIORITY), not for DSCP."""
_LEGACY_TARGETS: Final = frozenset(("DSCP", "TOS", "CLASSIFY"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpFacts:
    """Settings of TCP that all connections share.

    Attributes:
        control: chosen congestion control; `controls` are those that can be chosen.
        receive_bytes_max, send_bytes_max: upper ends of automatic tuning; None is not known.
        backlog: connections that may wait to be accepted; None is not known.
    """

    control: str
    controls: tuple[str, ...]
    receive_bytes_max: int | None
    send_bytes_max: int | None
    backlog: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """What stands in the way of packets that leave by one network device.

    Attributes:
        netdev: its name.
        is_loopback: nothing leaves the machine by it.
        qdiscs: None when the kernel does not tell.
        filters: classifiers on its root.
        rules: of nftables, for all devices; None when they cannot be read.
    """

    netdev: str
    is_loopback: bool
    qdiscs: tuple[Qdisc, ...] | None
    filters: tuple[Filter, ...]
    rules: tuple[Rule, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesFacts:
    """Rules that touch DSCP.

    Attributes:
        rules: of nftables; None when they cannot be read.
        legacy_targets: of iptables, where its mangle table is in use and has such targets; /proc shows no rules.
    """

    rules: tuple[Rule, ...] | None
    legacy_targets: tuple[str, ...]


def read_tcp(system: System) -> TcpFacts:
    """Ask /proc/sys/net (Documentation/networking/ip-sysctl.rst)."""
    return TcpFacts(
        control=system.text(f"{_IPV4}/tcp_congestion_control") or "",
        controls=tuple((system.text(f"{_IPV4}/tcp_available_congestion_control") or "").split()),
        receive_bytes_max=_last_number(system.text(f"{_IPV4}/tcp_rmem")),
        send_bytes_max=_last_number(system.text(f"{_IPV4}/tcp_wmem")),
        backlog=_last_number(system.text(f"{_CORE}/somaxconn")),
    )


def served_netdevs(system: System, hosts: Sequence[str]) -> tuple[str, ...]:
    """Network devices that carry what is served: those with an address of `hosts`; with a wildcard all with any."""
    addresses = read_addresses(system)
    wanted = [_address(host) for host in hosts]
    everywhere = any(address is not None and address.is_unspecified for address in wanted)
    found: list[str] = []
    for netdev in system.names("/sys/class/net"):
        own = [_address(text) for text in addresses.get(_ifindex(system, netdev), ())]
        if any(one is not None and (one in wanted or (everywhere and not one.is_loopback)) for one in own):
            found.append(netdev)
    return tuple(found)


def read_queues(system: System, netdevs: Sequence[str], rules: tuple[Rule, ...] | None) -> list[QueueFacts]:
    """The queues of these network devices."""
    qdiscs = read_qdiscs(system)
    facts: list[QueueFacts] = []
    for netdev in netdevs:
        ifindex = _ifindex(system, netdev)
        facts.append(
            QueueFacts(
                netdev=netdev,
                is_loopback=system.text(f"/sys/class/net/{netdev}/type") == "772",  # ARPHRD_LOOPBACK
                qdiscs=None if qdiscs is None else tuple(one for one in qdiscs if one.ifindex == ifindex),
                filters=read_filters(system, ifindex),
                rules=rules,
            )
        )
    return facts


def read_dscp_rules(system: System) -> RulesFacts:
    """Rules of nftables, and targets of iptables that are loaded."""
    mangles = "mangle" in (system.text("/proc/net/ip_tables_names") or "").split()
    targets = (system.text("/proc/net/ip_tables_targets") or "").split() if mangles else []
    return RulesFacts(rules=read_rules(system), legacy_targets=tuple(sorted(_LEGACY_TARGETS & set(targets))))


def check_tcp(facts: TcpFacts) -> list[Finding]:
    """All lines about TCP's settings."""
    return [check_congestion_control(facts), check_buffers(facts), check_backlog(facts)]


def check_congestion_control(facts: TcpFacts) -> Finding:
    """Whether TCP fills a link."""
    fine = facts.control in _GOOD_CONTROLS
    better = next((name for name in ("bbr", "cubic") if name in facts.controls), "cubic")
    return _sysctl_finding(
        check="congestion_control",
        fine=fine,
        found=facts.control or "not known",
        needed=" or ".join(_GOOD_CONTROLS),
        reason="" if fine else "it recovers slowly from a loss; none of them keeps classes apart, queues do",
        key="net.ipv4.tcp_congestion_control",
        value=better,
    )


def check_buffers(facts: TcpFacts) -> Finding:
    """Whether a connection may have enough in flight."""
    least = min((value for value in (facts.receive_bytes_max, facts.send_bytes_max) if value is not None), default=None)
    fine = least is None or least >= TCP_BUFFER_BYTES_NEEDED
    receive, send = (
        "not known" if value is None else words_of_bytes(value)
        for value in (facts.receive_bytes_max, facts.send_bytes_max)
    )
    return _sysctl_finding(
        check="tcp_buffers",
        fine=fine,
        found=f"{receive} to receive, {send} to send",
        needed=f"{words_of_bytes(TCP_BUFFER_BYTES_NEEDED)} each (the last of three numbers)",
        reason="" if fine else "a connection has less in flight than a fast link takes",
        key="net.ipv4.tcp_rmem" if facts.receive_bytes_max == least else "net.ipv4.tcp_wmem",
        value=f"4096 131072 {8 * TCP_BUFFER_BYTES_NEEDED}",
    )


def check_backlog(facts: TcpFacts) -> Finding:
    """Whether a fleet may connect at once."""
    fine = facts.backlog is None or facts.backlog >= BACKLOG_NEEDED
    return _sysctl_finding(
        check="accept_backlog",
        fine=fine,
        found="not known" if facts.backlog is None else str(facts.backlog),
        needed=f"{BACKLOG_NEEDED} or more (net.core.somaxconn)",
        reason="" if fine else "when many workers connect at once, some wait a second or more to be let in",
        key="net.core.somaxconn",
        value="4096",
    )


def _sysctl_finding(*, check: str, fine: bool, found: str, needed: str, reason: str, key: str, value: str) -> Finding:
    line = f"{key}={value}" if " " not in value else f'{key}="{value}"'
    return Finding(
        check=check,
        status=Status.OK if fine else Status.WARNING,
        found=found,
        needed=needed,
        reason=reason,
        fix=None
        if fine
        else Fix(
            shell=f"sysctl -w {line}",
            systemd=f"{key} = {value} in /etc/sysctl.d/90-kvstore.conf (systemd-sysctl)",
            kubernetes=f"securityContext.sysctls: [{{name: {key}, value: {value!r}}}] with the kubelet's "
            "--allowed-unsafe-sysctls, or sysctl on the node",
        ),
    )


def check_queue(facts: QueueFacts) -> Finding:
    """Whether marks of flow classes make a difference where packets leave this machine."""
    honours, reason = judge_queue(facts)
    kinds = "not told by the kernel"
    if facts.qdiscs is not None:
        ordered = sorted(facts.qdiscs, key=lambda one: not one.is_root)
        kinds = ", ".join(dict.fromkeys(f"{one.kind} {one.mode}".strip() for one in ordered)) or "none"
    if facts.filters:
        kinds += f"; filters: {', '.join(dict.fromkeys(one.kind for one in facts.filters))}"
    return Finding(
        check="qdisc",
        subject=facts.netdev,
        status=Status.OK if honours else Status.WARNING,
        found=kinds,
        needed="classes chosen by DSCP or priority",
        reason=reason,
        fix=None
        if honours
        else Fix(
            shell=f"tc qdisc replace dev {facts.netdev} root handle 1: prio && tc filter add dev {facts.netdev} "
            "parent 1: protocol ip u32 match ip tos 0xb8 0xfc flowid 1:1 (an example: EF first); NICs with queues in "
            f"hardware: dcb app replace dev {facts.netdev} dscp-prio ..., and the switch likewise",
            systemd=f"a oneshot unit with the two tc commands, After=sys-subsystem-net-devices-{facts.netdev}.device",
            kubernetes="the two tc commands on the node (or a DaemonSet with hostNetwork and NET_ADMIN): a pod's own "
            "device is not where packets queue",
        ),
    )


def judge_queue(facts: QueueFacts) -> tuple[bool, str]:
    """(whether flow classes are honoured or need not be, why)."""
    if facts.is_loopback:
        return True, "nothing leaves this machine by it, and nothing queues in it"
    if facts.qdiscs is None:
        return (
            False,
            "not known: only the node's own scheduler keeps flow classes apart for certain",
        )
    kinds = {one.kind for one in facts.qdiscs}
    modes = {one.mode for one in facts.qdiscs if one.kind == "cake"}
    if modes - {"besteffort"}:
        return True, "cake sorts by DSCP"
    if classful := sorted(kinds & _BY_FILTER):
        return _judge_classes(classful[0], facts)
    if by_priority := sorted(kinds & _BY_PRIORITY):
        return (
            False,
            f"{by_priority[0]} has bands for a socket's priority (SO_PRIORITY), which does not leave this machine; "
            "DSCP it reads by the old table of TOS, where EF and CS6 mean nothing",
        )
    if kinds <= {"noqueue"}:
        return (
            False,
            "nothing queues here (a veth, a bridge): the device below decides, which is not seen from here",
        )
    return (
        False,
        f"{', '.join(sorted(kinds))} has one class: marks change nothing here; what a client has asked for and not yet "
        "got bounds how long others wait",
    )


def _judge_classes(kind: str, facts: QueueFacts) -> tuple[bool, str]:
    if any(one.reads_dscp for one in facts.filters):
        return True, f"{kind} with a filter on DSCP"
    if any(rule.writes_priority for rule in facts.rules or ()):
        return True, f"{kind}, its class chosen by an nftables rule that sets the priority"
    if any(one.reads_dscp is None for one in facts.filters):
        hidden = next(one.kind for one in facts.filters if one.reads_dscp is None)
        return True, f"{kind} with a {hidden} filter, whose program is not looked into"
    if facts.filters:
        return False, f"{kind} has classes, but none of its filters looks at DSCP"
    return False, f"{kind} has classes, but no filter: all packets go to its default class"


def check_dscp_rules(facts: RulesFacts) -> Finding:
    """Whether a rule of the firewall takes the marks away."""
    needed = "no rule that writes DSCP"
    if facts.rules is None:
        return Finding(
            check="dscp_rules",
            status=Status.WARNING,
            found="not readable",
            needed=needed,
            reason="nftables shows its rules only to CAP_NET_ADMIN, and only where the kernel has it",
            fix=Fix(
                shell="sudo kvstore doctor, or: nft list ruleset | grep -E 'dscp|priority'",
                systemd="systemd-run --pipe kvstore doctor (as root)",
                kubernetes="nft list ruleset on the node",
            ),
        )
    writing = [rule.place for rule in facts.rules if rule.writes_dscp]
    helping = [rule.place for rule in facts.rules if rule.writes_priority or rule.reads_dscp]
    found = "; ".join(
        filter(
            None,
            (
                f"DSCP is written in {', '.join(dict.fromkeys(writing))}" if writing else "",
                f"DSCP or priority is used in {', '.join(dict.fromkeys(helping))}" if helping else "",
                f"iptables' mangle table is in use, with targets {', '.join(facts.legacy_targets)} loaded"
                if facts.legacy_targets
                else "",
            ),
        )
    )
    rewrites = bool(writing or facts.legacy_targets)
    return Finding(
        check="dscp_rules",
        status=Status.WARNING if rewrites else Status.OK,
        found=found or "none",
        needed=needed,
        reason="marks of flow classes may be gone before they reach a queue" if rewrites else "",
        fix=Fix(
            shell="nft list ruleset | grep dscp (iptables -t mangle -S), and except the data port from those rules",
            systemd="the same in /etc/nftables.conf, then systemctl reload nftables",
            kubernetes="the network plug-in writes them: turn its DSCP setting off, or except the data port",
        )
        if rewrites
        else None,
    )


def _last_number(text: str | None) -> int | None:
    return whole_number(text.split()[-1]) if text else None


def _ifindex(system: System, netdev: str) -> int:
    return whole_number(system.text(f"/sys/class/net/{netdev}/ifindex")) or 0


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address("127.0.0.1" if text == "localhost" else text)
    except ValueError:
        return None

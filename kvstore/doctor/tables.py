"""Tables of the kernel, asked by netlink and decoded: addresses, queueing disciplines, filters, nftables rules.

Decoding is pure, so that tests can hand in what a machine has answered. No program (ip, tc, nft) is needed.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvstore.doctor.system import Message, System

_NETLINK_ROUTE: Final = 0
_NETLINK_NETFILTER: Final = 12
# linux/rtnetlink.h
_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_RTM_NEWQDISC, _RTM_GETQDISC = 36, 38
_RTM_NEWTFILTER, _RTM_GETTFILTER = 44, 46
_TCA_KIND, _TCA_OPTIONS = 1, 2
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_ADDRESS: Final = struct.Struct("=BBBBI")  # struct ifaddrmsg
_TRAFFIC: Final = struct.Struct("=BxxxiIII")  # struct tcmsg: family, ifindex, handle, parent, info
_ATTRIBUTE: Final = struct.Struct("=HH")  # struct nlattr: length, type
_TYPE_MASK: Final = 0x3FFF  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER
ROOT_PARENT: Final = 0xFFFFFFFF  # TC_H_ROOT
_INGRESS_PARENT: Final = 0xFFFFFFF1  # TC_H_INGRESS
# linux/pkt_cls.h, linux/pkt_sched.h
_TCA_U32_SEL: Final = 5
_U32_HEADER_BYTES, _U32_KEY_BYTES = 16, 16
_TCA_FLOWER_KEY_IP_TOS: Final = 73
_TCA_CAKE_DIFFSERV_MODE: Final = 3
_CAKE_MODES: Final = ("diffserv3", "diffserv4", "diffserv8", "besteffort", "precedence")
_IPV4_TOS_MASK: Final = 0x00FF0000  # of the first word of the header
_IPV6_CLASS_MASK: Final = 0x0FF00000
# linux/netfilter/nf_tables.h
_NFT_GETRULE: Final = 10 << 8 | 7
_NFT_NEWRULE: Final = 10 << 8 | 6
_NFTA_RULE_TABLE, _NFTA_RULE_CHAIN, _NFTA_RULE_EXPRESSIONS = 1, 2, 4
_NFTA_EXPR_NAME, _NFTA_EXPR_DATA = 1, 2
_NFTA_PAYLOAD_DREG, _NFTA_PAYLOAD_BASE, _NFTA_PAYLOAD_OFFSET, _NFTA_PAYLOAD_SREG = 1, 2, 3, 5
_NFTA_META_KEY, _NFTA_META_SREG = 2, 3
_NFT_META_PRIORITY: Final = 2
_NFT_PAYLOAD_NETWORK_HEADER: Final = 1
_FAMILIES: Final = {1: "inet", 2: "ip", 5: "netdev", 7: "bridge", 10: "ip6"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qdisc:
    """A queueing discipline of a network device.

    Attributes:
        ifindex: of the device.
        kind: "htb", "fq_codel", "mq", ...
        is_root: what packets meet first; else a child of a class.
        mode: of cake: "diffserv4", "besteffort", ...; else "".
    """

    ifindex: int
    kind: str
    is_root: bool
    mode: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """A classifier on a queueing discipline. `reads_dscp`: by the packet's DSCP; None where its program hides it."""

    ifindex: int
    kind: str
    reads_dscp: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule of nftables that has to do with DSCP or a packet's priority.

    Attributes:
        place: "inet mangle output".
        reads_dscp: matches on it.
        writes_dscp: sets it: marks of flow classes may not survive.
        writes_priority: sets what picks a class of a queueing discipline.
    """

    place: str
    reads_dscp: bool
    writes_dscp: bool
    writes_priority: bool


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, value) of each attribute in a run of them; ends at the first that is malformed."""
    offset = 0
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < _ATTRIBUTE.size or offset + length > len(data):
            return
        yield kind & _TYPE_MASK, data[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3


def read_addresses(system: System) -> dict[int, tuple[str, ...]]:
    """Addresses of each network device, by its ifindex; empty when the kernel does not tell."""
    found: dict[int, list[str]] = {}
    for message in system.dump(_NETLINK_ROUTE, _RTM_GETADDR, bytes(_ADDRESS.size)) or ():
        if message.kind != _RTM_NEWADDR or len(message.body) < _ADDRESS.size:
            continue
        family, _, _, _, ifindex = _ADDRESS.unpack_from(message.body)
        values = dict(attributes(message.body[_ADDRESS.size :]))
        value = values.get(_IFA_LOCAL) or values.get(_IFA_ADDRESS)  # of a point-to-point link ADDRESS is the peer's
        if value and family in (socket.AF_INET, socket.AF_INET6):
            found.setdefault(ifindex, []).append(str(ipaddress.ip_address(value)))
    return {ifindex: tuple(addresses) for ifindex, addresses in found.items()}


def read_qdiscs(system: System) -> tuple[Qdisc, ...] | None:
    """The queueing disciplines of all network devices; None when the kernel does not tell."""
    messages = system.dump(_NETLINK_ROUTE, _RTM_GETQDISC, bytes(_TRAFFIC.size))
    if messages is None:
        return None
    return tuple(qdisc for message in messages if (qdisc := _qdisc(message)) is not None)


def read_filters(system: System, ifindex: int) -> tuple[Filter, ...]:
    """The classifiers that hang on the root of one network device."""
    body = _TRAFFIC.pack(socket.AF_UNSPEC, ifindex, 0, 0, 0)  # parent 0: the root, whatever its handle
    messages = system.dump(_NETLINK_ROUTE, _RTM_GETTFILTER, body) or ()
    return tuple(found for message in messages if (found := _filter(message)) is not None)


def read_rules(system: System) -> tuple[Rule, ...] | None:
    """Rules of nftables about DSCP and priority; None when they cannot be read (that needs CAP_NET_ADMIN)."""
    messages = system.dump(_NETLINK_NETFILTER, _NFT_GETRULE, bytes(4))  # struct nfgenmsg: any family
    if messages is None:
        return None
    return tuple(rule for message in messages if (rule := _rule(message)) is not None)


def _qdisc(message: Message) -> Qdisc | None:
    if message.kind != _RTM_NEWQDISC or len(message.body) < _TRAFFIC.size:
        return None
    _, ifindex, _, parent, _ = _TRAFFIC.unpack_from(message.body)
    if parent == _INGRESS_PARENT:
        return None
    values = dict(attributes(message.body[_TRAFFIC.size :]))
    kind = _name(values.get(_TCA_KIND, b""))
    mode = ""
    if kind == "cake":
        chosen = dict(attributes(values.get(_TCA_OPTIONS, b""))).get(_TCA_CAKE_DIFFSERV_MODE, bytes(4))
        mode = _CAKE_MODES[min(struct.unpack("=I", chosen[:4])[0], len(_CAKE_MODES) - 1)]
    return Qdisc(ifindex=ifindex, kind=kind, is_root=parent == ROOT_PARENT, mode=mode)


def _filter(message: Message) -> Filter | None:
    if message.kind != _RTM_NEWTFILTER or len(message.body) < _TRAFFIC.size:
        return None
    _, ifindex, _, _, _ = _TRAFFIC.unpack_from(message.body)
    values = dict(attributes(message.body[_TRAFFIC.size :]))
    kind, options = _name(values.get(_TCA_KIND, b"")), dict(attributes(values.get(_TCA_OPTIONS, b"")))
    if kind == "u32":
        selector = options.get(_TCA_U32_SEL)
        return Filter(ifindex=ifindex, kind=kind, reads_dscp=_selects_dscp(selector)) if selector else None
    if kind == "flower":
        return Filter(ifindex=ifindex, kind=kind, reads_dscp=_TCA_FLOWER_KEY_IP_TOS in options) if options else None
    return Filter(ifindex=ifindex, kind=kind, reads_dscp=None)


def _selects_dscp(selector: bytes) -> bool:
    """Whether a struct tc_u32_sel looks at the traffic class in the first word of an IP header."""
    for offset in range(_U32_HEADER_BYTES, len(selector) - _U32_KEY_BYTES + 1, _U32_KEY_BYTES):
        mask, _ = struct.unpack_from(">II", selector, offset)
        at, _ = struct.unpack_from("=ii", selector, offset + 8)
        if at == 0 and mask & (_IPV4_TOS_MASK | _IPV6_CLASS_MASK):
            return True
    return False


def _rule(message: Message) -> Rule | None:
    if message.kind != _NFT_NEWRULE or len(message.body) < 4:
        return None
    values = dict(attributes(message.body[4:]))
    reads = writes = priority = False
    for _, element in attributes(values.get(_NFTA_RULE_EXPRESSIONS, b"")):
        expression = dict(attributes(element))
        name, data = _name(expression.get(_NFTA_EXPR_NAME, b"")), dict(attributes(expression.get(_NFTA_EXPR_DATA, b"")))
        if name == "payload" and _number(data, _NFTA_PAYLOAD_BASE) == _NFT_PAYLOAD_NETWORK_HEADER:
            if _number(data, _NFTA_PAYLOAD_OFFSET) <= 1:  # the traffic class of IPv4 is byte 1, of IPv6 bits 4 to 11
                reads = reads or _NFTA_PAYLOAD_DREG in data
                writes = writes or _NFTA_PAYLOAD_SREG in data
        elif name == "meta" and _NFTA_META_SREG in data:
            priority = priority or _number(data, _NFTA_META_KEY) == _NFT_META_PRIORITY
    if not (reads or writes or priority):
        return None
    family = _FAMILIES.get(message.body[0], str(message.body[0]))
    place = f"{family} {_name(values.get(_NFTA_RULE_TABLE, b''))} {_name(values.get(_NFTA_RULE_CHAIN, b''))}"
    # to set the DSCP a rule reads the word around it first
    return Rule(place=place, reads_dscp=reads and not writes, writes_dscp=writes, writes_priority=priority)


def _name(value: bytes) -> str:
    return value.rstrip(b"\0").decode("ascii", "replace")


def _number(data: dict[int, bytes], kind: int) -> int:
    return int.from_bytes(data.get(kind, b"\xff\xff\xff\xff"), "big")

"""TCP settings, queues and DSCP rules: every verdict, tables of the kernel taken apart, and real network namespaces."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.doctor.finding import Status
from kvstore.doctor.network import (
    QueueFacts,
    RulesFacts,
    check_dscp_rules,
    check_queue,
    check_tcp,
    read_dscp_rules,
    read_queues,
    read_tcp,
    served_netdevs,
)
from kvstore.doctor.system import LinuxSystem, Message
from kvstore.doctor.tables import Filter, Qdisc, Rule, attributes, read_addresses, read_filters, read_qdiscs, read_rules
from kvstore.testing.fake_system import FakeSystem

TCP = {
    "/proc/sys/net/ipv4/tcp_congestion_control": "cubic",
    "/proc/sys/net/ipv4/tcp_available_congestion_control": "reno cubic",
    "/proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t33554432",
    "/proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t4194304",
    "/proc/sys/net/core/somaxconn": "4096",
}


def tcp(fake: FakeSystem, **changed: str) -> dict[str, tuple[Status, str, str]]:
    fake.put(TCP)
    fake.put({next(path for path in TCP if path.endswith(name)): value for name, value in changed.items()})
    return {one.check: (one.status, one.found, one.fix.shell if one.fix else "") for one in check_tcp(read_tcp(fake))}


def test_tcp_as_it_should_be(fake: FakeSystem) -> None:
    assert tcp(fake) == {
        "congestion_control": (Status.OK, "cubic", ""),
        "tcp_buffers": (Status.OK, "32 MiB to receive, 4 MiB to send", ""),
        "accept_backlog": (Status.OK, "4096", ""),
    }


def test_each_setting_of_tcp_that_is_wrong_has_its_fix(fake: FakeSystem) -> None:
    found = tcp(fake, tcp_congestion_control="reno", tcp_wmem="4096 16384 65536", somaxconn="128")
    assert found["congestion_control"] == (
        Status.WARNING,
        "reno",
        "sysctl -w net.ipv4.tcp_congestion_control=cubic",
    )
    assert found["tcp_buffers"][0] is Status.WARNING
    assert found["tcp_buffers"][2].startswith('sysctl -w net.ipv4.tcp_wmem="4096')
    assert found["accept_backlog"] == (Status.WARNING, "128", "sysctl -w net.core.somaxconn=4096")
    assert "tcp_rmem" in tcp(fake, tcp_rmem="4096 16384 65536")["tcp_buffers"][2]


def test_a_machine_that_tells_nothing_of_tcp(fake: FakeSystem) -> None:
    statuses = [one.status for one in check_tcp(read_tcp(fake))]
    assert statuses == [Status.WARNING, Status.OK, Status.OK]


QUEUE = QueueFacts(netdev="eth0", is_loopback=False, qdiscs=(), filters=(), rules=())
U32_TOS = Filter(ifindex=2, kind="u32", reads_dscp=True)


def qdiscs(*kinds: str, mode: str = "") -> tuple[Qdisc, ...]:
    return tuple(Qdisc(ifindex=2, kind=kind, is_root=not at, mode=mode) for at, kind in enumerate(kinds))


@pytest.mark.parametrize(
    ("facts", "honours", "words"),
    [
        (replace(QUEUE, is_loopback=True, qdiscs=qdiscs("noqueue")), True, "nothing leaves"),
        (replace(QUEUE, qdiscs=qdiscs("noqueue")), False, "the device below"),
        (replace(QUEUE, qdiscs=None), False, "not known"),
        (replace(QUEUE, qdiscs=qdiscs("mq", "fq_codel")), False, "has one class"),
        (replace(QUEUE, qdiscs=qdiscs("fq")), False, "has one class"),
        (replace(QUEUE, qdiscs=qdiscs("pfifo_fast")), False, "old table of TOS"),
        (replace(QUEUE, qdiscs=qdiscs("cake", mode="diffserv4")), True, "cake sorts by DSCP"),
        (replace(QUEUE, qdiscs=qdiscs("cake", mode="besteffort")), False, "has one class"),
        (replace(QUEUE, qdiscs=qdiscs("htb", "bfifo")), False, "no filter"),
        (replace(QUEUE, qdiscs=qdiscs("htb", "bfifo"), filters=(U32_TOS,)), True, "htb with a filter on DSCP"),
        (
            replace(QUEUE, qdiscs=qdiscs("htb"), filters=(Filter(ifindex=2, kind="u32", reads_dscp=False),)),
            False,
            "none of its filters looks at DSCP",
        ),
        (
            replace(QUEUE, qdiscs=qdiscs("prio"), filters=(Filter(ifindex=2, kind="bpf", reads_dscp=None),)),
            True,
            "bpf filter, whose program is not looked into",
        ),
        (
            replace(
                QUEUE,
                qdiscs=qdiscs("htb"),
                rules=(Rule(place="inet m o", reads_dscp=True, writes_dscp=False, writes_priority=True),),
            ),
            True,
            "nftables rule that sets the priority",
        ),
    ],
)
def test_verdicts_on_a_queue(facts: QueueFacts, honours: bool, words: str) -> None:
    finding = check_queue(facts)
    assert finding.status is (Status.OK if honours else Status.WARNING)
    assert words in finding.reason
    assert finding.subject == "eth0"


REWRITES = Rule(place="ip mangle postrouting", reads_dscp=False, writes_dscp=True, writes_priority=False)
USES = Rule(place="inet mangle output", reads_dscp=True, writes_dscp=False, writes_priority=True)


@pytest.mark.parametrize(
    ("facts", "status", "found"),
    [
        (RulesFacts(rules=(), legacy_targets=()), Status.OK, "none"),
        (RulesFacts(rules=(USES,), legacy_targets=()), Status.OK, "DSCP or priority is used in inet mangle output"),
        (RulesFacts(rules=(REWRITES,), legacy_targets=()), Status.WARNING, "DSCP is written in ip mangle postrouting"),
        (RulesFacts(rules=(), legacy_targets=("DSCP",)), Status.WARNING, "mangle table is in use"),
        (RulesFacts(rules=None, legacy_targets=()), Status.WARNING, "not readable"),
    ],
)
def test_verdicts_on_rules(facts: RulesFacts, status: Status, found: str) -> None:
    finding = check_dscp_rules(facts)
    assert finding.status is status
    assert found in finding.found


def test_targets_of_iptables_count_only_where_its_mangle_table_is_in_use(fake: FakeSystem) -> None:
    fake.put({"/proc/net/ip_tables_targets": "DSCP\nTOS\nLOG", "/proc/net/ip_tables_names": "filter"})
    assert read_dscp_rules(fake).legacy_targets == ()
    fake.put({"/proc/net/ip_tables_names": "filter\nmangle"})
    assert read_dscp_rules(fake).legacy_targets == ("DSCP", "TOS")


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def qdisc_message(kind: bytes, *, parent: int, options: bytes = b"") -> Message:
    head = struct.pack("=BxxxiIII", 0, 2, 0x10000, parent, 0)
    return Message(kind=36, body=head + attribute(1, kind + b"\0") + attribute(2 | 0x8000, options))


def test_tables_of_the_kernel_are_taken_apart(fake: FakeSystem) -> None:
    flower = struct.pack("=BxxxiIII", 0, 2, 0, 0, 0) + attribute(1, b"flower\0") + attribute(2, attribute(73, b"\xb8"))
    fake.dumps = {
        (0, 38): (
            qdisc_message(b"cake", parent=0xFFFFFFFF, options=attribute(3, struct.pack("=I", 1))),
            qdisc_message(b"ingress", parent=0xFFFFFFF1),
            Message(kind=36, body=b"short"),
        ),
        (0, 46): (Message(kind=44, body=flower),),
    }
    assert read_qdiscs(fake) == (Qdisc(ifindex=2, kind="cake", is_root=True, mode="diffserv4"),)
    assert read_filters(fake, 2) == (Filter(ifindex=2, kind="flower", reads_dscp=True),)
    assert read_rules(fake) is None
    assert read_addresses(fake) == {}


@given(st.binary(max_size=200), st.sampled_from((20, 36, 44, 0x0A06)))
def test_what_the_kernel_never_says_is_no_crash(
    tmp_path_factory: pytest.TempPathFactory, body: bytes, kind: int
) -> None:
    fake = FakeSystem(tmp_path_factory.getbasetemp())
    message = (Message(kind=kind, body=body),)
    fake.dumps = {(0, 22): message, (0, 38): message, (0, 46): message, (12, 0x0A07): message}
    list(attributes(body))
    read_qdiscs(fake)
    read_filters(fake, 1)
    read_rules(fake)


def test_served_devices_are_those_with_the_address(fake: FakeSystem) -> None:
    def address(ifindex: int, *octets: int) -> Message:
        return Message(kind=20, body=struct.pack("=BBBBI", 2, 24, 0, 0, ifindex) + attribute(2, bytes(octets)))

    fake.dumps = {(0, 22): (address(1, 127, 0, 0, 1), address(2, 10, 0, 0, 1), address(3, 10, 1, 0, 1))}
    fake.put({f"/sys/class/net/{name}/ifindex": str(at) for at, name in enumerate(("lo", "eth0", "eth1"), 1)})
    assert served_netdevs(fake, ("127.0.0.1",)) == ("lo",)
    assert served_netdevs(fake, ("localhost",)) == ("lo",)
    assert served_netdevs(fake, ("10.1.0.1", "10.0.0.1")) == ("eth0", "eth1")
    assert served_netdevs(fake, ("0.0.0.0",)) == ("eth0", "eth1")
    assert served_netdevs(fake, ("node.example",)) == ()


REPORT = """
import json, sys
from kvstore.doctor.network import *
from kvstore.doctor.system import LinuxSystem
system = LinuxSystem()
rules = read_dscp_rules(system)
queues = read_queues(system, sys.argv[1:], rules.rules)
findings = [*check_tcp(read_tcp(system)), *(check_queue(facts) for facts in queues), check_dscp_rules(rules)]
print(json.dumps({f"{one.check} {one.subject}".strip(): [one.status.value, one.found, one.reason] for one in findings}))
"""
TOOLS = ("unshare", "ip", "tc", "nft")
VETH = "ip link add v0 type veth peer name v1 && ip link set v0 up && ip link set v1 up"
HTB = f"{VETH} && tc qdisc add dev v0 root handle 1: htb default 20 r2q 1000"


def in_namespace(script: str, *netdevs: str) -> dict[str, Sequence[str]]:
    """What the doctor finds in a network namespace of its own, set up by a shell script."""
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None]:
        pytest.skip(f"network namespaces need {', '.join(missing)}")
    # /sys shows the devices of the namespace that it was mounted in, /proc/sys those of the process
    whole = f'mount -t sysfs none /sys && {script} && exec "$0" "$@"'
    command = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    command += ["sh", "-c", whole, sys.executable, "-c", REPORT, *netdevs]
    environment = os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Sequence[str]] = json.loads(done.stdout)
    return answer


def test_a_real_namespace_with_small_values() -> None:
    found = in_namespace(
        "echo reno > /proc/sys/net/ipv4/tcp_congestion_control && echo 100 > /proc/sys/net/core/somaxconn"
        " && echo 4096 16384 65536 > /proc/sys/net/ipv4/tcp_rmem && ip link set lo up",
        "lo",
    )
    assert found["congestion_control"][:2] == ["warning", "reno"]
    assert found["accept_backlog"][:2] == ["warning", "100"]
    assert found["tcp_buffers"][0] == "warning"
    assert found["qdisc lo"][0] == "ok"
    assert found["dscp_rules"][:2] == ["ok", "none"]


def test_a_real_veth_queues_nothing_by_itself() -> None:
    assert in_namespace(VETH, "v0")["qdisc v0"][:2] == ["warning", "noqueue"]


def test_a_real_htb_without_filter_has_classes_for_nobody() -> None:
    status, found, reason = in_namespace(HTB, "v0")["qdisc v0"]
    assert (status, found) == ("warning", "htb")
    assert "no filter" in reason


@pytest.mark.parametrize(
    ("match", "status", "words"),
    [
        ("match ip tos 0xb8 0xfc", "ok", "htb with a filter on DSCP"),
        ("match ip dport 80 0xffff", "warning", "none of its filters looks at DSCP"),
    ],
)
def test_a_real_htb_with_a_filter(match: str, status: str, words: str) -> None:
    script = (
        f"{HTB} && tc class add dev v0 parent 1: classid 1:20 htb rate 1gbit"
        f" && tc filter add dev v0 parent 1: protocol ip u32 {match} flowid 1:20"
    )
    found = in_namespace(script, "v0")["qdisc v0"]
    assert found[0] == status
    assert words in found[2]
    assert "filters: u32" in found[1]


def test_real_rules_of_nftables() -> None:
    table = "nft add table inet m && nft 'add chain inet m o { type filter hook output priority 0; }'"
    uses = in_namespace(f"{HTB} && {table} && nft add rule inet m o ip dscp ef meta priority set 1:20", "v0")
    assert uses["dscp_rules"][:2] == ["ok", "DSCP or priority is used in inet m o"]
    assert uses["qdisc v0"][0] == "ok"
    writes = in_namespace(f"{table} && nft add rule inet m o tcp dport 7401 ip dscp set cs0")
    assert writes["dscp_rules"][:2] == ["warning", "DSCP is written in inet m o"]
    other = in_namespace(f"{table} && nft add rule inet m o ip saddr 10.0.0.1 drop")
    assert other["dscp_rules"][:2] == ["ok", "none"]


def test_this_machine_tells_its_queues() -> None:
    system = LinuxSystem()
    assert read_tcp(system).receive_bytes_max
    netdevs = served_netdevs(system, ("127.0.0.1",))
    assert netdevs == ("lo",)
    (loopback,) = read_queues(system, netdevs, ())
    assert loopback.is_loopback
    assert check_queue(loopback).status is Status.OK

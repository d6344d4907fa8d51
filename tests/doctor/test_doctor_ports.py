"""Ports and advertised addresses: every verdict, and real sockets, processes and name look-ups."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvstore.doctor.finding import Finding, Status
from kvstore.doctor.ports import (
    AdvertisedFacts,
    PortFacts,
    check_advertised,
    check_port,
    read_advertised,
    read_ports,
)
from kvstore.doctor.sockets import Dialled, Holder, holder_of, try_listen
from kvstore.doctor.system import LinuxSystem
from kvstore.testing.fake_system import FakeSystem

FREE = PortFacts(setting="data_port", host="127.0.0.1", port=7401, failure=0, holder=None, ephemeral=(32768, 60999))
REACHED = Dialled(address="10.0.0.1", problem="", took_ns=1_000_000, is_ours=True)
TOLD = AdvertisedFacts(host="node-1", port=7401, listens_everywhere=True, dialled=REACHED)


@contextmanager
def listening(host: str, port: int = 0) -> Iterator[int]:
    """Somebody else's listener."""
    with socket.create_server((host, port)) as listener:
        yield int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("failure", "holder", "status", "found"),
    [
        (0, None, Status.OK, "free"),
        (
            errno.EADDRINUSE,
            Holder(pid=7, command="/usr/bin/nginx -g"),
            Status.FAILING,
            "in use by process 7 (/usr/bin/",
        ),
        (errno.EADDRINUSE, None, Status.FAILING, "not visible to this user"),
        (errno.EADDRINUSE, Holder(pid=7, command="python -m kvstore serve"), Status.OK, "held by process 7"),
        (errno.EACCES, None, Status.FAILING, "Permission denied"),
        (errno.EADDRNOTAVAIL, None, Status.FAILING, "Cannot assign requested address"),
    ],
)
def test_verdicts_on_a_port(failure: int, holder: Holder | None, status: Status, found: str) -> None:
    finding = check_port(replace(FREE, failure=failure, holder=holder))
    assert finding.status is status
    assert found in finding.found
    assert finding.subject == "data_port 7401 on 127.0.0.1"


def test_each_failure_has_its_own_fix() -> None:
    fixes = [
        check_port(replace(FREE, failure=one)).fix for one in (errno.EACCES, errno.EADDRNOTAVAIL, errno.EADDRINUSE)
    ]
    assert [fix.systemd for fix in fixes if fix] == [
        "AmbientCapabilities=CAP_NET_BIND_SERVICE",
        "After=network-online.target and Wants=network-online.target in [Unit], and the right KVSTORE_HOST",
        "Environment=KVSTORE_DATA_PORT=PORT with a free one",
    ]


def test_a_port_of_another_node_is_not_this_node_s() -> None:
    holder = Holder(pid=7, command="python -m kvstore serve", data_dirs=("/srv/a", "/srv/b"))
    finding = check_port(replace(FREE, failure=errno.EADDRINUSE, holder=holder, is_another=True))
    assert finding.status is Status.FAILING
    assert finding.reason == "a kvstore node of other data dirs: /srv/a, /srv/b"
    assert finding.fix
    assert "another --data-port" in finding.fix.shell


def test_a_port_that_outgoing_connections_may_take() -> None:
    finding = check_port(replace(FREE, port=40000))
    assert finding.status is Status.WARNING
    assert "outside of 32768-60999" in finding.needed
    assert finding.fix
    assert 'ip_local_reserved_ports="40000,$(cat /proc/sys/net/ipv4/ip_local_reserved_ports)"' in finding.fix.shell
    assert check_port(replace(FREE, port=40000, is_reserved=True)).status is Status.OK
    assert check_port(replace(FREE, port=0)).found == "any free one"


@pytest.mark.parametrize(
    ("reserved", "expected"), [("", False), ("0", True), ("1-5", False), ("7,0-3", True), ("x,-,7-", False)]
)
def test_ports_that_are_reserved(fake: FakeSystem, reserved: str, expected: bool) -> None:
    fake.put({"/proc/sys/net/ipv4/ip_local_reserved_ports": reserved})
    (facts,) = read_ports(fake, hosts=("127.0.0.1",), ports=(("grpc_port", 0),))
    assert facts.is_reserved is expected


@pytest.mark.parametrize(
    ("dialled", "status", "words"),
    [
        (REACHED, Status.OK, ""),
        (replace(REACHED, is_ours=None), Status.OK, ""),
        (replace(REACHED, is_ours=False), Status.FAILING, "speak with somebody else"),
        (replace(REACHED, address="", problem="does not resolve"), Status.FAILING, "could not find"),
        (replace(REACHED, problem="Connection refused"), Status.FAILING, "would see the same"),
        (replace(REACHED, problem="no answer in 1 s"), Status.WARNING, "a firewall"),
        (replace(REACHED, address="127.0.0.1"), Status.WARNING, "their own"),
    ],
)
def test_verdicts_on_an_advertised_address(dialled: Dialled, status: Status, words: str) -> None:
    finding = check_advertised(replace(TOLD, dialled=dialled))
    assert finding.status is status
    assert words in finding.reason


def ports(host: str, port: int) -> Finding:
    (facts,) = read_ports(LinuxSystem(), hosts=(host,), ports=(("data_port", port),))
    return check_port(replace(facts, ephemeral=(0, 0)))


def test_a_real_port_free_and_in_use() -> None:
    with listening("127.0.0.1") as port:
        finding = ports("127.0.0.1", port)
        assert finding.status is Status.FAILING
        assert f"in use by process {os.getpid()}" in finding.found
    assert ports("127.0.0.1", port).found == "free"
    assert ports("127.0.0.1", 0).found == "any free one"


def test_a_real_port_of_another_process_is_named_by_its_command() -> None:
    program = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, "kvstore serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        port = int(process.stdout.readline())
        holder = holder_of(LinuxSystem(), port)
        finding = ports("127.0.0.1", port)
        process.communicate("\n")
    assert holder
    assert (holder.pid, holder.is_node) == (process.pid, True)
    assert finding.status is Status.OK
    assert holder_of(LinuxSystem(), port) is None


@pytest.mark.parametrize("launch", ["", "{", "[]", '{"data_dirs": 1}', '{"data_dirs": [1]}', "{}"])
def test_a_worker_whose_command_line_tells_nothing(launch: str) -> None:
    program = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, "kvstore.server.worker", launch],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        holder = holder_of(LinuxSystem(), int(process.stdout.readline()))
        process.communicate("\n")
    assert holder
    assert (holder.is_node, holder.data_dirs) == (True, ())


def test_a_real_address_that_is_not_of_this_machine() -> None:
    assert ports("192.0.2.1", 7401).found == "Cannot assign requested address"
    assert try_listen("name.invalid", 7401) == errno.EADDRNOTAVAIL


def test_a_real_port_below_1024_as_an_ordinary_user() -> None:
    program = (
        "import os, socket\nfrom kvstore.doctor.sockets import try_listen\n"
        "try_listen('127.0.0.1', 0)\n"  # loads what an ordinary user may not read
        "if os.geteuid() == 0:\n    os.setgid(65534); os.setuid(65534)\n"
        "print(try_listen('127.0.0.1', 81))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) == errno.EACCES


def advertised(*hosts: str, advertise: str = "", port: int = 0) -> list[Finding]:
    return [check_advertised(facts) for facts in read_advertised(hosts=hosts, advertise=advertise, port=port)]


def test_a_real_address_is_dialled_back() -> None:
    (finding,) = advertised("127.0.0.1")
    assert finding.status is Status.OK
    assert "127.0.0.1 answers in" in finding.found


def test_where_a_node_listens_already_it_is_dialled() -> None:
    with listening("127.0.0.1") as port:
        (finding,) = advertised("127.0.0.1", port=port)
    assert finding.status is Status.OK
    assert finding.subject == f"127.0.0.1:{port}"


def test_a_real_name_that_does_not_resolve() -> None:
    (finding,) = advertised("0.0.0.0", advertise="name.invalid")
    assert finding.status is Status.FAILING
    assert "does not resolve" in finding.found


def test_a_real_name_that_leads_to_another_program() -> None:
    with listening("127.0.0.2") as port:
        listened, told = advertised("127.0.0.1", advertise="127.0.0.2", port=port)
    assert listened.status is Status.OK
    assert told.status is Status.FAILING, told


def test_a_real_address_that_only_this_machine_reaches() -> None:
    (finding,) = advertised("0.0.0.0", advertise="localhost")
    assert finding.status is Status.WARNING
    assert "loopback" in finding.found


def test_a_machine_that_tells_no_range_of_ports(fake: FakeSystem) -> None:
    (facts,) = read_ports(fake, hosts=("127.0.0.1",), ports=(("grpc_port", 0),))
    assert facts.ephemeral == (0, 0)

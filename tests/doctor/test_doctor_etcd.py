"""etcd: every verdict, and real servers that are healthy, not so, silent, foreign, or not there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvstore.doctor.etcd import EtcdFacts, check_etcd, read_etcd
from kvstore.doctor.finding import Status
from kvstore.limits import ETCD_LATENCY_NS_MAX
from kvstore.testing.etcd_process import EtcdProcess, make_certificates

HEALTHY = '{"health":"true","reason":""}'


@contextmanager
def etcd(body: str, status: int = 200) -> Iterator[str]:
    """A server that answers /health as etcd does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/health"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: the test's output is not the server's."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    "cluster", ["", "file:///var/lib/x", "elsewhere", "etcd://a", "etcd://", "etcd://a:1?colour=red"]
)
def test_without_etcd_nobody_is_asked(cluster: str) -> None:
    assert read_etcd(cluster) == []


def test_a_certificate_that_cannot_be_used() -> None:
    cluster = "etcd://a:1?ca=/nowhere"
    (finding,) = check_etcd(read_etcd(cluster))
    assert (finding.subject, finding.status) == (cluster, Status.FAILING)


def facts(endpoint: str, *, problem: str = "", healthy: bool = True, took_ns: int = 1_000_000) -> EtcdFacts:
    return EtcdFacts(endpoint=endpoint, problem=problem, is_healthy=healthy, took_ns=took_ns)


def test_one_of_three_out_of_reach_is_a_warning_all_are_a_failure() -> None:
    good, bad = facts("a:1"), facts("b:1", problem="Connection refused", healthy=False)
    assert [one.status for one in check_etcd([good, bad, good])] == [Status.OK, Status.WARNING, Status.OK]
    assert [one.status for one in check_etcd([bad, bad])] == [Status.FAILING, Status.FAILING]
    sick = facts("c:1", healthy=False)
    assert [one.status for one in check_etcd([sick])] == [Status.FAILING]
    assert check_etcd([]) == []


def test_a_slow_one_is_a_warning() -> None:
    (finding,) = check_etcd([facts("a:1", took_ns=ETCD_LATENCY_NS_MAX + 1)])
    assert finding.status is Status.WARNING
    assert "leases may run out" in finding.reason


def test_a_real_healthy_server() -> None:
    with etcd(HEALTHY) as endpoint:
        (found,) = read_etcd(f"etcd://{endpoint}")
    assert (found.endpoint, found.problem, found.is_healthy) == (endpoint, "", True)
    assert found.took_ns > 0


@pytest.mark.parametrize(("body", "status"), [('{"health":"false"}', 503), ("not json", 200), ("[1]", 200)])
def test_a_real_server_that_is_not_healthy(body: str, status: int) -> None:
    with etcd(body, status) as endpoint:
        (finding,) = check_etcd(read_etcd(f"etcd://{endpoint}"))
    assert finding.status is Status.FAILING
    assert "unhealthy" in finding.found


def test_a_real_port_where_nobody_listens() -> None:
    (finding,) = check_etcd(read_etcd(f"etcd://127.0.0.1:{closed_port()}"))
    assert finding.status is Status.FAILING
    assert finding.found == "Connection refused"


def test_a_real_server_that_never_answers_ends_by_its_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (finding,) = check_etcd(read_etcd(f"etcd://127.0.0.1:{silent.getsockname()[1]}"))
    assert finding.found == "no answer in 1 s"


def test_a_real_server_of_another_protocol() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-x\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        (finding,) = check_etcd(read_etcd(f"etcd://127.0.0.1:{listener.getsockname()[1]}"))
        thread.join()
    assert finding.found == "it does not speak HTTP"


def test_a_real_etcd_healthy_frozen_and_gone(tmp_path: Path) -> None:
    with EtcdProcess(tmp_path) as real:
        cluster = f"etcd://{real.members}"
        (healthy,) = check_etcd(read_etcd(cluster))
        real.freeze(0)
        (frozen,) = check_etcd(read_etcd(cluster))
        real.kill(0)
        (gone,) = check_etcd(read_etcd(cluster))
    assert healthy.found.startswith("healthy, answers in ")  # how fast is the machine's business
    assert (frozen.status, frozen.found) == (Status.FAILING, "no answer in 1 s")
    assert (gone.status, gone.found) == (Status.FAILING, "Connection refused")


def test_a_real_etcd_with_certificates(tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "certificates")
    with EtcdProcess(tmp_path / "etcd", certificates=files) as real:
        known = f"etcd://{real.members}?ca={files.ca}&cert={files.cert}&key={files.key}"
        (healthy,) = read_etcd(known)
        (plain,) = check_etcd(read_etcd(f"etcd://{real.members}"))
        (stranger,) = check_etcd(read_etcd(f"etcd://{real.members}?ca={files.ca}"))
    assert (healthy.problem, healthy.is_healthy) == ("", True)
    assert plain.status is Status.FAILING
    assert stranger.status is Status.FAILING

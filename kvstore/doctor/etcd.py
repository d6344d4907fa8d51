"""etcd, where the cluster setting names it: reachable, healthy, and fast enough to keep leases."""

from __future__ import annotations

import json
import ssl
import statistics
from dataclasses import dataclass
from http import HTTPStatus

from kvstore.cluster.store_address import EtcdAddress, parse_store_address
from kvstore.doctor.finding import Finding, Fix, Status
from kvstore.doctor.sockets import http_get
from kvstore.errors import InvalidRequest
from kvstore.limits import ETCD_LATENCY_NS_MAX, ETCD_PROBES, MS_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdFacts:
    """One endpoint, asked a few times for /health.

    Attributes:
        endpoint: "host:port".
        problem: why it did not answer; "" when it did.
        is_healthy: what it says of itself: it has a leader and can write.
        took_ns: median time of an answer, connection included.
    """

    endpoint: str
    problem: str
    is_healthy: bool
    took_ns: int


def read_etcd(cluster: str) -> list[EtcdFacts]:
    """Ask each member that the cluster setting names; none where it names no etcd.

    A setting that cannot be read is a fault of the settings; a certificate that cannot be used is told as a problem
    of the whole.
    """
    if not cluster.startswith("etcd:"):
        return []
    try:
        address = parse_store_address(cluster)
    except InvalidRequest:
        return []
    assert isinstance(address, EtcdAddress)  # a file store begins otherwise
    try:
        tls = _tls(address)
    except OSError as error:
        return [EtcdFacts(endpoint=cluster, problem=str(error), is_healthy=False, took_ns=0)]
    return [_ask(member, tls) for member in address.members]


def _tls(address: EtcdAddress) -> ssl.SSLContext | None:
    if not address.ca:
        return None
    context = ssl.create_default_context(cafile=address.ca)
    if address.cert:
        context.load_cert_chain(address.cert, address.key)
    return context


def _ask(member: str, tls: ssl.SSLContext | None) -> EtcdFacts:
    host, _, port = member.rpartition(":")
    took_ns: list[int] = []
    healthy = True
    for _ in range(ETCD_PROBES):
        answer = http_get(host.strip("[]"), int(port), "/health", tls=tls)
        if answer.problem:
            return EtcdFacts(endpoint=member, problem=answer.problem, is_healthy=False, took_ns=0)
        took_ns.append(answer.took_ns)
        healthy = healthy and answer.status == HTTPStatus.OK and _says_healthy(answer.body)
    return EtcdFacts(endpoint=member, problem="", is_healthy=healthy, took_ns=int(statistics.median(took_ns)))


def _says_healthy(body: str) -> bool:
    try:
        said = json.loads(body)
    except ValueError:
        return False
    return isinstance(said, dict) and str(said.get("health")).lower() == "true"


def check_etcd(endpoints: list[EtcdFacts]) -> list[Finding]:
    """A line for each endpoint. One that is out of reach is a warning while others serve."""
    some_serve = any(not facts.problem and facts.is_healthy for facts in endpoints)
    return [_check_endpoint(facts, some_serve=some_serve) for facts in endpoints]


def _check_endpoint(facts: EtcdFacts, *, some_serve: bool) -> Finding:
    status, reason = Status.OK, ""
    found = f"healthy, answers in {facts.took_ns / MS_NS:.1f} ms"
    if facts.problem or not facts.is_healthy:
        found = facts.problem or f"unhealthy, answers in {facts.took_ns / MS_NS:.1f} ms"
        status = Status.WARNING if some_serve else Status.FAILING
        reason = (
            "the others serve; one more may not be lost"
            if some_serve
            else "without etcd the node has no lease: it takes no puts, and clients do not find one that is new"
        )
    elif facts.took_ns > ETCD_LATENCY_NS_MAX:
        status = Status.WARNING
        reason = "leases may run out under load, and the node is then taken for dead"
    return Finding(
        check="etcd",
        subject=facts.endpoint,
        status=status,
        found=found,
        needed=f"healthy, answers within {ETCD_LATENCY_NS_MAX // MS_NS} ms",
        reason=reason,
        fix=None
        if status is Status.OK
        else Fix(
            shell=f"curl http://{facts.endpoint}/health and etcdctl endpoint status on that host; start it "
            "(systemctl start etcd), open the port, give it a drive of its own",
            systemd="After=network-online.target in [Unit], and KVSTORE_CLUSTER=etcd://HOST:2379,... with the right "
            "hosts; etcd's own unit needs --listen-client-urls beyond loopback",
            kubernetes="cluster: etcd://SERVICE.NAMESPACE:2379, a NetworkPolicy that allows it, and a fast storage "
            "class for etcd's volume",
        ),
    )

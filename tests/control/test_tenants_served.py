"""Tenants of a whole node: tokens over the wire, gRPC, HTTP and the command line; reload and revocation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.errors import Denied, InvalidRequest, KVStoreError
from kvstore.limits import MiB
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.server.report import Question
from kvstore.server.tenants import hash_of
from kvstore.telemetry.registry import number
from kvstore.testing.serve_process import Ready, ServeProcess
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, Hit, Miss, MissReason, Refused, RefusedReason, Stored
from kvstore_client import KVClient

LAYOUT = KVLayout.opaque(chunk_bytes=1 * MiB, chunk_tokens=16)
TOKENS = {
    "ours": "ours: everything our inference needs",
    "reader": "ours: to read and no more",
    "theirs": "theirs: everything they need",
    "root": "operators: the administration",
}
SCOPES = {"ours": ["read", "write"], "reader": ["read"], "theirs": ["read", "write"], "root": ["admin"]}
TENANT_OF = {"ours": "ours", "reader": "ours", "theirs": "theirs", "root": "operators"}
VALUE = os.urandom(100_000)


def namespace(tenant: str) -> Namespace:
    return Namespace(tenant=tenant, model="m", weights="w", layout=LAYOUT)


@dataclass(slots=True)
class Served:
    """A node with tenants."""

    process: ServeProcess
    ready: Ready
    folder: Path

    def write_tenants(self, *names: str, path: Path | None = None) -> None:
        write_tenants(path or self.folder / "tenants.json", *names)

    def client(self, name: str) -> KVClient:
        return KVClient.connect(self.ready.grpc, token=TOKENS[name], deadline=10)

    def control(self, name: str) -> ControlClient:
        return ControlClient(self.ready.grpc, token=TOKENS[name].encode() if name else b"")


def write_tenants(path: Path, *names: str) -> None:
    tenants: dict[str, list[object]] = {tenant: [] for tenant in TENANT_OF.values()}
    for name in names:
        token = {"scopes": SCOPES[name], "sha256": hash_of(TOKENS[name].encode()).hex()}
        tenants[TENANT_OF[name]].append(token)
    path.write_text(json.dumps({"tenants": [{"name": name, "tokens": found} for name, found in tenants.items()]}))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    write_tenants(folder / "tenants.json", *TOKENS)
    with ServeProcess(folder, "--tenants", str(folder / "tenants.json"), "--cache", "16MiB") as process:
        made = Served(process=process, ready=process.wait_ready(), folder=folder)
        for name in ("ours", "theirs"):
            with made.client(name) as client:
                ns = client.namespace(namespace(name))
                assert [type(one) for one in ns.put(ns.keys(range(16)), [VALUE])] == [Stored]
        yield made


def denied(act: Callable[[], object]) -> str:
    """What a Denied says."""
    with pytest.raises(Denied) as caught:
        act()
    return str(caught.value)


# --- the client -------------------------------------------------------------------------------------------------------
def test_a_client_with_a_token_has_its_tenants_chunks(served: Served) -> None:
    with served.client("ours") as client:
        ns = client.namespace(namespace("ours"))
        buffer = bytearray(len(VALUE))
        assert isinstance(ns.get_into(ns.keys(range(16)), [buffer])[0], Hit)
        assert buffer == VALUE
        assert [type(one) for one in ns.put(ns.keys(range(16)), [VALUE])] == [Exists]


def test_another_tenants_chunks_are_not_there(served: Served) -> None:
    with served.client("ours") as client:
        ns = client.namespace(namespace("theirs"))
        keys = ns.keys(range(16))
        assert ns.get_into(keys, [bytearray(len(VALUE))]) == [Miss(MissReason.ABSENT)]
        with ns.match(keys) as match:
            assert match.chunks == 0
        assert ns.contains(keys) == [False]
        outcome = ns.put(keys, [VALUE])[0]
        assert isinstance(outcome, Refused)
        assert outcome.reason is RefusedReason.DENIED
        assert "'theirs'" in outcome.detail
        ns.delete(keys)
    with served.client("theirs") as client:
        ns = client.namespace(namespace("theirs"))
        assert ns.contains(ns.keys(range(16))) == [True]


def test_a_reader_reads_and_its_puts_are_refused(served: Served) -> None:
    with served.client("reader") as client:
        ns = client.namespace(namespace("ours"))
        assert isinstance(ns.get_into(ns.keys(range(16)), [bytearray(len(VALUE))])[0], Hit)
        outcome = ns.put(ns.keys(range(16, 32)), [VALUE])[0]
        assert isinstance(outcome, Refused)
        assert outcome.reason is RefusedReason.DENIED
        assert "scope" in denied(lambda: ns.delete(ns.keys(range(16))))
        assert "scope" in denied(ns.drop)


def test_who_brings_no_token_or_a_wrong_one_is_told(served: Served) -> None:
    for address in (served.ready.grpc, served.ready.data[0]):
        assert "no token" in denied(lambda: KVClient.connect(address, deadline=10))  # noqa: B023 -- called at once
        words = denied(lambda: KVClient.connect(address, token="a wrong one, long enough", deadline=10))  # noqa: B023
        assert "not known" in words


def test_a_token_from_a_file(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKENS["ours"] + "\n")
    path.chmod(0o600)
    with KVClient.connect(served.ready.grpc, token_file=path, deadline=10) as client:
        ns = client.namespace(namespace("ours"))
        assert ns.contains(ns.keys(range(16))) == [True]
    with pytest.raises(InvalidRequest, match="one of them"):
        KVClient.connect(served.ready.grpc, token="x", token_file=path)


# --- gRPC -------------------------------------------------------------------------------------------------------------
def test_lists_and_explanations_are_of_ones_own(served: Served) -> None:
    digest, keys = namespace("theirs").digest, bytes(32)
    with served.control("ours") as control:
        assert [one.tenant for one in control.namespaces("ours").namespaces] == ["ours"]
        assert control.explain(Question(tenant="ours", namespace=namespace("ours").digest, keys=keys)).namespace_known
        asked = control.explain(Question(tenant="ours", namespace=digest, keys=keys))
        assert not asked.namespace_known
        assert {one.namespace.tenant for one in asked.namespaces} == {"ours"}
        for act in (
            lambda: control.namespaces("theirs"),
            lambda: control.explain(Question(tenant="theirs", namespace=digest, keys=keys)),
            lambda: control.drop("theirs", digest),
        ):
            assert "'theirs'" in denied(act)
        assert not control.drop("ours", digest).dropped, "as if it had never been"
        with pytest.raises(InvalidRequest, match="tenant"):
            control.drop("ours", digest, manifest=namespace("theirs").manifest())


def test_a_lookup_of_another_tenants_namespace_finds_none(served: Served) -> None:
    never = Namespace(tenant="theirs", model="never", weights="w", layout=LAYOUT)
    theirs = namespace("theirs")
    keys = bytes(theirs.keys(range(16))[0].digest)
    with served.control("ours") as control:
        assert control.lookup(theirs.digest, keys) == control.lookup(never.digest, keys)
    with served.control("theirs") as control:
        assert control.lookup(theirs.digest, keys).prefix == 1


def test_a_tenant_cannot_count_what_others_have(served: Served) -> None:
    with served.control("reader") as control:
        report = control.report()
    assert report.numbers == {}
    assert report.drives == ()
    assert [use.name for use in report.tenants] in ([], ["ours"])


def test_what_needs_an_admin_is_denied_to_others(served: Served) -> None:
    with served.control("ours") as control:
        for act in (control.scrub, control.drain, control.reload_tenants):
            assert "admin" in denied(act)
    with served.control("root") as control:
        assert {one.tenant for one in control.namespaces("theirs").namespaces} == {"theirs"}
        assert number(control.report().numbers, "engine", "records") >= 2
        assert control.reload_tenants() == 3
        assert "scope read" in denied(lambda: control.lookup(namespace("ours").digest, bytes(32)))


@pytest.mark.parametrize(
    "ask",
    [
        lambda control: control.view(),
        lambda control: next(control.views(deadline_ns=10**9)),
        lambda control: control.report(),
        lambda control: control.namespaces("ours"),
        lambda control: control.lookup(bytes(32), bytes(32)),
        lambda control: control.explain(Question(tenant="ours")),
        lambda control: control.drop("ours", bytes(32)),
        lambda control: control.scrub(),
        lambda control: control.drain(),
        lambda control: control.reload_tenants(),
    ],
)
def test_no_call_is_answered_without_a_token(served: Served, ask: Callable[[ControlClient], object]) -> None:
    with served.control("") as control:
        assert "no token" in denied(lambda: ask(control))
        assert control.healthy(), "probes have no token"


# --- HTTP -------------------------------------------------------------------------------------------------------------
def fetch(served: Served, path: str, token: str = "") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{served.ready.metrics}{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_numbers_are_for_admins_and_health_for_everybody(served: Served) -> None:
    for path in ("/metrics", "/"):
        assert fetch(served, path)[0] == 401
        assert fetch(served, path, TOKENS["ours"])[0] == 401
        assert fetch(served, path, TOKENS["root"])[0] == 200
    assert fetch(served, "/healthz")[0] == 200
    assert 'kvstore_denied_total{kind="no_token"}' in fetch(served, "/metrics", TOKENS["root"])[1]


# --- reload -------------------------------------------------------------------------------------------------------
def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def is_admitted(served: Served, name: str) -> bool:
    try:
        served.client(name).close()
    except Denied:
        return False
    return True


@pytest.mark.parametrize("how", ["signal", "verb"])
def test_a_reload_revokes_tokens_and_closes_their_connections(served: Served, how: str) -> None:
    def reload() -> None:
        if how == "signal":
            os.kill(served.ready.pid, signal.SIGHUP)
        else:
            with served.control("root") as control:
                control.reload_tenants()

    revoked, kept = served.client("theirs"), served.client("ours")
    try:
        theirs, ours = revoked.namespace(namespace("theirs")), kept.namespace(namespace("ours"))
        assert theirs.contains(theirs.keys(range(16))) == [True]
        assert ours.contains(ours.keys(range(16))) == [True]
        served.write_tenants("ours", "reader", "root")
        reload()
        wait_until(lambda: not is_admitted(served, "theirs"))
        with pytest.raises(KVStoreError):
            theirs.delete(theirs.keys(range(16)))
        assert ours.contains(ours.keys(range(16))) == [True]
    finally:
        served.write_tenants(*TOKENS)
        reload()
        wait_until(lambda: is_admitted(served, "theirs"))
        revoked.close()
        kept.close()
    with served.client("theirs") as client:
        ns = client.namespace(namespace("theirs"))
        assert ns.contains(ns.keys(range(16))) == [True], "its chunks waited for it"


def test_a_bad_file_changes_nothing(served: Served) -> None:
    path = served.folder / "tenants.json"
    path.write_text("{")
    try:
        with served.control("root") as control, pytest.raises(InvalidRequest, match="not valid JSON"):
            control.reload_tenants()
        assert is_admitted(served, "ours")
    finally:
        served.write_tenants(*TOKENS)


def test_a_worker_that_starts_again_knows_the_tenants(served: Served) -> None:
    with served.control("root") as control:
        before = control.report().workers[0]
        os.kill(before.pid, signal.SIGKILL)
        wait_until(lambda: control.report().workers[0].pid not in (0, before.pid))
        wait_until(control.healthy)
    assert "no token" in denied(lambda: KVClient.connect(served.ready.data[0], deadline=10))
    with served.client("ours") as client:
        ns = client.namespace(namespace("ours"))
        assert ns.contains(ns.keys(range(16))) == [True]


# --- the command line ---------------------------------------------------------------------------------------------
def kvstore(*arguments: str, token_file: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"KVSTORE_TOKEN_FILE": str(token_file)} if token_file else {})
    command = [sys.executable, "-m", "kvstore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


def test_the_command_line_takes_a_token_file(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKENS["ours"])
    path.chmod(0o600)
    bare = kvstore("namespaces", "--node", served.ready.grpc, "--tenant", "ours")
    assert bare.returncode == 2
    assert "--token-file" in bare.stderr
    listed = kvstore("namespaces", "--node", served.ready.grpc, "--tenant", "ours", token_file=path)
    assert listed.returncode == 0
    asked = kvstore("status", "--node", served.ready.grpc, "--token-file", str(path))
    assert asked.returncode == 0, asked.stderr
    assert "serving" in asked.stdout


def test_tokens_are_drawn_and_hashed_by_command(tmp_path: Path) -> None:
    drawn = kvstore("tenants", "new-token", str(tmp_path / "token"), "--json")
    hashed = kvstore("tenants", "hash", str(tmp_path / "token"), "--json")
    assert json.loads(drawn.stdout) == json.loads(hashed.stdout)
    alone = kvstore("tenants", "hash", str(tmp_path / "token"))
    assert alone.stdout == f"{json.loads(drawn.stdout)['sha256']}\n", "a shell takes it as it is"
    assert kvstore("tenants", "new-token", str(tmp_path / "other")).stdout == (
        kvstore("tenants", "hash", str(tmp_path / "other")).stdout
    )

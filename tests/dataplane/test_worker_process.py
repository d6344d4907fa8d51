"""The worker as a real process: what it imports, its admin socket, and how it ends."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.limits import SECOND_NS, MiB
from kvstore.server.launch import WORKER_MODULE, WorkerLaunch
from kvstore.testing.plane_lab import LabClient, PlaneLab
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import ItemStatus, MissReason, RefusedReason
from kvstore.wire.codec import pack_plain, unpack_plain
from kvstore.wire.messages import Admin, AdminReply, Grant

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = Namespace(
    tenant="default", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=MiB, chunk_tokens=16)
)
NS = NAMESPACE.digest
KEY = b"k" * 32


class Elsewhere(PlaneLab):
    """Stands in for a lab: the data plane turns by itself, in another process."""

    def __init__(self) -> None:
        self.watched: list[LabClient] = []

    def turn_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            channels = [client.channel for client in self.watched]
            blocked = [channel for channel in channels if channel.pending_bytes]
            readable, writable, _ = select.select(channels, blocked, [], 20)
            assert readable or writable, "it never came"

    def turn(self, *, wait_ns: int = 0) -> None:
        """Nothing to turn here."""

    def join(self, connected: socket.socket) -> LabClient:
        client = LabClient(self, connected)
        self.watched = [client]
        client.hello()
        return client


class WorkerProcess:
    """One worker, with this test as its supervisor."""

    def __init__(self, *dirs: Path, capacity_bytes: int = 64 * MiB, **changes: Any) -> None:
        ours, theirs = socket.socketpair()
        fields: dict[str, Any] = {
            "admin_fd": theirs.fileno(),
            "rail": 0,
            "node_id": "node",
            "data_dirs": tuple(map(str, dirs)),
            "capacity_bytes": capacity_bytes,
            "hosts": ("127.0.0.1",),
            "advertise": "",
            "data_port": 0,
            "local_socket": "",
            "cache_bytes": 16 * MiB,
            "staging_bytes": 32 * MiB,
            "device": "threads",
            "queue_depth": 32,
            "segment_bytes": 0,
            "write_amplification_max": 1.3,
            "endurance_bytes_day": 0,
            "scrub_bytes_second": 0,
            "repair_bytes_second": 0,
            "drain_ns": 5 * SECOND_NS,
            "has_tenants": False,
            "drives_of_node": 1,
            "cluster_id": bytes(16).hex(),
            "log_level": "warning",
            "log_format": "human",
        }
        launch = WorkerLaunch(**(fields | changes))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", WORKER_MODULE, launch.to_argument()], pass_fds=(theirs.fileno(),), cwd=ROOT
            )
        self.admin = Elsewhere().join(ours)

    def ask(self, verb: str, **arguments: Any) -> Any:
        """One admin verb."""
        reply = self.admin.call(Admin(verb=verb, arguments=pack_plain(arguments)), AdminReply)
        return unpack_plain(reply.value, what=verb)

    def client(self) -> LabClient:
        """A connection to its data port."""
        host, _, port = self.ask("ready")["data"][0].rpartition(":")
        client = Elsewhere().join(socket.create_connection((host, int(port))))
        client.register(NAMESPACE.manifest())
        return client

    def end(self) -> None:
        """Takes away what is left of it."""
        self.admin.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker that serves; tests that share it leave it serving."""
    made = WorkerProcess(tmp_path_factory.mktemp("a"))
    yield made
    made.end()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[WorkerProcess]:
    """A worker of one test, which may end it; its drive is `tmp_path / "a"`."""
    (tmp_path / "a").mkdir()
    made = WorkerProcess(tmp_path / "a")
    yield made
    made.end()


def test_the_worker_never_loads_grpc_or_protobuf() -> None:
    code = "import kvstore.server.worker, sys; print([n for n in sys.modules if n.split('.')[0] in ('grpc', 'google')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


def test_a_worker_may_open_as_many_files_as_the_hard_limit_allows() -> None:
    code = (
        "import resource; from kvstore.server.worker import allow_descriptors;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024)); allow_descriptors();"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout.split() == ["1024", "1024"]
    assert "1024 open files are allowed, 8192 connections need" in ended.stderr


def test_ready_names_addresses_and_targets(worker: WorkerProcess) -> None:
    ready = worker.ask("ready")
    (target,) = ready["targets"]
    assert Path(target["path"]).is_dir()
    assert target["capacity_bytes"] == 64 * MiB
    assert len(bytes.fromhex(target["id"])) == 16
    client = worker.client()
    assert client.put(NS, [KEY], [b"value"])[0][0] in (ItemStatus.STORED, ItemStatus.EXISTS)
    assert client.get(NS, [KEY])[1] == {0: b"value"}


def test_the_verbs_of_the_supervisor(worker: WorkerProcess) -> None:
    client = worker.client()
    client.put(NS, [KEY], [b"value"])
    stats = worker.ask("stats")
    assert stats["state"] == "serving"
    assert stats["metrics"]["engine"]["records"] >= 1
    assert stats["metrics"]["dataplane"]["connections"] >= 2
    assert stats["metrics"]["process"]["open_files"] > 3
    page = worker.ask("namespaces", after=b"", limit=10)["namespaces"]
    assert [(row["digest"], row["dropped"]) for row in page] == [(NS, False)]
    assert page[0]["manifest"] == NAMESPACE.manifest()
    assert worker.ask("namespaces", after=NS, limit=10)["namespaces"] == []
    told = worker.ask("explain", namespace=NS, keys=KEY + bytes(32))
    assert told["known"]
    assert [row["status"] for row in told["keys"]] == [0, MissReason.ABSENT]
    assert not worker.ask("explain", namespace=bytes(32), keys=KEY)["known"]
    assert worker.ask("scrub", bytes_second=0)["started"]
    view = {"epoch": 9, "node_id": "node", "targets": []}
    assert worker.ask("view_set", **view) == {}
    client.get(NS, [KEY])
    assert worker.client().get(NS, [KEY])[1] == {0: b"value"}


@pytest.mark.parametrize(
    ("verb", "arguments", "says"),
    [
        ("fly", {}, "unknown"),
        ("namespaces", {"after": b"", "limit": -1}, "limit"),
        ("namespaces", {"limit": 1}, "after"),
        ("explain", {"namespace": NS, "keys": b"short"}, "explain"),
        ("view_set", {"epoch": "x"}, "epoch"),
        ("scrub", {}, "bytes_second"),
    ],
)
def test_bad_verbs_are_refused_and_change_nothing(
    worker: WorkerProcess, verb: str, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        worker.ask(verb, **arguments)
    assert worker.ask("stats")["state"] == "serving"


def test_drain_refuses_puts_until_it_is_taken_back(worker: WorkerProcess) -> None:
    client = worker.client()
    client.put(NS, [KEY], [b"value"])
    fresh = os.urandom(32)
    assert worker.ask("drain", resume=False) == {"draining": True}
    assert worker.ask("stats")["state"] == "draining"
    assert client.put(NS, [fresh], [b"x"])[0][0] == RefusedReason.DRAINING
    assert client.get(NS, [KEY])[1] == {0: b"value"}
    assert worker.ask("drain", resume=True) == {"draining": False}
    assert client.put(NS, [fresh], [b"x"])[0][0] == ItemStatus.STORED


def test_shutdown_finishes_what_is_in_progress(mortal: WorkerProcess, tmp_path: Path) -> None:
    client = mortal.client()
    value = os.urandom(MiB // 2)
    client.start(client.offer(NS, [KEY], [value]))
    client.expect(Grant)
    mortal.ask("shutdown", within_ns=20 * SECOND_NS)
    client.send_item(0, value)
    assert client.end_put([value]) == {0: (ItemStatus.STORED, "")}
    assert mortal.process.wait(20) == 0
    again = WorkerProcess(tmp_path / "a")
    assert again.client().get(NS, [KEY])[1] == {0: value}
    again.end()


def test_shutdown_does_not_wait_for_ever(mortal: WorkerProcess) -> None:
    client = mortal.client()
    client.start(client.offer(NS, [KEY], [b"v" * 500_000]))
    client.expect(Grant)
    mortal.ask("shutdown", within_ns=SECOND_NS // 10)
    assert mortal.process.wait(20) == 0
    with pytest.raises(Unavailable):
        client.receive()


def test_sigterm_drains_and_the_end_of_the_supervisor_ends_it(mortal: WorkerProcess, tmp_path: Path) -> None:
    mortal.ask("ready")
    mortal.process.send_signal(signal.SIGINT)  # for the supervisor, not for the worker
    mortal.ask("stats")
    mortal.process.send_signal(signal.SIGTERM)
    assert mortal.process.wait(20) == 0
    again = WorkerProcess(tmp_path / "a")
    again.ask("ready")
    again.admin.close()
    assert again.process.wait(20) == 0


def test_acknowledged_records_survive_a_kill(mortal: WorkerProcess, tmp_path: Path) -> None:
    client = mortal.client()
    values = [os.urandom(100_000 + number) for number in range(20)]
    keys = [number.to_bytes(32, "little") for number in range(20)]
    assert {status for status, _ in client.put(NS, keys, values).values()} == {ItemStatus.STORED}
    mortal.process.kill()
    mortal.process.wait()
    again = WorkerProcess(tmp_path / "a")
    assert again.client().get(NS, keys) == (bytes(20), dict(enumerate(values)))
    again.end()


@pytest.mark.parametrize("trouble", ["missing", "port"])
def test_a_start_that_fails_says_why_and_exits_1(worker: WorkerProcess, tmp_path: Path, trouble: str) -> None:
    port = int(worker.ask("ready")["data"][0].rpartition(":")[2])
    (tmp_path / "b").mkdir()
    if trouble == "missing":
        failing, says = WorkerProcess(tmp_path / "c" / "d"), "c/d"
    else:
        failing, says = WorkerProcess(tmp_path / "b", data_port=port), f"port {port}"
    with pytest.raises(KVStoreError, match=says):
        failing.ask("ready")
    assert failing.process.wait(20) == 1
    failing.end()


def test_two_drives_of_one_worker(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    worker = WorkerProcess(tmp_path / "a", tmp_path / "b")
    assert len({target["id"] for target in worker.ask("ready")["targets"]}) == 2
    client = worker.client()
    keys = [number.to_bytes(32, "little") for number in range(30)]
    values = [os.urandom(5000) for _ in keys]
    client.put(NS, keys, values)
    assert client.get(NS, keys) == (bytes(30), dict(enumerate(values)))
    told = worker.ask("explain", namespace=NS, keys=b"".join(keys) + b"x" * 32)["keys"]
    assert [row["status"] for row in told] == [0] * 30 + [MissReason.ABSENT]
    assert worker.ask("stats")["metrics"]["engine"]["records"] == 30
    worker.end()

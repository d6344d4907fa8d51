"""`kvstore serve` as real processes: start, health, view, signals, deaths of either process, and starts that fail."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client.parser import text_string_to_metric_families

from kvstore import errors
from kvstore.cluster.view import TargetState, View
from kvstore.limits import BATCH_ITEMS_MAX, DIGEST_BYTES, SECOND_NS, SERIES_MAX, MiB
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.server.report import Drained, Dropped, NodeState, Question, WorkerState
from kvstore.telemetry.registry import number
from kvstore.testing.serve_process import Ready, ServeProcess, wait_until_gone
from kvstore.v1 import control_pb2
from kvstore.wire.codec import unpack_plain
from kvstore.wire.frames import Frame, FrameReader
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.messages import ErrorReply, Hello, Ping, Unpin, ViewReply, ViewRequest, Welcome
from kvstore.wire.schema import Message


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A node that serves; tests that share it leave it serving."""
    with ServeProcess(tmp_path_factory.mktemp("node")) as process:
        process.wait_ready()
        yield process


@pytest.fixture(scope="module")
def ready(node: ServeProcess) -> Ready:
    return node.wait_ready()


@pytest.fixture
def client(ready: Ready) -> Iterator[ControlClient]:
    with ControlClient(ready.grpc) as found:
        yield found


def fetch(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body of a request to the metrics port."""
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_for_view(client: ControlClient, state: TargetState) -> View:
    """The first view in which all targets are in this state; the watch has a deadline."""
    for view in client.views(deadline_ns=60 * SECOND_NS):
        if view.targets and all(target.state is state for target in view.targets):
            return view
    raise AssertionError("the watch ended")


class WireClient:
    """The fewest lines that speak the wire protocol to the gRPC port."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)), timeout=30)
        self._reader = FrameReader()

    def send(self, message: Message, request_id: int) -> None:
        self.sock.sendall(encode_head(message.TYPE, request_id, message.encode()))

    def receive(self) -> Frame:
        while True:
            count = self.sock.recv_into(self._reader.buffers()[0])
            assert count, "the node closed the connection"
            for frame in self._reader.advance(count):
                return frame

    def hello(self, version_min: int = 1, version_max: int = 1) -> None:
        hello = Hello(
            version_min=version_min,
            version_max=version_max,
            features=0,
            client_id=bytes(16),
            boot_id=bytes(16),
            token=b"",
            flow=0,
        )
        self.send(hello, 0)


# --- a node that serves ---------------------------------------------------------------------------------------------
def test_the_ready_file_names_addresses_that_answer(node: ServeProcess, ready: Ready, client: ControlClient) -> None:
    assert ready.pid == node.process.pid
    assert client.report().grpc == ready.grpc
    for address in (ready.grpc, ready.metrics, *ready.data):
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=30).close()


def test_health_tells_readiness_and_liveness(client: ControlClient) -> None:
    assert client.healthy()
    assert client.healthy("kvstore.v1.Control")
    assert client.healthy("kvstore.liveness")


def test_reflection_describes_the_services(ready: Ready) -> None:
    with grpc.insecure_channel(ready.grpc) as channel:
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"kvstore.v1.Control", "grpc.health.v1.Health"} <= set(services)


def test_the_view_names_the_drive_and_its_data_address(client: ControlClient, ready: Ready) -> None:
    view = client.view()
    (target,) = view.targets
    assert list(target.data) == ready.data
    assert target.state is TargetState.SERVING
    assert target.weight > 0
    assert view.epoch > 0


def test_the_report_has_state_workers_and_numbers(client: ControlClient) -> None:
    report = client.report()
    assert report.state is NodeState.SERVING
    assert [worker.state for worker in report.workers] == [WorkerState.SERVING]
    assert 56 * MiB < number(report.numbers, "engine", "capacity_bytes") <= 64 * MiB
    assert report.numbers["device"]["mode"] in ("uring", "threads")
    assert report.numbers["device"]["mode_reason"]


def test_series_of_a_live_node_stay_below_the_bound(ready: Ready) -> None:
    status, page = fetch(ready.metrics, "/metrics")
    assert status == 200
    families = list(text_string_to_metric_families(page))
    samples = [sample for family in families for sample in family.samples]
    assert 200 < len(samples) < SERIES_MAX
    assert {"kvstore_live_bytes", "kvstore_lookup_hits", "kvstore_device_mode_info"} <= {
        family.name for family in families
    }


def test_healthz_and_the_page_for_people(ready: Ready) -> None:
    assert fetch(ready.metrics, "/healthz") == (200, "serving\n")
    status, page = fetch(ready.metrics, "/")
    assert status == 200
    assert "<h1>kvstore" in page
    assert "<script" not in page
    assert fetch(ready.metrics, "/nothing")[0] == 404
    assert fetch(ready.metrics, "/metrics", "POST")[0] == 405
    assert fetch(ready.metrics, "/healthz", "HEAD") == (200, "")


def test_garbage_on_the_metrics_port_is_refused_and_the_node_lives(ready: Ready) -> None:
    host, _, port = ready.metrics.rpartition(":")
    for garbage in (b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"x" * 100_000, b""):
        with socket.create_connection((host, int(port)), timeout=30) as sock:
            try:
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                answer = sock.recv(4096)
            except OSError:  # closed while we still sent
                continue
            assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert fetch(ready.metrics, "/healthz")[0] == 200


# --- verbs ----------------------------------------------------------------------------------------------------------
def test_a_lookup_of_an_unknown_namespace_is_all_misses(client: ControlClient) -> None:
    found = client.lookup(bytes(32), bytes(32 * 5))
    assert not found.namespace_known
    assert found.statuses == bytes([1]) * 5
    assert found.prefix == 0
    assert client.lookup(bytes(32), b"").statuses == b""


def test_limits_are_named_as_invalid_argument(client: ControlClient, ready: Ready) -> None:
    with pytest.raises(
        errors.InvalidRequest, match=f"{BATCH_ITEMS_MAX + 1} keys in one request, at most {BATCH_ITEMS_MAX}"
    ):
        client.lookup(bytes(32), bytes(DIGEST_BYTES * (BATCH_ITEMS_MAX + 1)))
    with pytest.raises(errors.InvalidRequest, match="1000000 keys"):
        client.lookup(bytes(32), bytes(DIGEST_BYTES * 1_000_000))
    with pytest.raises(errors.InvalidRequest, match="split the batch"):
        client.lookup(bytes(32), bytes(DIGEST_BYTES * 3_000_000))
    assert len(client.lookup(bytes(32), bytes(DIGEST_BYTES * BATCH_ITEMS_MAX)).statuses) == BATCH_ITEMS_MAX
    with grpc.insecure_channel(ready.grpc) as channel:
        call = channel.unary_unary(
            "/kvstore.v1.Control/Lookup",
            request_serializer=control_pb2.LookupRequest.SerializeToString,
            response_deserializer=control_pb2.LookupResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as caught:
            call(control_pb2.LookupRequest(namespace=b"short", keys=b""), timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "5 bytes" in caught.value.details()


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.lookup(bytes(31), b""),
        lambda client: client.lookup(bytes(32), b"odd"),
        lambda client: client.namespaces(""),
        lambda client: client.namespaces("t", after=b"x"),
        lambda client: client.namespaces("t", limit=100_000),
        lambda client: client.explain(Question(tenant="")),
        lambda client: client.explain(Question(tenant="t", namespace=b"x")),
        lambda client: client.explain(Question(tenant="t", manifest=b"nonsense")),
        lambda client: client.drop("", bytes(32)),
        lambda client: client.drop("t", b""),
    ],
)
def test_a_wrong_request_is_answered_and_changes_nothing(client: ControlClient, ask: object) -> None:
    assert callable(ask)
    with pytest.raises((errors.InvalidRequest, errors.FormatUnsupported)):
        ask(client)
    assert client.healthy()


def test_a_node_without_data_knows_no_namespace(client: ControlClient) -> None:
    assert client.namespaces("default").namespaces == ()
    assert client.drop("default", bytes(32)) == Dropped(dropped=False)
    answer = client.explain(Question(tenant="default", model="org/m"))
    assert "no namespace here" in answer.summary


def test_drain_refuses_puts_and_can_be_taken_back(client: ControlClient) -> None:
    epoch = client.view().epoch
    assert client.drain() == Drained(draining=True, done=True), "a node alone has nobody to hand on to"
    assert client.report().state is NodeState.DRAINING
    assert wait_for_view(client, TargetState.DRAINING).epoch > epoch
    assert client.healthy(), "a drained node still answers gets"
    assert not client.drain(resume=True).draining
    assert wait_for_view(client, TargetState.SERVING).epoch > epoch + 1


def test_scrub_can_be_asked_for(client: ControlClient) -> None:
    client.scrub()


# --- the wire protocol on the gRPC port -----------------------------------------------------------------------------
def test_inference_workers_get_the_view_without_grpc(ready: Ready, client: ControlClient) -> None:
    wire = WireClient(ready.grpc)
    wire.hello()
    welcome = Welcome.decode(wire.receive().body)
    assert welcome.version == 1
    wire.send(ViewRequest(known_epoch=0), 1)
    reply = ViewReply.decode(wire.receive().body)
    assert View.from_plain(unpack_plain(reply.view, what="view")) == client.view()
    wire.send(ViewRequest(known_epoch=reply.epoch), 2)
    assert ViewReply.decode(wire.receive().body).view == b""


def test_other_verbs_there_name_the_data_address(ready: Ready) -> None:
    wire = WireClient(ready.grpc)
    wire.hello()
    wire.receive()
    wire.send(Unpin(pin_id=1), 1)
    error = ErrorReply.decode(wire.receive().body)
    assert ready.data[0] in error.text
    assert not error.closing
    wire.send(ViewRequest(known_epoch=0), 2)
    assert wire.receive().type is FrameType.VIEW_REPLY


def test_many_requests_at_once_are_all_answered(ready: Ready) -> None:
    wire = WireClient(ready.grpc)
    wire.hello()
    wire.receive()
    count = 1500  # more answers than one list of buffers takes
    wire.sock.sendall(b"".join(encode_head(FrameType.PING, at, Ping().encode()) for at in range(1, count + 1)))
    wire.sock.settimeout(20)
    pongs = b""
    one = len(encode_head(FrameType.PONG, 1, Ping().encode(), epoch=1))
    while len(pongs) < count * one:
        pongs += wire.sock.recv(65536)
    assert len(pongs) == count * one


def test_an_unknown_version_is_told_and_closed(ready: Ready) -> None:
    wire = WireClient(ready.grpc)
    wire.hello(version_min=7, version_max=9)
    error = ErrorReply.decode(wire.receive().body)
    assert "7 to 9" in error.text
    assert error.closing


def test_garbage_on_the_grpc_port_leaves_the_node_alive(ready: Ready, client: ControlClient) -> None:
    host, _, port = ready.grpc.rpartition(":")
    for garbage in (
        b"KV",
        b"KV" + os.urandom(200),
        b"KV\x01\x01" + b"\xff" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 10,
    ):
        with socket.create_connection((host, int(port)), timeout=30) as sock:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
    assert client.healthy()


# --- ends -----------------------------------------------------------------------------------------------------------
def test_sigterm_drains_and_exits_0(tmp_path: Path) -> None:
    with ServeProcess(tmp_path) as process:
        ready = process.wait_ready()
        with ControlClient(ready.grpc) as client:
            (worker,) = client.report().workers
        process.terminate()
        assert process.wait_exit() == 0, process.log
        assert not process.ready_path.exists()
        wait_until_gone(worker.pid)
        assert "Traceback" not in process.log


def test_connections_that_stay_open_leave_no_trace_in_the_log_of_a_stop(tmp_path: Path) -> None:
    with ServeProcess(tmp_path) as process:
        ready = process.wait_ready()
        addresses = [ready.grpc, ready.grpc, ready.metrics]
        pairs = [(host, int(port)) for host, _, port in (address.rpartition(":") for address in addresses)]
        sockets = [socket.create_connection(pair, timeout=30) for pair in pairs]
        sockets[0].sendall(b"KV")
        with urllib.request.urlopen(f"http://{ready.metrics}/healthz", timeout=30) as answer:
            assert answer.status == 200, "the others have been accepted before"
        process.terminate()
        assert process.wait_exit() == 0
        for one in sockets:
            one.close()
        assert "Traceback" not in process.log


def test_sigterm_to_the_whole_process_group_drains_without_a_kill(tmp_path: Path) -> None:
    """What systemd does: the worker drains by its own signal while the supervisor tells it to."""
    with ServeProcess(tmp_path) as process:
        process.wait_ready()
        os.killpg(process.process.pid, signal.SIGTERM)
        assert process.wait_exit() == 0, process.log
        assert "killed" not in process.log
        assert "WARNING" not in process.log


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with ServeProcess(tmp_path, "--drain-timeout", "5m") as process:
        process.wait_ready()
        process.terminate()
        process.process.send_signal(signal.SIGINT)
        assert process.wait_exit() == 0, process.log


def test_the_same_signal_told_twice_still_drains(tmp_path: Path) -> None:
    """What `timeout kvstore serve` does: to the process, and to its group.

    One of ours goes to the thread: of two that wait for the process the kernel makes one.
    """
    with ServeProcess(tmp_path) as process:
        process.wait_ready()
        pid = process.process.pid
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            pass
        process.terminate()
        assert ctypes.CDLL(None).tgkill(pid, pid, signal.SIGTERM) == 0
        os.kill(pid, signal.SIGCONT)
        assert process.wait_exit() == 0, process.log
        assert "SIGTERM: draining" in process.log
        assert "again" not in process.log


def test_sigterm_while_it_starts_exits_0(tmp_path: Path) -> None:
    with ServeProcess(tmp_path) as process:
        while not (tmp_path / "data").exists():
            assert process.process.poll() is None, process.log
            time.sleep(0.001)
        process.terminate()
        assert process.wait_exit() in (0, -signal.SIGTERM), process.log


def test_a_killed_worker_is_started_again_on_its_port(tmp_path: Path) -> None:
    with ServeProcess(tmp_path) as process:
        ready = process.wait_ready()
        with ControlClient(ready.grpc) as client, grpc.insecure_channel(ready.grpc) as channel:
            health = watch_health(channel)
            assert next(health) == "SERVING"
            before = client.view()
            (worker,) = client.report().workers
            os.kill(worker.pid, signal.SIGKILL)
            assert next(health) == "NOT_SERVING"
            assert next(health) == "SERVING"
            after = wait_for_view_after(client, before.epoch)
            (again,) = client.report().workers
            assert again.pid != worker.pid
            assert again.restarts == 1
            assert [target.data for target in after.targets] == [target.data for target in before.targets]
            assert [target.id for target in after.targets] == [target.id for target in before.targets]
        assert "SIGKILL" in process.log


def watch_health(channel: grpc.Channel) -> Iterator[str]:
    """Readiness now, and each change of it."""
    request = health_pb2.HealthCheckRequest()
    for response in health_pb2_grpc.HealthStub(channel).Watch(request, timeout=60):
        yield health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


def wait_for_view_after(client: ControlClient, epoch: int) -> View:
    """The first view newer than `epoch` in which everything serves."""
    for view in client.views(epoch, deadline_ns=60 * SECOND_NS):
        if all(target.state is TargetState.SERVING for target in view.targets):
            return view
    raise AssertionError("the watch ended")


def test_a_worker_does_not_outlive_its_supervisor(tmp_path: Path) -> None:
    with ServeProcess(tmp_path) as process:
        ready = process.wait_ready()
        with ControlClient(ready.grpc) as client:
            (worker,) = client.report().workers
        process.kill_supervisor()
        wait_until_gone(worker.pid)
        with ServeProcess(tmp_path) as again:
            again.ready_path.unlink(missing_ok=True)
            again.wait_ready()


def test_the_node_keeps_its_name_and_its_epoch_grows(tmp_path: Path) -> None:
    views = []
    for end in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
        with ServeProcess(tmp_path) as process:
            ready = process.wait_ready()
            with ControlClient(ready.grpc) as client:
                views.append(client.view())
            process.process.send_signal(end)
            process.wait_exit()
            process.ready_path.unlink(missing_ok=True)
    assert len({view.node_id for view in views}) == 1
    assert len({view.targets[0].id for view in views}) == 1
    assert views[0].epoch < views[1].epoch < views[2].epoch


# --- starts that fail -----------------------------------------------------------------------------------------------
def refused_start(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of a start that must fail."""
    with ServeProcess(folder, *arguments) as process:
        status = process.wait_exit()
        assert not process.ready_path.exists()
        assert "Traceback" not in process.log
        return status, process.log


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flag in ("--grpc-port", "--metrics-port", "--data-port"):
            status, log = refused_start(tmp_path, flag, port)
            assert status == 3
            assert port in log
            assert "in use" in log.lower()


def test_a_data_dir_that_is_no_folder_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for path, word in (
        (file, "is a file"),
        (file / "below", "cannot be made"),
        (Path("/sys/kvstore"), "cannot be made"),
    ):
        status, log = refused_start(tmp_path, "--data-dir", str(path))
        assert status == 2
        assert str(path) in log
        assert word in log


def test_a_drive_that_another_node_holds_is_named_with_its_holder(tmp_path: Path) -> None:
    with ServeProcess(tmp_path) as first:
        ready = first.wait_ready()
        with ControlClient(ready.grpc) as client:
            (worker,) = client.report().workers
        other = tmp_path / "other"
        other.mkdir()
        status, log = refused_start(other, "--data-dir", str(tmp_path / "data"))
        assert status == 3
        assert "in use" in log
        assert str(worker.pid) in log
        with ControlClient(ready.grpc) as client:
            assert client.healthy()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--capacity", "1MiB"), "at least 64MiB"),
        (("--capacity", "lots"), "'lots' is not a size"),
        (("--host", "0.0.0.0", "--advertise", "node"), "--insecure"),
        (("--transport", "rdma-over-air"), "rdma"),
        (("--ready-file", "/nowhere/ready.json"), "/nowhere"),
        (("--config", "/nowhere/node.toml"), "/nowhere/node.toml cannot be read"),
    ],
)
def test_a_bad_flag_is_one_clear_line(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    status, log = refused_start(tmp_path, *arguments)
    assert status == 2
    assert words in log
    assert len(log.strip().splitlines()) == 1


def test_every_fault_of_the_settings_is_a_line_and_nothing_else_is(tmp_path: Path) -> None:
    status, log = refused_start(tmp_path, "--host", "0.0.0.0", "--staging", "1KiB", "--drain-timeout", "2h")
    assert status == 2
    lines = log.strip().splitlines()
    assert len(lines) == 4, log
    assert all(line.startswith("kvstore: ") for line in lines)
    for words in ("2h is not allowed; give at most 10m", "staging 1KiB", "--insecure", "--advertise"):
        assert any(words in line for line in lines), words


def test_a_stale_ready_file_is_removed_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "ready.json").write_text(json.dumps({"grpc": "127.0.0.1:1"}))
    with ServeProcess(tmp_path, "--device", "tape") as process:
        process.wait_exit()
    assert (tmp_path / "ready.json").exists(), "a refused flag touches nothing"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused_start(tmp_path, "--data-port", str(taken.getsockname()[1]))
    assert not (tmp_path / "ready.json").exists()


def test_two_drives_are_two_targets(tmp_path: Path) -> None:
    folders = f"{tmp_path / 'a'},{tmp_path / 'b'}"
    with ServeProcess(tmp_path, "--data-dir", folders, "--capacity", "128MiB") as process:
        ready = process.wait_ready()
        with ControlClient(ready.grpc) as client:
            view = client.view()
    assert len({target.id for target in view.targets}) == 2

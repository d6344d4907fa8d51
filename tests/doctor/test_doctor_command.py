"""`kvstore doctor` and the start of a node: the table, the JSON, the exit status, the settings, and the same words."""

from __future__ import annotations

import ast
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore.doctor
from kvstore.cli.doctor import JSON_VERSION, json_of
from kvstore.doctor.examination import examine
from kvstore.doctor.finding import Finding, Fix, Status, worst
from kvstore.doctor.start import examine_start
from kvstore.errors import InvalidRequest
from kvstore.settings import NodeSettings, inspect_node_settings, load_node_settings
from kvstore.testing.fake_system import FakeSystem
from kvstore.testing.loop_lab import LoopLab
from kvstore.testing.serve_process import ServeProcess

ROOM = Path(next(iter(kvstore.doctor.__path__)))
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
FREE_PORTS = ("--grpc-port", "0", "--data-port", "0", "--metrics-port", "0")
FIX = Fix(shell="a", systemd="b", kubernetes="c")


def run_doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`kvstore doctor ARGUMENTS`, to its end."""
    command = [sys.executable, "-m", "kvstore", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def report(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = run_doctor(*arguments, "--json")
    assert not done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def line(found: dict[str, Any], check: str) -> dict[str, Any]:
    """The one line of a check."""
    (entry,) = (entry for entry in found["findings"] if entry["check"] == check)
    return dict(entry)


def checks_in_code() -> set[str]:
    """The name of every check, as the code gives it to a finding."""
    return {
        str(keyword.value.value)
        for file in ROOM.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "check" and isinstance(keyword.value, ast.Constant)
    }


def test_every_check_is_documented() -> None:
    page = OPERATIONS.read_text()
    assert {name for name in checks_in_code() if f"| `{name}` |" not in page} == set()


def test_a_verdict_without_a_fix_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="x: a verdict without a fix"):
        Finding(check="x", status=Status.WARNING, found="", needed="")


def test_the_gravest_verdict_counts() -> None:
    ok = Finding(check="x", status=Status.OK, found="", needed="")
    warning = Finding(check="x", status=Status.WARNING, found="", needed="", fix=FIX)
    failing = Finding(check="x", status=Status.FAILING, found="", needed="", fix=FIX)
    assert [worst(ones) for ones in ((), (ok,), (ok, warning), (warning, failing))] == [
        Status.OK,
        Status.OK,
        Status.WARNING,
        Status.FAILING,
    ]


def test_the_json_is_what_the_page_says() -> None:
    findings = [
        Finding(check="x", subject="y", status=Status.WARNING, found="f", needed="n", reason="r", fix=FIX),
        Finding(check="z", status=Status.OK, found="f", needed="n"),
    ]
    assert json.loads(json_of(findings)) == {
        "version": JSON_VERSION,
        "status": "warning",
        "findings": [
            {
                "check": "x",
                "subject": "y",
                "status": "warning",
                "found": "f",
                "needed": "n",
                "reason": "r",
                "fix": {"shell": "a", "systemd": "b", "kubernetes": "c"},
            },
            {"check": "z", "subject": "", "status": "ok", "found": "f", "needed": "n", "reason": "", "fix": None},
        ],
    }


def test_a_sound_machine_with_every_line(tmp_path: Path) -> None:
    status, found = report("--data-dir", str(tmp_path), "--capacity", "64MiB", "--cache", "0", *FREE_PORTS)
    assert status == 0, found
    names = {entry["check"] for entry in found["findings"]}
    assert names >= checks_in_code() - {"etcd", "rdma_port", "topology"}
    assert line(found, "settings")["found"] == "complete"
    for entry in found["findings"]:
        assert entry["found"]
        assert entry["needed"]
        assert (entry["fix"] is None) or all(entry["fix"].values())


def test_it_takes_every_setting_of_serve() -> None:
    done = run_doctor("--help")
    assert done.returncode == 0
    flags = {f"--{name.replace('_', '-')}" for name in NodeSettings.model_fields} | {"--config", "--json"}
    assert {flag for flag in flags if f"{flag} " not in done.stdout} == set()


def test_the_table_is_for_people(tmp_path: Path) -> None:
    done = run_doctor("--data-dir", str(tmp_path), "--capacity", "1000TiB", *FREE_PORTS)
    assert done.returncode == 1
    assert "failing: space" in done.stdout
    for words in ("shell:      --capacity ", "systemd:    Environment=KVSTORE_CAPACITY=", "Kubernetes: capacity: "):
        assert words in done.stdout
    assert done.stdout.rstrip().endswith("1 failing")


def test_without_settings_it_looks_at_the_machine() -> None:
    _, found = report(*FREE_PORTS)
    settings = line(found, "settings")
    assert settings["status"] == "warning"
    assert "data_dir and capacity not set" in settings["found"]
    assert "kernel" in {entry["check"] for entry in found["findings"]}


def test_settings_come_from_the_file_too(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text(f'data_dir = "{tmp_path}"\ncapacity = "64MiB"\ngrpc_port = 0\ndata_port = 0\ncolour = "red"\n')
    _, found = report("--config", str(config), "--metrics-port", "0")
    assert "colour is not a setting" in line(found, "settings")["found"]
    assert line(found, "space")["needed"] == "capacity 64 MiB"


def test_a_file_that_cannot_be_read_is_a_finding_beside_the_others(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    for content, words in (
        (None, f"config file {config} cannot be read: No such file or directory"),
        (b"= broken", f"config file {config} is not valid TOML"),
        (b'data_dir = "/\xff"', f"config file {config} is not valid TOML"),
    ):
        if content is not None:
            config.write_bytes(content)
        status, found = report("--config", str(config), "--data-dir", str(tmp_path), "--capacity", "64MiB", *FREE_PORTS)
        assert status == 1
        assert (line(found, "settings")["status"], found["status"]) == ("failing", "failing")
        assert words in line(found, "settings")["found"]
        assert line(found, "space")["needed"] == "capacity 64 MiB", "what flags say counts"
        with pytest.raises(InvalidRequest, match=f"config file {config}"):
            load_node_settings({}, config=config)
    assert "is not valid TOML" in run_doctor("--config", str(config)).stdout


def test_what_serve_would_refuse_is_a_fault_of_the_settings(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[[tenants]]\nname = "a"\ntokens = [{ scopes = ["read"], sha256 = "none" }]\n')
    wrong = ("--cluster", "http://127.0.0.1:2379", "--tenants", str(tenants), "--advertise", "127.0.0.1:99")
    status, found = report("--data-dir", str(tmp_path), "--capacity", "64MiB", *FREE_PORTS, *wrong)
    settings = line(found, "settings")
    assert (status, settings["status"]) == (1, "failing")
    for words in ("begins with neither etcd://", "is no SHA-256 in hex", "advertise 127.0.0.1:99 is no name"):
        assert words in settings["found"]
    assert "other values" in settings["fix"]["shell"]


@pytest.mark.parametrize("name", ["10.0.0.5", "fe80::1", "node-5.example", "localhost", "müsli.example"])
def test_what_can_be_advertised(name: str) -> None:
    assert inspect_node_settings({"data_dir": "/a", "capacity": "1GiB", "advertise": name})[1] == ()


@pytest.mark.parametrize(
    "name", ["10.0.0.5:7401", "[fe80::1]", "http://a", "a/b", "a b", "0.0.0.0", "::", "me@a", "a,b"]
)
def test_what_cannot_be_advertised(name: str) -> None:
    (fault,) = inspect_node_settings({"data_dir": "/a", "capacity": "1GiB", "advertise": name})[1]
    assert fault.startswith(f"advertise {name} is no name or address that clients can connect to")


def test_a_port_in_use_and_an_etcd_that_is_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        arguments = ("--data-dir", str(tmp_path), "--capacity", "64MiB", "--grpc-port", "0", "--metrics-port", "0")
        status, found = report(*arguments, "--data-port", str(port), "--cluster", "etcd://127.0.0.1:1")
    assert status == 1
    assert line(found, "etcd")["found"] == "Connection refused"
    failing = [entry["subject"] for entry in found["findings"] if entry["status"] == "failing"]
    assert f"data_port {port} on 127.0.0.1" in failing


def test_settings_as_far_as_they_are_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_QUEUE_DEPTH", "9999")
    settings, faults = inspect_node_settings({"cache": "much", "grpc_port": "7401", "data_dir": "/a,/a", "capacity": 1})
    assert isinstance(settings, NodeSettings)
    defaults = load_node_settings({"data_dir": "/a", "capacity": "1GiB", "queue_depth": "32"})
    assert (settings.cache, settings.queue_depth) == (defaults.cache, defaults.queue_depth)
    assert settings.data_dir == ("/a", "/a")
    assert [
        words
        for words in (
            "--cache: 'much'",
            "KVSTORE_QUEUE_DEPTH",
            "names one folder twice",
            "set capacity to 128MiB",
            "must differ",
        )
        if not any(words in fault for fault in faults)
    ] == []
    assert len(faults) == 5


def test_sound_settings_are_those_that_serve_takes() -> None:
    flags = {"data_dir": "/a,/b", "capacity": "1GiB", "cache": "1MiB"}
    settings, faults = inspect_node_settings(flags)
    assert faults == ()
    assert settings.model_dump() == load_node_settings(flags).model_dump()


def test_a_start_tells_only_what_fails(fake: FakeSystem, tmp_path: Path) -> None:
    settings = load_node_settings({"data_dir": str(tmp_path), "capacity": "64MiB", "cache": "0"})
    fake.is_synchronised = False
    assert examine_start(settings, system=fake) == []
    large = load_node_settings({"data_dir": str(tmp_path), "capacity": "1000TiB", "cache": "0"})
    (finding,) = examine_start(large, system=fake)
    assert (finding.check, finding.status) == ("space", Status.FAILING)


def test_the_whole_examination_of_a_machine_of_files(fake: FakeSystem, tmp_path: Path) -> None:
    flags = {"data_dir": str(tmp_path), "capacity": "64MiB", "grpc_port": 0, "data_port": 0, "metrics_port": 0}
    names = [finding.check for finding in examine(flags, system=fake)]
    assert names[0] == "settings"
    assert names[-1] == "rdma_choice"


def test_beside_a_node_that_runs_nothing_fails(tmp_path: Path) -> None:
    with ServeProcess(tmp_path) as process:
        ready = process.wait_ready()
        addresses = (ready.grpc, ready.data[0], ready.metrics)
        ports = [address.rpartition(":")[2] for address in addresses]
        arguments = ("--data-dir", str(tmp_path / "data"), "--capacity", "64MiB", "--cache", "0")
        status, found = report(*arguments, "--grpc-port", ports[0], "--data-port", ports[1], "--metrics-port", ports[2])
        other = ("--data-dir", str(tmp_path / "other"), *arguments[2:])
        other_status, beside = report(
            *other, "--grpc-port", ports[0], "--data-port", ports[1], "--metrics-port", ports[2]
        )
    assert status == 0, [entry for entry in found["findings"] if entry["status"] == "failing"]
    held = [entry["found"] for entry in found["findings"] if entry["check"] == "port"]
    assert all("held by process" in words for words in held), held
    assert other_status == 1
    taken = [(entry["status"], entry["reason"]) for entry in beside["findings"] if entry["check"] == "port"]
    assert taken == [("failing", f"a kvstore node of other data dirs: {tmp_path / 'data'}")] * 3


FILES = (
    "/proc/meminfo",
    "/proc/self/mountinfo",
    "/proc/self/status",
    "/proc/self/uid_map",
    "/sys/class/infiniband/x/ports/1/gids/0",
    "/sys/class/infiniband/x/ports/1/lid",
    "/sys/class/infiniband/x/ports/1/link_layer",
    "/sys/class/infiniband/x/ports/1/rate",
    "/sys/class/infiniband/x/ports/1/state",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource",
    "/sys/kernel/mm/transparent_hugepage/enabled",
)


@given(st.lists(st.text(max_size=40), min_size=len(FILES), max_size=len(FILES)))
def test_no_machine_keeps_a_node_from_starting(tmp_path_factory: pytest.TempPathFactory, contents: list[str]) -> None:
    folder = tmp_path_factory.mktemp("machine")
    fake = FakeSystem(folder)
    for path, content in zip(FILES, contents, strict=True):
        place = folder / path.strip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content, "utf-8", "surrogatepass")
    examine_start(load_node_settings({"data_dir": str(folder), "capacity": "64MiB", "cache": "0"}), system=fake)


@pytest.fixture
def small(loop_lab: LoopLab) -> Path:
    """A file system of 48 MiB, for a capacity of 64."""
    return loop_lab.mount("doctor-small", "-t", "tmpfs", "-o", "size=48m", "tmpfs")


def test_serve_says_at_the_start_what_doctor_says_and_serves(small: Path, tmp_path: Path) -> None:
    _, found = report("--data-dir", str(small), "--capacity", "64MiB", *FREE_PORTS)
    with ServeProcess(tmp_path, "--data-dir", str(small), "--capacity", "64MiB") as process:
        process.wait_ready()
        log = process.log
    (said,) = (text for text in log.splitlines() if "doctor:" in text)
    space = line(found, "space")
    assert space["status"] == "failing"
    for words in (space["found"], space["needed"], space["reason"], *space["fix"].values()):
        assert words in said


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", sorted(NodeSettings.model_fields))
@pytest.mark.parametrize("value", ["", "much", -1])
def test_a_setting_that_is_refused_is_told_once(name: str, value: str | int) -> None:
    _, faults = inspect_node_settings({name: value})
    assert len(faults) <= 1

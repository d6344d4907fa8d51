"""The command line as people and scripts use it: against a live node, and with everything that can be typed wrong."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.cli.drive import erase
from kvstore.cli.main import EXIT_FAILED, EXIT_INVALID, EXIT_UNAVAILABLE
from kvstore.errors import InvalidRequest
from kvstore.testing.serve_process import Ready, ServeProcess
from kvstore.types.layout import KVLayout, Part
from kvstore.types.namespace import Namespace
from kvstore_client import KVClient

MINE = Namespace(
    tenant="default",
    model="org/m",
    weights="sha256:1",
    layout=KVLayout(chunk_tokens=4, dtype="bf16", layers=2, parts=(Part(name="kv", entry_bytes=1024),)),
)
REPORTING = ("status", "namespaces", "explain", "scrub", "drain")


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`kvstore ARGUMENTS`, to its end."""
    command = [sys.executable, "-m", "kvstore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    """A node that serves."""
    with ServeProcess(tmp_path_factory.mktemp("node")) as process:
        yield process.wait_ready()


def answer(ready: Ready, *arguments: str) -> str:
    """What a command that succeeds prints."""
    done = run_cli(*arguments, "--node", ready.grpc)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def test_version_is_told() -> None:
    assert run_cli("version").stdout == f"{kvstore.__version__}\n"
    assert run_cli("--version").stdout == f"{kvstore.__version__}\n"
    assert json.loads(run_cli("version", "--json").stdout) == {"version": kvstore.__version__}


def test_help_needs_neither_grpc_nor_pydantic_nor_numpy() -> None:
    heavy = ("grpc", "google.protobuf", "pydantic", "prometheus_client", "numpy", "msgpack")
    code = f"import sys, kvstore.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", [*REPORTING, "serve", "check", "demo", "version"])
def test_every_command_explains_itself(command: str) -> None:
    done = run_cli(command, "--help")
    assert done.returncode == 0
    assert "Usage:" in done.stdout


def test_status_is_a_table_for_people(ready: Ready) -> None:
    text = answer(ready, "status")
    for word in ("serving", ready.data[0], "device", "lookups", "0 hits of 0 keys asked", "write amplification"):
        assert word in text


def test_status_is_json_for_programs(ready: Ready) -> None:
    report = json.loads(answer(ready, "status", "--json"))
    assert report["node"]["state"] == "serving"
    assert report["node"]["numbers"]["engine"]["live_bytes"] == 0
    assert report["node"]["numbers"]["dataplane"]["calls"]["get"] == 0
    assert report["node"]["numbers"]["supervisor"]["grpc_errors"]["denied"] == 0
    assert report["view"]["targets"][0]["data"] == ready.data
    assert report["node"]["workers"][0]["restarts"] == 0


def test_status_watches_until_its_reader_leaves(ready: Ready) -> None:
    command = [sys.executable, "-m", "kvstore", "status", "--watch", "--json", "--node", ready.grpc]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(2):
            line = process.stdout.readline()
            assert line, "status ended"
            assert json.loads(line)["node"]["state"] == "serving"
        process.terminate()


def test_explain_of_a_node_without_data(ready: Ready) -> None:
    digest = MINE.keys([1, 2, 3, 4])[0].digest.hex()
    assert "no namespace here" in answer(ready, "explain", digest, "--model", "org/m")
    report = json.loads(answer(ready, "explain", "--tokens", "1,2,3,4", "--json"))
    assert not report["namespace_known"]
    assert report["namespaces"] == []


def test_explain_reads_tokens_and_manifest_from_files(ready: Ready, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("1 2 3\n4,5, 6 7 8\n")
    (tmp_path / "manifest").write_bytes(MINE.manifest())
    files = ("--tokens", f"@{tmp_path / 'tokens'}", "--manifest", str(tmp_path / "manifest"))
    assert "no namespace here" in answer(ready, "explain", *files)


def test_drain_and_resume(ready: Ready) -> None:
    alone = {"draining": True, "done": True, "handed_on": 0, "left_behind": 0, "receivers": 0}
    assert json.loads(answer(ready, "drain", "--json")) == alone
    assert "nothing can be handed on, for no other node serves" in answer(ready, "drain")
    assert "draining" in answer(ready, "status")
    assert answer(ready, "drain", "--resume") == "takes puts again\n"


def test_scrub_tells_whether_it_began(ready: Ready) -> None:
    assert set(json.loads(answer(ready, "scrub", "--rate", "1MiB", "--json"))) == {"started"}


def test_namespaces_of_a_tenant(ready: Ready) -> None:
    assert json.loads(answer(ready, "namespaces", "--json")) == {"namespaces": [], "next": ""}
    assert "digest" in answer(ready, "namespaces")


@pytest.mark.parametrize("command", REPORTING)
def test_a_node_that_is_not_there_is_one_line_and_status_3(command: str) -> None:
    done = run_cli(command, "--node", "127.0.0.1:1")
    assert done.returncode == EXIT_UNAVAILABLE
    assert done.stderr.startswith("kvstore: no kvstore node answers at 127.0.0.1:1")
    assert len(done.stderr.splitlines()) == 1


def test_a_file_that_is_too_large_is_refused_not_cut(tmp_path: Path) -> None:
    with (tmp_path / "tokens").open("wb") as file:
        file.truncate(64 * 1024 * 1024 + 1)
    done = run_cli("explain", "--tokens", f"@{tmp_path / 'tokens'}", "--node", "127.0.0.1:1")
    assert done.returncode == EXIT_INVALID
    assert "more than 67108864 bytes" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("explain", "zz"), "64 hex characters"),
        (("explain", "--namespace", "xyz"), "or how it begins"),
        (("status", "--node", "foo"), "give host:port"),
        (("status", "--node", "http://foo:1"), "give host:port"),
        (("explain", "--layout", "abcd"), "--layout"),
        (("explain", "--tokens", "1,x"), "--tokens has 'x'; give token ids"),
        (("explain", "--tokens", "@/etc/hostname"), "--tokens @/etc/hostname has '"),
        (("explain", "--manifest", "/etc/hostname"), "--manifest /etc/hostname holds no Namespace.manifest()"),
        (("drop", "--manifest", "/etc/hostname"), "--manifest /etc/hostname holds no Namespace.manifest()"),
        (("explain", "--tokens", "1,-5"), "-5"),
        (("explain", "--tokens", "@/nowhere"), "/nowhere cannot be read"),
        (("explain", "--manifest", "/nowhere"), "/nowhere cannot be read"),
        (("scrub", "--rate", "fast"), "'fast' is not a size"),
        (("status", "--timeout", "soon"), "'soon' is not a duration"),
        (("status", "--timeout", "0s"), "at most 1h"),
        (("status", "--node", "127.0.0.1:1", "--timeout", "2h"), "at most 1h"),
    ],
)
def test_what_is_typed_wrong_is_one_line_and_status_2(arguments: tuple[str, ...], words: str) -> None:
    done = run_cli(*arguments)
    assert done.returncode == EXIT_INVALID, done.stderr
    assert words in done.stderr
    assert done.stderr.startswith("kvstore: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_namespace_may_be_named_by_its_beginning(ready: Ready) -> None:
    with KVClient.connect(ready.data[0]) as client:
        ns = client.namespace(MINE)
        keys = ns.keys([1, 2, 3, 4])
        ns.put(keys, [bytes(MINE.layout.chunk_bytes)])
    beginning = MINE.digest.hex()[:16]
    assert "the 1 chunk is stored" in answer(ready, "explain", "--namespace", beginning, "--tokens", "1,2,3,4")
    few = answer(ready, "explain", "--namespace", beginning, "--tokens", "1,2,3")
    assert "3 tokens make no chunk: a chunk of this namespace has 4 tokens" in few
    other = answer(ready, "explain", "--model", "org/other", "--tokens", "1,2,3,4")
    assert "the hits below are of other namespaces" in other
    assert other.count(" ago") == 1
    done = run_cli("explain", "--namespace", "00" * 8, "--node", ready.grpc)
    assert done.returncode == EXIT_INVALID
    assert "no namespace of tenant 'default' begin" in done.stderr


def test_a_reader_that_leaves_is_no_trouble(ready: Ready) -> None:
    """`kvstore status --json | head -1`: also where all of the output waits for the end of the program."""
    command = [sys.executable, "-m", "kvstore", "status", "--json", "--node", ready.grpc]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == EXIT_FAILED


def test_a_reload_of_an_open_node_says_that_there_is_no_file(ready: Ready) -> None:
    assert "this node is open" in answer(ready, "tenants", "reload")
    assert json.loads(answer(ready, "tenants", "reload", "--json")) == {"tenants": 0}


def test_a_drive_that_may_not_be_read_is_no_trouble_of_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_file: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("kvstore.cli.drive.look_at", refuse)
    with pytest.raises(InvalidRequest, match="run this as the node's user or root"):
        erase(tmp_path, ask=lambda _question: True)


def test_each_of_several_faults_is_a_line_of_ours(tmp_path: Path) -> None:
    done = run_cli("serve", "--data-dir", str(tmp_path), "--capacity", "1GiB", "--transport", "x", "--device", "y")
    assert done.returncode == EXIT_INVALID
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("kvstore: ") for line in lines)


def test_an_unknown_command_or_flag_is_named() -> None:
    for arguments in (("dance",), ("status", "--colour")):
        done = run_cli(*arguments)
        assert done.returncode == EXIT_INVALID
        assert arguments[-1] in done.stderr
        assert "Traceback" not in done.stderr

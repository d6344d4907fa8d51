"""Drives of a whole node: foreign, wiped, empty, moved or unusable ones are named with the fix; the others serve."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.engine.drive import DATA_FILE
from kvstore.engine.identity import NO_CLUSTER, ContentKind, look_at
from kvstore.limits import MiB
from kvstore.server.drive_owner import DriveOwner
from kvstore.server.drive_record import judge
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.server.places import STORE_FILE
from kvstore.server.report import DriveReport, DriveState, NodeReport, NodeState
from kvstore.testing.cluster_lab import until
from kvstore.testing.node_line import NodeLine
from kvstore.testing.serve_process import ServeProcess
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, Stored
from kvstore.wire.messages import Drop, End
from kvstore_client import KVClient

NAMESPACE = Namespace(
    tenant="default", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=1 * MiB, chunk_tokens=16, run_bytes=1)
)
CHUNKS = 24


def folders(folder: Path, *names: str) -> str:
    return ",".join(str(folder / name) for name in names)


def serve(folder: Path, dirs: str, *more: str) -> ServeProcess:
    capacity = f"{64 * len(dirs.split(','))}MiB"
    (folder / "ready.json").unlink(missing_ok=True)
    return ServeProcess(folder, "--data-dir", dirs, "--capacity", capacity, "--staging", "32MiB", *more)


def lived(folder: Path, dirs: str, *, writes: bool = False) -> tuple[NodeReport, int]:
    """One life of a node: its report, and how many chunks it had (or took)."""
    with serve(folder, dirs) as process:
        ready = process.wait_ready()
        with KVClient.connect(ready.grpc, deadline=20) as client:
            ns = client.namespace(NAMESPACE)
            keys = ns.keys(range(16 * CHUNKS))
            if writes:
                outcomes = ns.put(keys, [bytes(50_000)] * CHUNKS)
                count = sum(isinstance(one, Stored | Exists) for one in outcomes)
            else:
                count = sum(ns.contains(keys))
        with ControlClient(ready.grpc) as control:
            report = control.report()
        process.terminate()
        assert process.wait_exit() == 0, process.log
    return report, count


def at(report: NodeReport, name: str) -> DriveReport:
    return next(drive for drive in report.drives if drive.path.endswith(f"/{name}"))


def kvstore(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def lived_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a node of two drives leaves, with chunks on both."""
    folder = tmp_path_factory.mktemp("lived")
    report, count = lived(folder, folders(folder, "a", "b"), writes=True)
    assert count == CHUNKS
    assert [drive.state for drive in report.drives] == [DriveState.SERVING] * 2
    assert all(0 < drive.records < CHUNKS for drive in report.drives)
    assert all(drive.mode and drive.capacity_bytes and drive.live_bytes for drive in report.drives)
    return folder


@pytest.fixture
def pair(lived_once: Path, tmp_path: Path) -> Path:
    """The same in a place of its own, as if the node had lived here."""
    for name in "ab":
        shutil.copytree(lived_once / name, tmp_path / name)
        noted = tmp_path / name / "node.json"
        noted.write_text(noted.read_text().replace(str(lived_once), str(tmp_path)))
    return tmp_path


def test_a_wiped_drive_is_missed_and_formatted_by_command_only(pair: Path) -> None:
    (pair / "b" / DATA_FILE).unlink()
    report, count = lived(pair, folders(pair, "a", "b"))
    wiped = at(report, "b")
    assert wiped.state is DriveState.EMPTY
    assert "kvstore drive format" in wiped.detail
    assert report.state is NodeState.SERVING
    assert 0 < count < CHUNKS, "the other drive serves"
    assert not (pair / "b" / DATA_FILE).exists(), "it may be a mount that is missing: nothing is made there"
    assert lived(pair, folders(pair, "a", "b"), writes=True)[1] == CHUNKS, "all puts go to the drive that is there"
    refused = kvstore("drive", "format", str(pair / "b"))
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert kvstore("drive", "format", str(pair / "b"), "--yes").returncode == 0
    report, _ = lived(pair, folders(pair, "a", "b"), writes=True)
    assert at(report, "b").state is DriveState.SERVING
    report, count = lived(pair, folders(pair, "a", "b"))
    assert (at(report, "b").state, count) == (DriveState.SERVING, CHUNKS)


def test_the_first_drive_may_go_too(pair: Path) -> None:
    """The node's own record lies in the folder of every drive."""
    node_id = json.loads((pair / "a" / "node.json").read_text())["values"]["node/id"]
    shutil.rmtree(pair / "a")
    report, count = lived(pair, folders(pair, "a", "b"))
    assert report.node_id == node_id
    assert at(report, "a").state is DriveState.EMPTY
    assert 0 < count < CHUNKS


def test_a_place_is_the_same_however_it_is_written(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, owner = look_at(pair / "a" / DATA_FILE), DriveOwner(id=NO_CLUSTER)
    monkeypatch.chdir(pair)
    for place, has_moved in ((pair / "a", False), (pair / "b", True)):
        places = {content.disk_id: str(place)}
        for path in ("a", "./a", str(pair / "a")):
            verdict = judge(path, content, expected_id=content.disk_id, owner=owner, places=places)
            assert (verdict.is_good, "before" in verdict.detail) == (True, has_moved)


def test_swapped_drives_are_known_by_their_ids(pair: Path) -> None:
    before = {name: look_at(pair / name / DATA_FILE).disk_id for name in "ab"}
    (pair / "a" / DATA_FILE).rename(pair / "tmp")
    (pair / "b" / DATA_FILE).rename(pair / "a" / DATA_FILE)
    (pair / "tmp").rename(pair / "b" / DATA_FILE)
    report, count = lived(pair, folders(pair, "a", "b"))
    assert count == CHUNKS
    assert [at(report, name).id for name in "ab"] == [before["b"], before["a"]]
    assert [drive.state for drive in report.drives] == [DriveState.SERVING] * 2


def test_a_drive_of_another_node_is_adopted_by_command_only(pair: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    lived(other, folders(other, "x"), writes=True)
    for name in (DATA_FILE, STORE_FILE):
        shutil.move(other / "x" / name, pair / "b" / name)
    foreign_id = look_at(pair / "b" / DATA_FILE).disk_id
    theirs = (pair / "b" / STORE_FILE).read_bytes()
    report, count = lived(pair, folders(pair, "a", "b"))
    foreign = at(report, "b")
    assert (foreign.state, foreign.id) == (DriveState.FOREIGN, foreign_id)
    assert "kvstore drive adopt" in foreign.detail
    assert 0 < count < CHUNKS
    assert (pair / "b" / STORE_FILE).read_bytes() == theirs
    adopted = kvstore("drive", "adopt", str(pair / "b"), "--yes", "--json")
    assert json.loads(adopted.stdout)["disk_id"] == foreign_id
    report, count = lived(pair, folders(pair, "a", "b"))
    assert at(report, "b").state is DriveState.SERVING
    assert count == CHUNKS, "with what is on it"
    assert (pair / "b" / STORE_FILE).read_bytes() == (pair / "a" / STORE_FILE).read_bytes(), "it is of this node now"


def test_a_foreign_file_is_left_as_it_is(pair: Path) -> None:
    """It was extended to the capacity with zeros once, before it was refused."""
    file = pair / "b" / DATA_FILE
    file.write_bytes(b"precious, and no store at all")
    report, count = lived(pair, folders(pair, "a", "b"))
    assert at(report, "b").state is DriveState.FOREIGN
    assert 0 < count < CHUNKS
    assert file.read_bytes() == b"precious, and no store at all"


def test_a_node_whose_only_drive_is_foreign_says_so_and_changes_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / DATA_FILE).write_bytes(b"precious")
    with serve(tmp_path, str(data)) as process:
        assert process.wait_exit() == 1
        assert "kvstore drive format" in process.log
    assert (data / DATA_FILE).read_bytes() == b"precious"


def test_a_folder_that_cannot_be_used_does_not_stop_the_others(pair: Path) -> None:
    shutil.rmtree(pair / "b")
    (pair / "b").write_text("a file where a folder should be")
    report, count = lived(pair, folders(pair, "a", "b"))
    assert at(report, "b").state in (DriveState.UNUSABLE, DriveState.FOREIGN)
    assert 0 < count < CHUNKS


def test_a_drive_in_use_by_another_process_does_not_stop_the_others(pair: Path) -> None:
    with (pair / "b" / DATA_FILE).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        report, count = lived(pair, folders(pair, "a", "b"))
    assert at(report, "b").state is DriveState.UNUSABLE
    assert "in use" in at(report, "b").detail
    assert 0 < count < CHUNKS


def test_a_worker_without_a_drive_does_not_stop_the_others(pair: Path) -> None:
    with (pair / "b" / DATA_FILE).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (pair / "ready.json").unlink(missing_ok=True)
        arguments = ("--data-dir", folders(pair, "a", "b"), "--capacity", "128MiB", "--workers", "2")
        with ServeProcess(pair, *arguments) as process:
            ready = process.wait_ready()
            with ControlClient(ready.grpc) as control:
                report = control.report()
                assert control.healthy(), "what serves is ready"
            process.terminate()
            assert process.wait_exit() == 0, process.log
    assert report.state is NodeState.DEGRADED
    assert [at(report, name).state for name in "ab"] == [DriveState.SERVING, DriveState.DOWN]
    assert "in use" in at(report, "b").detail


def test_a_new_folder_beside_old_ones_is_formatted(pair: Path) -> None:
    report, _ = lived(pair, folders(pair, "a", "b", "c"), writes=True)
    assert [drive.state for drive in report.drives] == [DriveState.SERVING] * 3


def test_a_drive_that_a_node_has_open_is_left_alone(tmp_path: Path) -> None:
    with serve(tmp_path, folders(tmp_path, "a")) as process:
        process.wait_ready()
        for verb in ("format", "adopt"):
            done = kvstore("drive", verb, str(tmp_path / "a"), "--yes")
            assert done.returncode == 3
            assert "in use" in done.stderr


def test_what_is_no_drive_is_named(tmp_path: Path) -> None:
    assert kvstore("drive", "format", str(tmp_path / "gone"), "--yes").returncode == 2
    (tmp_path / "empty").mkdir()
    done = kvstore("drive", "adopt", str(tmp_path / "empty"), "--yes")
    assert done.returncode == 2
    assert "no store" in done.stderr
    assert kvstore("drive", "format", str(tmp_path / "empty"), "--yes").returncode == 0
    assert look_at(tmp_path / "empty" / DATA_FILE).kind is ContentKind.FRESH


def test_status_shows_every_drive_as_a_row(pair: Path) -> None:
    (pair / "b" / DATA_FILE).unlink()
    with serve(pair, folders(pair, "a", "b")) as process:
        ready = process.wait_ready()
        command = [sys.executable, "-m", "kvstore", "status", "--node", ready.grpc]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        asked = json.loads(
            subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True).stdout
        )
    for word in ("target", "capacity", "used", "hit rate", "out/s", "in/s", "device", "view", "empty", "serving"):
        assert word in shown, word
    assert {drive["state"] for drive in asked["node"]["drives"]} == {"serving", "empty"}


def test_what_was_dropped_while_a_drive_was_away_stays_dropped_over_workers(pair: Path) -> None:
    """Each drive has a worker of its own: what one of them does not know the other one tells."""
    two = ("--workers", "2")
    with serve(pair, folders(pair, "a")) as process:
        with KVClient.connect(process.wait_ready().grpc, deadline=20) as client:
            assert client.namespace(NAMESPACE).drop()
        process.terminate()
        assert process.wait_exit() == 0, process.log
    with serve(pair, folders(pair, "a", "b"), *two) as process:
        ready = process.wait_ready()
        assert len(ready.data) == 2
        with KVClient.connect(ready.grpc, deadline=20) as client:
            space = client.namespace(NAMESPACE)
            keys = space.keys(range(16 * CHUNKS))
            while any(space.contains(keys)):
                pass  # for a moment after its start
            outcomes = space.put(keys, [bytes(50_000)] * CHUNKS)
            assert all(isinstance(one, Stored) for one in outcomes)
            assert all(space.contains(keys))


def generations(addresses: Sequence[str]) -> set[int]:
    """What the workers at these addresses count: a drop that has begun long ago hides nothing, and tells it."""
    return {dropped_at(address, generation=1) for address in addresses}


def dropped_at(address: str, *, generation: int = 0) -> int:
    """The generation that one worker has after a drop there."""
    with closing(NodeLine(address, NAMESPACE)) as line:
        return line.client.call(Drop(namespace=NAMESPACE.digest, generation=generation), End).value


@pytest.mark.parametrize("way", ["client", "gRPC"])
def test_a_drop_that_one_worker_counted_twice_hides_nothing_that_was_put_since(pair: Path, way: str) -> None:
    two = ("--workers", "2")
    with serve(pair, folders(pair, "a", "b"), *two) as process:
        ready = process.wait_ready()
        with KVClient.connect(ready.grpc, deadline=20) as client, ControlClient(ready.grpc) as control:
            space = client.namespace(NAMESPACE)
            keys = space.keys(range(16 * CHUNKS))
            assert all(isinstance(one, Stored | Exists) for one in space.put(keys, [bytes(50_000)] * CHUNKS))
            again = dropped_at(ready.data[0])
            assert generations(ready.data) == {again, again - 1}
            assert space.drop() if way == "client" else control.drop("default", NAMESPACE.digest).dropped
            assert generations(ready.data) == {again + 1}
            assert not any(space.contains(keys))
            assert all(isinstance(one, Stored) for one in space.put(keys, [bytes(50_000)] * CHUNKS))
        process.terminate()
        assert process.wait_exit() == 0, process.log
    with serve(pair, folders(pair, "a", "b"), *two) as process:
        with KVClient.connect(process.wait_ready().grpc, deadline=20) as client:
            until(lambda: all(client.namespace(NAMESPACE).contains(keys)), "all that was put since the drop")
        assert "were dropped while a drive was away" not in process.log

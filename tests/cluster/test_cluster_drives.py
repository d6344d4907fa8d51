"""Drives of real nodes in a cluster: one id for all of them, and what becomes of the drives of others."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.cluster.view import READ_STATES
from kvstore.engine.drive import DATA_FILE
from kvstore.engine.identity import look_at
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.server.report import DriveReport, DriveState
from kvstore.testing.etcd_process import EtcdProcess
from kvstore.testing.serve_process import ServeProcess
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Stored
from kvstore_client import KVClient

SPACE = Namespace(tenant="default", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=65536, chunk_tokens=1))
CHUNKS = 8


class Nodes:
    """Lives of nodes, each in a folder of its own."""

    def __init__(self, folder: Path, etcd: EtcdProcess) -> None:
        self.folder = folder
        self._members = etcd.members

    def start(self, name: str, cluster: str, *drives: str) -> ServeProcess:
        """A node on the drives of that name, or its own one. `cluster` "" is a node on its own."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "ready.json").unlink(missing_ok=True)
        dirs = ",".join(str(self.folder / drive) for drive in drives or (f"{name}-drive",))
        place = (("--cluster", f"etcd://{self._members}/{self.folder.name}-{cluster}") if cluster else ()) + (
            ("--data-dir", dirs, "--capacity", f"{64 * len(dirs.split(','))}MiB", "--staging", "32MiB")
            + ("--node-id", name, "--lease-ttl", "3s")
        )
        return ServeProcess(folder, *place)

    def lives(self, name: str, cluster: str, *drives: str, writes: bool = False) -> tuple[tuple[DriveReport, ...], int]:
        """One life: its drives, and how many chunks of `SPACE` it has, or took."""
        with self.start(name, cluster, *drives) as process:
            ready = process.wait_ready()
            with ControlClient(ready.grpc) as control:
                while not any(target.state in READ_STATES for target in control.view().targets):
                    time.sleep(0.05)  # it serves before the view says so
            with KVClient.connect(ready.data[0], deadline=20) as client:
                space = client.namespace(SPACE)
                keys = space.keys(range(CHUNKS))
                values = [bytes(50_000)] * CHUNKS
                count = (
                    sum(isinstance(one, Stored) for one in space.put(keys, values))
                    if writes
                    else sum(space.contains(keys))
                )
            with ControlClient(ready.grpc) as control:
                drives_now = control.report().drives
            process.terminate()
            assert process.wait_exit() == 0, process.log
        return drives_now, count

    def id_on(self, drive: str) -> str:
        superblock = look_at(self.folder / drive / DATA_FILE).superblock
        assert superblock is not None
        return superblock.cluster_id.hex()


@pytest.fixture
def nodes(tmp_path: Path, shared_etcd: EtcdProcess) -> Nodes:
    return Nodes(tmp_path, shared_etcd)


def test_nodes_of_a_cluster_have_one_id_and_a_drive_may_move_between_them(nodes: Nodes) -> None:
    with ExitStack() as stack:
        for process in [stack.enter_context(nodes.start(name, "c")) for name in "ab"]:
            process.wait_ready()
            process.terminate()
        for name in "ab":
            assert nodes.id_on(f"{name}-drive") == nodes.id_on("a-drive")
    drives, _ = nodes.lives("b", "c", "b-drive", "a-drive")
    assert [drive.state for drive in drives] == [DriveState.SERVING] * 2


def test_a_node_that_lived_alone_brings_its_drives_into_the_cluster(nodes: Nodes) -> None:
    _, taken = nodes.lives("a", "", writes=True)
    assert taken == CHUNKS
    own = nodes.id_on("a-drive")
    assert nodes.lives("a", "c")[1] == CHUNKS
    joined = nodes.id_on("a-drive")
    assert joined != own
    assert nodes.lives("a", "")[1] == CHUNKS, "and back"
    assert nodes.id_on("a-drive") == joined
    assert nodes.lives("a", "c")[1] == CHUNKS


def test_drives_of_another_cluster_are_foreign_until_they_are_adopted(nodes: Nodes) -> None:
    nodes.lives("a", "c")
    nodes.lives("b", "d")
    shutil.copytree(nodes.folder / "b-drive", nodes.folder / "strange")
    (nodes.folder / "strange" / "node.json").unlink()
    drives, _ = nodes.lives("a", "c", "a-drive", "strange")
    found = {Path(drive.path).name: drive for drive in drives}
    assert (found["a-drive"].state, found["strange"].state) == (DriveState.SERVING, DriveState.FOREIGN)
    assert "kvstore drive adopt" in found["strange"].detail
    with nodes.start("b", "c") as moved:  # the whole node of another cluster
        assert moved.wait_exit() == 1
        assert "of another node or cluster" in moved.log
        assert "kvstore drive adopt" in moved.log


def test_a_node_that_was_never_in_the_cluster_waits_for_its_store_and_can_be_told_to_stop(
    tmp_path: Path, nodes: Nodes
) -> None:
    with ServeProcess(tmp_path, "--cluster", "etcd://127.0.0.1:1/nobody") as process:
        while "waits for the cluster store" not in process.log:
            assert process.process.poll() is None, process.log
        process.terminate()
        assert process.wait_exit() == 0, process.log
    assert not (tmp_path / "data" / DATA_FILE).exists(), "nothing was formatted"

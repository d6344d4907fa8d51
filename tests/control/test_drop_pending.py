"""A drop that no drive could remember, because the only one was away, is made up for when it is back."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from pathlib import Path

import pytest

from kvstore.engine.drive import DATA_FILE
from kvstore.errors import Unavailable
from kvstore.limits import SECOND_NS, MiB
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.server.report import NodeState
from kvstore.testing.cluster_lab import until
from kvstore.testing.serve_process import ServeProcess
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Stored
from kvstore_client import KVClient

LAYOUT = KVLayout.opaque(chunk_bytes=1 * MiB, chunk_tokens=16)
GONE = Namespace(tenant="default", model="gone", weights="w", layout=LAYOUT)
KEPT = Namespace(tenant="default", model="kept", weights="w", layout=LAYOUT)


def serve(folder: Path) -> ServeProcess:
    (folder / "ready.json").unlink(missing_ok=True)
    return ServeProcess(folder, "--data-dir", str(folder / "a"), "--capacity", "64MiB", "--staging", "32MiB")


def test_a_lone_node_remembers_a_drop_while_its_only_drive_is_away(tmp_path: Path) -> None:
    with (
        serve(tmp_path) as process,
        KVClient.connect(process.wait_ready().grpc) as client,
        ControlClient(process.wait_ready().grpc, deadline_ns=3 * SECOND_NS) as control,
        (tmp_path / "a" / DATA_FILE).open("rb") as drive,
    ):
        gone, kept = client.namespace(GONE), client.namespace(KEPT)
        for bound in (gone, kept):
            assert isinstance(bound.put(bound.keys(range(16)), [b"x"])[0], Stored)
        holder = threading.Thread(target=lambda: fcntl.flock(drive, fcntl.LOCK_EX))
        holder.start()  # the next life of the worker does not get its drive
        os.kill(control.report().workers[0].pid, signal.SIGKILL)
        holder.join()
        until(lambda: control.report().state is not NodeState.SERVING, "the node has noticed")
        with pytest.raises(Unavailable, match="manifest"):
            control.drop("default", GONE.digest)
        done = control.drop("default", GONE.digest, manifest=GONE.manifest())
        assert done.dropped
        assert len(done.unreached) == 1
        fcntl.flock(drive, fcntl.LOCK_UN)
        until(lambda: control.report().state is NodeState.SERVING, "the drive is back")
        until(lambda: any(kept.contains(kept.keys(range(16)))), "it is read again")
        until(lambda: not any(gone.contains(gone.keys(range(16)))), "the drop is made up for")
        until(lambda: "dropped while no drive served" in process.log, "and that is over")
        assert isinstance(gone.put(gone.keys(range(100, 116)), [b"y"])[0], Stored)
        process.terminate()
        assert process.wait_exit() == 0
    with serve(tmp_path) as process, KVClient.connect(process.wait_ready().grpc) as client:
        until(lambda: process.log.count("dropped while no drive served") == 1, "once, not with each start")
        bound = client.namespace(GONE)
        assert all(bound.contains(bound.keys(range(100, 116))))

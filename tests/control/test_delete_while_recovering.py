"""A node of two workers starts, one of them serves, the other still reads its drive: what is said of deletes then."""

from __future__ import annotations

import fcntl
import socket
import time
from pathlib import Path

from kvstore import errors
from kvstore.cluster.view import TargetState, View
from kvstore.engine.drive import DATA_FILE
from kvstore.limits import SECOND_NS
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.testing.serve_process import ServeProcess
from kvstore.types.results import MissReason
from kvstore_client import Hit, KVClient, KVLayout, Miss, Namespace, Stored

LAYOUT = KVLayout.opaque(chunk_bytes=4096, chunk_tokens=4, run_bytes=4096)
MINE = Namespace(tenant="acme", model="org/m", weights="sha256:1", layout=LAYOUT)
CHUNKS = 32


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def view_with_one_reader(address: str) -> View:
    """Of a node that starts, once one of its drives is served."""
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        try:
            with ControlClient(address) as control:
                for view in control.views(0, deadline_ns=20 * SECOND_NS):
                    if any(target.state is TargetState.SERVING for target in view.targets):
                        return view
        except errors.Unavailable:
            pass
    raise AssertionError("nobody serves")


def test_what_a_drive_may_hold_that_is_still_read_is_not_called_absent(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    address = f"127.0.0.1:{free_port()}"
    arguments = (
        *("--data-dir", ",".join(map(str, drives)), "--capacity", "128MiB"),
        *("--host", "127.0.0.1,127.0.0.2", "--grpc-port", address.rpartition(":")[2]),
    )
    with ServeProcess(tmp_path, *arguments) as process:
        process.wait_ready()
        with KVClient.connect(address) as client:
            bound = client.namespace(MINE)
            keys = bound.keys(list(range(4 * CHUNKS)))
            assert {type(one) for one in bound.put(keys, [bytes(4096)] * CHUNKS)} == {Stored}
        process.terminate()
        assert process.wait_exit() == 0
    with (drives[1] / DATA_FILE).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # its worker waits for it, as for that of a process that ends
        with ServeProcess(tmp_path, *arguments) as process:
            view = view_with_one_reader(address)
            states = sorted(target.state for target in view.targets)
            assert states == [TargetState.RECOVERING, TargetState.SERVING], "the drive that is read is known"
            with KVClient.connect(address) as client:
                bound = client.namespace(MINE)
                assert set(bound.delete(keys)) == {Miss(MissReason.UNAVAILABLE)}, "it may be there"
                fcntl.flock(held, fcntl.LOCK_UN)
                process.wait_ready()
            with KVClient.connect(address) as client:
                bound = client.namespace(MINE)
                assert Hit(length_bytes=0) in bound.delete(keys), "it was there"
                assert set(bound.delete(keys)) == {Miss(MissReason.ABSENT)}
            process.terminate()
            process.wait_exit()

"""A data folder is removed under a node that serves it: what it holds is served on, and people are told."""

from __future__ import annotations

import shutil
import time
import urllib.request
from pathlib import Path

from kvstore.limits import SECOND_NS
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.server.report import DriveState
from kvstore.testing.serve_process import ServeProcess


def test_a_folder_that_was_removed_is_told_of(tmp_path: Path) -> None:
    with ServeProcess(tmp_path) as process, ControlClient((ready := process.wait_ready()).grpc) as control:
        (drive,) = control.report().drives
        assert (drive.state, drive.detail) == (DriveState.SERVING, "")
        shutil.rmtree(tmp_path / "data")
        (drive,) = control.report().drives
        assert drive.state is DriveState.SUSPECT
        assert "was removed or replaced while it is in use" in drive.detail
        with urllib.request.urlopen(f"http://{ready.metrics}/metrics", timeout=20) as answer:
            assert "kvstore_device_healthy 0.0" in answer.read().decode()
        give_up_ns = time.monotonic_ns() + 30 * SECOND_NS
        while "was removed or replaced" not in process.log:  # by the supervisor's pulse
            assert time.monotonic_ns() < give_up_ns
            time.sleep(0.05)

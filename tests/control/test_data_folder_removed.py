"""A data folder is removed under a node that serves it: what it holds is served on, and people are told."""

from __future__ import annotations

import os
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from kvstore.engine.drive import DATA_FILE
from kvstore.limits import SECOND_NS
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.server.report import DriveState
from kvstore.server.store_file import StoreFile
from kvstore.testing.serve_process import ServeProcess


def test_a_folder_that_was_removed_is_told_of(tmp_path: Path) -> None:
    with ServeProcess(tmp_path) as process, ControlClient((ready := process.wait_ready()).grpc) as control:
        (drive,) = control.report().drives
        assert (drive.state, drive.detail) == (DriveState.SERVING, "")
        shutil.rmtree(tmp_path / "data")
        give_up_ns = time.monotonic_ns() + 30 * SECOND_NS
        while drive.state is DriveState.SERVING:  # until the next look after somebody asked
            assert time.monotonic_ns() < give_up_ns
            (drive,) = control.report().drives
        assert drive.state is DriveState.SUSPECT
        assert "was removed or replaced while it is in use" in drive.detail
        with urllib.request.urlopen(f"http://{ready.metrics}/metrics", timeout=20) as answer:
            assert "kvstore_device_healthy 0.0" in answer.read().decode()
        while "was removed or replaced" not in process.log:  # by the supervisor's pulse
            assert time.monotonic_ns() < give_up_ns
            time.sleep(0.05)


def until(is_so: Callable[[], bool]) -> None:
    give_up_ns = time.monotonic_ns() + 30 * SECOND_NS
    while not is_so():
        assert time.monotonic_ns() < give_up_ns
        time.sleep(0.001)


def test_a_file_is_missed_when_removed_or_replaced_and_found_again(tmp_path: Path) -> None:
    path, aside = tmp_path / DATA_FILE, tmp_path / "aside"
    path.write_bytes(b"x")
    file = StoreFile.of(str(tmp_path))
    assert file is not None
    assert file.is_there()
    path.rename(aside)
    until(lambda: not file.is_there())
    path.write_bytes(b"another")
    for _ in range(5):
        time.sleep(0.01)
        assert not file.is_there()
    aside.rename(path)
    until(file.is_there)
    assert StoreFile.of(str(tmp_path / "none")) is None
    assert StoreFile.of("/dev/null") is None


def test_a_file_system_that_hangs_holds_nobody_who_asks(tmp_path: Path) -> None:
    is_over, looks = threading.Event(), []

    def hang(path: Path) -> os.stat_result:
        looks.append(path)
        is_over.wait()
        raise FileNotFoundError

    file = StoreFile(tmp_path, tmp_path.stat(), look=hang)
    assert all(file.is_there() for _ in range(1000)), "it cannot be told"
    until(lambda: bool(looks))
    assert all(file.is_there() for _ in range(1000))
    assert looks == [tmp_path], "one question at a time"
    is_over.set()
    until(lambda: not file.is_there())

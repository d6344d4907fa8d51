"""`kvstore check`: 0 for a clean folder, 1 for a damaged one, and clear words for everything else."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.engine.drive import DATA_FILE
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.limits import MiB


def check(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`kvstore check PATH`, to its end."""
    command = [sys.executable, "-m", "kvstore", "check", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder whose node has stopped."""
    settings = EngineSettings(
        capacity_bytes=64 * MiB, cache_bytes=0, staging_bytes=16 * MiB, device="threads", prefault=False
    )
    DriveEngine.open(tmp_path, settings, now_ns=time.monotonic_ns()).close()
    return tmp_path


def test_a_clean_folder_is_0(folder: Path) -> None:
    done = check(folder)
    assert done.returncode == 0, done.stderr
    assert "clean" in done.stdout
    report = json.loads(check(folder, "--json").stdout)
    assert report["clean"]
    assert report["records"] == 0
    assert report["capacity_bytes"] == 64 * MiB


def test_the_data_file_itself_may_be_named(folder: Path) -> None:
    assert check(folder / DATA_FILE).returncode == 0


def test_a_damaged_superblock_copy_is_1(folder: Path) -> None:
    with (folder / DATA_FILE).open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 1]))
    done = check(folder)
    assert done.returncode == 1
    assert "DAMAGED" in done.stdout
    report = json.loads(check(folder, "--json").stdout)
    assert not report["clean"]
    assert report["bad_superblocks"] == 1


def test_a_folder_without_data_is_2(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        done = check(path)
        assert done.returncode == 2
        assert str(path) in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / DATA_FILE).write_bytes(b"not a store" * 100_000)
    done = check(tmp_path)
    assert done.returncode in (1, 2)
    assert "superblock" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_in_use_is_3(folder: Path) -> None:
    settings = EngineSettings(
        capacity_bytes=64 * MiB, cache_bytes=0, staging_bytes=16 * MiB, device="threads", prefault=False
    )
    engine = DriveEngine.open(folder, settings, now_ns=time.monotonic_ns())
    try:
        done = check(folder)
    finally:
        engine.close()
    assert done.returncode == 3
    assert "in use" in done.stderr

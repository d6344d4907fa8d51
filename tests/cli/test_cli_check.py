"""`kvstore check`: 0 for a clean folder, 1 for a damaged one, and clear words for everything else."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.engine.drive import DATA_FILE
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.errors import InvalidRequest
from kvstore.limits import MiB
from kvstore.server.drive_check import usable_paths
from kvstore.testing.loop_lab import LoopLab, call, missing_for_loop_lab


def check(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`kvstore check PATH`, to its end."""
    command = [sys.executable, "-m", "kvstore", "check", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder whose node has stopped."""
    return stopped(tmp_path)


def stopped(folder: Path) -> Path:
    """Makes it one whose node has stopped."""
    settings = EngineSettings(
        capacity_bytes=64 * MiB, cache_bytes=0, staging_bytes=16 * MiB, device="threads", prefault=False
    )
    DriveEngine.open(folder, settings, now_ns=time.monotonic_ns()).close()
    return folder


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """Such a folder on an ext4 that was mounted read-only since. Needs root; without it CI fails."""
    if reason := missing_for_loop_lab():
        pytest.skip(reason)
    lab = LoopLab(tmp_path)
    try:
        point = lab.file_system("ext4", size_mib=96, sector_bytes=512, name="mounted")
        (point / "data").mkdir()
        stopped(point / "data")
        call("mount", "-o", "remount,ro", str(point))
        yield point / "data"
    finally:
        lab.close()


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


def test_a_folder_on_a_read_only_mount_is_checked(read_only: Path) -> None:
    done = check(read_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert "clean" in done.stdout


def test_a_node_is_refused_a_read_only_mount_by_its_name(read_only: Path) -> None:
    for path, word in ((read_only, "is not writable"), (read_only.parent / "none", "cannot be made")):
        with pytest.raises(InvalidRequest, match=word) as refused:
            usable_paths([str(path)])
        assert f"`mount -o remount,rw {read_only.parent}` as root" in str(refused.value)


def test_who_may_only_read_can_check(folder: Path) -> None:
    file = folder / DATA_FILE
    file.chmod(0o444)
    for place in (folder, *folder.parents[:3]):
        place.chmod(place.stat().st_mode | 0o055)
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from kvstore.cli.check import check_data_dir\n"
        "from kvstore.cli.drive import erase\n"
        "from kvstore.errors import InvalidRequest\n"
        "if os.geteuid() == 0:\n    os.setgid(65534); os.setuid(65534)\n"
        "try:\n    open(sys.argv[1], 'r+b')\nexcept PermissionError:\n    print('may not write')\n"
        "print(check_data_dir(Path(sys.argv[1]), as_json=True))\n"
        "for call in (lambda path: check_data_dir(path, as_json=True), lambda path: erase(path, ask=bool)):\n"
        "    try:\n        call(Path(sys.argv[2]))\n    except InvalidRequest as error:\n        print(error)\n"
    )
    closed = folder / "closed"
    closed.mkdir(mode=0)
    before = file.read_bytes()
    command = [sys.executable, "-c", program, str(file), str(closed / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "may not write"
    assert lines[-3] == "0"
    for said, verb in zip(lines[-2:], ("looked at", "read"), strict=True):
        assert f"cannot be {verb} (Permission denied); run this as the node's user or root" in said
    assert file.read_bytes() == before


def test_checks_run_side_by_side(folder: Path) -> None:
    with (folder / DATA_FILE).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as another check has it
        assert check(folder).returncode == 0


def test_a_file_system_that_cannot_lock_is_said_and_checked(folder: Path) -> None:
    program = (
        "import fcntl, errno, sys\n"
        "from kvstore.cli.main import main\n"
        "def no_locks(fd, kind):\n    raise OSError(errno.ENOLCK, 'No locks available')\n"
        "fcntl.flock = no_locks\n"
        "sys.argv = ['kvstore', 'check', sys.argv[1], '--json']\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["clean"]
    assert "cannot be locked (No locks available)" in done.stderr

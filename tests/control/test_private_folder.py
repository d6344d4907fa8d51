"""Folders that go with their process, however it ends; in a parent where everybody can make names."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.server.private_folder import private_folder, socket_folder
from kvstore.testing.serve_process import ServeProcess

HOLDER = """
import sys, time
from kvstore.server.private_folder import private_folder
with private_folder(sys.argv[1], purpose="trial") as made:
    (made / "inner").mkdir()
    (made / "inner" / "file").write_text("x")
    print(made, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a folder; it ends with the end of its input."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def held_folder(holder: subprocess.Popen[str]) -> Path:
    assert holder.stdout is not None
    return Path(holder.stdout.readline().strip())


def names(parent: Path) -> set[str]:
    return {one.name for one in parent.iterdir()}


def test_it_is_closed_to_others_and_gone_at_the_end(tmp_path: Path) -> None:
    with private_folder(tmp_path, purpose="trial") as made:
        assert made.parent == tmp_path
        assert made.stat().st_mode & 0o777 == 0o700
        (made / "file").write_text("x")
    assert names(tmp_path) == set()


def test_one_in_use_stays_and_one_of_a_killed_process_goes(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    left = held_folder(holder)
    with private_folder(tmp_path, purpose="trial"):
        assert left.is_dir(), "its process lives"
    holder.kill()
    holder.wait()
    assert (left / "inner" / "file").exists(), "a killed process cannot remove it"
    with private_folder(tmp_path, purpose="other"):
        assert left.is_dir(), "another purpose"
    with private_folder(tmp_path, purpose="trial"):
        assert not left.exists()


def test_what_is_not_ours_to_remove_stays(tmp_path: Path) -> None:
    parent, victim = tmp_path / "parent", tmp_path / "victim"
    parent.mkdir()
    victim.mkdir(mode=0o700)
    (victim / "file").write_text("x")
    (parent / "kvstore-trial-aaaaaaaa").symlink_to(victim)  # what somebody else may put into /tmp
    (parent / "kvstore-trial-bbbbbbbb").mkdir(mode=0o755)  # not one that we make
    (parent / "kvstore-trial-cccccccc").write_text("x")
    (parent / "kvstore-trial-longer-than-ours").mkdir(mode=0o700)
    (parent / "kvstore-trial-dddddddd").mkdir(mode=0o700)
    before = names(parent)
    with private_folder(parent, purpose="trial"):
        assert names(parent) >= before - {"kvstore-trial-dddddddd"}
        assert "kvstore-trial-dddddddd" not in names(parent)
    assert (victim / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what another user owns")
def test_what_another_user_owns_stays(tmp_path: Path) -> None:
    foreign = tmp_path / "kvstore-trial-aaaaaaaa"
    foreign.mkdir(mode=0o700)
    os.chown(foreign, 12_345, 12_345)
    with private_folder(tmp_path, purpose="trial"):
        assert foreign.is_dir()


def test_many_at_once_neither_meet_nor_remove_each_other(tmp_path: Path) -> None:
    def hold(_: int) -> bool:
        with ExitStack() as stack:
            made = [stack.enter_context(private_folder(tmp_path, purpose="trial")) for _ in range(20)]
            return all(one.is_dir() for one in made)

    with ThreadPool(8) as pool:
        assert all(pool.map(hold, range(16)))
    assert names(tmp_path) == set()


def test_a_parent_that_cannot_be_used_is_named_with_the_fix(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with (
        pytest.raises(Unavailable, match=r"no folder can be made in .*missing.*TMPDIR"),
        private_folder(missing, purpose="trial"),
    ):
        pass
    with pytest.raises(InvalidRequest, match=r"socket_dir .*missing is no folder"), socket_folder(str(missing)):
        pass


def test_a_file_system_that_cannot_lock_is_named_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS refuses flock for what is open for reading."""

    def refuse(_fd: int, _how: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr("kvstore.server.private_folder.fcntl.flock", refuse)
    with (
        pytest.raises(Unavailable, match="cannot be locked: Bad file descriptor"),
        private_folder(tmp_path, purpose="trial"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_path_that_no_socket_can_have_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with pytest.raises(InvalidRequest, match=r"the limit is 107: set socket_dir"), socket_folder(str(long)):
        pass
    assert names(long) == set()


def test_a_killed_node_leaves_nothing_behind_for_ever(tmp_path: Path) -> None:
    sockets = tmp_path / "s"
    sockets.mkdir()
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    arguments = ("--socket-dir", str(sockets))
    with ServeProcess(folders[0], *arguments) as killed, ServeProcess(folders[1], *arguments) as other:
        killed.wait_ready()
        other.wait_ready()
        found = list(sockets.iterdir())
        assert len(found) == 2, "several nodes of a host have a folder each"
        for one in found:
            assert sorted(name.name for name in one.iterdir()) == ["data-0.sock", "grpc.sock"]
        os.killpg(killed.process.pid, signal.SIGKILL)
        killed.process.wait()
        assert set(sockets.iterdir()) == set(found)
        with ServeProcess(folders[2], *arguments) as third:
            third.wait_ready()
            now = set(sockets.iterdir())
            assert len(now) == 2, "that of the killed node is gone, that of the other is not"
            assert len(now & set(found)) == 1
        other.process.terminate()
        assert other.process.wait(60) == 0
    with private_folder(sockets, purpose="node"):
        pass
    assert names(sockets) == set()


def test_a_node_with_a_socket_folder_that_is_too_deep_says_the_fix(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with ServeProcess(tmp_path, "--socket-dir", str(deep)) as process:
        assert process.process.wait(60) == 2
        assert "set socket_dir (or TMPDIR) to a folder with a shorter path" in process.log_path.read_text()

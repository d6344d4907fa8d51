"""Folders for one process's time: of this user alone, and gone with the process however it ends.

A process that is killed cannot remove its folder. So each holds a lock (flock) on its folder for as long as it lives,
and whoever makes the next one with the same purpose at the same place first removes those that nobody holds. Cleaners
of temporary files (systemd-tmpfiles, tmpfiles.d(5)) leave a locked folder alone too, however long a node runs.

The parent may be /tmp, where everybody can make names: what is not a folder of ours, closed to others, is not touched,
and names are drawn at random, so none can be taken before us. Containers that share the parent and the kernel see
each other's locks.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.limits import FOLDER_ATTEMPTS_MAX, LEFT_FOLDERS_REMOVED_MAX, TEMPORARY_NAMES_READ_MAX, UNIX_PATH_BYTES_MAX

_OPEN_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_DRAWN_CHARACTERS: Final = 8  # by which tempfile.mkdtemp tells names apart
_SOCKET_PURPOSE: Final = "node"
_LONGEST_SOCKET: Final = f"kvstore-{_SOCKET_PURPOSE}-{'x' * _DRAWN_CHARACTERS}/data-00.sock"


@contextmanager
def private_folder(parent: str | Path | None, *, purpose: str) -> Iterator[Path]:
    """A new folder `kvstore-PURPOSE-XXXXXXXX` of mode 0700, removed at the end.

    Args:
        parent: where it is made; None is the system's folder for temporary files (TMPDIR).
        purpose: letters. What killed processes have left with the same purpose is removed first.

    Raises:
        Unavailable: none can be made there.
    """
    where = _parent(parent)
    _remove_left(where, purpose)
    path, lock = _make(where, purpose)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


@contextmanager
def socket_folder(parent: str) -> Iterator[Path]:
    """The folder for a node's Unix sockets; see `private_folder`.

    Args:
        parent: the setting `socket_dir`; "" is the system's folder for temporary files.

    Raises:
        InvalidRequest: `parent` is no folder, or a socket's path would be too long (unix(7)).
        Unavailable: none can be made there.
    """
    where = Path(os.path.abspath(parent)) if parent else _parent(None)
    if parent and not where.is_dir():
        raise InvalidRequest(f"socket_dir {parent} is no folder; make it, or leave socket_dir out for {_parent(None)}")
    length = len(os.fsencode(where / _LONGEST_SOCKET))
    if length > UNIX_PATH_BYTES_MAX:
        raise InvalidRequest(
            f"Unix sockets below {where} would have paths of {length} bytes, the limit is {UNIX_PATH_BYTES_MAX}: "
            "set socket_dir (or TMPDIR) to a folder with a shorter path, such as /run/kvstore"
        )
    with private_folder(where, purpose=_SOCKET_PURPOSE) as path:
        yield path


def _parent(given: str | Path | None) -> Path:
    if given is not None:
        return Path(given)
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise Unavailable(f"{error.strerror}: set socket_dir (or TMPDIR) to a folder that may be written") from None


def _make(parent: Path, purpose: str) -> tuple[Path, int]:
    """A new folder, and the descriptor that locks it."""
    for _ in range(FOLDER_ATTEMPTS_MAX):
        try:
            path = Path(tempfile.mkdtemp(prefix=f"kvstore-{purpose}-", dir=parent))
        except OSError as error:
            raise Unavailable(
                f"no folder can be made in {parent}: {error.strerror}; make it writable for user {os.geteuid()}, or "
                "choose another one (socket_dir, TMPDIR)"
            ) from None
        try:
            lock = _locked(path)
        except OSError as error:
            with suppress(OSError):
                path.rmdir()
            raise Unavailable(
                f"folders in {parent} cannot be locked: {error.strerror}, as on NFS; choose one on a file system of "
                "this machine (socket_dir, TMPDIR)"
            ) from None
        if lock is not None:
            return path, lock
        # somebody who removes what was left came in between
    raise Unavailable(f"new folders in {parent} are locked by somebody else, {FOLDER_ATTEMPTS_MAX} times in a row")


def _locked(path: Path) -> int | None:
    """A descriptor that locks the folder of this name; None when another has it, or it is not ours, or gone.

    Raises OSError where no folder can be locked, whoever has it: flock of what is open for reading is EBADF on NFS.
    """
    try:
        fd = os.open(path, _OPEN_FOLDER)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    try:
        held, named = os.fstat(fd), os.lstat(path)
        if (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino) and _is_ours(held):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _is_ours(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS


def _remove_left(parent: Path, purpose: str) -> None:
    """Removes what processes that have ended left behind; a part of it where that is much."""
    name = re.compile(rf"kvstore-{purpose}-[a-z0-9_]{{{_DRAWN_CHARACTERS}}}")
    with suppress(OSError), os.scandir(parent) as names:  # one that may not be listed is not ours to clean
        left = [Path(one.path) for one in islice(names, TEMPORARY_NAMES_READ_MAX) if name.fullmatch(one.name)]
        for path in left[:LEFT_FOLDERS_REMOVED_MAX]:
            lock = _locked(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)

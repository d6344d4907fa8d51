"""One process per drive: the lock on the data file's own descriptor.

The lock is flock(2) on the descriptor that carries the I/O, not on a separate lock file: io_uring keeps the open file
until its last request is done, milliseconds after a kill -9, and a lock of its own would be free too early.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvstore.errors import Unavailable
from kvstore.limits import MS_NS, SECOND_NS

_POLL_SECONDS: Final = 0.01
_log = logging.getLogger(__name__)


def lock_data_file(fd: int, path: str, *, wait_ns: int) -> None:
    """Take the exclusive lock of an open data file, waiting at most `wait_ns` for its last owner to go.

    Raises:
        Unavailable: somebody still holds it; the message names the path and, when found, the holder's pid.
        OSError: the file system cannot lock.
    """
    _lock(fd, path, fcntl.LOCK_EX, wait_ns=wait_ns)


def lock_for_reading(fd: int, path: str, *, wait_ns: int) -> None:
    """Keep owners away from a data file that is only read, beside others who do so; see `lock_data_file`.

    The lock is a shared one: what is open for reading can have no other on NFS (flock(2)). Where the file system
    cannot lock, that is logged: whoever reads does no harm without.

    Raises:
        Unavailable: it has an owner.
    """
    try:
        _lock(fd, path, fcntl.LOCK_SH, wait_ns=wait_ns)
    except OSError as error:
        _log.warning(
            "%s cannot be locked (%s): what a node writes meanwhile would be taken for damage; stop a node that has it",
            path,
            error.strerror,
        )


def _lock(fd: int, path: str, kind: int, *, wait_ns: int) -> None:
    deadline_ns = time.monotonic_ns() + wait_ns
    told_ns = time.monotonic_ns() + SECOND_NS
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            now_ns = time.monotonic_ns()
            if now_ns >= deadline_ns:
                break
            if now_ns >= told_ns:  # who ends keeps it for less
                told_ns = deadline_ns
                _log.warning("%s is in use by %s: waits for it, up to %g s", path, _holder_of(fd), wait_ns / SECOND_NS)
        time.sleep(_POLL_SECONDS)
    holder = _holder_of(fd)
    waited = f"{wait_ns / SECOND_NS:g} s" if wait_ns >= SECOND_NS else f"{wait_ns // MS_NS} ms"
    raise Unavailable(
        f"{path} is in use by {holder}, still locked after {waited}; stop that process, or name another data directory"
    )


def _holder_of(fd: int) -> str:
    pid = lock_holder_pid(fd)
    return f"process {pid} ({_process_name(pid)})" if pid else "another process"


def unlock_data_file(fd: int) -> None:
    """Give the lock back. Done explicitly: a ring that is being torn down keeps the open file for a while."""
    with suppress(OSError):  # a file system that cannot lock has none to give back
        fcntl.flock(fd, fcntl.LOCK_UN)


def lock_holder_pid(fd: int) -> int | None:
    """Who holds the flock of this file, by /proc/locks (proc_locks(5)); None when it cannot be told."""
    stat = os.fstat(fd)
    wanted = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        # "1: FLOCK ADVISORY WRITE 4242 fd:01:1048600 0 EOF"; waiters have "->" after the number
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == wanted and int(fields[4]) > 0:
            return int(fields[4])
    return None


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "its name is not readable"

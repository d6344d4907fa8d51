"""The folders and files that a node touches itself: data folders before their worker opens them, and the ready file."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kvstore.cluster.node_file import replace_file
from kvstore.doctor.storage_reading import existing_place, mount_of
from kvstore.doctor.system import LinuxSystem
from kvstore.errors import InvalidRequest, Unavailable

log = logging.getLogger(__name__)

STORE_FILE: Final = "node.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyAddresses:
    """Content of the ready file."""

    grpc: str
    data: Sequence[str]
    metrics: str
    pid: int


def prepare_data_dirs(paths: Sequence[str]) -> None:
    """Make the folders where they are missing.

    Raises:
        InvalidRequest: a path is neither a folder nor a block device, or cannot be made or written.
    """
    for path in map(Path, paths):
        if not _is_block_device(path):
            _prepare_folder(path)


def clear_ready_file(path: Path) -> None:
    """Remove what an earlier life left. Raises InvalidRequest when the file could not be written later."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidRequest(f"ready_file {path} cannot be removed: {error.strerror}; pass another path") from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InvalidRequest(
            f"ready_file {path} cannot be written: {path.parent} is no writable folder; pass another path"
        )


def write_ready_file(path: Path, addresses: ReadyAddresses) -> None:
    """Write it so that a reader sees nothing or all of it. Raises Unavailable when it cannot be written."""
    try:
        replace_file(path, json.dumps(asdict(addresses)).encode() + b"\n")
    except OSError as error:
        raise Unavailable(f"ready_file {path} cannot be written: {error.strerror}; pass another path") from None


def remove_ready_file(path: Path) -> None:
    """Nobody is ready any more. A file that cannot be removed is logged, and names a pid that is gone."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("ready_file %s cannot be removed: %s", path, error.strerror)


def _is_block_device(path: Path) -> bool:
    try:
        return stat.S_ISBLK(path.stat().st_mode)
    except OSError:
        return False


def _prepare_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InvalidRequest(f"data_dir {path} is a file; name a folder or a block device") from None
    except OSError as error:
        fix = _fix_of_mount(path) or "name a folder you may write"
        raise InvalidRequest(f"data_dir {path} cannot be made: {error.strerror}; {fix}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        fix = _fix_of_mount(path) or "change its rights, or name another folder"
        raise InvalidRequest(f"data_dir {path} is not writable; {fix}")


def _fix_of_mount(path: Path) -> str:
    """What to do where its file system is mounted read-only; "" where it is not, or cannot be asked."""
    try:
        found = existing_place(path.absolute())
        if not os.statvfs(found).f_flag & os.ST_RDONLY:
            return ""
        _, point, _ = mount_of(LinuxSystem(), found.stat().st_dev, str(found.resolve()))
    except OSError:
        return ""
    return (
        f"{point} is mounted read-only: `mount -o remount,rw {point}` as root, or name another folder "
        "(`kvstore check` can read a store that lies there)"
    )

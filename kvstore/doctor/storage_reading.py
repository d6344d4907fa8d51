"""Where data dirs lie: by stat, statvfs, /proc and /sys, without any I/O on them."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

from kvstore.device.host_files import whole_number
from kvstore.doctor.storage import PlaceFacts
from kvstore.doctor.system import System

_BLOCK_UNIT_BYTES: Final = 512  # of st_blocks, stat(2)


def read_place(system: System, path: str, *, needed_bytes: int) -> PlaceFacts:
    """Where a data dir lies: by stat, statvfs, /proc/self/mountinfo and /sys."""
    try:
        found = existing_place(Path(path).absolute())
        status = found.stat()
        if stat.S_ISBLK(status.st_mode):
            return _read_raw_drive(system, path, status, needed_bytes)
        problem = _problem_of_folder(path, found, status)
        space = os.statvfs(found)
        own_bytes = _own_bytes(found) if not problem and found == Path(path).absolute() else 0
    except OSError as error:
        return PlaceFacts(path=path, problem=f"cannot be looked at ({error.strerror})", needed_bytes=needed_bytes)
    file_system, point, options = mount_of(system, status.st_dev, str(found))
    drive, is_rotational, scheduler = _drive_of(system, status.st_dev)
    return PlaceFacts(
        path=path,
        problem=problem,
        file_system=file_system,
        mount_options=options,
        mount_point=point,
        drive=drive,
        is_rotational=is_rotational,
        scheduler=scheduler,
        device_number=status.st_dev,
        free_bytes=space.f_bavail * space.f_frsize,
        own_bytes=own_bytes,
        size_bytes=space.f_blocks * space.f_frsize,
        needed_bytes=needed_bytes,
    )


def mount_of(system: System, device_number: int, path: str) -> tuple[str, str, tuple[str, ...]]:
    """(type, mount point, options) of the mount that holds `path`, by /proc/self/mountinfo (proc(5)).

    The longest mount point above the path decides: the device number alone does not tell overlays and btrfs apart.
    """
    wanted = f"{os.major(device_number)}:{os.minor(device_number)}"
    best = ("", "", ())  # type: tuple[str, str, tuple[str, ...]]
    best_rank = (False, -1)
    for line in (system.text("/proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 6 or len(tail) < 2:
            continue
        point = _unescaped(fields[4])
        if path != point and not path.startswith(point.rstrip("/") + "/"):
            continue
        rank = (fields[2] == wanted, len(point))
        if rank >= best_rank:  # of two mounts on one point the later one is on top
            options = (*fields[5].split(","), *(tail[2].split(",") if len(tail) > 2 else ()))
            best, best_rank = (tail[0], point, tuple(dict.fromkeys(options))), rank
    return best


def _unescaped(point: str) -> str:
    """A mount point as it is: proc(5) writes space, tab, newline and backslash as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), point)


def existing_place(path: Path) -> Path:
    """The path, or the nearest folder above it that exists: where it would be made."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _problem_of_folder(path: str, found: Path, status: os.stat_result) -> str:
    if not stat.S_ISDIR(status.st_mode):
        return "neither a folder nor a block device"
    if os.access(found, os.W_OK | os.X_OK):
        return ""
    return "not writable" if found == Path(path).absolute() else f"cannot be made: {found} is not writable"


def _own_bytes(folder: Path) -> int:
    taken_bytes = 0
    for entry in os.scandir(folder):
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # a running node has replaced it
        taken_bytes += status.st_blocks * _BLOCK_UNIT_BYTES if stat.S_ISREG(status.st_mode) else 0
    return taken_bytes


def _read_raw_drive(system: System, path: str, status: os.stat_result, needed_bytes: int) -> PlaceFacts:
    drive, is_rotational, scheduler = _drive_of(system, status.st_rdev)
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    size_bytes = (whole_number(system.text(f"/sys/dev/block/{number}/size")) or 0) * 512  # in sectors of 512, always
    problem = "" if os.access(path, os.R_OK | os.W_OK) else "not readable and writable"
    if point := _mount_point_of(system, number):
        problem = f"mounted at {point}: a node would be refused; unmount it"
    return PlaceFacts(
        path=path,
        problem=problem,
        file_system="block device",
        drive=drive,
        is_rotational=is_rotational,
        scheduler=scheduler,
        device_number=status.st_rdev,
        free_bytes=size_bytes,
        size_bytes=size_bytes,
        needed_bytes=needed_bytes,
    )


def _mount_point_of(system: System, number: str) -> str:
    for line in (system.text("/proc/self/mountinfo") or "").splitlines():
        fields = line.split()
        if len(fields) > 4 and fields[2] == number:
            return fields[4]
    return ""


def _drive_of(system: System, device_number: int) -> tuple[str, bool, str]:
    """(name, is rotational, scheduler) of the whole drive behind a device number; a partition's drive is its parent."""
    folder = system.real(f"/sys/dev/block/{os.major(device_number)}:{os.minor(device_number)}")
    if folder is None:
        return "", False, ""
    if system.text(f"{folder}/partition") is not None:
        folder = os.path.dirname(folder)
    schedulers = system.text(f"{folder}/queue/scheduler") or ""
    chosen = schedulers.partition("[")[2].partition("]")[0] or schedulers  # "none [mq-deadline] kyber"
    return os.path.basename(folder), system.text(f"{folder}/queue/rotational") == "1", chosen

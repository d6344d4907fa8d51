"""Looks at data dirs: where they lie (no I/O on them), and what real I/O on them does (a nameless file, or reads)."""

from __future__ import annotations

import mmap
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvstore.device import syscalls
from kvstore.device.file import DataFile
from kvstore.device.uring_probe import probe_uring
from kvstore.doctor.storage import PlaceFacts, TrialFacts
from kvstore.doctor.system import System, whole_number
from kvstore.errors import Unavailable
from kvstore.limits import PAGE_BYTES

_TRIAL_BYTES: Final = 2 * PAGE_BYTES
_BLOCK_UNIT_BYTES: Final = 512  # of st_blocks, stat(2)
_OPCODES: Final = ("read", "read_fixed", "readv_fixed")


def read_place(system: System, path: str, *, needed_bytes: int) -> PlaceFacts:
    """Where a data dir lies: by stat, statvfs, /proc/self/mountinfo and /sys."""
    found = _existing(Path(path).absolute())
    try:
        status = found.stat()
        if stat.S_ISBLK(status.st_mode):
            return _read_raw_drive(system, path, status, needed_bytes)
        problem = _problem_of_folder(path, found, status)
        space = os.statvfs(found)
        own_bytes = _own_bytes(found) if found == Path(path).absolute() else 0
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


def try_place(path: str, *, mode_wanted: str) -> TrialFacts:
    """Try O_DIRECT and each operation of io_uring as a node would, on a file without a name in the data dir.

    A raw drive is only read. Nothing that a node has written is touched, so a node may run meanwhile.
    """
    try:
        with _opened(_existing(Path(path).absolute())) as file:
            file.try_direct_io()
            alignment = syscalls.direct_io_alignment(file.fd)
            problem, opcodes, notes = _try_uring(file)
            return TrialFacts(
                path=path,
                direct_io=file.direct_io,
                direct_reason=file.direct_reason,
                alignment_bytes=alignment if alignment and max(alignment) else None,
                sector_bytes=file.sector_bytes,
                uring_problem=problem,
                uring_opcodes=opcodes,
                uring_notes=notes,
                mode_wanted=mode_wanted,
            )
    except OSError as error:
        return TrialFacts(path=path, problem=error.strerror or str(error), mode_wanted=mode_wanted)


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
        point = fields[4].encode().decode("unicode_escape")  # a space is \040
        if path != point and not path.startswith(point.rstrip("/") + "/"):
            continue
        rank = (fields[2] == wanted, len(point))
        if rank >= best_rank:  # of two mounts on one point the later one is on top
            options = (*fields[5].split(","), *(tail[2].split(",") if len(tail) > 2 else ()))
            best, best_rank = (tail[0], point, tuple(dict.fromkeys(options))), rank
    return best


def _existing(path: Path) -> Path:
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
    return sum(entry.stat().st_blocks * _BLOCK_UNIT_BYTES for entry in os.scandir(folder) if entry.is_file())


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


@contextmanager
def _opened(found: Path) -> Iterator[DataFile]:
    """An open file to try I/O on: the raw drive for reading, else a new file that is gone when it is closed."""
    if found.is_block_device():
        fd = os.open(found, os.O_RDONLY | os.O_CLOEXEC)
        size_bytes = syscalls.block_device_bytes(fd)
    else:
        fd = _nameless(found)
        os.ftruncate(fd, _TRIAL_BYTES)
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.pwrite(fd, page, 0)
        size_bytes = _TRIAL_BYTES
    file = DataFile(str(found), fd)
    file.size_bytes = size_bytes
    try:
        yield file
    finally:
        file.close()


def _nameless(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # overlay and network file systems
        fd, name = tempfile.mkstemp(prefix=".kvstore-doctor-", dir=folder)
        os.unlink(name)
        return fd


def _try_uring(file: DataFile) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """(why it does not work, the operations that do, notes on those that do not)."""
    try:
        abilities = probe_uring(file)
    except Unavailable as error:
        return str(error), (), ()
    return "", opcodes_of(abilities.variants), abilities.notes


def opcodes_of(variants: int) -> tuple[str, ...]:
    """Names of the kinds of operation behind the bits of `UringAbilities.variants`."""
    from kvstore.device import _uring  # compiled; it is there when a probe has succeeded

    bits = (_uring.VARIANT_PLAIN, _uring.VARIANT_FIXED, _uring.VARIANT_VECTOR_FIXED)
    return tuple(name for name, bit in zip(_OPCODES, bits, strict=True) if variants & bit)

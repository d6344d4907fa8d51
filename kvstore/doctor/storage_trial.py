"""What real I/O on a data dir does: O_DIRECT and each operation of io_uring, tried on a nameless file or by reads."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvstore.device import syscalls
from kvstore.device.file import DataFile
from kvstore.device.host_files import whole_number
from kvstore.device.uring_probe import BINDING_MISSING, DISABLED_SYSCTL, probe_uring
from kvstore.doctor.storage import TrialFacts
from kvstore.doctor.storage_reading import existing_place
from kvstore.doctor.system import System
from kvstore.errors import Unavailable
from kvstore.limits import PAGE_BYTES

_TRIAL_BYTES: Final = 2 * PAGE_BYTES
_OPCODES: Final = ("read", "read_fixed", "readv_fixed")


def try_place(system: System, path: str, *, mode_wanted: str) -> TrialFacts:
    """Try O_DIRECT and each operation of io_uring as a node would, on a file without a name in the data dir.

    A raw drive is only read. Nothing that a node has written is touched, so a node may run meanwhile.
    """
    try:
        with _opened(existing_place(Path(path).absolute())) as file:
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
                uring_disabled=whole_number(system.text(str(DISABLED_SYSCTL))),
                is_binding_built=not BINDING_MISSING,
                uring_opcodes=opcodes,
                uring_notes=notes,
                mode_wanted=mode_wanted,
            )
    except OSError as error:
        return TrialFacts(path=path, problem=error.strerror or str(error), mode_wanted=mode_wanted)


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

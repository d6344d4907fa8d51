"""What io_uring can do here, found by using it: the ring's set-up and a real operation of each kind on the file."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.device.base import IoKind, IoOp
from kvstore.device.file import DataFile
from kvstore.device.scattered import ScatteredRead
from kvstore.device.transfer import ALIGNMENT_BYTES, PartOp
from kvstore.errors import Unavailable
from kvstore.limits import REGISTERED_PIECE_BYTES
from kvstore.types.compiled import require_interface

try:
    from kvstore.device import _uring

    require_interface(_uring)
except ImportError as import_error:
    BINDING_MISSING = f"kvstore.device._uring cannot be used ({import_error})"
else:
    BINDING_MISSING = ""

DISABLED_SYSCTL: Final = Path("/proc/sys/kernel/io_uring_disabled")


@dataclass(frozen=True, slots=True, kw_only=True)
class UringAbilities:
    """What io_uring can do with one file, found by real I/O on it.

    Attributes:
        variants: bits of `_uring.VARIANT_*` for `Ring.variants` once memory is registered.
        notes: what does not work and why, one clause each.
    """

    variants: int
    notes: tuple[str, ...]


def make_ring(file: DataFile, *, depth: int) -> _uring.Ring:
    """A ring over an open data file. Raises Unavailable with what is missing and the fix."""
    if BINDING_MISSING:
        raise Unavailable(f"{BINDING_MISSING}; install a wheel, or a C compiler and reinstall")
    # Linux 5.19: completions are posted when the driver enters the kernel anyway, instead of interrupting it. The
    # stricter SINGLE_ISSUER and DEFER_TASKRUN gained nothing (docs/decisions) and tie a device to one thread for good.
    flags = _uring.SETUP_COOP_TASKRUN | _uring.SETUP_TASKRUN_FLAG
    try:
        try:
            return _make_ring(file, depth=depth, setup_flags=flags)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return _make_ring(file, depth=depth, setup_flags=0)
    except OSError as error:
        raise Unavailable(explain_setup_failure(error)) from error


def _make_ring(file: DataFile, *, depth: int, setup_flags: int) -> _uring.Ring:
    return _uring.Ring(
        file.fd,
        depth,
        size_bytes=file.size_bytes,
        alignment_bytes=ALIGNMENT_BYTES if file.direct_io else 1,
        read=IoKind.READ,
        write=IoKind.WRITE,
        sync=IoKind.SYNC,
        part_type=PartOp,
        scattered_type=ScatteredRead,
        setup_flags=setup_flags,
    )


def probe_uring(file: DataFile) -> UringAbilities:
    """Try each kind of operation on the file, through a ring of its own; only reads and a sync, so nothing changes.

    The writing twin of an operation code came with the same kernel as the reading one; the kernel is asked for it.

    Raises:
        Unavailable: io_uring cannot serve this file at all; the message says what is missing and the fix.
    """
    ring = make_ring(file, depth=4)
    try:
        return _probe_ring(ring, file)
    finally:
        ring.close()


def _probe_ring(ring: _uring.Ring, file: DataFile) -> UringAbilities:
    pages = memoryview(mmap.mmap(-1, 3 * ALIGNMENT_BYTES))
    one = [pages[:ALIGNMENT_BYTES]]
    two = [pages[:ALIGNMENT_BYTES], pages[2 * ALIGNMENT_BYTES :]]
    notes: list[str] = []
    for what, op in (("readv", IoOp(IoKind.READ, 0, two)), ("fdatasync", IoOp(IoKind.SYNC, 0, []))):
        if reason := _try_one(ring, op):
            raise Unavailable(f"io_uring {what} on {file.path} ({file.file_system}): {reason}; use mode threads")
    try:
        ring.register_file()
    except OSError as error:
        notes.append(f"file not registered ({error.strerror})")
    usable = 0
    trials = [("read", _uring.VARIANT_PLAIN, one, _uring.OP_WRITE)]
    try:
        ring.register_memory(pages, REGISTERED_PIECE_BYTES)
    except OSError as error:
        notes.append(f"memory cannot be registered ({error.strerror})")
    else:
        trials.append(("read_fixed", _uring.VARIANT_FIXED, one, _uring.OP_WRITE_FIXED))
        trials.append(("readv_fixed", _uring.VARIANT_VECTOR_FIXED, two, _uring.OP_WRITEV_FIXED))
    for what, variant, buffers, twin in trials:
        ring.variants = variant
        reason = "" if ring.supports(twin) else f"the kernel does not know operation {twin}"
        reason = reason or _try_one(ring, IoOp(IoKind.READ, 0, buffers))
        if reason:
            notes.append(f"no {what} ({reason})")
        else:
            usable |= variant
    return UringAbilities(variants=usable, notes=tuple(notes))


def _try_one(ring: _uring.Ring, op: IoOp) -> str:
    """Run one operation to its end; why it does not work, or an empty string."""
    ring.submit([op], 0, [])
    ring.wait()
    _, odd, _ = ring.reap()
    for _, result in odd:
        if result < 0:
            return os.strerror(-result)
    return ""


def explain_setup_failure(error: OSError) -> str:
    """Why io_uring_setup failed, and what an operator can do about it."""
    if error.errno == errno.ENOSYS:
        return f"{error.args[1]}: {os.strerror(errno.ENOSYS)}; the kernel has no io_uring, or seccomp hides it"
    if error.errno in (errno.EPERM, errno.EACCES):
        try:
            disabled = DISABLED_SYSCTL.read_text().strip()
        except OSError:
            disabled = "0"  # the sysctl came with Linux 6.6
        if disabled != "0":
            return f"{error.args[1]}: EPERM; sysctl kernel.io_uring_disabled is {disabled}, set it to 0"
        return (
            f"{error.args[1]}: EPERM; the container's seccomp profile forbids io_uring, "
            "allow io_uring_setup, io_uring_enter and io_uring_register in it"
        )
    if error.errno == errno.ENOMEM:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return f"{error.args[1]}: ENOMEM; the locked memory limit is {soft} bytes, raise it (ulimit -l)"
    return f"{error.args[1]}: {os.strerror(error.errno or 0)}"

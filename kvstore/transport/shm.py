"""Memory that a client and a node on one host share: sealed memfds, Unix sockets, and who is at the other end.

A memfd that is sealed against shrinking cannot take pages away from under a mapping, so touching one never ends in
SIGBUS as long as the kernel can give a page for a hole that its owner has punched; see `open_memory`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.limits import ALLOCATED_OF_FREE_MAX, UNIX_PATH_BYTES_MAX, UNMAP_PIECE_BYTES, MiB
from kvstore.transport.tcp import LISTEN_BACKLOG
from kvstore.types.digest import digest
from kvstore.types.free_memory import free_memory_bytes

# linux/fcntl.h, linux/memfd.h, linux/magic.h
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_F_SEAL_SEAL: Final = 0x01
_F_SEAL_SHRINK: Final = 0x02
_F_SEAL_GROW: Final = 0x04
_F_SEAL_WRITE: Final = 0x08
_F_SEAL_FUTURE_WRITE: Final = 0x10
_MFD_NOEXEC_SEAL: Final = 0x08
_TMPFS_MAGIC: Final = 0x0102_1994
_STATFS_BYTES: Final = 256
_BLOCK_UNIT_BYTES: Final = 512  # of st_blocks, stat(2)
_OVERCOMMIT_NEVER: Final = "2"
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred

_MAP_FIXED: Final = 0x10  # mmap(2)
_MADV_COLLAPSE: Final = 25
_HUGE_PAGE_BYTES: Final = 2 * MiB  # of x86-64 and of arm64 with pages of 4 KiB; where it is another size, none is taken
_FAILED: Final = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Who is at the other end of a Unix socket. `pid` is 0 for a process of another pid namespace."""

    pid: int
    uid: int


# --- memory ---------------------------------------------------------------------------------------------------------
def create_memory(length_bytes: int) -> int:
    """The descriptor of a new memfd: allocated to its last page, and sealed so that its size stays.

    Its whole 2 MiB are made of huge pages where the kernel has some to give: a drive reads into those at twice the
    rate (docs/decisions/shared-memory.md). That takes some 2 ms for each.

    Args:
        length_bytes: a multiple of PAGE_BYTES above 0.

    Raises:
        OSError: There is not so much memory, or the kernel knows no memfd.
    """
    free = free_memory_bytes() if length_bytes >= _HUGE_PAGE_BYTES else None
    if free is not None and length_bytes > free * ALLOCATED_OF_FREE_MAX:
        raise OSError(errno.ENOMEM, f"{length_bytes} bytes are more than this machine can give ({free} are free)")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("kvstore", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create("kvstore", flags)  # before Linux 6.3
    try:
        os.ftruncate(fd, length_bytes)
        _take_huge_pages(fd, length_bytes)
        os.posix_fallocate(fd, 0, length_bytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _take_huge_pages(fd: int, length_bytes: int) -> None:
    """Fills what it can of an empty memfd with huge pages; the rest stays empty.

    MADV_COLLAPSE (Linux 6.1, madvise(2)) does not ask for `shmem_enabled`, which is `never` nearly everywhere, but for
    a mapping whose addresses are aligned like the file; this one is only for that.
    """
    end = length_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if not end:
        return
    reserved_bytes = end + _HUGE_PAGE_BYTES
    reserved = _libc.mmap(None, reserved_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved in (_FAILED, None):
        return
    start = -(-reserved // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    access = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        if _libc.mmap(start, end, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) in (_FAILED, None):
            return
        for at in range(0, end, _HUGE_PAGE_BYTES):
            os.pwrite(fd, b"\0", at)  # a page that is not there cannot be collapsed; its neighbours may be missing
            refused = _libc.madvise(start + at, _HUGE_PAGE_BYTES, _MADV_COLLAPSE) and ctypes.get_errno()
            if refused and refused != errno.EAGAIN:
                return  # an older kernel, or none is free
    finally:
        _libc.munmap(reserved, reserved_bytes)


def open_memory(fd: int, length_bytes: int) -> mmap.mmap:
    """Maps the first bytes of a memfd that somebody else has made, once it is sure that touching them is safe.

    The mapping ends with `unmap`, or when the last view of it is gone; `fd` can be closed before.

    Raises:
        InvalidRequest: Not a memfd of ordinary pages, not sealed, too short, with holes, or not to be mapped.
        Unavailable: This machine can refuse a page where one was promised (vm.overcommit_memory = 2), so a client that
            punches holes could kill us.
    """
    defect = memory_defect(fd, length_bytes)
    if defect:
        raise InvalidRequest(f"shared memory of {length_bytes} bytes is refused: {defect}")
    if _overcommit() == _OVERCOMMIT_NEVER:
        raise Unavailable("shared memory is off, since vm.overcommit_memory is 2 here: use 0 or 1, or transport tcp")
    try:
        return mmap.mmap(fd, length_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"shared memory of {length_bytes} bytes cannot be mapped: {error}") from None


def mapped_at(mapped: mmap.mmap) -> int:
    """The address of a mapping."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def unmap(mapped: mmap.mmap) -> None:
    """Ends a mapping that nobody views, however large: other threads run, and map memory, meanwhile.

    munmap(2) of all its pages at once keeps other threads from mapping any (137 ms for 1 GiB of 4 KiB pages that were
    touched, where pieces of UNMAP_PIECE_BYTES keep them .6 ms); of pages that are not there any more it is quick.
    """
    start, length_bytes = mapped_at(mapped), len(mapped)
    for at in range(0, length_bytes, UNMAP_PIECE_BYTES):
        piece_bytes = min(UNMAP_PIECE_BYTES, length_bytes - at)
        if _libc.madvise(start + at, piece_bytes, mmap.MADV_DONTNEED):
            break  # locked by mlockall(2): all at once then
    mapped.close()


def has_seals(fd: int) -> bool:
    """Whether a descriptor can be a memfd: sockets, pipes, folders and files of other file systems cannot."""
    try:
        fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:
        return False
    return True


def memory_defect(fd: int, length_bytes: int) -> str:
    """Why a descriptor is not memory that may be mapped; empty when it is."""
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
        found = os.fstat(fd)
    except OSError as error:
        return f"it is no memfd ({error.strerror}); make one with memfd_create(2) and MFD_ALLOW_SEALING"
    if not stat.S_ISREG(found.st_mode) or _file_system(fd) != _TMPFS_MAGIC:
        return "it is not made of ordinary pages; use a memfd without MFD_HUGETLB"
    if seals & (_F_SEAL_SHRINK | _F_SEAL_GROW) != _F_SEAL_SHRINK | _F_SEAL_GROW:
        return f"its seals are {seals:#x}; add F_SEAL_SHRINK and F_SEAL_GROW"
    if seals & (_F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE):
        return f"its seals are {seals:#x}, which forbid writing; leave F_SEAL_WRITE and F_SEAL_FUTURE_WRITE out"
    if found.st_size < length_bytes:
        return f"the memfd has {found.st_size} bytes"
    if found.st_blocks * _BLOCK_UNIT_BYTES < length_bytes:
        return f"only {found.st_blocks * _BLOCK_UNIT_BYTES} bytes of it are allocated; call posix_fallocate(3)"
    return ""


def _file_system(fd: int) -> int:
    """Magic number of the file system, fstatfs(2)."""
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, answer) != 0:
        return 0
    return int(struct.unpack_from("l", answer)[0])


def _overcommit() -> str:
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip()
    except OSError:
        return ""


# --- sockets --------------------------------------------------------------------------------------------------------
def host_id() -> str:
    """What processes of one running kernel have in common, and no two others: a digest of its boot id. "" if unknown.

    Containers of one host share it; whether they also share a path is seen when it is connected to.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return ""
    return digest(b"kvstore.host.v1", boot_id).hex()[:32]


def peer_of(connected: socket.socket) -> Peer:
    """Who made the other end of a Unix socket, as the kernel noted it then (SO_PEERCRED, unix(7))."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(pid=pid, uid=uid)


def is_trusted(peer: Peer) -> bool:
    """Whether memory may be shared with that process: it is ours, or root's."""
    return peer.uid in (os.geteuid(), 0)


def listen_unix(path: str) -> socket.socket:
    """A non-blocking listening Unix socket for this user alone. A socket that a dead process left there is replaced.

    Raises:
        InvalidRequest: The path cannot be used.
    """
    if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
        raise InvalidRequest(f"socket path {path} is longer than {UNIX_PATH_BYTES_MAX} bytes: use a shorter folder")
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        Path(path).unlink(missing_ok=True)
        made.bind(path)
        Path(path).chmod(0o600)
        made.listen(LISTEN_BACKLOG)
    except OSError as error:
        made.close()
        raise InvalidRequest(f"cannot listen on {path}: {error.strerror or error}; use a folder of our own") from None
    return made

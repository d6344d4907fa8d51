"""The data file of a drive: a regular file or a raw block device, opened, locked, and asked what it can do.

Moving bytes is the business of the backends; they share what is here: capacity, space, the lock, and whether the page
cache is bypassed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import time
from pathlib import Path
from typing import Final

from kvstore.device import syscalls
from kvstore.device.lock import lock_data_file, lock_for_reading, unlock_data_file
from kvstore.device.transfer import ALIGNMENT_BYTES
from kvstore.errors import Closed, InvalidRequest, Unavailable
from kvstore.limits import DEVICE_CLAIM_WAIT_NS, DEVICE_LOCK_WAIT_NS

_BLOCK_UNIT_BYTES: Final = 512  # unit of st_blocks, stat(2)
_UNSUPPORTED: Final = frozenset((errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY, errno.EINVAL))
_POLL_SECONDS: Final = 0.01
_RAM_FILE_SYSTEMS: Final = frozenset(("tmpfs", "ramfs"))


class DataFile:
    """An open, locked data file. Made by `open_data_file`; owned and closed by one device.

    Attributes:
        path: as the operator wrote it.
        fd: descriptor for positioned reads and writes; carries the lock.
        size_bytes: addressable bytes, a multiple of 4096.
        is_block_device: True for a raw drive.
        direct_io: True when the page cache is bypassed.
        direct_reason: one clause that says why.
        is_read_only: nothing can be written through it, and the lock is shared with others who only read.
        sector_bytes: the drive's own unit where it is known, else 512.
        file_system: its type by /proc/self/mountinfo, "block device" for a raw drive.
    """

    __slots__ = (
        "direct_io",
        "direct_reason",
        "fd",
        "file_system",
        "is_block_device",
        "is_read_only",
        "path",
        "sector_bytes",
        "size_bytes",
    )

    def __init__(self, path: str, fd: int, *, is_read_only: bool = False) -> None:
        self.path = path
        self.fd = fd
        self.is_read_only = is_read_only
        self.is_block_device = stat.S_ISBLK(os.fstat(fd).st_mode)
        self.size_bytes = 0
        self.direct_io = False
        self.direct_reason = "not asked for"
        self.sector_bytes = syscalls.block_device_sector_bytes(fd) if self.is_block_device else 512
        self.file_system = "block device" if self.is_block_device else file_system_type(os.fstat(fd).st_dev)

    def set_size(self, wanted_bytes: int) -> None:
        """Make `wanted_bytes` addressable (sparse in a file); 0 keeps what is there.

        Raises:
            InvalidRequest: not a multiple of 4096, more than a block device has, or more than the file system can
                address.
        """
        if wanted_bytes % ALIGNMENT_BYTES or wanted_bytes < 0:
            raise InvalidRequest(
                f"{self.path}: capacity {wanted_bytes} bytes is not a multiple of {ALIGNMENT_BYTES}; round it"
            )
        if self.is_block_device:
            present = syscalls.block_device_bytes(self.fd)
            if wanted_bytes > present:
                raise InvalidRequest(
                    f"{self.path}: capacity {wanted_bytes} bytes is more than the block device's {present}; "
                    "lower the capacity"
                )
        else:
            present = os.fstat(self.fd).st_size
            if present < wanted_bytes:
                self._grow(wanted_bytes)
        self.size_bytes = wanted_bytes or present - present % ALIGNMENT_BYTES
        if self.size_bytes == 0:
            raise InvalidRequest(
                f"{self.path} has {present} bytes, less than a block of {ALIGNMENT_BYTES}, and no capacity was given; "
                "set the capacity, or name the file of a node"
            )

    def _grow(self, wanted_bytes: int) -> None:
        try:
            os.ftruncate(self.fd, wanted_bytes)
        except OSError as error:
            raise InvalidRequest(
                f"{self.path}: {self.file_system} cannot address {wanted_bytes} bytes in one file "
                f"({error.strerror}); lower the capacity or use another file system"
            ) from error

    def try_direct_io(self) -> None:
        """Bypass the page cache if the file can, proved by a real read; else say why not.

        The flag is set on the open descriptor, so the lock that it carries stays held.
        """
        self.direct_io = False
        if self.file_system in _RAM_FILE_SYSTEMS:
            self.direct_reason = f"{self.file_system} lives in the page cache"
            return
        alignment = syscalls.direct_io_alignment(self.fd)
        if alignment is not None and not 0 < max(alignment) <= ALIGNMENT_BYTES:
            self.direct_reason = f"{self.file_system} asks for (memory, offset) alignment {alignment} for O_DIRECT"
            return
        if self.sector_bytes > ALIGNMENT_BYTES:
            self.direct_reason = f"sectors of {self.sector_bytes} bytes are above {ALIGNMENT_BYTES}"
            return
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            with mmap.mmap(-1, ALIGNMENT_BYTES) as page:
                os.preadv(self.fd, [page], 0)
        except OSError as error:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
            self.direct_reason = f"{self.file_system} refuses O_DIRECT ({error.strerror})"
            return
        self.direct_io = True
        self.direct_reason = f"O_DIRECT on {self.file_system}"

    def allocate(self, offset: int, length_bytes: int) -> None:
        """Reserve space for a range. Raises OSError, ENOSPC when the file system is full."""
        self._check_open()
        if self.is_block_device:
            return
        try:
            syscalls.fallocate(self.fd, syscalls.FALLOC_FL_KEEP_SIZE, offset, length_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise  # else: a file system without fallocate gives space at the first write

    def discard(self, offset: int, length_bytes: int) -> None:
        """Give the space of a range back; a no-op where the file system or drive cannot."""
        self._check_open()
        try:
            if self.is_block_device:
                syscalls.block_device_discard(self.fd, offset, length_bytes)
            else:
                syscalls.fallocate(
                    self.fd, syscalls.FALLOC_FL_PUNCH_HOLE | syscalls.FALLOC_FL_KEEP_SIZE, offset, length_bytes
                )
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise

    def allocated_bytes(self) -> int:
        """Physical bytes in use as `du` counts them; all of a block device."""
        self._check_open()
        return self.size_bytes if self.is_block_device else os.fstat(self.fd).st_blocks * _BLOCK_UNIT_BYTES

    def lock(self, *, wait_ns: int) -> None:
        """Keep others away. Raises Unavailable when another process has it for longer than `wait_ns`."""
        take = lock_for_reading if self.is_read_only else lock_data_file
        take(self.fd, self.path, wait_ns=wait_ns)

    def claim(self) -> None:
        """Go on with an exclusive descriptor of a block device, so that nobody can mount it under us (open(2), O_EXCL).

        The claim must be on the descriptor that discards: the kernel refuses BLKDISCARD on a claimed device else.

        Raises:
            Unavailable: it is mounted or claimed already.
        """
        deadline_ns = time.monotonic_ns() + DEVICE_CLAIM_WAIT_NS  # a dying owner's lock goes just before its claim
        while True:
            try:
                exclusive = os.open(self.path, _flags(self.is_read_only) | os.O_EXCL)
                break
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic_ns() >= deadline_ns:
                    raise Unavailable(
                        f"{self.path} is mounted or claimed by the kernel ({error.strerror}); unmount it, "
                        "or give another drive"
                    ) from error
            time.sleep(_POLL_SECONDS)
        self.close()
        self.fd = exclusive

    def close(self) -> None:
        """Unlock and close. Idempotent."""
        if self.fd >= 0:
            unlock_data_file(self.fd)
            os.close(self.fd)
            self.fd = -1

    def _check_open(self) -> None:
        if self.fd < 0:
            raise Closed(f"{self.path} was closed before the call")


def open_data_file(
    path: str | Path,
    *,
    size_bytes: int,
    create: bool,
    lock_wait_ns: int = DEVICE_LOCK_WAIT_NS,
    direct_io: bool = True,
    read_only: bool = False,
) -> DataFile:
    """Open and lock a data file and find out what it can do.

    Args:
        path: a regular file or a block device.
        size_bytes: capacity, a multiple of 4096; 0 takes the size found. A file that is larger keeps its bytes.
        create: make the file if it is missing (readable by its owner alone: it holds prompts' KV).
        lock_wait_ns: how long to wait for the last owner, whose writes may still be in flight.
        direct_io: try O_DIRECT; False is for tests and file systems known to be better off without.
        read_only: open what is there for reading alone, as its rights or its mount may ask for; `create` is False then.

    Raises:
        InvalidRequest: no such file, not a file or block device, not allowed, or an impossible size.
        Unavailable: another process has it.
    """
    name = os.fspath(path)
    file = DataFile(name, _open(name, create=create, read_only=read_only), is_read_only=read_only)
    try:
        file.lock(wait_ns=lock_wait_ns)
        if file.is_block_device:
            file.claim()
            file.lock(wait_ns=lock_wait_ns)
        file.set_size(size_bytes)
        if direct_io:
            file.try_direct_io()
    except BaseException:
        file.close()
        raise
    return file


def _flags(read_only: bool) -> int:
    return os.O_CLOEXEC | (os.O_RDONLY if read_only else os.O_RDWR)


def _open(name: str, *, create: bool, read_only: bool) -> int:
    assert not (create and read_only)
    try:
        fd = os.open(name, _flags(read_only) | (os.O_CREAT if create else 0), 0o600)
    except OSError as error:
        hints = {
            errno.ENOENT: "create the store first",
            errno.EROFS: "mount it for writing",
            errno.EACCES: "run this as the node's user or root, or change the owner",
        }
        hint = hints.get(error.errno or 0, "check the path and its owner")
        purpose = "reading" if read_only else "reading and writing"
        raise InvalidRequest(f"{name} cannot be opened for {purpose} ({error.strerror}); {hint}") from error
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        os.close(fd)
        raise InvalidRequest(f"{name} is neither a regular file nor a block device; give the path of one")
    return fd


def file_system_type(device_number: int) -> str:
    """Type of the mounted file system with this st_dev, by /proc/self/mountinfo (proc(5)); else a word for it."""
    wanted = f"{os.major(device_number)}:{os.minor(device_number)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "this file system"
    for line in lines:
        fields = line.split()
        if len(fields) > 2 and fields[2] == wanted and "-" in fields:
            return fields[fields.index("-") + 1]
    return "this file system"

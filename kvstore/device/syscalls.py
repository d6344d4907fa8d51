"""The few Linux calls that Python lacks: fallocate with flags, statx for direct I/O, block device ioctls."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from typing import Final

# linux/falloc.h
FALLOC_FL_KEEP_SIZE: Final = 0x01
FALLOC_FL_PUNCH_HOLE: Final = 0x02
# linux/fs.h
BLKDISCARD: Final = 0x1277
BLKSSZGET: Final = 0x1268
BLKGETSIZE64: Final = 0x80081272
# linux/stat.h: mask, and where the two numbers lie in struct statx (Linux 6.1)
STATX_DIOALIGN: Final = 0x2000
AT_EMPTY_PATH: Final = 0x1000
# linux/mman.h (Linux 5.14)
MADV_POPULATE_WRITE: Final = 23
_STATX_BYTES: Final = 256
_DIO_MEM_ALIGN_AT: Final = 0x98
_DIO_OFFSET_ALIGN_AT: Final = 0x9C

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def fallocate(fd: int, flags: int, offset: int, length_bytes: int) -> None:
    """fallocate(2). Raises OSError with its errno; EINTR is retried."""
    while _libc.fallocate(fd, flags, offset, length_bytes) != 0:
        code = ctypes.get_errno()
        if code != 4:  # EINTR
            raise OSError(code, f"fallocate of {length_bytes} bytes at {offset}: {os.strerror(code)}")


def populate(address: int, length_bytes: int) -> bool:
    """Brings pages into memory without changing them, other threads running meanwhile: madvise(2), whole pages.

    False where the kernel cannot.
    """
    return bool(_libc.madvise(address, length_bytes, MADV_POPULATE_WRITE) == 0)


def direct_io_alignment(fd: int) -> tuple[int, int] | None:
    """(memory, offset) alignment in bytes that O_DIRECT needs on this file, by statx(2) STATX_DIOALIGN.

    (0, 0) means that the file cannot do direct I/O; None that the kernel (before 6.1), the C library or the file
    system does not tell.
    """
    statx = getattr(_libc, "statx", None)
    if statx is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, b"", AT_EMPTY_PATH, STATX_DIOALIGN, answer) != 0:
        return None
    if not struct.unpack_from("<I", answer, 0)[0] & STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("=II", answer, _DIO_MEM_ALIGN_AT)
    return memory, offset


def block_device_bytes(fd: int) -> int:
    """Size of a block device, ioctl BLKGETSIZE64."""
    return int(struct.unpack("Q", fcntl.ioctl(fd, BLKGETSIZE64, bytes(8)))[0])


def block_device_sector_bytes(fd: int) -> int:
    """Logical sector size of a block device (512 or 4096), ioctl BLKSSZGET."""
    return int(struct.unpack("i", fcntl.ioctl(fd, BLKSSZGET, bytes(4)))[0])


def block_device_discard(fd: int, offset: int, length_bytes: int) -> None:
    """Tell a block device that a range is unused, ioctl BLKDISCARD. Raises OSError where it is not supported."""
    fcntl.ioctl(fd, BLKDISCARD, struct.pack("QQ", offset, length_bytes))

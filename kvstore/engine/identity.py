"""Whose is this drive? Looked at before anything is written: a store with its ids, nothing, or something else.

A drive is opened only by the node whose cluster id its superblock has, or if it has none. `release_drive` takes the id
off (the drive may be adopted by whoever opens it next), `erase_drive` makes it empty on purpose.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.device.lock import lock_data_file
from kvstore.device.syscalls import block_device_bytes
from kvstore.engine.format import SUPERBLOCK_OFFSETS, UUID_BYTES, Superblock, decode_superblock, encode_superblock
from kvstore.errors import FormatUnsupported, InvalidRequest, Unavailable
from kvstore.limits import DEVICE_LOCK_WAIT_NS, PAGE_BYTES, SECOND_NS, MiB

if TYPE_CHECKING:
    from typing_extensions import Buffer

NO_CLUSTER: Final = bytes(UUID_BYTES)

_FRESH_PAGE: Final = b"kvstore: erased by command, to be formatted".ljust(PAGE_BYTES, b"\0")
"""Written where a superblock would be: that a drive is empty is meant so."""

_PROBE_BYTES: Final = 1 * MiB
_ERASED_BYTES: Final = 64 * MiB
_LOCK_WAIT_NS: Final = SECOND_NS


class ContentKind(Enum):
    """What lies on a drive."""

    STORE = "store"
    EMPTY = "empty"
    FRESH = "fresh"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveContent:
    """What was found on a drive; `superblock` only of a STORE."""

    kind: ContentKind
    superblock: Superblock | None = None

    @property
    def disk_id(self) -> str:
        """In hex, as targets are named; "" where there is no store."""
        return self.superblock.disk_id.hex() if self.superblock is not None else ""


def look_at(file: Path) -> DriveContent:
    """What lies in a data file or on a block device, without a lock and without changing anything.

    Raises:
        OSError: It cannot be read. A file that is not there is EMPTY.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return DriveContent(kind=ContentKind.EMPTY)
    try:
        return _look(descriptor)
    finally:
        os.close(descriptor)


def _look(descriptor: int) -> DriveContent:
    found = [decode_superblock(page) for page in _superblock_pages(descriptor)]
    good = [superblock for superblock in found if superblock is not None]
    if good:
        newest = max(good, key=lambda superblock: superblock.revision)
        return DriveContent(kind=ContentKind.STORE, superblock=newest)
    head = os.pread(descriptor, _PROBE_BYTES, 0)
    if is_fresh(head):
        return DriveContent(kind=ContentKind.FRESH)
    return DriveContent(kind=ContentKind.FOREIGN if head.strip(b"\0") else ContentKind.EMPTY)


def _superblock_pages(descriptor: int) -> list[bytes]:
    pages = [os.pread(descriptor, PAGE_BYTES, offset) for offset in SUPERBLOCK_OFFSETS]
    return [page for page in pages if len(page) == PAGE_BYTES]


def is_fresh(head: Buffer) -> bool:
    """Whether a drive that begins so was erased by command."""
    return bytes(memoryview(head)[:PAGE_BYTES]) == _FRESH_PAGE


def refuse_foreign_file(file: Path) -> None:
    """Raises FormatUnsupported when something else lies there, before a device would make the file larger."""
    try:
        kind = look_at(file).kind
    except OSError:
        return  # opening it says better what is wrong
    if kind is ContentKind.FOREIGN:
        raise foreign_error(str(file))


def foreign_error(name: str) -> FormatUnsupported:
    """What is said of a drive with something else on it."""
    return FormatUnsupported(
        f"{name} is not empty and holds no readable kvstore superblock; nothing was written to it. "
        f"If it may be erased, run `kvstore drive format {name} --yes`, and start again"
    )


def check_cluster(superblock: Superblock, cluster_id: bytes, name: str, *, own_id: bytes = NO_CLUSTER) -> None:
    """Raises FormatUnsupported for a drive of another cluster; one without cluster is anybody's.

    Args:
        own_id: that the node had before it joined the cluster: its drives may bear it still.
    """
    if NO_CLUSTER not in (superblock.cluster_id, cluster_id) and superblock.cluster_id not in (cluster_id, own_id):
        raise FormatUnsupported(
            f"{name} holds disk {superblock.disk_id.hex()} of another node or cluster ({superblock.cluster_id.hex()}, "
            f"this one is {cluster_id.hex()}); `kvstore drive adopt {name} --yes` lets this node serve what is on it, "
            f"`kvstore drive format {name} --yes` erases it"
        )


def release_drive(file: Path) -> Superblock:
    """Takes the cluster id off a store, which is otherwise left as it is.

    Raises:
        InvalidRequest: There is no store.
        Unavailable: A node has it open, or it cannot be written.
    """
    with _Locked(file) as descriptor:
        found = _look(descriptor).superblock
        if found is None:
            raise InvalidRequest(f"{file} holds no store that could be adopted; `kvstore drive format` makes it empty")
        return _write_id(descriptor, found, NO_CLUSTER)


def hand_over_drive(file: Path, *, own_id: bytes, cluster_id: bytes) -> None:
    """A drive that bears `own_id` bears `cluster_id` from now on; any other one is left as it is.

    Raises:
        Unavailable: Another process has it open, or it cannot be written.
        OSError: It cannot be read.
    """
    before = look_at(file).superblock
    if own_id == NO_CLUSTER or before is None or before.cluster_id != own_id:
        return
    with _Locked(file, wait_ns=DEVICE_LOCK_WAIT_NS) as descriptor:
        _write_id(descriptor, before, cluster_id)


def _write_id(descriptor: int, found: Superblock, cluster_id: bytes) -> Superblock:
    written = replace(found, cluster_id=cluster_id, revision=found.revision + 1)
    for offset in SUPERBLOCK_OFFSETS:
        os.pwrite(descriptor, encode_superblock(written), offset)
        os.fsync(descriptor)
    return written


def erase_drive(file: Path) -> None:
    """Makes a drive empty on purpose, whatever is on it: the next node that opens it formats it.

    Raises:
        InvalidRequest: It is neither a file nor a block device.
        Unavailable: A node has it open, or it cannot be written.
    """
    with _Locked(file) as descriptor:
        if stat.S_ISBLK(os.fstat(descriptor).st_mode):
            left = min(block_device_bytes(descriptor), _ERASED_BYTES)
            zeros = bytes(MiB)
            for at in range(0, left, MiB):
                os.pwrite(descriptor, zeros[: left - at], at)
        else:
            os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _FRESH_PAGE, 0)
        os.fsync(descriptor)


class _Locked:
    """An open data file that no node has open; a foreign errno becomes an error of ours."""

    def __init__(self, file: Path, *, wait_ns: int = _LOCK_WAIT_NS) -> None:
        self._file = file
        self._wait_ns = wait_ns
        self._descriptor = -1

    def __enter__(self) -> int:
        try:
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)
        except OSError as error:
            hint = "mount it for writing" if error.errno == errno.EROFS else "name a data_dir of a node, or its device"
            raise InvalidRequest(f"{self._file} cannot be opened for writing: {error.strerror}; {hint}") from None
        mode = os.fstat(self._descriptor).st_mode
        try:
            if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
                raise InvalidRequest(f"{self._file} is neither a file nor a block device")
            lock_data_file(self._descriptor, str(self._file), wait_ns=self._wait_ns)
        except BaseException:
            os.close(self._descriptor)
            raise
        return self._descriptor

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        os.close(self._descriptor)
        if isinstance(error, OSError):
            raise Unavailable(f"{self._file} failed ({error.strerror}); check the drive") from error

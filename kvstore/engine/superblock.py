"""Making a drive into a store, and recognising one: both superblocks, read, chosen, repaired."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, replace

from kvstore.engine.blocking import BlockingIo, pages
from kvstore.engine.format import (
    FORMAT_VERSION,
    KNOWN_READ_ONLY,
    KNOWN_REFUSE,
    LOG_OFFSET,
    SUPERBLOCK_OFFSETS,
    UUID_BYTES,
    Superblock,
    decode_superblock,
    encode_superblock,
)
from kvstore.engine.identity import foreign_error, is_fresh
from kvstore.errors import FormatUnsupported, InvalidRequest, Unavailable
from kvstore.limits import (
    LOG_HALF_BYTES_MAX,
    LOG_HALF_BYTES_MIN,
    PAGE_BYTES,
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    SEGMENT_BYTES_SMALL,
    SEGMENT_HEADERS_STEP_BYTES,
    SEGMENTS_MAX,
    SEGMENTS_ON_DRIVE_MIN,
    KiB,
    MiB,
)

_FOREIGN_PROBE_BYTES = 1 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperblockFound:
    """The superblock in use, and which copies were bad on the drive."""

    superblock: Superblock
    bad_copies: tuple[int, ...]


def default_segment_bytes(capacity_bytes: int) -> int:
    """A 64th of the capacity, of a small drive up to a 32nd to reach SEGMENT_BYTES_SMALL, within limits.py's bounds.

    Each eviction costs milliseconds, and the rest that no record fits is lost: of 4 MiB a quarter with 1 MiB chunks, if
    not for the headers: so a page a MiB, and three of the segment itself, are added.
    """
    wanted = max(capacity_bytes // 64, min(capacity_bytes // 32, SEGMENT_BYTES_SMALL)) // PAGE_BYTES * PAGE_BYTES
    if wanted <= SEGMENT_BYTES_MIN:
        return SEGMENT_BYTES_MIN
    headers = (wanted // MiB + 3) * PAGE_BYTES
    steps = -(-headers // SEGMENT_HEADERS_STEP_BYTES)
    return min(wanted + steps * SEGMENT_HEADERS_STEP_BYTES, SEGMENT_BYTES_MAX)


def plan_superblock(
    *,
    capacity_bytes: int,
    segment_bytes: int = 0,
    cluster_id: bytes = bytes(UUID_BYTES),
    disk_id: bytes = b"",
    created_ns: int,
) -> Superblock:
    """Where everything goes on a new drive.

    Args:
        capacity_bytes: all that the store may use.
        segment_bytes: 0 takes the default.
        cluster_id: 16 bytes; zeros for a store without a cluster.
        disk_id: 16 bytes; empty draws one.
        created_ns: unix time.

    Raises:
        InvalidRequest: the capacity or the segment size is out of bounds.
    """
    segment = segment_bytes or default_segment_bytes(capacity_bytes)
    if segment % PAGE_BYTES or not SEGMENT_BYTES_MIN <= segment <= SEGMENT_BYTES_MAX:
        raise InvalidRequest(
            f"segment size {segment} bytes is not a multiple of {PAGE_BYTES} between {SEGMENT_BYTES_MIN} and "
            f"{SEGMENT_BYTES_MAX}; choose one that is, or leave it to the default"
        )
    half = capacity_bytes // 256 // PAGE_BYTES * PAGE_BYTES
    half = min(max(half, LOG_HALF_BYTES_MIN), LOG_HALF_BYTES_MAX)
    alignment = 1 * MiB if segment >= 16 * MiB else 64 * KiB
    superblock = Superblock(
        cluster_id=cluster_id,
        disk_id=disk_id or os.urandom(UUID_BYTES),
        segment_bytes=segment,
        log_half_bytes=half,
        segments_offset=-(-(LOG_OFFSET + 2 * half) // alignment) * alignment,
        capacity_bytes=capacity_bytes,
        created_ns=created_ns,
        revision=1,
    )
    check_capacity(superblock)
    return superblock


def check_capacity(superblock: Superblock) -> None:
    """Raises InvalidRequest when the capacity gives too few or too many segments of this size."""
    count = superblock.segment_count
    needed = superblock.segments_offset + SEGMENTS_ON_DRIVE_MIN * superblock.segment_bytes
    if count < SEGMENTS_ON_DRIVE_MIN:
        raise InvalidRequest(
            f"capacity {superblock.capacity_bytes} bytes holds {count} segments of {superblock.segment_bytes} bytes, "
            f"at least {SEGMENTS_ON_DRIVE_MIN} are needed; set the capacity to {needed} bytes or more"
        )
    if count > SEGMENTS_MAX:
        raise InvalidRequest(
            f"capacity {superblock.capacity_bytes} bytes makes {count} segments of {superblock.segment_bytes} bytes, "
            f"at most {SEGMENTS_MAX} can be named; use larger segments or several stores"
        )


def read_superblock(io: BlockingIo) -> SuperblockFound | None:
    """The newer good copy, or None on a drive without any (empty or foreign: `refuse_foreign` tells).

    Raises:
        FormatUnsupported: written by a newer program, or its fields contradict each other.
        Unavailable: neither copy can be read.
    """
    copies: list[Superblock | None] = []
    unreadable = 0
    for offset in SUPERBLOCK_OFFSETS:
        if offset + PAGE_BYTES > io.device.size_bytes:
            copies.append(None)
            continue
        try:
            copies.append(decode_superblock(io.read(offset, PAGE_BYTES)))
        except OSError:
            unreadable += 1
            copies.append(None)
    good = [copy for copy in copies if copy is not None]
    if not good:
        if unreadable == len(SUPERBLOCK_OFFSETS):
            raise Unavailable(f"both superblocks fail to read ({os.strerror(errno.EIO)}); replace the drive")
        return None
    newest = max(good, key=lambda copy: copy.revision)
    _check_features(newest)
    _check_fields(newest)
    bad = tuple(at for at, copy in enumerate(copies) if copy != newest)
    return SuperblockFound(superblock=newest, bad_copies=bad)


def _check_features(superblock: Superblock) -> None:
    if superblock.version > FORMAT_VERSION:
        raise FormatUnsupported(
            f"the drive has format version {superblock.version}, this program reads up to {FORMAT_VERSION}; "
            "use the newer program"
        )
    unknown = superblock.refuse & ~int(KNOWN_REFUSE) | superblock.read_only & ~KNOWN_READ_ONLY
    if unknown:
        raise FormatUnsupported(
            f"the drive uses features {unknown:#x} that this program does not know; use the newer program"
        )


def _check_fields(superblock: Superblock) -> None:
    sound = (
        SEGMENT_BYTES_MIN <= superblock.segment_bytes <= SEGMENT_BYTES_MAX
        and superblock.segment_bytes % PAGE_BYTES == 0
        and superblock.log_half_bytes % PAGE_BYTES == 0
        and superblock.log_half_bytes >= PAGE_BYTES
        and superblock.segments_offset >= LOG_OFFSET + 2 * superblock.log_half_bytes
        and superblock.segments_offset % PAGE_BYTES == 0
    )
    if not sound:
        raise FormatUnsupported(f"the superblock's fields contradict each other: {superblock}; restore or reformat")


def refuse_foreign(io: BlockingIo, name: str) -> None:
    """Make sure that a drive without superblock is empty, before anything is written to it.

    Raises:
        FormatUnsupported: something else is on it, or a store whose superblocks are both damaged.
    """
    length = min(_FOREIGN_PROBE_BYTES, io.device.size_bytes) // PAGE_BYTES * PAGE_BYTES
    head = io.read(0, length)
    if any(memoryview(head).cast("Q")) and not is_fresh(head):
        raise foreign_error(name)


def clear_fresh(io: BlockingIo) -> None:
    """Take off the mark of a drive that was erased by command, if it has one. Raises OSError."""
    if io.device.size_bytes >= PAGE_BYTES and is_fresh(io.read(0, PAGE_BYTES)):
        io.write(0, pages(PAGE_BYTES))


def write_superblocks(io: BlockingIo, superblock: Superblock) -> None:
    """Write both copies, one synced before the other is touched. Raises OSError."""
    for offset in SUPERBLOCK_OFFSETS:
        io.write(offset, encode_superblock(superblock))
        io.sync()


def repair_superblocks(io: BlockingIo, found: SuperblockFound) -> None:
    """Write the bad copies anew from the good one. Raises OSError."""
    for copy in found.bad_copies:
        io.write(SUPERBLOCK_OFFSETS[copy], encode_superblock(found.superblock))
        io.sync()


def change_capacity(superblock: Superblock, capacity_bytes: int) -> Superblock:
    """The superblock for another capacity. Raises InvalidRequest as `plan_superblock`."""
    changed = replace(superblock, capacity_bytes=capacity_bytes, revision=superblock.revision + 1)
    check_capacity(changed)
    return changed

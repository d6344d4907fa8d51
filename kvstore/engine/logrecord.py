"""The bytes of the log: 4 KiB blocks and the records in them. FORMAT.md is the text to this code.

A block is read alone: magic, checksum, disk, generation of the half and its own number tell whether it belongs to the
log that is being read, so a damaged block costs the records in it and nothing else. Records never span blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from kvstore.engine.format import ENTRY_BYTES, INDEX_KEY_BYTES
from kvstore.limits import COPIES_MAX, MANIFEST_BYTES_MAX, PAGE_BYTES, PUT_PARCEL_RECORDS_MAX
from kvstore.types.checksum import crc32c

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK_MAGIC: Final = b"KVLB"
_BLOCK = struct.Struct("<4sIQIIHH4xQ16s8x")
BLOCK_HEADER_BYTES: Final = 64
BLOCK_RECORD_BYTES: Final = PAGE_BYTES - BLOCK_HEADER_BYTES
assert _BLOCK.size == BLOCK_HEADER_BYTES


class RecordKind(IntEnum):
    """First byte of a log record."""

    COMMIT = 1
    TOMBSTONE = 2
    NAMESPACE = 3
    DROP = 4


class Reason(IntEnum):
    """Why a record died."""

    DELETE = 1
    QUARANTINE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHeader:
    """What a log block says of itself.

    Attributes:
        generation: of the half it was written to; the half with the highest complete generation is the log.
        number: of the block in its half.
        checkpoint_blocks: how many blocks at the start of this half are the checkpoint. The half counts only if a
            block behind them exists, because that is written after they were synced.
        used_bytes: of records behind the block's header.
        segment_generation: the highest generation that any segment had when the block was written.
    """

    generation: int
    number: int
    checkpoint_blocks: int
    used_bytes: int
    segment_generation: int


def encode_block(header: BlockHeader, disk_id: bytes, out: memoryview) -> None:
    """Finish a page whose records lie at `out[BLOCK_HEADER_BYTES:]` already: header, zeros behind the records, CRC."""
    _BLOCK.pack_into(
        out,
        0,
        BLOCK_MAGIC,
        0,
        header.generation,
        header.number,
        header.checkpoint_blocks,
        header.used_bytes,
        0,
        header.segment_generation,
        disk_id,
    )
    end = BLOCK_HEADER_BYTES + header.used_bytes
    out[end:PAGE_BYTES] = bytes(PAGE_BYTES - end)
    struct.pack_into("<I", out, 4, crc32c(out[8:PAGE_BYTES]))


def decode_block(page: Buffer, disk_id: bytes) -> BlockHeader | None:
    """The header of a good log block of this disk, else None."""
    view = memoryview(page)
    if len(view) < PAGE_BYTES or bytes(view[:4]) != BLOCK_MAGIC:
        return None
    _, crc, generation, number, checkpoint, used, _, segment_generation, disk = _BLOCK.unpack_from(view)
    if crc != crc32c(view[8:PAGE_BYTES]) or disk != disk_id or used > BLOCK_RECORD_BYTES:
        return None
    return BlockHeader(
        generation=generation,
        number=number,
        checkpoint_blocks=checkpoint,
        used_bytes=used,
        segment_generation=segment_generation,
    )


# --- records: kind u8 | flags u8 | length u16 (whole record, a multiple of 8) | body ----------------------------------
_HEAD = struct.Struct("<BBH")
_COMMIT = struct.Struct("<BBHIQ48s")
_COMMIT_HEAD = struct.Struct("<BBHIQ")
_TOMBSTONE = struct.Struct("<BBHIQII16s")
_NAMESPACE = struct.Struct("<BBHIIIII")
_DROP = struct.Struct("<BBHII4x")
COMMIT_BYTES: Final = _COMMIT.size
TOMBSTONE_BYTES: Final = _TOMBSTONE.size
NAMESPACE_PIECE_BYTES_MAX: Final = BLOCK_RECORD_BYTES - _NAMESPACE.size - 8
assert COMMIT_BYTES == _COMMIT_HEAD.size + ENTRY_BYTES == 16 + ENTRY_BYTES
assert COMMIT_BYTES % 8 == TOMBSTONE_BYTES % 8 == _DROP.size % 8 == 0
COMMITS_PER_BLOCK: Final = BLOCK_RECORD_BYTES // COMMIT_BYTES
assert PUT_PARCEL_RECORDS_MAX <= COMMITS_PER_BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A record is complete: `entry` (ENTRY_BYTES) says which, in this generation of this segment."""

    segment: int
    generation: int
    entry: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """All copies of a key at or before a place are dead.

    Places are ordered by (segment generation, page): room is handed out in that order, so whatever was put after the
    record died lies behind the place, and a copy that eviction made before lies in front of it.

    Attributes:
        key: the salted index key, INDEX_KEY_BYTES.
        generation, page: the last place, inclusive.
        segment: where the copy lay that the index knew. The tombstone is needed until that segment is freed.
        namespace: id of the record's namespace, of a delete that is remembered for others (graves.py); else 0.
    """

    key: bytes
    generation: int
    page: int
    segment: int
    reason: Reason
    namespace: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespacePiece:
    """Part of a namespace's manifest: bytes `offset..` of `total_bytes`, with the CRC32C of the whole manifest."""

    id: int
    generation: int
    total_bytes: int
    offset: int
    manifest_crc: int
    piece: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A namespace was dropped: only records of `generation` or later live.

    With `copies` (not 0) it says how many copies its records are to have, and names the generation that there is.
    """

    id: int
    generation: int
    copies: int = 0


LogRecord = Commit | Tombstone | NamespacePiece | Drop


def encode_commit(segment: int, generation: int, entry: bytes) -> bytes:
    """A commit record."""
    return _COMMIT.pack(RecordKind.COMMIT, 0, COMMIT_BYTES, segment, generation, entry)


def encode_commits(segment: int, generation: int, entries: bytes) -> bytes:
    """The commit records of several records of one segment, at most COMMITS_PER_BLOCK: they stand in one block."""
    if len(entries) == ENTRY_BYTES:
        return encode_commit(segment, generation, entries)
    head = _COMMIT_HEAD.pack(RecordKind.COMMIT, 0, COMMIT_BYTES, segment, generation)
    return b"".join([head + entries[at : at + ENTRY_BYTES] for at in range(0, len(entries), ENTRY_BYTES)])


def encode_tombstone(tombstone: Tombstone) -> bytes:
    """A tombstone record."""
    return _TOMBSTONE.pack(
        RecordKind.TOMBSTONE,
        tombstone.reason,
        TOMBSTONE_BYTES,
        tombstone.segment,
        tombstone.generation,
        tombstone.page,
        tombstone.namespace,
        tombstone.key,
    )


def encode_namespace(id: int, generation: int, manifest: bytes) -> list[bytes]:
    """The records of one manifest, in order."""
    crc = crc32c(manifest)
    records = []
    for offset in range(0, max(len(manifest), 1), NAMESPACE_PIECE_BYTES_MAX):
        piece = manifest[offset : offset + NAMESPACE_PIECE_BYTES_MAX]
        length = -(-(_NAMESPACE.size + len(piece)) // 8) * 8
        head = _NAMESPACE.pack(
            RecordKind.NAMESPACE, -len(piece) % 8, length, id, generation, len(manifest), offset, crc
        )
        records.append((head + piece).ljust(length, b"\0"))
    return records


def encode_drop(id: int, generation: int, *, copies: int = 0) -> bytes:
    """A drop record."""
    return _DROP.pack(RecordKind.DROP, copies, _DROP.size, id, generation)


def records_in(page: Buffer, header: BlockHeader) -> Iterator[LogRecord]:
    """The records of a good block, in order. Stops at one it does not understand: a newer program wrote it."""
    view = memoryview(page)
    at = BLOCK_HEADER_BYTES
    end = at + header.used_bytes
    while at + _HEAD.size <= end:
        kind, _, length = _HEAD.unpack_from(view, at)
        if length < 8 or length % 8 or at + length > end:
            return
        record = _decode(kind, view[at : at + length])
        if record is None:
            return
        yield record
        at += length


def _decode(kind: int, body: memoryview) -> LogRecord | None:
    if kind == RecordKind.COMMIT and len(body) == COMMIT_BYTES:
        _, _, _, segment, generation, entry = _COMMIT.unpack(body)
        return Commit(segment=segment, generation=generation, entry=entry)
    if kind == RecordKind.TOMBSTONE and len(body) == TOMBSTONE_BYTES:
        _, reason, _, segment, generation, page, namespace, key = _TOMBSTONE.unpack(body)
        known = Reason(reason) if reason in (Reason.DELETE, Reason.QUARANTINE) else Reason.DELETE
        return Tombstone(key=key, generation=generation, page=page, segment=segment, reason=known, namespace=namespace)
    if kind == RecordKind.NAMESPACE and len(body) >= _NAMESPACE.size:
        return _decode_namespace(body)
    if kind == RecordKind.DROP and len(body) == _DROP.size:
        _, copies, _, id, generation = _DROP.unpack(body)
        return Drop(id=id, generation=generation, copies=min(copies, COPIES_MAX))
    return None


def _decode_namespace(body: memoryview) -> NamespacePiece | None:
    _, padding, _, id, generation, total, offset, crc = _NAMESPACE.unpack_from(body)
    piece = bytes(body[_NAMESPACE.size : len(body) - padding])
    if padding >= 8 or total > MANIFEST_BYTES_MAX or offset + len(piece) > total:
        return None
    return NamespacePiece(id=id, generation=generation, total_bytes=total, offset=offset, manifest_crc=crc, piece=piece)


assert _TOMBSTONE.size == 8 + 16 + INDEX_KEY_BYTES

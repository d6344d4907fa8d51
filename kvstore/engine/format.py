"""The bytes of superblocks, segments and records. FORMAT.md is the text to this code; `logrecord.py` does the log.

All integers are little-endian. Every structure begins with a magic word and a CRC32C (RFC 3720) of everything behind
that CRC up to a stated end, so nothing that was torn, misplaced or flipped is taken for valid. A `decode_*` function
answers None for bytes that are not such a structure; it never raises on input and never trusts a length in it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvstore.limits import CHECKSUM_BYTES_MIN, PAGE_BYTES, PAYLOAD_BYTES_MAX
from kvstore.types.checksum import block_count, crc32c
from kvstore.types.content_id import content_id as content_id

if TYPE_CHECKING:
    from typing_extensions import Buffer

FORMAT_VERSION: Final = 1
UUID_BYTES: Final = 16
CONTENT_ID_BYTES: Final = 16
INDEX_KEY_BYTES: Final = 16

_CRC = struct.Struct("<I")
CHECKSUM_AT: Final = 4
CHECKED_AT: Final = 8
"""Every structure: magic at 0 (4 bytes), CRC32C at 4, what the CRC covers from 8 on."""


def _seal(page: memoryview | bytearray, end: int) -> None:
    """Write the checksum of `page[8:end]`."""
    _CRC.pack_into(page, CHECKSUM_AT, crc32c(memoryview(page)[CHECKED_AT:end]))


def _sealed(page: memoryview, magic: bytes, end: int) -> bool:
    """Whether the magic word and the checksum of `page[8:end]` are right."""
    return (
        len(page) >= end
        and bytes(page[:CHECKSUM_AT]) == magic
        and _CRC.unpack_from(page, CHECKSUM_AT)[0] == crc32c(page[CHECKED_AT:end])
    )


def page_count(length_bytes: int) -> int:
    """Pages of PAGE_BYTES that `length_bytes` bytes take."""
    return -(-length_bytes // PAGE_BYTES)


# --- superblock -----------------------------------------------------------------------------------------------------
SUPERBLOCK_MAGIC: Final = b"KVST"
SUPERBLOCK_OFFSETS: Final = (0, 64 * 1024)
"""Both copies, far enough apart that no single sector, page or RAID chunk takes both."""
LOG_OFFSET: Final = 128 * 1024
_SUPERBLOCK = struct.Struct("<4sIIIQQQ16s16sQQQQQQQ")


class Refuse(IntFlag):
    """Features that a program must know to open the drive at all. None exist in version 1."""

    NONE = 0


KNOWN_REFUSE: Final = Refuse.NONE
KNOWN_READ_ONLY: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Superblock:
    """What a drive says of itself.

    Attributes:
        version: of the format.
        compatible, read_only, refuse: feature flags. An unknown flag of the first kind may be ignored, one of the
            second allows reading only, one of the third refuses the drive.
        cluster_id, disk_id: 16 bytes each, drawn when the drive was made.
        segment_bytes: size of a segment, a multiple of PAGE_BYTES.
        log_half_bytes: size of one half of the log, a multiple of PAGE_BYTES.
        segments_offset: byte offset of segment 0.
        capacity_bytes: bytes the store may use, front matter included; may change from start to start.
        created_ns: when the drive was made, unix time.
        revision: raised each time the superblock is written; the higher copy is the newer one.
    """

    version: int = FORMAT_VERSION
    compatible: int = 0
    read_only: int = 0
    refuse: int = 0
    cluster_id: bytes
    disk_id: bytes
    segment_bytes: int
    log_half_bytes: int
    segments_offset: int
    capacity_bytes: int
    created_ns: int
    revision: int

    @property
    def segment_count(self) -> int:
        """Whole segments that the capacity holds."""
        return max(0, self.capacity_bytes - self.segments_offset) // self.segment_bytes

    def half_offset(self, half: int) -> int:
        """Byte offset of log half 0 or 1."""
        return LOG_OFFSET + half * self.log_half_bytes


def encode_superblock(superblock: Superblock) -> bytearray:
    """One page."""
    page = bytearray(PAGE_BYTES)
    _SUPERBLOCK.pack_into(
        page,
        0,
        SUPERBLOCK_MAGIC,
        0,
        superblock.version,
        PAGE_BYTES,
        superblock.compatible,
        superblock.read_only,
        superblock.refuse,
        superblock.cluster_id,
        superblock.disk_id,
        superblock.segment_bytes,
        superblock.log_half_bytes,
        LOG_OFFSET,
        superblock.segments_offset,
        superblock.capacity_bytes,
        superblock.created_ns,
        superblock.revision,
    )
    _seal(page, PAGE_BYTES)
    return page


def decode_superblock(page: Buffer) -> Superblock | None:
    """The superblock in a page, whatever its version and flags; None if it is not one or is damaged."""
    view = memoryview(page)
    if not _sealed(view, SUPERBLOCK_MAGIC, PAGE_BYTES):
        return None
    fields = _SUPERBLOCK.unpack_from(view)
    return Superblock(
        version=fields[2],
        compatible=fields[4],
        read_only=fields[5],
        refuse=fields[6],
        cluster_id=fields[7],
        disk_id=fields[8],
        segment_bytes=fields[9],
        log_half_bytes=fields[10],
        segments_offset=fields[12],
        capacity_bytes=fields[13],
        created_ns=fields[14],
        revision=fields[15],
    )


# --- segment header and footer ---------------------------------------------------------------------------------------
SEGMENT_MAGIC: Final = b"KVSG"
FOOTER_MAGIC: Final = b"KVSF"
_SEGMENT = struct.Struct("<4sIIIQ16sQ")
_FOOTER = struct.Struct("<4sIIIQ16sIIII")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """First page of a segment in use: this generation of the segment begins here."""

    segment: int
    generation: int
    disk_id: bytes
    opened_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFooter:
    """Last page of a sealed segment.

    Attributes:
        index_page: page in the segment where the index blocks begin; they end before the footer.
        block_count: index blocks.
        entry_count: entries in all of them.
        end_page: first page behind the last record.
    """

    segment: int
    generation: int
    disk_id: bytes
    index_page: int
    block_count: int
    entry_count: int
    end_page: int


def encode_segment_header(header: SegmentHeader) -> bytearray:
    """One page."""
    page = bytearray(PAGE_BYTES)
    _SEGMENT.pack_into(
        page, 0, SEGMENT_MAGIC, 0, header.segment, 0, header.generation, header.disk_id, header.opened_ns
    )
    _seal(page, PAGE_BYTES)
    return page


def decode_segment_header(page: Buffer) -> SegmentHeader | None:
    """The segment header in a page, or None."""
    view = memoryview(page)
    if not _sealed(view, SEGMENT_MAGIC, PAGE_BYTES):
        return None
    _, _, segment, _, generation, disk_id, opened_ns = _SEGMENT.unpack_from(view)
    return SegmentHeader(segment=segment, generation=generation, disk_id=disk_id, opened_ns=opened_ns)


def encode_segment_footer(footer: SegmentFooter) -> bytearray:
    """One page."""
    page = bytearray(PAGE_BYTES)
    _FOOTER.pack_into(
        page,
        0,
        FOOTER_MAGIC,
        0,
        footer.segment,
        0,
        footer.generation,
        footer.disk_id,
        footer.index_page,
        footer.block_count,
        footer.entry_count,
        footer.end_page,
    )
    _seal(page, PAGE_BYTES)
    return page


def decode_segment_footer(page: Buffer) -> SegmentFooter | None:
    """The segment footer in a page, or None."""
    view = memoryview(page)
    if not _sealed(view, FOOTER_MAGIC, PAGE_BYTES):
        return None
    _, _, segment, _, generation, disk_id, index_page, blocks, entries, end = _FOOTER.unpack_from(view)
    return SegmentFooter(
        segment=segment,
        generation=generation,
        disk_id=disk_id,
        index_page=index_page,
        block_count=blocks,
        entry_count=entries,
        end_page=end,
    )


# --- index blocks -----------------------------------------------------------------------------------------------------
INDEX_MAGIC: Final = b"KVIX"
_INDEX = struct.Struct("<4sIIIQHHI")
INDEX_HEADER_BYTES: Final = 32
ENTRY_BYTES: Final = 48
ENTRIES_PER_BLOCK: Final = (PAGE_BYTES - INDEX_HEADER_BYTES) // ENTRY_BYTES

ENTRY_DTYPE: Final = np.dtype(
    [
        ("key0", "<u8"),
        ("key1", "<u8"),
        ("namespace", "<u4"),
        ("namespace_generation", "<u4"),
        ("page", "<u4"),
        ("pages", "<u2"),
        ("header_pages", "u1"),
        ("part", "u1"),
        ("payload_bytes", "<u4"),
        ("position", "<u4"),
        ("access", "<u4"),
        ("reserved", "<u4"),
    ]
)
"""One record as index blocks and commit records list it. Units: pages, bytes, access ticks."""
assert ENTRY_DTYPE.itemsize == ENTRY_BYTES
assert _INDEX.size == INDEX_HEADER_BYTES
ENTRY: Final = struct.Struct("<16sIIIHBBIIII")
assert ENTRY.size == ENTRY_BYTES

Entries = npt.NDArray[np.void]
"""A structured array of ENTRY_DTYPE."""


def index_block_count(entry_count: int) -> int:
    """Index blocks that hold so many entries."""
    return -(-entry_count // ENTRIES_PER_BLOCK)


def encode_index_blocks(entries: Entries, *, segment: int, generation: int, out: memoryview) -> None:
    """Write the index blocks of a segment into `out`, exactly `index_block_count(len(entries))` pages."""
    for block in range(index_block_count(len(entries))):
        part = entries[block * ENTRIES_PER_BLOCK : (block + 1) * ENTRIES_PER_BLOCK]
        page = out[block * PAGE_BYTES : (block + 1) * PAGE_BYTES]
        _INDEX.pack_into(page, 0, INDEX_MAGIC, 0, segment, block, generation, len(part), 0, 0)
        used = INDEX_HEADER_BYTES + len(part) * ENTRY_BYTES
        page[INDEX_HEADER_BYTES:used] = part.tobytes()
        page[used:] = bytes(PAGE_BYTES - used)
        _seal(page, PAGE_BYTES)


def decode_index_blocks(data: Buffer, *, segment: int, generation: int) -> tuple[Entries, int]:
    """Entries of all good blocks in `data` (whole pages), and how many blocks were bad.

    A block of another segment, generation or place than its own is bad. Entries are not checked against the segment's
    bounds: `entries_in_bounds` does.
    """
    view = memoryview(data)
    blocks = len(view) // PAGE_BYTES
    counts = np.empty(blocks, dtype=np.int64)
    for block in range(blocks):
        page = view[block * PAGE_BYTES : (block + 1) * PAGE_BYTES]
        counts[block] = _index_block_entries(page, segment=segment, generation=generation, block=block)
    if blocks == 1 and counts[0] >= 0:
        return np.frombuffer(view, dtype=ENTRY_DTYPE, count=int(counts[0]), offset=INDEX_HEADER_BYTES).copy(), 0
    good = counts >= 0
    rows = np.frombuffer(view, dtype=np.uint8, count=blocks * PAGE_BYTES).reshape(blocks, PAGE_BYTES)[good]
    body = rows[:, INDEX_HEADER_BYTES : INDEX_HEADER_BYTES + ENTRIES_PER_BLOCK * ENTRY_BYTES]
    entries = np.ascontiguousarray(body).reshape(-1).view(ENTRY_DTYPE)
    held = counts[good]
    if len(held) and held.min() < ENTRIES_PER_BLOCK:
        entries = entries[(np.arange(ENTRIES_PER_BLOCK) < held[:, None]).reshape(-1)]
    return entries, int(blocks - good.sum())


def _index_block_entries(page: memoryview, *, segment: int, generation: int, block: int) -> int:
    """How many entries a good index block holds, -1 for a bad one."""
    if not _sealed(page, INDEX_MAGIC, PAGE_BYTES):
        return -1
    _, _, of_segment, of_block, of_generation, count, _, _ = _INDEX.unpack_from(page)
    if (of_segment, of_generation, of_block) != (segment, generation, block) or count > ENTRIES_PER_BLOCK:
        return -1
    return int(count)


def footer_behind(
    page: Buffer, *, segment: int, generation: int, disk_id: bytes, segment_pages: int
) -> SegmentFooter | None:
    """The footer that must stand behind a segment's last index block, for one that is damaged; None if it is no block.

    Args:
        page: the last page but one of the segment.
    """
    view = memoryview(page)
    if not _sealed(view, INDEX_MAGIC, PAGE_BYTES):
        return None
    _, _, _, block, _, _, _, _ = _INDEX.unpack_from(view)
    count = _index_block_entries(view, segment=segment, generation=generation, block=block)
    index_page = segment_pages - 2 - block
    if count < 0 or index_page < 1:
        return None
    return SegmentFooter(
        segment=segment,
        generation=generation,
        disk_id=disk_id,
        index_page=index_page,
        block_count=block + 1,
        entry_count=block * ENTRIES_PER_BLOCK + count,
        end_page=index_page,
    )


def distinct(values: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """The distinct values in order, and for each value which of them it is. Made for few distinct among many."""
    if not len(values):
        return values, np.zeros(0, dtype=np.int64)
    if (values == values[0]).all():
        return values[:1], np.zeros(len(values), dtype=np.int64)
    ordered = np.sort(values)
    fresh = np.ones(len(ordered), dtype=np.bool_)
    fresh[1:] = ordered[1:] != ordered[:-1]
    found = ordered[fresh]
    return found, np.searchsorted(found, values)


def entry_spaces(entries: Entries) -> npt.NDArray[np.uint64]:
    """For each entry its namespace id << 32 | namespace generation."""
    ids, generations = entries["namespace"].astype(np.uint64), entries["namespace_generation"].astype(np.uint64)
    spaces: npt.NDArray[np.uint64] = ids << np.uint64(32) | generations
    return spaces


def entries_in_bounds(entries: Entries, segment_pages: int) -> npt.NDArray[np.bool_]:
    """Which entries describe a record that can lie in a segment of so many pages."""
    page = entries["page"].astype(np.int64)
    pages = entries["pages"].astype(np.int64)
    header = entries["header_pages"].astype(np.int64)
    payload = entries["payload_bytes"].astype(np.int64)
    padded = header + -(-payload // PAGE_BYTES)
    inside: npt.NDArray[np.bool_] = (page >= 1) & (header >= 1) & (pages == padded) & (page + pages < segment_pages)
    return inside


# --- record header ----------------------------------------------------------------------------------------------------
RECORD_MAGIC: Final = b"KVRC"
RECORD: Final = struct.Struct("<4sIHHIQQIIII16s32s32s32s32sQQ")
CRC_TABLE_AT: Final = 256
assert RECORD.size <= CRC_TABLE_AT
RECORD_GAP: Final = bytes(CRC_TABLE_AT - RECORD.size)


def header_page_count(payload_bytes: int, block_bytes: int) -> int:
    """Pages of a record's header: fixed fields and the CRC table, one word per block."""
    return page_count(CRC_TABLE_AT + 4 * block_count(payload_bytes, block_bytes))


def record_page_count(payload_bytes: int, block_bytes: int) -> int:
    """Pages of a whole record: header pages and padded payload."""
    return header_page_count(payload_bytes, block_bytes) + page_count(payload_bytes)


HEADER_PAGES_MAX: Final = header_page_count(PAYLOAD_BYTES_MAX, CHECKSUM_BYTES_MIN)
assert HEADER_PAGES_MAX < 256, "header_pages of an entry is one byte"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """The header of one record.

    Attributes:
        key, parent, run_head, namespace: 32 bytes each; parent and run head are zeros where unknown.
        namespace_generation: of the namespace when it was written.
        position: of the chunk in its chain, or api.POSITION_NONE.
        part: 0 dense, else 1 + index of the sparse part.
        segment, page, segment_generation: where the record was written; another place means a misdirected write.
        payload_bytes, block_bytes: length and checksum block.
        content_id: 16 bytes.
        crc_table: u32 LE per block.
        written_ns: unix time of the put.
    """

    key: bytes
    parent: bytes
    run_head: bytes
    namespace: bytes
    namespace_generation: int
    position: int
    part: int
    segment: int
    page: int
    segment_generation: int
    payload_bytes: int
    block_bytes: int
    content_id: bytes
    crc_table: bytes
    written_ns: int

    @property
    def header_pages(self) -> int:
        """Pages before the payload."""
        return page_count(CRC_TABLE_AT + len(self.crc_table))


def encode_record_header(header: RecordHeader, out: memoryview, *, checksum: bool = True) -> None:
    """Write a header into `out`, exactly its pages long. `checksum=False` leaves that to `place_record_header`."""
    fill_record_header(
        out,
        key=header.key,
        parent=header.parent,
        run_head=header.run_head,
        namespace=header.namespace,
        namespace_generation=header.namespace_generation,
        position=header.position,
        part=header.part,
        payload_bytes=header.payload_bytes,
        block_bytes=header.block_bytes,
        content_id=header.content_id,
        crc_table=header.crc_table,
        written_ns=header.written_ns,
        segment=header.segment,
        page=header.page,
        segment_generation=header.segment_generation,
    )
    if checksum:
        _seal(out, len(out))


def fill_record_header(
    out: memoryview,
    *,
    key: bytes,
    parent: bytes,
    run_head: bytes,
    namespace: bytes,
    namespace_generation: int,
    position: int,
    part: int,
    payload_bytes: int,
    block_bytes: int,
    content_id: bytes,
    crc_table: bytes,
    written_ns: int,
    segment: int = 0,
    page: int = 0,
    segment_generation: int = 0,
) -> None:
    """Write the fields of a RecordHeader into `out`, exactly its pages long, without place and checksum.

    `place_record_header` adds those. A put comes here without a RecordHeader, which costs as much as the rest of it.
    """
    table_end = CRC_TABLE_AT + len(crc_table)
    RECORD.pack_into(
        out,
        0,
        RECORD_MAGIC,
        0,
        page_count(table_end),
        part,
        block_bytes,
        payload_bytes,
        segment_generation,
        segment,
        page,
        position,
        len(crc_table) // 4,
        content_id,
        key,
        parent,
        run_head,
        namespace,
        namespace_generation,
        written_ns,
    )
    out[RECORD.size : CRC_TABLE_AT] = RECORD_GAP
    out[CRC_TABLE_AT:table_end] = crc_table
    if table_end < len(out):
        out[table_end:] = bytes(len(out) - table_end)


def decode_record_header(data: Buffer) -> RecordHeader | None:
    """The record header at the start of `data`; None if it is damaged, or longer than `data`."""
    view = memoryview(data)
    if len(view) < PAGE_BYTES or bytes(view[:CHECKSUM_AT]) != RECORD_MAGIC:
        return None
    fields = RECORD.unpack_from(view)
    header_pages, block_bytes, payload_bytes, crc_count = fields[2], fields[4], fields[5], fields[10]
    if block_bytes == 0 or payload_bytes > PAYLOAD_BYTES_MAX:
        return None
    if crc_count != block_count(payload_bytes, block_bytes):
        return None
    table_end = CRC_TABLE_AT + 4 * crc_count
    if header_pages != page_count(table_end) or not _sealed(view, RECORD_MAGIC, header_pages * PAGE_BYTES):
        return None
    return RecordHeader(
        part=fields[3],
        block_bytes=block_bytes,
        payload_bytes=payload_bytes,
        segment_generation=fields[6],
        segment=fields[7],
        page=fields[8],
        position=fields[9],
        content_id=fields[11],
        key=fields[12],
        parent=fields[13],
        run_head=fields[14],
        namespace=fields[15],
        namespace_generation=fields[16],
        written_ns=fields[17],
        crc_table=bytes(view[CRC_TABLE_AT:table_end]),
    )


_PLACE = struct.Struct("<QII")
_PLACE_AT: Final = 24


def place_record_header(header: memoryview, *, segment_generation: int, segment: int, page: int) -> None:
    """Give an encoded header (exactly its pages) a new place: the writer knows it late, re-insertion changes it."""
    _PLACE.pack_into(header, _PLACE_AT, segment_generation, segment, page)
    _seal(header, len(header))

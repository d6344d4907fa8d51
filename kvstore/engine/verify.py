"""Is this what was asked for? Header and payload of a record that was just read from the drive, checked before use.

Nothing from the drive is trusted before its checksum is right, and nothing is served before the full key, the
namespace, its generation and the place agree. FORMAT.md describes the header; this module unpacks the fields it
needs at once and takes locations apart in place, because it runs for every record of a cold read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import Final, Protocol

from kvstore.engine.api import NamespaceRef
from kvstore.engine.cache import RecordFacts
from kvstore.engine.format import CRC_TABLE_AT, RECORD_MAGIC
from kvstore.engine.location import DEPTH_BITS, PAGE_BITS, PAGES_BITS
from kvstore.limits import PAGE_BYTES, PAYLOAD_BYTES_MAX
from kvstore.types.checksum import crc32c, crcs_match

# magic, CRC, header pages, (part, block, payload), segment generation, segment, page, (position), CRC words,
# content id, key, (parent, run head), namespace, namespace generation
_HEADER: Final = struct.Struct("<4sIH14xQII4xI16s32s64x32sQ")
# The same, with what a run of records has in common left as bytes: magic, CRC, shape (header pages, part, block,
# payload), segment generation, segment, page, CRC words, content id, key, space (namespace, its generation)
RUN_HEADER: Final = struct.Struct("<4sI16sQII4xI16s32s64x40s")
_SHAPE: Final = struct.Struct("<HHIQ")
_SHAPE_AT: Final = 8
GENERATION: Final = struct.Struct("<Q")
CRC_COVERS_FROM: Final = 8
_PLACE_SHIFT: Final = PAGES_BITS + DEPTH_BITS
_PAGES_MASK: Final = (1 << PAGES_BITS) - 1


class Fault(Enum):
    """Why a header is not the wanted record's."""

    CORRUPT = "corrupt"
    """Checksum, place or lengths are wrong: the bytes are not what was written here."""
    OTHER = "other"
    """A sound record of another key: two keys share the 16 bytes that the index knows."""


def check_header(
    data: memoryview, ref: NamespaceRef, key: bytes, location: int, segment_generation: int
) -> RecordFacts | Fault:
    """The facts of a record whose header begins `data`.

    Args:
        data: at least the header pages; less is CORRUPT.
        location, segment_generation: where it was read from, as the index and the segment table say.
    """
    if len(data) < PAGE_BYTES:
        return Fault.CORRUPT
    (
        magic,
        crc,
        header_pages,
        generation_found,
        segment,
        page,
        crc_count,
        content_id,
        found_key,
        namespace,
        generation,
    ) = _HEADER.unpack_from(data)
    end = header_pages * PAGE_BYTES
    if magic != RECORD_MAGIC or end > len(data) or crc32c(data[CRC_COVERS_FROM:end]) != crc:
        return Fault.CORRUPT
    if generation_found != segment_generation or (segment << PAGE_BITS | page) != location >> _PLACE_SHIFT:
        return Fault.CORRUPT
    length_bytes = (location >> DEPTH_BITS & _PAGES_MASK) * PAGE_BYTES
    layout = record_layout(bytes(data[_SHAPE_AT : _SHAPE_AT + _SHAPE.size]), crc_count, length_bytes)
    if layout is None:
        return Fault.CORRUPT
    _, _, table_end, block_bytes, record_bytes = layout
    if found_key != key or namespace != ref.digest or generation != ref.generation:
        return Fault.OTHER
    return RecordFacts(
        key, record_bytes, block_bytes, bytes(data[CRC_TABLE_AT:table_end]), content_id, header_pages, location
    )


class WantedRecord(Protocol):
    """A whole record that was read.

    Attributes:
        key, location: as asked for.
        at, length_bytes: where it lies in what was read.
    """

    key: bytes
    location: int
    at: int
    length_bytes: int


def check_run(
    view: memoryview,
    wanted: Sequence[WantedRecord],
    ref: NamespaceRef,
    segment_generation: int,
    *,
    sums: Sequence[bool] | None = None,
) -> list[RecordFacts | Fault]:
    """Check neighbours that were read together, headers and payloads, in one loop: see `check_header`.

    Records of a run mostly have the same lengths, so what follows from those is worked out when they change.

    Args:
        view: what was read.
        wanted: in any order; each at least a page long.
        ref: of them all.
        sums: whether the payload of each is summed; None for all. Headers always are.
    """
    found: list[RecordFacts | Fault] = []
    unpack, magic_wanted = RUN_HEADER.unpack_from, RECORD_MAGIC
    space_wanted = ref.digest + GENERATION.pack(ref.generation)
    known: tuple[bytes, int, int] | None = None
    layout: Layout | None = None
    header_pages = header_bytes = table_end = block_bytes = record_bytes = 0
    for number, one in enumerate(wanted):
        at, location = one.at, one.location
        magic, crc, shape, generation, segment, page, crc_count, content_id, key, space = unpack(view, at)
        if known != (shape, crc_count, one.length_bytes):
            known = (shape, crc_count, one.length_bytes)
            layout = record_layout(*known)
            if layout is not None:
                header_pages, header_bytes, table_end, block_bytes, record_bytes = layout
        if (
            layout is None
            or magic != magic_wanted
            or crc32c(view[at + CRC_COVERS_FROM : at + header_bytes]) != crc
            or generation != segment_generation
            or segment << PAGE_BITS | page != location >> _PLACE_SHIFT
        ):
            found.append(Fault.CORRUPT)
            continue
        if key != one.key or space != space_wanted:
            found.append(Fault.OTHER)
            continue
        crcs = bytes(view[at + CRC_TABLE_AT : at + table_end])
        start = at + header_bytes
        payload = view[start : start + record_bytes]
        if (sums is not None and not sums[number]) or (
            crc32c(payload).to_bytes(4, "little") == crcs if crc_count == 1 else crcs_match(payload, block_bytes, crcs)
        ):
            found.append(RecordFacts(key, record_bytes, block_bytes, crcs, content_id, header_pages, location))
        else:
            found.append(Fault.CORRUPT)
    return found


Layout = tuple[int, int, int, int, int]
"""Header pages, their bytes, end of the CRC table, checksum block, payload bytes."""


@lru_cache(maxsize=256)
def record_layout(shape: bytes, crc_count: int, length_bytes: int) -> Layout | None:
    """What a header says of lengths, None where that is not of a record of `length_bytes` padded bytes."""
    header_pages, _, block_bytes, record_bytes = _SHAPE.unpack(shape)
    table_end = CRC_TABLE_AT + 4 * crc_count
    if (
        not block_bytes
        or record_bytes > PAYLOAD_BYTES_MAX
        or crc_count != -(-record_bytes // block_bytes)
        or header_pages != -(-table_end // PAGE_BYTES)
        or (header_pages - (-record_bytes // PAGE_BYTES)) * PAGE_BYTES != length_bytes
    ):
        return None
    return header_pages, header_pages * PAGE_BYTES, table_end, block_bytes, record_bytes


def header_pages_of(data: memoryview) -> int:
    """Header pages that a first header page claims, unverified; 0 where it is no header."""
    if len(data) < PAGE_BYTES or bytes(data[:4]) != RECORD_MAGIC:
        return 0
    return int(struct.unpack_from("<H", data, CRC_COVERS_FROM)[0])

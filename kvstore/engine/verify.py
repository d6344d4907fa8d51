"""Is this what was asked for? Header and payload of a record that was just read from the drive, checked before use.

Nothing from the drive is trusted before its checksum is right, and nothing is served before the full key, the
namespace, its generation and the place agree. FORMAT.md describes the header; this module unpacks the fields it
needs at once and takes locations apart in place, because it runs for every record of a cold read.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import Final

from kvstore.engine.api import NamespaceRef
from kvstore.engine.cache import RecordFacts
from kvstore.engine.format import CRC_TABLE_AT, RECORD_MAGIC
from kvstore.engine.location import DEPTH_BITS, PAGE_BITS, PAGES_BITS
from kvstore.limits import PAGE_BYTES, PAYLOAD_BYTES_MAX
from kvstore.types.checksum import crc32c

# magic, CRC, header pages, part, block, payload, segment generation, segment, page, position, CRC words, content id,
# key, (parent, run head), namespace, namespace generation
_HEADER: Final = struct.Struct("<4sIHHIQQII4xI16s32s64x32sQ")
_CRC_COVERS_FROM: Final = 8
_U32: Final = struct.Struct("<I")
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
        _,
        block_bytes,
        record_bytes,
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
    if magic != RECORD_MAGIC or end > len(data) or crc32c(data[_CRC_COVERS_FROM:end]) != crc:
        return Fault.CORRUPT
    if generation_found != segment_generation or (segment << PAGE_BITS | page) != location >> _PLACE_SHIFT:
        return Fault.CORRUPT
    table_end = CRC_TABLE_AT + 4 * crc_count
    if (
        not block_bytes
        or record_bytes > PAYLOAD_BYTES_MAX
        or crc_count != -(-record_bytes // block_bytes)
        or header_pages != -(-table_end // PAGE_BYTES)
        or header_pages - (-record_bytes // PAGE_BYTES) != (location >> DEPTH_BITS) & _PAGES_MASK
    ):
        return Fault.CORRUPT
    if found_key != key or namespace != ref.digest or generation != ref.generation:
        return Fault.OTHER
    return RecordFacts(
        key, record_bytes, block_bytes, bytes(data[CRC_TABLE_AT:table_end]), content_id, header_pages, location
    )


def header_pages_of(data: memoryview) -> int:
    """Header pages that a first header page claims, unverified; 0 where it is no header."""
    if len(data) < PAGE_BYTES or bytes(data[:4]) != RECORD_MAGIC:
        return 0
    return int(struct.unpack_from("<H", data, _CRC_COVERS_FROM)[0])


def blocks_match(payload: memoryview, block_bytes: int, crcs: bytes | memoryview) -> bool:
    """Whether `payload`, which begins at a block, has these checksums, one u32 LE per block."""
    length = len(payload)
    if length <= block_bytes:
        return not length or bool(_U32.unpack_from(crcs)[0] == crc32c(payload))
    at = 0
    for (crc,) in _U32.iter_unpack(crcs):
        if crc32c(payload[at : at + block_bytes]) != crc:
            return False
        at += block_bytes
    return at >= length

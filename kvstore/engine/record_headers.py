"""The headers of many records of one shape, written in one loop: what `format.fill_record_header` does for one."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.engine.format import (
    CHECKED_AT,
    CHECKSUM_AT,
    CRC_TABLE_AT,
    RECORD,
    RECORD_GAP,
    RECORD_MAGIC,
    page_count,
)
from kvstore.limits import PAGE_BYTES
from kvstore.types.checksum import block_count, crc32c

_CRC: Final = struct.Struct("<I")


def write_record_headers(
    out: memoryview,
    *,
    keys: Sequence[bytes],
    parents: Sequence[bytes],
    run_heads: Sequence[bytes],
    namespace: bytes,
    namespace_generation: int,
    positions: Sequence[int],
    payload_bytes: int,
    block_bytes: int,
    content_ids: Sequence[bytes],
    crc_tables: Sequence[bytes],
    written_ns: int,
    segment: int,
    pages: Iterable[int],
    segment_generation: int,
) -> None:
    """The headers of dense records of one shape, whole and with their checksums, one behind the other in `out`."""
    words = block_count(payload_bytes, block_bytes)
    table_end = CRC_TABLE_AT + 4 * words
    header_pages = page_count(table_end)
    header_bytes = header_pages * PAGE_BYTES
    rest = bytes(header_bytes - table_end)
    pack, gap_at, crc, pack_crc = RECORD.pack_into, RECORD.size, crc32c, _CRC.pack_into
    at = 0
    for key, parent, run_head, position, its_id, table, page in zip(
        keys, parents, run_heads, positions, content_ids, crc_tables, pages, strict=True
    ):
        pack(
            out,
            at,
            RECORD_MAGIC,
            0,
            header_pages,
            0,
            block_bytes,
            payload_bytes,
            segment_generation,
            segment,
            page,
            position,
            words,
            its_id,
            key,
            parent,
            run_head,
            namespace,
            namespace_generation,
            written_ns,
        )
        out[at + gap_at : at + header_bytes] = RECORD_GAP + table + rest
        pack_crc(out, at + CHECKSUM_AT, crc(out[at + CHECKED_AT : at + header_bytes]))
        at += header_bytes

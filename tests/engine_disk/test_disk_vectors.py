"""Golden vectors of every structure on the drive: `tests/vectors/disk.json`, readable from any language.

Each case has its fields and its bytes as hex, without the zeros at the end of the last page. Run this file as a program
to print the vectors of the present code: a difference is a new format version, never an accident.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.engine.format import (
    ENTRY,
    ENTRY_DTYPE,
    RecordHeader,
    SegmentFooter,
    SegmentHeader,
    Superblock,
    content_id,
    decode_index_blocks,
    decode_record_header,
    decode_segment_footer,
    decode_segment_header,
    decode_superblock,
    encode_index_blocks,
    encode_record_header,
    encode_segment_footer,
    encode_segment_header,
    encode_superblock,
    header_page_count,
    place_record_header,
)
from kvstore.engine.logrecord import (
    BLOCK_HEADER_BYTES,
    BlockHeader,
    Commit,
    Drop,
    NamespacePiece,
    Reason,
    Tombstone,
    decode_block,
    encode_block,
    encode_commit,
    encode_drop,
    encode_namespace,
    encode_tombstone,
    records_in,
)
from kvstore.engine.namespaces import generation_salt
from kvstore.limits import PAGE_BYTES

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "disk.json"
DISK_ID = bytes(range(16))
KEY = bytes(range(32, 64))
ENTRIES: tuple[dict[str, Any], ...] = (
    {
        "key": bytes(range(16)),
        "namespace": 1,
        "namespace_generation": 1,
        "page": 1,
        "pages": 17,
        "header_pages": 1,
        "part": 0,
        "payload_bytes": 65_536,
        "position": 0,
        "access": 5,
    },
    {
        "key": bytes(range(16, 32)),
        "namespace": 2,
        "namespace_generation": 9,
        "page": 18,
        "pages": 3,
        "header_pages": 1,
        "part": 2,
        "payload_bytes": 4_097,
        "position": 0xFFFF_FFFF,
        "access": 4_000_000_000,
    },
)


def entry_bytes(fields: dict[str, Any]) -> bytes:
    return ENTRY.pack(*fields.values(), 0)


def superblock() -> Superblock:
    return Superblock(
        cluster_id=b"c" * 16,
        disk_id=DISK_ID,
        segment_bytes=1 << 20,
        log_half_bytes=1 << 18,
        segments_offset=(128 + 512) << 10,
        capacity_bytes=64 << 20,
        created_ns=1_790_000_000_000_000_000,
        revision=3,
    )


def record_header(blocks: int) -> RecordHeader:
    table = b"".join((7 * block + 1).to_bytes(4, "little") for block in range(blocks))
    payload = 4096 * blocks - 5
    return RecordHeader(
        key=KEY,
        parent=b"p" * 32,
        run_head=b"r" * 32,
        namespace=b"n" * 32,
        namespace_generation=2,
        position=7,
        part=1,
        segment=3,
        page=18,
        segment_generation=77,
        payload_bytes=payload,
        block_bytes=4096,
        content_id=content_id(payload, table, b"12345678"),
        crc_table=table,
        written_ns=1_790_000_000_000_000_001,
    )


def log_block() -> tuple[BlockHeader, bytes]:
    records = [
        *encode_namespace(1, 1, b"a manifest, cut short"),
        encode_commit(3, 77, entry_bytes(ENTRIES[0])),
        encode_tombstone(Tombstone(key=bytes(range(16)), generation=77, page=40, segment=3, reason=Reason.DELETE)),
        encode_tombstone(
            Tombstone(key=bytes(range(16, 32)), generation=78, page=9, segment=4, reason=Reason.QUARANTINE)
        ),
        encode_drop(1, 2),
    ]
    body = b"".join(records)
    header = BlockHeader(generation=12, number=5, checkpoint_blocks=2, used_bytes=len(body), segment_generation=78)
    return header, body


def encoded() -> dict[str, bytes]:
    """Every vector as the code of today writes it."""
    vectors = {
        "superblock": bytes(encode_superblock(superblock())),
        "segment_header": bytes(
            encode_segment_header(SegmentHeader(segment=3, generation=77, disk_id=DISK_ID, opened_ns=123))
        ),
        "segment_footer": bytes(
            encode_segment_footer(
                SegmentFooter(
                    segment=3, generation=77, disk_id=DISK_ID, index_page=254, block_count=1, entry_count=2, end_page=21
                )
            )
        ),
    }
    entries = np.frombuffer(b"".join(map(entry_bytes, ENTRIES)), dtype=ENTRY_DTYPE)
    page = memoryview(bytearray(PAGE_BYTES))
    encode_index_blocks(entries, segment=3, generation=77, out=page)
    vectors["index_block"] = bytes(page)
    for name, blocks in (("record_header", 3), ("record_header_long", 1_500)):
        header = record_header(blocks)
        out = memoryview(bytearray(header.header_pages * PAGE_BYTES))
        encode_record_header(header, out)
        vectors[name] = bytes(out)
    header_of_block, body = log_block()
    page = memoryview(bytearray(PAGE_BYTES))
    page[BLOCK_HEADER_BYTES : BLOCK_HEADER_BYTES + len(body)] = body
    encode_block(header_of_block, DISK_ID, page)
    vectors["log_block"] = bytes(page)
    vectors["generation_salt"] = generation_salt(b"n" * 32, 2)
    return vectors


def described() -> dict[str, object]:
    """The file's contents."""
    fields: dict[str, object] = {
        "superblock": "version 1, page 4096, no flags, cluster 16 * 'c', disk 00..0f, segment 1 MiB, log half 256 KiB, "
        "segments at 655360, capacity 64 MiB, created 1790000000000000000 ns, revision 3",
        "segment_header": "segment 3, generation 77, disk 00..0f, opened 123 ns",
        "segment_footer": "segment 3, generation 77, disk 00..0f, index page 254, 1 block, 2 entries, end page 21",
        "index_block": [
            {name: value.hex() if isinstance(value, bytes) else value for name, value in entry.items()}
            for entry in ENTRIES
        ],
        "record_header": "3 blocks of 4096, payload 12283, key 20..3f, parent 32 * 'p', run head 32 * 'r', namespace "
        "32 * 'n' generation 2, position 7, part 1, segment 3 generation 77 page 18, CRC word i = 7 i + 1, "
        "nonce '12345678', written 1790000000000000001 ns",
        "record_header_long": "the same with 1500 blocks: two header pages",
        "log_block": "generation 12, number 5, checkpoint blocks 2, segment generation 78; records: namespace 1 "
        "generation 1 'a manifest, cut short'; commit of the first index entry in segment 3 generation 77; tombstone "
        "of key 00..0f up to (77, 40) in segment 3 (delete); tombstone of 10..1f up to (78, 9) in segment 4 "
        "(quarantine); drop of namespace 1 to generation 2",
        "generation_salt": "namespace digest 32 * 'n', generation 2",
    }
    return {
        name: {"fields": fields[name], "length_bytes": len(data), "hex": data.rstrip(b"\0").hex()}
        for name, data in encoded().items()
    }


def golden(name: str) -> bytes:
    case = json.loads(VECTORS.read_text())[name]
    return bytes.fromhex(case["hex"]).ljust(case["length_bytes"], b"\0")


@pytest.mark.parametrize("name", sorted(encoded()))
def test_the_bytes_are_those_of_version_1(name: str) -> None:
    assert encoded()[name] == golden(name)


def test_the_vectors_decode_to_their_fields() -> None:
    assert decode_superblock(golden("superblock")) == superblock()
    segment = decode_segment_header(golden("segment_header"))
    assert segment == SegmentHeader(segment=3, generation=77, disk_id=DISK_ID, opened_ns=123)
    footer = decode_segment_footer(golden("segment_footer"))
    assert footer is not None
    assert (footer.index_page, footer.block_count, footer.entry_count, footer.end_page) == (254, 1, 2, 21)
    entries, bad = decode_index_blocks(golden("index_block"), segment=3, generation=77)
    assert bad == 0
    assert [entry.tobytes() for entry in entries] == [entry_bytes(entry) for entry in ENTRIES]
    assert decode_record_header(golden("record_header")) == record_header(3)
    assert decode_record_header(golden("record_header_long")) == record_header(1_500)
    assert header_page_count(record_header(1_500).payload_bytes, 4096) == 2
    block = golden("log_block")
    header = decode_block(block, DISK_ID)
    assert header == log_block()[0]
    assert header is not None
    kinds = [type(record) for record in records_in(block, header)]
    assert kinds == [NamespacePiece, Commit, Tombstone, Tombstone, Drop]


@pytest.mark.parametrize("name", ["superblock", "segment_header", "segment_footer", "record_header", "log_block"])
def test_any_flipped_bit_is_noticed(name: str) -> None:
    decoders: dict[str, Callable[[bytes], object]] = {
        "superblock": decode_superblock,
        "segment_header": decode_segment_header,
        "segment_footer": decode_segment_footer,
        "record_header": decode_record_header,
        "log_block": lambda page: decode_block(page, DISK_ID),
    }
    decode = decoders[name]
    good = golden(name)
    for at in range(0, len(good), 7):
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        assert decode(bytes(bad)) is None, f"byte {at}"


def test_an_index_block_elsewhere_is_bad() -> None:
    block = golden("index_block")
    for segment, generation in ((4, 77), (3, 78)):
        assert decode_index_blocks(block, segment=segment, generation=generation)[1] == 1
    assert decode_index_blocks(bytes(PAGE_BYTES) + block, segment=3, generation=77)[1] == 2


def test_a_log_block_of_another_disk_is_none() -> None:
    assert decode_block(golden("log_block"), b"x" * 16) is None


def test_placing_a_header_changes_only_its_place() -> None:
    out = memoryview(bytearray(golden("record_header")))
    place_record_header(out, segment_generation=5, segment=6, page=7)
    moved = decode_record_header(out)
    assert moved is not None
    assert (moved.segment_generation, moved.segment, moved.page) == (5, 6, 7)
    place_record_header(out, segment_generation=77, segment=3, page=18)
    assert bytes(out) == golden("record_header")


if __name__ == "__main__":
    print(json.dumps(described(), indent=1))

"""The body of DATA and WRITER_WRITE frames: descriptors of 48 bytes, then the CRC words of all slices, in order.

    slice: item u32 | offset u64 | length u32 | status u8 | flags u8 | crc_count u16 | content_id 16s
           | record_bytes u64 | block_bytes u32

The frame header's `flags` field holds the number of slices. The payloads follow, concatenated in the order of the
slices. A slice begins at a multiple of `block_bytes` and carries either no CRC words (an offered record: they came with
the offer) or exactly one for each block that it covers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from kvstore.errors import InvalidRequest
from kvstore.limits import CHECKSUM_BYTES_MIN, PAYLOAD_BYTES_MAX, SLICE_BYTES_MAX, SLICES_PER_FRAME_MAX

DESCRIPTOR_BYTES: Final = 48
FLAG_LAST: Final = 1
FLAG_FINAL: Final = 1 << 31
"""In the header's flags of a DATA or PLACED frame, beside the number of slices: every item of the GET (GET_INTO) is a
hit, all of it has been sent (lies in its place), and no END follows. Only where both sides have named
Feature.FINAL_DATA."""
_FORMAT: Final = "IQIBBH16sQI"
_ONE = struct.Struct("<" + _FORMAT)
assert _ONE.size == DESCRIPTOR_BYTES
assert SLICES_PER_FRAME_MAX < FLAG_FINAL


class Slice(NamedTuple):
    """A piece of one record. A tuple, not a dataclass: up to hundreds are made for each frame.

    Attributes:
        item: index in the request (GET, OFFER) or writer id (WRITER_WRITE).
        offset: of its first byte in the record.
        length_bytes: at most SLICE_BYTES_MAX.
        status: 0, or a MissReason with length 0.
        last: nothing more of this item follows.
        content_id: 16 bytes.
        record_bytes: length of the whole record.
        block_bytes: checksum block of the record.
        crcs: u32 LE for each block, or empty.
    """

    item: int
    offset: int
    length_bytes: int
    status: int
    last: bool
    content_id: bytes
    record_bytes: int
    block_bytes: int
    crcs: bytes


NO_CONTENT_ID: Final = bytes(16)


@lru_cache(maxsize=SLICES_PER_FRAME_MAX)
def _many(count: int) -> struct.Struct:
    return struct.Struct("<" + _FORMAT * count)


def encode_slices(slices: Sequence[Slice]) -> bytes:
    """The body of a frame that carries `slices`, at most SLICES_PER_FRAME_MAX; its header's flags are their number."""
    if len(slices) == 1:
        item, offset, length, status, last, content_id, record_bytes, block_bytes, crcs = slices[0]
        return (
            _ONE.pack(item, offset, length, status, last, len(crcs) >> 2, content_id, record_bytes, block_bytes) + crcs
        )
    fields: list[int | bytes] = []
    pieces = [b""]
    for item, offset, length, status, last, content_id, record_bytes, block_bytes, crcs in slices:
        fields += (item, offset, length, status, last, len(crcs) >> 2, content_id, record_bytes, block_bytes)
        pieces.append(crcs)
    pieces[0] = _many(len(slices)).pack(*fields)
    return b"".join(pieces)


def encode_fields(fields: Sequence[int | bytes], tables: Sequence[bytes]) -> bytes:
    """The same, made of the fields of all descriptors one after the other, and the CRC table of each."""
    return _many(len(tables)).pack(*fields) + b"".join(tables)


def decode_slices(body: bytes | bytearray | memoryview, *, count: int, payload_bytes: int | None) -> list[Slice]:
    """The slices of a frame, checked: their lengths sum to the payload, their CRC words fill the rest of the body.

    Args:
        body: of the frame.
        count: from the header's flags.
        payload_bytes: from the header; None where the payload does not travel.

    Raises:
        InvalidRequest: Anything does not fit; the text names it.
    """
    if not 1 <= count <= SLICES_PER_FRAME_MAX:
        raise InvalidRequest(f"DATA frame of {count} slices; from 1 to {SLICES_PER_FRAME_MAX} are allowed")
    at = count * DESCRIPTOR_BYTES
    if len(body) < at:
        raise InvalidRequest(
            f"DATA body of {len(body)} bytes is too short for {count} slices of {DESCRIPTOR_BYTES} bytes"
        )
    raw = bytes(body)
    slices: list[Slice] = []
    left = payload_bytes or 0
    for fields in _ONE.iter_unpack(memoryview(raw)[:at]):
        item, offset, length, status, flags, crc_count, content_id, record_bytes, block_bytes = fields
        end = at + crc_count * 4
        one = Slice(
            item, offset, length, status, flags == FLAG_LAST, content_id, record_bytes, block_bytes, raw[at:end]
        )
        if (
            length > SLICE_BYTES_MAX
            or offset + length > record_bytes
            or record_bytes > PAYLOAD_BYTES_MAX
            or flags > FLAG_LAST
            or (length and (block_bytes < CHECKSUM_BYTES_MIN or offset % block_bytes))
            or (crc_count and (not length or crc_count != -(-length // block_bytes)))
            or (status and length)
        ):
            raise InvalidRequest(_defect(one, flags=flags, crc_count=crc_count))
        slices.append(one)
        left -= length
        at = end
    if left and payload_bytes is not None:
        raise InvalidRequest(f"DATA payload and the lengths of its {count} slices differ by {left} bytes")
    if at != len(raw):
        raise InvalidRequest(f"DATA body of {len(raw)} bytes, its {count} slices with their CRC words need {at}")
    return slices


def _defect(one: Slice, *, flags: int, crc_count: int) -> str:
    where = f"slice of item {one.item} at {one.offset}"
    if one.length_bytes > SLICE_BYTES_MAX:
        return f"{where} has {one.length_bytes} bytes, the limit is {SLICE_BYTES_MAX}"
    if one.record_bytes > PAYLOAD_BYTES_MAX:
        return f"{where} is of a record of {one.record_bytes} bytes, the limit is {PAYLOAD_BYTES_MAX}"
    if one.offset + one.length_bytes > one.record_bytes:
        return f"{where} ends at {one.offset + one.length_bytes}, its record has {one.record_bytes} bytes"
    if flags > FLAG_LAST:
        return f"{where} has unknown flags {flags:#x}"
    if one.status:
        return f"{where} has status {one.status} and {one.length_bytes} bytes; a miss has none"
    if not one.length_bytes:
        return f"{where} has no bytes and {crc_count} CRC words"
    if one.block_bytes < CHECKSUM_BYTES_MIN:
        return f"{where} has checksum blocks of {one.block_bytes} bytes, the least is {CHECKSUM_BYTES_MIN}"
    if one.offset % one.block_bytes:
        return f"{where} does not begin at a checksum block of {one.block_bytes} bytes"
    return (
        f"{where} of {one.length_bytes} bytes has {crc_count} CRC words, blocks of {one.block_bytes} bytes "
        f"need {-(-one.length_bytes // one.block_bytes)}"
    )

"""Slice descriptors: round trip, and every inconsistency is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.limits import PAYLOAD_BYTES_MAX, SLICE_BYTES_MAX, SLICES_PER_FRAME_MAX
from kvstore.wire.slices import Slice, decode_slices, encode_slices


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    block = draw(st.sampled_from([4096, 8192, 65536, 1 << 20]))
    offset = block * draw(st.integers(0, 3))
    length = draw(st.integers(0, min(SLICE_BYTES_MAX, 5 * block)))
    words = -(-length // block)
    return Slice(
        item=draw(st.integers(0, 0xFFFF_FFFF)),
        offset=offset,
        length_bytes=length,
        status=0 if length else draw(st.integers(0, 255)),
        last=draw(st.booleans()),
        content_id=draw(st.binary(min_size=16, max_size=16)),
        record_bytes=offset + length + draw(st.integers(0, 10)),
        block_bytes=block,
        crcs=draw(st.sampled_from([b"", bytes(range(256))[:4] * words])),
    )


@given(st.lists(slices(), min_size=1, max_size=40))
def test_slices_round_trip(batch: list[Slice]) -> None:
    body = encode_slices(batch)
    payload_bytes = sum(one.length_bytes for one in batch)
    assert decode_slices(body, count=len(batch), payload_bytes=payload_bytes) == batch
    assert decode_slices(memoryview(bytearray(body)), count=len(batch), payload_bytes=payload_bytes) == batch


@given(st.lists(slices(), min_size=1, max_size=5), st.data())
def test_damaged_slices_are_decoded_or_refused(batch: list[Slice], data: st.DataObject) -> None:
    body = bytearray(encode_slices(batch))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    count = data.draw(st.integers(0, len(batch) + 1))
    try:
        found = decode_slices(bytes(body), count=count, payload_bytes=sum(one.length_bytes for one in batch))
    except InvalidRequest:
        return
    assert sum(one.length_bytes for one in found) == sum(one.length_bytes for one in batch)


WHOLE = Slice(7, 0, 65536, 0, True, bytes(16), 65536, 65536, b"abcd")


def raw(item: int, offset: int, length: int, status: int, flags: int, words: int, record: int, block: int) -> bytes:
    return struct.pack("<IQIBBH16sQI", item, offset, length, status, flags, words, bytes(16), record, block) + bytes(
        words * 4
    )


@pytest.mark.parametrize(
    ("body", "count", "payload_bytes", "says"),
    [
        (b"", 0, 0, "0 slices"),
        (b"", SLICES_PER_FRAME_MAX + 1, 0, str(SLICES_PER_FRAME_MAX + 1)),
        (encode_slices([WHOLE])[:40], 1, 65536, "40 bytes"),
        (encode_slices([WHOLE]), 1, 65535, "differ by -1"),
        (encode_slices([WHOLE]) + b"x", 1, 65536, "need 52"),
        (encode_slices([WHOLE])[:-1], 1, 65536, "need 52"),
        (raw(3, 0, SLICE_BYTES_MAX + 1, 0, 1, 0, SLICE_BYTES_MAX + 1, 1 << 20), 1, SLICE_BYTES_MAX + 1, "1048577"),
        (raw(3, 0, 1, 0, 1, 1, PAYLOAD_BYTES_MAX + 1, 4096), 1, 1, str(PAYLOAD_BYTES_MAX)),
        (raw(3, 4096, 4096, 0, 1, 1, 8191, 4096), 1, 4096, "ends at 8192"),
        (raw(3, 0, 4096, 0, 2, 1, 4096, 4096), 1, 4096, "flags 0x2"),
        (raw(3, 0, 4096, 1, 1, 1, 4096, 4096), 1, 4096, "status 1"),
        (raw(3, 0, 4096, 0, 1, 1, 4096, 0), 1, 4096, "blocks of 0 bytes"),
        (raw(3, 1, 4095, 0, 1, 1, 4096, 4096), 1, 4095, "does not begin"),
        (raw(3, 0, 8192, 0, 1, 1, 8192, 4096), 1, 8192, "need 2"),
        (raw(3, 0, 0, 0, 1, 1, 0, 0), 1, 0, "CRC words"),
    ],
)
def test_an_inconsistency_is_refused_by_name(body: bytes, count: int, payload_bytes: int, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        decode_slices(body, count=count, payload_bytes=payload_bytes)

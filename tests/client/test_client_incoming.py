"""One record on its way in: a hit only when every byte asked for has come and matched, whatever order slices take."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import Unavailable
from kvstore.types.checksum import crc_table
from kvstore.types.results import MissReason
from kvstore.wire.slices import NO_CONTENT_ID, Slice
from kvstore_client.incoming import HIT, OPEN, IncomingRecord
from kvstore_client.ranges import Spans, span_bytes
from kvstore_client.regions import Region

BLOCK = 4096
WASTE = memoryview(bytearray(1 << 20))
IDENT = bytes(range(16))


def piece(payload: bytes, low: int, high: int, *, last: bool, content_id: bytes = IDENT) -> Slice:
    data = payload[low:high]
    return Slice(0, low, high - low, 0, last, content_id, len(payload), BLOCK, crc_table(data, BLOCK))


def receive(record: IncomingRecord, one: Slice, data: bytes) -> None:
    views = record.land(one, WASTE)
    assert sum(map(len, views)) == one.length_bytes
    at = 0
    for view in views:
        view[:] = data[at : at + len(view)]
        at += len(view)
    record.arrived(one, views)


def regions_of(sizes: list[int]) -> tuple[list[bytearray], Region]:
    memory = [bytearray(b"\xaa" * size) for size in sizes]
    return memory, Region([memoryview(one) for one in memory] or [memoryview(b"")])


def cut(total: int, count: int, dice: random.Random) -> list[int]:
    points = sorted(dice.randint(0, total) for _ in range(count - 1))
    return [high - low for low, high in zip([0, *points], [*points, total], strict=True)]


@settings(deadline=None)
@given(st.integers(0, 40_000), st.integers(0, 2**32), st.data())
def test_slices_of_any_order_make_a_hit_of_the_right_bytes(length: int, seed: int, data: st.DataObject) -> None:
    dice = random.Random(seed)
    payload = dice.randbytes(length)
    spans: Spans | None = None
    if data.draw(st.booleans()) and length:
        points = sorted({dice.randint(0, length) for _ in range(6)})
        spans = tuple(zip(points[::2], points[1::2], strict=False)) or ((0, length),)
    wanted = length if spans is None else span_bytes(spans)
    memory, region = regions_of(cut(wanted, data.draw(st.integers(1, 4)), dice))
    record = IncomingRecord(region, 0, length, True, spans, NO_CONTENT_ID)
    step = BLOCK * data.draw(st.integers(1, 3))
    cuts = [(low, min(low + step, length)) for low in range(0, length, step)]
    if spans is not None:
        cuts = [(low, high) for low, high in cuts if any(a < high and low < b for a, b in spans)]
    dice.shuffle(cuts)
    for at, (low, high) in enumerate(cuts or [(0, 0)]):
        assert record.status == OPEN
        receive(record, piece(payload, low, high, last=at >= len(cuts) - 1), payload[low:high])
    assert record.status == HIT
    assert record.wanted_bytes == wanted
    expected = payload if spans is None else b"".join(payload[a:b] for a, b in spans)
    assert b"".join(memory) == expected


@settings(deadline=None)
@given(st.integers(1, 40_000), st.integers(0, 2**32))
def test_a_missing_slice_is_never_a_hit(length: int, seed: int) -> None:
    dice = random.Random(seed)
    payload = dice.randbytes(length)
    _, region = regions_of([length])
    record = IncomingRecord(region, 0, length, True, None, NO_CONTENT_ID)
    cuts = [(low, min(low + BLOCK, length)) for low in range(0, length, BLOCK)]
    lost = dice.randrange(len(cuts))
    rest = cuts[:lost] + cuts[lost + 1 :]
    rest += [dice.choice(rest)] if rest else []  # one of them twice: as many bytes as the whole record has
    with pytest.raises(Unavailable, match="before all had been sent"):  # noqa: PT012  the last one raises
        for at, (low, high) in enumerate(rest or [(0, 0)]):
            receive(record, piece(payload, low, high, last=at >= len(rest) - 1), payload[low:high])
    assert record.status == OPEN


@settings(deadline=None)
@given(st.integers(1, 40_000), st.integers(0, 2**32))
def test_a_flipped_bit_is_never_a_hit(length: int, seed: int) -> None:
    dice = random.Random(seed)
    payload = dice.randbytes(length)
    _, region = regions_of([length])
    record = IncomingRecord(region, 0, length, True, None, NO_CONTENT_ID)
    at, bit = dice.randrange(length), 1 << dice.randrange(8)
    garbled = payload[:at] + bytes([payload[at] ^ bit]) + payload[at + 1 :]
    for low in range(0, length, BLOCK):
        high = min(low + BLOCK, length)
        receive(record, piece(payload, low, high, last=high == length), garbled[low:high])
    assert record.status == MissReason.CORRUPT
    assert record.is_doubtful
    assert record.mismatches == 1
    record.restart()
    receive(record, piece(payload, 0, length, last=True), payload)
    assert record.status == HIT


def test_two_copies_are_not_one_record() -> None:
    payload = bytes(2 * BLOCK)
    _, region = regions_of([2 * BLOCK])
    record = IncomingRecord(region, 0, 2 * BLOCK, True, None, NO_CONTENT_ID)
    receive(record, piece(payload, 0, BLOCK, last=False), payload[:BLOCK])
    other = piece(payload, BLOCK, 2 * BLOCK, last=True, content_id=bytes(range(1, 17)))
    assert record.land(other, WASTE)[0].obj is WASTE.obj
    assert record.status == MissReason.CORRUPT


def test_the_copy_asked_for_or_none() -> None:
    payload = bytes(BLOCK)
    memory, region = regions_of([BLOCK])
    record = IncomingRecord(region, 0, BLOCK, True, None, bytes(range(1, 17)))
    receive(record, piece(payload, 0, BLOCK, last=True), payload)
    assert record.status == MissReason.CORRUPT
    assert memory[0] == b"\xaa" * BLOCK


@pytest.mark.parametrize(
    ("exact", "room", "status"), [(True, 99, "layout"), (True, 101, "layout"), (False, 99, "layout")]
)
def test_another_length_touches_no_memory(exact: bool, room: int, status: str) -> None:
    payload = bytes(100)
    memory, region = regions_of([room])
    record = IncomingRecord(region, 0, room, exact, None, NO_CONTENT_ID)
    receive(record, piece(payload, 0, 100, last=True), payload)
    assert record.status == MissReason[status.upper()]
    assert memory[0] == b"\xaa" * room


def test_what_comes_after_a_miss_goes_to_waste() -> None:
    payload = bytes(BLOCK)
    memory, region = regions_of([BLOCK])
    record = IncomingRecord(region, 0, BLOCK, True, None, NO_CONTENT_ID)
    assert record.land(Slice(0, 0, 0, MissReason.IO, True, bytes(16), 0, 0, b""), WASTE) == []
    receive(record, piece(payload, 0, BLOCK, last=True), payload)
    assert record.status == MissReason.IO
    assert memory[0] == b"\xaa" * BLOCK


def test_nothing_is_written_over_a_record_after_its_last_slice() -> None:
    payload = bytes(range(256)) * 32
    memory, region = regions_of([len(payload)])
    record = IncomingRecord(region, 0, len(payload), True, None, NO_CONTENT_ID)
    one = piece(payload, 0, len(payload), last=True)
    views = record.land(one, WASTE)
    views[0][:] = payload
    # the next frame's head may be parsed before the bytes of this one were looked at
    with pytest.raises(Unavailable, match="that it called the last"):
        record.land(piece(payload, 0, BLOCK, last=False), WASTE)
    record.arrived(one, views)
    assert record.status == HIT
    assert bytes(memory[0]) == payload
    record.restart()
    receive(record, piece(payload, 0, len(payload), last=True), payload)
    assert record.status == HIT

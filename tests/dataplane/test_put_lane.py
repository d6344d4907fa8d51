"""The lane of granted payload: what comes as our client sends it is compared, all else is read the general way."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ChecksumMismatch
from kvstore.limits import FRAME_AIM_BYTES, SLICE_BYTES_MAX, KiB, MiB
from kvstore.transport.base import Landing
from kvstore.transport.put_lane import PutLane, replay
from kvstore.types.checksum import crc_table
from kvstore.wire.frames import Frame, FrameReader
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.messages import Cancel
from kvstore.wire.slices import NO_CONTENT_ID, Slice, encode_slices

REQUEST_ID = 7
BLOCK = 4 * KiB


class Events:
    """`FetchEvents` of a lane."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.tables = b""
        self.good: list[bool] = []

    def arrived(self, one: Slice, arrived_bytes: int) -> None:
        raise AssertionError("the lane tells of whole records only")

    def fetched(self, item: int) -> None:
        raise AssertionError("the lane tells of whole records only")

    def came(self, items: Sequence[int], tables: bytes, *, are_good: bool) -> None:
        self.items += items
        self.good += [are_good] * len(items)
        self.tables += tables


class Anywhere:
    """`PayloadSink` of the reader that a lane is left for."""

    def place(self, frame: Frame) -> Sequence[memoryview]:
        return [memoryview(bytearray(frame.payload_bytes))]


def value_of(item: int, length: int) -> bytes:
    return random.Random(item).randbytes(length)


def frame_of(items: Sequence[int], length: int, **changes: object) -> bytes:
    """A DATA frame as our client makes it, but for `changes` of its first slice."""
    slices = [
        Slice(n, 0, length, 0, True, NO_CONTENT_ID, length, BLOCK, crc_table(value_of(n, length), BLOCK)) for n in items
    ]
    slices[0] = slices[0]._replace(**changes)  # type: ignore[arg-type]
    payload = b"".join(value_of(n, length) for n in items)
    head = encode_head(
        FrameType.DATA,
        REQUEST_ID,
        encode_slices(slices),
        payload_bytes=len(payload),
        epoch=random.Random(length).randrange(1 << 40),
        flags=len(slices),
    )
    return head + payload


def frames_of(items: Sequence[int], length: int) -> list[bytes]:
    step = max(1, FRAME_AIM_BYTES // length)
    return [frame_of(items[at : at + step], length) for at in range(0, len(items), step)]


def lane_for(length: int, groups: Sequence[Sequence[int]]) -> tuple[PutLane, dict[int, bytearray]]:
    lane = PutLane(REQUEST_ID, record_bytes=length, block_bytes=BLOCK)
    memory = {item: bytearray(length) for group in groups for item in group}
    for group in groups:
        lane.expect([Landing(item, memoryview(memory[item])) for item in group])
    return lane, memory


def feed(lane: PutLane, events: Events, data: bytes, steps: Sequence[int]) -> bytes | None:
    """Gives bytes to a lane, so many at a time. None when it took all, else what had not been given to it."""
    at = 0
    sizes = list(steps)
    while at < len(data) and not lane.is_over:
        room = sum(map(len, lane.rest))
        assert 0 < room <= lane.expected_bytes
        count = min(room, len(data) - at, sizes.pop() if sizes else room)
        piece = memoryview(data)[at : at + count]
        for view in list(lane.rest):
            view[: len(piece)] = piece[: len(view)]
            piece = piece[len(view) :]
        at += count
        if not lane.advance(count, events):
            return data[at:]
    return None if at == len(data) else data[at:]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_our_client_sends_lands_without_being_decoded(data: st.DataObject) -> None:
    length = data.draw(st.sampled_from([1, 5000, 64 * KiB, 600 * KiB, SLICE_BYTES_MAX]))
    items = list(range(data.draw(st.integers(1, 6 if length > BLOCK else 40))))
    cut = data.draw(st.integers(0, len(items)))
    groups = [group for group in (items[:cut], items[cut:]) if group]
    steps = data.draw(st.lists(st.integers(1, 2 * length + 300), max_size=30))
    lane, memory = lane_for(length, groups)
    events = Events()
    stream = b"".join(frame for group in groups for frame in frames_of(group, length))
    assert feed(lane, events, stream, steps) is None
    assert lane.is_over
    assert lane.received_bytes == len(stream)
    assert events.items == items
    assert events.tables == b"".join(crc_table(value_of(item, length), BLOCK) for item in items)
    assert memory == {item: value_of(item, length) for item in items}


@pytest.mark.parametrize("length", [600 * KiB, SLICE_BYTES_MAX])
@pytest.mark.parametrize("block", [BLOCK, 5000, 64 * KiB, 300_000, SLICE_BYTES_MAX])
@pytest.mark.parametrize("step", [1000, 300 * KiB, 2 * MiB])
def test_a_record_with_a_frame_of_its_own_is_checked_on_its_way(length: int, block: int, step: int) -> None:
    lane = PutLane(REQUEST_ID, record_bytes=length, block_bytes=block)
    memory = [bytearray(length) for _ in range(3)]
    lane.expect([Landing(item, memoryview(data)) for item, data in enumerate(memory)])
    events = Events()
    stream = bytearray()
    for item in range(3):
        value = value_of(item, length)
        one = Slice(item, 0, length, 0, True, NO_CONTENT_ID, length, block, crc_table(value, block))
        head = encode_head(FrameType.DATA, REQUEST_ID, encode_slices([one]), payload_bytes=length, flags=1)
        stream += head + value
    stream[2 * len(stream) // 3 - 1] ^= 1  # the last byte of the second one
    assert feed(lane, events, bytes(stream), [step] * (len(stream) // step + 4)) is None
    assert events.items == [0, 1, 2]
    assert events.good == [True, False, True]
    assert lane.expected_bytes == 0


OTHER = [
    frame_of([2], 64 * KiB),
    frame_of([1, 2], 64 * KiB),
    frame_of([1], 64 * KiB, block_bytes=2 * BLOCK, crcs=crc_table(value_of(1, 64 * KiB), 2 * BLOCK)),
    frame_of([1], 64 * KiB, crcs=b""),
    frame_of([1], 60 * KiB),
    frame_of([1], 64 * KiB, content_id=b"c" * 16),
    encode_head(FrameType.CANCEL, REQUEST_ID, Cancel().encode()),
    encode_head(FrameType.DATA, 6, frame_of([1], 64 * KiB)[32:144], payload_bytes=64 * KiB, flags=1)
    + value_of(1, 64 * KiB),
]


@pytest.mark.parametrize("other", OTHER, ids=range(len(OTHER)))
@pytest.mark.parametrize("step", [1, 31, 32, 33, 1000, 64 * KiB, MiB])
def test_another_frame_is_given_to_the_reader_as_it_came(other: bytes, step: int) -> None:
    lane, _ = lane_for(64 * KiB, [[0], [1], [2, 3]])
    events = Events()
    first = frame_of([0], 64 * KiB)
    # single bytes only where the frames differ
    steps = [step] * (len(other) // step + 1) if step > 100 else [step] * 300
    left = feed(lane, events, first, [])
    assert left is None
    left = feed(lane, events, other + first, list(reversed(steps)))
    assert left is not None
    assert events.items == [0]
    begun, landings = lane.take_apart()
    assert (begun + left)[: len(other)] == other
    assert [landing.item for landing in landings] == [1, 2, 3]
    assert lane.is_over
    reader = FrameReader(Anywhere())
    frames = replay(reader, begun) + replay(reader, left)
    assert len(frames) == 2
    assert frames[1].type is FrameType.DATA


def test_a_damaged_header_is_the_readers_to_refuse() -> None:
    for at in (16, 30, 50, 100):
        lane, _ = lane_for(64 * KiB, [[0]])
        events = Events()
        frame = bytearray(frame_of([0], 64 * KiB))
        frame[at] ^= 1
        feed(lane, events, bytes(frame), [])
        assert not events.items
        begun, landings = lane.take_apart()
        assert [landing.item for landing in landings] == [0]
        with pytest.raises(ChecksumMismatch):
            replay(FrameReader(Anywhere()), begun)


def test_only_records_of_one_slice() -> None:
    assert PutLane.takes([Landing(0, memoryview(bytearray(SLICE_BYTES_MAX)))])
    assert not PutLane.takes([Landing(0, memoryview(bytearray(SLICE_BYTES_MAX + 1)))])

"""The lane of granted payload: what comes as our client sends it is compared, all else is read the general way."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ChecksumMismatch
from kvstore.limits import FRAME_AIM_BYTES, SLICE_BYTES_MAX, KiB, MiB
from kvstore.transport import _put_lane
from kvstore.transport import put_lane as module
from kvstore.transport.base import Landing
from kvstore.transport.put_lane import CLOSED, MORE, PutLane, put_lane, replay, takes
from kvstore.types.checksum import crc_table
from kvstore.wire.frames import Frame, FrameReader
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.messages import Cancel
from kvstore.wire.slices import NO_CONTENT_ID, Slice, encode_slices

REQUEST_ID = 7
BLOCK = 4 * KiB


@pytest.fixture(params=["compiled", "python"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which lane the test has."""
    assert module.IS_COMPILED, module.HOW
    kind: str = request.param
    monkeypatch.setattr(module, "IS_COMPILED", kind == "compiled")
    return kind


class Events:
    """What a lane told of."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.tables = b""
        self.good: list[bool] = []

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
    lane = put_lane(REQUEST_ID, record_bytes=length, block_bytes=BLOCK)
    memory = {item: bytearray(length) for group in groups for item in group}
    for group in groups:
        lane.expect([Landing(item, memoryview(memory[item])) for item in group])
    return lane, memory


@contextlib.contextmanager
def two_ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        yield near, far


def feed(lane: PutLane, events: Events, data: bytes, steps: Sequence[int], *, bytes_max: int = 2 * MiB) -> bytes | None:
    """Sends bytes to a lane, so many at a time. None when it took all, else what it had not received."""
    at, before = 0, lane.received_bytes
    sizes = list(steps)
    with two_ends() as (near, far):
        while at < len(data) and not lane.is_over:
            count = min(len(data) - at, sizes.pop() if sizes else len(data))
            at += near.send(data[at : at + count])
            while lane.received_bytes - before < at and not lane.is_over:
                assert lane.expected_bytes > 0
                ended, came = lane.receive(far, bytes_max)
                for items, tables, are_good in came:
                    events.came(items, tables, are_good=are_good)
                if ended == module.OTHER:
                    return data[lane.received_bytes - before :]
                assert ended == MORE
    left = data[lane.received_bytes - before :]
    return left or None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_our_client_sends_lands_without_being_decoded(data: st.DataObject) -> None:
    length = data.draw(st.sampled_from([1, 5000, 64 * KiB, 600 * KiB, SLICE_BYTES_MAX]))
    items = list(range(data.draw(st.integers(1, 6 if length > BLOCK else 40))))
    cut = data.draw(st.integers(0, len(items)))
    groups = [group for group in (items[:cut], items[cut:]) if group]
    bytes_max = data.draw(st.sampled_from([1, 70_000, 2 * MiB]))
    steps = data.draw(st.lists(st.integers(1, 2 * length + 300), max_size=30))
    lane, memory = lane_for(length, groups)
    events = Events()
    stream = b"".join(frame for group in groups for frame in frames_of(group, length))
    assert feed(lane, events, stream, steps, bytes_max=bytes_max) is None
    assert lane.is_over
    assert lane.received_bytes == len(stream)
    assert events.items == items
    assert events.tables == b"".join(crc_table(value_of(item, length), BLOCK) for item in items)
    assert memory == {item: value_of(item, length) for item in items}


@pytest.mark.parametrize("length", [600 * KiB, SLICE_BYTES_MAX])
@pytest.mark.parametrize("block", [BLOCK, 5000, 64 * KiB, 300_000, SLICE_BYTES_MAX])
@pytest.mark.parametrize("step", [1000, 300 * KiB, 2 * MiB])
def test_a_record_with_a_frame_of_its_own_is_checked_on_its_way(length: int, block: int, step: int) -> None:
    lane = put_lane(REQUEST_ID, record_bytes=length, block_bytes=block)
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
    assert takes([Landing(0, memoryview(bytearray(SLICE_BYTES_MAX)))])
    assert not takes([Landing(0, memoryview(bytearray(SLICE_BYTES_MAX + 1)))])


def test_the_end_of_the_stream_is_told_behind_what_came() -> None:
    lane, _ = lane_for(64 * KiB, [[0], [1]])
    with two_ends() as (near, far):
        near.sendall(frame_of([0], 64 * KiB) + frame_of([1], 64 * KiB)[:1000])
        near.close()
        ended, came = lane.receive(far, MiB)
        assert (ended, [items for items, _, _ in came]) == (MORE, [[0]])
        assert lane.receive(far, MiB) == (CLOSED, [])
    begun, landings = lane.take_apart()
    assert begun == frame_of([1], 64 * KiB)[:1000]
    assert [landing.item for landing in landings] == [1]


def test_a_broken_connection_is_told_when_nothing_came() -> None:
    lane, _ = lane_for(64 * KiB, [[0]])
    with two_ends() as (_, far):
        assert lane.receive(far, MiB) == (MORE, [])
        gone = socket.socket(fileno=far.detach())
        gone.shutdown(socket.SHUT_RDWR)
        assert lane.receive(gone, MiB) == (CLOSED, [])
        gone.close()
        with pytest.raises((OSError, ValueError)):
            lane.receive(gone, MiB)


def test_memory_is_held_until_it_is_told_of() -> None:
    memory = memoryview(bytearray(64 * KiB))
    other = memoryview(bytearray(64 * KiB))
    lane = put_lane(REQUEST_ID, record_bytes=64 * KiB, block_bytes=BLOCK)
    lane.expect([Landing(0, memory), Landing(1, other)])
    feed(lane, Events(), frame_of([0, 1], 64 * KiB)[:70_000], [])
    lane.take_apart()
    memory.release()
    other.release()


def test_one_defective_record_of_a_frame_is_told_apart(kind: str) -> None:
    lane, _ = lane_for(64 * KiB, [[0, 1, 2]])
    events = Events()
    frame = bytearray(frame_of([0, 1, 2], 64 * KiB))
    frame[-64 * KiB - 1] ^= 1  # the last byte of the second
    assert feed(lane, events, bytes(frame), [30_000]) is None
    assert events.items == [0, 1, 2]
    # in Python such frames are checked by who is told
    assert events.good == ([True, False, True] if kind == "compiled" else [False] * 3)


def test_a_compiled_lane_refuses_what_it_cannot_hold(kind: str) -> None:
    if kind != "compiled":
        return
    lane, _ = lane_for(64 * KiB, [[0]])
    for landings in ([Landing(1, memoryview(bytearray(64 * KiB))), Landing(2, memoryview(bytearray(5)))], [(1,)], [7]):
        with pytest.raises((ValueError, TypeError)):
            lane.expect(landings)  # type: ignore[arg-type]
    with pytest.raises(BufferError):
        lane.expect([Landing(1, memoryview(bytes(64 * KiB)))])
    made = _put_lane.Lane.__new__(_put_lane.Lane)
    for call in (made.take_apart, lambda: made.expect([])):
        with pytest.raises(ValueError, match="was not made"):
            call()
    _, landings = lane.take_apart()
    assert [landing.item for landing in landings] == [0]

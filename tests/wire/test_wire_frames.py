"""Frames in a stream: any split gives the same frames, damage is refused, memory stays bounded."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import (
    ChecksumMismatch,
    FormatUnsupported,
    InvalidRequest,
    KVStoreError,
    Overloaded,
    Unavailable,
)
from kvstore.limits import (
    BODY_FIRST_BYTES,
    FRAME_BODY_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    IO_VECTORS_MAX,
    READ_AHEAD_BYTES,
)
from kvstore.wire.body import MemoryBudget
from kvstore.wire.frames import Frame, FrameReader, FrameWriter
from kvstore.wire.header import HEADER_BYTES, FrameType, encode_head
from kvstore.wire.slices import Slice, encode_slices


@dataclass(frozen=True, slots=True)
class Sent:
    """A frame as a test made it."""

    type: FrameType
    request_id: int
    body: bytes
    payload: bytes

    def wire(self) -> bytes:
        sliced = self.type in (FrameType.DATA, FrameType.WRITER_WRITE)
        return (
            encode_head(self.type, self.request_id, self.body, payload_bytes=len(self.payload), flags=int(sliced))
            + self.payload
        )


class Landing:
    """A sink that cuts the destination into uneven fragments, as engines' buffers are."""

    def __init__(self, cut: int = 1000) -> None:
        self.cut = cut

    def place(self, frame: Frame) -> Sequence[memoryview]:
        sizes = [min(self.cut, frame.payload_bytes - at) for at in range(0, frame.payload_bytes, self.cut)]
        return [memoryview(bytearray(size)) for size in sizes]


def data_frame(request_id: int, payload: bytes) -> Sent:
    one = Slice(0, 0, len(payload), 0, True, bytes(16), len(payload), 1 << 20, b"")
    return Sent(FrameType.DATA, request_id, encode_slices([one]), payload)


FRAMES = st.one_of(
    st.builds(data_frame, st.integers(0, 0xFFFF_FFFF), st.sampled_from([0, 1, 5, 999, 3000, 20_000]).map(bytes)),
    st.builds(
        Sent,
        st.sampled_from([FrameType.GET, FrameType.MATCH, FrameType.END]),
        st.integers(0, 0xFFFF_FFFF),
        st.sampled_from([0, 1, 100, READ_AHEAD_BYTES - HEADER_BYTES, READ_AHEAD_BYTES - 31, 30_000, 150_000]).map(
            lambda n: bytes(i % 251 for i in range(n))
        ),
        st.just(b""),
    ),
    st.builds(
        Sent,
        st.just(FrameType.OFFER),
        st.integers(0, 9),
        st.just(b"offer"),
        st.sampled_from([1, 7000, 40_000]).map(bytes),
    ),
)


def feed(reader: FrameReader, stream: bytes, sizes: Sequence[int]) -> list[Frame]:
    """Receives `stream` in pieces of `sizes`, then larger ones, each limited to what the reader offers."""
    frames: list[Frame] = []
    at = step = 0
    while at < len(stream):
        views = reader.buffers()
        room = sum(map(len, views))
        assert 0 < len(views) <= IO_VECTORS_MAX
        piece = memoryview(stream)[at : at + min(sizes[step] if step < len(sizes) else 4096, room)]
        step += 1
        at += len(piece)
        left = piece
        for view in views:
            view[: len(left)] = left[: len(view)]
            left = left[len(view) :]
            if not left:
                break
        frames += reader.advance(len(piece))
    return frames


@settings(max_examples=150, deadline=None)
@given(st.lists(FRAMES, max_size=8), st.lists(st.integers(1, 9000), max_size=60), st.integers(40, 5000))
def test_any_split_of_a_stream_gives_the_same_frames(sent: list[Sent], sizes: list[int], cut: int) -> None:
    reader = FrameReader(Landing(cut))
    frames = feed(reader, b"".join(one.wire() for one in sent), sizes)
    assert [(f.type, f.request_id, bytes(f.body), b"".join(f.payload)) for f in frames] == [
        (s.type, s.request_id, s.body, s.payload) for s in sent
    ]
    reader.end_of_stream()


@settings(max_examples=150, deadline=None)
@given(st.lists(FRAMES, min_size=1, max_size=4), st.data())
def test_a_damaged_stream_is_refused_or_gives_a_prefix(sent: list[Sent], data: st.DataObject) -> None:
    stream = bytearray(b"".join(one.wire() for one in sent))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] ^= 1 << data.draw(st.integers(0, 7))
    reader = FrameReader(Landing())
    frames: list[Frame] = []
    try:
        frames = feed(reader, bytes(stream), [data.draw(st.integers(100, 9000))])
    except KVStoreError:
        with pytest.raises(KVStoreError):
            reader.buffers()
        with pytest.raises(KVStoreError):
            reader.advance(0)
    for frame, one in zip(frames, sent, strict=False):
        assert (frame.type, bytes(frame.body)) == (one.type, one.body), "damage outside payload must not pass"


@settings(deadline=None)
@given(st.binary(max_size=3000), st.integers(1, 500))
def test_random_bytes_are_refused_or_wait_for_more(stream: bytes, size: int) -> None:
    reader = FrameReader(Landing())
    try:
        frames = feed(reader, stream, [size])
    except KVStoreError:
        return
    assert not frames
    if stream:
        with pytest.raises(Unavailable):
            reader.end_of_stream()


def header_with(**changes: int) -> bytes:
    parts = {"magic": b"KV", "version": 1, "type": 12, "request": 1, "body": 0, "payload": 0, "epoch": 0, "flags": 0}
    parts.update(changes)  # type: ignore[arg-type]
    import struct

    return struct.pack("<2sBBIIIQII", *parts.values(), 0)


@pytest.mark.parametrize(
    ("head", "error", "says"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n", FormatUnsupported, "GE"),
        (header_with(version=9), FormatUnsupported, "9"),
        (header_with(type=0), FormatUnsupported, "0"),
        (header_with(type=200), FormatUnsupported, "200"),
        (header_with(body=FRAME_BODY_BYTES_MAX + 1), InvalidRequest, str(FRAME_BODY_BYTES_MAX)),
        (header_with(body=0xFFFF_FFFF), InvalidRequest, "4294967295"),
        (header_with(payload=FRAME_PAYLOAD_BYTES_MAX + 1), InvalidRequest, str(FRAME_PAYLOAD_BYTES_MAX)),
        (header_with(type=int(FrameType.GET), payload=1), InvalidRequest, "GET"),
        (header_with(), ChecksumMismatch, "CRC32C"),
    ],
)
def test_a_bad_header_is_refused_before_anything_is_reserved(head: bytes, error: type[Exception], says: str) -> None:
    tracemalloc.start()
    with pytest.raises(error, match=says):
        feed(FrameReader(Landing()), head[:32], [32])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 256 * 1024


def test_a_header_reserves_no_more_than_a_little_of_what_it_announces() -> None:
    budget = MemoryBudget(1 << 30)
    tracemalloc.start()
    readers = [FrameReader(budget=budget) for _ in range(16)]
    for reader in readers:
        assert feed(reader, header_with(body=FRAME_BODY_BYTES_MAX), [32]) == []
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert budget.used_bytes == 16 * BODY_FIRST_BYTES
    assert held < 2 * 16 * BODY_FIRST_BYTES


@pytest.mark.parametrize("payload", [b"", bytes(50_000)], ids=["no payload", "payload"])
def test_a_body_is_charged_while_it_grows_and_until_its_frame_is_there(payload: bytes) -> None:
    budget = MemoryBudget(1 << 30)
    reader = FrameReader(Landing(), budget=budget)
    body = bytes(i % 251 for i in range(1_000_000))
    wire = Sent(FrameType.OFFER, 1, body, payload).wire()
    at, charged = 0, set()
    frames: list[Frame] = []
    while not frames:
        frames = feed(reader, wire[at : at + 50_000], [50_000])
        at += 50_000
        charged.add(budget.used_bytes)
    assert charged <= {0, 1_000_000, *(BODY_FIRST_BYTES << step for step in range(4))}
    assert len(charged) == 6
    assert budget.used_bytes == 0
    assert bytes(frames[0].body) == body


@pytest.mark.parametrize("limit", [BODY_FIRST_BYTES - 1, 3 * BODY_FIRST_BYTES])
def test_a_body_over_the_common_bound_is_refused_and_its_memory_is_free(limit: int) -> None:
    budget = MemoryBudget(limit)
    reader = FrameReader(budget=budget)
    with pytest.raises(Overloaded, match=f"over the {limit} bytes"):
        feed(reader, Sent(FrameType.GET, 1, bytes(1_000_000), b"").wire(), [])
    assert budget.used_bytes == 0
    gone = FrameReader(budget=budget)
    feed(gone, header_with(body=BODY_FIRST_BYTES // 2), [])
    assert budget.used_bytes == (BODY_FIRST_BYTES // 2)
    gone.let_go()
    assert budget.used_bytes == 0


def test_frames_before_a_defect_are_delivered_first() -> None:
    good = Sent(FrameType.PING, 1, b"\x90", b"").wire()
    reader = FrameReader()
    stream = good + good + b"garbage, thirty-two bytes of it.."
    view = reader.buffers()[0]
    view[: len(stream)] = stream
    assert len(reader.advance(len(stream))) == 2
    with pytest.raises(FormatUnsupported):
        reader.buffers()


def test_a_smaller_limit_holds_until_it_is_raised() -> None:
    body = bytes(40_000)
    frame = Sent(FrameType.GET, 1, body, b"").wire()
    with pytest.raises(InvalidRequest, match="16384"):
        feed(FrameReader(body_bytes_max=16384), frame, [9000])
    reader = FrameReader(body_bytes_max=16384)
    reader.allow_bodies(FRAME_BODY_BYTES_MAX)
    assert len(feed(reader, frame, [9000])) == 1


def test_payload_without_a_sink_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="none is expected"):
        feed(FrameReader(), data_frame(1, b"x").wire(), [100])


class Patience:
    """A sink that has no memory yet."""

    def place(self, frame: Frame) -> None:
        return None


def test_a_pause_holds_the_stream_until_memory_is_there() -> None:
    stream = data_frame(1, b"abcdef").wire() + Sent(FrameType.PING, 2, b"\x90", b"").wire()
    reader = FrameReader(Patience())
    view = reader.buffers()[0]
    view[: len(stream)] = stream
    assert reader.advance(len(stream)) == []
    assert reader.paused
    assert reader.buffers() == []
    destination = [memoryview(bytearray(4)), memoryview(bytearray(2))]
    frames = reader.place_later(destination)
    assert [frame.type for frame in frames] == [FrameType.DATA, FrameType.PING]
    assert b"".join(destination) == b"abcdef"
    assert not reader.paused


def test_scratch_takes_any_length_with_little_memory() -> None:
    reader = FrameReader()
    views = reader.scratch_views(1_000_000)
    assert sum(map(len, views)) == 1_000_000
    assert all(view.obj is views[0].obj for view in views)
    assert reader.scratch_views(0) == []


def test_a_diverted_payload_writes_no_more_into_its_memory() -> None:
    stream = data_frame(1, b"x" * 50_000).wire() + Sent(FrameType.PING, 2, b"\x90", b"").wire()
    memory = memoryview(bytearray(50_000))

    class Fixed:
        def place(self, frame: Frame) -> Sequence[memoryview]:
            return [memory[:10_000], memory[10_000:]]

    reader = FrameReader(Fixed())
    reader.divert()
    assert feed(reader, stream[:20_000], [20_000]) == []
    reader.divert()
    received = bytes(memory)
    frames = feed(reader, stream[20_000:], [7000])
    assert [(frame.type, frame.slices, frame.payload) for frame in frames] == [
        (FrameType.DATA, [], ()),
        (FrameType.PING, [], ()),
    ]
    assert bytes(memory) == received
    assert received.count(b"x") < 20_000


def test_end_of_stream_in_a_frame_is_noticed_everywhere() -> None:
    big = Sent(FrameType.GET, 1, bytes(30_000), b"").wire()
    data = data_frame(1, bytes(5000)).wire()
    for stream in (big[:10], big[:100], big[:20_000], data[:60], data[:4000]):
        reader = FrameReader(Landing())
        feed(reader, stream, [5000])
        with pytest.raises(Unavailable, match="closed in"):
            reader.end_of_stream()


def test_wanted_bytes_never_exceeds_what_the_frame_needs() -> None:
    reader = FrameReader(Landing())
    assert reader.wanted_bytes == HEADER_BYTES
    stream = data_frame(1, bytes(5000)).wire()
    feed(reader, stream[:1000], [1000])
    assert reader.wanted_bytes == len(stream) - 1000


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5)), min_size=1, max_size=30),
    st.lists(st.integers(1, 700), min_size=1, max_size=5),
)
def test_a_writer_sends_every_byte_once_and_tells_when(frames: list[tuple[int, int]], sizes: list[int]) -> None:
    writer = FrameWriter()
    expected = bytearray()
    told: list[int] = []
    ends: list[int] = []
    for number, (head_bytes, pieces) in enumerate(frames):
        head = bytes([number]) * head_bytes
        payload = [memoryview(bytes([200 + piece]) * (piece + 1)) for piece in range(pieces)]
        writer.push(
            head, payload, payload_bytes=sum(map(len, payload)), on_sent=lambda number=number: told.append(number)
        )
        expected += head + b"".join(payload)
        ends.append(len(expected))
    assert writer.pending_bytes == len(expected)
    out = bytearray()
    step = 0
    while writer.pending_bytes:
        joined = b"".join(writer.buffers())
        take = min(sizes[step % len(sizes)], len(joined))
        step += 1
        out += joined[:take]
        writer.advance(take)
        assert told == [number for number, end in enumerate(ends) if end <= len(out)]
    assert out == expected
    assert writer.buffers() == []


def test_a_writer_stays_within_the_iovec_limit_and_forgets_what_was_sent() -> None:
    writer = FrameWriter()
    for _ in range(5000):
        writer.push(b"abc")
    total = 0
    while writer.pending_bytes:
        views = writer.buffers()
        assert len(views) <= IO_VECTORS_MAX
        writer.advance(len(views[0]) + 1 if len(views) > 1 else len(views[0]))
        total += 1
    assert len(writer._iovecs) == 0


def test_dropping_a_writer_releases_everything_once() -> None:
    writer = FrameWriter()
    told: list[int] = []
    for number in range(3):
        writer.push(b"abc", on_sent=lambda number=number: told.append(number))
    writer.advance(4)
    writer.drop()
    writer.drop()
    assert told == [0, 1, 2]
    assert writer.pending_bytes == 0

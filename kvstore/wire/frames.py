"""Frames out of and into a stream of bytes, without I/O: who owns a socket asks where bytes must land or come from.

`FrameReader` receives payload straight into its destination. Behind it, in the same `recvmsg_into`, lies a small
read-ahead buffer for the header and body of the next frame. `FrameWriter` is a queue of iovecs for `sendmsg`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import Final, Protocol

from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.limits import FRAME_BODY_BYTES_MAX, IO_VECTORS_MAX, READ_AHEAD_BYTES
from kvstore.wire.body import ArrivingBody, MemoryBudget
from kvstore.wire.header import (
    HEADER_BYTES,
    VERSION,
    FrameType,
    Header,
    check_crc,
    decode_header,
    encode_head,
)
from kvstore.wire.schema import Message
from kvstore.wire.slices import FLAG_FINAL, Slice, decode_slices, encode_slices

_SCRATCH_BYTES: Final = 64 * 1024
_SLICED: Final = frozenset({FrameType.DATA, FrameType.WRITER_WRITE, FrameType.PLACED})
_NO_SLICES: Final[list[Slice]] = []


class Frame:
    """A frame that has arrived. Its owner is whoever got it from `FrameReader.advance`.

    Attributes:
        type, request_id, epoch: of the header.
        is_final: DATA or PLACED that ends its call (slices.FLAG_FINAL).
        body: its bytes; decode it with the message class of its type.
        slices: decoded body of DATA, PLACED and WRITER_WRITE, else empty.
        payload_bytes: how much payload follows the body.
        payload: where the payload landed: what the sink gave.
    """

    __slots__ = ("body", "epoch", "is_final", "payload", "payload_bytes", "request_id", "slices", "type")

    def __init__(self, header: Header, body: bytes | bytearray, slices: list[Slice]) -> None:
        self.type = header.type
        self.request_id = header.request_id
        self.epoch = header.epoch
        self.is_final = False
        self.payload_bytes = header.payload_bytes
        self.body = body
        self.slices = slices
        self.payload: Sequence[memoryview] = ()


class PayloadSink(Protocol):
    """Knows where payload belongs."""

    def place(self, frame: Frame) -> Sequence[memoryview] | None:
        """Destination of the payload of `frame`: writable views whose lengths sum to `frame.payload_bytes`.

        None means "not yet": the reader takes nothing more from the stream until `FrameReader.place_later`. Payload
        that nobody wants any more goes to `scratch_views`. The views are written until the frame is returned.
        Raises KVStoreError when the frame is not legal here; the reader then fails with it.
        """


class RefusePayload:
    """The sink of a connection on which no payload is expected."""

    def place(self, frame: Frame) -> Sequence[memoryview] | None:
        """Raises InvalidRequest."""
        raise InvalidRequest(f"{frame.type.name} frame with {frame.payload_bytes} bytes of payload, none is expected")


class FrameReader:
    """Turns received bytes into frames; holds at most one body and READ_AHEAD_BYTES beside it.

    Usage: receive into `buffers()` (in order, any number of bytes), then call `advance` with the number received.
    A defect of the stream is raised once all frames before it were returned; after that the reader stays failed.
    """

    __slots__ = (
        "_ahead",
        "_body",
        "_body_bytes_max",
        "_budget",
        "_dest",
        "_dest_at",
        "_dest_next",
        "_end",
        "_error",
        "_frame",
        "_head",
        "_header",
        "_scratch",
        "_sink",
        "_start",
        "_takes_final",
        "_view",
        "_whole",
    )

    def __init__(
        self,
        sink: PayloadSink | None = None,
        *,
        body_bytes_max: int = FRAME_BODY_BYTES_MAX,
        budget: MemoryBudget | None = None,
    ) -> None:
        """
        Args:
            sink: Knows where payload belongs; none is expected without.
            budget: Charged for a body that is longer than the read-ahead, from its first byte until its frame is
                returned.
        """
        self._sink: PayloadSink = sink or RefusePayload()
        self._body_bytes_max = body_bytes_max
        self._ahead = bytearray(READ_AHEAD_BYTES)
        self._view = memoryview(self._ahead)
        self._start = 0
        self._end = 0
        self._header: Header | None = None  # of a frame whose body is on its way into `_body`
        self._head = b""
        self._body: ArrivingBody | None = None
        self._whole: ArrivingBody | None = None  # of the frame whose payload is on its way
        self._budget = budget
        self._frame: Frame | None = None  # whose payload is on its way
        self._dest: list[memoryview] = []
        self._dest_next = 0
        self._dest_at = 0
        self._scratch: memoryview | None = None
        self._takes_final = False
        self._error: KVStoreError | None = None

    def allow_final_data(self) -> None:
        """DATA and PLACED may end a call from now on: Feature.FINAL_DATA was agreed on."""
        self._takes_final = True

    def allow_bodies(self, body_bytes_max: int) -> None:
        """Changes the limit for bodies, after HELLO."""
        self._body_bytes_max = body_bytes_max

    def use_budget(self, budget: MemoryBudget) -> None:
        """Charges another one for the bodies to come."""
        self._budget = budget

    @property
    def request(self) -> object | None:
        """The long body, or the OFFER with inline payload, that is on its way: the same object until it is whole."""
        body = self._body or self._whole
        if body is not None:
            return body
        frame = self._frame
        return frame if frame is not None and frame.type is FrameType.OFFER else None

    @property
    def paused(self) -> bool:
        """The sink has not said yet where the current payload belongs; `buffers()` is empty."""
        return self._frame is not None and not self._dest and self._error is None

    @property
    def failure(self) -> KVStoreError | None:
        """What the next `advance` would raise. Whoever has handled all frames need not wait for more bytes to know."""
        return self._error

    def between_frames(self) -> memoryview | None:
        """Where a next frame may be received as a whole, to look at it before `advance`; None within a frame."""
        if self._frame is not None or self._body is not None or self._end != self._start or self._error is not None:
            return None
        self._start = self._end = 0
        return self._view

    @property
    def position(self) -> tuple[int, ...] | None:
        """Tells one place within the frame in progress from another; None between frames and while paused."""
        if self._frame is None and self._body is None and self._end == self._start:
            return None
        return (
            None
            if self.paused
            else (
                self._end - self._start,
                self._body.at if self._body is not None else 0,
                self._dest_next,
                self._dest_at,
            )
        )

    @property
    def wanted_bytes(self) -> int:
        """How many bytes the frame in progress still needs, as far as is known; at least 1."""
        if self._frame is not None:
            return max(1, sum(map(len, self._dest[self._dest_next :])) - self._dest_at)
        if self._body is not None:
            return self._body.left_bytes
        return max(1, HEADER_BYTES - (self._end - self._start))

    @property
    def is_between(self) -> bool:
        """Nothing of the next frame has come."""
        return self._frame is None and self._body is None and self._start == self._end

    @property
    def ends_call(self) -> bool:
        """The payload in progress ends its call: nothing follows it, until the next call is begun."""
        return self._frame is not None and self._frame.is_final

    @property
    def in_payload(self) -> bool:
        """Payload is on its way to its destination."""
        return bool(self._dest)

    def buffers(self) -> list[memoryview]:
        """Where the next bytes of the stream must land, in order; at most IO_VECTORS_MAX. Empty while paused.

        Raises:
            KVStoreError: The stream is defective (see `advance`).
        """
        if self._error is not None:
            raise self._error
        if self._dest:
            at = self._dest_next
            views = self._dest[at : at + IO_VECTORS_MAX - 1]
            if self._dest_at:
                views[0] = views[0][self._dest_at :]
            if at + len(views) == len(self._dest) and not self.ends_call:
                views.append(self._view)
            return views
        if self._frame is not None:
            return []
        if self._body is not None:
            room = self._body.room()
            return [room] if self._body.is_growing else [room, self._view]
        if self._start:
            self._compact()
        return [self._view[self._end :]]

    def advance(self, count: int) -> list[Frame]:
        """Takes note of `count` bytes received into `buffers()`; returns the frames that are complete now.

        Raises:
            InvalidRequest: A size is above its limit, or the sink does not expect the payload.
            FormatUnsupported: Not our protocol or version.
            ChecksumMismatch: Header or body were changed on the way.
        """
        if self._error is not None:
            raise self._error
        frames: list[Frame] = []
        try:
            if self._dest:
                count = self._advance_payload(count, frames)
            elif self._body is not None:
                count = self._advance_body(count, frames)
            self._end += count
            self._parse(frames)
        except KVStoreError as error:
            self._error = error
            self.let_go()
            if not frames:
                raise
        return frames

    def place_later(self, destination: Sequence[memoryview]) -> list[Frame]:
        """Ends a pause: the payload belongs into `destination`. Returns and raises as `advance`."""
        assert self.paused, "place_later without a pause"
        frames: list[Frame] = []
        try:
            self._set_destination(destination)
            self._fill_from_ahead(frames)
            self._parse(frames)
        except KVStoreError as error:
            self._error = error
            self.let_go()
            if not frames:
                raise
        return frames

    def scratch_views(self, length_bytes: int) -> list[memoryview]:
        """`length_bytes` of memory that nobody reads, for payload that came too late; small and used over and over."""
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        whole, rest = divmod(length_bytes, _SCRATCH_BYTES)
        views = [self._scratch] * whole
        if rest:
            views.append(self._scratch[:rest])
        return views

    def divert(self) -> None:
        """Nobody wants the payload in progress any more: what has not arrived goes to scratch, its memory is free.

        The frame is still returned when it is complete, without slices and payload. No effect between payloads.
        """
        frame = self._frame
        if frame is None or not self._dest:
            return
        left = sum(map(len, self._dest[self._dest_next :])) - self._dest_at
        self._dest = self.scratch_views(left)
        self._dest_next = self._dest_at = 0
        frame.slices = []
        frame.payload = ()

    def let_go(self) -> None:
        """Nothing more will be received: the body in progress is forgotten."""
        for body in (self._body, self._whole):
            if body is not None:
                body.let_go()
        self._body = self._whole = None

    def end_of_stream(self) -> None:
        """The peer has closed its side. Raises Unavailable when that was in the middle of a frame."""
        if self._frame is not None:
            raise Unavailable(f"the peer closed in the payload of {self._frame.type.name}: open a new connection")
        if self._body is not None or self._end > self._start:
            raise Unavailable("the peer closed in the middle of a frame: open a new connection")

    def _compact(self) -> None:
        rest = self._end - self._start
        if rest:
            self._ahead[:rest] = self._ahead[self._start : self._end]
        self._start = 0
        self._end = rest

    def _parse(self, frames: list[Frame]) -> None:
        """Takes whole frames out of the read-ahead, and begins what does not fit it."""
        while self._frame is None and self._body is None:
            start = self._start
            if self._end - start < HEADER_BYTES:
                return
            header = decode_header(self._ahead, start, body_bytes_max=self._body_bytes_max)
            stop = start + HEADER_BYTES + header.body_bytes
            if stop <= self._end:
                head = self._view[start : start + HEADER_BYTES]
                body = bytes(self._view[start + HEADER_BYTES : stop])
                self._start = stop
                self._begin(header, head, body, frames)
            elif stop - start <= READ_AHEAD_BYTES:
                return
            else:
                self._begin_body(header)

    def _begin_body(self, header: Header) -> None:
        start = self._start
        self._header = header
        self._head = bytes(self._view[start : start + HEADER_BYTES])
        self._body = ArrivingBody(header.body_bytes, self._view[start + HEADER_BYTES : self._end], self._budget)
        self._start = self._end = 0

    def _advance_body(self, count: int, frames: list[Frame]) -> int:
        body, header = self._body, self._header
        assert body is not None
        assert header is not None
        step = min(count, len(body.memory) - body.at)
        body.advance(step)
        if not body.left_bytes:
            self._body = self._header = None
            self._whole = body
            self._end = count - step
            self._begin(header, self._head, body.memory, frames)
            if self._frame is None:
                self._free_body()
            return 0
        return count - step

    def _free_body(self) -> None:
        """The frame of a long body was returned, or is about to be: from now on its memory is the new owner's."""
        if self._whole is not None:
            self._whole.let_go()
            self._whole = None

    def _begin(self, header: Header, head: bytes | memoryview, body: bytes | bytearray, frames: list[Frame]) -> None:
        """Header and body are here: the frame is complete, or its payload begins."""
        check_crc(header, head, body)
        slices = _NO_SLICES
        is_final = False
        if header.type in _SLICED:
            count = header.flags
            if count & FLAG_FINAL and self._takes_final:
                is_final = True
                count ^= FLAG_FINAL
            # the bytes of PLACED lie where they belong already
            payload_bytes = None if header.type is FrameType.PLACED else header.payload_bytes
            slices = decode_slices(body, count=count, payload_bytes=payload_bytes)
        frame = Frame(header, body, slices)
        frame.is_final = is_final
        if not header.payload_bytes:
            frames.append(frame)
            return
        self._frame = frame
        destination = self._sink.place(frame)
        if destination is not None:
            self._set_destination(destination)
            self._fill_from_ahead(frames)

    def _set_destination(self, destination: Sequence[memoryview]) -> None:
        frame = self._frame
        assert frame is not None
        frame.payload = destination
        self._dest = [view for view in destination if len(view)]
        self._dest_next = self._dest_at = 0
        total = sum(map(len, self._dest))
        assert total == frame.payload_bytes, f"sink gave {total} bytes for a payload of {frame.payload_bytes}"

    def _fill_from_ahead(self, frames: list[Frame]) -> None:
        """Copies payload that arrived with the header, at most READ_AHEAD_BYTES."""
        start = self._start
        end = self._end
        while start < end and self._dest_next < len(self._dest):
            view = self._dest[self._dest_next]
            step = min(len(view) - self._dest_at, end - start)
            view[self._dest_at : self._dest_at + step] = self._view[start : start + step]
            start += step
            self._dest_at += step
            if self._dest_at == len(view):
                self._dest_next += 1
                self._dest_at = 0
        self._start = start
        if start == end:
            self._start = self._end = 0
        if self._dest_next == len(self._dest):
            self._complete(frames)

    def _advance_payload(self, count: int, frames: list[Frame]) -> int:
        """Counts payload bytes; returns how many lie behind it, in the read-ahead."""
        dest = self._dest
        next_, at = self._dest_next, self._dest_at
        while count and next_ < len(dest):
            left = len(dest[next_]) - at
            if count < left:
                at += count
                count = 0
            else:
                count -= left
                next_ += 1
                at = 0
        self._dest_next, self._dest_at = next_, at
        if next_ == len(dest):
            self._complete(frames)
        return count

    def _complete(self, frames: list[Frame]) -> None:
        assert self._frame is not None
        frames.append(self._frame)
        self._frame = None
        self._free_body()
        self._dest = []
        self._dest_next = self._dest_at = 0


class FrameWriter:
    """A queue of frames as iovecs. Payload is not copied: its memory must stay as it is until `on_sent`."""

    __slots__ = ("_first", "_first_at", "_iovecs", "_marks", "_queued", "_sent")

    def __init__(self) -> None:
        self._iovecs: list[bytes | memoryview] = []
        self._first = 0
        self._first_at = 0
        self._queued = 0
        self._sent = 0
        self._marks: deque[tuple[int, Callable[[], None]]] = deque()

    @property
    def pending_bytes(self) -> int:
        """Queued and not sent yet."""
        return self._queued - self._sent

    @property
    def sent_bytes(self) -> int:
        """Taken by the socket so far."""
        return self._sent

    def push(
        self,
        head: bytes,
        payload: Sequence[memoryview] = (),
        *,
        payload_bytes: int = 0,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Queues a frame: `head` from `encode_head`, then `payload`, `payload_bytes` in all.

        `on_sent` is called once, when the socket has taken every byte of the frame, or from `drop`.
        """
        self._iovecs.append(head)
        if payload:
            self._iovecs += payload
        self._queued += len(head) + payload_bytes
        if on_sent is not None:
            self._marks.append((self._queued, on_sent))

    def push_message(self, message: Message, request_id: int, *, epoch: int = 0) -> None:
        """Queues a message without payload."""
        head = encode_head(message.TYPE, request_id, message.encode(), epoch=epoch)
        self._iovecs.append(head)
        self._queued += len(head)

    def push_slices(
        self,
        slices: Sequence[Slice],
        payload: Sequence[memoryview],
        request_id: int,
        *,
        payload_bytes: int,
        frame_type: FrameType = FrameType.DATA,
        epoch: int = 0,
        is_final: bool = False,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Queues a DATA (or WRITER_WRITE) frame; `payload` is what the slices describe, in order, no piece empty."""
        head = encode_head(
            frame_type,
            request_id,
            encode_slices(slices),
            payload_bytes=payload_bytes,
            epoch=epoch,
            flags=len(slices) | FLAG_FINAL if is_final else len(slices),
        )
        self.push(head, payload, payload_bytes=payload_bytes, on_sent=on_sent)

    def buffers(self) -> list[bytes | memoryview]:
        """What to send next, in order; at most IO_VECTORS_MAX pieces; empty when nothing waits."""
        first = self._first
        views = self._iovecs[first : first + IO_VECTORS_MAX]
        if self._first_at:
            views[0] = memoryview(views[0])[self._first_at :]
        return views

    def advance(self, count: int) -> None:
        """Takes note of `count` bytes sent."""
        self._sent += count
        if self._sent == self._queued:
            self._iovecs.clear()
            self._first = self._first_at = 0
        else:
            self._skip(count)
        marks = self._marks
        while marks and marks[0][0] <= self._sent:
            marks.popleft()[1]()

    def when_sent(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once everything queued so far has been sent or dropped; at once when nothing is queued."""
        if self._sent == self._queued:
            callback()
        else:
            self._marks.append((self._queued, callback))

    def drop(self) -> None:
        """Forgets everything queued (the connection is gone) and calls every outstanding `on_sent`."""
        self._iovecs.clear()
        self._first = self._first_at = 0
        self._sent = self._queued
        while self._marks:
            self._marks.popleft()[1]()

    def _skip(self, count: int) -> None:
        iovecs = self._iovecs
        first = self._first
        count += self._first_at
        ends = list(accumulate(map(len, islice(iovecs, first, first + IO_VECTORS_MAX))))
        passed = bisect_right(ends, count)
        if passed:
            count -= ends[passed - 1]
            first += passed
        self._first_at = count
        if first > IO_VECTORS_MAX:
            del iovecs[:first]
            first = 0
        self._first = first


assert VERSION == 1, "another version needs its own reader, not this one with conditions"

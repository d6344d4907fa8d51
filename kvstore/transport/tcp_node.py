"""The node's end of a TCP connection: pieces of records go out, and granted puts come in, as DATA frames."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.limits import FRAME_PAYLOAD_BYTES_MAX, PAYLOAD_WAKE_BYTES, KiB
from kvstore.transport.base import FetchEvents, Landing
from kvstore.transport.put_lane import CLOSED, OTHER, PutLane, put_lane, replay, takes
from kvstore.transport.tcp import TcpChannel
from kvstore.wire.body import MemoryBudget
from kvstore.wire.frames import Frame, FrameReader
from kvstore.wire.header import FrameType
from kvstore.wire.messages import Grant
from kvstore.wire.slices import Slice

_ANY: Final = 1  # SO_RCVLOWAT: a byte is enough
_TOLD_BYTES_MIN: Final = 128 * KiB  # of a slice, before it is told of: less came along with what stood before it


class OtherPayload(Protocol):
    """Who decides about payload that is not a granted put's: of OFFER and WRITER_WRITE, and legality of DATA."""

    def place_other(self, frame: Frame) -> Sequence[memoryview] | None:
        """As `PayloadSink.place`, for every frame with payload but DATA."""

    def accepts_data(self, frame: Frame) -> bool:
        """Whether DATA belongs to the call in progress; False throws it away. Raises InvalidRequest if illegal."""


class _Progress:
    """How much of one landing has been placed (a slice's destination given out) and filled."""

    __slots__ = ("buffer", "filled_bytes", "placed_bytes")

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.placed_bytes = 0
        self.filled_bytes = 0


class TcpNodeChannel(TcpChannel):
    """See `kvstore.transport.base.NodeChannel`."""

    __slots__ = (
        "_arriving",
        "_events",
        "_landings",
        "_lane",
        "_late",
        "_other",
        "_placed_count",
        "_request_id",
        "_unfetched_id",
        "_wake_bytes",
    )

    def __init__(
        self,
        connected: socket.socket,
        other: OtherPayload,
        *,
        body_bytes_max: int,
        budget: MemoryBudget | None = None,
    ) -> None:
        """
        Args:
            connected: The accepted socket.
            other: Decides about payload that is not a granted put's.
            body_bytes_max: Limit before HELLO; raise it with `reader.allow_bodies`.
            budget: Charged for long bodies on their way.
        """
        super().__init__(connected, FrameReader(self, body_bytes_max=body_bytes_max, budget=budget))
        self._other = other
        self._landings: dict[int, _Progress] = {}
        self._events: FetchEvents | None = None
        self._request_id = 0
        self._placed_count = 0  # frames with payload that have begun
        self._unfetched_id = -1  # request whose payload nobody wants any more; -1 is none's
        self._arriving: Slice | None = None  # the one slice of the DATA frame in progress
        self._wake_bytes = _ANY
        self._lane: PutLane | None = None  # for what comes as our own client sends it
        self._late: list[Frame] = []  # came behind the records that ended their call

    def on_readable(self) -> list[Frame]:
        """See `Channel.on_readable`. Tells of payload on its way, and lets the kernel gather some before the next call.

        A wake-up costs as much as receiving 50 KiB, so while much of a frame is missing the socket counts as readable
        only when PAYLOAD_WAKE_BYTES of it, or the rest, have come.
        """
        if self._lane is not None:
            return self._receive_expected(self._lane)
        frames = super().on_readable()
        if self._landings or self._wake_bytes != _ANY:
            reader = self.reader
            missing = reader.wanted_bytes if reader.in_payload else 0
            arriving = self._arriving
            if arriving is not None and 0 < missing <= arriving.length_bytes - _TOLD_BYTES_MIN:
                assert self._events is not None
                self._events.arrived(arriving, arriving.length_bytes - missing)
            self._wake_at(min(missing, PAYLOAD_WAKE_BYTES) or _ANY)
        return frames

    def _receive_expected(self, lane: PutLane) -> list[Frame]:
        """`on_readable` of what the lane knows; as much as a frame may have at a time."""
        events = self._events
        assert events is not None
        try:
            ended, came = lane.receive(self._socket, FRAME_PAYLOAD_BYTES_MAX)
        except OSError as error:
            self.took_none(error)
            return []
        for items, tables, are_good in came:
            events.came(items, tables, are_good=are_good)
            if self._lane is not lane:  # what the records led to has ended the call
                late, self._late = self._late, []
                return late
        if ended == OTHER:
            return self._leave_lane()
        if ended == CLOSED:
            self._leave_lane()
            self.reader.end_of_stream()
            raise Unavailable(f"{self.peer} closed the connection")
        if lane.is_over:
            self._received_bytes += lane.received_bytes
            self._lane = None
            self._wake_at(_ANY)
            return []
        # a frame of another kind waits until the next `progress`
        self._wake_at(min(lane.expected_bytes, PAYLOAD_WAKE_BYTES))
        return []

    def _leave_lane(self) -> list[Frame]:
        """The general way from here on; the frames that are complete."""
        lane, self._lane = self._lane, None
        if lane is None:
            return []
        self._received_bytes += lane.received_bytes
        if self.fileno() >= 0:
            self._wake_at(_ANY)
        begun, landings = lane.take_apart()
        for landing in landings:
            self._landings[landing.item] = _Progress(landing.buffer)
        return replay(self.reader, begun)

    def _wake_at(self, length_bytes: int) -> None:
        if length_bytes != self._wake_bytes:
            self._wake_bytes = length_bytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, length_bytes)

    @property
    def progress(self) -> int | None:
        """How many bytes have moved while something is expected of the peer, to read or to send; None when nothing is.

        It falls when what was expected has come, and more is. What moves past the channel's own ways is not counted.

        Asked now and then: from then on any byte counts, so that one who sends slowly is seen to send.
        """
        if self.fileno() >= 0:
            self._wake_at(_ANY)
        if self._lane is not None:
            return self._received_bytes + self._lane.received_bytes + self.sent_bytes
        reader = self.reader
        if (reader.is_between or reader.paused) and not self._landings and not self.writer.pending_bytes:
            return None
        return self._received_bytes + self.sent_bytes

    @property
    def held_bytes(self) -> int:
        """See `NodeChannel.held_bytes`."""
        lane = self._lane
        owed = lane.expected_bytes if lane is not None else sum(len(one.buffer) for one in self._landings.values())
        return owed + self.writer.pending_bytes

    def deliver(
        self,
        slices: Sequence[Slice],
        payload: Sequence[memoryview],
        request_id: int,
        *,
        payload_bytes: int,
        epoch: int = 0,
        on_sent: Callable[[], None],
    ) -> None:
        """Queues one DATA frame."""
        self.writer.push_slices(slices, payload, request_id, payload_bytes=payload_bytes, epoch=epoch, on_sent=on_sent)

    def fetch(
        self,
        landings: Sequence[Landing],
        request_id: int,
        events: FetchEvents,
        *,
        epoch: int = 0,
        block_bytes: int = 0,
    ) -> None:
        """Queues one GRANT; the client answers with DATA. Landings of no bytes are not allowed."""
        self._events = events
        self._request_id = request_id
        self._unfetched_id = -1
        if not self._expect(landings, block_bytes):
            for landing in landings:
                assert len(landing.buffer), "nothing to fetch"
                self._landings[landing.item] = _Progress(landing.buffer)
        items = struct.pack(f"<{len(landings)}I", *(landing.item for landing in landings))
        self.writer.push_message(Grant(items=items), request_id, epoch=epoch)

    def _expect(self, landings: Sequence[Landing], block_bytes: int) -> bool:
        """Whether the lane takes these."""
        lane = self._lane
        if lane is None and block_bytes and takes(landings) and not self._landings and self.reader.is_between:
            length = len(landings[0].buffer)
            lane = self._lane = put_lane(self._request_id, record_bytes=length, block_bytes=block_bytes)
        if lane is None or not block_bytes:
            late = self._leave_lane()
            assert not late, "a frame that is whole has been told of"
            return False
        lane.expect(landings)
        return True

    def share_of(self, landings: list[Landing], request_id: int) -> tuple[list[Landing], list[Landing]]:
        """All of them: they come when the client sends them."""
        return landings, []

    def unfetch(self, on_quiet: Callable[[], None] | None = None) -> None:
        """Forgets the landings; the rest of a frame that is being received into them is thrown away."""
        if self._events is not None:
            self._events = None
            self._unfetched_id = self._request_id
        self._arriving = None
        try:
            self._late = self._leave_lane()  # more than none only from within `on_readable`, which tells of them
        except KVStoreError:
            pass  # the stream is defective: the reader says so when it is asked next
        if self._landings:
            self._landings = {}
            self.reader.divert()
        if on_quiet is not None:
            on_quiet()

    def close(self) -> None:
        """Closes the socket, drops what is queued, and lets go of what has arrived. Idempotent."""
        super().close()
        self.reader.let_go()

    def place(self, frame: Frame) -> Sequence[memoryview] | None:
        """PayloadSink of this connection's reader."""
        self._placed_count += 1
        self._arriving = None
        if frame.type is not FrameType.DATA:
            return self._other.place_other(frame)
        if not self._other.accepts_data(frame) or frame.request_id == self._unfetched_id:
            frame.slices = []
            return self.reader.scratch_views(frame.payload_bytes)
        slices = frame.slices
        if len(slices) == 1:
            self._arriving = slices[0]
        return [self._place(one) for one in slices]

    def landed(self, frame: Frame) -> None:
        """A DATA frame is complete: tells which items have all their bytes."""
        for one in frame.slices:
            progress = self._landings.get(one.item)
            if progress is None:
                continue  # an item of this frame ended the call for the others
            assert self._events is not None
            self._events.arrived(one, one.length_bytes)
            progress.filled_bytes += one.length_bytes
            if progress.filled_bytes == len(progress.buffer):
                del self._landings[one.item]
                self._events.fetched(one.item)

    def _place(self, one: Slice) -> memoryview:
        progress = self._landings.get(one.item)
        if progress is None:
            raise InvalidRequest(f"DATA for item {one.item}, which is not granted or is complete: wait for its GRANT")
        if one.offset != progress.placed_bytes:
            raise InvalidRequest(
                f"DATA for item {one.item} begins at {one.offset}, byte {progress.placed_bytes} is next: send in order"
            )
        end = one.offset + one.length_bytes
        if end > len(progress.buffer) or one.record_bytes != len(progress.buffer):
            raise InvalidRequest(
                f"DATA for item {one.item} ends at {end} of {one.record_bytes} bytes, "
                f"{len(progress.buffer)} were offered"
            )
        progress.placed_bytes = end
        return progress.buffer[one.offset : end]

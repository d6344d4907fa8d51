"""GET_INTO: records on their way from the engine into the client's own memory, shared or reached by RDMA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.engine.api import ReadyItem
from kvstore.limits import FRAME_AIM_BYTES, SLICE_BYTES_MAX, SLICES_PER_FRAME_MAX
from kvstore.server.piece_call import OPEN, PieceCall
from kvstore.transport.base import PlaceChannel
from kvstore.wire.header import FrameType
from kvstore.wire.slices import Slice

if TYPE_CHECKING:
    from kvstore.server.connection import Connection

_WORD: Final = 4


class PlaceCall(PieceCall):
    """One GET_INTO. The engine delivers pieces, in its memory or in their places already; about a frame of them goes to
    its places each turn, and is told of once it lies there. Nothing is held until the client has read of it.
    """

    __slots__ = ("_channel",)

    def __init__(
        self, connection: Connection, channel: PlaceChannel, *, count: int, now_ns: int, deadline_ns: int
    ) -> None:
        super().__init__(connection, count, now_ns=now_ns, deadline_ns=deadline_ns)
        self._channel = channel

    # --- Call -------------------------------------------------------------------------------------------------------
    def has_output(self) -> bool:
        if self.over:
            return False
        if self._pieces:
            return self._channel.has_room
        return self._finished and not self._channel.is_moving

    def pump(self) -> None:
        if self._pieces:
            self._place()
        # END says of memory that nothing moves there any more
        if self._finished and not self._pieces and not self.over and not self._channel.is_moving:
            self._end()

    def cancel(self) -> None:
        if self._channel.is_moving:
            self._statuses = bytearray([OPEN]) * len(self._statuses)  # what is halted has not come
        super().cancel()

    def release(self) -> None:
        self._channel.halt()
        super().release()

    def _place(self) -> None:
        """Places about one frame's worth of pieces, and tells of them."""
        slices: list[Slice] = []
        payload: list[memoryview] = []
        placed: list[ReadyItem] = []
        total = 0
        pieces = self._pieces
        while pieces and len(slices) < SLICES_PER_FRAME_MAX and (not slices or total < FRAME_AIM_BYTES):
            item = pieces.popleft()
            placed.append(item)
            total += len(item.data)
            _cut(item, slices, payload)
            if item.last:
                self._statuses[item.index] = 0
        connection = self.connection
        connection.session.send(FrameType.PLACED)

        def release() -> None:
            for one in placed:
                one.release()

        self._channel.deliver(
            slices, payload, self.request_id, payload_bytes=total, epoch=connection.epoch, on_sent=release
        )
        connection.metrics.sent_bytes[connection.flow] += total


def _cut(item: ReadyItem, slices: list[Slice], payload: list[memoryview]) -> None:
    """Adds a piece, as one slice or several of whole checksum blocks."""
    length, block_bytes = len(item.data), item.block_bytes
    step = length if length <= SLICE_BYTES_MAX else SLICE_BYTES_MAX // block_bytes * block_bytes
    for at in range(0, length, step) if length else (0,):
        size = min(step, length - at)
        first = at // block_bytes * _WORD if at else 0
        words = item.crcs if size == length else item.crcs[first : first + -(-size // block_bytes) * _WORD]
        slices.append(
            Slice(
                item.index,
                item.offset + at,
                size,
                0,
                item.last and at + size == length,
                item.content_id,
                item.record_bytes,
                block_bytes,
                words,
            )
        )
        if size:
            payload.append(item.data[at : at + size] if size < length else item.data)

"""GET_INTO: records on their way from the engine into the client's own memory."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvstore.engine.api import Engine, ReadHandle, ReadSpec, ReadyItem
from kvstore.limits import FRAME_AIM_BYTES, SLICE_BYTES_MAX, SLICES_PER_FRAME_MAX
from kvstore.server.call import Call, end_read
from kvstore.telemetry.metrics import Verb
from kvstore.transport.shm_node import ShmNodeChannel
from kvstore.types.results import MissReason
from kvstore.wire.header import FrameType
from kvstore.wire.slices import Slice

if TYPE_CHECKING:
    from kvstore.server.connection import Connection

_OPEN = int(MissReason.DEADLINE)  # what an item counts as that was neither placed nor missed when the call ends
_WORD = 4


class PlaceCall(Call):
    """One GET_INTO. The engine delivers pieces, in its memory or in their places already; a frame of them is told each
    turn, after what was not in its place has been copied there. Nothing is held until the client has read of it.
    """

    __slots__ = ("_channel", "_finished", "_handle", "_pieces", "_starting", "_statuses")

    def __init__(
        self, connection: Connection, channel: ShmNodeChannel, *, count: int, now_ns: int, deadline_ns: int
    ) -> None:
        super().__init__(connection, Verb.GET, now_ns=now_ns, deadline_ns=deadline_ns)
        self._channel = channel
        self._starting = True
        self._statuses = bytearray([_OPEN]) * count
        self._pieces: deque[ReadyItem] = deque()
        self._finished = False
        self._handle: ReadHandle | None = None

    def start(self, engine: Engine, spec: ReadSpec, now_ns: int) -> bool:
        """Begins; True when the engine has delivered everything already. What it has is placed at once, a frame."""
        self._handle = engine.read(spec, self, now_ns=now_ns)
        self._starting = False
        is_delivered = self._finished
        if self._pieces or is_delivered:
            self.connection.send_now()
        return is_delivered

    # --- ReadSink ---------------------------------------------------------------------------------------------------
    def ready(self, item: ReadyItem) -> None:
        """A piece to place, or in its place."""
        if self.over:
            item.release()
            return
        self._pieces.append(item)
        if not self._starting and not self.connection.in_turn:
            self.connection.request_send()

    def missed(self, index: int, reason: MissReason) -> None:
        """An item that will not come; END says so."""
        self._statuses[index] = reason

    def finished(self) -> None:
        """Nothing more comes."""
        self._finished = True
        if not self._starting:
            self.connection.request_send()

    # --- Call -------------------------------------------------------------------------------------------------------
    def has_output(self) -> bool:
        return not self.over and (bool(self._pieces) or self._finished)

    def pump(self) -> None:
        if self._pieces:
            self._place()
        if self._finished and not self._pieces and not self.over:
            self._end()

    def cancel(self) -> None:
        self.release()
        self._end()

    def overdue(self) -> None:
        self.close_unread()

    def release(self) -> None:
        if self._handle is not None and not self._finished:
            self._handle.cancel()
        pieces, self._pieces = self._pieces, deque()
        for item in pieces:
            item.release()

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

    def _end(self) -> None:
        end_read(self, bytes(self._statuses))


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

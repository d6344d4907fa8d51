"""GET_INTO: records on their way from the engine into the client's own memory, shared or reached by RDMA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvstore.engine.api import CachedItem, Engine, NamespaceRef, ReadSpec, ReadyItem
from kvstore.limits import (
    DIGEST_BYTES,
    FRAME_AIM_BYTES,
    FRAME_PAYLOAD_BYTES_MAX,
    SLICE_BYTES_MAX,
    SLICES_PER_FRAME_MAX,
)
from kvstore.server.call import Call
from kvstore.server.piece_call import OPEN, PieceCall
from kvstore.server.reads import Behind, MemoryCall
from kvstore.transport.base import PlaceChannel
from kvstore.transport.shm_node import ShmNodeChannel
from kvstore.types.results import MissReason
from kvstore.wire.header import FrameType
from kvstore.wire.slices import Slice

if TYPE_CHECKING:
    from kvstore.server.connection import Connection, OnSent

_WORD: Final = 4
_new_slice = tuple.__new__  # a third of what the constructor of a named tuple costs


class PlaceCall(PieceCall):
    """One GET_INTO. The engine delivers pieces, in its memory or in their places already; about a frame of them goes to
    its places each turn, and is told of once it lies there. Nothing is held until the client has read of it.
    """

    __slots__ = ("_channel", "_has_missed", "_shared")

    def __init__(
        self, connection: Connection, channel: PlaceChannel, *, count: int, now_ns: int, deadline_ns: int
    ) -> None:
        super().__init__(connection, count, now_ns=now_ns, deadline_ns=deadline_ns)
        self._channel = channel
        self._shared = channel if isinstance(channel, ShmNodeChannel) else None
        self._has_missed = not connection.ends_with_data

    def go_on(self, engine: Engine, spec: ReadSpec, now_ns: int, *, sent: int) -> None:
        """Begins with the items behind the first `sent`, whose keys are the spec's: those have been told already."""
        self._statuses[:sent] = bytes(sent)
        self._hold(engine.read(spec, Behind(self, sent), now_ns=now_ns))
        self._starting = False

    # --- ReadSink ---------------------------------------------------------------------------------------------------
    def missed(self, index: int, reason: MissReason) -> None:
        """An item that will not come; END says so."""
        self._statuses[index] = reason
        self._has_missed = True

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
        """Places about one frame's worth of pieces, and tells of them; all that lie in their places already."""
        slices: list[Slice] = []
        payload: list[memoryview] = []
        placed: list[ReadyItem] = []
        total = to_move = 0
        pieces, shared = self._pieces, self._shared
        while pieces and len(slices) < SLICES_PER_FRAME_MAX and (not slices or to_move < FRAME_AIM_BYTES):
            item = pieces.popleft()
            placed.append(item)
            length = len(item.data)
            total += length
            if shared is None or not shared.is_in_place(item.index, item.data):
                to_move += length
            index, last = item.index, item.last
            if 0 < length <= SLICE_BYTES_MAX:
                fields = (index, item.offset, length, 0, last, item.content_id, item.record_bytes, item.block_bytes)
                slices.append(_new_slice(Slice, (*fields, item.crcs)))
                payload.append(item.data)
            else:
                _cut(item, slices, payload)
            if last:
                self._statuses[index] = 0
        connection = self.connection

        def release() -> None:
            for one in placed:
                one.release()

        connection.metrics.sent_bytes[connection.flow] += total
        if shared is not None and self._finished and not pieces and not self._has_missed:
            connection.metrics.loaded_records += len(self._statuses)
            end_placed(self, shared, slices, payload, release)
            return
        connection.session.send(FrameType.PLACED)
        self._channel.deliver(
            slices, payload, self.request_id, payload_bytes=total, epoch=connection.epoch, on_sent=release
        )


class PlacedMemoryCall(MemoryCall):
    """One GET_INTO of shared memory, of records that all lay in the node's memory when it came."""

    BYTES_MAX = FRAME_PAYLOAD_BYTES_MAX  # they are copied in the loop's turn

    __slots__ = ("_channel", "_places")

    def __init__(
        self,
        connection: Connection,
        engine: Engine,
        namespace: NamespaceRef,
        keys: bytes,
        records: Sequence[CachedItem],
        *,
        channel: ShmNodeChannel,
        places: Sequence[memoryview],
        now_ns: int,
        deadline_ns: int,
    ) -> None:
        """Takes over the first `records`, held."""
        super().__init__(connection, engine, namespace, keys, records, now_ns=now_ns, deadline_ns=deadline_ns)
        self._channel = channel
        self._places = places

    def _send(self, slices: list[Slice], payload: list[memoryview], total: int, on_sent: OnSent) -> None:
        self.connection.metrics.sent_bytes[self.connection.flow] += total
        if self._at == self._count:
            end_placed(self, self._channel, slices, payload, on_sent)
            return
        connection = self.connection
        connection.session.send(FrameType.PLACED)
        self._channel.put_in_place(
            slices, payload, self.request_id, epoch=connection.epoch, is_final=False, on_sent=on_sent
        )

    def _go_on(self) -> None:
        connection, now_ns, at = self.connection, self.connection.now_ns, self._at
        self.over = True
        call = PlaceCall(
            connection, self._channel, count=self._count, now_ns=self.started_ns, deadline_ns=self.deadline_ns
        )
        connection.call = call
        spec = ReadSpec(
            namespace=self._namespace,
            keys=self._keys[at * DIGEST_BYTES :],
            flow=connection.flow,
            deadline_ns=self.deadline_ns,
            places=self._places[at:],
        )
        call.go_on(self._engine, spec, now_ns, sent=at)
        connection.wake_engine()
        connection.request_send()


def end_placed(
    call: Call, channel: ShmNodeChannel, slices: list[Slice], payload: list[memoryview], on_sent: OnSent
) -> None:
    """Ends a read of shared memory, all of whose items are hits, with these last ones of them."""
    connection, metrics = call.connection, call.connection.metrics
    call.over = True
    metrics.get_ns.observe(connection.clock() - call.started_ns)
    connection.end_with_data(call)
    channel.put_in_place(slices, payload, call.request_id, epoch=connection.epoch, is_final=True, on_sent=on_sent)


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

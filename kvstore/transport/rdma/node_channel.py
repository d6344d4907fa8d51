"""The node's end of a connection whose payload moves one-sided: by RDMA where it can, in frames where it cannot.

A frame that says where payload was placed follows the payload, by TCP; it is queued only when the fence of the write
has come back. What RDMA cannot move (memory that is not registered, a pair that is not there or broke) goes in frames
on the connection, byte for byte the same; so a broken pair costs speed, not the call. Before anything that may have
been written by a lost pair is sent again, the client is told to close its end: a packet that is late finds no memory.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvstore.errors import Overloaded, Unavailable
from kvstore.transport.base import FetchEvents, Landing
from kvstore.transport.rdma.pair_queue import Transfer
from kvstore.transport.rdma.rail import Pair
from kvstore.transport.rdma.regions import address_of
from kvstore.transport.rdma.staging import Staging
from kvstore.transport.rdma.verbs import SUCCESS, Piece, Work
from kvstore.transport.tcp_node import OtherPayload, TcpNodeChannel
from kvstore.wire.body import MemoryBudget
from kvstore.wire.slices import NO_CONTENT_ID, Slice

Place = tuple[int, int, int]
"""Address, length and remote key of some bytes of the client's memory."""


class Teller(Protocol):
    """Speaks to the client about payload that does not travel in frames."""

    def tell_placed(self, slices: Sequence[Slice], request_id: int, *, epoch: int) -> None:
        """The bytes of these slices are in the client's memory."""

    def tell_lost(self) -> None:
        """The queue pair is gone: the client closes its end before it reads on."""


class _Moving:
    """A transfer on its way. `is_forgotten` once its channel has no interest in how it ends."""

    __slots__ = ("is_forgotten", "length_bytes", "on_sent")

    def __init__(self, length_bytes: int, on_sent: Callable[[], None] | None) -> None:
        self.length_bytes = length_bytes
        self.on_sent = on_sent
        self.is_forgotten = False


class RdmaNodeChannel(TcpNodeChannel):
    """See `kvstore.transport.base.NodeChannel`.

    Attributes:
        placed_bytes, pulled_bytes: payload that went one-sided.
        fallback_bytes: payload of requests that named regions, but went in frames.
    """

    __slots__ = (
        "_moving",
        "_pair",
        "_places",
        "_places_id",
        "_staging",
        "_teller",
        "fallback_bytes",
        "placed_bytes",
        "pulled_bytes",
    )

    def __init__(
        self,
        connected: socket.socket,
        other: OtherPayload,
        *,
        staging: Staging,
        teller: Teller,
        body_bytes_max: int,
        budget: MemoryBudget | None = None,
    ) -> None:
        """As TcpNodeChannel; `staging` knows which memory is registered."""
        super().__init__(connected, other, body_bytes_max=body_bytes_max, budget=budget)
        self._staging = staging
        self._teller = teller
        self._pair: Pair | None = None
        self._places: Mapping[int, Sequence[Place]] = {}
        self._places_id = -1
        self._moving: dict[_Moving, None] = {}
        self.placed_bytes = self.pulled_bytes = self.fallback_bytes = 0

    @property
    def pending_bytes(self) -> int:
        """As `Channel.pending_bytes`, with what the device has not moved yet."""
        return self.writer.pending_bytes + sum(one.length_bytes for one in self._moving)

    def use(self, pair: Pair | None) -> None:
        """Which queue pair carries payload from now on."""
        self._pair = pair

    def aim(self, request_id: int, places: Mapping[int, Sequence[Place]]) -> None:
        """Where the items of a request lie in the client's memory, whole, in fragments from their byte 0 on."""
        self._places_id, self._places = request_id, places

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
        """Writes into the client's memory, then tells so; or one DATA frame."""

        def send_in_frame() -> None:
            super(RdmaNodeChannel, self).deliver(
                slices, payload, request_id, payload_bytes=payload_bytes, epoch=epoch, on_sent=on_sent
            )

        is_aimed = payload_bytes > 0 and request_id == self._places_id
        pieces = self._pieces_out(slices, payload) if is_aimed else None
        moving = _Moving(payload_bytes, on_sent)

        def ended(status: int) -> None:
            if moving.is_forgotten:
                return
            del self._moving[moving]
            if status == SUCCESS:
                self.placed_bytes += payload_bytes
                self._teller.tell_placed(slices, request_id, epoch=epoch)
                on_sent()
            else:
                self.fallback_bytes += payload_bytes
                self._lose_pair()
                send_in_frame()

        if pieces is None or not self._submit(Work.WRITE, pieces, moving, ended):
            self.fallback_bytes += payload_bytes if is_aimed else 0
            send_in_frame()

    def fetch(self, landings: Sequence[Landing], request_id: int, events: FetchEvents, *, epoch: int = 0) -> None:
        """Reads out of the client's memory; or one GRANT for what cannot be read."""
        granted = []
        for landing in landings:
            pieces = self._pieces_in(landing) if request_id == self._places_id else None
            if pieces is None or not self._pull(landing, pieces, request_id, events, epoch):
                granted.append(landing)
        if granted:
            if request_id == self._places_id:
                self.fallback_bytes += sum(len(landing.buffer) for landing in granted)
            super().fetch(granted, request_id, events, epoch=epoch)

    def unfetch(self) -> None:
        """As `NodeChannel.unfetch`. What is being read is stopped by taking down the pair: nothing is written then."""
        super().unfetch()
        pulling = [one for one in self._moving if one.on_sent is None]
        if pulling:
            for one in pulling:
                one.is_forgotten = True
                del self._moving[one]
            self._lose_pair()

    def close(self) -> None:
        """As `Channel.close`."""
        super().close()
        moving, self._moving = list(self._moving), {}
        for one in moving:
            one.is_forgotten = True
        if moving and self._pair is not None:
            self._pair.close()
        self._pair = None
        for one in moving:
            if one.on_sent is not None:
                one.on_sent()

    def _pull(
        self, landing: Landing, pieces: Sequence[Piece], request_id: int, events: FetchEvents, epoch: int
    ) -> bool:
        length = len(landing.buffer)
        moving = _Moving(length, None)

        def ended(status: int) -> None:
            if moving.is_forgotten:
                return
            del self._moving[moving]
            if status == SUCCESS:
                self.pulled_bytes += length
                events.arrived(Slice(landing.item, 0, length, 0, True, NO_CONTENT_ID, length, length, b""), length)
                events.fetched(landing.item)
            else:
                self.fallback_bytes += length
                self._lose_pair()
                super(RdmaNodeChannel, self).fetch([landing], request_id, events, epoch=epoch)

        return self._submit(Work.READ, pieces, moving, ended)

    def _submit(self, kind: Work, pieces: Sequence[Piece], moving: _Moving, ended: Callable[[int], None]) -> bool:
        """False when the pair takes nothing now."""
        if self._pair is None:
            return False
        self._moving[moving] = None
        try:
            self._pair.submit(Transfer(kind, pieces, ended))
        except (Unavailable, Overloaded):
            del self._moving[moving]
            return False
        return True

    def _lose_pair(self) -> None:
        """Our end goes, then the client is told; once for each pair."""
        if self._pair is not None:
            self._pair.close()
            self._pair = None
            self._teller.tell_lost()

    def _pieces_out(self, slices: Sequence[Slice], payload: Sequence[memoryview]) -> list[Piece] | None:
        """Work requests that bring slices where they belong; None when some memory of ours or theirs is unknown."""
        found: list[Piece] = []
        views = iter(payload)
        for one in slices:
            if not one.length_bytes:
                continue
            ours = self._staging.cut(address_of(next(views)), one.length_bytes)
            theirs = _section(self._places.get(one.item), one.offset, one.length_bytes)
            if ours is None or theirs is None:
                return None
            found += joined(ours, theirs)
        return found

    def _pieces_in(self, landing: Landing) -> list[Piece] | None:
        length = len(landing.buffer)
        ours = self._staging.cut(address_of(landing.buffer), length)
        theirs = _section(self._places.get(landing.item), 0, length)
        return None if ours is None or theirs is None else joined(ours, theirs)


def joined(ours: Sequence[Place], theirs: Sequence[Place]) -> list[Piece]:
    """Two ways to cut the same bytes, as transfers that each lie in one fragment on both sides."""
    found: list[Piece] = []
    remaining = iter(theirs)
    there, room, remote_key = 0, 0, 0
    for here, length, key in ours:
        while length:
            if not room:
                there, room, remote_key = next(remaining)
            take = min(length, room)
            found.append((here, take, key, there, remote_key))
            here, there, length, room = here + take, there + take, length - take, room - take
    return found


def _section(places: Sequence[Place] | None, offset: int, length: int) -> list[Place] | None:
    """Bytes offset..offset + length of an item, as places; None when it has no such bytes."""
    found: list[Place] = []
    for address, size, key in places or ():
        if offset < size and length:
            take = min(length, size - offset)
            found.append((address + offset, take, key))
            length -= take
            offset = 0
        else:
            offset -= min(offset, size)
    return None if length else found

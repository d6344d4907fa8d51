"""The node's end of a connection whose payload moves one-sided: by RDMA where it can, in frames where it cannot.

A frame that says where payload was placed follows the payload, by TCP; it is queued only when the fence of the write
has come back. What RDMA cannot move (a pair that is not there, or broke) goes in frames on the connection, byte for
byte the same; so a broken pair costs speed, not the call. Before anything of a call goes in frames that was to be
written by a pair, the client is told to close its end (LOST): a packet that is late finds no memory.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from kvstore.errors import Overloaded, Unavailable
from kvstore.limits import FRAME_AIM_BYTES, PAIR_UNANSWERED_NS, RDMA_MOVING_BYTES_MAX, SLICES_PER_FRAME_MAX
from kvstore.telemetry.metrics import RdmaMetrics
from kvstore.transport.base import FetchEvents, Landing
from kvstore.transport.rdma.pair_queue import Transfer
from kvstore.transport.rdma.rail import Pair
from kvstore.transport.rdma.regions import ClientRegions, address_of
from kvstore.transport.rdma.staging import Staging
from kvstore.transport.rdma.statuses import Status
from kvstore.transport.rdma.verbs import SUCCESS, Piece, Work
from kvstore.transport.tcp_node import OtherPayload, TcpNodeChannel
from kvstore.wire.body import MemoryBudget
from kvstore.wire.header import FrameType
from kvstore.wire.pairs import Lost, RegionDescriptor
from kvstore.wire.shared import Place, grouped
from kvstore.wire.slices import NO_CONTENT_ID, Slice

Keyed: TypeAlias = tuple[int, int, int]
"""Address, length and key of some bytes: ours with the local key, the client's with the remote one."""


class Holder(Protocol):
    """Whom the channel works for: a connection, whose client and flow class say which pair is its own."""

    def pair(self) -> Pair | None:
        """The queue pair that carries payload now."""

    def now_ns(self) -> int:
        """Monotonic."""

    def moved(self) -> None:
        """A transfer has ended: there may be room, or something to send."""

    def guard(self, work: Callable[[], None]) -> None:
        """Runs what the peer has caused; every fault that it ends with is handled there."""


class _Moving:
    """A transfer on its way. `is_forgotten` once its channel has no interest in how it ends; only that it did."""

    __slots__ = ("_is_quiet", "_waiting", "is_forgotten", "length_bytes", "on_sent")

    def __init__(self, length_bytes: int, on_sent: Callable[[], None] | None) -> None:
        self.length_bytes = length_bytes
        self.on_sent = on_sent  # None for what is being fetched
        self.is_forgotten = False
        self._is_quiet = False
        self._waiting: list[Callable[[], None]] = []

    def quieted(self) -> None:
        """No device touches its memory any more."""
        self._is_quiet = True
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def when_quiet(self, call: Callable[[], None]) -> None:
        """Calls it once the memory is quiet; at once when it is."""
        if self._is_quiet:
            call()
        else:
            self._waiting.append(call)


class RdmaNodeChannel(TcpNodeChannel):
    """See `kvstore.transport.base.PlaceChannel`. Before `serve_for` it is a TCP connection like any other.

    Attributes:
        staging: which memory of ours is registered.
        metrics: of all channels of the worker.
        regions: what the client has told of its memory.
    """

    __slots__ = (
        "_ended_ns",
        "_holder",
        "_moving",
        "_moving_bytes",
        "_pair",
        "_places",
        "_places_id",
        "metrics",
        "regions",
        "staging",
    )

    def __init__(
        self,
        connected: socket.socket,
        other: OtherPayload,
        *,
        staging: Staging,
        metrics: RdmaMetrics,
        body_bytes_max: int,
        budget: MemoryBudget | None = None,
    ) -> None:
        """As TcpNodeChannel."""
        super().__init__(connected, other, body_bytes_max=body_bytes_max, budget=budget)
        self.staging = staging
        self.metrics = metrics
        self.regions = ClientRegions()
        self._holder: Holder | None = None
        self._pair: Pair | None = None  # of the request in progress, or the last one
        self._ended_ns = 0  # when a transfer of its ended last
        self._places: Sequence[Sequence[Keyed]] = ()
        self._places_id = -1
        self._moving: dict[_Moving, None] = {}
        self._moving_bytes = 0

    def serve_for(self, holder: Holder) -> None:
        """From now on requests may name places."""
        self._holder = holder

    @property
    def pending_bytes(self) -> int:
        """As `Channel.pending_bytes`, with what the device has not moved yet."""
        return super().pending_bytes + self._moving_bytes

    # --- PlaceChannel -------------------------------------------------------------------------------------------------
    @property
    def has_room(self) -> bool:
        """See `PlaceChannel`."""
        return self._moving_bytes < RDMA_MOVING_BYTES_MAX and self.writer.pending_bytes < FRAME_AIM_BYTES

    @property
    def is_moving(self) -> bool:
        """See `PlaceChannel`."""
        return bool(self._moving)

    def tell_of(self, descriptors: Sequence[RegionDescriptor]) -> None:
        """The client describes regions. Raises as `ClientRegions.learn`."""
        self.regions.learn(descriptors)

    def drop_regions(self, regions: Sequence[int]) -> None:
        """See `PlaceChannel`."""
        self._places, self._places_id = (), -1
        self.regions.forget(regions)

    def place_into(self, places: Sequence[Place], request_id: int, *, count: int) -> None:
        """See `PlaceChannel`; no memory of the client's is to be had here."""
        self._aim(places, request_id, count)

    def take_from(self, places: Sequence[Place], request_id: int, *, count: int) -> None:
        """See `PlaceChannel`."""
        self._aim(places, request_id, count)

    def halt(self) -> None:
        """See `PlaceChannel`. What is being written is stopped by taking down the pair, here and at the client.

        Also when nothing of it is: who gives up a call has closed its end, and other calls would wait for its answers.
        Memory of ours is given back once no device reads it any more.
        """
        given_up = list(self._moving)
        for one in given_up:
            self._forget(one)
        self._lose_pair(Status.FLUSHED)
        _give_back(given_up)

    def cancelled_late(self, request_id: int) -> None:
        """See `PlaceChannel`. The client has closed its end, whose answers other calls of the pair would wait for."""
        if request_id == self._places_id and self._pair is not None:
            self._pair.close()
            self._pair = None

    def _aim(self, places: Sequence[Place], request_id: int, count: int) -> None:
        assert self._holder is not None, "places before Feature.RDMA was agreed on"
        resolve = self.regions.resolve
        self._places = [[resolve(place) for place in places] for places in grouped(places, count)]
        self._places_id = request_id
        self._pair = self._holder.pair()
        if self._pair is None:
            self.send(Lost(status=Status.FLUSHED), request_id)

    # --- NodeChannel --------------------------------------------------------------------------------------------------
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
        """Writes into the client's memory, then tells so with PLACED; or DATA frames."""
        if request_id != self._places_id:
            super().deliver(slices, payload, request_id, payload_bytes=payload_bytes, epoch=epoch, on_sent=on_sent)
            return

        def tell() -> None:
            self.writer.push_slices(slices, (), request_id, payload_bytes=0, frame_type=FrameType.PLACED, epoch=epoch)
            on_sent()

        pieces = self._pieces_out(slices, payload)
        if pieces is not None and not pieces:
            tell()  # empty records, or records that have no room: the client knows what it has room for
            return
        moving = _Moving(payload_bytes, on_sent)

        def ended(status: int) -> None:
            if status == SUCCESS:
                self.metrics.placed_bytes += payload_bytes
                tell()
            else:
                self._lose_pair(status)
                self._send_in_frames(slices, payload, request_id, epoch, lambda: moving.when_quiet(on_sent))

        if pieces is None or not self._submit(Work.WRITE, pieces, moving, ended):
            self._lose_pair(Status.FLUSHED)
            self._send_in_frames(slices, payload, request_id, epoch, on_sent)

    def fetch(
        self,
        landings: Sequence[Landing],
        request_id: int,
        events: FetchEvents,
        *,
        epoch: int = 0,
        block_bytes: int = 0,
    ) -> None:
        """Reads out of the client's memory; or one GRANT for what cannot be read."""
        if request_id != self._places_id:
            super().fetch(landings, request_id, events, epoch=epoch, block_bytes=block_bytes)
            return
        granted = []
        for landing in landings:
            pieces = self._pieces_in(landing)
            if pieces is None or not self._pull(landing, pieces, request_id, events, epoch):
                granted.append(landing)
        if granted:
            self.metrics.fallback_bytes += sum(len(landing.buffer) for landing in granted)
            self._lose_pair(Status.FLUSHED)
            # what has gaps cannot be checked in one go
            blocks = block_bytes if len(granted) == len(landings) else 0
            super().fetch(granted, request_id, events, epoch=epoch, block_bytes=blocks)

    def unfetch(self, on_quiet: Callable[[], None] | None = None) -> None:
        """As `NodeChannel.unfetch`. What is being read is stopped by taking down the pair."""
        super().unfetch()
        pulling = [one for one in self._moving if one.on_sent is None]
        if pulling:
            self._lose_pair(Status.FLUSHED)
        self._forget_quietly(pulling, on_quiet)

    def close(self) -> None:
        """As `Channel.close`. The pair goes as well where the client may have closed its end.

        It does so when it gives up a call, also one whose END it has not read yet; other calls of the pair would wait
        for answers until all retries are over.
        """
        super().close()
        moving = list(self._moving)
        for one in moving:
            self._forget(one)
        pair, holder = self._pair, self._holder
        if pair is not None and (moving or (holder and holder.now_ns() - self._ended_ns < PAIR_UNANSWERED_NS)):
            pair.close()
        self._pair = None
        _give_back(moving)

    def _forget_quietly(self, pulling: Sequence[_Moving], on_quiet: Callable[[], None] | None) -> None:
        """Calls `on_quiet` when the last of them has ended: no device writes to its memory then."""
        left = len(pulling)

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left and on_quiet is not None:
                on_quiet()

        for one in pulling:
            self._forget(one)
            one.when_quiet(ended)
        if not pulling and on_quiet is not None:
            on_quiet()

    def _send_in_frames(
        self,
        slices: Sequence[Slice],
        payload: Sequence[memoryview],
        request_id: int,
        epoch: int,
        on_sent: Callable[[], None],
    ) -> None:
        """As DATA, in frames of the usual size."""
        parts = list(_frames_of(slices, payload))
        for at, (some, views, length) in enumerate(parts):
            self.metrics.fallback_bytes += length
            done = on_sent if at == len(parts) - 1 else _nothing
            super().deliver(some, views, request_id, payload_bytes=length, epoch=epoch, on_sent=done)

    def _pull(
        self, landing: Landing, pieces: Sequence[Piece], request_id: int, events: FetchEvents, epoch: int
    ) -> bool:
        length = len(landing.buffer)
        moving = _Moving(length, None)

        def ended(status: int) -> None:
            if status == SUCCESS:
                self.metrics.pulled_bytes += length
                events.arrived(Slice(landing.item, 0, length, 0, True, NO_CONTENT_ID, length, length, b""), length)
                events.fetched(landing.item)
            else:
                self._lose_pair(status)
                self.metrics.fallback_bytes += length
                super(RdmaNodeChannel, self).fetch([landing], request_id, events, epoch=epoch)

        return self._submit(Work.READ, pieces, moving, ended)

    def _submit(self, kind: Work, pieces: Sequence[Piece], moving: _Moving, ended: Callable[[int], None]) -> bool:
        """False when the pair takes nothing now."""
        pair, holder = self._pair, self._holder
        if pair is None or holder is None:
            return False

        def on_end(status: int) -> None:
            if moving.is_forgotten:
                return
            self._forget(moving)
            self._ended_ns = holder.now_ns()
            # of a pair that broke every transfer ends as flushed; the pair knows why
            cause = pair.broken if status != SUCCESS and pair.broken is not None else status
            holder.guard(lambda: ended(cause))
            holder.moved()

        self._moving[moving] = None
        self._moving_bytes += moving.length_bytes
        try:
            pair.submit(Transfer(kind, pieces, on_end, moving.quieted))
        except (Unavailable, Overloaded):
            self._forget(moving)
            return False
        return True

    def _forget(self, moving: _Moving) -> None:
        moving.is_forgotten = True
        if moving in self._moving:
            del self._moving[moving]
            self._moving_bytes -= moving.length_bytes

    def _lose_pair(self, status: int) -> None:
        """Our end goes, then the client is told; once for each request."""
        if self._pair is not None:
            self._pair.close()
            self._pair = None
            self.send(Lost(status=status), self._places_id)

    def _pieces_out(self, slices: Sequence[Slice], payload: Sequence[memoryview]) -> list[Piece] | None:
        """Work requests that bring slices where they belong; None when some memory of ours is not registered."""
        found: list[Piece] = []
        views = iter(payload)
        for one in slices:
            if not one.length_bytes:
                continue
            ours = self.staging.cut(address_of(next(views)), one.length_bytes)
            if ours is None:
                return None
            places = self._places[one.item]
            if one.record_bytes <= sum(size for _, size, _ in places):
                found += joined(ours, _section(places, one.offset, one.length_bytes))
        return found

    def _pieces_in(self, landing: Landing) -> list[Piece] | None:
        length = len(landing.buffer)
        ours = self.staging.cut(address_of(landing.buffer), length)
        return None if ours is None else joined(ours, _section(self._places[landing.item], 0, length))


def _give_back(given_up: Sequence[_Moving]) -> None:
    """Memory that was being written out of, once it is quiet."""
    for one in given_up:
        if one.on_sent is not None:
            one.when_quiet(one.on_sent)


def joined(ours: Sequence[Keyed], theirs: Sequence[Keyed]) -> list[Piece]:
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


def _section(places: Sequence[Keyed], offset: int, length: int) -> list[Keyed]:
    """Bytes offset..offset + length of an item that has them."""
    found: list[Keyed] = []
    for address, size, key in places:
        if offset < size and length:
            take = min(length, size - offset)
            found.append((address + offset, take, key))
            length -= take
            offset = 0
        else:
            offset -= min(offset, size)
    assert not length, "an item is shorter than what is moved of it"
    return found


def _frames_of(
    slices: Sequence[Slice], payload: Sequence[memoryview]
) -> Iterator[tuple[list[Slice], list[memoryview], int]]:
    """The slices of each frame, with their views and how many bytes these are."""
    views = iter(payload)
    some: list[Slice] = []
    own: list[memoryview] = []
    total = 0
    for one in slices:
        if some and (total + one.length_bytes > FRAME_AIM_BYTES or len(some) == SLICES_PER_FRAME_MAX):
            yield some, own, total
            some, own, total = [], [], 0
        some.append(one)
        if one.length_bytes:
            own.append(next(views))
            total += one.length_bytes
    yield some, own, total


def _nothing() -> None:
    """What is called for a frame that has nothing to give back."""

"""The node's end of a Unix socket: payload goes to and comes from the client's shared memory where the client names it.

For calls that name no places it is a stream like any other. Descriptors that come with a frame are kept until their
REGION claims them, in order.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.errors import Denied, InvalidRequest
from kvstore.limits import FRAME_AIM_BYTES, REGION_DESCRIPTORS_WAITING_MAX
from kvstore.transport.base import FetchEvents, Landing
from kvstore.transport.exchange import OnDescriptors
from kvstore.transport.shm import has_seals, is_trusted, peer_of
from kvstore.transport.shm_regions import MappedMemory, Regions
from kvstore.transport.tcp_node import OtherPayload, TcpNodeChannel
from kvstore.wire.body import MemoryBudget
from kvstore.wire.header import FrameType
from kvstore.wire.shared import Place, Region, decode_place
from kvstore.wire.slices import Slice

_FD_BYTES: Final = array.array("i").itemsize
_VIEWS_MAX: Final = 1024
_NO_MEMFD: Final = -1
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(REGION_DESCRIPTORS_WAITING_MAX * _FD_BYTES)


class DescriptorSocket(socket.socket):
    """A Unix socket that keeps the descriptors which come with its bytes.

    Attributes:
        descriptors: received and not claimed yet, ours to close; _NO_MEMFD in place of one that is none, and closed.
        lost: more came than fit: they are gone, and what was to come with them is not what it says.
    """

    descriptors: deque[int]
    lost: bool

    @classmethod
    def adopt(cls, connected: socket.socket) -> DescriptorSocket:
        """Takes over a socket."""
        made = cls(fileno=connected.detach())
        made.descriptors = deque()
        made.lost = False
        return made

    def recv_into(self, buffer: memoryview, *_: int) -> int:  # type: ignore[override]
        """Receives once."""
        return self._receive([buffer])

    def recvmsg_into(self, buffers: Sequence[memoryview], *_: int) -> tuple[int]:  # type: ignore[override]
        """Receives once; only the count is told."""
        return (self._receive(buffers),)

    def _receive(self, buffers: Sequence[memoryview]) -> int:
        count, ancillary, flags, _ = super().recvmsg_into(buffers, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        if ancillary or flags & socket.MSG_CTRUNC:
            self._keep(ancillary, flags)
        return count

    def _keep(self, ancillary: Sequence[tuple[int, int, bytes]], flags: int) -> None:
        found = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found.frombytes(data[: len(data) - len(data) % _FD_BYTES])
        self.keep(found.tolist(), bool(flags & socket.MSG_CTRUNC))

    def keep(self, found: Sequence[int], has_lost: bool) -> None:
        """Takes over descriptors that were received; `has_lost` when more came, and are gone.

        What is no memfd is closed at once: a client's own end of this socket, kept here, would keep the connection
        open when the client is gone.
        """
        for fd in found:
            is_memfd = has_seals(fd)
            self.descriptors.append(fd if is_memfd else _NO_MEMFD)
            if not is_memfd:
                os.close(fd)
        if has_lost or len(self.descriptors) > REGION_DESCRIPTORS_WAITING_MAX:
            self.lost = True
            self.drop_descriptors()

    def drop_descriptors(self) -> None:
        """Closes what nobody has claimed."""
        while self.descriptors:
            self.drop_next()

    def drop_next(self) -> None:
        """Closes the first."""
        fd = self.descriptors.popleft()
        if fd != _NO_MEMFD:
            os.close(fd)


class ShmNodeChannel(TcpNodeChannel):
    """See `kvstore.transport.base.PlaceChannel`; the client is on this host.

    Attributes:
        memory: what is mapped for clients, and counts what is copied there.
        views: of places that were named before, as clients use them again; see `view_of`.
    """

    __slots__ = ("_descriptors", "_places", "_places_id", "_regions", "_taken_from", "_taken_id", "memory", "views")

    def __init__(
        self,
        connected: socket.socket,
        other: OtherPayload,
        *,
        body_bytes_max: int,
        memory: MappedMemory,
        budget: MemoryBudget | None = None,
    ) -> None:
        """
        Args:
            connected: The accepted Unix socket.
            memory: What may be mapped for clients.
        """
        self._descriptors = DescriptorSocket.adopt(connected)
        super().__init__(self._descriptors, other, body_bytes_max=body_bytes_max, budget=budget)
        self.memory = memory
        self._regions = Regions(memory, peer_of(self._descriptors))
        self.views: dict[bytes, memoryview] = {}
        self._places: Sequence[memoryview] = ()  # of the last GET_INTO
        self._places_id = -1  # its request id
        self._taken_from: Sequence[memoryview] = ()  # of the last OFFER_FROM
        self._taken_id = -1

    @property
    def on_descriptors(self) -> OnDescriptors:
        """Who keeps the descriptors of whoever receives past the channel."""
        return self._descriptors.keep

    def check_peer(self) -> None:
        """Raises Denied when the client's process is not one to share memory with."""
        peer = peer_of(self._descriptors)
        if not is_trusted(peer):
            raise Denied(
                f"process {peer.pid} of user {peer.uid} may not share memory with this node, which is user "
                f"{os.geteuid()}'s: use TCP, or the same user"
            )

    # --- regions ----------------------------------------------------------------------------------------------------
    def add_region(self, request: Region) -> None:
        """Carries out REGION. Raises InvalidRequest or Overloaded; the region is not there then."""
        descriptors = self._descriptors.descriptors
        if self._descriptors.lost:
            raise InvalidRequest(
                f"more than {REGION_DESCRIPTORS_WAITING_MAX} descriptors were sent before their REGION; send one each"
            )
        if not descriptors:
            raise InvalidRequest("REGION came without a descriptor: send one with the frame (SCM_RIGHTS)")
        fd = descriptors.popleft()
        if fd == _NO_MEMFD:
            raise InvalidRequest(
                f"what came with REGION {request.region} is no memfd; make one with memfd_create(2) and "
                "MFD_ALLOW_SEALING"
            )
        self._regions.add(request.region, fd, request.length_bytes)

    def refuse_region(self) -> None:
        """A REGION could not be read: what came with it is not the next one's."""
        if self._descriptors.descriptors:
            self._descriptors.drop_next()

    def drop_regions(self, regions: Sequence[int]) -> None:
        """Carries out REGION_DROP."""
        self._forget_places()
        for region in regions:
            self._regions.drop(region)

    def place_into(self, places: Sequence[Place], request_id: int, *, count: int) -> Sequence[memoryview]:
        """See `PlaceChannel`; one place for each item."""
        self._places = views = self._views_of(places, count)
        self._places_id = request_id
        return views

    def view_of(self, place: bytes) -> memoryview | None:
        """The memory of one place as it stands in a request; None when it lies outside of the client's regions."""
        view = self.views.get(place)
        if view is None:
            try:
                view = self._regions.view(decode_place(place))
            except InvalidRequest:
                return None
            if len(self.views) >= _VIEWS_MAX:
                self.views.clear()
            self.views[place] = view
        return view

    def take_from(self, places: Sequence[Place], request_id: int, *, count: int) -> None:
        """See `PlaceChannel`; one place for each item."""
        self._taken_from = self._views_of(places, count)
        self._taken_id = request_id

    def _views_of(self, places: Sequence[Place], count: int) -> Sequence[memoryview]:
        if len(places) != count:
            raise InvalidRequest(f"{len(places)} places for {count} records; in shared memory each lies in one piece")
        return [self._regions.view(place) for place in places]

    def _forget_places(self) -> None:
        self.views.clear()  # or they would keep memory mapped that the client has dropped
        self._places = self._taken_from = ()
        self._places_id = self._taken_id = -1

    @property
    def has_room(self) -> bool:
        """See `PlaceChannel`: what is delivered is in its place at once."""
        return True

    @property
    def is_moving(self) -> bool:
        """See `PlaceChannel`."""
        return False

    def halt(self) -> None:
        """See `PlaceChannel`."""

    def cancelled_late(self, request_id: int) -> None:
        """See `PlaceChannel`."""

    def is_in_place(self, item: int, data: memoryview) -> bool:
        """Whether a piece of an item of the last GET_INTO was read into its place: it need not be moved there."""
        return data.obj is self._places[item].obj

    # --- NodeChannel ------------------------------------------------------------------------------------------------
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
        """As `put_in_place`, of a request that has named places; else as over TCP."""
        if request_id != self._places_id:
            super().deliver(slices, payload, request_id, payload_bytes=payload_bytes, epoch=epoch, on_sent=on_sent)
            return
        self.put_in_place(slices, payload, request_id, epoch=epoch, is_final=False, on_sent=on_sent)

    def put_in_place(
        self,
        slices: Sequence[Slice],
        payload: Sequence[memoryview],
        request_id: int,
        *,
        epoch: int,
        is_final: bool,
        on_sent: Callable[[], None],
    ) -> None:
        """As `deliver`: copies what does not lie in its place yet, then queues one PLACED frame.

        Args:
            is_final: every item of the call is a hit, and nothing follows.
        """
        assert request_id == self._places_id, "places of another request"
        places = self._places
        memory = self.memory
        pieces = iter(payload)
        for one in slices:
            if not one.length_bytes:
                continue
            piece, place = next(pieces), places[one.item]
            # a record that has no room is told and not written: the client knows what it has room for
            if piece.obj is place.obj:
                memory.from_drive_bytes += one.length_bytes
            elif one.record_bytes <= len(place):
                place[one.offset : one.offset + one.length_bytes] = piece
                memory.copied_in_bytes += one.length_bytes
        self.writer.push_slices(
            slices,
            (),
            request_id,
            payload_bytes=0,
            frame_type=FrameType.PLACED,
            epoch=epoch,
            is_final=is_final,
        )
        on_sent()

    def fetch(
        self,
        landings: Sequence[Landing],
        request_id: int,
        events: FetchEvents,
        *,
        epoch: int = 0,
        block_bytes: int = 0,
    ) -> None:
        """Copies the payload out of the places that the client named; else as over TCP.

        What is checked and stored are the copies: the client may change its memory at any time.
        """
        if request_id != self._taken_id:
            super().fetch(landings, request_id, events, epoch=epoch, block_bytes=block_bytes)
            return
        for landing in landings:
            if request_id != self._taken_id:
                return  # what an item before this one led to has ended the call
            landing.buffer[:] = self._taken_from[landing.item]
            self.memory.copied_out_bytes += len(landing.buffer)
            events.fetched(landing.item)

    def unfetch(self, on_quiet: Callable[[], None] | None = None) -> None:
        """The call is over: its places are not read any more."""
        self._taken_id = -1
        super().unfetch(on_quiet)

    def share_of(self, landings: list[Landing], request_id: int) -> tuple[list[Landing], list[Landing]]:
        """See `NodeChannel`: copying all at once would keep others waiting."""
        if request_id != self._taken_id:
            return landings, []
        total = 0
        for at, landing in enumerate(landings):
            if total and total + len(landing.buffer) > FRAME_AIM_BYTES:
                return landings[:at], landings[at:]
            total += len(landing.buffer)
        return landings, []

    def close(self) -> None:
        """Closes the socket and lets go of the client's memory. Idempotent."""
        super().close()
        self._descriptors.drop_descriptors()
        self._forget_places()
        self._regions.close()

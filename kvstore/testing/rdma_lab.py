"""A node's RDMA channel and a client's end, over one TCP connection, without data plane: for suites and machines.

What the two say to each other besides what the channel says by itself (offers of queue pairs, regions, what items lie
where) travels as ADMIN_REPLY frames with a letter in front.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.limits import CHECKSUM_BYTES_MIN, FRAME_BODY_BYTES_MAX, RDMA_TRANSFER_BYTES_MAX, SLICE_BYTES_MAX
from kvstore.telemetry.metrics import RdmaMetrics
from kvstore.transport.base import FetchEvents, Landing
from kvstore.transport.rdma.client_lane import ClientLane
from kvstore.transport.rdma.marks import Lane
from kvstore.transport.rdma.node_channel import RdmaNodeChannel
from kvstore.transport.rdma.pair_offer import PairOffer
from kvstore.transport.rdma.pairs import PairTable
from kvstore.transport.rdma.rail import Pair, Rail
from kvstore.transport.rdma.regions import HeldMemory, RegionCache, address_of
from kvstore.transport.rdma.staging import Staging
from kvstore.transport.rdma.verbs import Access, Verbs
from kvstore.transport.tcp import TcpChannel
from kvstore.wire.frames import Frame, FrameReader
from kvstore.wire.header import FrameType
from kvstore.wire.messages import AdminReply, Grant
from kvstore.wire.pairs import Lost, RegionDescriptor, decode_regions, encode_regions
from kvstore.wire.schema import Message
from kvstore.wire.shared import PLACE_GOES_ON, Place
from kvstore.wire.slices import NO_CONTENT_ID, Slice

CLIENT_ID: Final = b"client of a lab."
REMOTE: Final = Access.REMOTE_READ | Access.REMOTE_WRITE
_REGION: Final = Access.LOCAL_WRITE | REMOTE
_WAIT_NS: Final = 240_000_000_000
NO_REGION: Final = RegionDescriptor(0, 4096, 1, 0)
NOWHERE: Final = Place(0, 0, 0)


def chained(places: Sequence[Place]) -> list[Place]:
    """The places of one item, as a message has them."""
    return [one._replace(region=one.region | PLACE_GOES_ON) for one in places[:-1]] + list(places[-1:])


def node_rail(verbs: Verbs, name: str, gid_index: int) -> Rail:
    """As a node has it: nobody may do anything in its memory."""
    return Rail(verbs.open(name), port_number=1, gid_index=gid_index, remote_access=Access.LOCAL_READ)


def client_rail(verbs: Verbs, name: str, gid_index: int) -> Rail:
    """As a client has it."""
    return Rail(verbs.open(name), port_number=1, gid_index=gid_index, remote_access=REMOTE)


class LabNode(RdmaNodeChannel):
    """A node's channel that answers a lab client, and registers what a test hands to it.

    Attributes:
        pairs: of its rail.
        messages: letters of what the client said.
        losses: how often the client was told that the pair is gone.
        before_delivery: called with the slices of each delivery.
    """

    def __init__(self, connected: socket.socket, rail: Rail) -> None:
        self.rail = rail
        self.pairs = PairTable(rail)
        self.places: dict[int, Sequence[Place]] = {}
        self.messages: list[str] = []
        self.losses = 0
        self.before_delivery: Callable[[Sequence[Slice]], None] = lambda slices: None
        metrics = RdmaMetrics()
        staging = Staging(rail)
        super().__init__(connected, self, staging=staging, metrics=metrics, body_bytes_max=FRAME_BODY_BYTES_MAX)
        self.serve_for(self)

    @property
    def placed_bytes(self) -> int:
        """Payload that was written."""
        return self.metrics.placed_bytes

    @property
    def pulled_bytes(self) -> int:
        """Payload that was read."""
        return self.metrics.pulled_bytes

    @property
    def fallback_bytes(self) -> int:
        """Payload that went in frames, though the client had named places for it."""
        return self.metrics.fallback_bytes

    def send(self, message: Message, request_id: int, *, epoch: int = 0) -> None:
        self.losses += message.TYPE is FrameType.LOST
        super().send(message, request_id, epoch=epoch)

    # --- Holder -------------------------------------------------------------------------------------------------------
    def pair(self) -> Pair | None:
        return self.pairs.ready(CLIENT_ID, Lane.FOREGROUND, 0)

    def now_ns(self) -> int:
        return 0

    def moved(self) -> None:
        """A test turns until it has what it waits for."""

    def guard(self, work: Callable[[], None]) -> None:
        work()

    # --- what a data plane does ---------------------------------------------------------------------------------------
    def turn(self) -> None:
        """Moves what can be moved."""
        self.on_writable()
        for frame in self.on_readable():
            if frame.type is FrameType.DATA:
                self.landed(frame)
            else:
                self._hear(bytes(AdminReply.decode(frame.body).value))
        self.rail.on_readable()

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
        self.before_delivery(slices)
        self._prepare(request_id, payload)
        super().deliver(slices, payload, request_id, payload_bytes=payload_bytes, epoch=epoch, on_sent=on_sent)

    def fetch(
        self,
        landings: Sequence[Landing],
        request_id: int,
        events: FetchEvents,
        *,
        epoch: int = 0,
        block_bytes: int = 0,
    ) -> None:
        self._prepare(request_id, [landing.buffer for landing in landings])
        super().fetch(landings, request_id, events, epoch=epoch, block_bytes=block_bytes)

    def shut(self) -> None:
        """Closes all: channel, pairs, memory, device."""
        self.close()
        self.pairs.close()
        self.staging.close()
        self.rail.close()

    def _prepare(self, request_id: int, memory: Sequence[memoryview]) -> None:
        for view in memory:
            if len(view) and self.staging.cut(address_of(view), len(view)) is None:
                self.staging.add(view)
        if self.places:
            count = max(self.places) + 1
            groups = [self.places.get(item) or [NOWHERE] for item in range(count)]
            self.regions.learn([NO_REGION])
            self.place_into([place for group in groups for place in chained(group)], request_id, count=count)

    def _hear(self, text: bytes) -> None:
        letter, rest = chr(text[0]), text[1:]
        self.messages.append(letter)
        if letter == "P":
            ours = self.pairs.open(CLIENT_ID, Lane.FOREGROUND, PairOffer.decode(rest), 0)
            self._say(b"P" + ours.encode())
        elif letter == "C":
            self.pairs.probe(CLIENT_ID, Lane.FOREGROUND, lambda status: self._say(b"S" + bytes([status])))
        elif letter == "R":
            self.regions.learn(decode_regions(rest))
        elif letter == "F":
            item, *numbers = struct.unpack(f"<{len(rest) // 8}Q", rest)
            self.places[item] = [Place(*numbers[at : at + 3]) for at in range(0, len(numbers), 3)]

    def _say(self, text: bytes) -> None:
        self.send(AdminReply(value=text), 0)

    # --- OtherPayload -------------------------------------------------------------------------------------------------
    def place_other(self, frame: Frame) -> Sequence[memoryview] | None:
        raise InvalidRequest(f"{frame.type.name} has no payload in a lab")

    def accepts_data(self, frame: Frame) -> bool:
        return bool(self._landings)


class LabClient:
    """A client's end: regions, one lane, and frames.

    Attributes:
        arrived: slices whose bytes are there.
        memory: where slices belong, for those that come in frames.
        clock: monotonic.
    """

    def __init__(self, connected: socket.socket, rail: Rail) -> None:
        self.rail = rail
        self.channel = TcpChannel(connected, FrameReader(self))
        self.lane = ClientLane(rail, Lane.FOREGROUND)
        self.cache = RegionCache(
            lambda address, length: rail.register(address, length, _REGION),
            region_bytes_max=min(rail.device.limits.region_bytes_max, RDMA_TRANSFER_BYTES_MAX),
            on_close=lambda ids: None,
        )
        self.arrived: list[Slice] = []
        self.memory: Callable[[Slice], Sequence[memoryview]] = lambda one: []
        self.offers: dict[int, Sequence[memoryview]] = {}
        self.clock: Callable[[], int] = time.monotonic_ns
        self._held: list[tuple[HeldMemory, Sequence[memoryview]]] = []  # with what keeps the memory there

    def open_pair(self) -> None:
        """Begins the handshake; turn until the lane is ready."""
        self.say(b"P" + self.lane.begin(self.clock()).encode())

    def describe(self, views: Sequence[memoryview]) -> tuple[list[RegionDescriptor], list[Place]]:
        """Registers the memory of an item, which stays until `shut`: its regions, and where in them it lies."""
        views = [view for view in views if len(view)]
        if not views:
            return [], []
        low = min(map(address_of, views))
        high = max(address_of(view) + len(view) for view in views)
        held = self.cache.hold_address(low, high - low)
        self._held.append((held, views))
        return held.descriptors, [one for view in views for one in held.places(address_of(view), len(view))]

    def name_item(self, item: int, views: Sequence[memoryview]) -> None:
        """As `describe`, and tells the node."""
        descriptors, places = self.describe(views)
        self.say(b"R" + encode_regions(descriptors))
        numbers = [number for one in places for number in one]
        self.say(b"F" + struct.pack(f"<{len(numbers) + 1}Q", item, *numbers))

    def turn(self) -> None:
        """Moves what can be moved."""
        if self.channel.fileno() < 0:
            return
        self.channel.on_writable()
        for frame in self.channel.on_readable():
            self._take(frame)
        self.rail.on_readable()

    def shut(self) -> None:
        """Closes all."""
        self.channel.close()
        self.lane.close()
        for held, _ in self._held:
            self.cache.release(held)
        self._held = []
        self.cache.close()
        self.rail.close()

    def place(self, frame: Frame) -> Sequence[memoryview]:
        """PayloadSink."""
        self.lane.silence(self.lane.number)
        return [view for one in frame.slices for view in self.memory(one)]

    def say(self, text: bytes) -> None:
        """To the node."""
        self.channel.send(AdminReply(value=text), 0)

    def _take(self, frame: Frame) -> None:
        self.arrived += frame.slices
        if frame.type is FrameType.GRANT:
            items = bytes(Grant.decode(frame.body).items)
            for item in struct.unpack(f"<{len(items) // 4}I", items):
                self._send(item, self.offers[item], frame.request_id)
        elif frame.type is FrameType.LOST:
            self.lane.lost(self.lane.number, Lost.decode(frame.body).status, self.clock())
        elif frame.type is FrameType.ADMIN_REPLY:
            self._hear(bytes(AdminReply.decode(frame.body).value))

    def _hear(self, text: bytes) -> None:
        letter, rest, now_ns = chr(text[0]), text[1:], self.clock()
        if letter == "P":
            self.lane.answer(PairOffer.decode(rest), now_ns)
            self.say(b"C")
        elif letter == "S":
            self.lane.probed(rest[0], now_ns)

    def _send(self, item: int, fragments: Sequence[memoryview], request_id: int) -> None:
        whole = memoryview(b"".join(fragments))
        for at in range(0, len(whole), SLICE_BYTES_MAX):
            part = whole[at : at + SLICE_BYTES_MAX]
            is_last = at + len(part) == len(whole)
            one = Slice(item, at, len(part), 0, is_last, NO_CONTENT_ID, len(whole), CHECKSUM_BYTES_MIN, b"")
            self.channel.writer.push_slices([one], [part], request_id, payload_bytes=len(part))


def turn_until(ends: Sequence[LabNode | LabClient], is_done: Callable[[], bool]) -> None:
    """Turns both ends, as many as there are here. Raises Unavailable after four minutes."""
    end_ns = time.monotonic_ns() + _WAIT_NS
    while not is_done():
        for end in ends:
            end.turn()
        if time.monotonic_ns() > end_ns:
            raise Unavailable("it never came")

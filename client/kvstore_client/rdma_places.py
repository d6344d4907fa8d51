"""Which records of a call lie in memory that the node reaches by RDMA, on one connection; and telling it of that."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Final

from kvstore.errors import KVStoreError
from kvstore.limits import PLACES_PER_CALL_MAX, REGIONS_PER_CONNECTION_MAX
from kvstore.transport.rdma.marks import lane_of
from kvstore.transport.rdma.pair_offer import PairOffer
from kvstore.transport.rdma.regions import HeldMemory, address_of
from kvstore.transport.rdma.statuses import Action, Status, name_of
from kvstore.wire.messages import End, Feature
from kvstore.wire.pairs import Paired, PairRequest, Probe, RegionDescriptor, Regions, encode_regions
from kvstore.wire.shared import PLACE_GOES_ON, Place, RegionDrop, encode_places
from kvstore_client.rdma import RdmaPort, RdmaPorts, RdmaWay, WorkerLane
from kvstore_client.shm_places import PlacedRecord, Places

if TYPE_CHECKING:
    from kvstore_client.connection import Connection

RDMA_CALL_BYTES_MIN: Final = 128 * 1024
"""Of one call; less is as quick in frames, which need no fence."""
_FORGET_FROM: Final = REGIONS_PER_CONNECTION_MAX // 2


class RdmaRegions:
    """What the node on one connection knows of our memory (`shm_places.ConnectionRegions` of RDMA)."""

    def __init__(self, way: RdmaWay, port: RdmaPort) -> None:
        self._way = way
        self._port = port
        self._known: set[int] = set()  # regions that the node has been told of, and not to forget
        self._fresh: set[int] = set()  # of these, since the last LOST
        self._lane: WorkerLane | None = None  # of the call in progress, with the number of its end
        self._number = -1
        self._held: list[HeldMemory] = []

    def split(
        self, connection: Connection, records: Sequence[PlacedRecord], chosen: Sequence[int]
    ) -> Generator[int, None, tuple[Places, list[int]]]:
        """Parts `chosen` into those whose memory is registered, at most PLACES_PER_CALL_MAX places, and the rest.

        Makes the queue pair if it is missing and may be made, and tells the node of memory that it does not know. Give
        the places to `settle`.
        """
        self._let_go()
        places, rest = Places(), list(chosen)
        if sum(_length_of(records[at].pieces) for at in chosen) < RDMA_CALL_BYTES_MIN:
            return places, rest
        try:
            if not (yield from self._open_lane(connection)):
                return places, rest
            encoded, rest = self._name(records, chosen, places)
            yield from self._describe(connection)
        except KVStoreError as error:
            self._let_go()
            if not connection.is_idle:
                raise
            self._way.reason = str(error)  # it works without
            return Places(), list(chosen)
        except BaseException:
            self._let_go()
            raise
        places.blob = encode_places(encoded)
        if not encoded:
            self._let_go()
        return places, rest

    def settle(self, places: Places, records: Sequence[PlacedRecord], *, has_ended: bool) -> None:
        """The request is over, as far as we wait.

        Args:
            has_ended: END has come: the node moves nothing any more. Else our end of the pair is taken down, and no
                byte of our memory is touched after that.
        """
        if not has_ended:
            self._silence()
        self._let_go()

    def release(self, places: Places, *, has_ended: bool) -> None:
        """As `settle`, of a request whose places the node only reads from.

        It checks what it fetches, so what it reads too late does no harm, and the pair stays for the other calls.
        """
        self._let_go()

    def framed(self) -> None:
        """Payload of the call in progress comes in a frame: nothing may be written behind it by the pair."""
        self._silence()

    def lost(self, status: int) -> None:
        """The node has no pair any more for the call in progress. What it knows of our memory is told anew."""
        self._fresh.clear()
        if self._lane is not None:
            with self._port.lock:
                self._lane.end.lost(self._number, status, time.monotonic_ns())

    def _silence(self) -> None:
        if self._lane is not None:
            with self._port.lock:
                self._lane.end.silence(self._number)

    def _let_go(self) -> None:
        held, self._held = self._held, []
        for one in held:
            self._port.cache.release(one)
        lane, self._lane = self._lane, None
        if lane is not None:
            with self._port.lock:
                lane.users -= 1
            self._port.end_use()

    # --- the lane -----------------------------------------------------------------------------------------------------
    def _open_lane(self, connection: Connection) -> Generator[int, None, bool]:
        """Whether calls may name places now; makes the pair when nobody else does."""
        port, now_ns = self._port, time.monotonic_ns()
        port.close_idle(now_ns)
        with port.lock:
            lane = self._way.lane(port, lane_of(connection.flow))
            if not lane.is_ready and (lane.is_being_made or not lane.end.link.may_begin(now_ns)):
                return False
            port.begin_use()
            lane.users += 1
            self._lane = lane
            lane.used_ns = now_ns
            if lane.is_ready:
                self._number = lane.end.number
                return True
        if (yield from self._pair(connection, lane)):
            self._number = lane.end.number
            return True
        self._let_go()
        return False

    def _pair(self, connection: Connection, lane: WorkerLane) -> Generator[int, None, bool]:
        """The handshake; False when it did not come to its end, and the connection is fine."""
        port = self._port
        try:
            with port.lock:
                offer = lane.end.begin(time.monotonic_ns())
            answer = yield from connection.ask(PairRequest(offer=offer.encode()), Paired)
            theirs = PairOffer.decode(answer.offer)
            with port.lock:
                lane.end.answer(theirs, time.monotonic_ns())
            ended = yield from connection.ask(Probe(), End)
            status = ended.statuses[0] if ended.statuses else int(Status.GENERAL)
            with port.lock:
                lane.end.probed(status, time.monotonic_ns())
                self._way.reason = "" if lane.is_ready else f"a READ across the new pair ended as {name_of(status)}"
                return lane.is_ready
        except KVStoreError as error:
            with port.lock:
                lane.end.broke(Action.REBUILD, time.monotonic_ns())
            if not connection.is_idle:
                raise
            self._way.reason = str(error)
            return False
        except BaseException:
            with port.lock:
                lane.end.broke(Action.REBUILD, time.monotonic_ns())
            raise

    # --- memory -------------------------------------------------------------------------------------------------------
    def _name(
        self, records: Sequence[PlacedRecord], chosen: Sequence[int], places: Places
    ) -> tuple[list[Place], list[int]]:
        """Holds memory: the places of those records that can have some, and the other records."""
        encoded: list[Place] = []
        rest: list[int] = []
        for at in chosen:
            pieces = records[at].pieces
            own = self._places_of(pieces, room=PLACES_PER_CALL_MAX - len(encoded))
            if not own:
                rest.append(at)
                continue
            places.items.append(at)
            encoded += [one._replace(region=one.region | PLACE_GOES_ON) for one in own[:-1]]
            encoded.append(own[-1])
        return encoded, rest

    def _places_of(self, pieces: Sequence[memoryview], *, room: int) -> list[Place]:
        """Where a record lies; none when it has no bytes, or its memory cannot be registered now."""
        found: list[Place] = []
        for view in pieces:
            if len(view):
                try:
                    held = self._port.cache.hold(view)
                except KVStoreError as error:
                    self._way.reason = str(error)
                    return []
                self._held.append(held)
                found += held.places(address_of(view), len(view))
        return found if len(found) <= room else []

    def _describe(self, connection: Connection) -> Generator[int, None, None]:
        """Tells the node of the regions that it does not know."""
        new: dict[int, RegionDescriptor] = {
            one.region: one for held in self._held for one in held.descriptors if one.region not in self._fresh
        }
        if not new:
            return
        used = {one.region for held in self._held for one in held.descriptors}
        gone = self._known - used
        if gone and len(self._known) + len(new) > _FORGET_FROM:
            self._known &= used
            self._fresh &= used
            blob = b"".join([number.to_bytes(4, "little") for number in gone])
            yield from connection.ask(RegionDrop(regions=blob), End)
        yield from connection.ask(Regions(descriptors=encode_regions(list(new.values()))), End)
        self._known |= new.keys()
        self._fresh |= new.keys()


def join_rdma(connection: Connection, held: socket.socket, way: RdmaWay) -> RdmaRegions | None:
    """What the node reaches of our memory on a new connection, whose socket is `held`; None where it is not by RDMA.

    Raises:
        Unavailable: RDMA is required and cannot be had; the connection is closed.
    """
    welcome = connection.welcome
    if welcome is None or not way.is_wanted:
        return None
    is_offered = Feature.RDMA in Feature(welcome.features)
    try:
        port = way.join(host=held.getsockname()[0], is_offered=is_offered, boot_id=welcome.boot_id)
    except KVStoreError:
        connection.close()
        raise
    return None if port is None else RdmaRegions(way, port)


def goes_by_rdma(ports: RdmaPorts, buffers: Sequence[object]) -> bool:
    """Whether items are so large that they go by RDMA, where some worker has agreed on it; by the first of them."""
    if not ports.is_used or not buffers:
        return False
    try:
        length = memoryview(buffers[0]).nbytes  # type: ignore[arg-type]
    except TypeError:
        return True  # fragments, or an address: the usual way sees how many bytes there are
    return len(buffers) * length >= RDMA_CALL_BYTES_MIN


def _length_of(pieces: Sequence[memoryview]) -> int:
    return sum(map(len, pieces))

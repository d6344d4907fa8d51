"""Which records of a call lie in memory that is shared with the node, on one connection; and telling the node of it."""

from __future__ import annotations

import socket
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.errors import KVStoreError
from kvstore.limits import PAGE_BYTES, PLACES_PER_CALL_MAX, REGIONS_PER_CONNECTION_MAX
from kvstore.types.results import MissReason
from kvstore.wire.messages import End, Feature
from kvstore.wire.shared import Local, LocalReply, Place, Region, RegionDrop, encode_place, encode_places
from kvstore_client.incoming import HIT, OPEN
from kvstore_client.shm import Allocation, SharedMemory, address_of
from kvstore_client.shm_bounce import BOUNCED_CALL_BYTES_MIN, BOUNCED_RECORD_BYTES_MIN, Bounce
from kvstore_client.shm_ways import LocalWay
from kvstore_client.stats import Counters

if TYPE_CHECKING:
    from kvstore_client.connection import Connection

PLACED_BYTES_MIN: Final = 16 * 1024
"""Of one call; less is as quick through the socket."""
_BLOBS_MAX: Final = 1024
_DEADLINE: Final = int(MissReason.DEADLINE)


class PlacedRecord(Protocol):
    """A record of a read or write.

    Attributes:
        status: OPEN while it has not ended.
    """

    status: int

    @property
    def memory(self) -> memoryview | None:
        """Its bytes in the caller's memory, if they lie in one piece."""

    @property
    def pieces(self) -> Sequence[memoryview]:
        """Its bytes in the caller's memory, in order; none when something else lies in between."""


class Places:
    """Where the records of one request are: those at `items` have `blob`'s places.

    Attributes:
        is_bounced: from there they are copied to where they belong.
    """

    __slots__ = ("blob", "found", "is_bounced", "items")

    def __init__(self) -> None:
        self.items: list[int] = []
        self.found: list[memoryview] = []
        self.blob = b""
        self.is_bounced = False


def place_at(view: memoryview) -> Places:
    """The one place of a request whose blob was made by `ConnectionRegions.place_of`."""
    places = Places()
    places.found.append(view)
    return places


class Reach(Protocol):
    """What the node on one connection can reach of our memory."""

    def split(
        self, connection: Connection, records: Sequence[PlacedRecord], chosen: Sequence[int]
    ) -> Generator[int, None, tuple[Places, list[int]]]:
        """Parts `chosen` into those that the request may name places for, and the rest. Give the places to `settle`."""

    def settle(self, places: Places, records: Sequence[PlacedRecord], *, has_ended: bool) -> None:
        """The request is over, as far as we wait; `has_ended` when its END has come."""

    def release(self, places: Places, *, has_ended: bool) -> None:
        """As `settle`, of a request whose places the node only reads from."""

    def framed(self) -> None:
        """Payload of the call in progress comes in a frame, though it has named places."""

    def lost(self, status: int) -> None:
        """LOST came."""


class ConnectionRegions:
    """What the node on one connection knows of the memory that we share with it."""

    def __init__(self, memory: SharedMemory, counters: Counters) -> None:
        self._memory = memory
        self.bounce = Bounce(memory, counters)
        self._blobs: dict[tuple[int, int], bytes] = {}  # of `place_of`, while nothing has changed since
        self._blobs_changes = -1
        self._known: set[int] = set()
        self._refused: set[int] = set()

    def split(
        self, connection: Connection, records: Sequence[PlacedRecord], chosen: Sequence[int]
    ) -> Generator[int, None, tuple[Places, list[int]]]:
        """Parts `chosen` into those of shared memory, at most PLACES_PER_CALL_MAX, and the rest.

        Tells the node of memory that it does not know. What it refuses goes the other way from then on.
        """
        places, rest = Places(), []
        if not self._memory.numbers and not self._known:
            return places, list(chosen)
        encoded: list[Place] = []
        yield from self._drop_freed(connection)
        for at in chosen:
            view = records[at].memory
            found = None if view is None or len(encoded) == PLACES_PER_CALL_MAX else self._find(view)
            if found is not None and found[0].number not in self._known:
                yield from self._share(connection, found[0])
            if found is None or view is None or found[0].number not in self._known:
                rest.append(at)
                continue
            one, offset = found
            places.items.append(at)
            places.found.append(view)
            encoded.append(Place(one.number, offset, len(view)))
        places.blob = encode_places(encoded)
        return places, rest

    def split_bounced(
        self, connection: Connection, rooms: Sequence[int], chosen: Sequence[int]
    ) -> Generator[int, None, tuple[Places, list[int]]]:
        """As `split`, of records that lie elsewhere: the first of them get places from which they are to be copied.

        Args:
            rooms: Bytes of each of `chosen`, at least; 0 for one that is to be sent through the socket.
        """
        places = Places()
        if sum(rooms) < BOUNCED_CALL_BYTES_MIN:
            return places, list(chosen)
        sized = [(at, room) for at, room in zip(chosen, rooms, strict=True) if room]
        views = self.bounce.cut([room for _, room in sized[:PLACES_PER_CALL_MAX]])
        if views:
            one = self._memory.find(address_of(views[0]), len(views[0]))
            if one is not None and one[0].number not in self._known and one[0].number not in self._refused:
                yield from self._drop_freed(connection)
                yield from self._share(connection, one[0])
            places = self._bounced(views) or places
        places.items += [at for at, _ in sized[: len(places.found)]]
        placed = set(places.items)
        return places, [at for at in chosen if at not in placed]

    def bounced_places_of(self, count: int, length: int) -> Places | None:
        """Places for so many records, from which they are to be copied; None when the node does not know them yet, or
        they do not fit."""
        if count > PLACES_PER_CALL_MAX:
            return None
        views = self.bounce.cut([length] * count)
        return self._bounced(views) if len(views) == count and self._known <= self._memory.numbers else None

    def _bounced(self, views: Sequence[memoryview]) -> Places | None:
        encoded = []
        for view in views:
            found = self._memory.find(address_of(view), len(view))
            if found is None or found[0].number not in self._known:
                return None
            encoded.append(encode_place(found[0].number, found[1], len(view)))
        places = Places()
        places.is_bounced = True
        places.found += views
        places.blob = b"".join(encoded)
        return places

    def places_of(self, views: Sequence[memoryview]) -> Places | None:
        """The places of memory that the node knows already; None when it does not know all of it."""
        known = self._known
        if not known or not known <= self._memory.numbers:
            return None  # some is freed, which the node is to be told
        find, encoded = self._memory.find, []
        for view in views:
            length = len(view)
            found = find(address_of(view), length)
            if found is None or found[0].number not in known or (length | found[1]) % PAGE_BYTES:
                return None
            encoded.append(encode_place(found[0].number, found[1], length))
        places = Places()
        places.found += views
        places.blob = b"".join(encoded)
        return places

    def place_of(self, view: memoryview) -> bytes | None:
        """As the blob of `places_of`, of one view; what was told is kept, since buffers are used again and again."""
        changes = self._memory.changes
        if changes != self._blobs_changes or len(self._blobs) >= _BLOBS_MAX:
            self._blobs.clear()
            self._blobs_changes = changes
        key = (address_of(view), len(view))
        blob = self._blobs.get(key)
        if blob is None:
            places = self.places_of((view,))
            if places is None:
                return None
            blob = self._blobs[key] = places.blob
        return blob

    def take_back(self, places: Places) -> None:
        """The request is given up: nothing that the node writes to its places is seen any more."""
        found, places.found = places.found, []
        if places.is_bounced:
            self.bounce.forget()
            return
        for view in found:
            self._memory.detach(address_of(view), len(view))

    def settle(self, places: Places, records: Sequence[PlacedRecord], *, has_ended: bool) -> None:
        """The request is over, as far as we wait: takes back the places into which the node may still write.

        Args:
            records: those of `places.items`, in order.
            has_ended: END has come: only what it says DEADLINE of is not over (see GET_INTO in docs/protocol.md). Else
                more may come of everything but hits, also of what we have given up for bytes that were not right.
        """
        found, places.found = places.found, []
        for record, view in zip(records, found, strict=True):
            status = record.status
            if status in (_DEADLINE, OPEN) or (status != HIT and not has_ended):
                if places.is_bounced:
                    self.bounce.forget()
                    return
                self._memory.detach(address_of(view), len(view))

    def release(self, places: Places, *, has_ended: bool) -> None:
        """See `Reach`; what the node stores is a copy that it has checked."""

    def framed(self) -> None:
        """See `Reach`: what the node may still write is taken back with its place."""

    def lost(self, status: int) -> None:
        """See `Reach`; not of shared memory."""

    def _find(self, view: memoryview) -> tuple[Allocation, int] | None:
        if view.readonly or not len(view) or len(view) % PAGE_BYTES:
            return None
        found = self._memory.find(address_of(view), len(view))
        if found is None or found[1] % PAGE_BYTES:
            return None
        return None if found[0].number in self._refused else found

    def _share(self, connection: Connection, one: Allocation) -> Generator[int, None, None]:
        if len(self._known) >= REGIONS_PER_CONNECTION_MAX:
            self._refused.add(one.number)
            return
        request = Region(region=one.number, length_bytes=one.length_bytes)
        try:
            yield from connection.ask_with_descriptor(request, End, one.fd)
        except KVStoreError:
            if not connection.is_idle:
                raise
            self._refused.add(one.number)  # it works without
        else:
            self._known.add(one.number)

    def _drop_freed(self, connection: Connection) -> Generator[int, None, None]:
        freed = self._known - self._memory.numbers
        if freed:
            self._known -= freed
            blob = b"".join([number.to_bytes(4, "little") for number in freed])
            yield from connection.ask(RegionDrop(regions=blob), End)


def take_back(connection: Connection, places: Places) -> None:
    """As `ConnectionRegions.take_back`, once nobody will read on on the connection."""
    if isinstance(connection.regions, ConnectionRegions):
        connection.regions.take_back(places)


def bounces(connection: Connection, *, count: int, length: int) -> bool:
    """Whether so many records of such a length are better put into memory of ours than sent through the socket."""
    is_worth = length >= BOUNCED_RECORD_BYTES_MIN and count * length >= BOUNCED_CALL_BYTES_MIN
    return is_worth and isinstance(connection.regions, ConnectionRegions)


def learn_way(connection: Connection, local: LocalWay) -> Generator[int, None, bool]:
    """Asks the node on a new TCP connection for its socket; whether to try that."""
    welcome = connection.welcome
    if welcome is None or Feature.SHARED_MEMORY not in Feature(welcome.features):
        local.learn(None)
    else:
        local.learn((yield from connection.ask(Local(), LocalReply)))
    return bool(local.path)


def lies_in_shared_memory(memory: SharedMemory, buffers: Sequence[object]) -> bool:
    """Whether items lie in memory that a node can reach, and are so large that this pays; by the first of them."""
    if not memory.numbers or not buffers:
        return False
    view = buffers[0]
    if type(view) is not memoryview or view.readonly or not view.contiguous:
        return False
    length = view.nbytes
    return len(buffers) * length >= PLACED_BYTES_MIN and memory.find(address_of(view), length) is not None


def send_with_descriptor(held: socket.socket, buffers: Sequence[bytes | memoryview], fd: int) -> int:
    """Sends the first bytes of a frame and a descriptor with them; says how many."""
    return socket.send_fds(held, buffers, [fd], socket.MSG_NOSIGNAL)

"""Parcels: whole records that go the way from the drive to one client together.

They are read into one stretch of memory as one operation, checked in one loop, and sent in one frame: most of what a
record costs in Python is a call or an object for each step, and here one of each serves up to 2 MiB. A parcel is
checked when it is taken, right before it is sent, so that the send finds its bytes in the CPU's cache, and the drive
works meanwhile; or when it lands while the frame of the one before it waits for the socket. Whatever is not usual goes
the general way (`loads`): a record that somebody else wants too, an error of the drive, bytes that are not right.
A reader who sums payload himself gets it unsummed: the header says what it must be, and was checked.
Nothing is kept in the cache on this way: it is taken without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.device.base import IoOp
from kvstore.device.scattered import ScatteredRead
from kvstore.engine.arena import Piece
from kvstore.engine.cache import Cache
from kvstore.engine.catalog import Catalog
from kvstore.engine.division import Starts, divide
from kvstore.engine.flight import Flight
from kvstore.engine.job import IoQueue
from kvstore.engine.loads import Loader
from kvstore.engine.location import DEPTH_BITS, PAGE_BITS, PAGES_BITS
from kvstore.engine.packing import Packed, pack, renumbered
from kvstore.engine.request import Request
from kvstore.engine.segment import SegmentTable
from kvstore.engine.verify import Fault
from kvstore.limits import (
    DIGEST_BYTES,
    PAGE_BYTES,
    READ_WINDOW_BYTES,
)
from kvstore.telemetry.metrics import EngineMetrics

_PLACE_SHIFT: Final = PAGES_BITS + DEPTH_BITS
_PAGES_MASK: Final = (1 << PAGES_BITS) - 1


class Parcel:
    """See `api.Parcel`, and `flight.Bundle` while it is on its way.

    Attributes:
        request: whom it is for.
        wants: (location, the request's index) of its records, in the order of their places in memory.
        starts: of its runs; `segments` those they lie in.
        errors: of runs that could not be read, by number.
        flights: its records one by one, once it goes the general way.
        generations: of the segments it was read from, by number, as they were when it landed.
        packed: what its check has found, when that was made ahead.
    """

    __slots__ = (
        "_parcels",
        "body",
        "count",
        "errors",
        "flights",
        "generations",
        "length_bytes",
        "packed",
        "payload",
        "payload_bytes",
        "piece",
        "request",
        "segments",
        "starts",
        "version",
        "wants",
    )

    def __init__(
        self,
        parcels: Parcels,
        request: Request,
        wants: list[tuple[int, int]],
        starts: Starts,
        segments: list[int],
        piece: Piece,
        version: int,
    ) -> None:
        self._parcels = parcels
        self.request = request
        self.wants = wants
        self.starts = starts
        self.segments = segments
        self.piece = piece
        self.length_bytes = len(piece.view)
        self.version = version
        self.errors: dict[int, OSError] = {}
        self.flights: list[Flight] = []
        self.generations: dict[int, int] = {}
        self.packed: Packed | None = None
        self.body = b""
        self.count = 0
        self.payload: list[memoryview] = []
        self.payload_bytes = 0

    @property
    def indices(self) -> Sequence[int]:
        """See `api.Parcel`."""
        items = self.request.spec.items
        return [index if items is None else items[index] for _, index in self.wants]

    def done(self, op: IoOp) -> None:
        """It has been read, or parts of it have failed to be."""
        assert isinstance(op, ScatteredRead)
        for run, (came_bytes, error) in (op.faults or {}).items():
            if error is not None:
                self.errors[run] = error
            else:
                # Behind the allocated end of the drive: what stands in memory there is somebody else's old bytes.
                at, length = self.starts[run][1], op.lengths[run]
                self.piece.view[at + came_bytes : at + length] = bytes(length - came_bytes)
        self._parcels.landed(self)

    def unpack(self) -> None:
        """See `flight.Bundle`."""
        self._parcels.unpack(self)

    def release(self) -> None:
        """See `api.Parcel`."""
        self.piece.release()
        request = self.request
        request.staged_bytes -= self.length_bytes
        if request.reader.hungry:
            request.reader.memory_came_back(request)


class Parcels:
    """Starts parcels, and checks those that have landed."""

    def __init__(
        self,
        *,
        queue: IoQueue,
        table: SegmentTable,
        catalog: Catalog,
        cache: Cache,
        loader: Loader,
        metrics: EngineMetrics,
    ) -> None:
        self._queue = queue
        self._table = table
        self._catalog = catalog
        self._cache = cache
        self._loader = loader
        self._metrics = metrics

    @property
    def usable(self) -> bool:
        """Whether records are read this way at all: not when they are to stay in memory."""
        return not self._cache.capacity_bytes

    # --- starting ----------------------------------------------------------------------------------------------------
    def start(self, request: Request) -> bool | None:
        """Read the next records of a request. False when its window is full or there is no memory (`blocked`).

        None: the next one is on its way already, or too long, and has to go the general way.
        """
        wants, at = request.wants, request.next_want
        table = self._table
        cut = divide(wants, at, first_byte=table.first_byte, segment_bytes=table.segment_bytes)
        if cut is None:
            return None
        end, starts, pages, locations, offsets, lengths, segments = cut
        flights = self._loader.flights
        if flights and not flights.keys().isdisjoint(locations):
            return None
        length = pages * PAGE_BYTES
        if request.staged_bytes + length > READ_WINDOW_BYTES and request.staged_bytes > length:
            return False
        piece = self._cache.allocate(length)
        if piece is None:
            request.blocked = True
            return False
        request.next_want = end
        request.staged_bytes += length
        parcel = Parcel(self, request, wants[at:end], starts, segments, piece, self._catalog.version)
        flights.update(dict.fromkeys(locations, parcel))
        table.hold_all(segments)
        self._queue.submit(ScatteredRead(offsets, lengths, piece.view, flow=request.spec.flow, owner=parcel.done))
        count = len(starts)
        self._loader.operations += count
        self._loader.started += count
        self._metrics.read_ios += count
        return True

    # --- landing -----------------------------------------------------------------------------------------------------
    def landed(self, parcel: Parcel) -> None:
        """All of it has been read, or has failed to be."""
        if parcel.flights or parcel.errors:
            self._hand_over(parcel)
            return
        loader, table, request, wants = self._loader, self._table, parcel.request, parcel.wants
        flights = loader.flights
        if len(flights) == len(wants):
            flights.clear()
        else:
            for location, _ in wants:
                del flights[location]
        # from here on the segments may be evicted: these are the bytes of those that they were
        segments = parcel.segments
        parcel.generations = table.generations_of(segments)
        table.release_all(segments)
        loader.operations -= len(segments)
        if request.closed:
            parcel.release()
        else:
            request.parcel_landed(parcel)

    def unpack(self, parcel: Parcel) -> None:
        """Let others join its records, each as a flight: from here on it goes the general way."""
        request, flights = parcel.request, self._loader.flights
        keys, ref = request.keys, request.spec.namespace
        firsts = {first for first, _, _ in parcel.starts}
        at = 0
        for number, (location, index) in enumerate(parcel.wants):
            if number in firsts:
                at = 0
            length = (location >> DEPTH_BITS & _PAGES_MASK) * PAGE_BYTES
            key = keys[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            flight = Flight(
                location, ref, key, location, parcel.version, [(request, index)], at=at, length_bytes=length
            )
            flights[location] = flight
            parcel.flights.append(flight)
            at += length

    def _hand_over(self, parcel: Parcel) -> None:
        """Its runs end as if each had been a load of its own."""
        if not parcel.flights:
            self.unpack(parcel)
        self._table.hold_apart(parcel.segments)
        starts = parcel.starts
        ends = [*((first, at) for first, at, _ in starts[1:]), (len(parcel.flights), parcel.length_bytes)]
        pieces = parcel.piece.split([until - at for (_, at, _), (_, until) in zip(starts, ends, strict=True)])
        for run, ((first, _, place), (last, _), piece) in enumerate(zip(starts, ends, pieces, strict=True)):
            self._loader.take_over(
                parcel.flights[first:last],
                piece,
                place >> PAGE_BITS,
                starter=parcel.request,
                error=parcel.errors.get(run),
            )

    # --- checking ----------------------------------------------------------------------------------------------------
    def check(self, parcel: Parcel) -> Packed:
        """Check what has landed, and pack it for the wire; once, however often it is asked for."""
        packed = parcel.packed
        if packed is None:
            request = parcel.request
            packed = parcel.packed = pack(
                parcel.piece.view,
                parcel.wants,
                request.keys,
                request.spec.namespace,
                parcel.generations,
                sums=request.sums,
            )
        return packed

    def open(self, parcel: Parcel) -> bool:
        """Take what has landed and is right; False when nothing is.

        What is not right is read once more, the general way, where it lies then.
        """
        request = parcel.request
        packed = self.check(parcel)
        if packed.faults:
            self._part_with(parcel, packed.faults)
        count = packed.count
        self._metrics.read_records += count
        if self._loader.has_suspects:
            for location, _ in parcel.wants:
                self._loader.trust(location)
        if not count:
            parcel.release()
            return False
        items = request.spec.items
        body = packed.body if items is None else renumbered(packed.body, count, items)
        parcel.body, parcel.count, parcel.payload = body, count, packed.payload
        parcel.payload_bytes = sum(map(len, packed.payload))
        request.packed(parcel.wants)
        return True

    def _part_with(self, parcel: Parcel, faults: Sequence[tuple[int, Fault]]) -> None:
        """Take the wants at these places out of a parcel: they have another end."""
        request, wants = parcel.request, parcel.wants
        bad = {at for at, _ in faults}
        parcel.wants = [one for at, one in enumerate(wants) if at not in bad]
        for at, fault in faults:
            location, index = wants[at]
            if fault is Fault.OTHER:
                self._metrics.key_collisions += 1
                request.absent(index)
            else:
                self._metrics.checksum_errors_read += 1
                request.read_again(location, index)

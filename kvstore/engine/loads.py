"""Reads in flight: one per record however many ask (single flight), verified before anybody sees a byte: by us, or what
one reader alone gets by him (`Waiter.sums`).

A load is one contiguous stretch of a segment: neighbouring whole records, the header of one, or some checksum blocks
of one. What does not verify is read once more, alone; a record that is bad twice is quarantined. A drive's error says
nothing about the bytes: the record is kept unless it errs again. Failures are never remembered as results.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.device.base import IoKind, IoOp
from kvstore.engine.api import NamespaceRef
from kvstore.engine.arena import Piece
from kvstore.engine.cache import Cache, HeaderLru, RecordFacts
from kvstore.engine.catalog import Catalog
from kvstore.engine.flight import HEADER, Bundle, Flight, FlightKey, Starter
from kvstore.engine.job import IoQueue
from kvstore.engine.location import DEPTH_BITS, PAGE_BITS, PAGES_BITS, location_page, location_pages, location_segment
from kvstore.engine.namespaces import index_key
from kvstore.engine.readplan import Range
from kvstore.engine.segment import SegmentTable
from kvstore.engine.verify import Fault, check_header, check_run, header_pages_of
from kvstore.limits import (
    DEVICE_IO_BYTES_MAX,
    DIGEST_BYTES,
    PAGE_BYTES,
    QUEUED_OPS_MAX,
    READ_TURN_OPS_MAX,
    SUSPECT_RECORDS_MAX,
)
from kvstore.telemetry.metrics import EngineMetrics
from kvstore.types.checksum import block_count, crcs_match
from kvstore.types.flow import FlowClass
from kvstore.types.results import MissReason

_HEADER_PAGES_AT_FIRST: Final = 1
_WORD: Final = 4
_SEGMENT_SHIFT: Final = PAGE_BITS + PAGES_BITS + DEPTH_BITS
_PAGES_MASK: Final = (1 << PAGES_BITS) - 1
_HALVES: Final = struct.Struct("<QQ")


class _Load:
    """One stretch of the drive being read into one piece."""

    __slots__ = (
        "error",
        "finish",
        "flights",
        "flow",
        "left",
        "length_bytes",
        "operations",
        "piece",
        "segment",
        "starter",
    )

    def __init__(
        self,
        flights: Sequence[Flight],
        piece: Piece,
        segment: int,
        starter: Starter,
        flow: FlowClass,
        finish: Callable[[_Load], None],
    ) -> None:
        self.flights = flights
        self.piece = piece
        self.segment = segment
        self.starter = starter
        self.flow = flow
        self.finish = finish
        self.length_bytes = 0
        self.operations = self.left = 0
        self.error: OSError | None = None

    def done(self, op: IoOp) -> None:
        """One of its operations has completed."""
        if op.error is not None:
            self.error = op.error
        elif op.done_bytes < op.length_bytes:
            # Behind the allocated end of the drive: what stands in memory there is somebody else's old bytes.
            op.buffers[0][op.done_bytes :] = bytes(op.length_bytes - op.done_bytes)
        self.left -= 1
        if not self.left:
            self.finish(self)


class Loader:
    """Starts loads, shares them, verifies them and tells the waiters.

    Args:
        is_current: whether a namespace was dropped since; what was read for it is not cached then.
        quarantine: called with (namespace, key, location) of a record that is bad for good.

    Attributes:
        flights: what is on its way; see `flight`.
        operations: device operations in flight.
        started: device operations ever started.
        headers: facts of records that were read in pieces.
        tick: the time of the present turn.
    """

    def __init__(
        self,
        *,
        queue: IoQueue,
        table: SegmentTable,
        catalog: Catalog,
        cache: Cache,
        headers: HeaderLru,
        metrics: EngineMetrics,
        is_current: Callable[[NamespaceRef], bool],
        quarantine: Callable[[NamespaceRef, bytes, int], None],
    ) -> None:
        self._queue = queue
        self._table = table
        self._catalog = catalog
        self._cache = cache
        self.headers = headers
        self._metrics = metrics
        self._is_current = is_current
        self._quarantine = quarantine
        self._suspects: dict[int, None] = {}
        self.flights: dict[FlightKey, Flight | Bundle] = {}
        self.operations = 0
        self.started = 0
        self.tick = 1

    def flight(self, name: FlightKey) -> Flight | None:
        """What is on its way under that name, to join."""
        found = self.flights.get(name)
        if found is None or isinstance(found, Flight):
            return found
        found.unpack()
        return self.flight(name)

    @property
    def has_room(self) -> bool:
        """Whether the queue takes all that one turn of a request may begin: what it refused half-way would be left
        holding segments and memory."""
        return self._queue.queued + READ_TURN_OPS_MAX <= QUEUED_OPS_MAX

    def submit(self, op: IoOp) -> None:
        """Queue an operation that counts as one of these, and says so when it has ended by `operations`."""
        self.operations += 1
        self.started += 1
        self._metrics.read_ios += 1
        self._queue.submit(op)

    # --- starting ----------------------------------------------------------------------------------------------------
    def whole(self, wanted: Sequence[tuple[int, int]], keys: bytes, pages: int, starter: Starter) -> bool:
        """Read whole records that lie side by side. False when there is no memory now.

        Args:
            wanted: (location, the starter's index) in order of place, none twice, none in flight.
            keys: record keys, in the order of the starter's indices.
            pages: of all together.
        """
        length = pages * PAGE_BYTES
        piece = self._cache.allocate(length)
        if piece is None:
            return False
        ref = starter.spec.namespace
        version = self._catalog.version
        in_flight = self.flights
        wanted_in_cache = starter.force_cache
        flights = []
        at = 0
        for location, index in wanted:
            length_bytes = (location >> DEPTH_BITS & _PAGES_MASK) * PAGE_BYTES
            flight = in_flight[location] = Flight(
                location,
                ref,
                keys[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES],
                location,
                version,
                [(starter, index)],
                at=at,
                length_bytes=length_bytes,
                wanted_in_cache=wanted_in_cache,
            )
            flights.append(flight)
            at += length_bytes
        if starter.doubted:
            for flight, (_, index) in zip(flights, wanted, strict=True):
                flight.second = index in starter.doubted
        segment = wanted[0][0] >> _SEGMENT_SHIFT
        self._begin(_Load(flights, piece, segment, starter, starter.spec.flow, self._whole_done), 0, length)
        return True

    def header(
        self, ref: NamespaceRef, key: bytes, location: int, *, starter: Starter, flow: FlowClass
    ) -> Flight | None:
        """Read the header of one record."""
        return self._header(
            Flight((location, *HEADER), ref, key, location, self._catalog.version, []),
            _HEADER_PAGES_AT_FIRST,
            starter,
            flow,
        )

    def part(
        self, ref: NamespaceRef, facts: RecordFacts, blocks: Range, *, starter: Starter, flow: FlowClass
    ) -> Flight | None:
        """Read some checksum blocks of one record; `blocks` is (offset, length), whole blocks of its payload."""
        location = facts.location
        flight = Flight((location, *blocks), ref, facts.key, location, self._catalog.version, [])
        return self._part(flight, facts, blocks, starter, flow)

    def _header(self, flight: Flight, pages: int, starter: Starter, flow: FlowClass) -> Flight | None:
        length = min(pages, location_pages(flight.location)) * PAGE_BYTES
        piece = self._cache.allocate(length)
        if piece is None:
            return None
        self.flights[flight.name] = flight
        flight.length_bytes = length
        load = _Load([flight], piece, location_segment(flight.location), starter, flow, self._header_done)
        self._begin(load, 0, length)
        return flight

    def _part(
        self, flight: Flight, facts: RecordFacts, blocks: Range, starter: Starter, flow: FlowClass
    ) -> Flight | None:
        offset, length = blocks
        start = offset // PAGE_BYTES * PAGE_BYTES
        end = -(-(offset + length) // PAGE_BYTES) * PAGE_BYTES
        piece = self._cache.allocate(end - start)
        if piece is None:
            return None
        self.flights[flight.name] = flight
        flight.at = offset - start
        flight.length_bytes = length

        def finish(load: _Load) -> None:
            self._part_done(load, facts, blocks)

        load = _Load([flight], piece, location_segment(flight.location), starter, flow, finish)
        self._begin(load, facts.header_pages * PAGE_BYTES + start, end - start)
        return flight

    def _begin(self, load: _Load, offset: int, length: int) -> None:
        """Queue the operations that fill `load.piece` from `offset` of its first record on."""
        table, queue, flow, view = self._table, self._queue, load.flow, load.piece.view
        table.hold(load.segment)
        place = table.offset(load.segment, location_page(load.flights[0].location)) + offset
        load.length_bytes = length
        load.starter.staged_bytes += length
        count = 1
        if length == len(view) and length <= DEVICE_IO_BYTES_MAX:
            queue.submit(IoOp(IoKind.READ, place, (view,), flow=flow, owner=load.done))
        else:
            starts = range(0, length, DEVICE_IO_BYTES_MAX)
            count = len(starts)
            for at in starts:
                end = min(at + DEVICE_IO_BYTES_MAX, length)
                queue.submit(IoOp(IoKind.READ, place + at, (view[at:end],), flow=flow, owner=load.done))
        load.operations = load.left = count
        self.operations += count
        self.started += count
        self._metrics.read_ios += count

    # --- whole records -----------------------------------------------------------------------------------------------
    def take_over(
        self, flights: Sequence[Flight], piece: Piece, segment: int, *, starter: Starter, error: OSError | None
    ) -> None:
        """End a read of neighbours that somebody else has started, as one operation, and which has completed.

        Takes over `piece`, a hold on `segment`, and what the starter has staged.
        """
        load = _Load(flights, piece, segment, starter, starter.spec.flow, self._whole_done)
        load.length_bytes = piece.length
        load.operations = 1
        load.error = error
        self._whole_done(load)

    def _whole_done(self, load: _Load) -> None:
        self._landed(load)
        if load.error is not None:
            self._whole_erred(load)
            self._table.release(load.segment)
            return
        generation = int(self._table.generation[load.segment])
        # one namespace: a load is of one request, or of one record that is read again
        found = check_run(load.piece.view, load.flights, load.flights[0].ref, generation, sums=self._which_to_sum(load))
        kept: set[Flight] = set()
        if self._cache.capacity_bytes:
            for flight, facts in zip(load.flights, found, strict=True):
                if isinstance(facts, RecordFacts) and self._admits(flight, facts):
                    kept.add(flight)
        sound = [facts for facts in found if isinstance(facts, RecordFacts)] if not kept else []
        if len(sound) == len(found):
            self._share(load, sound)
        else:
            self._divide(load, found, kept)
        self._table.release(load.segment)

    def _which_to_sum(self, load: _Load) -> list[bool] | None:
        """Whether each record of a load is summed, None for all: not those that one reader gets who sums them himself.

        What may stay in memory is for others, too, and what was wrong before is judged here.
        """
        if self._cache.capacity_bytes or load.starter.sums:
            return None
        return [one.second or len(one.waiters) != 1 or one.waiters[0][0].sums for one in load.flights]

    def _admits(self, flight: Flight, facts: RecordFacts) -> bool:
        if flight.wanted_in_cache:
            return self._cache.fits(facts.record_bytes)
        return self._cache.admits(facts.key, facts.record_bytes)

    def _share(self, load: _Load, found: Sequence[RecordFacts]) -> None:
        """Every record is good and none stays in memory: all are served from the one piece."""
        piece, flights, starter = load.piece, self.flights, load.starter
        view = piece.view
        run: list[tuple[int, int, RecordFacts]] = []
        shared: list[tuple[Flight, RecordFacts]] = []
        for flight, facts in zip(load.flights, found, strict=True):
            del flights[flight.name]
            waiters = flight.waiters
            waiter, index = waiters[0]
            if len(waiters) == 1 and waiter is starter:
                run.append((index, flight.at + facts.header_pages * PAGE_BYTES, facts))
            else:
                shared.append((flight, facts))
        if self._suspects:
            for flight in load.flights:
                self._trust(flight)
        starter.loaded_run(piece, view, run)
        for flight, facts in shared:
            start = flight.at + facts.header_pages * PAGE_BYTES
            payload = view[start : start + facts.record_bytes]
            for waiter, index in flight.waiters:
                waiter.loaded(index, facts, piece, payload, 0, facts.crcs)
        self._metrics.read_records += len(found)
        piece.release()

    def _divide(self, load: _Load, found: Sequence[RecordFacts | Fault], kept: set[Flight]) -> None:
        """Each record gets memory of its own: to be cached, served, or read again."""
        pieces = load.piece.split([flight.length_bytes for flight in load.flights])
        for flight, facts, piece in zip(load.flights, found, pieces, strict=True):
            if isinstance(facts, Fault):
                self._faulty(flight, facts, piece, load)
            else:
                del self.flights[flight.name]
                self._trust(flight)
                self._deliver_own(flight, facts, piece, keep=flight in kept)

    def _deliver_own(self, flight: Flight, facts: RecordFacts, piece: Piece, *, keep: bool) -> None:
        header_bytes = facts.header_pages * PAGE_BYTES
        if not keep or not self._still_there(flight):
            self._deliver(flight, facts, piece, piece.view[header_bytes : header_bytes + facts.record_bytes])
            piece.release()
            return
        kept: Piece | None = None
        if piece.length > header_bytes:
            header, piece = piece.split([header_bytes, piece.length - header_bytes])
            header.release()
            kept = piece
            kept.hold()  # the cache's; inserting may evict, this record included
        record = self._cache.insert(flight.ref.salt, facts, kept, tick=self.tick)
        self._deliver(flight, facts, piece, record.view)
        piece.release()

    def _deliver(self, flight: Flight, facts: RecordFacts, piece: Piece, payload: memoryview) -> None:
        self._metrics.read_records += 1
        for waiter, index in flight.waiters:
            waiter.loaded(index, facts, piece, payload, 0, facts.crcs)

    def _still_there(self, flight: Flight) -> bool:
        """Whether the record was neither deleted, evicted, moved nor dropped while it was on its way."""
        if flight.version != self._catalog.version and (
            self._catalog.index.get(*_HALVES.unpack(index_key(flight.ref, flight.key))) != flight.location
        ):
            return False
        return self._is_current(flight.ref)

    # --- headers and blocks ------------------------------------------------------------------------------------------
    def _header_done(self, load: _Load) -> None:
        self._landed(load)
        flight = load.flights[0]
        data = load.piece.view[: flight.length_bytes]
        pages = header_pages_of(data)
        generation = int(self._table.generation[load.segment])
        if load.error is not None:
            self._err(flight)
        elif len(data) < pages * PAGE_BYTES <= location_pages(flight.location) * PAGE_BYTES:
            self._again(flight, self._header(flight, pages, load.starter, load.flow))
        else:
            facts = check_header(data, flight.ref, flight.key, flight.location, generation)
            if isinstance(facts, RecordFacts):
                del self.flights[flight.name]
                self.headers.put(generation, facts)
                self._trust(flight)
                for waiter, index in flight.waiters:
                    waiter.headed(index, facts)
            elif facts is Fault.OTHER:
                self._collide(flight)
            elif self._is_second(flight):
                self._condemn(flight)
            else:
                self._again(flight, self._header(flight, _HEADER_PAGES_AT_FIRST, load.starter, load.flow))
        self._end(load)

    def _part_done(self, load: _Load, facts: RecordFacts, blocks: Range) -> None:
        self._landed(load)
        flight = load.flights[0]
        offset, length = blocks
        payload = load.piece.view[flight.at : flight.at + length]
        first = offset // facts.block_bytes * _WORD
        crcs = facts.crcs[first : first + block_count(length, facts.block_bytes) * _WORD]
        if load.error is not None:
            self._err(flight)
        elif crcs_match(payload, facts.block_bytes, crcs):
            del self.flights[flight.name]
            self._trust(flight)
            self._metrics.read_records += 1
            for waiter, index in flight.waiters:
                waiter.loaded(index, facts, load.piece, payload, offset, crcs)
        elif self._is_second(flight):
            self.headers.forget(flight.location, int(self._table.generation[load.segment]))
            self._condemn(flight)
        else:
            self._again(flight, self._part(flight, facts, blocks, load.starter, load.flow))
        self._end(load)

    # --- what went wrong ---------------------------------------------------------------------------------------------
    def _faulty(self, flight: Flight, fault: Fault, piece: Piece, load: _Load) -> None:
        """A whole record is not what it should be: read it once more, alone and into the same memory, or give up."""
        if fault is Fault.OTHER:
            piece.release()
            self._collide(flight)
        elif self._is_second(flight):
            piece.release()
            self._condemn(flight)
        else:
            self._read_again(flight, piece, load)

    def _whole_erred(self, load: _Load) -> None:
        """The drive said no. Of several records perhaps only one is affected: each gets a read of its own."""
        if len(load.flights) == 1:
            load.piece.release()
            self._err(load.flights[0])
        else:
            pieces = load.piece.split([flight.length_bytes for flight in load.flights])
            for flight, piece in zip(load.flights, pieces, strict=True):
                self._read_again(flight, piece, load)

    def _read_again(self, flight: Flight, piece: Piece, load: _Load) -> None:
        flight.at = 0
        again = _Load([flight], piece, load.segment, load.starter, load.flow, self._whole_done)
        self._begin(again, 0, flight.length_bytes)

    def _again(self, flight: Flight, started: Flight | None) -> None:
        """A second read of a header or of blocks was started, or there was no memory for it."""
        if started is None:
            self._fail(flight, MissReason.OVERLOADED)

    def _is_second(self, flight: Flight) -> bool:
        """Count a mismatch, and say whether this flight had one before."""
        self._metrics.checksum_errors_read += 1
        before, flight.second = flight.second, True
        return before

    def _collide(self, flight: Flight) -> None:
        self._metrics.key_collisions += 1
        self._fail(flight, MissReason.ABSENT)

    def _condemn(self, flight: Flight) -> None:
        self._quarantine(flight.ref, flight.key, flight.location)
        self._fail(flight, MissReason.CORRUPT)

    def _err(self, flight: Flight) -> None:
        """The drive failed to read this record: a miss now, and the end of it when that happens again."""
        if flight.location in self._suspects:
            del self._suspects[flight.location]
            self._quarantine(flight.ref, flight.key, flight.location)
        elif len(self._suspects) < SUSPECT_RECORDS_MAX:
            self._suspects[flight.location] = None
        self._fail(flight, MissReason.IO)

    def _fail(self, flight: Flight, reason: MissReason) -> None:
        self.flights.pop(flight.name, None)
        for waiter, index in flight.waiters:
            waiter.failed(index, reason)

    def _trust(self, flight: Flight) -> None:
        if self._suspects:
            self._suspects.pop(flight.location, None)

    @property
    def has_suspects(self) -> bool:
        """Whether the drive failed to read some record, which may be read well by now."""
        return bool(self._suspects)

    def trust(self, location: int) -> None:
        """A record was read well."""
        self._suspects.pop(location, None)

    def _landed(self, load: _Load) -> None:
        self.operations -= load.operations
        load.starter.staged_bytes -= load.length_bytes

    def _end(self, load: _Load) -> None:
        load.piece.release()
        self._table.release(load.segment)

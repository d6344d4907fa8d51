"""Reads from the drive straight into a client's memory: the header comes here, the payload never does.

Only the header is verified, which names the record and brings its CRC table; the payload lies where the client can
change it, so a check of ours would prove nothing, and the client makes its own. What does not come as planned (an
error, another header, a short read) is read again the usual way, through memory of ours, where it is judged.

Such reads are not shared: who else wants the record reads it on its own. That is why a record that the cache would
take is not read so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvstore.device.base import IoKind, IoOp
from kvstore.engine.arena import Piece
from kvstore.engine.cache import Cache, RecordFacts
from kvstore.engine.catalog import Catalog
from kvstore.engine.loads import Loader
from kvstore.engine.location import DEPTH_BITS, PAGES_BITS, location_page, location_segment
from kvstore.engine.request import Request
from kvstore.engine.segment import SegmentTable
from kvstore.engine.verify import check_header
from kvstore.limits import DEVICE_IO_BYTES_MAX, DIRECT_WINDOW_BYTES, PAGE_BYTES, READ_COALESCE_BYTES
from kvstore.telemetry.metrics import EngineMetrics

_PAGES_MASK: Final = (1 << PAGES_BITS) - 1
_PLACE_SHIFT: Final = PAGES_BITS + DEPTH_BITS
_HEADER_PAGES_MAX: Final = 2
"""A header of one page has CRC words for 57 MiB of default blocks. Were more pages no payload, then the record is
shorter than its place, and is read the usual way."""


class DirectReads:
    """Starts them, and tells their requests.

    Args:
        loader: counts the operations in flight, these included.
        plan, activate: of the reader.
    """

    def __init__(
        self,
        loader: Loader,
        catalog: Catalog,
        table: SegmentTable,
        cache: Cache,
        metrics: EngineMetrics,
        *,
        plan: Callable[[Request, list[int]], None],
        activate: Callable[[Request], None],
    ) -> None:
        self._loader = loader
        self._catalog = catalog
        self._table = table
        self._cache = cache
        self._metrics = metrics
        self._plan = plan
        self._activate = activate

    def takes(self, request: Request, index: int, location: int) -> bool:
        """Whether a record that was found on the drive is read straight into its place."""
        place = request.places[index] if request.places is not None else None
        if place is None or request.force_cache:
            return False
        length = len(place)
        header_pages = (location >> DEPTH_BITS & _PAGES_MASK) - length // PAGE_BYTES
        if (
            not 0 < length <= DEVICE_IO_BYTES_MAX
            or length % PAGE_BYTES
            or not 0 < header_pages <= _HEADER_PAGES_MAX
            or location in self._loader.flights
            or location in self._cache.at
        ):
            return False
        return not (self._cache.capacity_bytes and self._cache.admits(request.key(index), length))

    def start(self, request: Request) -> bool:
        """Start one read for the first of `request.direct` and its neighbours behind it on the drive.

        False when the request's window is full, or there is no memory for headers (`blocked`).
        """
        if request.version != self._catalog.version:
            self._plan(request, [])  # records moved or went since
            return True
        places, direct = request.places, request.direct
        assert places is not None
        first = direct[0][0]
        run: list[_Record] = []
        length = header_bytes = 0
        next_place = first >> _PLACE_SHIFT
        for location, index in direct:
            pages = location >> DEPTH_BITS & _PAGES_MASK
            place = places[index]
            assert place is not None
            if location >> _PLACE_SHIFT != next_place or (run and length + pages * PAGE_BYTES > READ_COALESCE_BYTES):
                break
            one = _Record(index, location, pages * PAGE_BYTES - len(place), place)
            run.append(one)
            length += pages * PAGE_BYTES
            header_bytes += one.header_bytes
            next_place += pages
        if request.staged_bytes and request.staged_bytes + length > DIRECT_WINDOW_BYTES:
            return False
        headers = self._cache.allocate(header_bytes)
        if headers is None:
            request.blocked = True
            return False
        for _ in run:
            direct.popleft()
        self._submit(_DirectRead(self, request, run, headers, location_segment(first), length))
        return True

    def _submit(self, read: _DirectRead) -> None:
        buffers: list[memoryview] = []
        at = 0
        for one in read.run:
            buffers += (read.headers.view[at : at + one.header_bytes], one.place)
            at += one.header_bytes
        self._table.hold(read.segment)
        place = self._table.offset(read.segment, location_page(read.run[0].location))
        read.request.staged_bytes += read.length_bytes
        self._loader.submit(IoOp(IoKind.READ, place, buffers, flow=read.request.spec.flow, owner=read.done))

    def ended(self, read: _DirectRead, op: IoOp) -> None:
        """The drive has answered."""
        request = read.request
        self._loader.operations -= 1
        request.staged_bytes -= read.length_bytes
        is_whole = op.error is None and op.done_bytes == op.length_bytes
        generation = int(self._table.generation[read.segment])
        at = 0
        for one in read.run:
            facts = self._facts(read, one, at, generation) if is_whole else None
            at += one.header_bytes
            if facts is None:
                self._again(request, one.index)
                continue
            self._metrics.read_records += 1
            request.loaded(one.index, facts, None, one.place[: facts.record_bytes], 0, facts.crcs)
        read.headers.release()
        self._table.release(read.segment)

    def _again(self, request: Request, index: int) -> None:
        """A record did not come into its place as it should: read it as if it had none, and find out why."""
        if not request.closed and request.places is not None:
            request.places[index] = None
            self._plan(request, [index])
            self._activate(request)

    def _facts(self, read: _DirectRead, one: _Record, at: int, generation: int) -> RecordFacts | None:
        """What the header says, if it is the wanted record's and its payload begins where the place does."""
        header = read.headers.view[at : at + one.header_bytes]
        request = read.request
        facts = check_header(header, request.spec.namespace, request.key(one.index), one.location, generation)
        if not isinstance(facts, RecordFacts) or facts.header_pages * PAGE_BYTES != one.header_bytes:
            return None
        return facts


class _Record:
    """One of a run."""

    __slots__ = ("header_bytes", "index", "location", "place")

    def __init__(self, index: int, location: int, header_bytes: int, place: memoryview) -> None:
        self.index = index
        self.location = location
        self.header_bytes = header_bytes
        self.place = place


class _DirectRead:
    """One operation. It holds the views it reads into, and so the client's memory, until it has completed."""

    __slots__ = ("_reads", "headers", "length_bytes", "request", "run", "segment")

    def __init__(
        self,
        reads: DirectReads,
        request: Request,
        run: list[_Record],
        headers: Piece,
        segment: int,
        length_bytes: int,
    ) -> None:
        self._reads = reads
        self.request = request
        self.run = run
        self.headers = headers
        self.segment = segment
        self.length_bytes = length_bytes

    def done(self, op: IoOp) -> None:
        """One completion, as `IoOp.owner`."""
        self._reads.ended(self, op)

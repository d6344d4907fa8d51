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
from kvstore.limits import DEVICE_IO_BYTES_MAX, DIRECT_TURN_BYTES, DIRECT_WINDOW_BYTES, PAGE_BYTES, READ_COALESCE_BYTES
from kvstore.telemetry.metrics import EngineMetrics
from kvstore.types.flow import FlowClass

_PAGES_MASK: Final = (1 << PAGES_BITS) - 1
_PLACE_SHIFT: Final = PAGES_BITS + DEPTH_BITS
_READ: Final = IoKind.READ  # bound once: each operation needs it
_Record = tuple[int, int, int, memoryview]
"""One of a run: the request's index, location, bytes of its header, and its place."""
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
        """Start reads of the first DIRECT_TURN_BYTES of `request.direct`; neighbours on the drive go together.

        False when the request's window is full, or there is no memory for headers (`blocked`).
        """
        if request.version != self._catalog.version:
            self._plan(request, [])  # records moved or went since
            return True
        direct, staged = request.direct, request.staged_bytes
        runs: list[tuple[int, int, list[_Record]]] = []
        taken = header_bytes = at = 0
        while at < len(direct) and taken < DIRECT_TURN_BYTES:
            run, length, run_header_bytes = self._run(request, at)
            if staged + taken and staged + taken + length > DIRECT_WINDOW_BYTES:
                break
            runs.append((length, header_bytes, run))
            taken += length
            header_bytes += run_header_bytes
            at += len(run)
        if not runs:
            return False
        headers = self._cache.allocate(header_bytes)
        if headers is None:
            request.blocked = True
            return False
        for _ in range(at):
            direct.popleft()
        headers.holders = len(runs)
        request.staged_bytes += taken
        self._submit(request, runs, headers)
        return True

    def _run(self, request: Request, at: int) -> tuple[list[_Record], int, int]:
        """The record at this place of `request.direct` and those right behind it on the drive; their bytes, and those
        of their headers."""
        places, direct = request.places, request.direct
        assert places is not None
        location, index = direct[at]
        run: list[_Record] = []
        length = header_bytes = 0
        while True:
            pages = location >> DEPTH_BITS & _PAGES_MASK
            record_bytes = pages * PAGE_BYTES
            if run and length + record_bytes > READ_COALESCE_BYTES:
                break
            place = places[index]
            assert place is not None
            own_header_bytes = record_bytes - len(place)
            run.append((index, location, own_header_bytes, place))
            length += record_bytes
            header_bytes += own_header_bytes
            at += 1
            if length >= READ_COALESCE_BYTES or at == len(direct):
                break
            next_place = (location >> _PLACE_SHIFT) + pages
            location, index = direct[at]
            if location >> _PLACE_SHIFT != next_place:
                break
        return run, length, header_bytes

    def _submit(self, request: Request, runs: list[tuple[int, int, list[_Record]]], headers: Piece) -> None:
        """Queue a read for each of `runs`: its length, where its headers are in `headers`, and its records."""
        table, loader, memory, flow = self._table, self._loader, headers.view, request.spec.flow
        for length, header_at, run in runs:
            buffers: list[memoryview] = []
            at = header_at
            for _, _, header_bytes, place in run:
                buffers += (memory[at : at + header_bytes], place)
                at += header_bytes
            location = run[0][1]
            segment = location_segment(location)
            table.hold(segment)
            offset = table.offset(segment, location_page(location))
            read = _DirectRead(offset, buffers, length, flow, self._ended)
            read.request = request
            read.run = run
            read.headers = headers
            read.header_at = header_at
            read.segment = segment
            loader.submit(read)

    def _ended(self, read: _DirectRead) -> None:
        """The drive has answered."""
        request = read.request
        self._loader.operations -= 1
        request.staged_bytes -= read.length_bytes
        is_whole = read.error is None and read.done_bytes == read.length_bytes
        ref, generation = request.spec.namespace, int(self._table.generation[read.segment])
        memory, at = read.headers.view, read.header_at
        for index, location, header_bytes, place in read.run:
            header = memory[at : at + header_bytes]
            at += header_bytes
            facts = check_header(header, ref, request.key(index), location, generation) if is_whole else None
            # the payload begins where the place does, or it is not the record that was planned for
            if type(facts) is RecordFacts and facts.header_pages * PAGE_BYTES == header_bytes:
                self._metrics.read_records += 1
                length = facts.record_bytes
                payload = place if length == len(place) else place[:length]
                request.loaded(index, facts, None, payload, 0, facts.crcs)
            else:
                self._again(request, index)
        read.headers.release()
        self._table.release(read.segment)

    def _again(self, request: Request, index: int) -> None:
        """A record did not come into its place as it should: read it as if it had none, and find out why."""
        if not request.closed and request.places is not None:
            request.places[index] = None
            self._plan(request, [index])
            self._activate(request)


class _DirectRead(IoOp):
    """One operation: it reads headers into `headers`, from `header_at` on, and payload into the places of `run`.

    It holds the views it reads into, and so the client's memory, until it has completed.
    """

    __slots__ = ("header_at", "headers", "request", "run", "segment")

    request: Request
    run: list[_Record]
    headers: Piece
    header_at: int
    segment: int

    def __init__(
        self,
        offset: int,
        buffers: list[memoryview],
        length_bytes: int,
        flow: FlowClass,
        owner: Callable[[_DirectRead], None],
    ) -> None:
        # what IoOp's constructor does, in line: one is made for nearly every record
        self.kind = _READ
        self.offset = offset
        self.buffers = buffers
        self.length_bytes = length_bytes
        self.flow = flow
        self.owner = owner
        self.error = None
        self.done_bytes = self.submitted_ns = 0

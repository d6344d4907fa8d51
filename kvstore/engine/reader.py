"""The read path: from memory at once, else from the drive, neighbours together, every record once for all who ask.

Requests take turns: one I/O of each per round, while its own window, the arena and the bound of operations in flight
allow. A record that was looked up is looked up again if the catalog has changed before its read starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from kvstore.engine.api import NamespaceRef, ReadHandle, ReadSink, ReadSpec
from kvstore.engine.cache import HITS_MAX, Cache, CachedRecord, RecordFacts
from kvstore.engine.catalog import Catalog
from kvstore.engine.direct import DirectReads
from kvstore.engine.division import line_up
from kvstore.engine.estimate import LoadEstimator
from kvstore.engine.flight import HEADER, Flight
from kvstore.engine.loads import Loader
from kvstore.engine.location import DEPTH_BITS, PAGES_BITS, location_pages, location_segment
from kvstore.engine.misses import on_their_way
from kvstore.engine.namespaces import NamespaceTable, index_key, index_keys
from kvstore.engine.parcels import Parcel, Parcels
from kvstore.engine.put import Put, Ticket
from kvstore.engine.request import Pieces, Request
from kvstore.engine.segment import SegmentTable
from kvstore.errors import InvalidRequest
from kvstore.limits import (
    DEVICE_IO_BYTES_MAX,
    DIGEST_BYTES,
    PAGE_BYTES,
    RANGE_WHOLE_BYTES,
    READ_COALESCE_BYTES,
    READ_WINDOW_BYTES,
    READS_IN_FLIGHT_MAX,
    SLICE_BYTES_MAX,
    SLICES_PER_FRAME_MAX,
)
from kvstore.telemetry.metrics import EngineMetrics
from kvstore.types.checksum import crcs_match
from kvstore.types.flow import FlowClass
from kvstore.types.results import MissReason

_BACKGROUND: Final = FlowClass.BACKGROUND  # bound once: each request needs it
_WATCHED_MIN: Final = 256
_ARENA_SHARE: Final = 4  # a record longer than a quarter of the arena would wait for long until so much is free
_RUN_PAGES_MAX: Final = READ_COALESCE_BYTES // PAGE_BYTES
_PLACE_SHIFT: Final = PAGES_BITS + DEPTH_BITS
_PAGES_MASK: Final = (1 << PAGES_BITS) - 1


class Reader:
    """Reads of one drive.

    Args:
        pending: puts in progress by salted index key.
        start: sends the operations that were queued to the drive.

    Attributes:
        now_ns, tick: the time of the present turn.
        hungry: a request waits for memory, or for its window to open.
        uses_parcels: whole records come in parcels to those who take them.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        namespaces: NamespaceTable,
        cache: Cache,
        table: SegmentTable,
        loader: Loader,
        parcels: Parcels,
        pending: Mapping[bytes, Ticket],
        metrics: EngineMetrics,
        estimator: LoadEstimator,
        start: Callable[[], None],
    ) -> None:
        self._catalog = catalog
        self._namespaces = namespaces
        self._cache = cache
        self._table = table
        self._loader = loader
        self._parcels = parcels
        self.uses_parcels = parcels.usable
        self.open_parcel: Callable[[Parcel], bool] = parcels.open
        self.check_parcel: Callable[[Parcel], object] = parcels.check
        self._pending = pending
        self._metrics = metrics
        self._estimator = estimator
        self._start = start
        self._direct = DirectReads(loader, catalog, table, cache, metrics, plan=self._plan, activate=self.activate)
        self._round: deque[Request] = deque()
        self._blocked: deque[Request] = deque()
        self._parked: list[Request] = []
        self.hungry = False
        self._deadlines: list[tuple[int, int, Request]] = []
        self._watched_max = _WATCHED_MIN
        self._serial = count()
        self._pumping = False
        self._again = False
        self.now_ns = 0
        self.tick = 1

    # --- entry -------------------------------------------------------------------------------------------------------
    def read(self, spec: ReadSpec, sink: ReadSink, *, force_cache: bool = False) -> ReadHandle:
        """See `api.Engine.read`.

        Raises:
            InvalidRequest: keys, ranges or content ids do not fit together.
        """
        _check(spec)
        request = Request(self, spec, sink, force_cache=force_cache)
        if spec.verify:
            self._metrics.checksum_errors_reported += request.left
        if not request.left:
            request.close()
            sink.finished()
        elif spec.deadline_ns <= self.now_ns:
            request.miss_rest(MissReason.DEADLINE)
        elif not self._namespaces.is_current(spec.namespace):
            request.miss_rest(MissReason.ABSENT)
        else:
            missing = self._from_memory(request, range(request.left))
            if missing:
                self._plan(request, missing)
            if not request.closed:
                self._watch(request)
                self.activate(request)
        return request

    def _watch(self, request: Request) -> None:
        deadlines = self._deadlines
        heappush(deadlines, (request.spec.deadline_ns, next(self._serial), request))
        if len(deadlines) > self._watched_max:
            # Requests end long before their deadlines: drop those that did, at a cost of O(1) for each.
            deadlines[:] = [one for one in deadlines if not one[2].closed]
            heapify(deadlines)
            self._watched_max = max(_WATCHED_MIN, 2 * len(deadlines))

    def expire(self, now_ns: int) -> None:
        """End the requests whose deadline has passed."""
        self.now_ns = now_ns
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now_ns or deadlines[0][2].closed):
            request = heappop(deadlines)[2]
            if not request.closed:
                request.miss_rest(MissReason.DEADLINE)

    def next_timer_ns(self) -> int | None:
        """When `expire` has something to do."""
        while self._deadlines and self._deadlines[0][2].closed:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def activate(self, request: Request) -> None:
        """Something may be started for a request."""
        if not request.queued and not request.closed and request.has_work():
            request.queued = True
            self._round.append(request)
        self.pump()

    def memory_came_back(self, request: Request) -> None:
        """A sink let go of an item of this request while somebody is `hungry`."""
        if self._blocked or request.staged_bytes <= request.window_opens_bytes:
            self.pump()

    def pump(self) -> None:
        """Start what can be started, some I/O of each request per round."""
        if self._pumping:
            self._again = True
            return
        if not self._round and not self.hungry:
            return
        self._pumping = True
        before = self._loader.started
        try:
            self._again = True
            while self._again:
                self._again = False
                self._wake()
                self._take_turns()
        finally:
            self._pumping = False
        self.hungry = bool(self._blocked or self._parked)
        self._metrics.reads_waiting = len(self._blocked)
        if self._loader.started != before:
            self._start()

    def _wake(self) -> None:
        """Put those back into the round whose window has opened, and before them those that waited for memory."""
        if self._parked:
            parked, self._parked = self._parked, []
            for request in parked:
                request.parked = False
                if request.closed:
                    continue
                if request.staged_bytes > request.window_opens_bytes:
                    self._park(request)
                elif not request.queued:
                    request.queued = True
                    self._round.append(request)
        while self._blocked:
            request = self._blocked.pop()
            request.blocked = False
            if not request.closed and not request.queued:
                request.queued = True
                self._round.appendleft(request)

    def _park(self, request: Request) -> None:
        if not request.parked:  # once, however often something came for it meanwhile
            request.parked = True
            self._parked.append(request)

    # --- memory ------------------------------------------------------------------------------------------------------
    def take_cached(self, ref: NamespaceRef, keys: bytes, bytes_max: int) -> list[CachedRecord] | None:
        """See `api.Engine.take_cached`. Nothing is noted before it is sure that all of it is there."""
        space = self._cache.space(ref.salt)
        if space is None or not self._namespaces.is_current(ref):
            return None
        now_ns, tick = self.now_ns, self.tick
        found: list[CachedRecord] = []
        stale: list[CachedRecord] = []
        for at in range(0, len(keys), DIGEST_BYTES):
            record = space.get(keys[at : at + DIGEST_BYTES])
            if record is None or 0 < record.until_ns <= now_ns:
                return None
            length = record.facts.record_bytes
            if length > SLICE_BYTES_MAX:
                return None
            if record.tick != tick:
                stale.append(record)
            bytes_max -= length
            if bytes_max >= 0:
                found.append(record)
        if len(found) > SLICES_PER_FRAME_MAX:
            del found[SLICES_PER_FRAME_MAX:]
        if stale:  # those of later frames too: one search for all of them
            for record in stale:
                record.tick = tick
            self._catalog.touch_records(ref, b"".join([record.facts.key for record in stale]), tick)
        for record in found:
            if record.hits < HITS_MAX:
                record.hits += 1
            if record.piece is not None:
                record.piece.hold()
        self._estimator.served(from_memory=len(found), records=len(found))
        self._metrics.cache_hits += len(found)
        return found

    def _from_memory(self, request: Request, indices: Sequence[int]) -> list[int]:
        """Deliver what the cache has, within the window; answers the records that it has not."""
        space = self._cache.space(request.spec.namespace.salt)
        if space is None:
            self._estimator.served(from_memory=0, records=len(indices))
            self._metrics.cache_misses += len(indices)
            return list(indices)
        get, keys, loaded, now_ns, tick = space.get, request.keys, request.loaded, self.now_ns, self.tick
        verify = request.spec.verify
        missing: list[int] = []
        stale: list[int] = []
        for index in indices:
            at = index * DIGEST_BYTES
            record = get(keys[at : at + DIGEST_BYTES])
            if record is None or 0 < record.until_ns <= now_ns:
                missing.append(index)
            elif request.staged_bytes >= READ_WINDOW_BYTES:
                request.later.append(index)
            elif verify and not self._is_sound(record):
                missing.append(index)
            else:
                if record.tick != tick:
                    record.tick = tick
                    stale.append(index)
                if record.hits < HITS_MAX:
                    record.hits += 1
                facts = record.facts
                loaded(index, facts, record.piece, record.view, 0, facts.crcs)
        self._estimator.served(from_memory=len(indices) - len(missing), records=len(indices))
        self._metrics.cache_misses += len(missing)
        self._metrics.cache_hits += len(indices) - len(missing) - len(request.later)
        if stale:
            self._touch(request, stale)
        return missing

    def _is_sound(self, record: CachedRecord) -> bool:
        """Whether a copy in memory still has its checksums; one that has not is dropped and counted.

        A client has found wrong bytes: where they came from is known only now. The drive's copy is not to blame.
        """
        facts = record.facts
        if crcs_match(record.view, facts.block_bytes, facts.crcs):
            return True
        self._metrics.checksum_errors_memory += 1
        self._cache.forget(record.salt, facts.key)
        return False

    def _touch(self, request: Request, indices: Sequence[int]) -> None:
        """Tell the index that records were asked for, once per tick."""
        self._catalog.touch_records(request.spec.namespace, request.keys_of(indices), self.tick)

    def _give_later(self, request: Request) -> None:
        indices = list(request.later)
        request.later.clear()
        missing = self._from_memory(request, indices)
        if missing:
            self._plan(request, missing)

    # --- planning ----------------------------------------------------------------------------------------------------
    def _plan(self, request: Request, indices: Sequence[int]) -> None:
        """Look records up and line their reads up by place; what is not there is a miss."""
        rest = request.wants[request.next_want :]
        if rest and request.version != self._catalog.version:
            indices = [*indices, *(index for _, index in rest)]
            rest = []
        if request.direct and request.version != self._catalog.version:
            indices = [*indices, *request.take_direct()]
        locations = self._locate(request, indices)
        if not rest and request.places is None:
            lined_up = line_up(locations, list(indices), self._whole_pages_max(request))
            if lined_up is not None:
                self._line_up(request, lined_up)
                return
        wants: list[tuple[int, int]] = []
        absent: list[int] = []
        whole_pages_max = self._whole_pages_max(request)
        for index, location in zip(indices, locations, strict=True):
            if not location:
                absent.append(index)
            elif location >> DEPTH_BITS & _PAGES_MASK > whole_pages_max and self._is_piecewise(request, location):
                pieces = request.piecewise[index] = Pieces(index, request.key(index), location)
                request.pieces.append(pieces)
            elif request.places is not None and self._direct.takes(request, index, location):
                request.direct.append((location, index))
            else:
                wants.append((location, index))
        if request.direct:
            request.direct = deque(sorted(request.direct))
        if absent:
            self._miss(request, absent)
        if request.closed:
            return
        self._line_up(request, sorted(rest + wants))

    def _line_up(self, request: Request, wants: list[tuple[int, int]]) -> None:
        """These records are to be read; they are in order of place."""
        request.wants = wants
        if request.in_parcels and len(dict(wants)) < len(wants):
            request.in_parcels = False  # a key that is given twice waits twice for one flight
        request.next_want = 0
        request.version = self._catalog.version

    def _locate(self, request: Request, indices: Sequence[int]) -> list[int]:
        """Locations of records, 0 where absent; this counts as an access."""
        tick = 0 if request.spec.flow is _BACKGROUND else self.tick
        return self._catalog.locate(request.spec.namespace, request.keys, list(indices), tick)

    def _whole_pages_max(self, request: Request) -> int:
        """Records up to this are read whole without a further look."""
        bound = DEVICE_IO_BYTES_MAX if request.spec.ranges is None or request.force_cache else RANGE_WHOLE_BYTES
        return min(bound, self._cache.arena.size_bytes // _ARENA_SHARE) // PAGE_BYTES

    def _is_piecewise(self, request: Request, location: int) -> bool:
        """Whether a long record is read block by block: not wanted whole, not to be cached, or too long."""
        if request.spec.ranges is not None and not request.force_cache:
            return True
        length = location_pages(location) * PAGE_BYTES
        return not self._cache.fits(length) or length > self._cache.arena.size_bytes // _ARENA_SHARE

    def _miss(self, request: Request, indices: Sequence[int]) -> None:
        """Records that the index has not: perhaps on their way to it, else gone or never there."""
        wanted = index_keys(request.spec.namespace, request.keys_of(indices))
        misses = list(zip(indices, self._catalog.history.reasons(wanted).tolist(), strict=True))
        if self._pending:
            near = [indices[at] for at in on_their_way(self._pending, wanted)]
            given = {index for index in near if self._give_pending(request, index)}
            misses = [one for one in misses if one[0] not in given] if given else misses
        request.miss_all(misses)

    def _give_pending(self, request: Request, index: int) -> bool:
        """Answer a record that is being put: with its bytes for who accepts that, else PENDING."""
        ref, key = request.spec.namespace, request.key(index)
        ticket = self._pending.get(index_key(ref, key))
        if ticket is None or ticket.spec.key != key:
            return False
        payload = ticket.payload if isinstance(ticket, Put) else None
        if not request.spec.accept_pending or payload is None or request.spec.verify:
            request.miss(index, MissReason.PENDING)
            return True
        facts = RecordFacts(
            key=key,
            record_bytes=ticket.spec.payload_bytes,
            block_bytes=ticket.spec.block_bytes,
            crcs=ticket.crc_table,
            content_id=ticket.content_id,
            header_pages=ticket.header_pages,
            location=0,
        )
        request.loaded(index, facts, ticket.piece, payload, 0, facts.crcs)
        return True

    # --- starting reads ----------------------------------------------------------------------------------------------
    def _take_turns(self) -> None:
        turns = self._round
        while turns and self._loader.operations < READS_IN_FLIGHT_MAX and self._loader.has_room:
            request = turns.popleft()
            request.queued = False
            if request.closed:
                continue
            if self._take_turn(request):
                if not request.closed and not request.queued and request.has_work():
                    request.queued = True
                    turns.append(request)
            elif request.blocked:
                # Others need memory as well: they would only take what this one waits for.
                self._blocked.appendleft(request)
                self.hungry = True
                return
            elif not request.queued and request.has_work():
                self._park(request)
                self.hungry = True

    def _take_turn(self, request: Request) -> bool:
        """One step for a request. False when its window is full or there is no memory (`blocked`)."""
        if request.later and request.staged_bytes < READ_WINDOW_BYTES:
            self._give_later(request)
            return True
        if request.direct:
            return self._direct.start(request)
        if request.next_want < len(request.wants):
            if request.version != self._catalog.version:
                self._plan(request, [])  # records moved or went since its reads were planned
                return True
            if request.in_parcels and not request.doubted:
                started = self._parcels.start(request)
                if started is not None:
                    return started
            return self._start_runs(request)
        if request.pieces:
            return self._start_piece(request)
        return False

    def _start_runs(self, request: Request) -> bool:
        """Join reads in flight, or start reads of records that lie side by side, up to READ_COALESCE_BYTES together."""
        wants, keys = request.wants, request.keys
        flights, cached = self._loader.flights, self._cache.at
        at, count = request.next_want, len(wants)
        turn_pages = _RUN_PAGES_MAX
        while at < count and turn_pages > 0:
            location, index = wants[at]
            if location in flights or location in cached:
                request.next_want = at = at + 1
                self._serve(request, location, index)
                continue
            pages = location >> DEPTH_BITS & _PAGES_MASK
            place = (location >> _PLACE_SHIFT) + pages
            again = False
            end = at + 1
            while end < count:
                before, location = location, wants[end][0]
                if location >> _PLACE_SHIFT != place or location in flights or location in cached:
                    if location != before:
                        break
                    again = True
                else:
                    more = location >> DEPTH_BITS & _PAGES_MASK
                    if pages + more > _RUN_PAGES_MAX:
                        break
                    pages += more
                    place += more
                end += 1
            length = pages * PAGE_BYTES
            if request.staged_bytes + length > READ_WINDOW_BYTES and request.staged_bytes > length:
                return False
            if not self._loader.whole(_once(wants[at:end]) if again else wants[at:end], keys, pages, request):
                request.blocked = True
                return False
            if again:
                self._join_twins(request, wants[at:end])
            turn_pages -= pages
            request.next_want = at = end
        return True

    def _join_twins(self, request: Request, wants: Sequence[tuple[int, int]]) -> None:
        """A key that is given twice waits twice for the one flight."""
        before = -1
        for location, index in wants:
            if location == before:
                self._serve(request, location, index)
            before = location

    def _serve(self, request: Request, location: int, index: int) -> None:
        """The record has come into memory since, or is on its way for somebody: then this one joins."""
        flight = self._loader.flight(location)
        if flight is not None:
            flight.wanted_in_cache |= request.force_cache
            self._metrics.read_shared += 1
            self._join(request, index, flight)
            return
        record = self._cache.at[location]
        if record.facts.key == request.key(index):
            record.touch()
            request.loaded(index, record.facts, record.piece, record.view, 0, record.facts.crcs)
        else:
            self._collide(request, index)

    def _join(self, request: Request, index: int, flight: Flight) -> None:
        """Wait for a flight, if it brings the very key that is wanted and not one with the same first 16 bytes."""
        if flight.key == request.key(index):
            flight.waiters.append((request, index))
        else:
            self._collide(request, index)

    def _collide(self, request: Request, index: int) -> None:
        self._metrics.key_collisions += 1
        request.miss(index, MissReason.ABSENT)

    def _start_piece(self, request: Request) -> bool:
        """Start the next read of a record that is read in pieces: its header, or some of its blocks."""
        pieces = request.pieces[0]
        if pieces.index not in request.piecewise:
            request.pieces.popleft()
            return True
        if request.version != self._catalog.version and not self._still_at(request, pieces):
            return True
        if pieces.facts is None:
            return self._start_header(request, pieces)
        blocks = pieces.wanted[0]
        flight = self._loader.flight((pieces.location, blocks[0], blocks[1]))
        if flight is None:
            if not request.has_window(blocks[1]):
                return False
            flight = self._loader.part(
                request.spec.namespace, pieces.facts, blocks, starter=request, flow=request.spec.flow
            )
            if flight is None:
                request.blocked = True
                return False
        else:
            self._metrics.read_shared += 1
        self._join(request, pieces.index, flight)
        pieces.wanted.popleft()
        if not pieces.wanted:
            request.pieces.popleft()
        return True

    def _start_header(self, request: Request, pieces: Pieces) -> bool:
        generation = int(self._table.generation[location_segment(pieces.location)])
        facts = self._loader.headers.get(pieces.location, generation)
        if facts is not None:
            request.pieces.popleft()
            if facts.key == pieces.key:
                request.plan_pieces(pieces, facts)
            else:
                self._collide(request, pieces.index)
            return True
        flight = self._loader.flight((pieces.location, *HEADER))
        if flight is None:
            flight = self._loader.header(
                request.spec.namespace, pieces.key, pieces.location, starter=request, flow=request.spec.flow
            )
            if flight is None:
                request.blocked = True
                return False
        else:
            self._metrics.read_shared += 1
        self._join(request, pieces.index, flight)
        request.pieces.popleft()
        return True

    def _still_at(self, request: Request, pieces: Pieces) -> bool:
        """Whether the record still lies where it did; if it moved, it is read from there, if it went, it is a miss."""
        location = self._catalog.locate_few([index_key(request.spec.namespace, pieces.key)], 0)[0]
        if location == pieces.location:
            return True
        if location:
            pieces.location = location
            pieces.facts = None
        else:
            self._miss(request, [pieces.index])
        return False


def _once(wants: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first want of each location, of wants in order of location."""
    return [one for at, one in enumerate(wants) if not at or one[0] != wants[at - 1][0]]


def _check(spec: ReadSpec) -> None:
    length = len(spec.keys)
    if length % DIGEST_BYTES:
        raise InvalidRequest(f"{length} bytes of record keys; each key has {DIGEST_BYTES} bytes")
    if spec.content_ids is not None and len(spec.content_ids) != length // 2:
        raise InvalidRequest(
            f"{len(spec.content_ids)} bytes of content ids for {length // DIGEST_BYTES} keys; give 16 bytes for each"
        )

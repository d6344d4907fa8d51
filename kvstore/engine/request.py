"""One `read` in progress: what is still owed to its sink, and how much memory it holds meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.engine.api import ParcelSource, ReadSink, ReadSpec, ReadyItem
from kvstore.engine.arena import Piece
from kvstore.engine.cache import RecordFacts
from kvstore.engine.readplan import Range, covering_blocks, ranges_per_record
from kvstore.engine.ready import ReadyRecord
from kvstore.limits import (
    DEVICE_IO_BYTES_MAX,
    DIGEST_BYTES,
    DIRECT_TURN_BYTES,
    DIRECT_WINDOW_BYTES,
    READ_WINDOW_BYTES,
)
from kvstore.types.checksum import block_count
from kvstore.types.results import MissReason

if TYPE_CHECKING:
    from kvstore.engine.parcels import Parcel
    from kvstore.engine.reader import Reader

_ANY_CONTENT = bytes(16)
_REASONS = {int(reason): reason for reason in MissReason}  # a lookup is a fifth of what a call of the class costs
_WORD = 4


class _Nobody:
    """Sink of a request that has ended. Its owner holds it, and it lets go of its owner: no cycle is left behind.

    A cycle would keep what a read was made of until the collector comes, and each read would take fresh memory, which
    no cache has, instead of that of the one before.
    """

    def ready(self, item: ReadyItem) -> None:
        """Nothing comes."""
        raise AssertionError("a read that has ended delivers nothing")

    def missed(self, index: int, reason: MissReason) -> None:
        """Nothing comes."""
        raise AssertionError("a read that has ended delivers nothing")

    def finished(self) -> None:
        """It has been told."""
        raise AssertionError("a read ends once")


_NOBODY = _Nobody()


class Pieces:
    """A record that is read in block-aligned pieces: in ranges, or because it is too long for one.

    Attributes:
        facts: its header's; None until that was read, and again after the record has moved.
        content_id: of the copy whose pieces were begun.
        wanted: pieces that are not on their way yet.
        left: pieces that have not arrived.
    """

    __slots__ = ("content_id", "facts", "index", "key", "left", "location", "wanted")

    def __init__(self, index: int, key: bytes, location: int) -> None:
        self.index = index
        self.key = key
        self.location = location
        self.facts: RecordFacts | None = None
        self.wanted: deque[Range] = deque()
        self.left = 0
        self.content_id = b""


class Request:
    """A `ReadHandle`, and the waiter of the flights that bring its records.

    Attributes:
        spec, sink: as given; `keys` are the spec's.
        left: records that have not had their last answer.
        staged_bytes: on the way from the drive for this request, or with the sink and not released.
        wants: (location, index) of records to read, by place; `next_want` is the first that is not on its way.
        version: of the catalog when `wants` was looked up.
        later: records found in memory when the window was full.
        pieces: records to read piece by piece.
        places: the client's memory for each record that may be read straight into it; None where there is none.
        direct: (location, index) of records to read so, by place.
        in_parcels: its records may come in parcels.
        landed: parcels that are there and not taken; `taken` says whether one was.
        doubted: indices of records that came in a parcel, and were not right.
        queued, blocked, parked: it stands in the reader's round, among those that wait for memory, or among those whose
            window is full.
        reader: whom to tell when memory comes back.
        sums: see `flight.Waiter`.
    """

    __slots__ = (
        "_done",
        "_on_landed",
        "_ranges",
        "_simple",
        "blocked",
        "closed",
        "direct",
        "doubted",
        "force_cache",
        "in_parcels",
        "keys",
        "landed",
        "later",
        "left",
        "next_want",
        "parked",
        "pieces",
        "piecewise",
        "places",
        "queued",
        "reader",
        "sink",
        "spec",
        "staged_bytes",
        "sums",
        "taken",
        "version",
        "wants",
    )

    def __init__(self, reader: Reader, spec: ReadSpec, sink: ReadSink, *, force_cache: bool = False) -> None:
        """Raises InvalidRequest for ranges or content ids that do not fit the keys."""
        self.spec = spec
        self.sink: ReadSink = sink
        self.keys = spec.keys if isinstance(spec.keys, bytes) else bytes(spec.keys)
        self.left = len(self.keys) // DIGEST_BYTES
        self.sums = not spec.reader_checks or spec.verify or spec.ranges is not None
        self.staged_bytes = 0
        self.closed = False
        self.force_cache = force_cache
        self.wants: list[tuple[int, int]] = []
        self.next_want = 0
        self.version = 0
        self.later: deque[int] = deque()
        self.pieces: deque[Pieces] = deque()
        self.places: list[memoryview | None] | None = None if spec.places is None else list(spec.places)
        self.direct: deque[tuple[int, int]] = deque()
        self.piecewise: dict[int, Pieces] = {}
        self.queued = self.blocked = self.parked = False
        self.reader = reader
        self._done = bytearray(self.left)
        self._simple = spec.ranges is None and spec.content_ids is None
        self._on_landed: Callable[[ParcelSource], None] | None = getattr(sink, "landed", None)
        self.in_parcels = self._simple and self._on_landed is not None and reader.uses_parcels
        self.landed: deque[Parcel] = deque()
        self.taken = False
        self.doubted: set[int] = set()
        self._ranges = ranges_per_record(spec.ranges, self.left) if spec.ranges is not None else None

    # --- ReadHandle --------------------------------------------------------------------------------------------------
    def cancel(self) -> None:
        """See `api.ReadHandle.cancel`. What is on its way goes on for others who wait for it."""
        self.close()

    # --- state -------------------------------------------------------------------------------------------------------
    def key(self, index: int) -> bytes:
        """Record key number `index`."""
        return self.keys[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def keys_of(self, indices: Sequence[int]) -> bytes:
        """Their record keys, one after the other."""
        keys = self.keys
        return b"".join([keys[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] for index in indices])

    def ranges(self, index: int) -> Sequence[Range] | None:
        """What is wanted of a record; None for all of it."""
        return self._ranges[index] if self._ranges is not None else None

    def close(self) -> None:
        """Nothing more is owed to the sink."""
        self.closed = True
        self.sink = _NOBODY
        self._on_landed = None
        self.wants.clear()
        self.next_want = 0
        self.later.clear()
        self.pieces.clear()
        self.piecewise.clear()
        self.direct.clear()
        if self.places is not None:
            # the request is remembered until its deadline, the client's memory is not
            self.places = None
            self.spec = replace(self.spec, places=None)
        while self.landed:
            self.landed.popleft().release()

    def has_work(self) -> bool:
        """Whether something could be started for it, window and memory permitting."""
        return self.next_want < len(self.wants) or bool(self.later) or bool(self.pieces) or bool(self.direct)

    def has_window(self, more_bytes: int) -> bool:
        """Whether so much more may be staged: within READ_WINDOW_BYTES, but always two reads of any size."""
        staged = self.staged_bytes
        return staged + more_bytes <= READ_WINDOW_BYTES or staged <= more_bytes

    @property
    def window_opens_bytes(self) -> int:
        """What may still be staged when it goes on after its window was full."""
        return DIRECT_WINDOW_BYTES - DIRECT_TURN_BYTES if self.direct else READ_WINDOW_BYTES * 3 // 4

    def take_direct(self) -> list[int]:
        """The indices of `direct`, which has none then."""
        indices = [index for _, index in self.direct]
        self.direct.clear()
        return indices

    # --- answers -----------------------------------------------------------------------------------------------------
    def miss(self, index: int, reason: MissReason) -> None:
        """A record ends without its bytes."""
        if self.closed or self._done[index]:
            return
        self._done[index] = 1
        self.piecewise.pop(index, None)
        self.left -= 1
        self.sink.missed(index, reason)
        self._finish()

    def miss_all(self, misses: Sequence[tuple[int, int]]) -> None:
        """`miss`, for each of many: (index, reason). In one loop, as there may be tens of thousands."""
        done = self._done
        for index, reason in misses:
            if self.closed:
                return  # by what a record before this one led to
            if done[index]:
                continue
            done[index] = 1
            self.left -= 1
            self.sink.missed(index, _REASONS[reason])
        if self.piecewise:
            for index, _ in misses:
                self.piecewise.pop(index, None)
        self._finish()

    def miss_rest(self, reason: MissReason) -> None:
        """Every record that has not ended, ends now."""
        for index in range(len(self._done)):
            if not self._done[index]:
                self.miss(index, reason)

    def loaded(
        self, index: int, facts: RecordFacts, piece: Piece | None, payload: memoryview, offset: int, crcs: bytes
    ) -> None:
        """See `flight.Waiter`; also for records that lie in memory. The caller keeps its own hold on `piece`."""
        if self.closed or self._done[index]:
            return
        if not self._simple or self.piecewise:
            self._choose(index, facts, piece, payload, offset, crcs)
            return
        self._done[index] = 1
        self.left -= 1
        if piece is not None:
            piece.hold()
        self.staged_bytes += len(payload)
        self.sink.ready(
            ReadyRecord(
                index, facts.record_bytes, facts.block_bytes, 0, payload, crcs, facts.content_id, True, piece, self
            )
        )
        if not self.left:
            self._finish()

    def loaded_run(self, piece: Piece, view: memoryview, run: Sequence[tuple[int, int, RecordFacts]]) -> None:
        """See `flight.Starter`: `loaded` for the records of one device read, in one loop."""
        if not self._simple or self.piecewise:
            for index, at, facts in run:
                self.loaded(index, facts, piece, view[at : at + facts.record_bytes], 0, facts.crcs)
            return
        done, ready = self._done, self.sink.ready
        for index, at, facts in run:
            if self.closed:
                return  # by what a record before this one led to
            if done[index]:
                continue
            done[index] = 1
            self.left -= 1
            length = facts.record_bytes
            piece.holders += 1
            self.staged_bytes += length
            ready(
                ReadyRecord(
                    index,
                    length,
                    facts.block_bytes,
                    0,
                    view[at : at + length],
                    facts.crcs,
                    facts.content_id,
                    True,
                    piece,
                    self,
                )
            )
        if not self.left:
            self._finish()

    def _choose(
        self, index: int, facts: RecordFacts, piece: Piece | None, payload: memoryview, offset: int, crcs: bytes
    ) -> None:
        """Deliver of a record what is wanted of it."""
        pieces = self.piecewise.get(index)
        if pieces is not None:
            pieces.left -= 1
            last = pieces.left == 0
            if last:
                del self.piecewise[index]
                self._end(index)
            self._send(index, facts, piece, payload, offset, crcs, last)
            return
        if self.is_other_content(index, facts):
            self.miss(index, MissReason.ABSENT)
            return
        blocks = self.blocks(index, facts) if self._ranges is not None else [(0, len(payload))]
        if blocks is None:
            self.miss(index, MissReason.LAYOUT)
            return
        self._end(index)
        for number, (start, length) in enumerate(blocks, 1):
            first = start // facts.block_bytes * _WORD
            words = facts.crcs[first : first + block_count(length, facts.block_bytes) * _WORD]
            self._send(index, facts, piece, payload[start : start + length], start, words, number == len(blocks))

    def blocks(self, index: int, facts: RecordFacts) -> list[Range] | None:
        """Block-aligned pieces to deliver of a record; None if it is shorter than what is wanted."""
        wanted = self.ranges(index)
        return covering_blocks(
            wanted if wanted is not None else [(0, facts.record_bytes)],
            record_bytes=facts.record_bytes,
            block_bytes=facts.block_bytes,
            piece_bytes_max=DEVICE_IO_BYTES_MAX,
        )

    def is_other_content(self, index: int, facts: RecordFacts) -> bool:
        """Whether the reader pinned another writer's copy."""
        ids = self.spec.content_ids
        if ids is None:
            return False
        wanted = ids[index * 16 : index * 16 + 16]
        return wanted not in (facts.content_id, _ANY_CONTENT)

    def _end(self, index: int) -> None:
        self._done[index] = 1
        self.left -= 1

    def _send(
        self,
        index: int,
        facts: RecordFacts,
        piece: Piece | None,
        data: memoryview,
        offset: int,
        crcs: bytes,
        last: bool,
    ) -> None:
        if piece is not None:
            piece.hold()
        self.staged_bytes += len(data)
        self.sink.ready(
            ReadyRecord(
                index, facts.record_bytes, facts.block_bytes, offset, data, crcs, facts.content_id, last, piece, self
            )
        )
        if last and not self.left:
            self._finish()

    def _finish(self) -> None:
        if self.left == 0 and not self.closed:
            sink = self.sink
            self.close()
            sink.finished()

    # --- parcels -----------------------------------------------------------------------------------------------------
    def parcel_landed(self, parcel: Parcel) -> None:
        """A parcel is there, unchecked."""
        if self.taken and not self.landed:
            self.reader.check_parcel(parcel)  # while the frame of the last one is on its way
        self.landed.append(parcel)
        assert self._on_landed is not None
        self._on_landed(self)

    def take(self) -> Parcel | None:
        """See `api.ParcelSource.take`."""
        while self.landed:
            parcel = self.landed.popleft()
            self.taken = True
            if self.reader.open_parcel(parcel):
                return parcel
        return None

    def packed(self, wants: Sequence[tuple[int, int]]) -> None:
        """These records end with the parcel that is being taken."""
        self.left -= len(wants)
        if not self.left:
            self._finish()  # nobody asks which are done any more
            return
        done = self._done
        for _, index in wants:
            done[index] = 1

    def absent(self, index: int) -> None:
        """What was read is another record."""
        self.miss(index, MissReason.ABSENT)

    def read_again(self, location: int, index: int) -> None:
        """What was read is not right: once more, from where it is now."""
        self.doubted.add(index)
        self.wants.insert(self.next_want, (location, index))
        self.version = -1
        self.reader.activate(self)

    # --- Waiter ------------------------------------------------------------------------------------------------------
    def headed(self, index: int, facts: RecordFacts) -> None:
        """See `flight.Waiter`: now it is known which blocks to read."""
        pieces = self.piecewise.get(index)
        if pieces is not None:
            self.plan_pieces(pieces, facts)
            self.reader.activate(self)

    def plan_pieces(self, pieces: Pieces, facts: RecordFacts) -> None:
        """The header of a record that is read in pieces is known."""
        if pieces.content_id:
            self._resume_pieces(pieces, facts)
            return
        blocks = self.blocks(pieces.index, facts)
        if self.is_other_content(pieces.index, facts):
            self.miss(pieces.index, MissReason.ABSENT)
        elif blocks is None:
            self.miss(pieces.index, MissReason.LAYOUT)
        elif blocks == [(0, 0)]:
            self._end(pieces.index)
            self.piecewise.pop(pieces.index, None)
            self._send(pieces.index, facts, None, memoryview(b""), 0, b"", True)
        else:
            pieces.facts = facts
            pieces.content_id = facts.content_id
            pieces.wanted.extend(blocks)
            pieces.left = len(blocks)
            self.pieces.append(pieces)

    def _resume_pieces(self, pieces: Pieces, facts: RecordFacts) -> None:
        """The record was moved while it was being read: go on there, unless it is another writer's copy by now."""
        if facts.content_id != pieces.content_id:
            self.miss(pieces.index, MissReason.EVICTED)
        else:
            pieces.facts = facts
            self.pieces.append(pieces)

    def failed(self, index: int, reason: MissReason) -> None:
        """See `flight.Waiter`."""
        self.miss(index, reason)

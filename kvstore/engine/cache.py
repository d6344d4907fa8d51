"""The RAM cache: verified payloads of hot records in arena pieces, sent from where they lie.

Admission and eviction follow S3-FIFO (Yang et al., SOSP 2023): new records enter a small queue that a scan runs
through, what is asked for again there moves to the main queue, and keys that left lately are remembered so that their
return counts as a second touch. Eviction drops the cache's hold on a piece; bytes being sent stay until the last
sender lets go. Volatile records (RAM only, with a ttl) live here too, bounded and never evicted before their time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Final

from kvstore.engine.arena import Arena, Piece
from kvstore.engine.location import U64
from kvstore.limits import CACHE_GHOSTS_MAX, CACHE_RECORD_SHARE_MAX, PAGE_BYTES, VOLATILE_SHARE_MAX
from kvstore.telemetry.metrics import EngineMetrics

_SMALL_SHARE: Final = 0.1  # S3-FIFO section 4.1
HITS_MAX: Final = 3


@dataclass(slots=True)
class RecordFacts:
    """What a reader must know of a record beside its payload. Never changed: one is made for each record that is read
    from the drive, and a frozen or keyword-only dataclass would take three times as long.

    Attributes:
        key: the full record key, 32 bytes.
        record_bytes: payload length.
        block_bytes: checksum block.
        crcs: one u32 LE per block.
        content_id: 16 bytes.
        header_pages: pages before the payload.
        location: where it lies on the drive; 0 for a record that lives in RAM only.
    """

    key: bytes
    record_bytes: int
    block_bytes: int
    crcs: bytes
    content_id: bytes
    header_pages: int
    location: int


class CachedRecord:
    """One record in memory.

    Attributes:
        facts: its header's.
        location: where it lies on the drive now; 0 for volatile ones.
        piece: the memory, held by the cache; None for a record of 0 bytes.
        view: exactly the payload.
        hits: accesses since it was inserted, cut off; readers raise it.
        tick: access tick up to which the index has been told.
        until_ns: end of a volatile record's life; 0 for the others.
        reply: see `api.CachedItem`.
    """

    __slots__ = ("facts", "hits", "in_main", "location", "piece", "reply", "salt", "tick", "until_ns", "view")

    def __init__(self, salt: bytes, facts: RecordFacts, piece: Piece | None, *, tick: int, until_ns: int = 0) -> None:
        self.salt = salt
        self.facts = facts
        self.location = facts.location
        self.piece = piece
        self.view = piece.view[: facts.record_bytes] if piece is not None else memoryview(b"")
        self.hits = 0
        self.tick = tick
        self.until_ns = until_ns
        self.in_main = False
        self.reply = b""

    @property
    def size_bytes(self) -> int:
        """Arena bytes it takes; a page for bookkeeping where the payload takes none."""
        return self.piece.length if self.piece is not None else PAGE_BYTES

    def hold(self) -> None:
        """One more reader needs the piece, until it calls `release`."""
        if self.piece is not None:
            self.piece.hold()

    def release(self) -> None:
        """A reader that held the piece does not need it any more."""
        if self.piece is not None:
            self.piece.release()

    def touch(self) -> None:
        """Note an access, for eviction."""
        if self.hits < HITS_MAX:
            self.hits += 1


Space = dict[bytes, CachedRecord]
"""The records of one namespace generation, by record key."""


class Cache:
    """Cached records of one drive, and the way to arena memory for everybody: `allocate` evicts to make room.

    Args:
        arena: memory for the cache and for transfers in progress.
        capacity_bytes: what the cache may use of it; 0 turns it off.
        second_touch: admit a record that was read only when its key came by before, not at first sight.
        metrics: where counts go.
    """

    def __init__(
        self, arena: Arena, *, capacity_bytes: int, second_touch: bool = False, metrics: EngineMetrics | None = None
    ) -> None:
        self.arena = arena
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.volatile_bytes = 0
        self.metrics = metrics or EngineMetrics()
        self._second_touch = second_touch
        self._record_bytes_max = int(capacity_bytes * CACHE_RECORD_SHARE_MAX)
        self._volatile_bytes_max = int(capacity_bytes * VOLATILE_SHARE_MAX)
        self._small_bytes_max = int(capacity_bytes * _SMALL_SHARE)
        self.at: dict[int, CachedRecord] = {}  # by location; to look at
        self._spaces: dict[bytes, Space] = {}
        self._small: OrderedDict[CachedRecord, None] = OrderedDict()
        self._main: OrderedDict[CachedRecord, None] = OrderedDict()
        self._small_bytes = 0
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._volatile: list[tuple[int, int, CachedRecord]] = []  # heap by end of life
        self._serial = count()

    def __len__(self) -> int:
        return sum(map(len, self._spaces.values()))

    @property
    def volatile_count(self) -> int:
        """Volatile records that have not been dropped yet."""
        return len(self._volatile)

    # --- memory -------------------------------------------------------------------------------------------------------
    def allocate(self, length_bytes: int) -> Piece | None:
        """Arena memory, evicting cached records until a hole is long enough; None if that does not help."""
        piece = self.arena.allocate(length_bytes)
        while piece is None and self._evict_one():
            piece = self.arena.allocate(length_bytes)
        return piece

    def make_room(self, length_bytes: int) -> bool:
        """Evict until a piece of this length is free. False if that could not be reached."""
        piece = self.allocate(length_bytes)
        if piece is not None:
            piece.release()
        return piece is not None

    # --- looking ------------------------------------------------------------------------------------------------------
    def space(self, salt: bytes) -> Space | None:
        """Records of a namespace generation by key, to look at; volatile ones may be past their end (`until_ns`)."""
        return self._spaces.get(salt)

    def find(self, salt: bytes, key: bytes) -> CachedRecord | None:
        """One record."""
        space = self._spaces.get(salt)
        return space.get(key) if space is not None else None

    # --- coming -------------------------------------------------------------------------------------------------------
    def admits(self, key: bytes, size_bytes: int) -> bool:
        """Whether a record that was just read should be inserted. A refused one may be admitted the next time."""
        if size_bytes > self._record_bytes_max:
            return False
        if not self._second_touch or key in self._ghosts:
            return True
        self._remember(key)
        return False

    def fits(self, size_bytes: int) -> bool:
        """Whether a record of that size may be in the cache at all."""
        return size_bytes <= self._record_bytes_max

    def insert(self, salt: bytes, facts: RecordFacts, piece: Piece | None, *, tick: int) -> CachedRecord:
        """Take over one hold on `piece`, whose first bytes are the payload. An older copy of the key is dropped.

        Evicts others to stay within the capacity; ask `admits` or `fits` first.
        """
        record = CachedRecord(salt, facts, piece, tick=tick)
        self.insert_all(salt, (record,))
        return record

    def insert_all(self, salt: bytes, records: Sequence[CachedRecord]) -> None:
        """`insert` of records, all different, of one namespace generation."""
        space = self._spaces.setdefault(salt, {})
        at, ghosts, small = self.at, self._ghosts, self._small
        used_bytes = small_bytes = 0
        for record in records:
            key = record.facts.key
            older = space.get(key)
            if older is not None:
                self._drop(older)
                space = self._spaces.setdefault(salt, {})
            space[key] = record
            at[record.location] = record
            size = record.size_bytes
            used_bytes += size
            if key in ghosts:
                del ghosts[key]
                self._to_main(record)
            else:
                small[record] = None
                small_bytes += size
        self.used_bytes += used_bytes
        self._small_bytes += small_bytes
        while self.used_bytes > self.capacity_bytes and self._evict_one():
            pass

    def has_volatile_room(self, size_bytes: int) -> bool:
        """Whether one more volatile record of that size is within its share."""
        return self.volatile_bytes + size_bytes <= self._volatile_bytes_max

    def insert_volatile(
        self, salt: bytes, facts: RecordFacts, piece: Piece | None, *, tick: int, until_ns: int
    ) -> CachedRecord | None:
        """Take over one hold on `piece` until `until_ns`. None, and nothing is taken, over the volatile share."""
        record = CachedRecord(salt, facts, piece, tick=tick, until_ns=until_ns)
        if self.volatile_bytes + record.size_bytes > self._volatile_bytes_max:
            return None
        self.forget(salt, facts.key)
        self._spaces.setdefault(salt, {})[facts.key] = record
        self.used_bytes += record.size_bytes
        self.volatile_bytes += record.size_bytes
        heappush(self._volatile, (until_ns, next(self._serial), record))
        while self.used_bytes > self.capacity_bytes and self._evict_one():
            pass
        return record

    # --- going --------------------------------------------------------------------------------------------------------
    def forget(self, salt: bytes, key: bytes) -> None:
        """Drop one record: it was deleted, or is no longer to be trusted."""
        record = self.find(salt, key)
        if record is not None:
            self._drop(record)

    def forget_namespace(self, salt: bytes) -> None:
        """Drop every record of a namespace generation."""
        for record in list(self._spaces.get(salt, {}).values()):
            self._drop(record)

    def moved(self, keys: U64, old: U64, new: U64) -> None:
        """Records lie elsewhere on the drive now (`ledger.RecordWatcher`)."""
        if not self.at:
            return
        for before, now in zip(old.tolist(), new.tolist(), strict=True):
            record = self.at.pop(before, None)
            if record is not None:
                record.location = now
                self.at[now] = record

    def removed(self, keys: U64, locations: U64) -> None:
        """Records on the drive are no longer valid: copies must not outlive them (`ledger.RecordWatcher`)."""
        if not self.at:
            return
        for location in locations.tolist():
            record = self.at.get(location)
            if record is not None:
                self._drop(record)

    def expire(self, now_ns: int) -> None:
        """Drop the volatile records whose time is up."""
        while self._volatile and self._volatile[0][0] <= now_ns:
            record = heappop(self._volatile)[2]
            if record.until_ns:
                self._drop(record)

    def next_expiry_ns(self) -> int | None:
        """When `expire` has something to do; None without volatile records."""
        return self._volatile[0][0] if self._volatile else None

    def clear(self) -> None:
        """Drop everything."""
        for salt in list(self._spaces):
            self.forget_namespace(salt)

    def _evict_one(self) -> bool:
        """Drop the record that S3-FIFO says; False when there is none."""
        while self._small or self._main:
            if self._small and (self._small_bytes > self._small_bytes_max or not self._main):
                record = self._small.popitem(last=False)[0]
                self._small_bytes -= record.size_bytes
                if record.hits:
                    record.hits = 0
                    self._to_main(record)
                    continue
                self._remember(record.facts.key)
            else:
                record = self._main.popitem(last=False)[0]
                if record.hits:
                    record.hits -= 1
                    self._main[record] = None
                    continue
            self._release(record)
            self.metrics.cache_evictions += 1
            return True
        return False

    def _to_main(self, record: CachedRecord) -> None:
        record.in_main = True
        self._main[record] = None

    def _drop(self, record: CachedRecord) -> None:
        if record.until_ns:
            self.volatile_bytes -= record.size_bytes
            record.until_ns = 0
        elif record.in_main:
            del self._main[record]
        else:
            del self._small[record]
            self._small_bytes -= record.size_bytes
        self._release(record)

    def _release(self, record: CachedRecord) -> None:
        space = self._spaces[record.salt]
        del space[record.facts.key]
        self.at.pop(record.location, None)
        if not space:
            del self._spaces[record.salt]
        self.used_bytes -= record.size_bytes
        if record.piece is not None:
            record.piece.release()

    def _remember(self, key: bytes) -> None:
        self._ghosts[key] = None
        if len(self._ghosts) > CACHE_GHOSTS_MAX:
            self._ghosts.popitem(last=False)


class HeaderLru:
    """Facts of records on the drive that are read in ranges, so that a range costs one read and not two.

    Bounded by the bytes of the CRC tables. A location names one record until its segment is evicted; the segment's
    generation is part of the key.
    """

    def __init__(self, *, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._facts: OrderedDict[tuple[int, int], RecordFacts] = OrderedDict()

    def __len__(self) -> int:
        return len(self._facts)

    def get(self, location: int, segment_generation: int) -> RecordFacts | None:
        """Facts of the record at a location, which are then the most recently used."""
        facts = self._facts.get((location, segment_generation))
        if facts is not None:
            self._facts.move_to_end((location, segment_generation))
        return facts

    def put(self, segment_generation: int, facts: RecordFacts) -> None:
        """Remember verified facts."""
        key = (facts.location, segment_generation)
        if key not in self._facts:
            self._bytes += _facts_bytes(facts)
        self._facts[key] = facts
        self._facts.move_to_end(key)
        while self._bytes > self._bytes_max:
            self._bytes -= _facts_bytes(self._facts.popitem(last=False)[1])

    def forget(self, location: int, segment_generation: int) -> None:
        """The record turned out bad, or went."""
        facts = self._facts.pop((location, segment_generation), None)
        if facts is not None:
            self._bytes -= _facts_bytes(facts)


def _facts_bytes(facts: RecordFacts) -> int:
    return 512 + len(facts.crcs)  # measured with sys.getsizeof over the object, its bytes and the dictionary slot

"""What is stored, kept consistent in one place: the index, the scores of segments and the history of what went.

Everything that makes a record valid, moves it or ends it goes through here, so that live bytes equal the sum of valid
records at any moment. Keys are index keys: 16 bytes of the record key, salted by namespace and generation, as two u64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstore.engine.api import NamespaceRef
from kvstore.engine.history import Fate, History
from kvstore.engine.index import FEW_KEYS, IS_COMPILED, NOT_INSERTED, Index
from kvstore.engine.location import I64, U32, U64, Bools, location_page_counts, location_pages
from kvstore.engine.namespaces import index_keys, index_keys_few
from kvstore.engine.policy import SegmentScores
from kvstore.limits import DIGEST_BYTES, PAGE_BYTES, PINS_PER_KEY_MAX

_MASK64: Final = (1 << 64) - 1
_FEW_KEYS: Final = 32
"""Up to so many keys are searched one by one where the search is not compiled."""
_SCALAR_KEYS_MAX = 8
"""Below this many keys a loop over scalars is faster than numpy."""


class Catalog:
    """The valid records of one drive.

    Attributes:
        index, scores, history: to look at; they are changed through the catalog only.
        version: grows whenever a record moves, ends or is replaced: a location of this version is still good.
        evicted_tick: mean tick of the last access of what was evicted last; 0 before that.
        pinned_bytes: padded bytes of the keys that any pin holds, each counted once.
    """

    def __init__(self, *, entries_max: int, segment_count: int, seed: int | None = None) -> None:
        self.index = Index(entries_max, seed=seed)
        self.scores = SegmentScores(segment_count)
        self.history = History(seed=seed)
        self.pinned_bytes = 0
        self.version = 0
        self.evicted_tick = 0.0

    # --- looking --------------------------------------------------------------------------------------------------
    def lookup(self, keys: U64) -> U64:
        """Locations of n keys, 0 where absent."""
        return self.index.lookup(keys)

    def holds_any(self, ref: NamespaceRef, keys: bytes) -> bool:
        """Whether one of n * 32 bytes of record keys is there."""
        return any(self.locate(ref, keys, list(range(len(keys) // DIGEST_BYTES)), 0))

    def valid(self, keys: U64, locations: U64) -> Bools:
        """Which of these records are still what the index says of their key: the live ones of a segment's entries."""
        same: Bools = self.index.lookup(keys) == locations
        return same

    def standing(self, keys: U64, locations: U64) -> tuple[Bools, U32, Bools]:
        """`valid`, `ticks` and `pinned` of n keys, in one search."""
        index = self.index
        slots = index.find_many(keys)
        ticks = index.access[slots]
        is_there = slots >= 0
        ticks[~is_there] = 0
        valid: Bools = is_there & (index.locations[slots] == locations)
        pinned: Bools = is_there & (index.pins[slots] > 0)
        return valid, ticks, pinned

    def ticks(self, keys: U64) -> U32:
        """Access ticks of n keys, 0 where absent."""
        slots = self.index.find_many(keys)
        ticks = self.index.access[slots]
        ticks[slots < 0] = 0
        return ticks

    # --- access ---------------------------------------------------------------------------------------------------
    def touch_slots(self, slots: I64, tick: int) -> None:
        """An access of each of these slots (from `index.find_many`, none negative; may repeat)."""
        access = self.index.access
        before = access.take(slots)
        fresh = slots[before != tick]
        if not len(fresh):
            return
        # A slot given twice must count once: of its writers here only the last finds its own mark.
        marks = np.arange(len(fresh), dtype=np.uint32)
        before = access.take(fresh)
        access[fresh] = marks
        last = access.take(fresh) == marks
        if not last.all():
            fresh, before = fresh[last], before[last]
        access[fresh] = tick
        self.scores.touch_many(self.index.locations.take(fresh), before=before, now=tick)

    def touch(self, key0: int, key1: int, tick: int) -> bool:
        """An access of one key; False if it is absent."""
        index = self.index
        slot = index.find(key0, key1)
        if slot < 0:
            return False
        before = index.touch(slot, tick)
        if before != tick:
            self.scores.touch(index.location_at(slot), before=before, now=tick)
        return True

    def locate(self, ref: NamespaceRef, keys: bytes, indices: list[int], tick: int) -> list[int]:
        """Locations of records, 0 where absent; with a tick (not 0) this counts as an access of each.

        Args:
            keys: n * 32 bytes of record keys.
            indices: of those among them that are meant, in the order of the answers.
        """
        index = self.index
        if IS_COMPILED:
            return index.locate(keys, indices, ref.salt, tick, self.scores.access_sums)
        if len(indices) <= _FEW_KEYS:
            few = [keys[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] for at in indices]
            return self.locate_few(index_keys_few(ref, few), tick)
        slots = index.find_many(index_keys(ref, keys)[indices])
        there = slots >= 0
        locations = index.locations.take(slots, mode="clip")
        if not there.all():
            locations[~there] = 0
            slots = slots[there]
        if tick:
            self.touch_slots(slots, tick)
        found: list[int] = locations.tolist()
        return found

    def locate_few(self, keys16: Sequence[bytes], tick: int) -> list[int]:
        """Locations of a handful of keys, 0 where absent; with a tick (not 0) this counts as an access of each."""
        index = self.index
        found: list[int] = []
        fresh: list[int] = []
        before: list[int] = []
        for slot in index.find_few(keys16):
            if slot < 0:
                found.append(0)
                continue
            location = index.location_at(slot)
            found.append(location)
            if tick:
                last = index.touch(slot, tick)
                if last != tick:
                    fresh.append(location)
                    before.append(last)
        if fresh:
            self.scores.touch_many(np.array(fresh, dtype=np.uint64), before=np.array(before, dtype=np.uint32), now=tick)
        return found

    def touch_records(self, ref: NamespaceRef, keys: bytes | memoryview, tick: int) -> None:
        """An access of each record that is there, of n * 32 bytes of record keys."""
        if IS_COMPILED:
            every = list(range(len(keys) // DIGEST_BYTES))
            self.index.locate(keys, every, ref.salt, tick, self.scores.access_sums)
        else:
            self.touch_keys(index_keys(ref, keys), tick)

    def touch_keys(self, keys: U64, tick: int) -> None:
        """An access of each key that is there."""
        if len(keys) < _SCALAR_KEYS_MAX:
            for key0, key1 in keys.tolist():
                self.touch(key0, key1, tick)
            return
        slots = self.index.find_many(keys)
        self.touch_slots(slots[slots >= 0], tick)

    # --- pins -----------------------------------------------------------------------------------------------------
    def pinnable_bytes(self, slots: I64) -> int:
        """Bytes of these slots (each given once) that no pin holds yet; -1 where one is held too often already."""
        pins = self.index.pins[slots]
        if (pins == PINS_PER_KEY_MAX).any():
            return -1
        return self._bytes_of(slots[pins == 0])

    def pin(self, slots: I64) -> None:
        """Hold these slots (each given once) against eviction; `pinnable_bytes` said it is possible."""
        pins = self.index.pins
        self.pinned_bytes += self._bytes_of(slots[pins[slots] == 0])
        pins[slots] += 1

    def unpin(self, keys: U64) -> None:
        """Undo one `pin` of these keys (each given once); keys that went meanwhile are passed over."""
        slots = self.index.find_many(keys)
        slots = slots[slots >= 0]
        pins = self.index.pins
        # A key that was deleted and put again while it was pinned has fewer pins than holders.
        slots = slots[pins[slots] > 0]
        pins[slots] -= 1
        self.pinned_bytes -= self._bytes_of(slots[pins[slots] == 0])

    def pinned(self, keys: U64) -> Bools:
        """Which of n keys are pinned."""
        slots = self.index.find_many(keys)
        held: Bools = (slots >= 0) & (self.index.pins[slots] > 0)
        return held

    def _bytes_of(self, slots: I64) -> int:
        return int(location_page_counts(self.index.locations[slots]).sum()) * PAGE_BYTES

    # --- records come ---------------------------------------------------------------------------------------------
    def commit(self, key0: int, key1: int, location: int, tick: int) -> bool:
        """A record became valid; one that lay elsewhere under its key is dead now. False when the index is full."""
        return self.replace(key0, key1, location, tick) != NOT_INSERTED

    def replace(self, key0: int, key1: int, location: int, tick: int) -> int:
        """`commit` that answers where the record lay before, 0 if it is new, NOT_INSERTED when the index is full."""
        slot = self.index.find(key0, key1)
        before = self.index.access_at(slot) if slot >= 0 else 0
        previous = self.index.insert(key0, key1, location, tick, slot=slot)
        if previous == NOT_INSERTED:
            return previous
        if previous:
            self.version += 1
            self.scores.remove(previous, before)
            self._count_replaced(slot, previous, location)
        self.scores.add(location, tick)
        return previous

    def replace_many(self, keys16: Sequence[bytes], locations: Sequence[int], tick: int) -> list[int]:
        """`replace` of several keys, all different, whose records have one length and lie in one segment."""
        added = self.index.insert_few(keys16, locations, tick)
        if all(added):
            self.scores.add_alike(locations, tick)
            return [0] * len(added)
        answers: list[int] = []
        for is_added, key16, location in zip(added, keys16, locations, strict=True):
            if is_added:
                self.scores.add(location, tick)
                answers.append(0)
            else:
                key = int.from_bytes(key16, "little")
                answers.append(self.replace(key & _MASK64, key >> 64, location, tick))
        return answers

    def load(self, keys: U64, locations: U64, ticks: U32) -> Bools:
        """Recovery: n keys, no two equal, into an empty catalog. Says which the index had room for."""
        stored: Bools = self.index.insert_many(keys, locations, ticks) != np.uint64(NOT_INSERTED)
        self.scores.add_many(locations[stored], ticks[stored])
        return stored

    def _count_replaced(self, slot: int, old: int, new: int) -> None:
        if self.index.pins[slot]:
            self.pinned_bytes += (location_pages(new) - location_pages(old)) * PAGE_BYTES

    def move(self, keys: U64, *, old: U64, new: U64) -> Bools:
        """Records were re-inserted: those that still lie at `old` lie at `new` now, as warm as before. Says which."""
        slots = self.index.find_many(keys)
        still: Bools = (slots >= 0) & (self.index.locations[slots] == old)
        moved = slots[still]
        self.version += 1
        ticks = self.index.access[moved]
        self.scores.remove_many(old[still], ticks)
        self.index.relocate(moved, new[still])
        self.scores.add_many(new[still], ticks)
        return still

    # --- records go -----------------------------------------------------------------------------------------------
    def evict(self, keys: U64, locations: U64, tick: int) -> Bools:
        """Forget the records that still lie at `locations`. Says which did."""
        gone: Bools = self._end(keys, locations, Fate.EVICTED, tick) != 0
        return gone

    def delete(self, keys: U64, tick: int) -> U64:
        """Forget keys; answers the locations they had, 0 where absent."""
        return self._end(keys, None, Fate.DELETED, tick)

    def quarantine(self, keys: U64, locations: U64, tick: int) -> Bools:
        """Forget records that turned out bad, if they still lie at `locations`. Says which did."""
        gone: Bools = self._end(keys, locations, Fate.QUARANTINED, tick) != 0
        return gone

    def erase(self, keys: U64, locations: U64) -> None:
        """Forget records that are not counted any more, since their namespace was dropped, if they lie there."""
        slots = self.index.find_many(keys)
        pinned = (slots >= 0) & (self.index.pins[slots] > 0)
        removed = self.index.delete_at(slots, locations)
        self.pinned_bytes -= int(location_page_counts(removed[pinned]).sum()) * PAGE_BYTES
        self.version += 1

    def _end(self, keys: U64, expected: U64 | None, fate: Fate, tick: int) -> U64:
        slots = self.index.find_many(keys)
        if len(keys) <= FEW_KEYS:
            return self._end_few(keys, slots, expected, fate, tick)
        ticks, pins = self.index.access[slots], self.index.pins[slots]
        removed = self.index.delete_at(slots, expected)
        gone = removed != 0
        self.version += 1
        if self.pinned_bytes:
            self.pinned_bytes -= int(location_page_counts(removed[gone & (pins > 0)]).sum()) * PAGE_BYTES
        self.scores.remove_many(removed[gone], ticks[gone])
        self.history.note(keys[gone], fate, tick)
        if fate is Fate.EVICTED and gone.any():
            self.evicted_tick = float(ticks[gone].mean())
        return removed

    def _end_few(self, keys: U64, slots: I64, expected: U64 | None, fate: Fate, tick: int) -> U64:
        """`_end` of a handful of keys in these slots."""
        index, scores = self.index, self.scores
        found: list[int] = slots.tolist()
        wanted: Sequence[int] = expected.tolist() if expected is not None else ()
        removed: list[int] = []
        ticks: list[int] = []
        for at, slot in enumerate(found):
            location = index.location_at(slot) if slot >= 0 else 0
            if not location or (expected is not None and location != wanted[at]):
                removed.append(0)
                continue
            last = index.access_at(slot)
            if index.pins_at(slot):
                self.pinned_bytes -= location_pages(location) * PAGE_BYTES
            index.free(slot)
            scores.remove(location, last)
            removed.append(location)
            ticks.append(last)
        self.version += 1
        answer = np.array(removed, dtype=np.uint64)
        if ticks:
            self.history.note(keys if len(ticks) == len(keys) else keys[answer != 0], fate, tick)
            if fate is Fate.EVICTED:
                self.evicted_tick = sum(ticks) / len(ticks)
        return answer

"""The RAM index: which record key lies where on the drive, and when it was last asked for.

Extendible hashing over pages of 256 slots. A directory of 2^depth page numbers is indexed by the high bits of a hash; a
page that cannot take a key splits alone and its twin gets the next free page of one reserved mapping, so growth never
pauses and physical memory is what pages in use touch. A slot is 30 bytes in five columns: two halves of the key, the
location, the access tick, the count of pins. Within its page a key may lie in either of two buckets of 8 slots (the
emptier takes it), so a lookup reads two cache lines of key halves at most. A split keeps every entry in its slot
number, and is therefore two masked copies of a page.

Searches of many keys are compiled (`_search.c`), and done in numpy where that was not built: the same answers, tested
against each other.

The hash is multilinear with secrets drawn per process: keys come from clients, who must not choose where they land.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstore.engine.location import I64, U8, U16, U32, U64, Bools
from kvstore.types.compiled import require_interface

try:
    from kvstore.engine import _search

    require_interface(_search)
except ImportError:
    IS_COMPILED = False
else:
    IS_COMPILED = True

SLOT_BYTES: Final = 30
PAGE_SLOTS: Final = 256
BUCKET_SLOTS: Final = 8
PAGE_BUCKETS: Final = PAGE_SLOTS // BUCKET_SLOTS
DIRECTORY_DEPTH_MAX: Final = 26
FEW_KEYS: Final = 64
"""Up to so many keys are changed one by one, in a loop over scalars: less than a dozen numpy calls with cold caches."""
NOT_INSERTED: Final = (1 << 64) - 1
"""Previous location that `insert` answers when the index is full: the key is not in it."""

_MASK64: Final = (1 << 64) - 1
_MAP_NORESERVE: Final = 0x4000  # mmap(2); the mmap module lists it from Python 3.13 on
_BATCH_KEYS_MAX: Final = 65_536
_BUCKET_SHIFT: Final = 64 - DIRECTORY_DEPTH_MAX - 10  # ten hash bits right below those of the directory
_BUCKET_KEY_BYTES: Final = BUCKET_SLOTS * 8
_PAGE_KEY_BYTES: Final = PAGE_SLOTS * 8
_ONE: Final = np.uint64(1)

# --- tables over the 256 states of a bucket: bit i set means slot i is taken ----------------------------------------
_TAKEN = np.array([bin(state).count("1") for state in range(256)], dtype=np.uint8)
_FREE_SLOT = np.zeros((256, BUCKET_SLOTS), dtype=np.uint8)  # [state, rank] -> the rank-th free slot
for _state in range(256):
    _free = [slot for slot in range(BUCKET_SLOTS) if not _state >> slot & 1]
    _FREE_SLOT[_state, : len(_free)] = _free
_FIRST_FREE: Final = bytes(_FREE_SLOT[:, 0])
_TAKEN_BYTES: Final = bytes(_TAKEN)


class Index:
    """Map of 16-byte keys to (location, access tick). A key is two u64, the first from its lower bytes, little endian.

    Not thread-safe. Slots are numbers that stay valid until the next insert.

    Attributes:
        count: keys in the index.
        locations: u64 per slot, 0 where the slot is free. Read only.
        access: u32 tick per slot. Read only.
        pins: u16 per slot, how many pins hold the key; the owner of the index writes it. 0 in free slots.
    """

    def __init__(self, entries_max: int, *, seed: int | None = None) -> None:
        """Reserve address space; memory is touched as keys come.

        Args:
            entries_max: keys that must fit whatever their distribution over pages; beyond it inserts may be refused.
            seed: fixes the hash, for tests; None draws it from the system.

        Raises:
            OSError: the address space cannot be reserved.
        """
        self.pages_max = max(entries_max * 3 // PAGE_SLOTS, 1) + 64  # a page is at least 40 % full on average
        secrets = os.urandom(16) if seed is None else np.random.default_rng(seed).bytes(16)
        self._secret0 = int.from_bytes(secrets[:8]) | 1
        self._secret1 = int.from_bytes(secrets[8:]) | 1
        slots = self.pages_max * PAGE_SLOTS
        self._key0_map = _reserve(slots * 8)
        self._key0: U64 = np.frombuffer(self._key0_map, dtype=np.uint64)
        self._key1: U64 = np.frombuffer(_reserve(slots * 8), dtype=np.uint64)
        self.locations: U64 = np.frombuffer(_reserve(slots * 8), dtype=np.uint64)
        self.access: U32 = np.frombuffer(_reserve(slots * 4), dtype=np.uint32)
        self.pins: U16 = np.frombuffer(_reserve(slots * 2), dtype=np.uint16)
        self._states: U8 = np.frombuffer(_reserve(slots // BUCKET_SLOTS), dtype=np.uint8)
        self._local_depth: U8 = np.frombuffer(_reserve(self.pages_max), dtype=np.uint8)
        self._key0_rows = self._key0.reshape(-1, BUCKET_SLOTS)
        # Scalar access through memoryviews costs a tenth of numpy's.
        self._key0_scalar = self._key0.data
        self._key1_scalar = self._key1.data
        self._location_scalar = self.locations.data
        self._access_scalar = self.access.data
        self._pins_scalar = self.pins.data
        self._state_scalar = self._states.data
        self._set_directory(np.zeros(1, dtype=np.uint32), 0)
        self.pages = 1
        self.count = 0

    def __len__(self) -> int:
        return self.count

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory touched: pages in use, their bookkeeping and the directory."""
        return self.pages * (PAGE_SLOTS * SLOT_BYTES + PAGE_BUCKETS + 1) + self._directory.nbytes

    # --- one key ------------------------------------------------------------------------------------------------
    def find(self, key0: int, key1: int) -> int:
        """Slot of a key, -1 where it is absent."""
        mixed = (key0 * self._secret0 + key1 * self._secret1) & _MASK64
        page = self._directory_scalar[mixed >> self._shift] * _PAGE_KEY_BYTES
        bits = mixed >> _BUCKET_SHIFT
        low = bits & 31
        half = key0.to_bytes(8, "little")
        search = self._key0_map.find
        start = page + low * _BUCKET_KEY_BYTES
        at = search(half, start, start + _BUCKET_KEY_BYTES)
        if at < 0:
            start = page + (low ^ (bits >> 5 & 31 | 1)) * _BUCKET_KEY_BYTES
            at = search(half, start, start + _BUCKET_KEY_BYTES)
            if at < 0:
                return -1
        slot = at >> 3
        if not at & 7 and self._key1_scalar[slot] == key1 and self._location_scalar[slot]:
            return slot
        return self._find_slowly(key0, key1, page >> 3, bits)

    def _find_slowly(self, key0: int, key1: int, first_slot: int, bits: int) -> int:
        """`find`, slot by slot: half a key may stand in a bucket twice, or across two slots."""
        low = bits & 31
        key0s = self._key0_scalar
        for bucket in (low, low ^ (bits >> 5 & 31 | 1)):
            slot = first_slot + bucket * BUCKET_SLOTS
            row = key0s[slot : slot + BUCKET_SLOTS].tolist()
            for column in range(BUCKET_SLOTS):
                if (
                    row[column] == key0
                    and self._key1_scalar[slot + column] == key1
                    and self._location_scalar[slot + column]
                ):
                    return slot + column
        return -1

    def find_few(self, keys16: Sequence[bytes]) -> list[int]:
        """`find` for a handful of keys, 16 bytes each, as in the digest: cheaper than numpy for up to 64."""
        secret0, secret1, shift = self._secret0, self._secret1, self._shift
        directory, search = self._directory_scalar, self._key0_map.find
        key1s, locations = self._key1_scalar, self._location_scalar
        slots = []
        for key16 in keys16:
            both = int.from_bytes(key16, "little")
            key1 = both >> 64
            mixed = ((both & _MASK64) * secret0 + key1 * secret1) & _MASK64
            bits = mixed >> _BUCKET_SHIFT
            low = bits & 31
            page = directory[mixed >> shift] * _PAGE_KEY_BYTES
            half = key16[:8]
            start = page + low * _BUCKET_KEY_BYTES
            at = search(half, start, start + _BUCKET_KEY_BYTES)
            if at < 0:
                start = page + (low ^ (bits >> 5 & 31 | 1)) * _BUCKET_KEY_BYTES
                at = search(half, start, start + _BUCKET_KEY_BYTES)
            slot = at >> 3
            if at >= 0 and (at & 7 or key1s[slot] != key1 or not locations[slot]):
                slot = self.find(both & _MASK64, key1)  # half a key, or one across two slots: look slot by slot
            slots.append(slot)
        return slots

    def get(self, key0: int, key1: int) -> int:
        """Location of a key, 0 where it is absent."""
        slot = self.find(key0, key1)
        return self._location_scalar[slot] if slot >= 0 else 0

    def insert(self, key0: int, key1: int, location: int, tick: int, *, slot: int | None = None) -> int:
        """Add or overwrite one key; `slot` is what `find` has just said of it, where that was asked already.

        Returns:
            Its previous location, 0 if it is new, NOT_INSERTED if the index is full.
        """
        if slot is None:
            slot = self.find(key0, key1)
        previous = 0
        if slot >= 0:
            previous = self._location_scalar[slot]
        else:
            slot = self._room(key0, key1)
            if slot < 0:
                return NOT_INSERTED
            self._key0_scalar[slot] = key0
            self._key1_scalar[slot] = key1
            self._state_scalar[slot // BUCKET_SLOTS] |= 1 << slot % BUCKET_SLOTS
            self.count += 1
        self._location_scalar[slot] = location
        self._access_scalar[slot] = tick
        return previous

    def insert_few(self, keys16: Sequence[bytes], locations: Sequence[int], tick: int) -> list[bool]:
        """Add a handful of keys, all different, in one loop.

        Returns:
            Which were added. With one that may be there already, or that its page has no room for, nothing is done:
            `insert` tells.
        """
        secret0, secret1, shift = self._secret0, self._secret1, self._shift
        directory, states, search = self._directory_scalar, self._state_scalar, self._key0_map.find
        added: list[bool] = []
        for key16, location in zip(keys16, locations, strict=True):
            both = int.from_bytes(key16, "little")
            key0, key1 = both & _MASK64, both >> 64
            mixed = (key0 * secret0 + key1 * secret1) & _MASK64
            bits = mixed >> _BUCKET_SHIFT
            low = bits & 31
            first = directory[mixed >> shift] * PAGE_BUCKETS
            bucket, other = first + low, first + (low ^ (bits >> 5 & 31 | 1))
            half = key16[:8]
            start, behind = bucket * _BUCKET_KEY_BYTES, other * _BUCKET_KEY_BYTES
            if (
                search(half, start, start + _BUCKET_KEY_BYTES) >= 0
                or search(half, behind, behind + _BUCKET_KEY_BYTES) >= 0
            ):
                added.append(False)
                continue
            if _TAKEN_BYTES[states[other]] < _TAKEN_BYTES[states[bucket]]:
                bucket = other
            state = states[bucket]
            if state == 0xFF:
                added.append(False)
                continue
            free = _FIRST_FREE[state]
            slot = bucket * BUCKET_SLOTS + free
            self._key0_scalar[slot] = key0
            self._key1_scalar[slot] = key1
            states[bucket] = state | 1 << free
            self._location_scalar[slot] = location
            self._access_scalar[slot] = tick
            added.append(True)
        self.count += sum(added)
        return added

    def delete(self, key0: int, key1: int, expected: int = 0) -> int:
        """Remove one key; with `expected`, only if it lies there. Returns the location removed, 0 if none was."""
        slot = self.find(key0, key1)
        if slot < 0:
            return 0
        location = self._location_scalar[slot]
        if expected and location != expected:
            return 0
        self.free(slot)
        return location

    def free(self, slot: int) -> None:
        """Remove the key in a slot that is taken."""
        self._location_scalar[slot] = 0
        self._key0_scalar[slot] = 0
        self._pins_scalar[slot] = 0
        self._state_scalar[slot // BUCKET_SLOTS] &= ~(1 << slot % BUCKET_SLOTS) & 0xFF
        self.count -= 1

    def location_at(self, slot: int) -> int:
        """Location in one slot."""
        return self._location_scalar[slot]

    def access_at(self, slot: int) -> int:
        """Access tick in one slot."""
        return self._access_scalar[slot]

    def pins_at(self, slot: int) -> int:
        """Pins that hold the key in one slot."""
        return self._pins_scalar[slot]

    def touch(self, slot: int, tick: int) -> int:
        """Note an access at `tick`; returns the tick of the one before."""
        previous = self._access_scalar[slot]
        self._access_scalar[slot] = tick
        return previous

    # --- many keys ----------------------------------------------------------------------------------------------
    def find_many(self, keys: U64) -> I64:
        """Slots of n keys, -1 where absent.

        Args:
            keys: shape [n, 2].
        """
        if IS_COMPILED:
            slots: I64 = np.empty(len(keys), dtype=np.int64)
            _search.find_many(np.ascontiguousarray(keys), slots, *self._columns())
            return slots
        key0 = np.ascontiguousarray(keys[:, 0])
        key1 = np.ascontiguousarray(keys[:, 1])
        return self._find(key0, key1, *self._buckets(key0, key1))

    def locate(
        self, keys: bytes | memoryview, indices: list[int], salt: bytes, tick: int, access_sums: I64
    ) -> list[int]:
        """See `Catalog.locate`; only where the search IS_COMPILED.

        Args:
            access_sums: of `SegmentScores`, which learn of each access.
        """
        return _search.locate(keys, indices, salt, *self._columns(), self.access, access_sums, tick)

    def _columns(self) -> tuple[U64, U64, U64, U32, int, int, int]:
        return (
            self._key0,
            self._key1,
            self.locations,
            self._directory,
            self._shift,
            self._secret0,
            self._secret1,
        )

    def lookup(self, keys: U64) -> U64:
        """Locations of n keys, 0 where absent. `keys` has shape [n, 2]."""
        slots = self.find_many(keys)
        found = self.locations.take(slots, mode="clip")
        found[slots < 0] = 0
        return found

    def touch_many(self, slots: I64, tick: int) -> U32:
        """Note an access of these slots (none negative) at `tick`; returns the ticks of the accesses before."""
        previous = self.access[slots]
        self.access[slots] = tick
        return previous

    def relocate(self, slots: I64, locations: U64) -> None:
        """Give the keys in these slots (none negative) new locations (none 0), their access ticks unchanged."""
        self.locations[slots] = locations

    def insert_many(self, keys: U64, locations: U64, ticks: U32 | int) -> U64:
        """Add or overwrite n keys; of equal keys the last one counts.

        Args:
            keys: shape [n, 2].
            locations: shape [n], none 0.
            ticks: access tick of each, or one for all.

        Returns:
            Previous locations, as `insert` answers them.
        """
        count = len(keys)
        previous = np.zeros(count, dtype=np.uint64)
        tick_of = np.broadcast_to(np.asarray(ticks, dtype=np.uint32), (count,))
        at = 0
        while at < count:
            # While the index is small a batch must be too, or choosing the emptier bucket works on stale numbers.
            end = min(at + max(PAGE_SLOTS, min(self.pages * PAGE_BUCKETS * 2, _BATCH_KEYS_MAX)), count)
            previous[at:end] = self._insert_batch(keys[at:end], locations[at:end], tick_of[at:end])
            at = end
        return previous

    def delete_many(self, keys: U64, expected: U64 | None = None) -> U64:
        """Remove n keys; with `expected` (shape [n]) only those that lie there.

        Returns:
            Locations removed, 0 where none was. Of equal keys only one answer is not 0.
        """
        return self.delete_at(self.find_many(keys), expected)

    def delete_at(self, slots: I64, expected: U64 | None = None) -> U64:
        """`delete_many` of keys whose slots `find_many` has just told."""
        found = slots >= 0
        if expected is not None:
            found &= self.locations[slots] == expected
        removed = np.zeros(len(slots), dtype=np.uint64)
        chosen = np.flatnonzero(found)
        gone, first = np.unique(slots[chosen], return_index=True)
        removed[chosen[first]] = self.locations[gone]
        self.locations[gone] = 0
        self._key0[gone] = 0
        self.pins[gone] = 0
        bits = np.left_shift(1, gone % BUCKET_SLOTS).astype(np.uint8)
        np.bitwise_and.at(self._states, gone // BUCKET_SLOTS, np.invert(bits))
        self.count -= len(gone)
        return removed

    def reserve(self, entries: int) -> None:
        """Make an empty index large enough for `entries` at once: recovery then inserts without splitting."""
        if self.count or self.pages > 1:
            return
        depth = 0
        while (PAGE_SLOTS * 4 // 5) << depth < entries and 2 << depth <= self.pages_max:
            depth += 1
        self.pages = 1 << depth
        self._local_depth[: self.pages] = depth
        self._set_directory(np.arange(self.pages, dtype=np.uint32), depth)

    def taken_slots(self) -> I64:
        """Slots of all keys, in no order."""
        return np.flatnonzero(self.locations[: self.pages * PAGE_SLOTS])

    def keys_at(self, slots: I64) -> U64:
        """Keys in these slots, shape [n, 2]."""
        return np.stack([self._key0[slots], self._key1[slots]], axis=1)

    # --- inside ---------------------------------------------------------------------------------------------------
    def _set_directory(self, directory: U32, depth: int) -> None:
        self._directory = directory
        self._directory_scalar = directory.data
        self._depth = depth
        self._shift = 64 - depth

    def _buckets(self, key0: U64, key1: U64) -> tuple[I64, I64]:
        """Both buckets where each key may lie."""
        mixed = key0 * np.uint64(self._secret0) + key1 * np.uint64(self._secret1)
        if self._depth:
            pages = self._directory[mixed >> np.uint64(self._shift)].astype(np.int64)
        else:
            pages = np.zeros(len(mixed), dtype=np.int64)
        bits = (mixed >> np.uint64(_BUCKET_SHIFT)).astype(np.int64)
        low = bits & 31
        first = pages * PAGE_BUCKETS
        return first + low, first + (low ^ (bits >> 5 & 31 | 1))

    def _find(self, key0: U64, key1: U64, bucket0: I64, bucket1: I64) -> I64:
        slots = self._find_in(key0, key1, bucket0)
        rest = np.flatnonzero(slots == -1)
        if len(rest):
            slots[rest] = self._find_in(key0[rest], key1[rest], bucket1[rest])
        # Half a key met twice in one bucket (2^-64, or a test that cuts keys short): look slot by slot.
        for at in np.flatnonzero(slots == -2).tolist():
            slots[at] = self.find(int(key0[at]), int(key1[at]))
        return slots

    def _find_in(self, key0: U64, key1: U64, buckets: I64) -> I64:
        """Slots of keys that lie in the given buckets, -1 without a trace, -2 where only the first half is there."""
        same = self._key0_rows.take(buckets, axis=0, mode="clip") == key0[:, None]
        hits = np.flatnonzero(same)
        which = hits // BUCKET_SLOTS
        at = buckets.take(which) * BUCKET_SLOTS + hits % BUCKET_SLOTS
        whole = (self._key1.take(at, mode="clip") == key1.take(which)) & (self.locations.take(at, mode="clip") != 0)
        slots = np.full(len(buckets), -1, dtype=np.int64)
        if not whole.all():
            slots[which[~whole]] = -2
            which, at = which[whole], at[whole]
        slots[which] = at
        return slots

    def _room(self, key0: int, key1: int) -> int:
        """A free slot for a new key, splitting its page as often as it takes; -1 when the index is full."""
        mixed = (key0 * self._secret0 + key1 * self._secret1) & _MASK64
        bits = mixed >> _BUCKET_SHIFT
        low = bits & 31
        other = low ^ (bits >> 5 & 31 | 1)
        while True:
            page = self._directory_scalar[mixed >> self._shift]
            buckets = (page * PAGE_BUCKETS + low, page * PAGE_BUCKETS + other)
            states = self._state_scalar[buckets[0]], self._state_scalar[buckets[1]]
            emptier = _TAKEN_BYTES[states[1]] < _TAKEN_BYTES[states[0]]
            if states[emptier] != 0xFF:
                return buckets[emptier] * BUCKET_SLOTS + _FIRST_FREE[states[emptier]]
            if not self._split(np.array([page], dtype=np.int64)):
                return -1

    def _insert_batch(self, keys: U64, locations: U64, ticks: U32) -> U64:
        key0 = np.ascontiguousarray(keys[:, 0])
        key1 = np.ascontiguousarray(keys[:, 1])
        previous = np.zeros(len(keys), dtype=np.uint64)
        twins = _equal_somewhere(key0)
        if twins is not None:
            for twin in np.flatnonzero(twins).tolist():
                previous[twin] = self.insert(int(key0[twin]), int(key1[twin]), int(locations[twin]), int(ticks[twin]))
            pending = np.flatnonzero(~twins)
        else:
            pending = np.arange(len(keys))
        slots = self._find(key0[pending], key1[pending], *self._buckets(key0[pending], key1[pending]))
        known = slots >= 0
        if known.any():
            old, at = slots[known], pending[known]
            previous[at] = self.locations[old]
            self.locations[old] = locations[at]
            self.access[old] = ticks[at]
            pending = pending[~known]
        while len(pending):
            taken, waiting, crowded = self._place(key0[pending], key1[pending])
            at = pending[taken[0]]
            self._fill(taken[1], key0[at], key1[at], locations[at], ticks[at])
            if len(crowded) and not self._split(crowded):
                # Full: what is left goes one by one, so that keys whose own page still has room get in.
                for rest in pending[waiting].tolist():
                    previous[rest] = self.insert(
                        int(key0[rest]), int(key1[rest]), int(locations[rest]), int(ticks[rest])
                    )
                break
            pending = pending[waiting]
        return previous

    def _place(self, key0: U64, key1: U64) -> tuple[tuple[I64, I64], I64, I64]:
        """Slots for new keys, as many as fit now.

        Returns:
            ((which keys, their slots), which keys wait, pages that must split for some of them).
        """
        bucket0, bucket1 = self._buckets(key0, key1)
        taken0, taken1 = _TAKEN[self._states[bucket0]], _TAKEN[self._states[bucket1]]
        chosen = np.where(taken1 < taken0, bucket1, bucket0)
        order = np.argsort(chosen, kind="stable")
        ordered = chosen[order]
        rank = np.arange(len(ordered)) - np.searchsorted(ordered, ordered, side="left")
        states = self._states[ordered]
        fits = rank < BUCKET_SLOTS - _TAKEN[states]
        slots = ordered[fits] * BUCKET_SLOTS + _FREE_SLOT[states[fits], rank[fits]]
        waiting = order[~fits]
        full = (taken0[waiting] == BUCKET_SLOTS) & (taken1[waiting] == BUCKET_SLOTS)
        crowded = np.unique(chosen[waiting[full]] // PAGE_BUCKETS)
        return (order[fits], slots), np.sort(waiting), crowded

    def _fill(self, slots: I64, key0: U64, key1: U64, locations: U64, ticks: U32) -> None:
        self._key0[slots] = key0
        self._key1[slots] = key1
        self.locations[slots] = locations
        self.access[slots] = ticks
        bits = np.left_shift(1, slots % BUCKET_SLOTS).astype(np.uint8)
        np.bitwise_or.at(self._states, slots // BUCKET_SLOTS, bits)
        self.count += len(slots)

    def _split(self, pages: I64) -> bool:
        """Split these pages, each into itself and a new twin. False, with nothing changed, when there is no room."""
        deepest = int(self._local_depth[pages].max())
        if self.pages + len(pages) > self.pages_max or deepest >= DIRECTORY_DEPTH_MAX:
            return False
        while self._depth <= deepest:
            self._set_directory(np.repeat(self._directory, 2), self._depth + 1)
        for page in pages.tolist():
            self._split_page(page, self.pages)
            self.pages += 1
        return True

    def _split_page(self, page: int, twin: int) -> None:
        depth = int(self._local_depth[page]) + 1
        old = slice(page * PAGE_SLOTS, (page + 1) * PAGE_SLOTS)
        new = slice(twin * PAGE_SLOTS, (twin + 1) * PAGE_SLOTS)
        key0, key1, locations = self._key0[old], self._key1[old], self.locations[old]
        mixed = key0 * np.uint64(self._secret0) + key1 * np.uint64(self._secret1)
        prefix = int(mixed[locations.argmax()])
        moves = (mixed >> np.uint64(64 - depth) & _ONE).astype(np.bool_)
        self._key0[new] = key0 * moves
        self._key1[new] = key1
        self.locations[new] = locations * moves
        self.access[new] = self.access[old]
        self.pins[new] = self.pins[old] * moves
        self.pins[old] *= ~moves
        key0 *= ~moves
        locations *= ~moves
        for side in (page, twin):
            there = self.locations[side * PAGE_SLOTS : (side + 1) * PAGE_SLOTS] != 0
            self._states[side * PAGE_BUCKETS : (side + 1) * PAGE_BUCKETS] = np.packbits(there, bitorder="little")
            self._local_depth[side] = depth
        # The page's share of the directory is one aligned run, told by any entry; its upper half is the twin's.
        half = 1 << (self._depth - depth)
        start = (prefix >> self._shift) & -(2 * half)
        self._directory[start + half : start + 2 * half] = twin


def _reserve(size_bytes: int) -> mmap.mmap:
    """Zeros over address space only: memory comes with the first touch of each page."""
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)


def _equal_somewhere(key0: U64) -> Bools | None:
    """Which first halves occur more than once in the batch; None when all differ."""
    order = np.argsort(key0)
    ordered = key0[order]
    same = ordered[1:] == ordered[:-1]
    if not same.any():
        return None
    twins = np.zeros(len(key0), dtype=np.bool_)
    twins[order[1:]] |= same
    twins[order[:-1]] |= same
    return twins

"""What became of keys that are no longer there: a bounded ring, so that a miss can say why and roughly when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from kvstore.engine.format import INDEX_KEY_BYTES
from kvstore.engine.index import FEW_KEYS, Index
from kvstore.engine.location import I64, U8, U64
from kvstore.limits import HISTORY_ENTRIES_MAX
from kvstore.types.results import MissReason


class Fate(IntEnum):
    """What happened to a key last."""

    EVICTED = 1
    DELETED = 2
    QUARANTINED = 3
    REFUSED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A key's last fate and the access tick at which it happened."""

    fate: Fate
    tick: int


_REASON_OF: Final = np.array(
    [MissReason.ABSENT, MissReason.EVICTED, MissReason.ABSENT, MissReason.CORRUPT, MissReason.ABSENT], dtype=np.uint8
)


_EVENT: Final = np.dtype([("key", "<u8", (2,)), ("tick", "<u4"), ("fate", "u1")])
"""One event as it is dumped."""


class History:
    """The last `entries_max` events, newest per key. Keys are index keys (salted), shape [n, 2] of u64.

    Attributes:
        noted: how many events there were since it was made.
        is_kept: it is kept over a restart, see `HistoryFile`.
    """

    def __init__(self, entries_max: int = HISTORY_ENTRIES_MAX, *, seed: int | None = None) -> None:
        self._entries_max = entries_max
        self._keys: U64 = np.zeros((entries_max, 2), dtype=np.uint64)
        self._fates: U8 = np.zeros(entries_max, dtype=np.uint8)
        self._ticks = np.zeros(entries_max, dtype=np.uint32)
        self.noted = 0
        self.is_kept = True
        self._next = 0
        self._is_full = False  # entries are used for the second time
        self._places = Index(entries_max * 2, seed=seed)  # key -> ring position + 1

    def __len__(self) -> int:
        return len(self._places)

    def note(self, keys: U64, fate: Fate, tick: int) -> None:
        """Record one event for each key; of more keys than the ring holds only the last count."""
        keys = keys[-self._entries_max :]
        if not len(keys):
            return
        if len(keys) <= FEW_KEYS and self._next + len(keys) <= self._entries_max:
            self._note_few(keys, fate, tick)
            return
        at: I64 = (self._next + np.arange(len(keys))) % self._entries_max
        places = (at + 1).astype(np.uint64)
        if self._is_full or self._next + len(keys) >= self._entries_max:
            self._is_full = True
            # A ring entry's key is forgotten with it, unless a newer event of that key lies elsewhere in the ring.
            self._places.delete_many(self._keys[at], expected=places)
        self._keys[at] = keys
        self._fates[at] = fate
        self._ticks[at] = tick
        self._places.insert_many(keys, places, 0)
        self._next = (self._next + len(keys)) % self._entries_max
        self.noted += len(keys)

    def _note_few(self, keys: U64, fate: Fate, tick: int) -> None:
        """`note` of a handful, whose entries lie side by side: columns of numpy take longer, with cold caches."""
        start, end, places = self._next, self._next + len(keys), self._places
        if self._is_full:
            for place, (key0, key1) in enumerate(self._keys[start:end].tolist(), start + 1):
                places.delete(key0, key1, place)
        self._is_full = self._is_full or end == self._entries_max
        self._keys[start:end] = keys
        self._fates[start:end] = fate
        self._ticks[start:end] = tick
        raw = keys.tobytes()
        keys16 = [raw[at : at + INDEX_KEY_BYTES] for at in range(0, len(raw), INDEX_KEY_BYTES)]
        added = places.insert_few(keys16, range(start + 1, end + 1), 0)
        if not all(added):
            for place, is_added, (key0, key1) in zip(range(start + 1, end + 1), added, keys.tolist(), strict=True):
                if not is_added:
                    places.insert(key0, key1, place, 0)
        self._next = end % self._entries_max
        self.noted += len(keys)

    def dump(self) -> bytes:
        """All that is remembered, the oldest first, for `restore`."""
        at = np.flatnonzero(self._fates)
        at = np.concatenate([at[at >= self._next], at[at < self._next]])
        events = np.zeros(len(at), dtype=_EVENT)
        events["key"], events["fate"], events["tick"] = self._keys[at], self._fates[at], self._ticks[at]
        return events.tobytes()

    def restore(self, data: bytes) -> bool:
        """Remember what another history did, as if it had happened here. False if these are no such bytes."""
        if len(data) % _EVENT.itemsize:
            return False
        events = np.frombuffer(data, dtype=_EVENT)[-self._entries_max :]
        if not np.isin(events["fate"], [int(fate) for fate in Fate]).all():
            return False
        if not len(events):
            return True
        keys, fates, ticks = np.ascontiguousarray(events["key"], dtype=np.uint64), events["fate"], events["tick"]
        starts = [0, *(np.flatnonzero((fates[1:] != fates[:-1]) | (ticks[1:] != ticks[:-1])) + 1).tolist()]
        for start, end in zip(starts, [*starts[1:], len(events)], strict=True):
            self.note(keys[start:end], Fate(int(fates[start])), int(ticks[start]))
        return True

    def event(self, key0: int, key1: int) -> Event | None:
        """The last that is remembered of one key."""
        at = self._places.get(key0, key1) - 1
        return Event(fate=Fate(int(self._fates[at])), tick=int(self._ticks[at])) if at >= 0 else None

    def reasons(self, keys: U64) -> U8:
        """MissReason for each of n keys that the index does not have: EVICTED, CORRUPT or ABSENT."""
        at = self._places.lookup(keys).astype(np.int64) - 1
        fates = np.where(at >= 0, self._fates[at], 0)
        return _REASON_OF[fates]

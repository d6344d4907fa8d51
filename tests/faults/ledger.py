"""What a store may and must answer, kept by those who write to it: pure bookkeeping of acknowledgements.

Each key has one writer at a time, so its history is a line of begun and ended operations. Content is a function of the
key, so a wrong byte is seen without any bookkeeping.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvstore.types.results import Exists, Hit, Miss, MissReason, Refused, RefusedReason, Stored


class Deed(Enum):
    """What was begun."""

    PUT = "put"
    POWER_PUT = "power_put"
    DELETE = "delete"


class Outcome(Enum):
    """How a key's operation ended."""

    BEGUN = "begun"  # not ended yet
    DONE = "done"
    REFUSED = "refused"  # nothing has changed
    UNKNOWN = "unknown"


class Fate(Enum):
    """What is known of a key."""

    NEVER = "never"  # nobody has begun to put it: it must be a miss
    ABSENT = "absent"  # its delete was acknowledged: it must be a miss
    UNSURE = "unsure"  # hit or miss, never a wrong byte
    STORED = "stored"  # its put was acknowledged: it must be a hit, unless a rule took it
    SYNCED = "synced"  # as STORED, with durability="power"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An operation on keys begins, or has ended with one outcome for each."""

    deed: Deed
    keys: tuple[int, ...]
    outcomes: tuple[Outcome, ...]

    @classmethod
    def begin(cls, deed: Deed, keys: Sequence[int]) -> Event:
        return cls(deed=deed, keys=tuple(keys), outcomes=(Outcome.BEGUN,) * len(keys))

    def to_line(self) -> str:
        """One line of text for `from_line`."""
        return json.dumps([self.deed.value, self.keys, [outcome.value for outcome in self.outcomes]])

    @classmethod
    def from_line(cls, line: str) -> Event:
        deed, keys, outcomes = json.loads(line)
        return cls(deed=Deed(deed), keys=tuple(keys), outcomes=tuple(map(Outcome, outcomes)))


_DEFINITE = {
    RefusedReason.NO_SPACE,
    RefusedReason.QUOTA,
    RefusedReason.DRAINING,
    RefusedReason.UNKNOWN_NAMESPACE,
    RefusedReason.INVALID,
    RefusedReason.DENIED,
    RefusedReason.FENCED,
}


def put_outcome(result: Stored | Exists | Refused) -> Outcome:
    """What a writer knows after a put. Received but not durable is not known to be stored."""
    match result:
        case Stored(durable=durable):
            return Outcome.DONE if durable else Outcome.UNKNOWN
        case Exists():
            return Outcome.DONE
        case Refused(reason=reason):
            return Outcome.REFUSED if reason in _DEFINITE else Outcome.UNKNOWN


def delete_outcome(result: Hit | Miss) -> Outcome:
    """What a writer knows after a delete."""
    gone = isinstance(result, Hit) or result.reason in (MissReason.ABSENT, MissReason.EVICTED)
    return Outcome.DONE if gone else Outcome.UNKNOWN


class Ledger:
    """The fates of all keys that were ever begun."""

    def __init__(self) -> None:
        self._fates: dict[int, Fate] = {}
        self._before: dict[int, Fate] = {}  # of keys with an operation in progress
        # A call of unknown outcome may still land, after a later one of known outcome too.
        self._loose: set[int] = set()
        self._aging: set[int] = set()
        self.events: Counter[tuple[Deed, Outcome]] = Counter()

    def fate(self, key: int) -> Fate:
        """What is known of the key now."""
        return self._fates.get(key, Fate.NEVER)

    def known_keys(self) -> list[int]:
        """Every key that was begun."""
        return sorted(self._fates)

    def apply(self, event: Event) -> None:
        """Take note of an event."""
        for key, outcome in zip(event.keys, event.outcomes, strict=True):
            self.events[event.deed, outcome] += 1
            if outcome is Outcome.BEGUN:
                self._begin(event.deed, key)
            else:
                self._end(event.deed, key, outcome)

    def _begin(self, deed: Deed, key: int) -> None:
        before = self.fate(key)
        self._before[key] = before
        kept = deed is not Deed.DELETE and before in (Fate.STORED, Fate.SYNCED)  # a put over it changes nothing
        self._fates[key] = before if kept else Fate.UNSURE

    def _end(self, deed: Deed, key: int, outcome: Outcome) -> None:
        before = self._before.pop(key)
        if outcome is Outcome.REFUSED:
            self._fates[key] = before
        elif outcome is Outcome.UNKNOWN:
            self._loose.add(key)
        elif key in self._loose or key in self._aging:
            self._fates[key] = Fate.UNSURE
        elif deed is Deed.DELETE:
            self._fates[key] = Fate.ABSENT
        elif deed is Deed.POWER_PUT or before is Fate.SYNCED:
            self._fates[key] = Fate.SYNCED
        else:
            self._fates[key] = Fate.STORED

    def observe(self, found: Mapping[int, bool]) -> Observation:
        """Compare with what a store answers that nobody writes to any more; it is the truth from then on.

        What may still land from calls that were given up stays unsure until the observation after this one.

        Args:
            found: for each key whether it was a hit.
        """
        observation = Observation()
        for key, is_hit in found.items():
            fate = self.fate(key)
            if is_hit and fate in (Fate.ABSENT, Fate.NEVER):
                observation.resurrected.append(key)
            elif not is_hit and fate is Fate.STORED:
                observation.lost.append(key)
            elif not is_hit and fate is Fate.SYNCED:
                observation.lost_synced.append(key)
            elif fate is Fate.UNSURE:
                observation.unsure += 1
                observation.unsure_hits += is_hit
            if key in self._loose:
                self._fates[key] = Fate.UNSURE
            elif fate is not Fate.NEVER:
                synced = is_hit and fate is Fate.SYNCED
                self._fates[key] = Fate.SYNCED if synced else Fate.STORED if is_hit else Fate.ABSENT
        self._aging, self._loose = self._loose | set(self._before), set()
        self._before.clear()
        return observation


class Observation:
    """How a store differs from what it promised.

    Attributes:
        lost: acknowledged, not deleted, and a miss.
        lost_synced: the same with durability="power".
        resurrected: deleted or never put, and a hit.
        unsure, unsure_hits: keys of unknown outcome, and how many of these were there.
    """

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.lost_synced: list[int] = []
        self.resurrected: list[int] = []
        self.unsure = 0
        self.unsure_hits = 0

    def __str__(self) -> str:
        return (
            f"lost {_some(self.lost)}, lost although synced {_some(self.lost_synced)}, resurrected "
            f"{_some(self.resurrected)}, unsure {self.unsure} of which {self.unsure_hits} are there"
        )


def _some(keys: Iterable[int]) -> str:
    found = sorted(keys)
    return f"{len(found)}" + (f" {found[:8]}" if found else "")

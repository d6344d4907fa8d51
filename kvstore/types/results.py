"""Per-item outcomes of batches, and the one table of their reasons with wire codes (append only)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import repeat
from typing import Final


class MissReason(IntEnum):
    """Why a read item is not a Hit. The value is the wire code; 0 is reserved for a hit."""

    ABSENT = 1
    EVICTED = 2
    CORRUPT = 3
    LAYOUT = 4
    IO = 5
    DEADLINE = 6
    UNAVAILABLE = 7
    PENDING = 8
    OVERLOADED = 9


class RefusedReason(IntEnum):
    """Why a write item was not stored. The value is the wire code, disjoint from MissReason."""

    NO_SPACE = 32
    QUOTA = 33
    OVERLOADED = 34
    DEADLINE = 35
    OUTCOME_UNKNOWN = 36
    PENDING = 37
    DRAINING = 38
    UNKNOWN_NAMESPACE = 39
    INVALID = 40
    DENIED = 41
    FENCED = 42


class ItemStatus(IntEnum):
    """Wire codes of the good outcomes; bad ones are MissReason and RefusedReason codes."""

    HIT = 0
    STORED = 16
    EXISTS = 17
    GRANTED = 18
    RECEIVED = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """All bytes asked for arrived in the caller's buffer and matched their checksums."""

    length_bytes: int
    content_id: bytes = b""


_new_hit: Final = partial(object.__new__, Hit)
_set_length: Final = vars(Hit)["length_bytes"].__set__
_set_id: Final = vars(Hit)["content_id"].__set__


def hits_of(length_bytes: int, content_ids: Sequence[bytes]) -> list[Hit | Miss]:
    """A `Hit` of that length for each content id; less than half of what the constructor costs, for batches."""
    hits = [_new_hit() for _ in content_ids]
    # the slots themselves, which a frozen class leaves no other way to
    deque(map(_set_length, hits, repeat(length_bytes)), maxlen=0)
    deque(map(_set_id, hits, content_ids), maxlen=0)
    return hits  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Miss:
    """Not served. The contents of the caller's buffer are undefined."""

    reason: MissReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Accepted; `durable` says which of the two completions was waited for, `copies` on how many places it lies."""

    durable: bool
    content_id: bytes = b""
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Exists:
    """The key is stored already (first commit wins), on so many places; nothing was written."""

    copies: int = 1


@dataclass(frozen=True, slots=True)
class Refused:
    """Not stored, and nobody will see it. `detail` is for a person: the thing, the value, the limit, the fix."""

    reason: RefusedReason
    detail: str = ""

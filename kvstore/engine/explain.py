"""Why a key is what it is: what `kvstore explain` says about one record key in one namespace of one drive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.engine.catalog import Catalog
from kvstore.engine.history import Event, Fate
from kvstore.engine.location import location_depth, location_pages
from kvstore.engine.policy import TickClock
from kvstore.limits import PAGE_BYTES, SECOND_NS
from kvstore.types.results import MissReason

HIT: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFate:
    """What became of one key.

    Attributes:
        status: 0 for a hit, else the MissReason that a get answers.
        text: one sentence for a person.
        ago_ns: time since the last access of what is stored, or since it went; 0 where that is not known.
    """

    status: int
    text: str
    ago_ns: int


def fate_of(catalog: Catalog, key16: bytes, *, tick: int, left_ns: int, received: bool | None) -> KeyFate:
    """What became of a key.

    Args:
        key16: its index key.
        tick: the access tick now.
        left_ns: of its life, where it lives in RAM only; else 0.
        received: whether a put of it has come whole; None without one in progress.
    """
    key0, key1 = int.from_bytes(key16[:8], "little"), int.from_bytes(key16[8:], "little")
    slot = catalog.index.find(key0, key1)
    event = catalog.history.event(key0, key1)
    if slot >= 0:
        ago = tick - catalog.index.access_at(slot)
        return stored(catalog.index.location_at(slot), ago_ticks=max(ago, 0))
    if left_ns:
        return volatile(left_ns=left_ns)
    if received is not None:
        return pending(received=received)
    if event is not None:
        return gone(event, ago_ticks=max(tick - event.tick, 0))
    return unknown(remembered=len(catalog.history), is_kept=catalog.history.is_kept)


def stored(location: int, *, ago_ticks: int) -> KeyFate:
    """It is on the drive."""
    size = location_pages(location) * PAGE_BYTES
    ago_ns = TickClock.age_ns(ago_ticks)
    text = f"stored, {size} bytes on the drive, position {location_depth(location)}, last asked for {_ago(ago_ns)} ago"
    return KeyFate(status=HIT, text=text, ago_ns=ago_ns)


def volatile(*, left_ns: int) -> KeyFate:
    """It lives in RAM."""
    return KeyFate(status=HIT, text=f"kept in RAM only, for another {_ago(left_ns)}", ago_ns=0)


def pending(*, received: bool) -> KeyFate:
    """A put of it is in progress."""
    how_far = "received, not on the drive yet" if received else "being written, not all bytes have arrived"
    return KeyFate(status=MissReason.PENDING, text=f"a put is in progress: {how_far}", ago_ns=0)


def gone(event: Event, *, ago_ticks: int) -> KeyFate:
    """It was here."""
    ago_ns = TickClock.age_ns(ago_ticks)
    status, words = _WORDS[event.fate]
    return KeyFate(status=status, text=words.format(ago=_ago(ago_ns)), ago_ns=ago_ns)


def unknown(*, remembered: int, is_kept: bool = True) -> KeyFate:
    """Nothing is known of it.

    Args:
        remembered: events of which the drive knows.
        is_kept: they are kept over a restart.
    """
    since = "this drive was opened"  # nothing was remembered over the restart either
    if not is_kept:
        since += ": one without a folder, as a raw device, keeps no history over a restart"
    elif remembered:
        since = f"the last {remembered} event{'s' if remembered > 1 else ''} that this drive remembers"
    return KeyFate(status=MissReason.ABSENT, text=f"never written here, or gone before {since}", ago_ns=0)


_WORDS: Final = {
    Fate.EVICTED: (MissReason.EVICTED, "evicted about {ago} ago to make room"),
    Fate.DELETED: (MissReason.ABSENT, "deleted about {ago} ago"),
    Fate.QUARANTINED: (MissReason.CORRUPT, "quarantined about {ago} ago: its bytes did not match their checksums"),
    Fate.REFUSED: (MissReason.ABSENT, "a put of it was refused about {ago} ago"),
}


def _ago(duration_ns: int) -> str:
    seconds = duration_ns / SECOND_NS
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} seconds"

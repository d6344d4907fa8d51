"""How the records of a request are divided into parcels, and a parcel into runs. Pure code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from kvstore.engine.location import DEPTH_BITS, PAGES_BITS, U64
from kvstore.limits import (
    PAGE_BYTES,
    PARCEL_BYTES_MAX,
    PARCELS_AHEAD_RECORDS,
    READ_COALESCE_BYTES,
    SLICE_BYTES_MAX,
    SLICES_PER_FRAME_MAX,
)

_PLACE_SHIFT: Final = PAGES_BITS + DEPTH_BITS
_PAGES_MASK: Final = (1 << PAGES_BITS) - 1
_RECORD_PAGES_MAX: Final = SLICE_BYTES_MAX // PAGE_BYTES + 1
"""With at least one page of header, no such record is longer than one slice."""
_RUN_PAGES_MAX: Final = READ_COALESCE_BYTES // PAGE_BYTES
_PAYLOAD_PAGES_MAX: Final = PARCEL_BYTES_MAX // PAGE_BYTES
_COLUMNS_FROM: Final = 16
"""Records from which on columns are cheaper than one record after the other."""

Starts = list[tuple[int, int, int]]
"""Where runs begin, each read with one operation: (number among the wants, byte in memory, place on the drive)."""


class Cut(NamedTuple):
    """One parcel: wants from `first` to before `end`, the runs in it, and its pages."""

    first: int
    end: int
    starts: Starts
    pages: int


def divide(wants: Sequence[tuple[int, int]], at: int) -> list[Cut]:
    """The next parcels from want number `at` on, the first one last; empty when that record is too long for one.

    Args:
        wants: (location, index), in order of place, none twice.
    """
    locations = [location for location, _ in wants[at : at + PARCELS_AHEAD_RECORDS]]
    if len(locations) < _COLUMNS_FROM or locations[0] >> DEPTH_BITS & _PAGES_MASK >= _RUN_PAGES_MAX:
        return _one(locations, at)
    return _many(np.array(locations, dtype=np.uint64), at)


def _one(locations: Sequence[int], at: int) -> list[Cut]:
    starts: Starts = []
    most = _PAYLOAD_PAGES_MAX + 1  # each record has a page of header at least
    pages = run_from = number = 0
    next_place = -1
    for location in locations[:SLICES_PER_FRAME_MAX]:
        more = location >> DEPTH_BITS & _PAGES_MASK
        if more > _RECORD_PAGES_MAX or (pages + more > most and pages):
            break
        place = location >> _PLACE_SHIFT
        if place != next_place or pages + more - run_from > _RUN_PAGES_MAX:
            starts.append((number, pages * PAGE_BYTES, place))
            run_from = pages
        next_place = place + more
        pages += more
        most += 1
        number += 1
    return [Cut(at, at + number, starts, pages)] if number else []


def _many(locations: U64, at: int) -> list[Cut]:
    pages = ((locations >> np.uint64(DEPTH_BITS)) & np.uint64(_PAGES_MASK)).astype(np.int64)
    places = (locations >> np.uint64(_PLACE_SHIFT)).astype(np.int64)
    too_long = np.flatnonzero(pages > _RECORD_PAGES_MAX)
    count = int(too_long[0]) if len(too_long) else len(pages)
    before = np.zeros(len(pages) + 1, dtype=np.int64)  # pages before each record
    np.cumsum(pages, out=before[1:])
    payload = before[1:] - np.arange(1, len(pages) + 1)  # pages of payload at most, up to each record's end
    breaks = np.flatnonzero(places[1:] != places[:-1] + pages[:-1]) + 1
    cuts: list[Cut] = []
    first = 0
    while first < count:
        most = _PAYLOAD_PAGES_MAX + (int(payload[first - 1]) if first else 0)
        end = min(int(np.searchsorted(payload, most, side="right")), count, first + SLICES_PER_FRAME_MAX)
        inside = breaks[np.searchsorted(breaks, first, side="right") : np.searchsorted(breaks, end)]
        firsts = _split([first, *inside.tolist()], end, before)
        base = before[first]
        starts = [
            (number - first, byte, place)
            for number, byte, place in zip(
                firsts, ((before[firsts] - base) * PAGE_BYTES).tolist(), places[firsts].tolist(), strict=True
            )
        ]
        cuts.append(Cut(at + first, at + end, starts, int(before[end] - base)))
        first = end
    cuts.reverse()
    return cuts


def _split(firsts: list[int], end: int, before: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
    """The beginnings of runs, and of what is behind the most that one operation reads."""
    if np.diff(before[[*firsts, end]]).max() <= _RUN_PAGES_MAX:
        return firsts
    split: list[int] = []
    for first, until in zip(firsts, [*firsts[1:], end], strict=True):
        at = first
        while at < until:
            split.append(at)
            reach = int(np.searchsorted(before, before[at] + _RUN_PAGES_MAX, side="right")) - 1
            at = max(reach, at + 1)
    return split

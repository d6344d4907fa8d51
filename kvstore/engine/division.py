"""How the records of a request are divided into parcels, and a parcel into runs. Pure code.

Compiled (`_search.c`), or one record after the other: in columns it costs more for any number that fits a parcel (31 us
against 7 for 32 records of 64 KiB, 104 against 9 for 128, of which a parcel takes 32).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvstore.engine.location import DEPTH_BITS, PAGE_BITS, PAGES_BITS
from kvstore.limits import (
    PAGE_BYTES,
    PARCEL_BYTES_FIRST,
    PARCEL_BYTES_MAX,
    READ_COALESCE_BYTES,
    SLICE_BYTES_MAX,
    SLICES_PER_FRAME_MAX,
)
from kvstore.types.compiled import require_interface

try:
    from kvstore.engine import _search

    require_interface(_search)
except ImportError:
    IS_COMPILED = False
else:
    IS_COMPILED = True

_PLACE_SHIFT: Final = PAGES_BITS + DEPTH_BITS
_PAGE_MASK: Final = (1 << PAGE_BITS) - 1
_PAGES_MASK: Final = (1 << PAGES_BITS) - 1
_RECORD_PAGES_MAX: Final = SLICE_BYTES_MAX // PAGE_BYTES + 1
"""With at least one page of header, no such record is longer than one slice."""
_RUN_PAGES_MAX: Final = READ_COALESCE_BYTES // PAGE_BYTES
_PAYLOAD_PAGES_MAX: Final = PARCEL_BYTES_MAX // PAGE_BYTES
_PAYLOAD_PAGES_FIRST: Final = PARCEL_BYTES_FIRST // PAGE_BYTES
_SHORT_PAGES: Final = 2 * _PAYLOAD_PAGES_MAX
"""Of a request up to about so long the first parcel is shorter."""

Starts = list[tuple[int, int, int]]
"""Where runs begin, each read with one operation: (number among the wants, byte in memory, place on the drive)."""


class Cut(NamedTuple):
    """One parcel, whose wants end before number `end`.

    Attributes:
        starts: of the runs in it.
        pages: of all of it.
        locations: of its records.
        offsets, lengths: of its runs on the drive, in bytes.
        segments: that the runs lie in, one of each.
    """

    end: int
    starts: Starts
    pages: int
    locations: list[int]
    offsets: list[int]
    lengths: list[int]
    segments: list[int]


def divide(wants: list[tuple[int, int]], at: int, *, first_byte: int, segment_bytes: int) -> Cut | None:
    """The next parcel, from want number `at` on; None when that record is too long for one.

    The first one of a short request is shorter, so that something can be sent while the rest is being read; where more
    parcels follow, that is so anyway, and a frame more is only a cost.

    Args:
        wants: (location, index), in order of place, none twice.
        first_byte, segment_bytes: where the first segment begins on the drive, and how long each is.
    """
    is_short = not at and len(wants) * (wants[0][0] >> DEPTH_BITS & _PAGES_MASK) <= _SHORT_PAGES
    most = (_PAYLOAD_PAGES_FIRST if is_short else _PAYLOAD_PAGES_MAX) + 1  # each record has a page of header at least
    if IS_COMPILED:
        found = _search.divide(
            wants, at, most, SLICES_PER_FRAME_MAX, _RECORD_PAGES_MAX, _RUN_PAGES_MAX, first_byte, segment_bytes
        )
        return None if found is None else Cut._make(found)
    return _divide_each(wants, at, most, first_byte, segment_bytes)


def _divide_each(wants: list[tuple[int, int]], at: int, most: int, first_byte: int, segment_bytes: int) -> Cut | None:
    """One record after the other."""
    starts: Starts = []
    pages = run_from = number = 0
    next_place = -1
    for location, _ in wants[at : at + SLICES_PER_FRAME_MAX]:
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
    if not number:
        return None
    ends = [*(byte for _, byte, _ in starts[1:]), pages * PAGE_BYTES]
    return Cut(
        at + number,
        starts,
        pages,
        [location for location, _ in wants[at : at + number]],
        [
            first_byte + (place >> PAGE_BITS) * segment_bytes + (place & _PAGE_MASK) * PAGE_BYTES
            for _, _, place in starts
        ],
        [end - byte for (_, byte, _), end in zip(starts, ends, strict=True)],
        [place >> PAGE_BITS for _, _, place in starts],
    )


def line_up(locations: list[int], indices: list[int], pages_max: int) -> list[tuple[int, int]] | None:
    """(location, index) of each, in order of place; None where one is absent (0), or has more pages than that."""
    if IS_COMPILED:
        return _search.line_up(locations, indices, pages_max)
    for location in locations:
        if not location or location >> DEPTH_BITS & _PAGES_MASK > pages_max:
            return None
    return sorted(zip(locations, indices, strict=True))

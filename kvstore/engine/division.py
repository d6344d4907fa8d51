"""How the records of a request are divided into parcels, and a parcel into runs. Pure code.

One record after the other: in columns it costs more for any number that fits a parcel (31 us against 7 for 32 records
of 64 KiB, 104 against 9 for 128, of which a parcel takes 32).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.engine.location import DEPTH_BITS, PAGES_BITS
from kvstore.limits import (
    PAGE_BYTES,
    PARCEL_BYTES_FIRST,
    PARCEL_BYTES_MAX,
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
_PAYLOAD_PAGES_FIRST: Final = PARCEL_BYTES_FIRST // PAGE_BYTES
_SHORT_PAGES: Final = 2 * _PAYLOAD_PAGES_MAX
"""Of a request up to about so long the first parcel is shorter."""

Starts = list[tuple[int, int, int]]
"""Where runs begin, each read with one operation: (number among the wants, byte in memory, place on the drive)."""


class Cut(NamedTuple):
    """One parcel: wants from `first` to before `end`, the runs in it, and its pages."""

    first: int
    end: int
    starts: Starts
    pages: int


def divide(wants: Sequence[tuple[int, int]], at: int) -> Cut | None:
    """The next parcel, from want number `at` on; None when that record is too long for one.

    The first one of a short request is shorter, so that something can be sent while the rest is being read; where more
    parcels follow, that is so anyway, and a frame more is only a cost.

    Args:
        wants: (location, index), in order of place, none twice.
    """
    starts: Starts = []
    is_short = not at and len(wants) * (wants[0][0] >> DEPTH_BITS & _PAGES_MASK) <= _SHORT_PAGES
    most = (_PAYLOAD_PAGES_FIRST if is_short else _PAYLOAD_PAGES_MAX) + 1  # each record has a page of header at least
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
    return Cut(at, at + number, starts, pages) if number else None

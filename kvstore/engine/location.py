"""Where a record lies, packed into one u64: segment 20 bits | page in segment 18 | pages 15 | depth 11.

Locations sort by place on the drive. The depth is the chunk's position in its chain, which breaks ties of eviction.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.limits import PAGE_BYTES, PAYLOAD_BYTES_MAX, SEGMENT_BYTES_MAX

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
U16 = npt.NDArray[np.uint16]
U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SEGMENT_BITS: Final = 20
PAGE_BITS: Final = 18
PAGES_BITS: Final = 15
DEPTH_BITS: Final = 11
DEPTH_MAX: Final = (1 << DEPTH_BITS) - 1
_SEGMENT_SHIFT: Final = PAGE_BITS + PAGES_BITS + DEPTH_BITS
_PAGE_SHIFT: Final = PAGES_BITS + DEPTH_BITS
_PAGE_MASK: Final = (1 << PAGE_BITS) - 1
_PAGES_MASK: Final = (1 << PAGES_BITS) - 1
assert SEGMENT_BITS + _SEGMENT_SHIFT == 64
assert SEGMENT_BYTES_MAX <= PAGE_BYTES << PAGE_BITS
assert 2 * PAYLOAD_BYTES_MAX <= PAGE_BYTES << PAGES_BITS, "payload and header fit the page count"


def pack_location(*, segment: int, page: int, pages: int, depth: int) -> int:
    """One u64 that says where a record lies.

    Args:
        segment: number of the segment.
        page: first page of the record in its segment, in units of PAGE_BYTES.
        pages: pages of the whole record, header included, at least 1; so no location is 0.
        depth: position of the chunk in its chain, cut off at DEPTH_MAX; 0 where it has none.
    """
    return (segment << _SEGMENT_SHIFT) | (page << _PAGE_SHIFT) | (pages << DEPTH_BITS) | min(depth, DEPTH_MAX)


def pack_locations(*, segments: U64, pages_at: U64, pages: U64, depths: U64) -> U64:
    """`pack_location` of arrays of u64."""
    place: U64 = (segments << np.uint64(_SEGMENT_SHIFT)) | (pages_at << np.uint64(_PAGE_SHIFT))
    extent: U64 = (pages << np.uint64(DEPTH_BITS)) | np.minimum(depths, np.uint64(DEPTH_MAX))
    return place | extent


def location_segment(location: int) -> int:
    """Segment number of a location."""
    return location >> _SEGMENT_SHIFT


def location_page(location: int) -> int:
    """First page of the record in its segment."""
    return (location >> _PAGE_SHIFT) & _PAGE_MASK


def location_pages(location: int) -> int:
    """Pages of the whole record, header included."""
    return (location >> DEPTH_BITS) & _PAGES_MASK


def location_depth(location: int) -> int:
    """Position in the chain, cut off at DEPTH_MAX."""
    return location & DEPTH_MAX


def location_segments(locations: U64) -> I64:
    """Segment number of each location."""
    return (locations >> np.uint64(_SEGMENT_SHIFT)).astype(np.int64)


def location_page_counts(locations: U64) -> I64:
    """Pages of each record."""
    return ((locations >> np.uint64(DEPTH_BITS)) & np.uint64(_PAGES_MASK)).astype(np.int64)


def location_depths(locations: U64) -> I64:
    """Position of each record in its chain, cut off at DEPTH_MAX."""
    return (locations & np.uint64(DEPTH_MAX)).astype(np.int64)

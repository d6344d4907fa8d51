"""What to read, decided: neighbours joined into one I/O, ranges widened to whole checksum blocks. Pure code."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.engine.location import location_page, location_pages, location_segment
from kvstore.errors import InvalidRequest
from kvstore.limits import PAGE_BYTES, RANGES_PER_ITEM_MAX

Range = tuple[int, int]
"""(offset, length) in bytes."""


def run_length(wants: Sequence[tuple[int, int]], start: int, *, bytes_max: int) -> int:
    """How many of the wants, from `start` on, lie side by side and may be one I/O.

    Args:
        wants: (location, anything), sorted. A location given twice counts twice and is read once.
        bytes_max: of the I/O; the first record is taken whatever its size.
    """
    location = wants[start][0]
    segment = location_segment(location)
    pages = location_pages(location)
    next_page = location_page(location) + pages
    pages_max = bytes_max // PAGE_BYTES
    at = start + 1
    while at < len(wants):
        following = wants[at][0]
        if following != location:
            location = following
            more = location_pages(location)
            pages += more
            if pages > pages_max or location_page(location) != next_page or location_segment(location) != segment:
                break
            next_page += more
        at += 1
    return at - start


def covering_blocks(
    ranges: Sequence[Range], *, record_bytes: int, block_bytes: int, piece_bytes_max: int
) -> list[Range] | None:
    """Block-aligned pieces of a record that cover the ranges, ascending, no byte twice.

    Args:
        ranges: (offset, length) each, in any order, may overlap; those of length 0 need nothing.
        piece_bytes_max: longer stretches are cut, at a block.

    Returns:
        (offset, length) pieces; a single (0, 0) where nothing is needed; None if a range ends behind the record.
    """
    spans: list[list[int]] = []
    for offset, length in sorted(ranges):
        if offset + length > record_bytes:
            return None
        if not length:
            continue
        start = offset // block_bytes * block_bytes
        end = min(-(-(offset + length) // block_bytes) * block_bytes, record_bytes)
        if spans and start <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
    step = max(piece_bytes_max // block_bytes, 1) * block_bytes
    pieces = [(at, min(step, end - at)) for start, end in spans for at in range(start, end, step)]
    return pieces or [(0, 0)]


def ranges_per_record(ranges: Sequence[Sequence[Range]], count: int) -> Sequence[Sequence[Range]]:
    """The ranges of each of `count` records, from one list for all or one list each.

    Raises:
        InvalidRequest: another number of lists, too many ranges, or a negative offset or length.
    """
    if len(ranges) not in (1, count):
        raise InvalidRequest(f"{len(ranges)} lists of ranges for {count} records; give one for all, or one for each")
    for one in ranges:
        if len(one) > RANGES_PER_ITEM_MAX:
            raise InvalidRequest(f"{len(one)} ranges for one record, the limit is {RANGES_PER_ITEM_MAX}; join some")
        for offset, length in one:
            if offset < 0 or length < 0:
                raise InvalidRequest(f"range at {offset} of {length} bytes; offsets and lengths are 0 or more")
    return ranges if len(ranges) == count else [ranges[0]] * count

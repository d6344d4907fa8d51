"""What to read of a record, decided: ranges widened to whole checksum blocks. Pure code."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import InvalidRequest
from kvstore.limits import RANGES_PER_ITEM_MAX

Range = tuple[int, int]
"""(offset, length) in bytes."""


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

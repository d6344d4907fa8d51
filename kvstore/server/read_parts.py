"""A long GET, part by part. Pure: no I/O.

One record may be asked for as often as a batch has items, each time with ranges of its own, and then most of a read is
done in one go: it all lies in memory once the record does, or asks for no bytes at all. So what a call may do at one
time is bounded here: the next part begins when the last one has gone out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvstore.engine.api import ReadSpec
from kvstore.limits import DIGEST_BYTES, READ_PART_RANGES

_ID_BYTES = 16


def has_parts(spec: ReadSpec) -> bool:
    """Whether a read must go in parts. Different records that are wanted whole need none: their bytes fill windows."""
    count = len(spec.keys) // DIGEST_BYTES
    ranges = spec.ranges
    if ranges is not None:
        return (count * len(ranges[0]) if len(ranges) == 1 else sum(map(len, ranges))) > READ_PART_RANGES
    if count <= READ_PART_RANGES:
        return False
    keys = bytes(spec.keys)
    return len({keys[at : at + DIGEST_BYTES] for at in range(0, len(keys), DIGEST_BYTES)}) < count


def parts_of(spec: ReadSpec) -> Iterator[tuple[int, ReadSpec]]:
    """The parts, each with the item that it begins with: of up to READ_PART_RANGES ranges, or one record."""
    count = len(spec.keys) // DIGEST_BYTES
    at = 0
    while at < count:
        end = _end_of_part(spec, at, count)
        yield at, _part(spec, at, end)
        at = end


def _end_of_part(spec: ReadSpec, at: int, count: int) -> int:
    ranges = spec.ranges
    if ranges is None or len(ranges) == 1:
        of_each = len(ranges[0]) if ranges is not None else 1
        return min(count, at + max(1, READ_PART_RANGES // max(1, of_each)))
    total = len(ranges[at])
    end = at + 1
    while end < count and total + len(ranges[end]) <= READ_PART_RANGES:
        total += len(ranges[end])
        end += 1
    return end


def _part(spec: ReadSpec, at: int, end: int) -> ReadSpec:
    ranges, ids = spec.ranges, spec.content_ids
    return replace(
        spec,
        keys=spec.keys[at * DIGEST_BYTES : end * DIGEST_BYTES],
        ranges=ranges if ranges is None or len(ranges) == 1 else ranges[at:end],
        content_ids=ids if ids is None else ids[at * _ID_BYTES : end * _ID_BYTES],
    )

"""A long GET, part by part. Pure: no I/O.

One record may be asked for as often as a batch has items, each time with ranges of its own, and then most of a read is
done in one go: it all lies in memory once the record does, or asks for no bytes at all. So is a read of records that
are not there. So what a call may do at one time is bounded here: the next part begins when the last one has gone out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvstore.engine.api import ReadSpec
from kvstore.limits import DIGEST_BYTES, READ_PART_KEYS, READ_PART_RANGES, READ_PART_REPEATS

_ID_BYTES = 16


def has_parts(spec: ReadSpec) -> bool:
    """Whether a read must go in parts."""
    count = len(spec.keys) // DIGEST_BYTES
    if spec.ranges is None and count <= READ_PART_REPEATS:
        return False
    return count > READ_PART_KEYS or _end_of_part(spec, bytes(spec.keys), 0, count) < count


def parts_of(spec: ReadSpec) -> Iterator[tuple[int, ReadSpec]]:
    """The parts, each with the item that it begins with.

    One has up to READ_PART_KEYS records that are wanted whole, or READ_PART_RANGES ranges; of both only
    READ_PART_REPEATS where a record comes twice in it; or one record with all its ranges.
    """
    keys = bytes(spec.keys)
    count = len(keys) // DIGEST_BYTES
    at = 0
    while at < count:
        end = _end_of_part(spec, keys, at, count)
        yield at, _part(spec, at, end)
        at = end


def _end_of_part(spec: ReadSpec, keys: bytes, at: int, count: int) -> int:
    ranges = spec.ranges
    most = READ_PART_KEYS if ranges is None else READ_PART_RANGES
    of_each = 1 if ranges is None else len(ranges[0]) if len(ranges) == 1 else None
    seen: set[bytes] = set()
    total = 0
    for item in range(at, count):
        key = keys[item * DIGEST_BYTES : (item + 1) * DIGEST_BYTES]
        if key in seen:
            most = READ_PART_REPEATS
        if of_each is not None:
            total += of_each
        elif ranges is not None:
            total += len(ranges[item])
        if total > most and item > at:
            return item
        seen.add(key)
    return count


def _part(spec: ReadSpec, at: int, end: int) -> ReadSpec:
    ranges, ids = spec.ranges, spec.content_ids
    return replace(
        spec,
        keys=spec.keys[at * DIGEST_BYTES : end * DIGEST_BYTES],
        ranges=ranges if ranges is None or len(ranges) == 1 else ranges[at:end],
        content_ids=ids if ids is None else ids[at * _ID_BYTES : end * _ID_BYTES],
    )

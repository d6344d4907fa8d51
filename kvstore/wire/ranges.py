"""Byte ranges of a GET: (offset, length) pairs, one list for all keys or one list per key, as two blobs."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvstore.errors import InvalidRequest
from kvstore.limits import DIGEST_BYTES, RANGES_PER_CALL_MAX, RANGES_PER_ITEM_MAX
from kvstore.wire.messages import RANGE_BYTES, U64_MAX, Get

Range = tuple[int, int]


def encode_ranges(ranges: Sequence[Sequence[Range]] | None) -> tuple[bytes, bytes]:
    """`(range_counts, ranges)` of a GET.

    Args:
        ranges: None for whole records; one inner sequence for all keys, or one per key. No inner one may be empty.

    Raises:
        InvalidRequest: A range is negative, or an inner sequence is empty or longer than RANGES_PER_ITEM_MAX.
    """
    if ranges is None:
        return b"", b""
    flat: list[int] = []
    for of_one in ranges:
        _check_count(len(of_one))
        for offset, length in of_one:
            if not (0 <= offset <= U64_MAX and 0 <= length <= U64_MAX):
                raise InvalidRequest(f"range ({offset}, {length}) does not fit 64 unsigned bits")
            flat += (offset, length)
    blob = struct.pack(f"<{len(flat)}Q", *flat)
    if len(ranges) == 1:
        return b"", blob
    return struct.pack(f"<{len(ranges)}I", *map(len, ranges)), blob


def decode_ranges(get: Get) -> list[list[Range]] | None:
    """The ranges of a GET: None for whole records, one list for all keys, or one per key.

    Raises:
        InvalidRequest: Counts and ranges do not fit together, or are more than RANGES_PER_CALL_MAX for all keys.
    """
    if not get.ranges and not get.range_counts:
        return None
    words = struct.unpack(f"<{len(get.ranges) // 8}Q", get.ranges)
    pairs = list(zip(words[::2], words[1::2], strict=True))
    if not get.range_counts:
        _check_count(len(pairs))
        count = len(get.keys) // DIGEST_BYTES
        if count * len(pairs) > RANGES_PER_CALL_MAX:
            raise InvalidRequest(
                f"{len(pairs)} ranges of each of {count} keys, the limit is {RANGES_PER_CALL_MAX} in all: "
                "split the batch"
            )
        return [pairs]
    counts = struct.unpack(f"<{len(get.range_counts) // 4}I", get.range_counts)
    if sum(counts) != len(pairs):
        raise InvalidRequest(
            f"GET.range_counts of {len(get.keys) // DIGEST_BYTES} keys sum to {sum(counts)}, "
            f"GET.ranges has {len(get.ranges) // RANGE_BYTES} entries"
        )
    lists: list[list[Range]] = []
    at = 0
    for count in counts:
        _check_count(count)
        lists.append(pairs[at : at + count])
        at += count
    return lists


def _check_count(count: int) -> None:
    if not 1 <= count <= RANGES_PER_ITEM_MAX:
        raise InvalidRequest(f"{count} ranges for one key; from 1 to {RANGES_PER_ITEM_MAX} are allowed")

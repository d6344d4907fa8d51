"""Check whole records that came from the drive together, and describe them for the wire in the same pass.

The checks are those of `verify.check_run`: where anything is not right, its reasons are what counts. Many records of
one shape are compared and summed in one compiled call (`_records.c`), or as columns where that was not built. Payload
is summed here only where its reader does not do that himself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from kvstore.engine.api import NamespaceRef
from kvstore.engine.format import CRC_TABLE_AT, RECORD_MAGIC
from kvstore.engine.location import DEPTH_BITS, PAGE_BITS, PAGES_BITS
from kvstore.engine.verify import CRC_COVERS_FROM, GENERATION, RUN_HEADER, Fault, Layout, record_layout
from kvstore.limits import DIGEST_BYTES, PAGE_BYTES
from kvstore.types.checksum import crc32c, crcs_match
from kvstore.types.compiled import require_crc_instruction, require_interface
from kvstore.wire.slices import DESCRIPTOR_BYTES, FLAG_LAST, encode_fields

try:
    from kvstore.engine import _records

    require_interface(_records)
    require_crc_instruction(_records)
except ImportError:
    IS_COMPILED = False
else:
    IS_COMPILED = True

_PLACE_SHIFT: Final = PAGES_BITS + DEPTH_BITS
_SEGMENT_SHIFT: Final = PAGE_BITS + _PLACE_SHIFT
_PAGES_MASK: Final = (1 << PAGES_BITS) - 1
_COLUMNS_FROM: Final = 8
"""Records from which on comparing columns is cheaper: 20 numpy calls take 25 us, a record alone 5."""
_BLOCKS_FROM: Final = 4
"""Checksum blocks from which on the compiled check is faster: it sums four side by side."""
_MAGIC: Final = int.from_bytes(RECORD_MAGIC, "little")
_HEAD: Final = np.dtype(
    {
        "names": ["magic", "crc", "shape0", "shape1", "generation", "segment", "page", "crc_count"],
        "formats": ["<u4", "<u4", "<u8", "<u8", "<u8", "<u4", "<u4", "<u4"],
        "offsets": [0, 4, 8, 16, 24, 32, 36, 44],
        "itemsize": CRC_TABLE_AT,
    }
)
"""The beginning of a record header, as RUN_HEADER has it."""
_SHAPE: Final = slice(8, 24)
_CRC_COUNT: Final = slice(44, 48)
_CONTENT_ID: Final = slice(48, 64)
_KEY: Final = slice(64, 96)
_SPACE: Final = slice(160, 200)
_SLICE: Final = np.dtype(
    {
        "names": ["item", "offset", "length", "status", "flags", "crc_count", "id", "record_bytes", "block_bytes"],
        "formats": ["<u4", "<u8", "<u4", "u1", "u1", "<u2", "V16", "<u8", "<u4"],
    }
)
assert _SLICE.itemsize == DESCRIPTOR_BYTES


@dataclass(slots=True)
class Packed:
    """What was found.

    Attributes:
        body: of a DATA frame with the good records, in order; empty without any.
        count: of them.
        payload: their bytes, where they have any.
        faults: (place among the wants, why) of each that is not good.
    """

    body: bytes
    count: int
    payload: list[memoryview]
    faults: Sequence[tuple[int, Fault]] = ()


def pack(
    view: memoryview,
    wants: list[tuple[int, int]],
    keys: bytes,
    ref: NamespaceRef,
    generations: dict[int, int],
    *,
    sums: bool = True,
) -> Packed:
    """Check whole records that lie one behind the other in memory.

    Args:
        view: the padded records.
        wants: (location, index of the key) of each, in order.
        keys: 32 bytes each.
        ref: of them all.
        generations: of the segments, by number.
        sums: whether payload is summed; headers always are, and with them the CRC words that go out.
    """
    if IS_COMPILED or len(wants) >= _COLUMNS_FROM:
        packed = _pack_alike(view, wants, keys, ref, generations, sums)
        if packed is not None:
            return packed
    return _pack_each(view, wants, keys, ref, generations, sums)


def renumbered(body: bytes, count: int, items: Sequence[int]) -> bytes:
    """The body of a frame whose `count` slices name `items[n]` where they named n."""
    slices = np.frombuffer(body, dtype=_SLICE, count=count).copy()
    slices["item"] = np.array(items, dtype=np.uint32)[slices["item"]]
    return slices.tobytes() + body[slices.nbytes :]


def _pack_alike(
    view: memoryview,
    wants: list[tuple[int, int]],
    keys: bytes,
    ref: NamespaceRef,
    generations: dict[int, int],
    sums: bool,
) -> Packed | None:
    """Good records of one shape; None when any differs, or is not good."""
    count = len(wants)
    length = (wants[0][0] >> DEPTH_BITS & _PAGES_MASK) * PAGE_BYTES
    if length * count != len(view):
        return None
    words = int.from_bytes(view[_CRC_COUNT], "little")
    layout = record_layout(bytes(view[_SHAPE]), words, length)
    if layout is None:
        return None
    _, header_bytes, table_end, block_bytes, record_bytes = layout
    space_wanted = ref.digest + GENERATION.pack(ref.generation)
    if IS_COMPILED:
        if not words or (sums and count * words < _BLOCKS_FROM):
            return None
        checked = _records.check(
            view,
            wants,
            keys,
            space_wanted,
            generations,
            _MAGIC,
            length,
            header_bytes,
            block_bytes,
            record_bytes,
            words,
            FLAG_LAST,
            sums,
        )
        if checked is None:
            return None
        return Packed(checked, count, _payload(view, length, header_bytes, record_bytes))
    locations = [location for location, _ in wants]
    rows = np.frombuffer(view, dtype=np.uint8).reshape(count, length)
    heads = rows[:, :CRC_TABLE_AT].view(_HEAD)[:, 0]
    places = np.array(locations, dtype=np.uint64)
    pages = (places >> np.uint64(DEPTH_BITS)) & np.uint64(_PAGES_MASK)
    places >>= np.uint64(_PLACE_SHIFT)
    indices = np.array([index for _, index in wants], dtype=np.int64)
    wanted = np.frombuffer(keys, dtype=np.uint8).reshape(-1, DIGEST_BYTES)[indices]
    space = np.frombuffer(space_wanted, dtype=np.uint8)
    tables = rows[:, CRC_TABLE_AT:table_end]
    if not (
        (pages == length // PAGE_BYTES).all()
        and (heads["magic"] == _MAGIC).all()
        and (heads["shape0"] == heads["shape0"][0]).all()
        and (heads["shape1"] == heads["shape1"][0]).all()
        and (heads["crc_count"] == words).all()
        and ((heads["segment"].astype(np.uint64) << np.uint64(PAGE_BITS) | heads["page"]) == places).all()
        and heads["generation"].tolist() == [generations[location >> _SEGMENT_SHIFT] for location in locations]
        and (rows[:, _KEY] == wanted).all()
        and (rows[:, _SPACE] == space).all()
    ):
        return None
    starts = range(0, len(view), length)
    crc = crc32c
    if [crc(view[at + CRC_COVERS_FROM : at + header_bytes]) for at in starts] != heads["crc"].tolist():
        return None
    payload = _payload(view, length, header_bytes, record_bytes) if record_bytes else []
    body = tables.tobytes()
    if not sums:
        pass  # whose the bytes are is known, and their reader sums them
    elif words == 1:
        if list(map(crc, payload)) != np.frombuffer(body, dtype="<u4").tolist():
            return None
    elif words and not all(
        crcs_match(one, block_bytes, body[at : at + 4 * words])
        for one, at in zip(payload, range(0, len(body), 4 * words), strict=True)
    ):
        return None
    slices = np.zeros(count, dtype=_SLICE)
    slices["item"] = indices
    slices["length"] = slices["record_bytes"] = record_bytes
    slices["flags"] = FLAG_LAST
    slices["crc_count"] = words
    slices["block_bytes"] = block_bytes
    slices["id"] = np.ascontiguousarray(rows[:, _CONTENT_ID]).view("V16")[:, 0]
    return Packed(slices.tobytes() + body, count, payload)


def _payload(view: memoryview, length: int, header_bytes: int, record_bytes: int) -> list[memoryview]:
    """The payload of each record that lies there."""
    return list(map(view.__getitem__, _payload_cuts(len(view), length, header_bytes, record_bytes)))


@lru_cache(maxsize=64)
def _payload_cuts(total_bytes: int, length: int, header_bytes: int, record_bytes: int) -> tuple[slice, ...]:
    return tuple(slice(at, at + record_bytes) for at in range(header_bytes, total_bytes, length))


def _pack_each(
    view: memoryview,
    wants: list[tuple[int, int]],
    keys: bytes,
    ref: NamespaceRef,
    generations: dict[int, int],
    sums: bool,
) -> Packed:
    """One record after the other."""
    fields: list[int | bytes] = []
    tables: list[bytes] = []
    payloads: list[memoryview] = []
    faults: list[tuple[int, Fault]] = []
    unpack, magic_wanted, crc_of = RUN_HEADER.unpack_from, RECORD_MAGIC, crc32c
    space_wanted = ref.digest + GENERATION.pack(ref.generation)
    known: tuple[bytes, int, int] | None = None
    layout: Layout | None = None
    header_bytes = table_end = block_bytes = record_bytes = 0
    at = 0
    for number, (location, index) in enumerate(wants):
        magic, crc, shape, generation, segment, page, crc_count, content_id, key, space = unpack(view, at)
        length = (location >> DEPTH_BITS & _PAGES_MASK) * PAGE_BYTES
        if known != (shape, crc_count, length):
            known = (shape, crc_count, length)
            layout = record_layout(*known)
            if layout is not None:
                _, header_bytes, table_end, block_bytes, record_bytes = layout
        start = at + header_bytes
        if (
            layout is None
            or magic != magic_wanted
            or crc_of(view[at + CRC_COVERS_FROM : start]) != crc
            or segment << PAGE_BITS | page != location >> _PLACE_SHIFT
            or generation != generations[segment]
        ):
            faults.append((number, Fault.CORRUPT))
        elif key != keys[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] or space != space_wanted:
            faults.append((number, Fault.OTHER))
        else:
            crcs = bytes(view[at + CRC_TABLE_AT : at + table_end])
            payload = view[start : start + record_bytes]
            if not sums or (
                crc_of(payload).to_bytes(4, "little") == crcs
                if crc_count == 1
                else crcs_match(payload, block_bytes, crcs)
            ):
                fields += (index, 0, record_bytes, 0, 1, crc_count, content_id, record_bytes, block_bytes)
                tables.append(crcs)
                if record_bytes:
                    payloads.append(payload)
            else:
                faults.append((number, Fault.CORRUPT))
        at += length
    return Packed(encode_fields(fields, tables) if tables else b"", len(tables), payloads, faults)

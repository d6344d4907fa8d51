"""The commonest read as fixed places in two frames: one whole record asked for, and one DATA frame that brings it.

Or, in shared memory, a GET_INTO of one record and one PLACED frame that says that it lies there.

`expected` knows the answer to many records; here it is one, and each side needs one `struct` call and one comparison
for each field. What does not fit in every byte is no fault, but somebody else's: `FrameReader` and `Get.decode` judge.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Final, Protocol

from kvstore.limits import DIGEST_BYTES, REQUEST_NS_MAX
from kvstore.types.checksum import crc32c
from kvstore.wire.expected import DATA_START, PLACED_START, get_body, get_into_body
from kvstore.wire.header import HEADER_BYTES, MAGIC, VERSION, FrameType
from kvstore.wire.shared import PLACE_BYTES
from kvstore.wire.slices import DESCRIPTOR_BYTES, FLAG_FINAL, Slice, encode_slices

CRC_AT: Final = HEADER_BYTES - 4
DATA_FLAGS: Final = 1 | FLAG_FINAL
GET_START: Final = MAGIC + bytes([VERSION, FrameType.GET])
GET_TAIL: Final = b"\xc4\0\xc4\0\xc4\0\0\xc2\xc2"  # no ranges, any copy, no credit, nothing pending, no verify
GET_FRONT: Final = b"\x99\xc4\x20"  # nine fields; a namespace of 32 bytes
GET_MIDDLE: Final = b"\xc4\x20"  # one key of 32 bytes
assert DIGEST_BYTES == 0x20
GET_INTO_START: Final = MAGIC + bytes([VERSION, FrameType.GET_INTO])
GET_INTO_FRONT: Final = b"\x9a" + GET_FRONT[1:]  # ten fields
GET_INTO_TAIL: Final = GET_TAIL + b"\xc4\x10"  # and one place, of 16 bytes, behind it
assert PLACE_BYTES == 0x10

_KEY_AT: Final = len(GET_FRONT) + DIGEST_BYTES + len(GET_MIDDLE)
GET_KEY_AT: Final = HEADER_BYTES + _KEY_AT
"""Of the key in a GET or GET_INTO frame of one record."""

_before_crc: Final = struct.Struct("<4sIIIQI").pack
_sizes: Final = struct.Struct("<8xII").unpack_from
_u32: Final = struct.Struct("<I").pack


class GetFrames:
    """GET or GET_INTO frames of one record each, that differ in key, request id and place only."""

    __slots__ = ("_back", "_body_bytes", "_front", "_start")

    def __init__(self, namespace: bytes, deadline_ns: int, *, is_placed: bool = False) -> None:
        key, place = bytes(DIGEST_BYTES), bytes(PLACE_BYTES)
        body = get_into_body(namespace, key, deadline_ns, place) if is_placed else get_body(namespace, key, deadline_ns)
        self._start = GET_INTO_START if is_placed else GET_START
        self._body_bytes = len(body)
        self._front = body[:_KEY_AT]
        self._back = body[_KEY_AT + DIGEST_BYTES : -PLACE_BYTES if is_placed else None]

    def encode(self, key: bytes, request_id: int, epoch: int, place: bytes = b"") -> bytes:
        """The frame for a record key of 32 bytes, of GET_INTO with its place."""
        head = _before_crc(self._start, request_id, self._body_bytes, 0, epoch, 0)
        body = self._front + key + self._back + place
        return head + _u32(crc32c(body, crc32c(head, 0))) + body


class PlainGet:
    """What a GET or GET_INTO frame of one record looks like whose deadline takes so many bytes.

    Attributes:
        start: its first four bytes.
        place_bytes: at its end, of GET_INTO; else 0.
        frame_bytes: length of the frame.
        unpack_from: start, request id, what stands then up to the CRC (sizes, epoch, flags), the CRC, what stands
            before the key, the key, and what stands behind it.
    """

    __slots__ = (
        "_deadline_max",
        "_deadline_over",
        "_front",
        "_sizes",
        "_tail",
        "frame_bytes",
        "place_bytes",
        "start",
        "unpack_from",
    )

    def __init__(self, marker: int, deadline_bytes: int, *, is_placed: bool = False) -> None:
        self.start = GET_INTO_START if is_placed else GET_START
        self.place_bytes = PLACE_BYTES if is_placed else 0
        self._front = GET_INTO_FRONT if is_placed else GET_FRONT
        self._tail = GET_INTO_TAIL if is_placed else GET_TAIL
        behind_bytes = 1 + deadline_bytes + len(self._tail)
        layout = struct.Struct(f"<4sI20sI{_KEY_AT}s{DIGEST_BYTES}s{behind_bytes}s{self.place_bytes}x")
        self.frame_bytes = layout.size
        self.unpack_from: Callable[[memoryview], tuple[bytes, int, bytes, int, bytes, bytes, bytes]] = (
            layout.unpack_from
        )
        self._sizes = struct.pack("<II", layout.size - HEADER_BYTES, 0)
        highest = min(REQUEST_NS_MAX, (1 << 8 * deadline_bytes) - 1)
        self._deadline_over = bytes([marker]) + bytes(deadline_bytes)
        self._deadline_max = bytes([marker]) + highest.to_bytes(deadline_bytes, "big")

    def namespace_of(self, sizes: bytes, before_key: bytes, behind_key: bytes) -> bytes | None:
        """The namespace that such a frame asks; None when these parts of it ask for something else, or wrongly."""
        deadline = behind_key[: -len(self._tail)]
        if (
            sizes[:8] == self._sizes
            and sizes[16:] == bytes(4)
            and before_key.startswith(self._front)
            and before_key.endswith(GET_MIDDLE)
            and behind_key.endswith(self._tail)
            and self._deadline_over < deadline <= self._deadline_max
        ):
            return before_key[len(self._front) : -len(GET_MIDDLE)]
        return None


PLAIN_GETS: Final = (PlainGet(0xCE, 4), PlainGet(0xCF, 8))
"""Deadlines up to 4.2 s, and longer ones (msgpack's uint 32 and uint 64, big endian: they compare as bytes)."""
PLAIN_GETS_INTO: Final = (PlainGet(0xCE, 4, is_placed=True), PlainGet(0xCF, 8, is_placed=True))
"""The same of GET_INTO."""


class RecordFacts(Protocol):
    """What a DATA frame tells of a record."""

    @property
    def record_bytes(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def crcs(self) -> bytes: ...

    @property
    def content_id(self) -> bytes: ...


def record_head(facts: RecordFacts) -> bytes:
    """Header and body of the final DATA frame that answers a GET of this one record, but for what `data_head` sets.

    Good for as long as the record is.
    """
    length = facts.record_bytes
    body = encode_slices([Slice(0, 0, length, 0, True, facts.content_id, length, facts.block_bytes, facts.crcs)])
    return _before_crc(DATA_START, 0, len(body), length, 0, DATA_FLAGS) + bytes(4) + body


def placed_head(record: bytes) -> bytes:
    """Of what `record_head` made: the final PLACED frame that answers a GET_INTO of the record."""
    return PLACED_START + record[4:12] + bytes(4) + record[16:]


def data_head(record: bytes, request_id: int, epoch: int) -> bytes:
    """Header and body for one answer: request id, epoch and CRC are set in what `record_head` or `placed_head` made."""
    body_bytes, payload_bytes = _sizes(record)
    body = record[HEADER_BYTES:]
    head = _before_crc(record[:4], request_id, body_bytes, payload_bytes, epoch, DATA_FLAGS)
    return head + _u32(crc32c(body, crc32c(head, 0))) + body


class PlainData:
    """What the head of the DATA or PLACED frame of one whole record of known length and checksum block looks like.

    Attributes:
        start: its first four bytes.
        head_bytes: length of header and body.
        unpack_from: start, request id, sizes, epoch, flags, CRC, then of the slice: what stands before its content id,
            the content id, what stands behind it, its CRC table.
        sizes, before, rest: as they must be.
        example: a head, but for what differs from one to the other.
    """

    __slots__ = ("before", "example", "head_bytes", "rest", "sizes", "start", "unpack_from")

    def __init__(self, record_bytes: int, block_bytes: int, *, is_placed: bool = False) -> None:
        words = -(-record_bytes // block_bytes)
        body = encode_slices(
            [Slice(0, 0, record_bytes, 0, True, bytes(16), record_bytes, block_bytes, bytes(4 * words))]
        )
        layout = struct.Struct(f"<4sI8sQII20s16s12s{4 * words}s")
        assert layout.size == HEADER_BYTES + len(body)
        self.head_bytes = layout.size
        self.unpack_from: Callable[[bytearray], tuple[bytes, int, bytes, int, int, int, bytes, bytes, bytes, bytes]] = (
            layout.unpack_from
        )
        payload_bytes = 0 if is_placed else record_bytes
        self.start = PLACED_START if is_placed else DATA_START
        self.sizes = struct.pack("<II", len(body), payload_bytes)
        self.before = body[:20]
        self.rest = body[36:DESCRIPTOR_BYTES]
        self.example = _before_crc(self.start, 0, len(body), payload_bytes, 0, DATA_FLAGS) + bytes(4) + body

    def head(self, content_id: bytes, table: bytes, request_id: int, epoch: int) -> bytes:
        """Such a head."""
        before, behind = HEADER_BYTES + 20, HEADER_BYTES + 36
        record = self.example[:before] + content_id + self.example[behind : HEADER_BYTES + DESCRIPTOR_BYTES] + table
        return data_head(record, request_id, epoch)


@lru_cache(maxsize=64)
def plain_data(record_bytes: int, block_bytes: int, *, is_placed: bool = False) -> PlainData:
    """See `PlainData`."""
    return PlainData(record_bytes, block_bytes, is_placed=is_placed)

"""The commonest read as fixed places in two frames: one whole record asked for, and one DATA frame that brings it.

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
from kvstore.wire.expected import DATA_START, get_body
from kvstore.wire.header import HEADER_BYTES, MAGIC, VERSION, FrameType
from kvstore.wire.slices import DESCRIPTOR_BYTES, FLAG_FINAL, Slice, encode_slices

CRC_AT: Final = HEADER_BYTES - 4
DATA_FLAGS: Final = 1 | FLAG_FINAL
GET_START: Final = MAGIC + bytes([VERSION, FrameType.GET])
GET_TAIL: Final = b"\xc4\0\xc4\0\xc4\0\0\xc2\xc2"  # no ranges, any copy, no credit, nothing pending, no verify
GET_FRONT: Final = b"\x99\xc4\x20"  # nine fields; a namespace of 32 bytes
GET_MIDDLE: Final = b"\xc4\x20"  # one key of 32 bytes
assert DIGEST_BYTES == 0x20

_KEY_AT: Final = len(GET_FRONT) + DIGEST_BYTES + len(GET_MIDDLE)
GET_KEY_AT: Final = HEADER_BYTES + _KEY_AT
"""Of the key in a GET frame of one record."""

_before_crc: Final = struct.Struct("<4sIIIQI").pack
_sizes: Final = struct.Struct("<8xII").unpack_from
_u32: Final = struct.Struct("<I").pack


class GetFrames:
    """GET frames of one record each, that differ in key and request id only."""

    __slots__ = ("_back", "_body_bytes", "_front")

    def __init__(self, namespace: bytes, deadline_ns: int) -> None:
        body = get_body(namespace, bytes(DIGEST_BYTES), deadline_ns)
        self._body_bytes = len(body)
        self._front = body[:_KEY_AT]
        self._back = body[_KEY_AT + DIGEST_BYTES :]

    def encode(self, key: bytes, request_id: int, epoch: int) -> bytes:
        """The frame for a record key of 32 bytes."""
        head = _before_crc(GET_START, request_id, self._body_bytes, 0, epoch, 0)
        body = self._front + key + self._back
        return head + _u32(crc32c(body, crc32c(head, 0))) + body


class PlainGet:
    """What a GET frame of one record looks like whose deadline takes so many bytes.

    Attributes:
        frame_bytes: length of the frame.
        unpack_from: start, request id, what stands then up to the CRC (sizes, epoch, flags), the CRC, what stands
            before the key, the key, and what stands behind it.
    """

    __slots__ = ("_deadline_max", "_deadline_over", "_sizes", "frame_bytes", "unpack_from")

    def __init__(self, marker: int, deadline_bytes: int) -> None:
        layout = struct.Struct(f"<4sI20sI{_KEY_AT}s{DIGEST_BYTES}s{1 + deadline_bytes + len(GET_TAIL)}s")
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
        deadline = behind_key[: -len(GET_TAIL)]
        if (
            sizes[:8] == self._sizes
            and sizes[16:] == bytes(4)
            and before_key.startswith(GET_FRONT)
            and before_key.endswith(GET_MIDDLE)
            and behind_key.endswith(GET_TAIL)
            and self._deadline_over < deadline <= self._deadline_max
        ):
            return before_key[len(GET_FRONT) : -len(GET_MIDDLE)]
        return None


PLAIN_GETS: Final = (PlainGet(0xCE, 4), PlainGet(0xCF, 8))
"""Deadlines up to 4.2 s, and longer ones (msgpack's uint 32 and uint 64, big endian: they compare as bytes)."""


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


def data_head(record: bytes, request_id: int, epoch: int) -> bytes:
    """Header and body for one answer: request id, epoch and CRC are set in what `record_head` made."""
    body_bytes, payload_bytes = _sizes(record)
    body = record[HEADER_BYTES:]
    head = _before_crc(DATA_START, request_id, body_bytes, payload_bytes, epoch, DATA_FLAGS)
    return head + _u32(crc32c(body, crc32c(head, 0))) + body


class PlainData:
    """What the head of the DATA frame of one whole record of known length and checksum block looks like.

    Attributes:
        head_bytes: length of header and body.
        unpack_from: start, request id, sizes, epoch, flags, CRC, then of the slice: what stands before its content id,
            the content id, what stands behind it, its CRC table.
        sizes, before, rest: as they must be.
        example: a head, but for what differs from one to the other.
    """

    __slots__ = ("before", "example", "head_bytes", "rest", "sizes", "unpack_from")

    def __init__(self, record_bytes: int, block_bytes: int) -> None:
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
        self.sizes = struct.pack("<II", len(body), record_bytes)
        self.before = body[:20]
        self.rest = body[36:DESCRIPTOR_BYTES]
        self.example = _before_crc(DATA_START, 0, len(body), record_bytes, 0, DATA_FLAGS) + bytes(4) + body

    def head(self, content_id: bytes, table: bytes, request_id: int, epoch: int) -> bytes:
        """Such a head."""
        before, behind = HEADER_BYTES + 20, HEADER_BYTES + 36
        record = self.example[:before] + content_id + self.example[behind : HEADER_BYTES + DESCRIPTOR_BYTES] + table
        return data_head(record, request_id, epoch)


@lru_cache(maxsize=64)
def plain_data(record_bytes: int, block_bytes: int) -> PlainData:
    """See `PlainData`."""
    return PlainData(record_bytes, block_bytes)

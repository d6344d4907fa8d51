"""What most reads ask for, and the DATA frames that answer them: whole records of one length, all of them hits.

A reader that knows beforehand what they look like compares instead of decoding, and receives payload straight to where
it belongs. Whatever else comes is no fault: it is read again by `FrameReader`, which knows every frame.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from kvstore.errors import InvalidRequest
from kvstore.limits import (
    BATCH_ITEMS_MAX,
    DIGEST_BYTES,
    FRAME_PAYLOAD_BYTES_MAX,
    PLACES_PER_CALL_MAX,
    REQUEST_NS_MAX,
    SLICES_PER_FRAME_MAX,
)
from kvstore.types.checksum import crc32c
from kvstore.wire.codec import pack_fields, unpack_fields
from kvstore.wire.header import HEADER_BYTES, MAGIC, VERSION, FrameType
from kvstore.wire.shared import PLACE_BYTES
from kvstore.wire.slices import DESCRIPTOR_BYTES, FLAG_FINAL, FLAG_LAST, Slice, decode_slices

_PLAIN: Final = (b"", b"", b"", 0, False, False)  # the fields of a GET behind its deadline: whole records, any copy
_GET_FIELDS: Final = 3 + len(_PLAIN)
DATA_START: Final = MAGIC + bytes([VERSION, FrameType.DATA])
PLACED_START: Final = MAGIC + bytes([VERSION, FrameType.PLACED])
_HEADER: Final = struct.Struct("<4sIIIQII")
_SLICE: Final = struct.Struct("<I16s16s12s")  # item, what stands before the content id, that, what stands behind it
_BEFORE_ID: Final = struct.Struct("<QIBBH")
_AFTER_ID: Final = struct.Struct("<QI")
_EPOCH_AT: Final = 16
_CRC_AT: Final = HEADER_BYTES - 4
assert _HEADER.size == HEADER_BYTES
assert _SLICE.size == DESCRIPTOR_BYTES


def get_body(namespace: bytes, keys: bytes, deadline_ns: int) -> bytes:
    """The body of a GET of whole records: `Get(namespace=..., keys=..., deadline_ns=...).encode()`, made quicker."""
    return pack_fields((namespace, keys, deadline_ns, *_PLAIN))


def get_into_body(namespace: bytes, keys: bytes, deadline_ns: int, places: bytes) -> bytes:
    """As `get_body`, of GET_INTO."""
    return pack_fields((namespace, keys, deadline_ns, *_PLAIN, places))


def plain_get(body: bytes | bytearray) -> tuple[bytes, bytes, int] | None:
    """Namespace, keys and deadline of a body as `get_body` makes it; None for any other GET: `Get.decode` judges it."""
    return _plain_fields(unpack_fields(body, what="GET"))


def plain_get_into(body: bytes | bytearray) -> tuple[tuple[bytes, bytes, int], bytes] | None:
    """What `plain_get` tells, and the places, of a body as `get_into_body` makes it; None for any other GET_INTO."""
    fields = unpack_fields(body, what="GET_INTO")
    plain, places = _plain_fields(fields[:-1]), fields[-1] if fields else b""
    if plain is None or type(places) is not bytes or len(places) * DIGEST_BYTES != len(plain[1]) * PLACE_BYTES:
        return None
    return (plain, places) if len(places) <= PLACES_PER_CALL_MAX * PLACE_BYTES else None


def _plain_fields(fields: Sequence[object]) -> tuple[bytes, bytes, int] | None:
    if len(fields) != _GET_FIELDS or tuple(fields[3:]) != _PLAIN:
        return None
    namespace, keys, deadline_ns, _, _, _, credit_bytes, accept_pending, verify = fields
    if (
        type(namespace) is bytes
        and len(namespace) == DIGEST_BYTES
        and type(keys) is bytes
        and not len(keys) % DIGEST_BYTES
        and len(keys) <= BATCH_ITEMS_MAX * DIGEST_BYTES
        and type(deadline_ns) is int
        and 0 <= deadline_ns <= REQUEST_NS_MAX
        and type(credit_bytes) is int
        and type(accept_pending) is bool
        and type(verify) is bool
    ):
        return namespace, keys, deadline_ns
    return None


class WholeRecords:
    """The DATA and PLACED frames that bring whole records of one length, in any order and grouping.

    Attributes:
        record_bytes: of each record.
        block_bytes: the checksum block of all of them.
        cuts: the checksum blocks of a record; empty when it is one.
        before_id, after_id: what stands in each slice between its item and its content id, and behind that.
    """

    __slots__ = ("_slice_bytes", "after_id", "before_id", "block_bytes", "cuts", "record_bytes")

    def __init__(self, record_bytes: int, block_bytes: int) -> None:
        """
        Args:
            record_bytes: of each; above 0, at most SLICE_BYTES_MAX.
            block_bytes: the checksum block of all of them.
        """
        words = -(-record_bytes // block_bytes)
        starts = range(0, record_bytes if words > 1 else 0, block_bytes)
        self.record_bytes = record_bytes
        self.block_bytes = block_bytes
        self.cuts = tuple(slice(at, at + block_bytes) for at in starts)
        self._slice_bytes = DESCRIPTOR_BYTES + 4 * words
        self.before_id = _BEFORE_ID.pack(0, record_bytes, 0, FLAG_LAST, words)
        self.after_id = _AFTER_ID.pack(record_bytes, block_bytes)

    def begin(self, head: bytearray, request_id: int) -> tuple[int, int, bool] | None:
        """Records, body length and whether it ends the call, of a frame with this header; None for any other frame."""
        start, answered_id, body_bytes, payload_bytes, _, flags, _ = _HEADER.unpack(head)
        count = flags & ~FLAG_FINAL
        if (
            start == DATA_START
            and answered_id == request_id
            and 0 < count <= SLICES_PER_FRAME_MAX
            and body_bytes == count * self._slice_bytes
            and payload_bytes == count * self.record_bytes
            and payload_bytes <= FRAME_PAYLOAD_BYTES_MAX
        ):
            return count, body_bytes, count != flags
        return None

    def begin_placed(self, head: memoryview, request_id: int) -> tuple[int, int, bool] | None:
        """As `begin`, of a PLACED frame."""
        start, answered_id, body_bytes, payload_bytes, _, flags, _ = _HEADER.unpack(head)
        count = flags & ~FLAG_FINAL
        if (
            start == PLACED_START
            and answered_id == request_id
            and 0 < count <= SLICES_PER_FRAME_MAX
            and body_bytes == count * self._slice_bytes
            and not payload_bytes
        ):
            return count, body_bytes, count != flags
        return None

    def open_placed(
        self, head: memoryview, body: memoryview, count: int
    ) -> tuple[tuple[int, ...], tuple[bytes, ...], memoryview] | None:
        """As `open`; the CRC words of all records as one table."""
        if not _is_as_sent(head, body):
            return None
        at = count * DESCRIPTOR_BYTES
        items, befores, content_ids, rests = zip(*_SLICE.iter_unpack(body[:at]), strict=True)
        if befores.count(self.before_id) != count or rests.count(self.after_id) != count:
            return None
        return items, content_ids, body[at:]

    def open(
        self, head: bytearray, body: bytearray, count: int
    ) -> tuple[tuple[int, ...], tuple[bytes, ...], list[int]] | None:
        """Item and content id of each record, and the CRC words of all of them, of a frame that `begin` knows.

        None when the body is another one, or it or its header were changed on the way: somebody else judges that.
        """
        if not _is_as_sent(head, body):
            return None
        view = memoryview(body)
        at = count * DESCRIPTOR_BYTES
        items, befores, content_ids, rests = zip(*_SLICE.iter_unpack(view[:at]), strict=True)
        if befores.count(self.before_id) != count or rests.count(self.after_id) != count:
            return None
        # in the machine's byte order: where that is not the wire's nothing matches, and all is read the general way
        return items, content_ids, view[at:].cast("I").tolist()


class LongRecords:
    """The DATA frames that bring records of one length in several slices, of any length.

    Attributes:
        record_bytes: of each record.
        block_bytes: the checksum block of all of them.
    """

    __slots__ = ("block_bytes", "record_bytes")

    def __init__(self, record_bytes: int, block_bytes: int) -> None:
        self.record_bytes = record_bytes
        self.block_bytes = block_bytes

    def begin(self, head: bytearray, request_id: int) -> tuple[int, int, bool] | None:
        """As `WholeRecords.begin`."""
        start, answered_id, body_bytes, payload_bytes, _, flags, _ = _HEADER.unpack(head)
        count = flags & ~FLAG_FINAL
        if (
            start == DATA_START
            and answered_id == request_id
            and 0 < count <= SLICES_PER_FRAME_MAX
            and 0 < payload_bytes <= FRAME_PAYLOAD_BYTES_MAX
            and body_bytes <= count * (DESCRIPTOR_BYTES + 4) + payload_bytes // self.block_bytes * 4
        ):
            return count, body_bytes, count != flags
        return None

    def open(self, head: bytearray, body: bytearray, count: int) -> list[Slice] | None:
        """The slices of a frame that `begin` knows; None as from `WholeRecords.open`."""
        if not _is_as_sent(head, body):
            return None
        try:
            slices = decode_slices(body, count=count, payload_bytes=_HEADER.unpack(head)[3])
        except InvalidRequest:
            return None
        for one in slices:
            is_last = one.offset + one.length_bytes == self.record_bytes
            if (
                one.status
                or not one.crcs
                or one.last != is_last
                or one.record_bytes != self.record_bytes
                or one.block_bytes != self.block_bytes
                or (one.length_bytes % self.block_bytes and not is_last)
            ):
                return None
        return slices


def _is_as_sent(head: bytearray | memoryview, body: bytearray | memoryview) -> bool:
    return crc32c(body, crc32c(head[:_CRC_AT])) == int.from_bytes(head[_CRC_AT:], "little")


def epoch_of(head: bytearray | memoryview) -> int:
    """The node's view, as the header of any frame names it."""
    return int.from_bytes(head[_EPOCH_AT : _EPOCH_AT + 8], "little")


@lru_cache(maxsize=64)
def whole_records(record_bytes: int, block_bytes: int) -> WholeRecords:
    """See `WholeRecords`; kept, since a caller reads the same again and again."""
    return WholeRecords(record_bytes, block_bytes)

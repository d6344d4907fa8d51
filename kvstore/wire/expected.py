"""The one DATA frame that answers most small reads: whole records of one length, all of them hits, nothing else.

A reader that knows its bytes beforehand receives head and payload at once, straight to where they belong. Whatever
else comes is no fault: it is read again by `FrameReader`, which knows every frame.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

from kvstore.errors import ChecksumMismatch
from kvstore.limits import BATCH_ITEMS_MAX, DIGEST_BYTES, REQUEST_NS_MAX
from kvstore.types.checksum import crc32c
from kvstore.wire.codec import pack_fields, unpack_fields
from kvstore.wire.header import HEADER_BYTES, MAGIC, VERSION, FrameType
from kvstore.wire.slices import DESCRIPTOR_BYTES, FLAG_FINAL, FLAG_LAST, Slice

_PLAIN: Final = (b"", b"", b"", 0, False, False)  # the fields of a GET behind its deadline: whole records, any copy
_GET_FIELDS: Final = 3 + len(_PLAIN)
_START: Final = struct.Struct("<2sBBIII")  # the header up to its epoch
_END: Final = struct.Struct("<QII")
_U32: Final = struct.Struct("<I")
_BEFORE_ID: Final = struct.Struct("<IQIBBH")  # a descriptor up to its content id
_AFTER_ID: Final = struct.Struct("<QI")
_ID_AT: Final = _BEFORE_ID.size
_REST_AT: Final = DESCRIPTOR_BYTES - _AFTER_ID.size
_CRC_AT: Final = HEADER_BYTES - 4


def get_body(namespace: bytes, keys: bytes, deadline_ns: int) -> bytes:
    """The body of a GET of whole records: `Get(namespace=..., keys=..., deadline_ns=...).encode()`, made quicker."""
    return pack_fields((namespace, keys, deadline_ns, *_PLAIN))


def plain_get(body: bytes | bytearray) -> tuple[bytes, bytes, int] | None:
    """Namespace, keys and deadline of a body as `get_body` makes it; None for any other GET: `Get.decode` judges it."""
    fields = unpack_fields(body, what="GET")
    if len(fields) != _GET_FIELDS or fields[3:] != _PLAIN:
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


class ExpectedData:
    """The final DATA frame of `count` hits of `record_bytes` each.

    Attributes:
        head_bytes: length of header and body.
        payload_bytes: length of the payload behind them.
    """

    __slots__ = ("_befores", "_block_bytes", "_rest", "_table_bytes", "head_bytes", "payload_bytes", "record_bytes")

    def __init__(self, count: int, record_bytes: int, block_bytes: int) -> None:
        """
        Args:
            count: of records; at most SLICES_PER_FRAME_MAX.
            record_bytes: of each; above 0, at most SLICE_BYTES_MAX.
            block_bytes: the checksum block of all of them.
        """
        words = -(-record_bytes // block_bytes)
        self.record_bytes = record_bytes
        self.head_bytes = HEADER_BYTES + count * (DESCRIPTOR_BYTES + 4 * words)
        self.payload_bytes = count * record_bytes
        self._block_bytes = block_bytes
        self._table_bytes = 4 * words
        self._befores = tuple(_BEFORE_ID.pack(item, 0, record_bytes, 0, FLAG_LAST, words) for item in range(count))
        self._rest = _AFTER_ID.pack(record_bytes, block_bytes)

    def begins(self, head: bytes | bytearray, received_bytes: int, request_id: int) -> bool:
        """Whether a frame of which so many bytes have come, `head` first, is this one as far as its header tells."""
        return (
            received_bytes >= HEADER_BYTES
            and head[: _START.size]
            == _START.pack(
                MAGIC, VERSION, FrameType.DATA, request_id, self.head_bytes - HEADER_BYTES, self.payload_bytes
            )
            and head[_CRC_AT - 4 : _CRC_AT] == _U32.pack(len(self._befores) | FLAG_FINAL)
        )

    def open(self, head: bytes | bytearray) -> tuple[int, list[tuple[bytes, bytes]] | None]:
        """The node's epoch, and content id and CRC table of each record; None when the body is another one.

        Args:
            head: all of header and body.

        Raises:
            ChecksumMismatch: They were changed on the way; nothing after them can be trusted.
        """
        view = memoryview(head)
        epoch, _, crc = _END.unpack_from(head, _START.size)
        if crc32c(view[HEADER_BYTES:], crc32c(view[:_CRC_AT])) != crc:
            raise ChecksumMismatch("a DATA frame was changed on the way; the connection must be opened anew")
        at, table, rest, table_bytes = (
            HEADER_BYTES,
            HEADER_BYTES + len(self._befores) * DESCRIPTOR_BYTES,
            self._rest,
            self._table_bytes,
        )
        found: list[tuple[bytes, bytes]] = []
        for before in self._befores:
            if head[at : at + _ID_AT] != before or head[at + _REST_AT : at + DESCRIPTOR_BYTES] != rest:
                return epoch, None
            found.append((bytes(view[at + _ID_AT : at + _REST_AT]), bytes(view[table : table + table_bytes])))
            at += DESCRIPTOR_BYTES
            table += table_bytes
        return epoch, found

    def slices(self, found: list[tuple[bytes, bytes]]) -> list[Slice]:
        """What `open` has found, as `FrameReader` would give it."""
        return [
            Slice(item, 0, self.record_bytes, 0, True, content_id, self.record_bytes, self._block_bytes, crcs)
            for item, (content_id, crcs) in enumerate(found)
        ]


@lru_cache(maxsize=64)
def expected_data(count: int, record_bytes: int, block_bytes: int) -> ExpectedData:
    """See `ExpectedData`; kept, since a caller reads the same again and again."""
    return ExpectedData(count, record_bytes, block_bytes)

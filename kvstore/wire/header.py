"""The fixed 32 bytes in front of every frame.

    magic 2s "KV" | version u8 | type u8 | request_id u32 | body_bytes u32 | payload_bytes u32
    | epoch u64 | flags u32 | crc u32

Little endian. `crc` is the CRC32C of header[0:28] followed by the body. The first four bytes and the frame type ERROR
never change, so that any two versions can tell each other that they do not fit.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from kvstore.errors import ChecksumMismatch, FormatUnsupported, InvalidRequest
from kvstore.limits import FRAME_BODY_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX
from kvstore.types.checksum import crc32c

MAGIC: Final = b"KV"
VERSION: Final = 1
HEADER_BYTES: Final = 32
_CRC_AT: Final = 28

_WHOLE = struct.Struct("<2sBBIIIQII")
_BEFORE_CRC = struct.Struct("<2sBBIIIQI")
_CRC = struct.Struct("<I")
assert _WHOLE.size == HEADER_BYTES
assert _BEFORE_CRC.size == _CRC_AT


class FrameType(IntEnum):
    """Kind of a frame; the value is its code on the wire (append only)."""

    HELLO = 1
    WELCOME = 2
    PING = 3
    PONG = 4
    MANIFEST = 5
    VIEW = 6
    VIEW_REPLY = 7
    MATCH = 8
    MATCH_REPLY = 9
    UNPIN = 10
    GET = 11
    DATA = 12
    END = 13
    OFFER = 14
    GRANT = 15
    RESULT = 16
    WRITER_OPEN = 17
    WRITER_OPENED = 18
    WRITER_WRITE = 19
    WRITER_COMMIT = 20
    WRITER_ABORT = 21
    WAIT = 22
    DELETE = 23
    DROP = 24
    PREFETCH = 25
    CANCEL = 26
    ADMIN = 27
    ADMIN_REPLY = 28
    ERROR = 29
    REGION = 30
    REGION_DROP = 31
    GET_INTO = 32
    PLACED = 33
    OFFER_FROM = 34
    LOCAL = 35
    LOCAL_REPLY = 36
    PULL = 37
    HEADS = 38
    HEADS_REPLY = 39
    FORGET = 40
    PAIR = 41
    PAIRED = 42
    PROBE = 43
    REGIONS = 44
    LOST = 45


PAYLOAD_TYPES: Final = frozenset({FrameType.DATA, FrameType.OFFER, FrameType.WRITER_WRITE})
"""The only frames that may carry payload."""

_TYPES: Final = {int(kind): kind for kind in FrameType}


class Header(NamedTuple):
    """A decoded header. A tuple, not a dataclass: one is made for every frame that arrives."""

    type: FrameType
    request_id: int
    body_bytes: int
    payload_bytes: int
    epoch: int
    flags: int
    crc: int


def encode_head(
    frame_type: FrameType,
    request_id: int,
    body: bytes,
    *,
    payload_bytes: int = 0,
    epoch: int = 0,
    flags: int = 0,
) -> bytes:
    """Header and body of a frame, as one piece of memory; the payload follows it on the wire."""
    head = _BEFORE_CRC.pack(MAGIC, VERSION, frame_type, request_id, len(body), payload_bytes, epoch, flags)
    return b"".join((head, _CRC.pack(crc32c(body, crc32c(head))), body))


def decode_header(
    data: bytes | bytearray | memoryview, at: int = 0, *, body_bytes_max: int = FRAME_BODY_BYTES_MAX
) -> Header:
    """The header at `data[at : at + 32]`, its sizes checked before anybody reserves memory for them.

    The checksum needs the body: see `check_crc`.

    Raises:
        FormatUnsupported: Not our magic, another version, or an unknown frame type.
        InvalidRequest: A size above its limit, or payload on a frame that has none.
    """
    magic, version, code, request_id, body_bytes, payload_bytes, epoch, flags, crc = _WHOLE.unpack_from(data, at)
    if magic != MAGIC:
        raise FormatUnsupported(f"frame begins with {magic!r}, not {MAGIC!r}: the peer does not speak this protocol")
    if version != VERSION:
        raise FormatUnsupported(
            f"frame has protocol version {version}, this program speaks {VERSION}: upgrade the older side"
        )
    frame_type = _TYPES.get(code)
    if frame_type is None:
        raise FormatUnsupported(f"frame type {code} is unknown in version {VERSION}; known are 1 to {len(_TYPES)}")
    if body_bytes > body_bytes_max:
        raise InvalidRequest(
            f"{frame_type.name} frame has a body of {body_bytes} bytes, the limit is {body_bytes_max}: split the batch"
        )
    if payload_bytes and (payload_bytes > FRAME_PAYLOAD_BYTES_MAX or frame_type not in PAYLOAD_TYPES):
        limit = FRAME_PAYLOAD_BYTES_MAX if frame_type in PAYLOAD_TYPES else 0
        raise InvalidRequest(
            f"{frame_type.name} frame has a payload of {payload_bytes} bytes, the limit is {limit}: send several frames"
        )
    return Header(frame_type, request_id, body_bytes, payload_bytes, epoch, flags, crc)


def check_crc(header: Header, head: bytes | bytearray | memoryview, body: bytes | bytearray | memoryview) -> None:
    """Compares the checksum of a header (its 32 raw bytes are `head`) and its body.

    Raises:
        ChecksumMismatch: They were changed on the way; nothing after them can be trusted.
    """
    found = crc32c(body, crc32c(head[:_CRC_AT]))
    if found != header.crc:
        raise ChecksumMismatch(
            f"{header.type.name} frame of request {header.request_id}: CRC32C of header and body is {found:#010x}, "
            f"the header says {header.crc:#010x}; the connection must be opened anew"
        )

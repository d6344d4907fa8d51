"""The content id of a record: what tells one copy of it from another writer's. See FORMAT.md of the engine."""

from __future__ import annotations

import struct

from kvstore.types.checksum import crc32c

_CONTENT_ID = struct.Struct("<II8s")


def content_id(payload_bytes: int, crc_table: bytes, nonce: bytes) -> bytes:
    """What tells one copy of a record from another writer's: length, CRC32C of the CRC table, 8 random bytes."""
    return _CONTENT_ID.pack(payload_bytes, crc32c(crc_table), nonce)

"""A batch of writes as its items: what OFFER and WRITER_OPEN say in parallel blobs, item by item."""

from __future__ import annotations

import struct

from kvstore.engine.api import POSITION_NONE, Durability, NamespaceRef, PutColumns, PutSpec, digest_at
from kvstore.errors import InvalidRequest
from kvstore.limits import (
    CHECKSUM_BYTES_MAX,
    CHECKSUM_BYTES_MIN,
    DIGEST_BYTES,
    PARTS_MAX,
    PAYLOAD_BYTES_MAX,
    WRITER_TTL_NS,
)
from kvstore.types.checksum import block_count
from kvstore.types.flow import FlowClass
from kvstore.wire.messages import ID_BYTES, Offer, WriterOpen

_NO_ID = bytes(ID_BYTES)


class Batch:
    """Items of one OFFER or WRITER_OPEN; cheap to make for any number, `spec` costs when an item's turn comes."""

    __slots__ = ("_blocks", "_crc_ends", "_message", "_positions", "count", "lengths")

    def __init__(self, message: Offer | WriterOpen, *, may_lack_crcs: bool = False) -> None:
        """
        Args:
            may_lack_crcs: an OFFER without any CRC tables is one whose words come with the slices of its DATA.

        Raises:
            InvalidRequest: The CRC tables do not have the words that lengths and blocks ask for, so that no item's
                table can be told from the next one's.
        """
        self._message = message
        self.count = len(message.keys) // DIGEST_BYTES
        self.lengths = unpack_u32(message.lengths)
        blocks = unpack_u32(message.block_bytes)
        self._blocks = blocks * self.count if len(blocks) == 1 else blocks
        self._positions = unpack_u32(message.positions)
        self._crc_ends: list[int] | None = None
        if isinstance(message, Offer) and not (may_lack_crcs and not message.crc_tables):
            self._crc_ends = self._find_crcs(message.crc_tables)

    def key(self, item: int) -> bytes:
        """The record key of an item."""
        at = item * DIGEST_BYTES
        return self._message.keys[at : at + DIGEST_BYTES]

    def block_bytes(self, item: int) -> int:
        """The checksum block of an item."""
        return self._blocks[item]

    def defect(self, item: int) -> str:
        """What is wrong with an item alone, "" if nothing: the thing, the value, the limit."""
        length, block = self.lengths[item], self._blocks[item]
        if length > PAYLOAD_BYTES_MAX:
            return f"item {item} has {length} bytes, the limit is {PAYLOAD_BYTES_MAX}: split the chunk into shards"
        if not CHECKSUM_BYTES_MIN <= block <= CHECKSUM_BYTES_MAX:
            return (
                f"item {item} has checksum blocks of {block} bytes; "
                f"from {CHECKSUM_BYTES_MIN} to {CHECKSUM_BYTES_MAX} are allowed"
            )
        if self._message.parts and self._message.parts[item] > PARTS_MAX:
            return f"item {item} is of part {self._message.parts[item]}, the limit is {PARTS_MAX}"
        return ""

    def spec(
        self, item: int, *, namespace: NamespaceRef, flow: FlowClass, deadline_ns: int, client_id: bytes
    ) -> PutSpec:
        """What the engine is asked for an item without defect."""
        message = self._message
        crc_table = None
        # a writer says only at its end what it wants, and one of a record that exists has no end: Exists holds for both
        durability = Durability.POWER
        content_id = _NO_ID
        owner_ttl_ns = message.ttl_ns if isinstance(message, WriterOpen) else WRITER_TTL_NS
        if isinstance(message, Offer):
            ends = self._crc_ends
            crc_table = message.crc_tables[ends[item] : ends[item + 1]] if ends is not None else None
            durability = Durability(message.durability)
            if message.content_ids:
                content_id = message.content_ids[item * ID_BYTES : (item + 1) * ID_BYTES]
        return PutSpec(
            namespace=namespace,
            key=self.key(item),
            payload_bytes=self.lengths[item],
            block_bytes=self._blocks[item],
            crc_table=crc_table,
            flow=flow,
            deadline_ns=deadline_ns,
            client_id=client_id,
            position=self._positions[item] if self._positions else POSITION_NONE,
            run_head=digest_at(message.run_heads, item),
            parent=digest_at(message.parents, item),
            part=message.parts[item] if message.parts else 0,
            durability=durability,
            volatile_ttl_ns=message.volatile_ttl_ns,
            content_id=content_id,
            owner_ttl_ns=owner_ttl_ns,
        )

    def columns(
        self, *, namespace: NamespaceRef, flow: FlowClass, deadline_ns: int, client_id: bytes
    ) -> PutColumns | None:
        """All items at once, where they are whole dense records of one good shape; None for anything else."""
        message = self._message
        if (
            not isinstance(message, Offer)
            or self._crc_ends is not None
            or message.durability != Durability.COMMIT
            or message.volatile_ttl_ns
            or message.content_ids
            or message.parts.strip(b"\0")
            or not self.count
        ):
            return None
        length, block = self.lengths[0], self._blocks[0]
        is_alike = self.lengths.count(length) == self.count == self._blocks.count(block)
        if not is_alike or not length or self.defect(0):
            return None
        return PutColumns(
            namespace=namespace,
            keys=message.keys,
            payload_bytes=length,
            block_bytes=block,
            flow=flow,
            deadline_ns=deadline_ns,
            client_id=client_id,
            positions=self._positions,
            run_heads=message.run_heads,
            parents=message.parents,
        )

    def _find_crcs(self, crc_tables: bytes) -> list[int]:
        """Where each item's table begins in the blob, and where the last one ends."""
        ends = [0]
        at = 0
        for length, block in zip(self.lengths, self._blocks, strict=True):
            at += 4 * block_count(length, block) if block else 0
            ends.append(at)
        if at != len(crc_tables):
            raise InvalidRequest(
                f"OFFER.crc_tables has {len(crc_tables) // 4} words, "
                f"the lengths and checksum blocks of its {self.count} items need {at // 4}"
            )
        return ends


def unpack_u32(blob: bytes) -> tuple[int, ...]:
    """The little-endian words of a blob."""
    return struct.unpack(f"<{len(blob) // 4}I", blob)


def pack_u32(words: list[int]) -> bytes:
    """The blob of some words."""
    return struct.pack(f"<{len(words)}I", *words)

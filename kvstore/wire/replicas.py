"""Messages by which nodes keep copies of records: who lacks one is told to PULL it, and asks its source for HEADS.

A client sends PULL too, when it has found a record elsewhere than where it belongs. HEADS and FORGET go between nodes
only. See docs/protocol.md, "Copies".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from kvstore.limits import (
    COPIES_MAX,
    DIGEST_BYTES,
    FORGET_KEYS_MAX,
    HEADS_ITEMS_MAX,
    MANIFEST_BYTES_MAX,
    NAMESPACE_GENERATION_MAX,
    TARGET_NAME_BYTES_MAX,
)
from kvstore.wire.header import FrameType
from kvstore.wire.messages import ID_BYTES, ContentIds, Digest, Digests, Items, Keys, Statuses
from kvstore.wire.schema import Blob, Message, Text, Uint, expect_count, message

KEY_PREFIX_BYTES: Final = 16
"""Of a record key, in FORGET: what the log of a node keeps of a record that was deleted."""
_AGE_BYTES: Final = 8

Generation = Annotated[int, Uint(NAMESPACE_GENERATION_MAX)]


@message(FrameType.PULL)
@dataclass(frozen=True, slots=True, kw_only=True)
class Pull(Message):
    """Get these records from another target, in the background; END's status is 0 or a RefusedReason for each.

    0: it will be tried, or the record is here already. END's value counts those that will be tried.

    Attributes:
        source: id of a target of the view, where they were found.
        generation: of the namespace as the sender knows it; 0 from a client, which knows none.
    """

    namespace: Digest
    keys: Keys
    source: Annotated[str, Text(TARGET_NAME_BYTES_MAX)]
    generation: Generation = 0


@message(FrameType.HEADS)
@dataclass(frozen=True, slots=True, kw_only=True)
class Heads(Message):
    """What stands before the payload of these records? Between nodes."""

    namespace: Digest
    keys: Annotated[bytes, Blob(unit=DIGEST_BYTES, count_max=HEADS_ITEMS_MAX)]


@message(FrameType.HEADS_REPLY)
@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsReply(Message):
    """One entry per key in each blob; zeros where the status is not 0, a MissReason.

    Attributes:
        generation: of the namespace there; 0 when it is not known.
        copies: as in MANIFEST.
        manifest: of the namespace; empty when it is not known.
        lengths, block_bytes, positions, parts, run_heads, parents, content_ids: as in OFFER.
    """

    statuses: Statuses
    generation: Generation
    copies: Annotated[int, Uint(COPIES_MAX)]
    manifest: Annotated[bytes, Blob(count_max=MANIFEST_BYTES_MAX)]
    lengths: Items
    block_bytes: Items
    positions: Items
    parts: Annotated[bytes, Blob(count_max=HEADS_ITEMS_MAX)]
    run_heads: Digests
    parents: Digests
    content_ids: ContentIds

    def validate(self) -> None:
        count = len(self.statuses)
        for name, unit in (
            ("lengths", 4),
            ("block_bytes", 4),
            ("positions", 4),
            ("parts", 1),
            ("run_heads", DIGEST_BYTES),
            ("parents", DIGEST_BYTES),
            ("content_ids", ID_BYTES),
        ):
            expect_count(f"HEADS_REPLY.{name}", getattr(self, name), unit, count)


@message(FrameType.FORGET)
@dataclass(frozen=True, slots=True, kw_only=True)
class Forget(Message):
    """What was deleted and dropped while the receiver was away. Between nodes.

    Attributes:
        manifest: of the namespace, which is registered if it is not known.
        generation: that the namespace has; what an older one holds is dropped.
        keys: the first 16 bytes of the record keys that were deleted in it.
        ages_ns: u64 per key, how long ago that was.
    """

    manifest: Annotated[bytes, Blob(count_max=MANIFEST_BYTES_MAX)]
    generation: Generation
    keys: Annotated[bytes, Blob(unit=KEY_PREFIX_BYTES, count_max=FORGET_KEYS_MAX)] = b""
    ages_ns: Annotated[bytes, Blob(unit=_AGE_BYTES, count_max=FORGET_KEYS_MAX)] = b""

    def validate(self) -> None:
        expect_count("FORGET.ages_ns", self.ages_ns, _AGE_BYTES, len(self.keys) // KEY_PREFIX_BYTES)


REPLICA_MESSAGES: Final[dict[FrameType, type[Message]]] = {
    kind.TYPE: kind for kind in (Pull, Heads, HeadsReply, Forget)
}
"""The messages of this module, by frame type."""

"""Every message of the data plane but DATA (see slices.py): one frozen dataclass each, as in docs/protocol.md.

Blobs hold one fixed-size little-endian entry per item of a batch: keys 32 bytes, content ids 16, counts u32, ranges u64
offset and u64 length, statuses one byte (types/results.py). Times are nanoseconds that remain, never points on a clock.
`details` is text with one line per item, or empty when there is nothing to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import Annotated, Any, Final

from kvstore.errors import InvalidRequest
from kvstore.limits import (
    ADMIN_BYTES_MAX,
    BATCH_ITEMS_MAX,
    CHECKSUM_BYTES_MIN,
    COPIES_MAX,
    DIGEST_BYTES,
    ERROR_TEXT_BYTES_MAX,
    FRAME_BODY_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    GROUP_BYTES,
    MANIFEST_BYTES_MAX,
    NAMESPACE_GENERATION_MAX,
    NODE_ID_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    PIN_TTL_NS_MAX,
    REQUEST_NS_MAX,
    TOKEN_BYTES_MAX,
    VIEW_BYTES_MAX,
    VOLATILE_TTL_NS_MAX,
    WRITER_TTL_NS,
)
from kvstore.types.flow import FlowClass
from kvstore.wire.header import FrameType
from kvstore.wire.schema import Blob, Message, Text, Truth, Uint, digest_blob, expect_count, message

U8_MAX: Final = 0xFF
U16_MAX: Final = 0xFFFF
U32_MAX: Final = 0xFFFF_FFFF
U64_MAX: Final = 0xFFFF_FFFF_FFFF_FFFF
ID_BYTES: Final = 16
RANGE_BYTES: Final = 16
RANGES_MAX: Final = FRAME_BODY_BYTES_MAX // RANGE_BYTES
SLICE_COUNT_MAX: Final = FRAME_BODY_BYTES_MAX // 4

Digest = Annotated[bytes, digest_blob()]
Id = Annotated[bytes, Blob(unit=ID_BYTES, count_min=1, count_max=1)]
Keys = Annotated[bytes, Blob(unit=DIGEST_BYTES, count_max=BATCH_ITEMS_MAX)]
Digests = Annotated[bytes, Blob(unit=DIGEST_BYTES, count_max=BATCH_ITEMS_MAX)]
ContentIds = Annotated[bytes, Blob(unit=ID_BYTES, count_max=BATCH_ITEMS_MAX)]
Statuses = Annotated[bytes, Blob(count_max=BATCH_ITEMS_MAX)]
Items = Annotated[bytes, Blob(unit=4, count_max=BATCH_ITEMS_MAX)]
Crcs = Annotated[bytes, Blob(unit=4, count_max=SLICE_COUNT_MAX)]
Details = Annotated[str, Text(FRAME_BODY_BYTES_MAX)]
Remaining = Annotated[int, Uint(REQUEST_NS_MAX)]
U8 = Annotated[int, Uint(U8_MAX)]
U16 = Annotated[int, Uint(U16_MAX)]
U32 = Annotated[int, Uint(U32_MAX)]
U64 = Annotated[int, Uint(U64_MAX)]
Flag = Annotated[bool, Truth()]


class Feature(IntFlag):
    """Feature bits of HELLO and WELCOME; a connection uses those that both sides name."""

    NONE = 0
    FINAL_DATA = 1
    """A GET all of whose items are hits may end with its last DATA frame (slices.FLAG_FINAL) instead of END, a GET_INTO
    with its last PLACED frame."""
    DATA_CRCS = 2
    """An OFFER may leave its CRC tables out: the words come with the slices of its DATA."""
    SHARED_MEMORY = 4
    """LOCAL is understood (wire/shared.py): there is a Unix socket for clients on the same host. Over that socket
    REGION, GET_INTO and OFFER_FROM are too."""
    PULL = 8
    """PULL, HEADS and FORGET are understood (wire/replicas.py)."""
    RDMA = 16
    """PAIR, PROBE, REGIONS, GET_INTO and OFFER_FROM are understood (wire/pairs.py)."""
    READER_CHECKS = 32
    """The client sums all bytes of a GET before it believes them: the node need not sum what it reads from the drive
    for it alone."""


# --- the connection -------------------------------------------------------------------------------------------------
@message(FrameType.HELLO)
@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """The first frame of a connection.

    Attributes:
        version_min, version_max: protocol versions that the client speaks.
        client_id: 16 random bytes of the client process; pins and writers belong to it, over all its connections.
        boot_id: of the node as the client last saw it, zeros if never.
        token: of the tenant; opaque here.
        flow: FlowClass code of every request on this connection.
    """

    version_min: U8
    version_max: U8
    features: U64
    client_id: Id
    boot_id: Id
    token: Annotated[bytes, Blob(count_max=TOKEN_BYTES_MAX)]
    flow: Annotated[int, Uint(max(FlowClass))]


@message(FrameType.WELCOME)
@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """The answer to HELLO: who the node is and what it takes.

    Attributes:
        version: the one to speak from now on.
        boot_id: 16 random bytes of this start of the worker: another one means that pins and writers are gone.
        epoch: of the node's view.
    """

    version: U8
    features: U64
    node_id: Annotated[str, Text(NODE_ID_BYTES_MAX)]
    boot_id: Id
    epoch: U64
    body_bytes_max: U32
    payload_bytes_max: U32
    batch_items_max: U32
    inline_put_bytes_max: U32
    put_credit_bytes: U64


@message(FrameType.PING)
@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(Message):
    """Are you there? Allowed between calls."""


@message(FrameType.PONG)
@dataclass(frozen=True, slots=True, kw_only=True)
class Pong(Message):
    """Yes."""


@message(FrameType.ERROR)
@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply(Message):
    """The call (or, with `closing`, the connection) has failed; `code` is from wire/failures.py."""

    code: U16
    text: Annotated[str, Text(ERROR_TEXT_BYTES_MAX)]
    closing: Flag


@message(FrameType.END)
@dataclass(frozen=True, slots=True, kw_only=True)
class End(Message):
    """A call is over.

    Attributes:
        statuses: one per item where the verb has items, else empty.
        value: a number where the verb has one (PREFETCH: records being fetched).
    """

    statuses: Statuses = b""
    value: U64 = 0


@message(FrameType.CANCEL)
@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Message):
    """End the call with this frame's request id now; its END (or ERROR) still comes. Ignored between calls."""


# --- namespaces and view --------------------------------------------------------------------------------------------
@message(FrameType.MANIFEST, optional_count=1)
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Message):
    """Registers a namespace by its canonical manifest (types/namespace.py).

    Attributes:
        copies: how many its records are to have; 0 says nothing, and the cluster's policy counts.
    """

    manifest: Annotated[bytes, Blob(count_max=MANIFEST_BYTES_MAX)]
    copies: Annotated[int, Uint(COPIES_MAX)] = 0


@message(FrameType.DROP, optional_count=1)
@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(Message):
    """Hides everything stored in a namespace, at once; END.value is the generation that begins.

    Attributes:
        generation: begin this one, and hide nothing where it has begun; 0 begins the next one.
    """

    namespace: Digest
    generation: Annotated[int, Uint(NAMESPACE_GENERATION_MAX)] = 0


@message(FrameType.VIEW)
@dataclass(frozen=True, slots=True, kw_only=True)
class ViewRequest(Message):
    """Asks for the view, if it is newer than `known_epoch`."""

    known_epoch: U64


@message(FrameType.VIEW_REPLY)
@dataclass(frozen=True, slots=True, kw_only=True)
class ViewReply(Message):
    """The view (encoded by the cluster room), empty when the client knows it already."""

    epoch: U64
    view: Annotated[bytes, Blob(count_max=VIEW_BYTES_MAX)]


# --- lookups --------------------------------------------------------------------------------------------------------
@message(FrameType.MATCH, optional_count=1)
@dataclass(frozen=True, slots=True, kw_only=True)
class Match(Message):
    """Which keys are stored?

    Attributes:
        touch: counts as use, which keeps the records from eviction.
        count: counts in the hit rate (case 60: lookups, not loads).
        pin_ttl_ns: 0 for no pin.
        group: 16 bytes that those share who ask together and must be told the same; empty asks alone.
    """

    namespace: Digest
    keys: Keys
    touch: Flag = True
    count: Flag = True
    pin_ttl_ns: Annotated[int, Uint(PIN_TTL_NS_MAX)] = 0
    group: Annotated[bytes, Blob(unit=GROUP_BYTES, count_max=1)] = b""


@message(FrameType.MATCH_REPLY)
@dataclass(frozen=True, slots=True, kw_only=True)
class MatchReply(Message):
    """One status per key (0 stored, else MissReason), and the pin.

    Attributes:
        pinned: False when a bound on pins was reached (or none was asked for).
        hit_bytes: payload of all hits.
        load_ns: estimate of reading all hits.
    """

    statuses: Statuses
    pin_id: U64
    pinned: Flag
    hit_bytes: U64
    load_ns: U64


@message(FrameType.UNPIN)
@dataclass(frozen=True, slots=True, kw_only=True)
class Unpin(Message):
    """Gives a pin back; an unknown one is ignored."""

    pin_id: U64


@message(FrameType.WAIT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(Message):
    """Answers with END once no key is pending any more, or after `deadline_ns`."""

    namespace: Digest
    keys: Keys
    deadline_ns: Remaining


@message(FrameType.DELETE)
@dataclass(frozen=True, slots=True, kw_only=True)
class Delete(Message):
    """Deletes keys; END's status is 0 for a deleted one, ABSENT otherwise."""

    namespace: Digest
    keys: Keys


@message(FrameType.PREFETCH)
@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch(Message):
    """Bring keys into node memory; END.value says how many are on their way."""

    namespace: Digest
    keys: Keys


# --- reads ----------------------------------------------------------------------------------------------------------
@message(FrameType.GET)
@dataclass(frozen=True, slots=True, kw_only=True)
class Get(Message):
    """Read records: DATA frames with slices in any order, then END with one status per key.

    Attributes:
        range_counts: how many ranges each key has (u32 each); empty when all keys have the same `ranges`.
        ranges: (u64 offset, u64 length) each; empty with empty `range_counts` means whole records.
        content_ids: 16 bytes per key, zeros for any copy; or empty.
        credit_bytes: reserved for transports that write into the client's memory by themselves: payload that may be on
            its way unacknowledged, 0 for no limit. Over TCP flow control does the work, and the node ignores it.
        accept_pending: also records that were received but are not durable yet.
        verify: the client found these records' bytes wrong. The node checks the copies in its memory before it serves
            them, drops a bad one and reads the drive; records that are not durable yet are PENDING.
    """

    namespace: Digest
    keys: Keys
    deadline_ns: Remaining
    range_counts: Annotated[bytes, Blob(unit=4, count_max=BATCH_ITEMS_MAX)] = b""
    ranges: Annotated[bytes, Blob(unit=RANGE_BYTES, count_max=RANGES_MAX)] = b""
    content_ids: ContentIds = b""
    credit_bytes: U64 = 0
    accept_pending: Flag = False
    verify: Flag = False

    def validate(self) -> None:
        if not self.content_ids and not self.range_counts:
            return
        count = len(self.keys) // DIGEST_BYTES
        expect_count("GET.content_ids", self.content_ids, ID_BYTES, count, or_empty=True)
        expect_count("GET.range_counts", self.range_counts, 4, count, or_empty=True)


# --- writes ---------------------------------------------------------------------------------------------------------
@message(FrameType.OFFER)
@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Message):
    """Write records: GRANT frames say which payloads to send, RESULT frames how each item ended, END closes.

    Attributes:
        durability: engine Durability, 0 commit, 1 power.
        wait: 0: an item ends as RECEIVED, readable from memory; 1: as STORED, durable.
        lengths: u32 per key.
        block_bytes: u32 per key, or one for all.
        crc_tables: the CRC words of all items, in order: ceil(length / block) words each.
        run_heads: 32 bytes per key, or one for all, or empty (unknown).
        parents: 32 bytes per key, or empty (unknown).
        positions: u32 per key, or empty (keyed without one).
        parts: u8 per key, or empty (all dense).
        content_ids: 16 bytes per key to keep (repair), or empty.
        volatile_ttl_ns: 0 for the drive; else these records live in RAM only, for so long.
        inline: the payloads of all items follow in this frame, concatenated.
    """

    namespace: Digest
    keys: Keys
    lengths: Items
    block_bytes: Items
    crc_tables: Crcs
    deadline_ns: Remaining
    durability: Annotated[int, Uint(1)] = 0
    wait: Annotated[int, Uint(1)] = 1
    run_heads: Digests = b""
    parents: Digests = b""
    positions: Items = b""
    parts: Annotated[bytes, Blob(count_max=BATCH_ITEMS_MAX)] = b""
    content_ids: ContentIds = b""
    volatile_ttl_ns: Annotated[int, Uint(VOLATILE_TTL_NS_MAX)] = 0
    inline: Flag = False

    def validate(self) -> None:
        _check_batch("OFFER", self)


@message(FrameType.GRANT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Grant(Message):
    """Send the payloads of these items (u32 each), whole items in this order, as DATA frames."""

    items: Items


@message(FrameType.RESULT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Message):
    """How items ended: STORED, RECEIVED, EXISTS or a RefusedReason; each item of an offer ends exactly once.

    Attributes:
        content_ids: 16 bytes per item, zeros where it was not stored; or empty.
    """

    items: Items
    statuses: Statuses
    content_ids: ContentIds = b""
    details: Details = ""

    def validate(self) -> None:
        count = len(self.items) // 4
        expect_count("RESULT.statuses", self.statuses, 1, count)
        expect_count("RESULT.content_ids", self.content_ids, ID_BYTES, count, or_empty=True)


@message(FrameType.WRITER_OPEN, optional_count=1)
@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOpen(Message):
    """Opens writers: an OFFER whose checksums and payload come later, slice by slice. Fields as in Offer.

    Attributes:
        opening_id: 16 random bytes that stay the same when the client asks again, since no answer came: what was opened
            for them before is forgotten. Empty is none.
    """

    namespace: Digest
    keys: Keys
    lengths: Items
    block_bytes: Items
    deadline_ns: Remaining
    ttl_ns: Annotated[int, Uint(REQUEST_NS_MAX)] = WRITER_TTL_NS
    run_heads: Digests = b""
    parents: Digests = b""
    positions: Items = b""
    parts: Annotated[bytes, Blob(count_max=BATCH_ITEMS_MAX)] = b""
    volatile_ttl_ns: Annotated[int, Uint(VOLATILE_TTL_NS_MAX)] = 0
    opening_id: Annotated[bytes, Blob(unit=ID_BYTES, count_max=1)] = b""

    def validate(self) -> None:
        _check_batch("WRITER_OPEN", self)


@message(FrameType.WRITER_OPENED)
@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOpened(Message):
    """One writer id (u32) and one status (GRANTED, EXISTS or RefusedReason) per key."""

    writer_ids: Items
    statuses: Statuses
    details: Details = ""


@message(FrameType.WRITER_COMMIT, optional_count=1)
@dataclass(frozen=True, slots=True, kw_only=True)
class WriterCommit(Message):
    """Completes writers: RESULT frames (item = index in `writer_ids`), then END. `crc_tables` as in Offer.

    Attributes:
        content_ids: 16 bytes per writer to keep, so that copies of a record on several targets have the same; zeros let
            the node choose, as does an empty field.
    """

    writer_ids: Items
    crc_tables: Crcs
    deadline_ns: Remaining
    durability: Annotated[int, Uint(1)] = 0
    wait: Annotated[int, Uint(1)] = 1
    content_ids: ContentIds = b""

    def validate(self) -> None:
        count = len(self.writer_ids) // 4
        expect_count("WRITER_COMMIT.content_ids", self.content_ids, ID_BYTES, count, or_empty=True)


@message(FrameType.WRITER_ABORT)
@dataclass(frozen=True, slots=True, kw_only=True)
class WriterAbort(Message):
    """Forgets writers; unknown ones are ignored."""

    writer_ids: Items


# --- administration -------------------------------------------------------------------------------------------------
@message(FrameType.ADMIN)
@dataclass(frozen=True, slots=True, kw_only=True)
class Admin(Message):
    """A verb of the supervisor, on its own Unix socket only; `arguments` is a msgpack map (codec.pack_plain)."""

    verb: Annotated[str, Text(64)]
    arguments: Annotated[bytes, Blob(count_max=ADMIN_BYTES_MAX)]


@message(FrameType.ADMIN_REPLY)
@dataclass(frozen=True, slots=True, kw_only=True)
class AdminReply(Message):
    """What the verb gave, as a msgpack value (codec.unpack_plain)."""

    value: Annotated[bytes, Blob(count_max=ADMIN_BYTES_MAX)]


MESSAGES: Final[dict[FrameType, type[Message]]] = {
    kind.TYPE: kind
    for kind in (
        *(
            Hello,
            Welcome,
            Ping,
            Pong,
            ErrorReply,
            End,
            Cancel,
            Manifest,
            Drop,
            ViewRequest,
            ViewReply,
            Match,
            MatchReply,
        ),
        *(
            Unpin,
            Wait,
            Delete,
            Prefetch,
            Get,
            Offer,
            Grant,
            Result,
            WriterOpen,
            WriterOpened,
            WriterCommit,
            WriterAbort,
        ),
        *(Admin, AdminReply),
    )
}
"""Every frame type with a message body; DATA and WRITER_WRITE have slices instead."""


def _check_batch(what: str, batch: Any) -> None:
    """Counts of the parallel blobs of a batch of writes. What is wrong with one item alone is that item's refusal."""
    count = len(batch.keys) // DIGEST_BYTES
    expect_count(f"{what}.lengths", batch.lengths, 4, count)
    expect_count(f"{what}.block_bytes", batch.block_bytes, 4, count, or_one=True)
    expect_count(f"{what}.run_heads", batch.run_heads, DIGEST_BYTES, count, or_empty=True, or_one=True)
    expect_count(f"{what}.parents", batch.parents, DIGEST_BYTES, count, or_empty=True)
    expect_count(f"{what}.positions", batch.positions, 4, count, or_empty=True)
    expect_count(f"{what}.parts", batch.parts, 1, count, or_empty=True)
    if len(batch.block_bytes) // 4 == 0 and count:
        raise InvalidRequest(
            f"{what}.block_bytes is empty; it needs one entry (at least {CHECKSUM_BYTES_MIN}) for all keys"
        )


assert PAYLOAD_BYTES_MAX <= U32_MAX, "lengths travel as u32"
assert FRAME_PAYLOAD_BYTES_MAX <= U32_MAX

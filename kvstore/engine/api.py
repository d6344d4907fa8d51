"""What the data plane sees of the engine: requests, tickets and callbacks of one single-threaded store.

Nothing here blocks. Callbacks run on the thread that calls `Engine` methods or `Engine.poll`, sometimes before the call
that registered them returns. Times are monotonic nanoseconds passed in by the owner of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from kvstore.limits import DIGEST_BYTES, WRITER_TTL_NS
from kvstore.types.flow import FlowClass
from kvstore.types.results import Exists, MissReason, Refused, Stored

POSITION_NONE = 0xFFFF_FFFF
"""Position of a chunk that was keyed without one."""


class Durability(IntEnum):
    """What `durable` promises: `COMMIT` survives kill -9 of the node, `POWER` also a power cut (fdatasync)."""

    COMMIT = 0
    POWER = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceRef:
    """A namespace as this engine knows it. `salt` (16 bytes) hides older generations and other namespaces."""

    id: int
    digest: bytes
    generation: int
    salt: bytes
    tenant: str


class ReadyItem(Protocol):
    """Verified bytes of one record (but for `ReadSpec.reader_checks`), in node memory.

    Valid until `release`, which must be called exactly once.

    Attributes:
        index: position of the record in the request.
        record_bytes: payload length of the whole record.
        block_bytes: checksum block; `offset` is a multiple of it.
        offset: where in the record `data` begins.
        data: whole checksum blocks (the record's last block may be short). Empty for a record of 0 bytes.
        crcs: one u32 LE per block of `data`.
        content_id: 16 bytes that tell this copy of the record from any other writer's.
        last: no further piece of this record will follow (ranges can give several pieces).
    """

    index: int
    record_bytes: int
    block_bytes: int
    offset: int
    data: memoryview
    crcs: bytes
    content_id: bytes
    last: bool

    def release(self) -> None: ...


class Parcel(Protocol):
    """Verified whole records (but for `ReadSpec.reader_checks`) in node memory, packed for the wire.

    Valid until `release`, to be called exactly once.

    Attributes:
        body: of the DATA frame that carries them, whose slices are `count`.
        payload: their bytes, in that order, none empty; `payload_bytes` in all.
    """

    body: bytes
    count: int
    payload: list[memoryview]
    payload_bytes: int

    @property
    def indices(self) -> Sequence[int]:
        """Positions of the records in the request, or `ReadSpec.items`."""

    def release(self) -> None: ...


class ParcelSource(Protocol):
    """Gives what has landed, and is checked only now: ask right before it is sent."""

    def take(self) -> Parcel | None:
        """The next parcel, each record of which has ended with it; None when nothing (more) has landed well.

        Calls `missed` and `finished` of the sink, as the case may be.
        """


class ReadSink(Protocol):
    """Where a read delivers. Each record ends with `ready(last=True)`, one `missed` or a parcel; then `finished` once.

    A sink that has a method `landed(source: ParcelSource)` may be given parcels: it is called when one has landed.
    """

    def ready(self, item: ReadyItem) -> None: ...

    def missed(self, index: int, reason: MissReason) -> None: ...

    def finished(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSpec:
    """A batch of reads.

    Attributes:
        namespace: as returned by `Engine.namespace`.
        keys: record keys, n * 32 bytes.
        ranges: None for whole records; one inner sequence of (offset, length) for all records, or one per record.
        content_ids: n * 16 bytes; all zeros means any. Another content id is a Miss(ABSENT).
        deadline_ns: monotonic; records not ready by then are Miss(DEADLINE).
        accept_pending: also serve records that are received but not durable yet.
        verify: a client found these records' bytes wrong: memory is checked before it is served. A copy that does not
            match its checksums is dropped, and the record read from the drive.
        places: memory of the client for each record, pages of its own. A record that is as long as its place may be
            read from the drive straight into it, and is delivered there: its payload is not verified then, since the
            client can change it at any time; the client's own check is what counts. Whatever the outcome, such a read
            may go on in the place after `cancel` and after the deadline.
        reader_checks: the reader sums whole records himself, and asks once more, with `verify`, where they are wrong:
            their payload is not summed here where nobody else gets it, and no cache. Headers are checked always.
        items: what a parcel calls each record, where that is not its position here: this is the share of a batch.
    """

    namespace: NamespaceRef
    keys: bytes | memoryview
    flow: FlowClass
    deadline_ns: int
    ranges: Sequence[Sequence[tuple[int, int]]] | None = None
    content_ids: bytes | None = None
    accept_pending: bool = False
    verify: bool = False
    places: Sequence[memoryview] | None = None
    reader_checks: bool = False
    items: Sequence[int] | None = None


class ReadHandle(Protocol):
    @property
    def staged_bytes(self) -> int:
        """Memory that is on its way for it, or with the sink and not released."""

    def cancel(self) -> None:
        """Stop; `missed(DEADLINE)` is not sent for the rest, `finished` is not called. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutSpec:
    """One record to write.

    Attributes:
        key: record key, 32 bytes.
        position: of its chunk in the chain, or POSITION_NONE.
        run_head, parent: 32 bytes each, zeros where unknown.
        part: 0 for the dense record, 1 + index of the sparse part otherwise.
        payload_bytes: exact length, 0..limits.PAYLOAD_BYTES_MAX.
        block_bytes: checksum block.
        crc_table: u32 LE per block; None where the words come with the slices, and for a streaming writer, which
            brings it at commit.
        volatile_ttl_ns: 0 for SSD; else the record lives in RAM only, for so long.
        content_id: zeros, or the id to keep (repair).
        client_id: who writes, for bounds and the owner ttl.
        owner_ttl_ns: a streaming put ends when no slice has come for so long.
    """

    namespace: NamespaceRef
    key: bytes
    payload_bytes: int
    block_bytes: int
    crc_table: bytes | None
    flow: FlowClass
    deadline_ns: int
    client_id: bytes
    position: int = POSITION_NONE
    run_head: bytes = bytes(32)
    parent: bytes = bytes(32)
    part: int = 0
    durability: Durability = Durability.COMMIT
    volatile_ttl_ns: int = 0
    content_id: bytes = bytes(16)
    owner_ttl_ns: int = WRITER_TTL_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class PutColumns:
    """Whole dense records of one shape that a client puts together, for the drive; their CRC words come with the bytes.

    Attributes:
        keys: record keys, n * 32 bytes.
        payload_bytes: of each record, above 0.
        block_bytes: checksum block of all.
        positions: of each as in `PutSpec`; empty where none has one.
        run_heads, parents: 32 bytes for each record, or for all of them, or empty where unknown.
    """

    namespace: NamespaceRef
    keys: bytes
    payload_bytes: int
    block_bytes: int
    flow: FlowClass
    deadline_ns: int
    client_id: bytes
    positions: Sequence[int]
    run_heads: bytes
    parents: bytes

    def spec(self, index: int) -> PutSpec:
        """One of the records."""
        at = index * DIGEST_BYTES
        return PutSpec(
            namespace=self.namespace,
            key=self.keys[at : at + DIGEST_BYTES],
            payload_bytes=self.payload_bytes,
            block_bytes=self.block_bytes,
            crc_table=None,
            flow=self.flow,
            deadline_ns=self.deadline_ns,
            client_id=self.client_id,
            position=self.positions[index] if self.positions else POSITION_NONE,
            run_head=digest_at(self.run_heads, index),
            parent=digest_at(self.parents, index),
        )


def digest_at(digests: bytes, index: int) -> bytes:
    """The digest of one record among `PutColumns.run_heads` or `parents`; zeros where it is unknown."""
    if len(digests) == DIGEST_BYTES:
        return digests
    at = index * DIGEST_BYTES
    return digests[at : at + DIGEST_BYTES] if digests else bytes(DIGEST_BYTES)


class PutParcel(Protocol):
    """Granted records of `PutColumns` that go on together, with memory for all. Ends with `commit` or `abort`.

    Attributes:
        first: index of its first record among the columns.
        count: of its records.
        missing: how many of them have not come whole; the owner counts it down.
        buffers: memory of each, to be received into.
    """

    first: int
    count: int
    missing: int
    buffers: list[memoryview]

    def arrived(self, index: int, offset: int, length_bytes: int, crcs: bytes) -> None:
        """As `PutTicket.arrived`; `index` is the record's among the columns."""

    def came(self, index: int, tables: bytes, count: int, *, are_good: bool) -> None:
        """All bytes of `count` records from `index` on are there, and `tables` are their CRC tables.

        `are_good`: the caller has checked them, and they are right; else they are checked now.
        """

    def whole(self) -> list[bool]:
        """Which of its records have come whole."""

    def cut(self, count: int) -> PutParcel:
        """A parcel of its own for its first `count` records, less than all; this one keeps the others."""

    def filled(self) -> bool:
        """All bytes of all records are there. False where some do not match their checksums: single records tell which.

        Raises ChecksumMismatch (the parcel is aborted) for a parcel of one record that does not match.
        """

    def commit(
        self, *, on_received: Callable[[int, int], None] | None, on_done: Callable[[int, int, bytes | Refused], None]
    ) -> None:
        """After `filled`: make the records visible. Both are called with index and count of records side by side.

        `on_done` also gets their content ids, 16 bytes each, where they are stored. It comes once for each record, but
        perhaps for some before others.
        """

    def abort(self) -> None:
        """Forget it; memory comes back. Idempotent, harmless after commit."""


class PutTicket(Protocol):
    """A granted put: room on disk and (not streaming) in memory. Ends with `commit` or `abort`.

    `buffer` is the whole payload's memory, to be received into; None for a streaming ticket.
    """

    buffer: memoryview | None

    def arrived(self, offset: int, length_bytes: int, crcs: bytes) -> None:
        """So many bytes of the slice at `offset` are in `buffer`: they are checked as far as their blocks are whole.

        Slices come in order. `crcs` has the words of the slice's blocks, where the spec has no table; it may be left
        out where it has. What does not match is told by `filled`.
        """

    def filled(self) -> None:
        """All bytes of `buffer` are there. Raises ChecksumMismatch (the ticket is aborted) if the table disagrees."""

    def slice_buffer(self, length_bytes: int, on_memory: Callable[[memoryview | None], None]) -> None:
        """Streaming: memory for one slice; calls back with None when none came free for the owner ttl."""

    def slice_filled(self, offset: int, data: memoryview, crcs: bytes) -> None:
        """Streaming: `data` (from slice_buffer) belongs at `offset`, a multiple of block_bytes.

        Raises ChecksumMismatch.
        """

    def commit(
        self,
        *,
        crc_table: bytes | None = None,
        content_id: bytes | None = None,
        durability: Durability | None = None,
        on_received: Callable[[], None] | None = None,
        on_done: Callable[[Stored | Exists | Refused], None],
    ) -> None:
        """Make it visible: `on_received` when those who accept pending can read it, `on_done` when it is durable.

        `content_id` is one that is to be kept, in place of that of the spec.
        """

    def abort(self, *, orphaned: bool = False) -> None:
        """Forget it; room and memory come back. Idempotent, harmless after commit. `orphaned`: counted as such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchOutcome:
    """Answer of `match`: one status byte per key (0 = hit, else MissReason), and what was pinned."""

    statuses: bytes
    pin_id: int
    pinned: bool
    hit_bytes: int
    load_ns: int


class CachedItem(Protocol):
    """A verified record in memory, which the caller holds until `release`.

    Attributes:
        facts: `record_bytes`, `block_bytes`, `crcs` and `content_id` of it.
        view: its bytes, which stay as they are until `release`.
        reply: what the data plane prepared for sending it; empty at first. Means nothing to the engine.
    """

    reply: bytes

    @property
    def facts(self) -> CachedFacts: ...

    @property
    def view(self) -> memoryview: ...

    def hold(self) -> None: ...

    def release(self) -> None: ...


class CachedFacts(Protocol):
    """See `CachedItem`."""

    @property
    def record_bytes(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def crcs(self) -> bytes: ...

    @property
    def content_id(self) -> bytes: ...


class Engine(Protocol):
    """The store of one drive."""

    def namespace(self, digest: bytes) -> NamespaceRef | None: ...

    def add_namespace(self, manifest: bytes, *, copies: int = 0) -> NamespaceRef:
        """Register (idempotent), logged durably in the background.

        Args:
            copies: that its records are to have in a cluster, from now on; 0 says nothing.

        Raises InvalidRequest when malformed or over NAMESPACES_MAX.
        """

    def drop_namespace(self, ref: NamespaceRef, on_done: Callable[[], None], *, generation: int = 0) -> None:
        """Hide all that is stored in a namespace, durably.

        Args:
            generation: to begin, and nothing is done where it has begun; 0 begins the next one.
        """

    def match(
        self,
        ref: NamespaceRef,
        keys: bytes | memoryview,
        *,
        now_ns: int,
        touch: bool,
        pin_ttl_ns: int = 0,
        client_id: bytes = b"",
    ) -> MatchOutcome: ...

    def unpin(self, pin_id: int, *, client_id: bytes) -> None:
        """End a pin of this client; any other's, and one that is gone, is passed over."""

    def read(self, spec: ReadSpec, sink: ReadSink, *, now_ns: int) -> ReadHandle: ...

    def take_cached(
        self, ref: NamespaceRef, keys: bytes, *, now_ns: int, bytes_max: int
    ) -> Sequence[CachedItem] | None:
        """The first of n * 32 bytes of keys, as whole records of at most `bytes_max` together, SLICES_PER_FRAME_MAX of
        them at most; if all of the keys lie in memory, and none is longer than SLICE_BYTES_MAX or `bytes_max`.

        The quick way for reads, counted as `read` counts. None says only "use `read`"; nothing is held then.
        """

    def look_cached(self, digest: bytes, key: bytes, *, now_ns: int) -> CachedItem | None:
        """The record if it lies in memory and has 1 to SLICE_BYTES_MAX bytes, counted as `read` counts; else None.

        Not held: it is the caller's until the engine is called next, or from `hold` to `release`.
        """

    def open_put(
        self,
        spec: PutSpec,
        on_grant: Callable[[PutTicket | Exists | Refused], None],
        *,
        streaming: bool = False,
    ) -> None:
        """Ask for a ticket. A second put of a key in progress waits for the first and then gets Exists, or the ticket
        if that failed."""

    def open_parcels(self, columns: PutColumns, first: int, stop: int) -> Sequence[PutParcel]:
        """Grants for the records from `first` on, before `stop`, in order: for all, or for as many as memory allows.

        The quick way for what is usual. None at all says only "use `open_put`": a key is there already or on its way,
        a quota is near, others wait for memory, or the drive does not take it.
        """

    def wait(
        self, ref: NamespaceRef, keys: bytes, deadline_ns: int, on_done: Callable[[bytes], None]
    ) -> Callable[[], None]:
        """Statuses once no key is pending any more, or at the deadline; calling what it returns ends the wait soon."""

    def delete(self, ref: NamespaceRef, keys: bytes, on_done: Callable[[bytes], None]) -> None:
        """Logged and synced before `on_done(statuses)`; status 0 deleted, ABSENT otherwise.

        A put that was received before is awaited and deleted too; one that was not may still become visible.
        """

    def prefetch(self, ref: NamespaceRef, keys: bytes, *, now_ns: int) -> int: ...

    def client_gone(self, client_id: bytes) -> None:
        """A client's last connection closed: its pins and unfinished puts end (writers after their owner ttl)."""

    def poll(self, now_ns: int) -> None:
        """Move everything that can move: completions, timers, queued grants. Call when a fileno is readable or a timer
        is due."""

    def filenos(self) -> Sequence[int]: ...

    def next_timer_ns(self) -> int | None: ...

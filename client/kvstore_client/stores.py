"""Writing records to one target: an offer, the payload of what was granted with its checksums, results."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence

from kvstore.cluster.view import TargetId
from kvstore.errors import (
    DeadlineExceeded,
    Denied,
    InvalidRequest,
    KVStoreError,
    NoSpace,
    Overloaded,
    QuotaExceeded,
    StaleView,
    Unavailable,
    UnknownNamespace,
)
from kvstore.limits import (
    DIGEST_BYTES,
    FRAME_AIM_BYTES,
    FRAME_BODY_BYTES_MAX,
    PLACES_PER_CALL_MAX,
    RETRIES_PER_CALL_MAX,
    SLICE_BYTES_MAX,
    SLICES_PER_FRAME_MAX,
)
from kvstore.types.checksum import block_count, crc_table_far, crc_table_fragments
from kvstore.types.flow import FlowClass
from kvstore.types.results import RefusedReason
from kvstore.wire.header import FrameType
from kvstore.wire.messages import ID_BYTES, U32_MAX, End, Feature, Grant, Manifest, Offer, Result
from kvstore.wire.shared import offer_from
from kvstore.wire.slices import NO_CONTENT_ID, Slice, encode_slices
from kvstore_client.connection import Connection, Steps
from kvstore_client.incoming import OPEN
from kvstore_client.planner import split_by_weight
from kvstore_client.regions import Region
from kvstore_client.rounds import Job

_BODY_BYTES = FRAME_BODY_BYTES_MAX - 4096
_ITEM_BYTES = 3 * DIGEST_BYTES + 4 * 4 + 1 + ID_BYTES  # of an item in an offer, its CRC words aside
_U32 = struct.Struct("<I")
_UNKNOWN_NAMESPACE = int(RefusedReason.UNKNOWN_NAMESPACE)


class OutgoingRecord:
    """State of one record of a write.

    Attributes:
        key, run_head, parent: 32 bytes each, zeros where unknown.
        position: In its chain; U32_MAX when unknown.
        part: 0 for the dense record, 1 + index of the sparse part otherwise.
        volatile_ttl_ns: 0 for the drive.
        own_id: Content id for the node to keep, the same for all copies; zeros let the node choose one.
        region: The caller's memory of the item.
        base_bytes: Where in the region this record begins.
        length_bytes, block_bytes: Of the record.
        status: OPEN, an ItemStatus or a RefusedReason code.
        content_id: Of the stored copy, zeros where there is none.
        detail: For a person.
        was_offered: An offer of it may have reached the node, so a break leaves its outcome unknown.
    """

    __slots__ = (
        "_shared_crcs",
        "base_bytes",
        "block_bytes",
        "content_id",
        "detail",
        "key",
        "length_bytes",
        "own_id",
        "parent",
        "part",
        "position",
        "region",
        "run_head",
        "status",
        "volatile_ttl_ns",
        "was_offered",
    )

    def __init__(
        self,
        *,
        key: bytes,
        run_head: bytes,
        parent: bytes,
        position: int,
        part: int,
        volatile_ttl_ns: int,
        region: Region,
        base_bytes: int,
        length_bytes: int,
        block_bytes: int,
        shared_crcs: dict[tuple[int, int], bytes] | None = None,
    ) -> None:
        self._shared_crcs = shared_crcs
        self.key = key
        self.run_head = run_head
        self.parent = parent
        self.position = position
        self.part = part
        self.volatile_ttl_ns = volatile_ttl_ns
        self.region = region
        self.base_bytes = base_bytes
        self.length_bytes = length_bytes
        self.block_bytes = block_bytes
        self.own_id = NO_CONTENT_ID
        self.status = OPEN
        self.content_id = NO_CONTENT_ID
        self.detail = ""
        self.was_offered = False

    @property
    def memory(self) -> memoryview | None:
        """The record's bytes, if they lie in one piece of the caller's memory."""
        views = self.region.views
        return views[0][self.base_bytes : self.base_bytes + self.length_bytes] if len(views) == 1 else None

    @property
    def pieces(self) -> list[memoryview]:
        """The record's bytes, in order."""
        return self.cut(0, self.length_bytes)

    @property
    def table_bytes(self) -> int:
        """Length of its CRC table."""
        return 4 * block_count(self.length_bytes, self.block_bytes)

    def cut(self, offset: int, length_bytes: int) -> list[memoryview]:
        """Views of a part of it."""
        return self.region.cut(self.base_bytes + offset, length_bytes) if length_bytes else []

    def crcs(self, offset: int, length_bytes: int, views: list[memoryview]) -> bytes:
        """CRC words of a part that begins at a block, and lies in `views`. Of several copies the first makes them."""
        known = self._shared_crcs
        if known is None:
            if len(views) == 1:
                return crc_table_far(views[0], self.block_bytes)
            return crc_table_fragments(views, self.block_bytes) if views else b""
        words = known.get((offset, length_bytes))
        if words is None:
            first, behind = 4 * (offset // self.block_bytes), 4 * block_count(offset + length_bytes, self.block_bytes)
            whole = known.get((0, self.length_bytes))
            words = whole[first:behind] if whole is not None else crc_table_fragments(views, self.block_bytes)
            known[offset, length_bytes] = words
        return words

    def finish(self, status: int, *, content_id: bytes = NO_CONTENT_ID, detail: str = "") -> None:
        """How it ended."""
        self.status = status
        self.content_id = content_id
        self.detail = detail


class StoreJob(Job):
    """Writes the records of one target. Puts are idempotent, so after a break all that is open is offered again.

    Attributes:
        records: As given.
        is_first_word: The manifest goes first: it says how many copies the namespace wants, and is short.
    """

    __slots__ = (
        "_asked",
        "_durability",
        "_is_taken",
        "_knows_manifest",
        "_manifest",
        "_namespace",
        "_sends_crcs",
        "_wait",
        "is_first_word",
        "records",
    )

    def __init__(
        self,
        *,
        target: TargetId,
        flow: FlowClass,
        deadline_ns: int,
        namespace: bytes,
        manifest: Manifest,
        records: Sequence[OutgoingRecord],
        durability: int,
        wait: int,
    ) -> None:
        """
        Args:
            namespace: Digest.
            manifest: Sent when the node does not know the namespace.
            durability: 0 survives kill -9 of the node, 1 also a power cut.
            wait: 0 until received, 1 until durable.
        """
        super().__init__(target=target, flow=flow, deadline_ns=deadline_ns, retries_max=RETRIES_PER_CALL_MAX)
        self._namespace = namespace
        self._manifest = manifest
        self.records = records
        self._durability = durability
        self._wait = wait
        self._knows_manifest = self.is_first_word = False
        self._is_taken = False  # the node has granted or ended items of the present offer
        self._sends_crcs = False  # with the data, not with the offer
        self._asked: Sequence[OutgoingRecord] = ()

    def wants_another_try(self) -> bool:
        """After a break, while records are open."""
        return isinstance(self.failure, Unavailable | Overloaded | StaleView) and any(
            one.status == OPEN for one in self.records
        )

    def run(self, connection: Connection) -> Steps:
        """Offers what is open; sends the manifest and offers again what the node refused for lack of it."""
        self._knows_manifest = False
        if self.is_first_word:
            yield from connection.ask(self._manifest, End)
        for part in self._parts([record for record in self.records if record.status == OPEN], connection):
            try:
                yield from self._offer(connection, part)
            except UnknownNamespace:
                if self._knows_manifest:
                    raise
            unknown = [record for record in part if record.status in (OPEN, _UNKNOWN_NAMESPACE)]
            if unknown and not self._knows_manifest:
                for record in unknown:
                    record.finish(OPEN)
                    record.was_offered = False  # the node has nothing of a namespace that it does not know
                yield from connection.ask(self._manifest, End)
                self._knows_manifest = True
                yield from self._offer(connection, unknown)

    def _parts(self, records: list[OutgoingRecord], connection: Connection) -> Iterator[list[OutgoingRecord]]:
        """Batches that the node takes in one offer: one ttl each, within its item and body limits."""
        assert connection.welcome is not None
        items_max = connection.welcome.batch_items_max
        if connection.regions is not None:
            items_max = min(items_max, PLACES_PER_CALL_MAX)
        for ttl_ns in dict.fromkeys(record.volatile_ttl_ns for record in records):
            same = [record for record in records if record.volatile_ttl_ns == ttl_ns]
            weights = [_ITEM_BYTES + record.table_bytes for record in same]
            for part in split_by_weight(weights, items_max=items_max, weight_max=_BODY_BYTES):
                yield same[part.start : part.stop]

    def _offer(self, connection: Connection, records: list[OutgoingRecord]) -> Steps:
        were_offered = [record.was_offered for record in records]
        self._is_taken = False
        try:
            yield from self._exchange(connection, records)
        except KVStoreError:
            if connection.is_idle and not self._is_taken:
                # the node refused the offer as a whole: what is not known yet is not known from before
                for record, was_offered in zip(records, were_offered, strict=True):
                    record.was_offered = was_offered
            raise

    def _exchange(self, connection: Connection, records: list[OutgoingRecord]) -> Steps:
        regions = connection.regions
        if regions is None:
            yield from self._send_offer(connection, records, b"")
            return
        found, rest = yield from regions.split(connection, records, range(len(records)))
        has_ended = False
        try:
            yield from self._send_offer(connection, records, b"" if rest else found.blob)
            has_ended = True
        finally:
            regions.release(found, has_ended=has_ended)

    def _send_offer(self, connection: Connection, records: list[OutgoingRecord], places: bytes) -> Steps:
        """One offer, to its end; `places` says where its records lie, if the node shall fetch them there."""
        assert connection.welcome is not None
        self._asked = records
        total = sum(record.length_bytes for record in records)
        inline = not places and total <= connection.welcome.inline_put_bytes_max
        self._sends_crcs = not inline and not places and Feature.DATA_CRCS in Feature(connection.welcome.features)
        request = self._request(records, inline=inline)
        if places:
            request = offer_from(request, places)
        for record in records:
            record.was_offered = True
        yield from connection.start(
            request,
            payload=[view for record in records for view in record.cut(0, record.length_bytes)] if inline else (),
            payload_bytes=total if inline else 0,
        )
        while True:
            for frame in (yield from connection.receive()):
                self._is_taken = True
                if frame.type is FrameType.GRANT:
                    yield from self._send(connection, connection.decode(Grant, frame))
                elif frame.type is FrameType.RESULT:
                    self._take_results(connection.decode(Result, frame))
                else:
                    connection.decode(End, frame)
                    return

    def _request(self, records: list[OutgoingRecord], *, inline: bool) -> Offer:
        left_ns = self.deadline_ns - time.monotonic_ns()
        if left_ns <= 0:
            raise DeadlineExceeded("the call's deadline passed before the offer was sent")
        blocks = {record.block_bytes for record in records}
        parts = bytes([record.part for record in records])
        positions = [record.position for record in records]
        return Offer(
            namespace=self._namespace,
            keys=b"".join([record.key for record in records]),
            lengths=_pack([record.length_bytes for record in records]),
            block_bytes=_pack(blocks if len(blocks) == 1 else [record.block_bytes for record in records]),
            crc_tables=b""
            if self._sends_crcs
            else b"".join(
                [record.crcs(0, record.length_bytes, record.cut(0, record.length_bytes)) for record in records]
            ),
            deadline_ns=left_ns - left_ns // 20,
            durability=self._durability,
            wait=self._wait,
            run_heads=b"".join([record.run_head for record in records]),
            parents=b"".join([record.parent for record in records]),
            positions=b"" if positions[0] == U32_MAX and len(set(positions)) == 1 else _pack(positions),
            parts=parts if any(parts) else b"",
            content_ids=b"".join([one.own_id for one in records])
            if any(one.own_id is not NO_CONTENT_ID for one in records)
            else b"",
            volatile_ttl_ns=records[0].volatile_ttl_ns,
            inline=inline,
        )

    def _send(self, connection: Connection, grant: Grant) -> Steps:
        """The payloads of the granted items, whole items in the order of the grant."""
        items = [at for (at,) in _U32.iter_unpack(grant.items)]
        if any(at >= len(self._asked) for at in items):
            raise Unavailable(f"node at {connection.address} granted an item that was not offered")
        for slices, views, length in _data_frames(items, self._asked, with_crcs=self._sends_crcs):
            yield from connection.send_data(
                encode_slices(slices), flags=len(slices), payload=views, payload_bytes=length
            )

    def _take_results(self, result: Result) -> None:
        details = result.details.split("\n") if result.details else []
        for index, (at,) in enumerate(_U32.iter_unpack(result.items)):
            if at >= len(self._asked):
                raise Unavailable(f"the node told the outcome of item {at}; {len(self._asked)} were offered")
            content_id = result.content_ids[index * ID_BYTES : (index + 1) * ID_BYTES] or NO_CONTENT_ID
            detail = details[index] if index < len(details) else ""
            self._asked[at].finish(result.statuses[index], content_id=content_id, detail=detail)


def refusal_of(job: Job, record: OutgoingRecord) -> tuple[RefusedReason, str]:
    """The reason and detail for a record that is open although its job has ended for good."""
    failure = job.failure
    detail = str(failure) if failure is not None else "the node ended the offer without telling this item's outcome"
    if record.was_offered:
        return RefusedReason.OUTCOME_UNKNOWN, detail
    if isinstance(failure, Denied):
        return RefusedReason.DENIED, detail
    if isinstance(failure, UnknownNamespace):
        return RefusedReason.UNKNOWN_NAMESPACE, detail
    if isinstance(failure, InvalidRequest):
        return RefusedReason.INVALID, detail
    if isinstance(failure, QuotaExceeded):
        return RefusedReason.QUOTA, detail
    if isinstance(failure, NoSpace):
        return RefusedReason.NO_SPACE, detail
    if isinstance(failure, Overloaded | StaleView):
        return RefusedReason.OVERLOADED, detail
    if isinstance(failure, DeadlineExceeded):
        return RefusedReason.DEADLINE, detail
    return RefusedReason.OVERLOADED, detail


def _data_frames(
    items: Sequence[int], records: Sequence[OutgoingRecord], *, with_crcs: bool
) -> Iterator[tuple[list[Slice], list[memoryview], int]]:
    """DATA frames of about FRAME_AIM_BYTES: a large item in several, small items together.

    What a frame carries is checksummed when it is asked for, right before it is sent: then it is in the CPU's cache.
    """
    slices: list[Slice] = []
    views: list[memoryview] = []
    total = 0
    for item in items:
        record = records[item]
        block, record_bytes = record.block_bytes, record.length_bytes
        step = max(block, SLICE_BYTES_MAX // block * block)
        for offset in range(0, record_bytes or 1, step):
            length = min(step, record_bytes - offset)
            if slices and (total + length > FRAME_AIM_BYTES or len(slices) == SLICES_PER_FRAME_MAX):
                yield slices, views, total
                slices, views, total = [], [], 0
            cut = record.cut(offset, length)
            crcs = record.crcs(offset, length, cut) if with_crcs else b""
            is_last = offset + length == record_bytes
            slices.append(Slice(item, offset, length, 0, is_last, NO_CONTENT_ID, record_bytes, block, crcs))
            views += cut
            total += length
    if slices:
        yield slices, views, total


def _pack(numbers: Sequence[int] | set[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)

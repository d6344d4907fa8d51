"""The verbs of a layer-wise writer: open, write, commit, abort. Generators for a driver; see rounds.py."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.errors import DeadlineExceeded, InvalidRequest, Unavailable, UnknownNamespace
from kvstore.limits import BATCH_ITEMS_MAX, SECOND_NS, SLICE_BYTES_MAX, SLICES_PER_FRAME_MAX, WRITER_TTL_NS
from kvstore.types.flow import FlowClass
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, ItemStatus, Refused, RefusedReason, Stored
from kvstore.wire.header import FrameType
from kvstore.wire.messages import (
    ID_BYTES,
    End,
    Manifest,
    Result,
    WriterAbort,
    WriterCommit,
    WriterOpen,
    WriterOpened,
)
from kvstore.wire.slices import NO_CONTENT_ID, Slice, encode_slices
from kvstore_client.assembly import OPEN, AssembledRecord, Piece
from kvstore_client.connection import Connection, Steps
from kvstore_client.core import ClientCore
from kvstore_client.lookups import left_ns
from kvstore_client.outcomes import refused
from kvstore_client.planner import Keys, Section, TargetId, as_chain, choose_shards, plan_records, sections_of
from kvstore_client.regions import Item, region_of
from kvstore_client.rounds import Job, Verb, attempt, ensure_view
from kvstore_client.write_verbs import ChainFacts, PartFacts, check_writable_part

_U32 = struct.Struct("<I")
_GRANTED = int(ItemStatus.GRANTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """Arguments of writer, as the caller gave them; see `BoundNamespace.writer`."""

    keys: Keys
    shards: int | Sequence[int] | None
    lengths: Sequence[int] | None
    part: str | None
    ttl: float | None


class WriterState:
    """The records of one writer, section by section, and the target of each.

    Attributes:
        rows: For each section the records of all keys.
    """

    def __init__(
        self, namespace: Namespace, sections: tuple[Section, ...], part: str | None, rows: list[list[AssembledRecord]]
    ) -> None:
        self.namespace = namespace
        self.sections = sections
        self.part = part
        self.rows = rows
        self.targets: dict[TargetId, list[AssembledRecord]] = {}

    def open_records(self) -> list[tuple[TargetId, list[AssembledRecord]]]:
        """For each target the records that still take pieces."""
        chosen = [(target, [one for one in records if one.status == OPEN]) for target, records in self.targets.items()]
        return [(target, records) for target, records in chosen if records]

    def target_of(self, record: AssembledRecord) -> TargetId:
        """Where the record goes."""
        return next(target for target, records in self.targets.items() if any(one is record for one in records))

    def lengths(self) -> list[int]:
        """Bytes of each item over all its records."""
        return [sum(record.length_bytes for record in records) for records in zip(*self.rows, strict=True)]

    def results(self) -> list[Stored | Exists | Refused]:
        """One outcome per key, of its worst record. Those that are still open are refused as pending."""
        found: list[Stored | Exists | Refused] = []
        for records in zip(*self.rows, strict=True):
            found.append(_result(records))
        return found


def open_writer(
    core: ClientCore, namespace: Namespace, manifest: bytes, request: OpenRequest, deadline_ns: int
) -> Verb[WriterState]:
    """Reserves room for every record. Those that are not granted have their outcome already."""
    chain = as_chain(request.keys)
    layout = namespace.layout
    check_writable_part(layout, request.part)
    sections = sections_of(layout, shards=choose_shards(layout, request.shards), parts=(request.part,))
    lengths = _lengths(layout, sections, request.lengths, len(chain))
    kind = PartFacts.of(layout, request.part)
    rows = [
        [
            AssembledRecord(item=item, length_bytes=length, block_bytes=kind.block_bytes)
            for item, length in enumerate(row)
        ]
        for row in lengths
    ]
    state = WriterState(namespace, sections, request.part, rows)
    yield from ensure_view(core, deadline_ns)
    if core.placement is None:
        for row in rows:
            for record in row:
                record.finish(int(RefusedReason.OVERLOADED), detail=f"no node answers at {', '.join(core.addresses)}")
        return state
    plan = plan_records(chain, layout=layout, sections=sections, target_of=core.placement)
    facts = ChainFacts.of(chain)
    jobs = []
    for batch in plan.batches:
        records = [rows[number // plan.key_count][number % plan.key_count] for number in batch.records]
        if len(records) > BATCH_ITEMS_MAX // 4:
            raise InvalidRequest(f"a writer of {len(records)} records; open at most {BATCH_ITEMS_MAX // 4} at a time")
        state.targets[batch.target] = records
        jobs.append(
            _OpenJob(
                target=batch.target,
                flow=core.options.write_flow,
                deadline_ns=deadline_ns,
                state=state,
                manifest=manifest,
                keys=batch.keys,
                records=records,
                facts=facts,
                kind=kind,
                ttl_ns=WRITER_TTL_NS if request.ttl is None else int(request.ttl * SECOND_NS),
            )
        )
    if jobs:
        yield from attempt(core, jobs)
    for job in jobs:
        boot_count = core.link(job.target).boot_count
        for record in job.records:
            record.boot_count = boot_count
        _close_failed(job, job.records)
    return state


def write(
    core: ClientCore,
    state: WriterState,
    item: int,
    buffer: Item,
    *,
    layer: int | None,
    offset: int | None,
    part: str | None,
    deadline_ns: int,
) -> Verb[None]:
    """Takes bytes of one item, and sends the blocks that are whole now."""
    if not 0 <= item < (len(state.rows[0]) if state.rows else 0):
        raise InvalidRequest(f"item {item} lies outside the writer's 0..{len(state.rows[0]) - 1}")
    region = region_of(buffer, index=item, writable=False)
    spans = _spans(state, item, layer=layer, offset=offset, part=part, length=region.length_bytes)
    needed = sum(length for _, _, length in spans)
    if needed != region.length_bytes:
        raise InvalidRequest(f"item {item} got {region.length_bytes} bytes, {needed} are needed at that place")
    jobs: dict[TargetId, _WriteJob] = {}
    at = 0
    for record, start, length in spans:
        if record.status == OPEN:
            target = state.target_of(record)
            job = jobs.get(target)
            if job is None:
                job = jobs[target] = _WriteJob(target=target, flow=core.options.write_flow, deadline_ns=deadline_ns)
            job.pieces += [(record, piece) for piece in record.add(start, region, at, length)]
            job.records.append(record)
        at += length
    waiting = [job for job in jobs.values() if job.pieces]
    if waiting:
        _fail_forgotten(core, waiting)
        yield from attempt(core, [job for job in waiting if job.records])
        for job in waiting:
            _close_failed(job, job.records)


def commit(
    core: ClientCore, state: WriterState, *, durability: int, wait: int, deadline_ns: int
) -> Verb[list[Stored | Exists | Refused]]:
    """Makes all complete records visible; the others are aborted and refused."""
    jobs: list[_CommitJob] = []
    for target, records in state.open_records():
        complete = [record for record in records if record.is_complete]
        rest = [record for record in records if not record.is_complete]
        if rest:
            yield [_AbortJob(core, target, rest, deadline_ns)]
        for record in rest:
            record.finish(
                int(RefusedReason.INVALID), detail=f"{record.missing_blocks} blocks were not written before the commit"
            )
        if complete:
            jobs.append(
                _CommitJob(
                    target=target,
                    flow=core.options.write_flow,
                    deadline_ns=deadline_ns,
                    records=complete,
                    durability=durability,
                    wait=wait,
                )
            )
    if jobs:
        _fail_forgotten(core, jobs)
        yield from attempt(core, [job for job in jobs if job.records])
        for job in jobs:
            _close_failed(job, job.records, committed=True)
    return state.results()


def abort(core: ClientCore, state: WriterState, deadline_ns: int) -> Verb[None]:
    """Gives the room back. What can't be told to the node runs out by its ttl."""
    for target, records in state.open_records():
        yield [_AbortJob(core, target, records, deadline_ns)]
        for record in records:
            record.finish(int(RefusedReason.INVALID), detail="the writer was aborted")


class _RecordsJob(Job):
    """A job about some records of a writer. Nothing is repeated on another connection once the node heard of it."""

    __slots__ = ("records",)

    def __init__(
        self, *, target: TargetId, flow: FlowClass, deadline_ns: int, records: list[AssembledRecord] | None = None
    ) -> None:
        super().__init__(target=target, flow=flow, deadline_ns=deadline_ns, retries_max=0)
        self.records: list[AssembledRecord] = records or []


class _OpenJob(_RecordsJob):
    """WRITER_OPEN; the manifest first when the node asks for it."""

    __slots__ = ("_facts", "_keys", "_kind", "_manifest", "_state", "_ttl_ns")

    def __init__(
        self,
        *,
        target: TargetId,
        flow: FlowClass,
        deadline_ns: int,
        state: WriterState,
        manifest: bytes,
        keys: bytes,
        records: list[AssembledRecord],
        facts: ChainFacts,
        kind: PartFacts,
        ttl_ns: int,
    ) -> None:
        super().__init__(target=target, flow=flow, deadline_ns=deadline_ns, records=records)
        self._state = state
        self._manifest = manifest
        self._keys = keys
        self._facts = facts
        self._kind = kind
        self._ttl_ns = ttl_ns

    def run(self, connection: Connection) -> Steps:
        """Opens all records at once."""
        try:
            opened = yield from connection.ask(self._request(), WriterOpened)
            known = RefusedReason.UNKNOWN_NAMESPACE not in opened.statuses
        except UnknownNamespace:
            known = False
        if not known:
            yield from connection.ask(Manifest(manifest=self._manifest), End)
            opened = yield from connection.ask(self._request(), WriterOpened)
        count = len(self.records)
        if len(opened.statuses) != count or len(opened.writer_ids) != 4 * count:
            raise Unavailable(f"node at {connection.address} opened {len(opened.statuses)} of {count} writers")
        details = opened.details.split("\n") if opened.details else []
        for at, record in enumerate(self.records):
            (record.writer_id,) = _U32.unpack_from(opened.writer_ids, 4 * at)
            if opened.statuses[at] != _GRANTED:
                record.finish(opened.statuses[at], detail=details[at] if at < len(details) else "")

    def _request(self) -> WriterOpen:
        facts, items = self._facts, [record.item for record in self.records]
        return WriterOpen(
            namespace=self._state.namespace.digest,
            keys=self._keys,
            lengths=_pack([record.length_bytes for record in self.records]),
            block_bytes=_pack([self._kind.block_bytes]),
            deadline_ns=left_ns(self),
            ttl_ns=self._ttl_ns,
            run_heads=b"".join([facts.run_head(item) for item in items]),
            parents=b"".join([facts.parent(item) for item in items]),
            positions=b"" if facts.first_position is None else _pack([facts.position(item) for item in items]),
            parts=bytes([self._kind.code]) * len(items) if self._kind.code else b"",
            volatile_ttl_ns=self._kind.volatile_ttl_ns,
        )


class _WriteJob(_RecordsJob):
    """WRITER_WRITE frames of about SLICE_BYTES_MAX, one after the other."""

    __slots__ = ("pieces",)

    def __init__(self, *, target: TargetId, flow: FlowClass, deadline_ns: int) -> None:
        super().__init__(target=target, flow=flow, deadline_ns=deadline_ns)
        self.pieces: list[tuple[AssembledRecord, Piece]] = []

    def run(self, connection: Connection) -> Steps:
        """Sends each frame from the caller's memory and waits until the node has it."""
        for group in _frames(self.pieces):
            slices = [
                Slice(
                    record.writer_id,
                    piece.offset,
                    piece.length_bytes,
                    0,
                    False,
                    NO_CONTENT_ID,
                    record.length_bytes,
                    record.block_bytes,
                    piece.crcs,
                )
                for record, piece in group
            ]
            yield from connection.start_raw(
                FrameType.WRITER_WRITE,
                encode_slices(slices),
                flags=len(slices),
                payload=[view for _, piece in group for view in piece.views],
                payload_bytes=sum(piece.length_bytes for _, piece in group),
            )
            frames = yield from connection.receive()
            connection.decode(End, frames[0])


class _CommitJob(_RecordsJob):
    """WRITER_COMMIT and its results."""

    __slots__ = ("_durability", "_wait")

    def __init__(
        self,
        *,
        target: TargetId,
        flow: FlowClass,
        deadline_ns: int,
        records: list[AssembledRecord],
        durability: int,
        wait: int,
    ) -> None:
        super().__init__(target=target, flow=flow, deadline_ns=deadline_ns, records=records)
        self._durability = durability
        self._wait = wait

    def run(self, connection: Connection) -> Steps:
        """Commits all records at once."""
        records = self.records
        message = WriterCommit(
            writer_ids=_pack([record.writer_id for record in records]),
            crc_tables=b"".join([record.crc_table for record in records]),
            deadline_ns=left_ns(self),
            durability=self._durability,
            wait=self._wait,
        )
        yield from connection.start(message)
        while True:
            for frame in (yield from connection.receive()):
                if frame.type is not FrameType.RESULT:
                    connection.decode(End, frame)
                    return
                result = connection.decode(Result, frame)
                details = result.details.split("\n") if result.details else []
                for index, (at,) in enumerate(_U32.iter_unpack(result.items)):
                    if at >= len(records):
                        raise Unavailable(f"node at {connection.address} told the outcome of writer {at}")
                    records[at].finish(
                        result.statuses[index],
                        content_id=result.content_ids[index * ID_BYTES : (index + 1) * ID_BYTES] or NO_CONTENT_ID,
                        detail=details[index] if index < len(details) else "",
                    )


class _AbortJob(_RecordsJob):
    """WRITER_ABORT."""

    __slots__ = ()

    def __init__(self, core: ClientCore, target: TargetId, records: list[AssembledRecord], deadline_ns: int) -> None:
        super().__init__(target=target, flow=core.options.write_flow, deadline_ns=deadline_ns, records=records)

    def run(self, connection: Connection) -> Steps:
        """Tells the node to forget the records."""
        yield from connection.ask(WriterAbort(writer_ids=_pack([record.writer_id for record in self.records])), End)


def _spans(
    state: WriterState, item: int, *, layer: int | None, offset: int | None, part: str | None, length: int
) -> list[tuple[AssembledRecord, int, int]]:
    """Record, first byte and length of each stretch that a write covers, in the order of its memory."""
    records = [row[item] for row in state.rows]
    if layer is not None and offset is not None:
        raise InvalidRequest("layer and offset are both given; pass one of them")
    if layer is None:
        if part is not None:
            raise InvalidRequest(f"part {part!r} is given without a layer; pass a layer, or the offset in the record")
        return _stretch(records, offset or 0, length)
    layout = state.namespace.layout
    names = [state.part] if state.part else [part] if part else [one.name for one in layout.dense_parts]
    found = []
    for record, section in zip(records, state.sections, strict=True):
        for name in names:
            held = layout.layer_range(layer, name, shard=section.shard)
            if held.length_bytes:
                found.append((record, held.offset_bytes, held.length_bytes))
    return found


def _stretch(records: Sequence[AssembledRecord], offset: int, length: int) -> list[tuple[AssembledRecord, int, int]]:
    """Bytes offset..offset+length of the records laid one behind the other."""
    found = []
    base = 0
    for record in records:
        low, high = max(offset, base), min(offset + length, base + record.length_bytes)
        if low < high:
            found.append((record, low - base, high - low))
        base += record.length_bytes
    if offset < 0 or offset + length > base:
        raise InvalidRequest(f"bytes {offset}..{offset + length} lie outside the chunk's {base} bytes")
    return found


def _frames(pieces: Sequence[tuple[AssembledRecord, Piece]]) -> Iterator[list[tuple[AssembledRecord, Piece]]]:
    """Pieces in groups that fit one frame."""
    group: list[tuple[AssembledRecord, Piece]] = []
    total = 0
    for one in pieces:
        if group and (total + one[1].length_bytes > SLICE_BYTES_MAX or len(group) == SLICES_PER_FRAME_MAX):
            yield group
            group, total = [], 0
        group.append(one)
        total += one[1].length_bytes
    if group:
        yield group


def _lengths(
    layout: KVLayout, sections: Sequence[Section], lengths: Sequence[int] | None, count: int
) -> list[list[int]]:
    """Section by section the bytes of each record."""
    sizes = [layout.record_bytes(section.shard, part=section.part) for section in sections]
    if lengths is None:
        return [[size] * count for size in sizes]
    if len(lengths) != count:
        raise InvalidRequest(f"{len(lengths)} lengths are given for {count} keys; pass one for each key")
    for item, length in enumerate(lengths):
        is_right = length == sum(sizes) if layout.is_exact or len(sizes) > 1 else 0 <= length <= sizes[0]
        if not is_right:
            raise InvalidRequest(f"length of item {item} is {length}; its record takes {sum(sizes)} bytes")
    return [list(lengths)] if len(sizes) == 1 else [[size] * count for size in sizes]


def _fail_forgotten(core: ClientCore, jobs: Sequence[_RecordsJob]) -> None:
    """Refuses records whose target was started again: it has forgotten them."""
    for job in jobs:
        boot_count = core.link(job.target).boot_count
        for record in [one for one in job.records if one.boot_count != boot_count]:
            record.finish(
                int(RefusedReason.OVERLOADED), detail="the node was started again and has forgotten the writer"
            )
            job.records.remove(record)
        if isinstance(job, _WriteJob):
            job.pieces = [(record, piece) for record, piece in job.pieces if record.status == OPEN]


def _close_failed(job: _RecordsJob, records: Sequence[AssembledRecord], *, committed: bool = False) -> None:
    """Refuses what a failed job left open. Raises InvalidRequest when the node called the request wrong."""
    failure = job.failure
    if failure is None:
        return
    reason = RefusedReason.OVERLOADED
    if committed and not isinstance(failure, InvalidRequest):
        reason = RefusedReason.OUTCOME_UNKNOWN
    elif isinstance(failure, DeadlineExceeded):
        reason = RefusedReason.DEADLINE
    elif isinstance(failure, InvalidRequest):
        reason = RefusedReason.INVALID
    for record in records:
        if record.status == OPEN:
            record.finish(int(reason), detail=str(failure))


def _result(records: Sequence[AssembledRecord]) -> Stored | Exists | Refused:
    durable, stored = True, False
    for record in records:
        if record.status in (ItemStatus.STORED, ItemStatus.RECEIVED):
            stored = True
            durable &= record.status == ItemStatus.STORED
        elif record.status == OPEN:
            return Refused(RefusedReason.PENDING, "not committed yet")
        elif record.status != ItemStatus.EXISTS:
            return refused(record.status, record.detail)
    if not stored:
        return Exists()
    return Stored(durable=durable, content_id=b"".join([record.content_id for record in records]))


def _pack(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)

"""The verbs of a layer-wise writer: open, write, commit, abort. Generators for a driver; see rounds.py.

Every copy of a record is a writer of its own on its target; all get the same pieces, with checksums made once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.cluster.view import TargetId
from kvstore.errors import DeadlineExceeded, InvalidRequest
from kvstore.limits import (
    BATCH_ITEMS_MAX,
    LAST_SILENCE_NS,
    PLACE_SILENCE_NS,
    SECOND_NS,
    UNPIN_NS_MAX,
    WRITER_TTL_NS,
)
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, Refused, RefusedReason, Stored
from kvstore.wire.messages import Manifest
from kvstore_client.assembly import AssembledRecord, WrittenCopy
from kvstore_client.attempts import Follow, attempt
from kvstore_client.core import ClientCore
from kvstore_client.incoming import OPEN
from kvstore_client.outcomes import store_result
from kvstore_client.planner import Keys, Section, chain_in, choose_shards, plan_records, sections_of
from kvstore_client.record_facts import ChainFacts, PartFacts
from kvstore_client.regions import Item, region_of
from kvstore_client.rounds import Job, Verb, ensure_view
from kvstore_client.topology import places_to_write
from kvstore_client.write_verbs import check_writable_part
from kvstore_client.writer_jobs import AbortJob, CommitJob, CopiesJob, OpenJob, WriteJob


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """Arguments of writer, as the caller gave them; see `BoundNamespace.writer`. `copies` None: as the view says."""

    keys: Keys
    shards: int | Sequence[int] | None
    lengths: Sequence[int] | None
    part: str | None
    ttl: float | None
    copies: int | None = None


class WriterState:
    """The records of one writer, section by section, and their copies on each target.

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
        self.targets: dict[TargetId, list[WrittenCopy]] = {}

    def place(self, target: TargetId, records: Sequence[AssembledRecord]) -> list[WrittenCopy]:
        """New copies of records, on a target."""
        copies = [WrittenCopy(record, target) for record in records]
        for copy in copies:
            copy.record.copies.append(copy)
        self.targets[target] = copies
        return copies

    def open_copies(self) -> list[tuple[TargetId, list[WrittenCopy]]]:
        """For each target the copies that still take pieces."""
        chosen = [(target, [one for one in copies if one.status == OPEN]) for target, copies in self.targets.items()]
        return [(target, copies) for target, copies in chosen if copies]

    def lengths(self) -> list[int]:
        """Bytes of each item over all its records."""
        return [sum(record.length_bytes for record in records) for records in zip(*self.rows, strict=True)]

    def results(self) -> list[Stored | Exists | Refused]:
        """One outcome per key, of its worst record. Those that are still open are refused as pending."""
        found: list[Stored | Exists | Refused] = []
        for records in zip(*self.rows, strict=True):
            if any(record.is_open for record in records):
                found.append(Refused(RefusedReason.PENDING, "not committed yet"))
            else:
                found.append(store_result([record.copies for record in records]))
        return found


def open_writer(
    core: ClientCore, namespace: Namespace, manifest: Manifest, request: OpenRequest, deadline_ns: int
) -> Verb[WriterState]:
    """Reserves room for every copy of every record. Those that are not granted have their outcome already."""
    layout = namespace.layout
    chain = chain_in(namespace, request.keys)
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
        _refuse_unplaced(state, core.words_of_no_target())
        return state
    where = places_to_write(core.placement, chain, copies=request.copies)
    plan = plan_records(chain, layout=layout, sections=sections, where=where)
    facts = ChainFacts.of(chain)
    jobs = []
    for batch in plan.batches:
        if len(batch.records) > BATCH_ITEMS_MAX // 4:
            raise InvalidRequest(
                f"a writer of {len(batch.records)} records; open at most {BATCH_ITEMS_MAX // 4} at a time"
            )
        copies = state.place(
            batch.target, [rows[number // plan.key_count][number % plan.key_count] for number in batch.records]
        )
        job = OpenJob(
            target=batch.target,
            flow=core.options.write_flow,
            deadline_ns=deadline_ns,
            namespace=namespace.digest,
            manifest=manifest,
            keys=batch.keys,
            copies=copies,
            facts=facts,
            kind=kind,
            ttl_ns=WRITER_TTL_NS if request.ttl is None else int(request.ttl * SECOND_NS),
        )
        if any(len(copy.record.copies) > 1 for copy in copies):
            job.patience_ns = LAST_SILENCE_NS
        jobs.append(job)
    if jobs:
        yield from attempt(core, jobs)
    for job in jobs:
        _close_failed(job)
    _refuse_unplaced(state, core.words_of_no_target())
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
    jobs: dict[TargetId, WriteJob] = {}
    at = 0
    for record, start, length in spans:
        if record.is_open:
            pieces = record.add(start, region, at, length)
            for copy in record.copies:
                if copy.status == OPEN:
                    job = jobs.get(copy.target)
                    if job is None:
                        job = jobs[copy.target] = WriteJob(
                            target=copy.target, flow=core.options.write_flow, deadline_ns=deadline_ns
                        )
                    job.pieces += [(copy, piece) for piece in pieces]
                    job.copies.append(copy)
        at += length
    waiting = [job for job in jobs.values() if job.pieces]
    if waiting:
        yield from attempt(core, waiting, follow=_hurry_after(waiting))
        for job in waiting:
            _close_failed(job)


def commit(
    core: ClientCore, state: WriterState, *, durability: int, wait: int, deadline_ns: int
) -> Verb[list[Stored | Exists | Refused]]:
    """Makes all complete records visible; the others are aborted and refused."""
    jobs: list[CommitJob] = []
    aborts: list[tuple[TargetId, list[WrittenCopy]]] = []
    for target, copies in state.open_copies():
        complete = [copy for copy in copies if copy.record.is_complete]
        rest = [copy for copy in copies if not copy.record.is_complete]
        if rest:
            aborts.append((target, rest))
        for copy in rest:
            missing = copy.record.missing_blocks
            copy.finish(int(RefusedReason.INVALID), detail=f"{missing} blocks were not written before the commit")
        if complete:
            jobs.append(
                CommitJob(
                    target=target,
                    flow=core.options.write_flow,
                    deadline_ns=deadline_ns,
                    copies=complete,
                    durability=durability,
                    wait=wait,
                )
            )
    if jobs:
        yield from attempt(core, jobs, follow=_hurry_after(jobs))
        for job in jobs:
            _close_failed(job, committed=True)
    if aborts:  # a target that is silent now cannot take the time of a commit any more
        until_ns = min(deadline_ns, time.monotonic_ns() + UNPIN_NS_MAX)
        yield [AbortJob(core, target, rest, until_ns) for target, rest in aborts]
    return state.results()


def abort(core: ClientCore, state: WriterState, deadline_ns: int) -> Verb[None]:
    """Gives the room back. What can't be told to the node runs out by its ttl."""
    jobs = [AbortJob(core, target, copies, deadline_ns) for target, copies in state.open_copies()]
    if jobs:
        yield jobs
    for job in jobs:
        for copy in job.copies:
            copy.finish(int(RefusedReason.INVALID), detail="the writer was aborted")


def _refuse_unplaced(state: WriterState, detail: str) -> None:
    """Refuses records that no target takes: each has one outcome at least."""
    for copy in state.place("", [record for row in state.rows for record in row if not record.copies]):
        copy.finish(int(RefusedReason.OVERLOADED), detail=detail)


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


def _hurry_after(jobs: Sequence[CopiesJob]) -> Follow:
    """When a job is through, those whose copies others have by then may not hang for more than PLACE_SILENCE_NS."""
    left = list(jobs)
    through: set[AssembledRecord] = set()

    def after(ended: Job) -> Sequence[Job]:
        for job in [job for job in left if job is ended]:
            left.remove(job)
            if job.failure is None:
                through.update(copy.record for copy in job.copies)
        now_ns = time.monotonic_ns()
        for job in left:
            if not job.silence_ns and all(copy.record in through for copy in job.copies):
                job.hurry(PLACE_SILENCE_NS, now_ns)
        return ()

    return after


def _close_failed(job: CopiesJob, *, committed: bool = False) -> None:
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
    for copy in job.copies:
        if copy.status == OPEN:
            copy.finish(int(reason), detail=str(failure))

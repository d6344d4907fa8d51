"""The verbs that read: get_into, match, contains, wait, prefetch. Generators for a driver; see rounds.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore.errors import InvalidRequest
from kvstore.types.namespace import Namespace
from kvstore.types.results import Hit, Miss, MissReason
from kvstore.wire.messages import ID_BYTES, End, Match, MatchReply, Prefetch, Unpin, Wait
from kvstore.wire.schema import Message
from kvstore.wire.slices import NO_CONTENT_ID
from kvstore_client.core import ClientCore
from kvstore_client.incoming import HIT, IncomingRecord
from kvstore_client.loads import LoadJob
from kvstore_client.lookups import KeysJob, TellJob
from kvstore_client.outcomes import close_open, load_results, miss_of, miss_reason
from kvstore_client.planner import (
    Keys,
    RecordPlan,
    Section,
    TargetId,
    as_chain,
    boundary_chunks,
    choose_shards,
    gather_statuses,
    key_statuses,
    plan_records,
    prefix_length,
    sections_of,
)
from kvstore_client.ranges import Ranges, Selection, select, span_bytes
from kvstore_client.regions import Item, Region, region_of
from kvstore_client.rounds import Verb, attempt, ensure_view

A = TypeVar("A", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """Arguments of get_into, as the caller gave them; see `BoundNamespace.get_into`."""

    keys: Keys
    buffers: Sequence[Item]
    ranges: Ranges | None
    layers: Sequence[int] | None
    shards: int | Sequence[int] | None
    part: str | None
    content_ids: Sequence[bytes] | None
    accept_pending: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PinHold:
    """A pin on one target. It is gone when the target has started again since."""

    target: TargetId
    pin_id: int
    boot_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchAnswer:
    """What a match found; see `Match`."""

    chunks: int
    boundary_chunks: int
    pending: int
    reason: MissReason | None
    load_seconds_estimate: float
    pins: tuple[PinHold, ...]
    pinned_until_ns: int


def load(core: ClientCore, namespace: Namespace, request: LoadRequest, deadline_ns: int) -> Verb[list[Hit | Miss]]:
    """Reads records into the caller's memory."""
    chain = as_chain(request.keys)
    layout = namespace.layout
    parts = () if request.part is None else (request.part,)
    sections = sections_of(layout, shards=choose_shards(layout, request.shards), parts=parts or (None,))
    selection = select(
        layout,
        sections,
        key_count=len(chain),
        part=request.part,
        layers=request.layers,
        ranges=request.ranges,
    )
    rows = _incoming(namespace, sections, selection, request, key_count=len(chain))
    yield from ensure_view(core, deadline_ns)
    records = rows[0] if len(rows) == 1 else [record for row in rows for record in row]
    if core.placement is None:
        close_open(records, None)
        return load_results(rows, core.counters)
    plan = plan_records(chain, layout=layout, sections=sections, target_of=core.placement)
    count = len(chain)
    jobs = [
        LoadJob(
            target=batch.target,
            flow=core.options.flow,
            deadline_ns=deadline_ns,
            namespace=namespace.digest,
            keys=batch.keys,
            records=records if len(batch.records) == len(records) else [records[at] for at in batch.records],
            shared_spans=selection.shared[0],
            spans=None
            if not selection.single and len(set(selection.shared)) == 1
            else [selection.spans(at // count, at % count) or () for at in batch.records],
            accept_pending=request.accept_pending,
        )
        for batch in plan.batches
    ]
    started_ns = time.monotonic_ns()
    yield from attempt(core, jobs)
    for job, batch in zip(jobs, plan.batches, strict=True):
        close_open([records[at] for at in batch.records] if job.failure else (), job.failure)
    _note_loads(core, jobs, plan, records, time.monotonic_ns() - started_ns)
    return load_results(rows, core.counters)


def match(
    core: ClientCore,
    namespace: Namespace,
    keys: Keys,
    *,
    shards: int | Sequence[int] | None,
    need: Sequence[str],
    pin_ttl_ns: int,
    deadline_ns: int,
) -> Verb[MatchAnswer]:
    """The longest prefix that every needed part can serve, pinned."""
    chain = as_chain(keys)
    layout = namespace.layout
    sparse = list(dict.fromkeys(name for name in need if not layout.part(name).is_dense))
    chosen = choose_shards(layout, shards)
    sections = sections_of(layout, shards=chosen, parts=(None, *sparse))
    asked_ns = time.monotonic_ns()

    def ask(blob: bytes, _: int) -> Message:
        return Match(namespace=namespace.digest, keys=blob, pin_ttl_ns=pin_ttl_ns)

    plan, jobs, statuses = yield from _ask_all(core, namespace, chain, sections, deadline_ns, ask, MatchReply)
    width = len(chosen)
    dense = key_statuses(plan, statuses, sections=range(width))
    chunks = prefix_length(dense)
    boundary = boundary_chunks(
        chunks,
        [
            key_statuses(plan, statuses, sections=range(width * at, width * (at + 1)))
            for at in range(1, len(sparse) + 1)
        ],
    )
    core.counters.lookup_keys_asked += len(chain)
    core.counters.lookup_keys_hit += boundary
    rest = dense[chunks:]
    pending = len(rest) - len(rest.lstrip(bytes([MissReason.PENDING])))
    pins = _pins(core, jobs)
    needed = sum(layout.record_bytes(shard) for shard in chosen) * chunks
    return MatchAnswer(
        chunks=chunks,
        boundary_chunks=boundary,
        pending=pending,
        reason=miss_of(rest[0]).reason if rest else None,
        load_seconds_estimate=_load_seconds(core, jobs, needed),
        pins=pins,
        pinned_until_ns=asked_ns + pin_ttl_ns if pins and len(pins) >= len(jobs) else 0,
    )


def lookup(
    core: ClientCore,
    namespace: Namespace,
    keys: Keys,
    *,
    shards: int | Sequence[int] | None,
    part: str | None,
    deadline_ns: int,
    waits: bool,
) -> Verb[list[Hit | Miss]]:
    """Whether each key is stored; with `waits`, once none of them is pending any more. Not counted as use."""
    sections = _key_sections(namespace, shards, part)

    def peek(blob: bytes, _: int) -> Message:
        return Match(namespace=namespace.digest, keys=blob, touch=False, count=False)

    def wait(blob: bytes, left_ns: int) -> Message:
        return Wait(namespace=namespace.digest, keys=blob, deadline_ns=left_ns)

    chain = as_chain(keys)
    if waits:
        plan, _, statuses = yield from _ask_all(core, namespace, chain, sections, deadline_ns, wait, End)
    else:
        plan, _, statuses = yield from _ask_all(core, namespace, chain, sections, deadline_ns, peek, MatchReply)
    return [Hit(length_bytes=0) if status == HIT else miss_of(status) for status in key_statuses(plan, statuses)]


def prefetch(
    core: ClientCore,
    namespace: Namespace,
    keys: Keys,
    *,
    shards: int | Sequence[int] | None,
    part: str | None,
    deadline_ns: int,
) -> Verb[int]:
    """How many records are on their way into the nodes' memory."""

    def ask(blob: bytes, _: int) -> Message:
        return Prefetch(namespace=namespace.digest, keys=blob)

    sections = _key_sections(namespace, shards, part)
    _, jobs, _ = yield from _ask_all(core, namespace, as_chain(keys), sections, deadline_ns, ask, End)
    return sum(answer.value for job in jobs if job.failure is None for answer in job.answers)


def unpin(core: ClientCore, pins: Sequence[PinHold], deadline_ns: int) -> Verb[None]:
    """Gives pins back. One that can't be given back runs out by itself, so nothing is tried twice."""
    jobs = [
        TellJob(target=pin.target, flow=core.options.flow, deadline_ns=deadline_ns, message=Unpin(pin_id=pin.pin_id))
        for pin in pins
        if holds(core, pin)
    ]
    for job in jobs:
        yield [job]


def holds(core: ClientCore, pin: PinHold) -> bool:
    """Whether the target still knows the pin, as far as this client has noticed."""
    link = next((link for link in core.links() if link.id == pin.target), None)
    return link is not None and link.boot_count == pin.boot_count


def _key_sections(namespace: Namespace, shards: int | Sequence[int] | None, part: str | None) -> tuple[Section, ...]:
    return sections_of(namespace.layout, shards=choose_shards(namespace.layout, shards), parts=(part,))


def _ask_all(
    core: ClientCore,
    namespace: Namespace,
    chain: Keys,
    sections: Sequence[Section],
    deadline_ns: int,
    ask: Callable[[bytes, int], Message],
    answer: type[A],
) -> Verb[tuple[RecordPlan, list[KeysJob[A]], bytearray]]:
    """Asks every target about its records; one status per record of the plan."""
    keys = as_chain(chain)
    yield from ensure_view(core, deadline_ns)
    if core.placement is None:
        empty = RecordPlan(key_count=len(keys), sections=tuple(sections), batches=())
        return empty, [], gather_statuses(empty, [])
    plan = plan_records(keys, layout=namespace.layout, sections=sections, target_of=core.placement)
    jobs = [
        KeysJob(batch=batch, flow=core.options.flow, deadline_ns=deadline_ns, ask=ask, answer=answer)
        for batch in plan.batches
    ]
    if jobs:
        yield from attempt(core, jobs)
    answers: list[bytes | None] = []
    for job in jobs:
        known = job.statuses()
        if known is None:
            known = bytes([miss_reason(job.failure)]) * len(job.batch.records)
        answers.append(known or bytes(len(job.batch.records)))
    return plan, jobs, gather_statuses(plan, answers)


def _incoming(
    namespace: Namespace, sections: Sequence[Section], selection: Selection, request: LoadRequest, *, key_count: int
) -> list[list[IncomingRecord]]:
    """Section by section the records of all items. Raises InvalidRequest for memory that does not fit."""
    buffers = request.buffers
    if len(buffers) != key_count:
        raise InvalidRequest(f"{len(buffers)} buffers are given for {key_count} keys; pass one for each key")
    layout = namespace.layout
    wanted = request.content_ids
    if wanted is not None and [len(one) for one in wanted] != [ID_BYTES * len(sections)] * key_count:
        raise InvalidRequest(f"content_ids must be {ID_BYTES * len(sections)} bytes for each of {key_count} keys")
    rows: list[list[IncomingRecord]] = [[] for _ in sections]
    sizes = [layout.record_bytes(section.shard, part=section.part) for section in sections]
    takes_any = not layout.is_exact and len(sections) == 1 and selection.is_whole
    for index, buffer in enumerate(buffers):
        region = region_of(buffer, index=index, writable=True)
        base = 0
        for at, size in enumerate(sizes):
            spans = selection.spans(at, index)
            content_id = NO_CONTENT_ID if wanted is None else wanted[index][at * ID_BYTES : (at + 1) * ID_BYTES]
            rows[at].append(
                IncomingRecord(
                    region,
                    base_bytes=base,
                    room_bytes=region.length_bytes if takes_any else size,
                    exact=layout.is_exact,
                    spans=spans,
                    content_id=content_id,
                )
            )
            base += size if spans is None else span_bytes(spans)
        if base != region.length_bytes and not takes_any:
            raise _wrong_total(index, region, base)
    return rows


def _wrong_total(index: int, region: Region, needed: int) -> InvalidRequest:
    return InvalidRequest(
        f"item {index} has {region.length_bytes} bytes in {len(region.views)} fragments, {needed} are needed; "
        "pass memory of exactly that size"
    )


def _pins(core: ClientCore, jobs: Sequence[KeysJob[MatchReply]]) -> tuple[PinHold, ...]:
    """The pins of all answers; none when any of them was not granted is told by their number."""
    found = []
    for job in jobs:
        if job.failure is None:
            boot_count = core.link(job.target).boot_count
            found += [
                PinHold(target=job.target, pin_id=answer.pin_id, boot_count=boot_count)
                for answer in job.answers
                if answer.pinned
            ]
    return tuple(found)


def _load_seconds(core: ClientCore, jobs: Sequence[KeysJob[MatchReply]], needed_bytes: int) -> float:
    """How long loading the prefix may take: the node's drive or the measured network, whichever is slower.

    Targets load side by side. A node's estimate is for all its hits; the part that the prefix needs is taken.
    """
    hit_bytes = sum(answer.hit_bytes for job in jobs for answer in job.answers)
    if not hit_bytes:
        return 0.0
    share = min(1.0, needed_bytes / hit_bytes)
    slowest = 0.0
    for job in jobs:
        drive = sum(answer.load_ns for answer in job.answers) * share / 1e9
        rate = core.link(job.target).read_bytes_per_second if job.failure is None else 0.0
        network = sum(answer.hit_bytes for answer in job.answers) * share / rate if rate else 0.0
        slowest = max(slowest, drive, network)
    return slowest


def _note_loads(
    core: ClientCore, jobs: Sequence[LoadJob], plan: RecordPlan, records: Sequence[IncomingRecord], elapsed_ns: int
) -> None:
    """Counts mismatches, and measures the read rate of each target."""
    mismatches = 0
    recovered = 0
    for job, batch in zip(jobs, plan.batches, strict=True):
        arrived = 0
        for at in batch.records:
            record = records[at]
            if record.mismatches:
                mismatches += record.mismatches
                recovered += record.status == HIT
            if record.status == HIT:
                arrived += record.wanted_bytes
        if job.failure is None:
            core.link(job.target).note_read(arrived, elapsed_ns)
    core.counters.corrupt_blocks += mismatches
    core.counters.corrupt_recovered += recovered

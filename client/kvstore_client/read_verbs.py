"""The verbs that read: get_into, match, contains, wait, prefetch. Generators for a driver; see rounds.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from kvstore.cluster.view import TargetId
from kvstore.types.keys import KeyChain
from kvstore.types.namespace import Namespace
from kvstore.types.results import Hit, Miss, MissReason
from kvstore.wire.messages import End, Match, MatchReply, Prefetch, Unpin
from kvstore.wire.schema import Message
from kvstore_client.asking import Lookup, ask_places, note_found, wait_places
from kvstore_client.attempts import attempt
from kvstore_client.core import ClientCore
from kvstore_client.incoming import HIT, IncomingRecord
from kvstore_client.loads import Begun, LoadJob
from kvstore_client.lookups import KeysJob, TellJob
from kvstore_client.outcomes import close_open, load_results, miss_of
from kvstore_client.pins import PinHold, are_pinned, granted_pins, holds
from kvstore_client.planned_read import SpreadRequest
from kvstore_client.planner import (
    Keys,
    Section,
    all_record_keys,
    boundary_chunks,
    chain_in,
    choose_shards,
    key_statuses,
    prefix_length,
    sections_of,
)
from kvstore_client.read_shape import ReadShape
from kvstore_client.rounds import Verb, ensure_view
from kvstore_client.spread import load_spread
from kvstore_client.topology import Placement


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


def load(
    core: ClientCore,
    namespace: Namespace,
    shape: ReadShape,
    chain: KeyChain,
    rows: list[list[IncomingRecord]],
    *,
    copies: int | None = None,
    accept_pending: bool,
    deadline_ns: int,
    begun: Begun | None = None,
) -> Verb[list[Hit | Miss]]:
    """Reads records into the caller's memory.

    Args:
        rows: From `incoming_records`, for each key of `chain`.
        copies: That the namespace has; None is what the view says.
        begun: What the straight way has left.
    """
    if begun is None and core.wants_view(time.monotonic_ns()):
        yield from ensure_view(core, deadline_ns)
    records = rows[0] if len(rows) == 1 else [record for row in rows for record in row]
    placement = core.placement if begun is None else begun.target
    if placement is None:
        close_open(records, None)
        return load_results(rows, core.counters)
    wanted = [record.content_id for record in records]
    if isinstance(placement, str) and records:
        job = LoadJob(
            target=placement,
            flow=core.options.flow,
            deadline_ns=deadline_ns,
            namespace=namespace.digest,
            keys=all_record_keys(chain, shape.sections, namespace.layout),
            records=records,
            shared_spans=shape.shared_spans,
            spans=None if shape.is_plain else shape.spans_of(range(len(records)), len(chain)),
            accept_pending=accept_pending,
        )
        job.persists = isinstance(core.placement, str)
        if begun is not None:
            _go_on(job, begun)
        yield from attempt(core, [job])
        if job.failure is not None:
            close_open(records, job.failure)
        elif job.received_bytes:
            core.link(placement).note_read(job.received_bytes, job.busy_ns)
    if isinstance(core.placement, Placement) and any(record.status != HIT for record in records):
        # also for what the only reader of several workers has not had, whom the short ways ask
        request = SpreadRequest(
            namespace=namespace,
            shape=shape,
            chain=chain,
            records=records,
            wanted=wanted,
            copies=copies,
            accept_pending=accept_pending,
            deadline_ns=deadline_ns,
        )
        yield from load_spread(core, request)
    return load_results(rows, core.counters)


def _go_on(job: LoadJob, begun: Begun) -> None:
    """Tells the job of a read what has been done for it."""
    if begun.connection is not None:
        job.is_asked_on(*begun.connection)
        job.keep(begun)
    else:
        job.take_over(begun.slices)


def match(
    core: ClientCore,
    namespace: Namespace,
    keys: Keys,
    *,
    shards: int | Sequence[int] | None,
    need: Sequence[str],
    copies: int | None = None,
    group: bytes = b"",
    pin_ttl_ns: int,
    deadline_ns: int,
) -> Verb[MatchAnswer]:
    """The longest prefix that every needed part can serve, pinned."""
    layout = namespace.layout
    chain = chain_in(namespace, keys)
    sparse = list(dict.fromkeys(name for name in need if not layout.part(name).is_dense))
    chosen = choose_shards(layout, shards)
    sections = sections_of(layout, shards=chosen, parts=(None, *sparse))
    asked_ns = time.monotonic_ns()

    def ask(blob: bytes, _: int) -> Message:
        return Match(namespace=namespace.digest, keys=blob, pin_ttl_ns=pin_ttl_ns, group=group)

    lookup = Lookup(namespace=namespace, chain=chain, sections=sections, copies=copies, deadline_ns=deadline_ns)
    answers = yield from ask_places(core, lookup, ask, MatchReply)
    note_found(core, lookup, answers)
    plan, jobs, statuses = answers.plan, answers.jobs, answers.statuses
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
    pins = granted_pins(jobs)
    needed = sum(layout.record_bytes(shard) for shard in chosen) * chunks
    return MatchAnswer(
        chunks=chunks,
        boundary_chunks=boundary,
        pending=pending,
        reason=miss_of(rest[0]).reason if rest else None,
        load_seconds_estimate=_load_seconds(core, jobs, needed),
        pins=pins,
        pinned_until_ns=asked_ns + pin_ttl_ns if are_pinned(plan, jobs, dense=range(width), chunks=chunks) else 0,
    )


def lookup(
    core: ClientCore,
    namespace: Namespace,
    keys: Keys,
    *,
    shards: int | Sequence[int] | None,
    part: str | None,
    copies: int | None = None,
    deadline_ns: int,
    waits: bool,
) -> Verb[list[Hit | Miss]]:
    """Whether each key is stored; with `waits`, once none of them is pending any more. Not counted as use."""
    sections = _key_sections(namespace, shards, part)

    def peek(blob: bytes, _: int) -> Message:
        return Match(namespace=namespace.digest, keys=blob, touch=False, count=False)

    chain = chain_in(namespace, keys)
    asked = Lookup(namespace=namespace, chain=chain, sections=sections, copies=copies, deadline_ns=deadline_ns)
    if waits:
        waited = yield from wait_places(core, asked)
        statuses = key_statuses(waited.plan, waited.statuses)
    else:
        peeked = yield from ask_places(core, asked, peek, MatchReply)
        statuses = key_statuses(peeked.plan, peeked.statuses)
    return [Hit(length_bytes=0) if status == HIT else miss_of(status) for status in statuses]


def prefetch(
    core: ClientCore,
    namespace: Namespace,
    keys: Keys,
    *,
    shards: int | Sequence[int] | None,
    part: str | None,
    copies: int | None = None,
    deadline_ns: int,
) -> Verb[int]:
    """How many records are on their way into the nodes' memory."""

    def ask(blob: bytes, _: int) -> Message:
        return Prefetch(namespace=namespace.digest, keys=blob)

    chain = chain_in(namespace, keys)
    sections = _key_sections(namespace, shards, part)
    asked = Lookup(namespace=namespace, chain=chain, sections=sections, copies=copies, deadline_ns=deadline_ns)
    found = yield from ask_places(core, asked, ask, End, has_statuses=False)
    return sum(answer.value for job in found.jobs if job.failure is None for answer in job.answers)


def unpin(core: ClientCore, pins: Sequence[PinHold], deadline_ns: int) -> Verb[None]:
    """Gives pins back. One that can't be given back runs out by itself, so nothing is tried twice."""
    jobs: dict[TargetId, list[TellJob]] = {}
    for pin in pins:
        if holds(core, pin):
            message = Unpin(pin_id=pin.pin_id)
            job = TellJob(target=pin.target, flow=core.options.flow, deadline_ns=deadline_ns, message=message)
            jobs.setdefault(pin.target, []).append(job)
    for one_of_each in zip_longest(*jobs.values()):  # so that a silent target keeps no other one's pins
        yield [job for job in one_of_each if job is not None]


def _key_sections(namespace: Namespace, shards: int | Sequence[int] | None, part: str | None) -> tuple[Section, ...]:
    return sections_of(namespace.layout, shards=choose_shards(namespace.layout, shards), parts=(part,))


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

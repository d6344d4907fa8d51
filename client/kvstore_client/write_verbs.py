"""The verbs that write: put, delete, drop. Generators for a driver; see rounds.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.limits import DIGEST_BYTES
from kvstore.types.keys import KeyChain
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, Hit, Miss, Refused, RefusedReason, Stored
from kvstore.wire.messages import U32_MAX, Delete, Drop, End
from kvstore_client.core import ClientCore
from kvstore_client.incoming import HIT
from kvstore_client.lookups import KeysJob, TellJob
from kvstore_client.outcomes import count_stores, miss_of, miss_reason, store_result
from kvstore_client.planner import (
    Keys,
    Section,
    as_chain,
    choose_shards,
    gather_statuses,
    key_statuses,
    plan_records,
    sections_of,
)
from kvstore_client.regions import Item, Region, region_of
from kvstore_client.rounds import Verb, attempt, ensure_view, refresh_view
from kvstore_client.stores import OPEN, OutgoingRecord, StoreJob, refusal_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest:
    """Arguments of put, as the caller gave them; see `BoundNamespace.put`."""

    keys: Keys
    buffers: Sequence[Item]
    shards: int | Sequence[int] | None
    part: str | None
    durability: int
    wait: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFacts:
    """Per key of a chain what a record carries beside its own key: 32-byte blobs, and where positions begin."""

    run_heads: bytes
    parents: bytes
    first_position: int | None

    @classmethod
    def of(cls, chain: KeyChain) -> ChainFacts:
        """The facts of every key of `chain`."""
        return cls(run_heads=chain.run_heads(), parents=chain.parents, first_position=chain.first_position)

    def run_head(self, index: int) -> bytes:
        """Run head of key `index`."""
        return self.run_heads[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def parent(self, index: int) -> bytes:
        """Parent of key `index`, zeros where unknown."""
        return self.parents[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def position(self, index: int) -> int:
        """Position of key `index`, U32_MAX where unknown."""
        return U32_MAX if self.first_position is None else self.first_position + index


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    """What a layout says about the records of one kind."""

    code: int
    volatile_ttl_ns: int
    block_bytes: int

    @classmethod
    def of(cls, layout: KVLayout, part: str | None) -> PartFacts:
        """The facts of the dense record (None) or of a sparse part."""
        if part is None:
            return cls(code=0, volatile_ttl_ns=0, block_bytes=layout.checksum_bytes())
        index = next(at for at, one in enumerate(layout.sparse_parts) if one.name == part)
        return cls(
            code=1 + index, volatile_ttl_ns=layout.sparse_parts[index].ttl_ns, block_bytes=layout.checksum_bytes(part)
        )


def store(
    core: ClientCore, namespace: Namespace, manifest: bytes, request: StoreRequest, deadline_ns: int
) -> Verb[list[Stored | Exists | Refused]]:
    """Writes records from the caller's memory."""
    chain = as_chain(request.keys)
    layout = namespace.layout
    sections = sections_of(layout, shards=choose_shards(layout, request.shards), parts=(request.part,))
    check_writable_part(layout, request.part)
    if len(request.buffers) != len(chain):
        raise InvalidRequest(f"{len(request.buffers)} buffers are given for {len(chain)} keys; pass one for each key")
    regions = [region_of(buffer, index=at, writable=False) for at, buffer in enumerate(request.buffers)]
    results: list[Stored | Exists | Refused | None] = [
        wrong_length(layout, sections, at, region) for at, region in enumerate(regions)
    ]
    first_of: dict[bytes, int] = {}
    digests = chain.digests
    for at, result in enumerate(results):
        if result is None:
            first_of.setdefault(digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES], at)
    chosen = sorted(first_of.values())
    records = yield from _store_chosen(
        core, namespace, manifest, request, chain, sections, regions, chosen, deadline_ns
    )
    for at, row in zip(chosen, records, strict=True):
        results[at] = store_result(row)
    finished: list[Stored | Exists | Refused] = []
    for at, result in enumerate(results):
        if result is None:  # a duplicate of an earlier item
            first = results[first_of[digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]]]
            assert first is not None
            result = Exists() if isinstance(first, Stored) else first
        finished.append(result)
    count_stores(finished, [region.length_bytes for region in regions], core.counters)
    return finished


def delete(
    core: ClientCore,
    namespace: Namespace,
    keys: Keys,
    *,
    shards: int | Sequence[int] | None,
    deadline_ns: int,
) -> Verb[list[Hit | Miss]]:
    """Deletes the dense records and all sparse parts of keys. A key is a hit when any record of it was there."""
    chain = as_chain(keys)
    layout = namespace.layout
    parts = (None, *(part.name for part in layout.sparse_parts))
    sections = sections_of(layout, shards=choose_shards(layout, shards), parts=parts)
    yield from ensure_view(core, deadline_ns)
    if core.placement is None:
        return [miss_of(miss_reason(None)) for _ in range(len(chain))]
    plan = plan_records(chain, layout=layout, sections=sections, target_of=core.placement)
    jobs = [
        KeysJob(
            batch=batch,
            flow=core.options.write_flow,
            deadline_ns=deadline_ns,
            ask=lambda blob, _: Delete(namespace=namespace.digest, keys=blob),
            answer=End,
        )
        for batch in plan.batches
    ]
    if jobs:
        yield from attempt(core, jobs)
    answers = [
        known if (known := job.statuses()) is not None else bytes([miss_reason(job.failure)]) * len(job.batch.records)
        for job in jobs
    ]
    statuses = gather_statuses(plan, answers)
    width = len(sections) // len(parts)
    dense = key_statuses(plan, statuses, sections=range(width))
    return [Hit(length_bytes=0) if status == HIT else miss_of(status) for status in dense]


def drop(core: ClientCore, namespace: Namespace, manifest: bytes, deadline_ns: int) -> Verb[KVStoreError | None]:
    """Hides everything in the namespace on every target. Returns the first failure; None when all have done it."""
    yield from ensure_view(core, deadline_ns)
    jobs = [
        TellJob(
            target=target,
            flow=core.options.write_flow,
            deadline_ns=deadline_ns,
            message=Drop(namespace=namespace.digest),
            manifest=manifest,
        )
        for target in core.target_ids()
    ]
    if not jobs:
        return (yield from refresh_view(core, deadline_ns))
    yield from attempt(core, jobs)
    return next((job.failure for job in jobs if job.failure is not None), None)


def check_writable_part(layout: KVLayout, part: str | None) -> None:
    """Raises InvalidRequest for a dense part, which cannot be written on its own."""
    if part is not None and layout.part(part).is_dense:
        raise InvalidRequest(
            f"part {part!r} is dense: it shares one record with the others; write the whole record (part=None)"
        )


def wrong_length(layout: KVLayout, sections: Sequence[Section], index: int, region: Region) -> Refused | None:
    """The refusal of an item whose memory is not of the record's length, before any I/O; None when it fits."""
    needed = sum(layout.record_bytes(section.shard, part=section.part) for section in sections)
    if layout.is_exact or len(sections) > 1:
        fits, words = region.length_bytes == needed, f"{needed} are needed"
    else:
        fits, words = region.length_bytes <= needed, f"at most {needed} are allowed"
    if fits:
        return None
    return Refused(
        RefusedReason.INVALID,
        f"item {index} has {region.length_bytes} bytes in {len(region.views)} fragments, {words}",
    )


def _store_chosen(
    core: ClientCore,
    namespace: Namespace,
    manifest: bytes,
    request: StoreRequest,
    chain: KeyChain,
    sections: Sequence[Section],
    regions: Sequence[Region],
    chosen: Sequence[int],
    deadline_ns: int,
) -> Verb[list[list[OutgoingRecord]]]:
    """Writes the chosen items; one list of records for each of them, all with an outcome."""
    layout = namespace.layout
    facts = ChainFacts.of(chain)
    kind = PartFacts.of(layout, request.part)
    yield from ensure_view(core, deadline_ns)
    plan = plan_records(chain, layout=layout, sections=sections, target_of=core.placement or "")
    targets: dict[str, list[OutgoingRecord]] = {}
    rows: dict[int, list[OutgoingRecord]] = {at: [] for at in chosen}
    for batch in plan.batches:
        for index, number in enumerate(batch.records):
            at = number % plan.key_count
            if at not in rows:
                continue
            record = _outgoing(layout, sections, number // plan.key_count, regions[at], facts, kind, at)
            record.key = batch.keys[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            rows[at].append(record)
            targets.setdefault(batch.target, []).append(record)
    if core.placement is None:
        for row in rows.values():
            for record in row:
                record.finish(int(RefusedReason.OVERLOADED), detail=core.words_of_no_target())
        return list(rows.values())
    jobs = [
        StoreJob(
            target=target,
            flow=core.options.write_flow,
            deadline_ns=deadline_ns,
            namespace=namespace.digest,
            manifest=manifest,
            records=records,
            durability=request.durability,
            wait=request.wait,
        )
        for target, records in targets.items()
    ]
    if jobs:
        yield from attempt(core, jobs)
    for job, records in zip(jobs, targets.values(), strict=True):
        for record in records:
            if record.status == OPEN:
                reason, detail = refusal_of(job, record)
                record.finish(int(reason), detail=detail)
    return list(rows.values())


def _outgoing(
    layout: KVLayout,
    sections: Sequence[Section],
    number: int,
    region: Region,
    facts: ChainFacts,
    kind: PartFacts,
    index: int,
) -> OutgoingRecord:
    """One record of item `index`."""
    sizes = [layout.record_bytes(section.shard, part=section.part) for section in sections]
    base = sum(sizes[:number])
    length = region.length_bytes if len(sections) == 1 else sizes[number]
    return OutgoingRecord(
        key=b"",
        run_head=facts.run_head(index),
        parent=facts.parent(index),
        position=facts.position(index),
        part=kind.code,
        volatile_ttl_ns=kind.volatile_ttl_ns,
        region=region,
        base_bytes=base,
        length_bytes=length,
        block_bytes=kind.block_bytes,
    )

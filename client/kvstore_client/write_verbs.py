"""The verbs that write: put, delete, drop. Generators for a driver; see rounds.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from kvstore.cluster.view import READ_STATES, TargetId, View
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.limits import COPIES_MAX, DIGEST_BYTES, LAST_SILENCE_NS
from kvstore.types.keys import KeyChain
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, Hit, Miss, MissReason, Refused, RefusedReason, Stored
from kvstore.wire.messages import Delete, Drop, End, Manifest
from kvstore_client.attempts import attempt
from kvstore_client.copies import StoredItems, StoreRequest, store_items
from kvstore_client.core import ClientCore
from kvstore_client.incoming import HIT
from kvstore_client.lookups import KeysJob, TellJob
from kvstore_client.outcomes import count_stores, miss_of, miss_reason, store_result
from kvstore_client.planner import (
    Keys,
    Section,
    chain_in,
    choose_shards,
    gather_statuses,
    key_statuses,
    plan_records,
    sections_of,
)
from kvstore_client.regions import Region, region_of
from kvstore_client.rounds import Job, Verb, ensure_view, refresh_view
from kvstore_client.topology import places_of

_TELL_ALL = frozenset({HIT, int(MissReason.ABSENT)})
"""What may be said of a deleted key only when all of its places have been asked."""


def store(
    core: ClientCore, namespace: Namespace, manifest: Manifest, request: StoreRequest, deadline_ns: int
) -> Verb[list[Stored | Exists | Refused]]:
    """Writes records from the caller's memory."""
    layout = namespace.layout
    chain = chain_in(namespace, request.keys)
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
    items = StoredItems(namespace=namespace, sections=sections, chain=chain, part=request.part, regions=regions)
    yield from store_items(core, items, request, manifest, chosen, deadline_ns)
    for at in chosen:
        results[at] = store_result(items.copies_of(at))
    finished: list[Stored | Exists | Refused] = []
    for at, result in enumerate(results):
        if result is None:  # a duplicate of an earlier item
            first = results[first_of[digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]]]
            assert first is not None
            result = Exists(first.copies) if isinstance(first, Stored) else first
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
    """Deletes the dense records and all sparse parts of keys, wherever copies of them may be.

    A key is a hit when its dense record was there, and is left nowhere that could be asked. Targets that the view calls
    down are asked too: one that answers reads would go on giving it. When an answer names a newer view, its places are
    asked as well: they may have the keys. Where they cannot be, nothing is told as deleted or absent. Nor is it while a
    drive of a node on its own is away, or being read: in a cluster who comes back hears of it, here nobody tells.
    """
    layout = namespace.layout
    chain = chain_in(namespace, keys)
    chosen = choose_shards(layout, shards)
    was_there = [False] * len(chain)
    found: Sequence[int] = ()
    yield from ensure_view(core, deadline_ns)
    while True:
        view = core.view
        statuses, some = yield from _delete_by_view(core, namespace, chain, chosen, deadline_ns)
        # deleted by the older view, if only somewhere, and so absent by the newer one
        found = [
            HIT if before and now == MissReason.ABSENT else now for before, now in zip(was_there, statuses, strict=True)
        ]
        was_there = [before or status == HIT for before, status in zip(was_there, some, strict=True)]
        yield from ensure_view(core, deadline_ns)
        if core.view is view or time.monotonic_ns() >= deadline_ns:
            break
    if core.view is not view or core.has_heard_of_newer_view or _lacks_some(core.view):
        reason = MissReason.DEADLINE if time.monotonic_ns() >= deadline_ns else MissReason.UNAVAILABLE
        found = [reason if status in _TELL_ALL else status for status in found]
    return [Hit(length_bytes=0) if status == HIT else miss_of(status) for status in found]


def _lacks_some(view: View | None) -> bool:
    """Whether a node on its own has drives that nobody can ask now."""
    return view is not None and not view.cluster and any(one.state not in READ_STATES for one in view.targets)


def _delete_by_view(
    core: ClientCore, namespace: Namespace, chain: KeyChain, shards: Sequence[int], deadline_ns: int
) -> Verb[tuple[bytes | bytearray, bytes | bytearray]]:
    """Deletes keys wherever they may be by the view that is known.

    Returns:
        For each key how all of its places answered, and how the best one did: HIT there is deleted somewhere.
    """
    layout = namespace.layout
    parts = (None, *(part.name for part in layout.sparse_parts))
    sections = sections_of(layout, shards=shards, parts=parts)
    if core.placement is None:
        nowhere = bytes([miss_reason(None)]) * len(chain)
        return nowhere, nowhere
    where = places_of(core.placement, chain, copies=COPIES_MAX, with_down=True)
    where = where.without(core.unanswered(where.down))
    plan = plan_records(chain, layout=layout, sections=sections, where=where)
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
    for job in jobs:
        if job.target in where.down:
            job.as_last_resort()
        elif len(jobs) > 1:
            job.patience_ns = LAST_SILENCE_NS
    if jobs:
        yield from attempt(core, jobs, plans_again=True)
        jobs = [job for job in jobs if not (job.target in where.down and _has_no_say(core, job))]
        plan = replace(plan, batches=tuple(job.batch for job in jobs))
    answers = [
        known if (known := job.statuses()) is not None else bytes([miss_reason(job.failure)]) * len(job.batch.records)
        for job in jobs
    ]
    dense = range(len(sections) // len(parts))
    everywhere = key_statuses(plan, gather_statuses(plan, answers, from_all=True), sections=dense)
    somewhere = key_statuses(plan, gather_statuses(plan, answers), sections=dense)
    return everywhere, somewhere


def _has_no_say(core: ClientCore, job: Job) -> bool:
    """Whether a target that is down by the view is so indeed: it did not answer, or was not asked."""
    return job.failure is not None and (not job.started_ns or core.link(job.target).is_unanswered(time.monotonic_ns()))


def drop(core: ClientCore, namespace: Namespace, manifest: Manifest, deadline_ns: int) -> Verb[KVStoreError | None]:
    """Hides everything in the namespace on every target, also of a newer view that an answer names.

    Afterwards all of them count one generation: who had counted more drops than others, be it one that was repeated,
    would have them hide later what is put from now on.

    Returns the first failure of a target that is in the view; None when all have done it.
    """
    told: dict[TargetId, int] = {}
    failure = yield from _drop_everywhere(core, namespace, manifest, told, deadline_ns)
    newest = max(told.values(), default=0)
    behind = [target for target, generation in told.items() if 0 < generation < newest]
    jobs = [_drop_job(core, target, namespace, manifest, deadline_ns, generation=newest) for target in behind]
    if jobs:
        yield from attempt(core, jobs)
    here = set(core.target_ids())
    uneven = next((job.failure for job in jobs if job.failure is not None and job.target in here), None)
    if isinstance(uneven, InvalidRequest):  # not the caller's: it is dropped there, and counted far less often
        uneven = Unavailable(f"all have dropped it, and a target does not count as many drops as others: {uneven}")
    return failure or uneven


def _drop_job(
    core: ClientCore,
    target: TargetId,
    namespace: Namespace,
    manifest: Manifest,
    deadline_ns: int,
    *,
    generation: int = 0,
) -> TellJob:
    return TellJob(
        target=target,
        flow=core.options.write_flow,
        deadline_ns=deadline_ns,
        message=Drop(namespace=namespace.digest, generation=generation),
        manifest=manifest,
    )


def _drop_everywhere(
    core: ClientCore, namespace: Namespace, manifest: Manifest, told: dict[TargetId, int], deadline_ns: int
) -> Verb[KVStoreError | None]:
    """As `drop`; `told` gets the generation that began at each target that has done it, 0 where it does not say."""
    yield from ensure_view(core, deadline_ns)
    while True:
        view = core.view
        jobs = [
            _drop_job(core, target, namespace, manifest, deadline_ns)
            for target in core.target_ids()
            if target not in told
        ]
        if jobs:
            yield from attempt(core, jobs)
        elif not told:
            failure = yield from refresh_view(core, deadline_ns)
            if core.view is view or time.monotonic_ns() >= deadline_ns or not core.target_ids():
                return failure or Unavailable(core.words_of_no_target())  # nobody was told
            continue
        told.update({job.target: job.value for job in jobs if job.failure is None})
        yield from ensure_view(core, deadline_ns)
        if core.view is view or time.monotonic_ns() >= deadline_ns:
            here = set(core.target_ids())
            failures = (job.failure for job in jobs if job.failure is not None and job.target in here)
            failure = next(failures, None)
            untold = here - told.keys()
            if failure is None and untold:
                failure = Unavailable(
                    f"the view changed until the deadline; {len(untold)} of its targets were not told"
                )
            return failure


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

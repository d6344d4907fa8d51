"""Writing every copy of the records of a put, side by side, from the same memory of the caller.

A copy that could not be placed because the view has changed meanwhile is placed once more, by the new one.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.cluster.view import TargetId
from kvstore.errors import StaleView, Unavailable
from kvstore.limits import DIGEST_BYTES, LAST_SILENCE_NS, PLANS_PER_CALL_MAX
from kvstore.types.content_id import content_id
from kvstore.types.keys import KeyChain
from kvstore.types.namespace import Namespace
from kvstore.types.results import RefusedReason
from kvstore.wire.messages import Manifest
from kvstore_client.attempts import attempt
from kvstore_client.core import ClientCore
from kvstore_client.incoming import OPEN
from kvstore_client.outcomes import TAKEN
from kvstore_client.planner import Keys, Section, plan_records
from kvstore_client.record_facts import ChainFacts, PartFacts
from kvstore_client.regions import Item, Region
from kvstore_client.rounds import Verb, ensure_view, refresh_view
from kvstore_client.stores import OutgoingRecord, StoreJob, refusal_of
from kvstore_client.topology import places_to_write

_MOVED = frozenset({int(RefusedReason.DRAINING), int(RefusedReason.FENCED)})
"""Refusals by which a target says that it takes no new keys: another one does by the newest view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest:
    """Arguments of put, as the caller gave them; see `BoundNamespace.put`. `copies` None is what the view says."""

    keys: Keys
    buffers: Sequence[Item]
    shards: int | Sequence[int] | None
    part: str | None
    durability: int
    wait: int
    copies: int | None = None


class StoredItems:
    """The items of a put: for each record of each the copies that are, or were, to be written."""

    def __init__(
        self,
        *,
        namespace: Namespace,
        sections: Sequence[Section],
        chain: KeyChain,
        part: str | None,
        regions: Sequence[Region],
    ) -> None:
        self.namespace = namespace
        self.sections = sections
        self.chain = chain
        self._regions = regions
        self._facts = ChainFacts.of(chain)
        self._kind = PartFacts.of(namespace.layout, part)
        self._sizes = [namespace.layout.record_bytes(one.shard, part=one.part) for one in sections]
        self._bases = [sum(self._sizes[:at]) for at in range(len(sections))]
        self._copies: dict[int, dict[TargetId, OutgoingRecord]] = {}
        self._crcs: dict[int, dict[tuple[int, int], bytes]] = {}
        self._ids: dict[int, bytes] = {}

    def copies_of(self, item: int) -> list[list[OutgoingRecord]]:
        """The copies of each record of an item."""
        count = len(self.chain)
        return [list(self._copies[at * count + item].values()) for at in range(len(self.sections))]

    @property
    def is_new(self) -> bool:
        """Nothing was tried yet."""
        return not self._copies

    def needs(self, number: int, target: TargetId, wanted: int) -> bool:
        """Whether fewer than `wanted` copies of a record are taken, and none of them by that target."""
        taken = [name for name, copy in self._copies.get(number, {}).items() if copy.status in TAKEN]
        return len(taken) < wanted and target not in taken

    def copy_for(self, number: int, target: TargetId, key: bytes, *, is_one_of: int = 1) -> OutgoingRecord:
        """A new copy of record `number` of the plan, for a target.

        Where it is one of several, all have the same content id, so that a reader of parts may change from one to the
        other, and checksums that were made once.
        """
        section, item = divmod(number, len(self.chain))
        facts, kind, region = self._facts, self._kind, self._regions[item]
        copy = OutgoingRecord(
            key=key,
            run_head=facts.run_head(item),
            parent=facts.parent(item),
            position=facts.position(item),
            part=kind.code,
            volatile_ttl_ns=kind.volatile_ttl_ns,
            region=region,
            base_bytes=self._bases[section],
            length_bytes=region.length_bytes if len(self.sections) == 1 else self._sizes[section],
            block_bytes=kind.block_bytes,
            shared_crcs=None if is_one_of == 1 else self._crcs.setdefault(number, {}),
        )
        if is_one_of > 1:
            copy.own_id = self._ids.get(number) or self._new_id(number, copy)
        places = self._copies.setdefault(number, {})
        copy.was_offered = target in places and places[target].was_offered
        places[target] = copy
        return copy

    def _new_id(self, number: int, copy: OutgoingRecord) -> bytes:
        length = copy.length_bytes
        made = content_id(length, copy.crcs(0, length, copy.cut(0, length)), os.urandom(8))
        self._ids[number] = made
        return made

    def refuse(self, items: Sequence[int], detail: str) -> None:
        """There is nobody who could take these."""
        for item in items:
            for section in range(len(self.sections)):
                number = section * len(self.chain) + item
                if number not in self._copies:
                    self.copy_for(number, "", b"").finish(int(RefusedReason.OVERLOADED), detail=detail)


def store_items(
    core: ClientCore,
    items: StoredItems,
    request: StoreRequest,
    manifest: Manifest,
    chosen: Sequence[int],
    deadline_ns: int,
) -> Verb[None]:
    """Writes the chosen items. All their copies have an outcome afterwards."""
    yield from ensure_view(core, deadline_ns)
    for _ in range(PLANS_PER_CALL_MAX):
        view = core.view
        jobs = _jobs(core, items, request, manifest, chosen, deadline_ns)
        if not jobs:
            break
        yield from attempt(core, jobs, plans_again=not isinstance(core.placement, str))
        is_stale = any(isinstance(job.failure, StaleView) for job in jobs)
        may_have_moved = is_stale or any(_may_have_moved(job) for job in jobs)
        for job in jobs:
            if job.is_first_word and job.failure is None:
                core.link(job.target).was_told(items.namespace.digest)
            for record in job.records:
                if record.status == OPEN:
                    reason, detail = refusal_of(job, record)
                    record.finish(int(reason), detail=detail)
        if not may_have_moved or time.monotonic_ns() >= deadline_ns:
            break
        if core.view is view and (is_stale or core.wants_view(time.monotonic_ns())):
            yield from refresh_view(core, deadline_ns)
        if core.view is view:
            break
    items.refuse(chosen, core.words_of_no_target())


def _may_have_moved(job: StoreJob) -> bool:
    """Whether a newer view may name another place for what this one has not taken."""
    return isinstance(job.failure, Unavailable) or any(record.status in _MOVED for record in job.records)


def _jobs(
    core: ClientCore,
    items: StoredItems,
    request: StoreRequest,
    manifest: Manifest,
    chosen: Sequence[int],
    deadline_ns: int,
) -> list[StoreJob]:
    """One job for each target that is to have copies which are not taken yet."""
    placement = core.placement
    if placement is None:
        return []
    where = places_to_write(placement, items.chain, copies=request.copies)
    plan = plan_records(items.chain, layout=items.namespace.layout, sections=items.sections, where=where)
    copies = Counter(number for batch in plan.batches for number in batch.records) if len(plan.batches) > 1 else None
    wanted = set(chosen)
    is_first = items.is_new
    jobs = []
    for batch in plan.batches:
        records = [
            items.copy_for(
                number,
                batch.target,
                batch.keys[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES],
                is_one_of=copies[number] if copies else 1,
            )
            for index, number in enumerate(batch.records)
            if number % plan.key_count in wanted
            and (is_first or items.needs(number, batch.target, copies[number] if copies else 1))
        ]
        if records:
            job = StoreJob(
                target=batch.target,
                flow=core.options.write_flow,
                deadline_ns=deadline_ns,
                namespace=items.namespace.digest,
                manifest=manifest,
                records=records,
                durability=request.durability,
                wait=request.wait,
            )
            job.is_first_word = bool(manifest.copies) and core.link(batch.target).is_news(items.namespace.digest)
            if copies is not None and max(copies.values()) > 1:
                job.patience_ns = LAST_SILENCE_NS
            jobs.append(job)
    return jobs

"""Asking every place of some keys about them, side by side: matches, waits and what else is one frame each way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Generic, TypeAlias, TypeVar

from kvstore.cluster.view import TargetId
from kvstore.errors import InvalidRequest
from kvstore.limits import LAST_SILENCE_NS, PLACE_SILENCE_NS, RETRY_BACKOFF_NS_MIN, WAIT_SLICE_NS
from kvstore.types.keys import KeyChain
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason
from kvstore.wire.messages import End, Wait
from kvstore.wire.schema import Message
from kvstore_client.attempts import attempt
from kvstore_client.core import ClientCore
from kvstore_client.found_places import found_elsewhere
from kvstore_client.incoming import HIT
from kvstore_client.lookups import KeysJob
from kvstore_client.outcomes import miss_reason
from kvstore_client.planner import RecordPlan, Section, TargetBatch, gather_statuses, plan_records
from kvstore_client.rounds import Job, Verb, ensure_view
from kvstore_client.topology import ChainPlaces

A = TypeVar("A", bound=Message)
Ask: TypeAlias = Callable[[bytes, int], Message]
"""Makes the request for a blob of keys and the nanoseconds that are left."""
_FOUND: Final = frozenset({HIT, int(MissReason.PENDING)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What is asked about which keys."""

    namespace: Namespace
    chain: KeyChain
    sections: Sequence[Section]
    copies: int | None
    deadline_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers(Generic[A]):
    """What all places have answered.

    Attributes:
        where: The places; None when there is one, or nobody to ask.
        plan: Of the lookup; its batches are those that were asked, and count.
        jobs: One for each batch.
        told: One status for each record of each batch.
        statuses: One for each record of the plan, the best of all answers.
    """

    where: ChainPlaces | None
    plan: RecordPlan
    jobs: tuple[KeysJob[A], ...]
    told: tuple[bytes, ...]
    statuses: bytearray

    @property
    def is_pending(self) -> bool:
        """Whether some record is being written, and is nowhere yet."""
        return MissReason.PENDING in self.statuses


def ask_places(
    core: ClientCore,
    lookup: Lookup,
    ask: Ask,
    answer: type[A],
    *,
    has_statuses: bool = True,
    only_patience_ns: int = 0,
) -> Verb[Answers[A]]:
    """Asks every place about its records; then those that are down by the view for what nobody else has.

    Args:
        core: Of the call.
        lookup: What it is about.
        ask: Makes the requests.
        answer: Message that answers one.
        has_statuses: Answers say how it is with each record. Without, nothing is asked of targets that are down.
        only_patience_ns: How long the only place may be silent; 0 is until the deadline.
    """
    yield from ensure_view(core, lookup.deadline_ns)
    placement = core.placement
    if placement is None:
        empty = RecordPlan(key_count=len(lookup.chain), sections=tuple(lookup.sections), batches=())
        return Answers(where=None, plan=empty, jobs=(), told=(), statuses=gather_statuses(empty, []))
    asker = _Asker(core, lookup, ask, answer, has_statuses=has_statuses)
    if isinstance(placement, str):
        plan = asker.plan(placement)
        jobs = yield from asker.ask(plan.batches, patience_ns=only_patience_ns)
        return _gathered(plan, None, jobs)
    where = placement.of_chain(lookup.chain, copies=lookup.copies, with_down=has_statuses)
    where = where.without(core.unanswered(where.down))
    plan = asker.plan(where)
    live = [batch for batch in plan.batches if batch.target not in where.down]
    jobs = yield from asker.ask(live, patience_ns=PLACE_SILENCE_NS)
    answers = _gathered(replace(plan, batches=tuple(live)), where, jobs)
    if len(live) < len(plan.batches):
        rest = [
            batch
            for batch in plan.batches
            if batch.target in where.down and any(answers.statuses[at] not in _FOUND for at in batch.records)
        ]
        jobs += yield from asker.ask_down(rest)
        answers = _gathered(replace(plan, batches=tuple(job.batch for job in jobs)), where, jobs)
    return answers


def wait_places(core: ClientCore, lookup: Lookup) -> Verb[Answers[End]]:
    """Asks every place to wait until none of its records is pending, and answers as soon as none is pending anywhere.

    A place is asked to say something each WAIT_SLICE_NS, or quarter of the time that there is. One that does not is
    given up as it is by reads.
    """

    left_ns = lookup.deadline_ns - time.monotonic_ns()
    slice_ns = min(WAIT_SLICE_NS, max(1, left_ns // 4))  # sooner than a place is given up that others do not need

    def ask(blob: bytes, left_ns: int) -> Message:
        return Wait(namespace=lookup.namespace.digest, keys=blob, deadline_ns=min(left_ns, slice_ns))

    is_last = _is_last_slice(lookup.deadline_ns, slice_ns)
    found = yield from ask_places(core, lookup, ask, End, only_patience_ns=LAST_SILENCE_NS)
    asker = _Asker(core, lookup, ask, End, has_statuses=True)
    while found.is_pending and not is_last:
        yield RETRY_BACKOFF_NS_MIN  # a node that does not wait, for whatever reason, is not to be asked all the time
        is_last = _is_last_slice(lookup.deadline_ns, slice_ns)
        again = [
            at for at, told in enumerate(found.told) if found.jobs[at].failure is None and MissReason.PENDING in told
        ]
        if not again:
            break
        batches = found.plan.batches
        patience_ns = PLACE_SILENCE_NS if len(batches) > 1 else LAST_SILENCE_NS
        jobs = list(found.jobs)
        newer = yield from asker.ask([batches[at] for at in again], patience_ns=patience_ns)
        for at, job in zip(again, newer, strict=True):
            jobs[at] = job
        found = _gathered(found.plan, found.where, jobs)
    return found


def note_found(core: ClientCore, lookup: Lookup, answers: Answers[A]) -> None:
    """Remembers which keys are not where they belong: a read asks there first."""
    if answers.where is not None and answers.where.places.shape[1] > 1:
        found = found_elsewhere(answers.where, answers.plan, answers.told)
        core.found.note(lookup.namespace.digest, lookup.chain.digests, found)


def _is_last_slice(deadline_ns: int, slice_ns: int) -> bool:
    return deadline_ns - time.monotonic_ns() <= slice_ns


def _gathered(plan: RecordPlan, where: ChainPlaces | None, jobs: Sequence[KeysJob[A]]) -> Answers[A]:
    told = []
    for job in jobs:
        known = job.statuses()
        told.append(bytes([miss_reason(job.failure)]) * len(job.batch.records) if known is None else known)
    return Answers(where=where, plan=plan, jobs=tuple(jobs), told=tuple(told), statuses=gather_statuses(plan, told))


class _Hurry(Generic[A]):
    """Called with each job that is through: one that still runs, and whose records others have found by now, is given
    up when it says nothing for `silence_ns`; until the deadline nobody would gain anything by it."""

    def __init__(self, jobs: Sequence[KeysJob[A]], silence_ns: int) -> None:
        self._left = list(jobs)
        self._silence_ns = silence_ns
        self._found: set[int] = set()

    def __call__(self, ended: Job) -> Sequence[Job]:
        """See `Follow`."""
        for job in [job for job in self._left if job is ended]:
            self._left.remove(job)
            if job.failure is None:
                told = job.statuses() or b""
                found = zip(job.batch.records, told, strict=True)
                is_whole = told.count(HIT) == len(told)
                self._found.update(job.batch.records if is_whole else [at for at, one in found if one in _FOUND])
        now_ns = time.monotonic_ns()
        for job in self._left:
            records = job.batch.records
            if not job.silence_ns and records[0] in self._found and self._found.issuperset(records):
                job.hurry(self._silence_ns, now_ns)
        return ()


class _Asker(Generic[A]):
    """Makes and runs the jobs of a lookup."""

    def __init__(self, core: ClientCore, lookup: Lookup, ask: Ask, answer: type[A], *, has_statuses: bool) -> None:
        self._core = core
        self._lookup = lookup
        self._ask = ask
        self._answer = answer
        self._has_statuses = has_statuses
        self._silence_ns = min(PLACE_SILENCE_NS, max(1, (lookup.deadline_ns - time.monotonic_ns()) // 2))

    def plan(self, where: ChainPlaces | TargetId) -> RecordPlan:
        """Who is asked for what."""
        lookup = self._lookup
        return plan_records(lookup.chain, layout=lookup.namespace.layout, sections=lookup.sections, where=where)

    def ask(self, batches: Sequence[TargetBatch], *, patience_ns: int) -> Verb[list[KeysJob[A]]]:
        """One job for each batch, which have run; 0 waits for a silent target until the deadline."""
        jobs = [self._job(batch) for batch in batches]
        for job in jobs:
            job.patience_ns = patience_ns
        if jobs:
            if self._has_statuses:
                is_needed = partial(self._is_needed, jobs)
                yield from attempt(self._core, jobs, is_needed=is_needed, follow=_Hurry(jobs, self._silence_ns))
            else:
                yield from attempt(self._core, jobs)
        return jobs

    def _is_needed(self, jobs: Sequence[KeysJob[A]], failed: Job) -> bool:
        """Whether some record of a job that failed was found by no other one."""
        found: set[int] = set()
        for job in jobs:
            if job is not failed and job.failure is None:
                told = zip(job.batch.records, job.statuses() or b"", strict=False)  # none yet from one that still runs
                found.update(record for record, status in told if status in _FOUND)
        return any(not found.issuperset(job.batch.records) for job in jobs if job is failed)

    def ask_down(self, batches: Sequence[TargetBatch]) -> Verb[list[KeysJob[A]]]:
        """The same of targets that are down by the view: those that have answered."""
        jobs = [self._job(batch) for batch in batches]
        for job in jobs:
            job.as_last_resort()
        if jobs:
            yield jobs
        for job in jobs:
            if isinstance(job.failure, InvalidRequest):
                raise job.failure
        return [job for job in jobs if job.failure is None]

    def _job(self, batch: TargetBatch) -> KeysJob[A]:
        return KeysJob(
            batch=batch,
            flow=self._core.options.flow,
            deadline_ns=self._lookup.deadline_ns,
            ask=self._ask,
            answer=self._answer,
            has_statuses=self._has_statuses,
        )

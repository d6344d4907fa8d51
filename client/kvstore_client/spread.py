"""Reading records that may lie in several places: side by side, then on to the next place for what one did not have."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.cluster.run_places import NO_PLACE, Counts
from kvstore.cluster.view import TargetId
from kvstore.limits import (
    BREAKER_OPEN_NS_MIN,
    DIGEST_BYTES,
    LAST_SILENCE_NS,
    PLACE_SILENCE_NS,
    PLANS_PER_CALL_MAX,
    READ_RETRIES_MAX,
)
from kvstore.types.keys import KeyChain
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason
from kvstore_client.core import ClientCore
from kvstore_client.hints import hint
from kvstore_client.incoming import HIT, OPEN, IncomingRecord
from kvstore_client.loads import LoadJob
from kvstore_client.outcomes import close_open, miss_reason
from kvstore_client.place_order import at_try, load_seconds, reading_order
from kvstore_client.planner import all_record_keys, better_status
from kvstore_client.read_shape import ReadShape
from kvstore_client.rounds import Verb, attempt, refresh_view
from kvstore_client.topology import ChainPlaces, places_of

_ELSEWHERE = frozenset(map(int, MissReason)) - {MissReason.LAYOUT}
"""What another place may still make a hit. A record of another length than the layout's is the same everywhere."""
_LACKS = frozenset({int(MissReason.ABSENT), int(MissReason.EVICTED)})
_NEW_VIEW = frozenset({int(MissReason.UNAVAILABLE), int(MissReason.OVERLOADED)})
"""What a newer view may help with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadRequest:
    """A read over several workers; see `read_verbs.load`.

    Attributes:
        records: Section by section those of all keys.
        wanted: Content id that the caller named for each, zeros for any.
    """

    namespace: Namespace
    shape: ReadShape
    chain: KeyChain
    records: Sequence[IncomingRecord]
    wanted: Sequence[bytes]
    copies: int | None
    accept_pending: bool
    deadline_ns: int


def load_spread(core: ClientCore, request: SpreadRequest) -> Verb[None]:
    """Reads records, each from the first place that has it. All of them have a status afterwards."""
    for _ in range(PLANS_PER_CALL_MAX):
        view, placement = core.view, core.placement
        if placement is None:
            break
        read = _PlannedRead(core, request, places_of(placement, request.chain, copies=request.copies))
        yield from read.read()
        yield from hint(core, request.namespace.digest, read.lacking(), request.deadline_ns)
        if not any(record.status in _NEW_VIEW for record in request.records):
            break
        is_known = core.view is view and not (yield from _finds_new_view(core, request.deadline_ns))
        if is_known and not read.has_given_up:
            break
        if read.has_given_up:
            if time.monotonic_ns() + BREAKER_OPEN_NS_MIN >= request.deadline_ns:
                break
            yield BREAKER_OPEN_NS_MIN  # a place that was given up for another one is asked again, now that none has it
    close_open(request.records, None)


def _finds_new_view(core: ClientCore, deadline_ns: int) -> Verb[bool]:
    """Asks for the view, if that may help; whether it is another one than before."""
    view = core.view
    if core.wants_view(time.monotonic_ns()):
        yield from refresh_view(core, deadline_ns)
    return core.view is not view and time.monotonic_ns() < deadline_ns


class _PlannedRead:
    """One read by one view: every record goes from place to place until it is a hit.

    Attributes:
        has_given_up: A place was tried once only, and failed, because there was another one.
    """

    def __init__(self, core: ClientCore, request: SpreadRequest, where: ChainPlaces) -> None:
        self._core = core
        self._request = request
        self._workers = where.workers
        self._run_of = where.run_of
        links = [core.link(worker) for worker in where.workers]
        now_ns = time.monotonic_ns()
        rates = [link.read_bytes_per_second for link in links]
        loads = load_seconds(
            [link.in_flight_bytes for link in links], rates, [link.breaker.reopens_in_ns(now_ns) > 0 for link in links]
        )
        total_bytes = sum(record.room_bytes for record in request.records)
        run_bytes = total_bytes // max(1, len(where.places))
        best = max(rates, default=0.0) or 1.0
        self._order = reading_order(where, loads, run_bytes / np.array([rate or best for rate in rates], np.float64))
        self._tries: Counts = np.zeros(len(request.records), np.intp)
        everything = all_record_keys(request.chain, request.shape.sections, request.namespace.layout)
        self._keys = np.frombuffer(everything, np.dtype((np.void, DIGEST_BYTES)))
        self._best: dict[int, int] = {}
        self._found: dict[int, int] = {}  # place of each hit
        self._lacked: dict[int, int] = {}  # of records that were not where they belong, that place
        self.has_given_up = False

    def read(self) -> Verb[None]:
        """Asks place after place for what is not here yet, side by side."""
        records, deadline_ns = self._request.records, self._request.deadline_ns
        waiting = np.array([at for at, record in enumerate(records) if record.status != HIT], np.intp)
        self._make_ready(waiting)
        while len(waiting):
            jobs = self._jobs(waiting)
            if not jobs:
                break
            yield from self._run([job for job, _ in jobs])
            missed = [at for job, numbers in jobs for at in self._missed(job, numbers)]
            waiting = np.array([at for at in missed if records[at].status in _ELSEWHERE], np.intp)
            waiting = waiting[self._places(waiting, 0) != NO_PLACE]
            if time.monotonic_ns() >= deadline_ns:
                break
            self._make_ready(waiting)
        for at, status in self._best.items():
            if records[at].status != HIT:
                records[at].status = status

    def lacking(self) -> dict[tuple[TargetId, TargetId], bytes]:
        """Record keys by the worker that lacks them although they belong there, and the one that has them."""
        pairs: dict[tuple[int, int], list[int]] = {}
        for at, place in self._lacked.items():
            if at in self._found:
                pairs.setdefault((place, self._found[at]), []).append(at)
        return {
            (self._workers[lacks], self._workers[has]): self._keys[numbers].tobytes()
            for (lacks, has), numbers in pairs.items()
        }

    def _missed(self, job: LoadJob, numbers: Counts) -> list[int]:
        """The records of a job that are no hits; remembers who has and who lacks what."""
        missed = []
        place, records = self._workers.index(job.target), self._request.records
        is_first = len(numbers) > 0 and int(self._tries[numbers[0]]) == 1
        for at in numbers.tolist():
            status = records[at].status
            if status == HIT:
                if not is_first:
                    self._found[at] = place
                continue
            missed.append(at)
            self._best[at] = better_status(self._best.get(at, status), status)
            if is_first and status in _LACKS:
                self._lacked[at] = place
        self.has_given_up |= job.failure is not None and not job.retries_max and job.started_ns > 0
        return missed

    def _places(self, numbers: Counts, ahead: int) -> Counts:
        rows = self._run_of[numbers % len(self._run_of)]
        return at_try(self._order, rows, self._tries[numbers] + ahead)

    def _make_ready(self, numbers: Counts) -> None:
        for at in numbers.tolist():
            record = self._request.records[at]
            if record.status != OPEN:
                record.restart()
                record.content_id = self._request.wanted[at]

    def _jobs(self, waiting: Counts) -> list[tuple[LoadJob, Counts]]:
        """One job for each worker that is the next place of some records."""
        places, others = self._places(waiting, 0), self._places(waiting, 1)
        jobs = []
        for place in np.unique(places).tolist():
            if place != NO_PLACE:
                chosen = places == place
                numbers = waiting[chosen]
                has_others = bool((others[chosen] != NO_PLACE).all())
                jobs.append((self._job(self._workers[place], numbers, has_others=has_others), numbers))
        self._tries[waiting] += 1
        return jobs

    def _job(self, target: TargetId, numbers: Counts, *, has_others: bool) -> LoadJob:
        request, shape = self._request, self._request.shape
        chosen = numbers.tolist()
        job = LoadJob(
            target=target,
            flow=self._core.options.flow,
            deadline_ns=request.deadline_ns,
            namespace=request.namespace.digest,
            keys=self._keys[numbers].tobytes(),
            records=[request.records[at] for at in chosen],
            shared_spans=shape.shared_spans,
            spans=None if shape.is_plain else shape.spans_of(chosen, len(request.chain)),
            accept_pending=request.accept_pending,
        )
        job.retries_max = 0 if has_others else READ_RETRIES_MAX
        left_ns = max(1, request.deadline_ns - time.monotonic_ns())
        if has_others:
            job.patience_ns = min(PLACE_SILENCE_NS, -(-left_ns // 2))
        elif left_ns > 2 * LAST_SILENCE_NS:
            job.patience_ns = LAST_SILENCE_NS  # there is time to find out whether it lives, and to ask again
        return job

    def _run(self, jobs: Sequence[LoadJob]) -> Verb[None]:
        """Runs jobs; what they did not bring has a reason afterwards."""
        core = self._core
        asked = [(core.link(job.target), sum(record.room_bytes for record in job.records)) for job in jobs]
        for link, length_bytes in asked:
            link.in_flight_bytes += length_bytes
        started_ns = time.monotonic_ns()
        try:
            yield from attempt(core, jobs)
        finally:
            for link, length_bytes in asked:
                link.in_flight_bytes -= length_bytes
        elapsed_ns = time.monotonic_ns() - started_ns
        for job, (link, _) in zip(jobs, asked, strict=True):
            if job.failure is not None:
                status = miss_reason(job.failure)
                for record in job.records:
                    if record.status == OPEN:
                        record.status = status
            elif job.received_bytes:
                link.note_read(job.received_bytes, elapsed_ns)

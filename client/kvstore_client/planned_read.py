"""One read of records that may lie in several places, by one view: every record goes from place to place.

The places are asked side by side, and what one did not have is asked of the next one at once, while the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.cluster.run_places import NO_PLACE, Counts
from kvstore.cluster.view import TargetId
from kvstore.errors import InvalidRequest
from kvstore.limits import DIGEST_BYTES, LAST_SILENCE_NS, PLACE_SILENCE_NS, READ_RETRIES_MAX
from kvstore.types.keys import KeyChain
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason
from kvstore_client.attempts import attempt
from kvstore_client.core import ClientCore
from kvstore_client.incoming import HIT, OPEN, IncomingRecord
from kvstore_client.loads import LoadJob
from kvstore_client.outcomes import miss_reason
from kvstore_client.place_order import at_try, load_seconds, prefer, reading_order
from kvstore_client.planner import all_record_keys, better_status
from kvstore_client.read_shape import ReadShape
from kvstore_client.rounds import Job, Verb
from kvstore_client.topology import ChainPlaces

_ELSEWHERE = frozenset(map(int, MissReason)) - {MissReason.LAYOUT}
"""What another place may still make a hit. A record of another length than the layout's is the same everywhere."""
_LACKS = frozenset({int(MissReason.ABSENT), int(MissReason.EVICTED)})


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


class PlannedRead:
    """See above. `read`, once.

    Attributes:
        has_given_up: A place was tried once only, and failed, because there was another one.
    """

    def __init__(
        self, core: ClientCore, request: SpreadRequest, where: ChainPlaces, *, is_repeated: bool = False
    ) -> None:
        """
        Args:
            core: Of the call.
            request: What to read.
            where: The places.
            is_repeated: Every place was asked once already: each gets the patience of a last one, since no other place
                has had what is still to be read.
        """
        self._is_repeated = is_repeated
        self._core = core
        self._request = request
        self._workers = where.workers
        self._is_down = np.array([worker in where.down for worker in where.workers], np.bool_)
        self._run_of = where.run_of
        self._order = self._loaded_order(where)
        self._tries: Counts = np.zeros(len(request.records), np.intp)
        everything = all_record_keys(request.chain, request.shape.sections, request.namespace.layout)
        self._keys = np.frombuffer(everything, np.dtype((np.void, DIGEST_BYTES)))
        self._best: dict[int, int] = {}
        self._found: dict[int, int] = {}  # place of each hit that was not where it was to be looked for first
        self._lacked: dict[int, int] = {}  # of records that were not where they belong, that place
        self._known_lacks: dict[int, int] = {}  # by key: the place where it belongs, which lacked it in a lookup
        self._running: dict[Job, tuple[LoadJob, Counts, int]] = {}
        self.has_given_up = False
        self._look_where_found(where)

    def read(self) -> Verb[None]:
        """Asks place after place for what is not here yet. All records have a status afterwards."""
        records, deadline_ns = self._request.records, self._request.deadline_ns
        waiting = np.array([at for at, record in enumerate(records) if record.status != HIT], np.intp)
        self._make_ready(waiting)
        try:
            while len(waiting):
                jobs = self._jobs(waiting)
                if not jobs:
                    break
                yield from attempt(self._core, jobs, follow=self._follow)
                missed = [at for job in list(self._running) for at in self._ended(job)]
                if time.monotonic_ns() >= deadline_ns:
                    break
                waiting = self._for_next_place(missed)
        finally:
            for job in list(self._running):
                self._let_go(job)
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

    def _loaded_order(self, where: ChainPlaces) -> Counts:
        """The places of each run, by what each worker has to do."""
        links = [self._core.link(worker) for worker in where.workers]
        now_ns = time.monotonic_ns()
        rates = [link.read_bytes_per_second for link in links]
        loads = load_seconds(
            [link.in_flight_bytes for link in links], rates, [link.breaker.reopens_in_ns(now_ns) > 0 for link in links]
        )
        total_bytes = sum(record.room_bytes for record in self._request.records)
        run_bytes = total_bytes // max(1, len(where.places))
        best = max(rates, default=0.0) or 1.0
        return reading_order(where, loads, run_bytes / np.array([rate or best for rate in rates], np.float64))

    def _look_where_found(self, where: ChainPlaces) -> None:
        """Puts places where a lookup has found keys lately before those where it has not."""
        known = self._core.found.of(self._request.namespace.digest)
        if not known:
            return
        numbers = {worker: number for number, worker in enumerate(where.workers)}
        digests = self._request.chain.digests
        firsts = np.full(len(where.run_of), NO_PLACE, np.intp)
        for at in range(len(firsts)):
            entry = known.get(digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES])
            if entry is not None:
                firsts[at] = numbers.get(entry[0], NO_PLACE)
                self._known_lacks[at] = numbers.get(entry[1], NO_PLACE)
        self._order = prefer(self._order[self._run_of], firsts)
        self._run_of = np.arange(len(firsts))

    def _follow(self, ended: Job) -> Sequence[Job]:
        """What a job did not bring is asked of the next places, beside the jobs that still run."""
        if isinstance(ended.failure, InvalidRequest) or time.monotonic_ns() >= self._request.deadline_ns:
            return ()  # `read` tells
        waiting = self._for_next_place(self._ended(ended))
        return self._jobs(waiting) if len(waiting) else ()

    def _ended(self, ended: Job) -> list[int]:
        """Takes over what a job has brought; the records that are no hits, which have a reason then."""
        job, numbers = self._let_go(ended)
        if job.failure is not None:
            status = miss_reason(job.failure)
            for record in job.records:
                if record.status == OPEN:
                    record.status = status
        elif job.received_bytes:
            self._core.link(job.target).note_read(job.received_bytes, job.busy_ns)
        was_asked = job.started_ns > 0 or self._core.link(job.target).breaker.is_doubted(time.monotonic_ns())
        is_given_up = job.failure is not None and not job.retries_max and was_asked
        self.has_given_up |= is_given_up and not job.is_last_resort
        place = self._workers.index(job.target)
        return [at for at in numbers.tolist() if not self._is_hit(at, job, place)]

    def _is_hit(self, at: int, job: LoadJob, place: int) -> bool:
        """Whether a record is one; remembers who has and who lacks what."""
        is_first, status = int(self._tries[at]) == 1, self._request.records[at].status
        if status == HIT:
            lacks = self._known_lacks.get(at % len(self._run_of), NO_PLACE) if is_first else NO_PLACE
            if lacks not in (NO_PLACE, place):
                self._lacked[at] = lacks
            if not (is_first and lacks == NO_PLACE) and not job.is_last_resort:
                self._found[at] = place
            return True
        if job.failure is None or not job.is_last_resort or at not in self._best:
            self._best[at] = better_status(self._best.get(at, status), status)
        if is_first and status in _LACKS:
            self._lacked[at] = place
        return False

    def _for_next_place(self, missed: Sequence[int]) -> Counts:
        """Those that may be a hit at another place, made ready for it."""
        records = self._request.records
        waiting: Counts = np.array([at for at in missed if records[at].status in _ELSEWHERE], np.intp)
        while True:
            waiting = waiting[self._places(waiting, 0) != NO_PLACE]
            in_vain = np.isin(self._places(waiting, 0), self._unanswered())
            if not in_vain.any():
                break
            self._tries[waiting[in_vain]] += 1
        self._make_ready(waiting)
        return waiting

    def _unanswered(self) -> list[int]:
        """Workers that the view calls down, and rightly so, as far as this read has noticed by now."""
        down = [self._workers[number] for number in np.flatnonzero(self._is_down)]
        return [self._workers.index(worker) for worker in self._core.unanswered(down)]

    def _places(self, numbers: Counts, ahead: int) -> Counts:
        rows: Counts = self._run_of[numbers % len(self._run_of)]
        return at_try(self._order, rows, self._tries[numbers] + ahead)

    def _make_ready(self, numbers: Counts) -> None:
        for at in numbers.tolist():
            record = self._request.records[at]
            if record.status != OPEN:
                record.restart()
                record.content_id = self._request.wanted[at]

    def _jobs(self, waiting: Counts) -> list[LoadJob]:
        """One job for each worker that is the next place of some records."""
        places, others = self._places(waiting, 0), self._places(waiting, 1)
        jobs = []
        for place in np.unique(places).tolist():
            if place != NO_PLACE:
                chosen = places == place
                numbers, nexts = waiting[chosen], others[chosen]
                has_others = bool(((nexts != NO_PLACE) & ~self._is_down[nexts]).all()) and not self._is_repeated
                job = self._job(self._workers[place], numbers, has_others=has_others)
                if self._is_down[place]:
                    job.as_last_resort()
                jobs.append(job)
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
        job.persists = not has_others
        left_ns = max(1, request.deadline_ns - time.monotonic_ns())
        if has_others:
            job.patience_ns = min(PLACE_SILENCE_NS, -(-left_ns // 2))
        elif left_ns > 2 * LAST_SILENCE_NS:
            job.patience_ns = LAST_SILENCE_NS  # there is time to find out whether it lives, and to ask again
        length_bytes = sum(record.room_bytes for record in job.records)
        self._core.link(target).in_flight_bytes += length_bytes
        self._running[job] = (job, numbers, length_bytes)
        return job

    def _let_go(self, ended: Job) -> tuple[LoadJob, Counts]:
        """A job runs no more, and is no load on its target."""
        job, numbers, length_bytes = self._running.pop(ended)
        self._core.link(job.target).in_flight_bytes -= length_bytes
        return job, numbers

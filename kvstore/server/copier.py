"""Copies of records between nodes, as one worker takes part in it: what it is to get, is asked about, is told of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from kvstore.cluster.view import READ_STATES, Target, TargetId, View
from kvstore.engine.api import Engine, NamespaceRef
from kvstore.engine.engine import DriveEngine
from kvstore.engine.heads import Head
from kvstore.engine.told import delete_by_prefix, raise_generation, was_deleted
from kvstore.errors import DeadlineExceeded, KVStoreError
from kvstore.limits import (
    DIGEST_BYTES,
    PULL_BURST_BYTES,
    PULL_CLOSED_NS,
    PULL_SOURCES_MAX,
    PULL_STALL_NS,
    SECOND_NS,
)
from kvstore.server.loop import Loop
from kvstore.server.peer import Greeting, PeerCall
from kvstore.server.peers import Peers
from kvstore.server.puller import Fetch
from kvstore.server.repair import ByteBudget, PullQueue
from kvstore.server.spread_plan import returned
from kvstore.server.spreader import Spreader
from kvstore.server.teller import Teller
from kvstore.telemetry.logs import RepeatLogger
from kvstore.telemetry.metrics import DataplaneMetrics, PullEnd
from kvstore.types.results import MissReason, RefusedReason
from kvstore.wire.replicas import HeadsReply

log = logging.getLogger(__name__)

_NEVER_NS: Final = 1 << 63


class OwnDrive(Protocol):
    """A drive of this worker."""

    @property
    def id(self) -> TargetId: ...

    @property
    def engine(self) -> DriveEngine: ...


class PlaneSide(Protocol):
    """What the copier needs of the data plane.

    Attributes:
        now_ns: the time of this turn.
        peer_token: what this node shows to others.
        is_draining, fenced_from_ns: whether, and from when on, nothing new is taken.
    """

    loop: Loop
    metrics: DataplaneMetrics
    faults: RepeatLogger
    now_ns: int
    peer_token: bytes
    is_draining: bool
    fenced_from_ns: int

    def wake_engine(self) -> None:
        """The engine has work, though none of its descriptors says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsFound:
    """What this worker says of records: an entry for each, and of their namespace."""

    heads: Sequence[Head | MissReason]
    generation: int
    manifest: bytes
    copies: int = 0


class Copier:
    """The part of one worker in keeping copies. Implements `puller.Home`.

    Attributes:
        queue: what is to be copied to this worker.
        engine: of all drives together.
        view: of the cluster, as the worker was told last.
        due_ns: when `poll` has something to do.
    """

    def __init__(
        self, drives: Sequence[OwnDrive], engine: Engine, plane: PlaneSide, *, client_id: bytes, bytes_second: int
    ) -> None:
        """
        Args:
            client_id: that other nodes know this worker by, 16 bytes.
            bytes_second: what may be copied here; 0 copies nothing.
        """
        self._drives = drives
        self._own = frozenset(drive.id for drive in drives)
        self._plane = plane
        self._client_id = client_id
        self.engine = engine
        self.queue = PullQueue()
        self.view = View(epoch=0, node_id="", targets=())
        self.due_ns = _NEVER_NS
        self._budget = ByteBudget(bytes_second=bytes_second, burst_bytes=PULL_BURST_BYTES, now_ns=plane.now_ns)
        self._peers = Peers(plane.loop, greeting=self._greeting, clock=lambda: plane.now_ns)
        self._fetches: dict[TargetId, Fetch] = {}
        self._teller = Teller(self, [drive.engine for drive in drives])
        self.spreader = Spreader(self, drives)
        for drive in drives:
            drive.engine.store.ledger.graves.enabled = True

    # --- the loop ---------------------------------------------------------------------------------------------------
    @property
    def now_ns(self) -> int:
        """The time of this turn."""
        return self._plane.now_ns

    def set_view(self, view: View) -> None:
        """The cluster has changed."""
        before, self.view = self.view, view
        self._teller.tell(returned(before, view, self._own), view)
        self.spreader.set_view(view)
        self._due_now()

    def poll(self, now_ns: int) -> None:
        """Go on with what may go on."""
        self._peers.expire(now_ns)
        for fetch in [fetch for fetch in self._fetches.values() if _has_stalled(fetch, now_ns)]:
            stalled = DeadlineExceeded(f"a batch made no progress for {PULL_STALL_NS // SECOND_NS} s")
            # first: half a frame may have come, and the rest of it must not land in memory that was given back
            self._peers.hang_up(fetch.source, stalled)
            fetch.failed(stalled)
        self._teller.poll(now_ns)
        self.spreader.poll(now_ns)
        if self._takes_records and self._budget.ready(now_ns):
            for fetch in [fetch for fetch in self._fetches.values() if fetch.waits]:
                if self._budget.ready(now_ns):
                    fetch.go_on()
            while len(self._fetches) < PULL_SOURCES_MAX and self._start_fetch(now_ns):
                pass
        self._plane.metrics.pull_queue = len(self.queue)
        self.due_ns = self._next_ns(now_ns)

    def _next_ns(self, now_ns: int) -> int:
        times = [self._peers.next_timer_ns(), self._teller.due_ns, self.spreader.due_ns]
        times += [fetch.progress_ns + PULL_STALL_NS + 1 for fetch in self._fetches.values() if not fetch.waits]
        waits = any(fetch.waits for fetch in self._fetches.values())
        if not self._takes_records:
            return min([now_ns + PULL_CLOSED_NS, *(at for at in times if at is not None)])
        queue_ns = None
        if len(self._fetches) < PULL_SOURCES_MAX:
            queue_ns = self.queue.next_ns(now_ns, busy=self._busy())
        if waits or queue_ns is not None:
            ready_ns = self._budget.ready_at_ns(now_ns)
            if ready_ns is not None:
                times.append(ready_ns if waits else max(ready_ns, queue_ns or 0))
        return min((at for at in times if at is not None), default=_NEVER_NS)

    @property
    def _takes_records(self) -> bool:
        """Whether anything may be stored here: a node that drains, or that nobody vouches for, copies nothing."""
        return not self._plane.is_draining and self._plane.now_ns < self._plane.fenced_from_ns

    def _due_now(self) -> None:
        self.due_ns = min(self.due_ns, self._plane.now_ns)

    def close(self) -> None:
        """Give up what is under way."""
        for fetch in list(self._fetches.values()):
            fetch.abandon()
        self._peers.close()

    # --- fetching ---------------------------------------------------------------------------------------------------
    def _start_fetch(self, now_ns: int) -> bool:
        batch = self.queue.next_batch(now_ns, busy=self._busy())
        if batch is None:
            return False
        source = self._readable(batch.source)
        if source is None:
            lost = self.queue.failed(batch, now_ns) + self.queue.give_up(batch.source)
            self.ended(PullEnd.GIVEN_UP, lost)
            return True
        fetch = Fetch(self, source, batch, client_id=self._client_id, on_end=self._fetch_ended)
        self._fetches[batch.source] = fetch
        fetch.start()
        return True

    def _busy(self) -> set[TargetId]:
        """Sources that nothing is asked of now."""
        return self._teller.untold | self._fetches.keys()

    def _greeting(self) -> Greeting:
        return Greeting(client_id=self._client_id, token=self._plane.peer_token)

    def _fetch_ended(self, fetch: Fetch, again: Sequence[bytes], error: KVStoreError | None) -> None:
        source = fetch.batch.source
        if self._fetches.get(source) is fetch:
            del self._fetches[source]
        if error is None:
            lost = self.queue.done(fetch.batch, again=frozenset(again))
        else:
            self._plane.faults.warning("pull", f"copies from target {source}: {error}")
            lost = self.queue.failed(fetch.batch, self._plane.now_ns)
        self.ended(PullEnd.GIVEN_UP, lost)
        self._due_now()

    def _readable(self, target_id: TargetId) -> Target | None:
        """A target of the view that answers reads."""
        target = self.view.target(target_id)
        return target if target is not None and target.state in READ_STATES else None

    @property
    def metrics(self) -> DataplaneMetrics:
        """The worker's numbers."""
        return self._plane.metrics

    # --- puller.Home ------------------------------------------------------------------------------------------------
    def wake(self) -> None:
        """See `Home.wake`."""
        self._plane.wake_engine()
        self._due_now()

    def ask(self, target: Target, call: PeerCall) -> None:
        """See `Home.ask`."""
        self._peers.ask(target, call)
        self._due_now()

    def moved(self, length_bytes: int) -> None:
        """See `Home.moved`."""
        self._plane.metrics.pulled_bytes += length_bytes
        self._budget.take(length_bytes, self._plane.now_ns)

    def ended(self, how: PullEnd, count: int = 1) -> None:
        """See `Home.ended`."""
        self._plane.metrics.pulls[how] += count

    def was_deleted(self, namespace: NamespaceRef, key: bytes) -> bool:
        """See `Home.was_deleted`."""
        return any(was_deleted(drive.engine, namespace.digest, key) for drive in self._drives)

    def namespace_of(self, reply: HeadsReply, namespace: bytes, then: Callable[[NamespaceRef | None], None]) -> None:
        """See `Home.namespace_of`. Raises InvalidRequest when it cannot be registered here."""
        self.engine.add_namespace(reply.manifest, copies=reply.copies)
        own = self._generation(namespace)
        if reply.generation < own:
            then(None)
        else:
            self.raise_generations(namespace, reply.generation, lambda: then(self.engine.namespace(namespace)))

    def _generation(self, namespace: bytes) -> int:
        known = (drive.engine.namespace(namespace) for drive in self._drives)
        return max((ref.generation for ref in known if ref is not None), default=0)

    # --- what others ask ----------------------------------------------------------------------------------------------
    def want(self, engine: Engine, namespace: NamespaceRef, keys: bytes, source: TargetId, now_ns: int) -> list[int]:
        """Take records to be copied here; 0 or a RefusedReason for each (see `wire.replicas.Pull`).

        Args:
            keys: n * 32 bytes of record keys.
        """
        count = len(keys) // DIGEST_BYTES
        if source in self._own:
            return [0] * count
        if self._readable(source) is None:
            return [RefusedReason.INVALID] * count
        statuses = engine.match(namespace, keys, now_ns=now_ns, touch=False).statuses
        lacking = [at for at, status in enumerate(statuses) if status]
        wanted = [keys[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] for at in lacking]
        taken = self.queue.offer(namespace.digest, wanted, source, tenant=namespace.tenant)
        answers = [0] * count
        for at, is_taken in zip(lacking, taken, strict=True):
            answers[at] = 0 if is_taken else RefusedReason.OVERLOADED
        self._due_now()
        return answers

    def heads(self, digest: bytes, keys: Sequence[bytes], on_done: Callable[[HeadsFound], None]) -> None:
        """Heads of records of a namespace, over all drives."""
        known = [(drive.engine, ref) for drive in self._drives if (ref := drive.engine.namespace(digest)) is not None]
        answers: list[list[Head | MissReason]] = []
        manifest = known[0][0].store.namespaces.manifest(digest) if known else None
        generation = self._generation(digest)
        copies = known[0][0].store.namespaces.copies(digest) if known else 0

        def answered(found: list[Head | MissReason]) -> None:
            answers.append(found)
            if len(answers) == len(known):
                best = [min(of_one, key=_worth) for of_one in zip(*answers, strict=True)]
                on_done(HeadsFound(heads=best, generation=generation, manifest=manifest or b"", copies=copies))

        for engine, ref in known:
            engine.store.heads.read(ref, keys, answered)

    def forget(
        self,
        digest: bytes,
        *,
        generation: int,
        prefixes: Sequence[bytes],
        ages_ns: Sequence[int],
        on_done: Callable[[], None],
    ) -> None:
        """Others tell what was deleted in a namespace, which every drive knows, and dropped.

        Args:
            prefixes: of record keys, 16 bytes each.
            ages_ns: how long ago each was deleted.
            on_done: called once all of it is on the drives.
        """
        self.raise_generations(digest, generation, partial(self._delete, digest, prefixes, ages_ns, on_done))

    def raise_generations(self, digest: bytes, generation: int, on_done: Callable[[], None]) -> None:
        """Drop what any drive has of an older generation of a namespace than this one."""
        ended = _countdown(len(self._drives), on_done)
        for drive in self._drives:
            ref = drive.engine.namespace(digest)
            assert ref is not None, "a namespace is added to every drive"
            raise_generation(drive.engine, ref, generation, ended)
        self._plane.wake_engine()

    def _delete(
        self, digest: bytes, prefixes: Sequence[bytes], ages_ns: Sequence[int], on_done: Callable[[], None]
    ) -> None:
        if not prefixes:
            on_done()
            return
        ended = _countdown(len(self._drives), on_done)
        for drive in self._drives:
            ref = drive.engine.namespace(digest)
            assert ref is not None, "a namespace is added to every drive"
            delete_by_prefix(drive.engine, ref, prefixes, ages_ns, ended)
        self._plane.wake_engine()


def _countdown(count: int, on_last: Callable[[], None]) -> Callable[[], None]:
    """What calls `on_last` when it has been called so often."""
    left = count

    def one() -> None:
        nonlocal left
        left -= 1
        if not left:
            on_last()

    return one


def _has_stalled(fetch: Fetch, now_ns: int) -> bool:
    """Whether a batch waits for what may never come, such as the log of a drive that fails."""
    return not fetch.waits and now_ns - fetch.progress_ns > PULL_STALL_NS


def _worth(one: Head | MissReason) -> int:
    """Which drive's answer counts, the lowest: one that cannot give a record now does not say that it is gone."""
    return 0 if isinstance(one, Head) else 2 if one is MissReason.ABSENT else 1

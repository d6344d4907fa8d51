"""This worker's own records, walked slowly, so that whoever should have one of them and lacks it is told to fetch it.

Two uses: records that should have several copies get lost ones back, after a view change and then again and again; and
a draining worker hands on what it holds, what is shared by most first, then the warmest. Whoever holds a record already
answers a PULL without any work, so nothing is remembered of whom was told what.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

import numpy as np

from kvstore.cluster.view import Target, TargetId, View
from kvstore.engine.engine import DriveEngine
from kvstore.engine.format import Entries, distinct
from kvstore.engine.location import I64, U32
from kvstore.engine.walk import Walked
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.limits import (
    SPREAD_GROUPS_MAX,
    SPREAD_PAUSE_NS,
    SPREAD_REST_NS,
    SPREAD_RETRY_NS,
    SPREAD_SETTLE_NS,
    SPREAD_TRIES_DRAINING,
    SPREAD_TRIES_MAX,
)
from kvstore.server.errand import Errand, end_of
from kvstore.server.peer import PeerCall
from kvstore.server.spread_plan import Shape, SpreadPlan, head_of
from kvstore.telemetry.metrics import DataplaneMetrics
from kvstore.types.namespace import Manifest
from kvstore.types.results import RefusedReason
from kvstore.wire.messages import End, Match, MatchReply
from kvstore.wire.replicas import Forget, Pull
from kvstore.wire.schema import Message

log = logging.getLogger(__name__)

_NEVER_NS: Final = 1 << 63
_SHAPES_MAX: Final = 1_024


class SpreadDrive(Protocol):
    """A drive whose records are walked."""

    @property
    def id(self) -> TargetId: ...

    @property
    def engine(self) -> DriveEngine: ...


class SpreadHost(Protocol):
    """What the spreader needs of the worker."""

    @property
    def now_ns(self) -> int:
        """The time of this turn."""

    @property
    def metrics(self) -> DataplaneMetrics: ...

    def ask(self, target: Target, call: PeerCall) -> None:
        """Carry out a call at another worker."""

    def wake(self) -> None:
        """The engine has work, and `poll` is to be called."""


@dataclass(slots=True, eq=False)
class _Group:
    """Records of one namespace that one worker should have. `told`: it has taken them into its queue, or holds them."""

    target: Target
    digest: bytes
    source: TargetId
    keys: list[bytes]
    tries: int = 0
    told: bool = False
    due_ns: int = 0

    @property
    def line(self) -> tuple[TargetId, bytes]:
        """Groups of one line are told one after another, in the order that their records were chosen in."""
        return self.target.id, self.digest


class Spreader:
    """See the module. One round at a time over all drives of this worker.

    Attributes:
        due_ns: when `poll` has something to do.
        handed_on: records that other workers have been seen to hold since this one began to drain.
        left_behind: of those that were to be handed on, what nobody took.
        is_done: draining, and everything was handed on or left behind.
    """

    def __init__(self, host: SpreadHost, drives: Sequence[SpreadDrive]) -> None:
        self._host = host
        self._drives = drives
        self._own = frozenset(drive.id for drive in drives)
        self._plan: SpreadPlan | None = None
        self._round: _Round | None = None
        self._groups: list[_Group] = []
        self._introduced: set[tuple[TargetId, bytes]] = set()  # who has been told of which namespace in this round
        self._go_on: Callable[[], None] | None = None
        self._go_on_ns = 0
        self._round_ns = _NEVER_NS
        self.due_ns = _NEVER_NS
        self.handed_on = 0
        self.left_behind = 0
        self.is_done = False

    def set_view(self, view: View) -> None:
        """The cluster has changed: what belongs where is found out anew, when it has settled."""
        was_draining = self._plan is not None and self._plan.is_draining
        self._plan = SpreadPlan(view, self._own)
        if self._plan.is_draining and was_draining and self._round is not None:
            return  # it goes on by the new view
        self._end_round()
        self.is_done = False
        if self._plan.is_draining:
            self.handed_on = self.left_behind = 0
        self._round_ns = self._host.now_ns + (0 if self._plan.is_draining else SPREAD_SETTLE_NS)
        self.due_ns = min(self.due_ns, self._round_ns)

    def poll(self, now_ns: int) -> None:
        """Go on with what is due."""
        for group in [group for group in self._sayable() if group.due_ns <= now_ns]:
            group.due_ns = _NEVER_NS  # until it is answered
            self._say(group)
        if self._go_on is not None and now_ns >= self._go_on_ns and len(self._groups) < SPREAD_GROUPS_MAX:
            go_on, self._go_on = self._go_on, None
            go_on()
            self._host.wake()
        if self._round is None and now_ns >= self._round_ns and self._plan is not None:
            self._begin_round(self._plan)
        elif self._round is not None and self._round.is_walked and not self._groups:
            self._round_over()
        self.due_ns = self._next_ns()

    def _sayable(self) -> list[_Group]:
        """Groups that wait for nothing but their time.

        What is not taken yet goes before what comes after it: who is told of the tail of a chain first fetches it
        first, and until the beginning is there, too, nobody can use it.
        """
        lines: set[tuple[TargetId, bytes]] = set()
        found: list[_Group] = []
        for group in self._groups:
            if group.told:
                found.append(group)
            elif group.line not in lines:
                lines.add(group.line)
                found.append(group)
        return found

    def _next_ns(self) -> int:
        times = [group.due_ns for group in self._sayable()]
        if self._go_on is not None and len(self._groups) < SPREAD_GROUPS_MAX:
            times.append(self._go_on_ns)
        if self._round is None:
            times.append(self._round_ns)
        elif self._round.is_walked and not self._groups:
            times.append(self._host.now_ns)
        return min(times, default=_NEVER_NS)

    # --- a round ------------------------------------------------------------------------------------------------------
    def _begin_round(self, plan: SpreadPlan) -> None:
        self._round_ns = _NEVER_NS
        self._introduced = set()
        if not plan.workers or not (plan.is_draining or self._wants_copies()):
            self._round_over()
            return
        steps = [(drive, heads) for heads in ((True, False) if plan.is_draining else (None,)) for drive in self._drives]
        self._round = _Round(self, steps)
        self._round.next_step()
        self._host.wake()

    def _wants_copies(self) -> bool:
        """Whether any record may be meant to have more than one copy."""
        assert self._plan is not None
        if self._plan.copies_max > 1:
            return True
        return any(known.copies > 1 for drive in self._drives for known in drive.engine.store.namespaces)

    def _round_over(self) -> None:
        self._round = None
        if self._plan is not None and self._plan.is_draining:
            self.is_done = True
            self._round_ns = _NEVER_NS
            if self.handed_on or self.left_behind:
                log.info("%d records were handed on, %d were not taken", self.handed_on, self.left_behind)
        else:
            self._round_ns = self._host.now_ns + SPREAD_REST_NS

    def _end_round(self) -> None:
        if self._round is not None:
            self._round.is_stopped = True
            self._round = None
        self._groups = []
        self._go_on = None

    def shape_of(self, drive: SpreadDrive, digest: bytes) -> Shape | None:
        """What placement must know of a namespace of a drive."""
        table = drive.engine.store.namespaces
        manifest = table.manifest(digest)
        if manifest is None:
            return None
        copies = table.copies(digest)
        return Shape(chunks_per_run=_chunks_per_run(manifest), copies=copies or None)

    def woken(self) -> None:
        """A walk has ended: see what is next."""
        self._host.wake()

    @property
    def plan(self) -> SpreadPlan:
        """What belongs where."""
        assert self._plan is not None, "a round needs a view"
        return self._plan

    def take(self, drive: SpreadDrive, batch: Sequence[Walked], copies: I64, go_on: Callable[[], None]) -> None:
        """Records that should lie elsewhere too: tell those workers."""
        plan = self.plan
        wanted: dict[tuple[int, bytes], list[bytes]] = defaultdict(list)
        heads = [head_of(one.run_head, one.key) for one in batch]
        for one, places in zip(batch, plan.lacking(heads, copies.astype(np.intp)), strict=True):
            for place in places:
                wanted[place, one.namespace.digest].append(one.key)
        now_ns = self._host.now_ns
        for (place, digest), keys in wanted.items():
            self._groups.append(_Group(plan.workers[place], digest, drive.id, keys, due_ns=now_ns))
        self._go_on = go_on
        self._go_on_ns = now_ns if plan.is_draining else now_ns + SPREAD_PAUSE_NS
        self._host.wake()

    # --- telling ------------------------------------------------------------------------------------------------------
    def _say(self, group: _Group) -> None:
        message: Message
        if group.told:
            message = Match(namespace=group.digest, keys=b"".join(group.keys), touch=False, count=False)
            self._ask(group, message, MatchReply, self._matched)
        elif group.line not in self._introduced:
            self._introduce(group)
        else:
            generation = self._generation(group.digest)
            message = Pull(
                namespace=group.digest, keys=b"".join(group.keys), source=group.source, generation=generation
            )
            self._ask(group, message, End, self._told)

    def _ask(
        self, group: _Group, message: Message, answer: type[Message], then: Callable[[_Group, Message], None]
    ) -> None:
        def answered(found: Message) -> None:
            if group in self._groups:
                then(group, found)
                self._host.wake()

        def failed(error: KVStoreError) -> None:
            if group in self._groups:
                log.debug("target %s was not told of copies: %s", group.target.id, error)
                self._again(group, group.keys)
                self._host.wake()

        self._host.ask(group.target, Errand(message, answer, answered, failed))

    def _told(self, group: _Group, answer: Message) -> None:
        statuses = end_of(answer).statuses
        if len(statuses) != len(group.keys):
            raise InvalidRequest(f"PULL of {len(group.keys)} keys was answered with {len(statuses)} statuses")
        taken = [key for key, status in zip(group.keys, statuses, strict=True) if not status]
        rest = [key for key, status in zip(group.keys, statuses, strict=True) if status]
        if taken and self.plan.is_draining:
            due_ns = self._host.now_ns + SPREAD_RETRY_NS
            self._groups.append(_Group(group.target, group.digest, group.source, taken, told=True, due_ns=due_ns))
        if RefusedReason.UNKNOWN_NAMESPACE in statuses:
            self._introduced.discard(group.line)  # it was started again, with nothing
        if taken:
            group.tries = 0  # it goes on
        self._again(group, rest)

    def _introduce(self, group: _Group) -> None:
        """Tell another worker of a namespace before its first records, which say how many copies it wants."""
        manifest = next(
            (found for drive in self._drives if (found := drive.engine.store.namespaces.manifest(group.digest))), None
        )
        if manifest is None:  # it was forgotten meanwhile
            self._again(group, [])
            return
        forget = Forget(manifest=manifest, generation=self._generation(group.digest))
        self._ask(group, forget, End, self._knows)

    def _knows(self, group: _Group, _: Message) -> None:
        self._introduced.add(group.line)
        group.due_ns = self._host.now_ns

    def _matched(self, group: _Group, answer: Message) -> None:
        assert isinstance(answer, MatchReply)
        if len(answer.statuses) != len(group.keys):
            raise InvalidRequest(f"MATCH of {len(group.keys)} keys was answered with {len(answer.statuses)} statuses")
        rest = [key for key, status in zip(group.keys, answer.statuses, strict=True) if status]
        if len(rest) < len(group.keys):
            group.tries = 0  # it goes on
        self.handed_on += len(group.keys) - len(rest)
        self._again(group, rest)

    def _again(self, group: _Group, rest: list[bytes]) -> None:
        """What is left of a group is tried again, for a while."""
        group.tries += 1
        tries_max = SPREAD_TRIES_DRAINING if self.plan.is_draining else SPREAD_TRIES_MAX
        if rest and group.tries < tries_max:
            group.keys = rest
            group.due_ns = self._host.now_ns + SPREAD_RETRY_NS
            return
        self._groups.remove(group)
        if rest and not group.told:  # nor will it take what waits behind it, unless it does so at once
            for other in self._groups:
                if not other.told and other.line == group.line:
                    other.tries = max(other.tries, tries_max - 1)
        if self.plan.is_draining:
            self.left_behind += len(rest)

    def _generation(self, digest: bytes) -> int:
        known = (drive.engine.namespace(digest) for drive in self._drives)
        return max((ref.generation for ref in known if ref is not None), default=0)


@lru_cache(maxsize=_SHAPES_MAX)
def _chunks_per_run(manifest: bytes) -> int:
    """Of the layout in a manifest; a walk asks it for every record."""
    return Manifest.decode(manifest).layout.chunks_per_run


class _Round:
    """A walk over all drives. Implements `engine.walk.Walk`."""

    def __init__(self, spreader: Spreader, steps: Sequence[tuple[SpreadDrive, bool | None]]) -> None:
        """
        Args:
            steps: Drives to walk, each for head runs only (True), for the others (False), or all (None).
        """
        self._spreader = spreader
        self._steps = list(steps)
        self._drive = steps[0][0]
        self._heads: bool | None = None
        self.is_walked = False
        self.is_stopped = False

    def next_step(self) -> None:
        """Begin the walk of the next drive."""
        self._drive, self._heads = self._steps.pop(0)
        self._drive.engine.store.walker.begin(self)

    def choose(self, entries: Entries, ticks: U32) -> I64:
        """See `Walk.choose`: what should lie elsewhere too; heads before others, in order, then the warmest.

        Within a segment the position goes before warmth: a chain that was written for longer than a tick is warmer at
        its end, which is of no use without its beginning.
        """
        if self.is_stopped:
            return np.empty(0, np.int64)
        indexes, copies, known = self._placed(entries)
        plan = self._spreader.plan
        is_head = plan.is_head(indexes)
        wanted = known & ((copies > 1) | plan.is_draining)
        if self._heads is not None:
            wanted &= is_head == self._heads
        chosen = np.flatnonzero(wanted)
        order = np.lexsort((-ticks[chosen].astype(np.int64), entries["position"][chosen], ~is_head[chosen]))
        found: I64 = chosen[order]
        return found

    def _placed(self, entries: Entries) -> tuple[I64, I64, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
        """Run index and wanted copies of each entry, and whether its namespace is known."""
        plan = self._spreader.plan
        indexes, copies = np.zeros(len(entries), np.int64), np.ones(len(entries), np.int64)
        known = np.zeros(len(entries), np.bool_)
        ids, which = distinct(entries["namespace"].astype(np.uint64))
        for at, name in enumerate(ids.tolist()):
            ref = self._drive.engine.store.namespaces.by_id(name)
            shape = self._spreader.shape_of(self._drive, ref.digest) if ref is not None else None
            if shape is None:
                continue
            mine = which == at
            found = plan.run_indexes(entries["position"][mine].astype(np.uint32), shape.chunks_per_run)
            indexes[mine], copies[mine], known[mine] = found, plan.copies(found, shape), True
        return indexes, copies, known

    def take(self, batch: Sequence[Walked], go_on: Callable[[], None]) -> None:
        """See `Walk.take`."""
        if self.is_stopped:
            return
        plan = self._spreader.plan
        copies = np.ones(len(batch), np.int64)
        for at, one in enumerate(batch):
            shape = self._spreader.shape_of(self._drive, one.namespace.digest)
            if shape is not None:
                index = plan.run_indexes(np.array([one.position], np.uint32), shape.chunks_per_run)
                copies[at] = plan.copies(index, shape)[0]
        self._spreader.take(self._drive, batch, copies, go_on)

    def ended(self) -> None:
        """See `Walk.ended`."""
        if self.is_stopped:
            return
        if self._steps:
            self.next_step()
        else:
            self.is_walked = True
        self._spreader.woken()

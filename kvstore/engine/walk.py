"""A slow walk over the stored records of a drive, the warmest first, with what placement needs to know of each.

What sealed segments list of a record (their index blocks) says how large and how warm it is and where it stands in its
chain, but its run head and its whole key stand in its header only. So the caller first chooses by the list, and the
headers are read for what it chose: a page each, in class background, a bounded number at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvstore.engine.allocator import Allocator
from kvstore.engine.api import NamespaceRef
from kvstore.engine.format import ENTRY_DTYPE, Entries, entry_spaces
from kvstore.engine.heads import HeadReader
from kvstore.engine.job import IoQueue, Steps, Wait, gather, start
from kvstore.engine.ledger import Ledger, entry_keys, entry_locations
from kvstore.engine.location import I64, U32
from kvstore.engine.sealed import read_index
from kvstore.engine.segment import OpenSegment, SegmentState, SegmentTable
from kvstore.limits import WALK_BATCH_RECORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """A record that the walk has come by.

    Attributes:
        namespace: in its present generation.
        key, run_head: 32 bytes each; the run head is zeros where unknown.
        position, part, payload_bytes: as in `api.PutSpec`.
        tick: of its last access.
    """

    namespace: NamespaceRef
    key: bytes
    run_head: bytes
    position: int
    part: int
    payload_bytes: int
    tick: int


class Walk(Protocol):
    """Who walks."""

    def choose(self, entries: Entries, ticks: U32) -> I64:
        """Positions of the entries of one segment whose headers are wanted, in the order that they are wanted in.

        Entries are valid ones of namespaces that are not dropped; `ticks` are their last accesses.
        """

    def take(self, batch: Sequence[Walked], go_on: Callable[[], None]) -> None:
        """The next records; call `go_on` once, now or later, when more are wanted. Not calling it ends the walk."""

    def ended(self) -> None:
        """There are no more."""


class Walker:
    """Walks one drive, one round at a time."""

    def __init__(
        self, *, queue: IoQueue, table: SegmentTable, ledger: Ledger, allocator: Allocator, heads: HeadReader
    ) -> None:
        self._queue = queue
        self._table = table
        self._ledger = ledger
        self._allocator = allocator
        self._heads = heads

    def begin(self, walk: Walk) -> None:
        """A round over what is stored now; what comes or moves meanwhile may be passed by."""
        start(self._round(walk), walk.ended)

    def _round(self, walk: Walk) -> Steps[None]:
        unsealed = {target.segment for target in self._unsealed()}
        segments = [*self._table.in_state(SegmentState.SEALED).tolist(), *unsealed]
        warmth = np.nan_to_num(self._ledger.catalog.scores.mean_access())
        segments.sort(key=lambda segment: -float(warmth[segment]))
        generations = [int(self._table.generation[segment]) for segment in segments]
        for segment, generation in zip(segments, generations, strict=True):
            entries = yield from self._entries(segment, generation)
            if len(entries):
                yield from self._segment(walk, segment, entries)

    def _entries(self, segment: int, generation: int) -> Steps[Entries]:
        """The valid records of a segment that is still what it was when the round began."""
        target = next((target for target in self._unsealed() if target.segment == segment), None)
        is_sealed = self._table.state[segment] == SegmentState.SEALED
        if target is not None and target.generation == generation:
            entries = target.entries()
        elif is_sealed and int(self._table.generation[segment]) == generation:
            self._table.hold(segment)
            try:
                entries, _ = yield from read_index(self._queue, self._table, segment)
            finally:
                self._table.release(segment)
        else:
            return np.empty(0, dtype=ENTRY_DTYPE)
        return entries[self._ledger.live_spaces(entry_spaces(entries))]

    def _segment(self, walk: Walk, segment: int, entries: Entries) -> Steps[None]:
        valid, ticks, _ = self._ledger.catalog.standing(entry_keys(entries), entry_locations(entries, segment))
        entries, ticks = entries[valid], ticks[valid]
        if not len(entries):
            return
        chosen = walk.choose(entries, ticks)
        for at in range(0, len(chosen), WALK_BATCH_RECORDS):
            part = chosen[at : at + WALK_BATCH_RECORDS]
            found: list[Walked | None] = yield gather(
                [self._one(segment, entries[one : one + 1], int(ticks[one])) for one in part.tolist()]
            )
            batch = [one for one in found if one is not None]
            if batch:
                yield _taken(walk, batch)

    def _one(self, segment: int, entry: Entries, tick: int) -> Steps[Walked | None]:
        """What the header of a record says; None if it is not there any more, or cannot be read."""
        ref = self._ledger.namespaces.by_id(int(entry["namespace"][0]))
        locations = entry_locations(entry, segment)
        if ref is None or not self._ledger.catalog.valid(entry_keys(entry), locations)[0]:
            return None
        header = yield from self._heads.at(int(locations[0]))
        if header is None or (header.namespace, header.namespace_generation) != (ref.digest, ref.generation):
            return None
        return Walked(
            namespace=ref,
            key=header.key,
            run_head=header.run_head,
            position=header.position,
            part=header.part,
            payload_bytes=header.payload_bytes,
            tick=tick,
        )

    def _unsealed(self) -> list[OpenSegment]:
        allocator = self._allocator
        targets = (*allocator.unsealed, *allocator.closing, allocator.open)
        return [target for target in targets if target is not None]


def _taken(walk: Walk, batch: Sequence[Walked]) -> Wait:
    """Give a batch, and wait until more is wanted."""

    def begin(resume: Callable[[None], None]) -> None:
        walk.take(batch, lambda: resume(None))

    return begin

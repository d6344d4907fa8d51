"""Which records should lie elsewhere too, and where: decided from a view, without I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.cluster.run_places import NO_PLACE, NOT_A_HEAD, RunPlaces, copies_of
from kvstore.cluster.view import READ_STATES, Target, TargetId, TargetState, View
from kvstore.engine.api import POSITION_NONE
from kvstore.types.digest import ZERO_DIGEST

Counts = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What placement must know of a namespace. `copies` is None where the cluster's policy counts."""

    chunks_per_run: int
    copies: int | None


class SpreadPlan:
    """Where the records of one worker belong, by one view.

    Attributes:
        is_draining: this worker hands on what it holds: all of it belongs elsewhere.
        workers: the other workers by their number, each as the target that it is called by.
    """

    def __init__(self, view: View, own: Collection[TargetId]) -> None:
        self._places = RunPlaces(view)
        by_id = {target.id: target for target in view.targets}
        mine = frozenset(own)
        self._own = {number for number, ids in enumerate(self._places.workers) if not mine.isdisjoint(ids)}
        self.is_draining = any(target.state is TargetState.DRAINING for target in view.targets if target.id in mine)
        self.workers: Mapping[int, Target] = {
            number: target
            for number, ids in enumerate(self._places.workers)
            if number not in self._own and (target := _readable(by_id, ids)) is not None
        }

    @property
    def copies_max(self) -> int:
        """Of any record, as far as the cluster's policy says."""
        return int(copies_of(self._places.replicas, np.array([0, NOT_A_HEAD], np.intp), None).max())

    def run_indexes(self, positions: NDArray[np.uint32], chunks_per_run: int) -> Counts:
        """Of records, by their positions in their chains; NOT_A_HEAD without one."""
        indexes = (positions.astype(np.int64) // chunks_per_run).astype(np.intp)
        indexes[positions == POSITION_NONE] = NOT_A_HEAD
        return indexes

    def is_head(self, indexes: Counts) -> NDArray[np.bool_]:
        """Whether these runs are those that everybody shares."""
        heads: NDArray[np.bool_] = indexes < max(self._places.replicas.head_runs, 1)
        return heads

    def copies(self, indexes: Counts, shape: Shape) -> Counts:
        """How many copies each record is to have."""
        return copies_of(self._places.replicas, indexes, shape.copies)

    def lacking(self, run_heads: Sequence[bytes], copies: Counts) -> list[list[int]]:
        """For each record the workers that should have it beside this one.

        A worker that is no place of a record any more, and is not draining, tells nobody of it: after a scale out what
        is asked for is fetched by whom it belongs to, and nothing is pushed.
        """
        if not run_heads:
            return []
        places = self._places.newest(b"".join(run_heads), copies)
        rows: list[list[int]] = []
        for row in places.tolist():
            others = [place for place in row if place != NO_PLACE and place not in self._own]
            is_ours = self.is_draining or any(place in self._own for place in row)
            rows.append([place for place in others if place in self.workers] if is_ours else [])
        return rows


def head_of(run_head: bytes, key: bytes) -> bytes:
    """By what a record is placed: a record without a run is its own."""
    return run_head if run_head != ZERO_DIGEST else key


def _readable(by_id: Mapping[TargetId, Target], ids: Sequence[TargetId]) -> Target | None:
    """One target of a worker that answers, to call the worker by."""
    return next((by_id[name] for name in ids if by_id[name].state in READ_STATES and by_id[name].data), None)


def returned(before: View, after: View, own: Collection[TargetId]) -> list[Target]:
    """Who has come back, or is new: they may not have heard what was deleted meanwhile. One target for each worker."""
    known = {(target.id, target.boot_id, target.session) for target in before.targets if target.state in READ_STATES}
    found: dict[tuple[str, tuple[str, ...]], Target] = {}
    for target in after.targets:
        is_new = (target.id, target.boot_id, target.session) not in known
        if is_new and target.state in READ_STATES and target.data and target.id not in own:
            found.setdefault((target.node_id, target.data), target)
    return list(found.values())

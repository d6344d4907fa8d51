"""Which workers hold a run, by one view: placement of many runs at once. Pure.

Placement ranks targets. Those that share a node and its addresses are drives of one worker, which divides keys among
them itself; so who asks tells workers apart, and a run has at most one copy on each. Clients write and look by this,
and nodes repair by it: they must agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.cluster.placement import Places, Ranking
from kvstore.cluster.view import ReplicaPolicy, TargetId, TargetState, View
from kvstore.limits import DIGEST_BYTES, DOWN_PLACES_MAX

Counts: TypeAlias = NDArray[np.intp]

NO_PLACE: Final = -1
NOT_A_HEAD: Final = 2**40
"""Run index of a record without a position: it is a run of its own, and nobody knows that many share it."""


def workers_of(view: View) -> tuple[tuple[TargetId, ...], ...]:
    """The targets of each worker, in the order of their first ids. Targets without an address are left out."""
    found: dict[tuple[str, tuple[str, ...]], list[TargetId]] = {}
    for target in sorted(view.targets, key=lambda target: target.id):
        if target.data:
            found.setdefault((target.node_id, target.data), []).append(target.id)
    return tuple(map(tuple, found.values()))


def copies_of(policy: ReplicaPolicy, run_indexes: Counts, namespace_copies: int | None) -> Counts:
    """How many copies each run has, as `ReplicaPolicy.copies_of` says; NOT_A_HEAD where the index is not known."""
    tail = policy.copies_of(run_index=NOT_A_HEAD, namespace_copies=namespace_copies)
    counts = np.full(len(run_indexes), tail, np.intp)
    counts[run_indexes < policy.head_runs] = max(tail, policy.head_copies)
    return counts


class RunPlaces:
    """The workers of a view and which of them hold which runs. Immutable; any number of threads may use one.

    Attributes:
        workers: The targets of each worker; places are indices into it.
        replicas: The view's policy.
        down: Workers that the view calls down, with all their targets.
    """

    __slots__ = ("_down_rankings", "_rankings", "down", "replicas", "workers")

    def __init__(self, view: View) -> None:
        self.workers = workers_of(view)
        self.replicas = view.replicas
        numbers = {target: number for number, targets in enumerate(self.workers) for target in targets}
        self._rankings = tuple(
            _WorkerRanking(ranking, numbers) for ranking in (Ranking.of(view), *Ranking.before(view))
        )
        states = {target.id: target.state for target in view.targets}
        self.down = frozenset(
            number
            for number, targets in enumerate(self.workers)
            if all(states[target] is TargetState.DOWN for target in targets)
        )
        down_ids = {target for number in self.down for target in self.workers[number]}
        self._down_rankings = tuple(
            _WorkerRanking(ranking, numbers) for ranking in (Ranking.with_down(view, down_ids) if down_ids else ())
        )

    def newest(self, run_heads: bytes, copies: Counts) -> Places:
        """Where new records of runs go.

        Args:
            run_heads: n digests of 32 bytes, end to end.
            copies: Of each run, at least 1.

        Returns:
            Numbers of workers, shape (n, most copies), the best first; NO_PLACE where there are fewer.
        """
        return self._rankings[0].places(run_heads, copies)

    def everywhere(self, run_heads: bytes, copies: Counts) -> Places:
        """Where runs may be: the columns of `newest`, then those of each previous placement, each worker once a run."""
        found = [ranking.places(run_heads, copies) for ranking in self._rankings]
        return _each_once(found, kept=found[0].shape[1])

    def behind_down(self, run_heads: bytes, copies: Counts) -> Places:
        """Workers of `down` that may hold runs, which belonged there while that one, or others of `down`, still served.

        A run that was written then has fewer than its copies on workers that rank before it and are not down.

        Returns:
            As `everywhere`, at most DOWN_PLACES_MAX columns; none where no worker is down.
        """
        found = [self._down_of(ranking, run_heads, copies) for ranking in self._down_rankings]
        if not found:
            return np.empty((len(run_heads) // DIGEST_BYTES, 0), np.intp)
        return _to_the_front(_each_once(found, kept=0))[:, :DOWN_PLACES_MAX]

    def _down_of(self, ranking: _WorkerRanking, run_heads: bytes, copies: Counts) -> Places:
        width = min(len(self.down), DOWN_PLACES_MAX)
        places = ranking.places(run_heads, copies + width)
        is_down = np.isin(places, list(self.down))
        live_before = np.cumsum((places != NO_PLACE) & ~is_down, axis=1)
        places[~is_down | (live_before >= copies[:, np.newaxis])] = NO_PLACE
        return _to_the_front(places)[:, :width]


class _WorkerRanking:
    """A ranking of targets, read as one of workers."""

    __slots__ = ("_drives_max", "_numbers", "_ranking")

    def __init__(self, ranking: Ranking, numbers: Mapping[TargetId, int]) -> None:
        self._ranking = ranking
        self._numbers = np.array([numbers.get(name, NO_PLACE) for name in ranking.ids], np.intp)
        counts = np.bincount(self._numbers[self._numbers >= 0])
        self._drives_max = int(counts.max()) if len(counts) else 1

    def places(self, run_heads: bytes, copies: Counts) -> Places:
        """See `RunPlaces.newest`."""
        most = int(copies.max()) if len(copies) else 1
        if not len(self._numbers):
            return np.full((len(run_heads) // DIGEST_BYTES, most), NO_PLACE, np.intp)
        has_doubles = self._drives_max > 1 or bool((self._numbers == NO_PLACE).any())
        wanted = most
        if has_doubles:
            wanted = (most - 1) * self._drives_max + 1 + int((self._numbers == NO_PLACE).sum())
        places = self._numbers[self._ranking.rank_batch(run_heads, wanted)]
        if has_doubles:
            places = _distinct(places, most)
        if places.shape[1] < most:
            lack = np.full((len(places), most - places.shape[1]), NO_PLACE, np.intp)
            places = np.concatenate([places, lack], axis=1)
        places[np.arange(most) >= copies[:, np.newaxis]] = NO_PLACE
        return places


def _each_once(found: Sequence[Places], *, kept: int) -> Places:
    """The columns of all, each worker once a row; without columns that are empty then, but for the first `kept`."""
    places = np.concatenate(found, axis=1) if len(found) > 1 else found[0]
    for column in range(found[0].shape[1], places.shape[1]):
        known = (places[:, :column] == places[:, column : column + 1]).any(axis=1)
        places[known, column] = NO_PLACE
    used = (places != NO_PLACE).any(axis=0)
    used[:kept] = True
    return places[:, used]


def _to_the_front(places: Places) -> Places:
    """Each row with its places first, in their order."""
    order = np.argsort(places == NO_PLACE, axis=1, kind="stable")
    return np.take_along_axis(places, order, axis=1)


def _distinct(places: Places, most: int) -> Places:
    """The first `most` different workers of each row, in their order."""
    is_taken = places == NO_PLACE
    for column in range(1, places.shape[1]):
        is_taken[:, column] |= (places[:, :column] == places[:, column : column + 1]).any(axis=1)
    order = np.argsort(is_taken, axis=1, kind="stable")[:, :most]
    chosen = np.take_along_axis(places, order, axis=1)
    chosen[np.take_along_axis(is_taken, order, axis=1)] = NO_PLACE
    return chosen

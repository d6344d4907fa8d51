"""Which workers there are, and which of them hold which keys, by the view. Pure.

Targets that share a node and its addresses are drives of one worker, which divides the keys among them itself; so what
the client tells apart are workers. A view with one of them needs no placement: everything is there. With several,
`kvstore.cluster.run_places` says where each run belongs now, and where it was before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvstore.cluster.placement import Places
from kvstore.cluster.run_places import NO_PLACE, NOT_A_HEAD, Counts, RunPlaces, copies_of, workers_of
from kvstore.cluster.view import READ_STATES, TargetId, TargetState, View
from kvstore.limits import DIGEST_BYTES
from kvstore.types.keys import KeyChain
from kvstore_client.address import split_address

_UNSPECIFIED_HOSTS = frozenset({"0.0.0.0", "::"})
_WORDS: Final = DIGEST_BYTES // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRoute:
    """How to reach one worker.

    Attributes:
        id: Of its first target.
        addresses: One for each rail.
        node_id: Who must answer there; "" when the view does not say.
        is_readable: Some target of it answers reads.
        is_down: The view calls it down, with all its targets; it may answer reads all the same, as a fenced node does.
    """

    id: TargetId
    addresses: tuple[str, ...]
    node_id: str
    is_readable: bool
    is_down: bool


@dataclass(frozen=True, slots=True)
class ChainPlaces:
    """Where the keys of one chain are.

    Attributes:
        workers: Ids, by number.
        run_of: Of each key, the row of `places`.
        places: Numbers of workers for each run: where it belongs now, best first, then where it was before, then those
            of `down` that may have it; NO_PLACE where there is none.
        newest: How many columns of `places` say where it belongs now.
        down: Workers that the view calls down: to be asked for what nobody else has.
    """

    workers: tuple[TargetId, ...]
    run_of: Counts
    places: Places
    newest: int
    down: frozenset[TargetId] = frozenset()

    def only_newest(self) -> ChainPlaces:
        """Where new records go."""
        return replace(self, places=self.places[:, : self.newest])

    def without(self, workers: Collection[TargetId]) -> ChainPlaces:
        """The same places but for these workers."""
        if not workers:
            return self
        numbers = [number for number, worker in enumerate(self.workers) if worker in workers]
        return replace(self, places=np.where(np.isin(self.places, numbers), NO_PLACE, self.places))

    def by_worker(self) -> Iterator[tuple[TargetId, Counts]]:
        """Each worker that has any of the keys, with the indexes of those, ascending."""
        for number in np.unique(self.places).tolist():
            if number != NO_PLACE:
                yield self.workers[number], np.flatnonzero((self.places == number).any(axis=1)[self.run_of])


class Placement:
    """Where runs lie by a view with several workers. Immutable; made once for each view."""

    __slots__ = ("_down", "_places", "workers")

    def __init__(self, view: View) -> None:
        self._places = RunPlaces(view)
        self.workers: tuple[TargetId, ...] = tuple(targets[0] for targets in self._places.workers)
        self._down = frozenset(self.workers[number] for number in self._places.down)

    def of_chain(self, chain: KeyChain, *, copies: int | None, with_down: bool = False) -> ChainPlaces:
        """Where the keys of `chain` belong and may be.

        Args:
            chain: Any keys.
            copies: That their namespace asks for; None is what the view says.
            with_down: Also at workers that the view calls down.
        """
        rows = np.frombuffer(chain.run_heads(), np.uint64).reshape(-1, _WORDS)
        begins = np.ones(len(rows), np.bool_)
        begins[1:] = (rows[1:] != rows[:-1]).any(axis=1)
        firsts = np.flatnonzero(begins)
        indexes = np.full(len(firsts), NOT_A_HEAD, np.intp)
        if chain.first_position is not None:
            indexes = (chain.first_position + firsts) // chain.chunks_per_run
        counts = copies_of(self._places.replicas, indexes, copies)
        places = self._places.everywhere(rows[firsts].tobytes(), counts)
        newest = int(counts.max()) if len(counts) else 1
        down: frozenset[TargetId] = frozenset()
        if with_down and self._down:
            down = self._down
            places = np.concatenate([places, self._places.behind_down(rows[firsts].tobytes(), counts)], axis=1)
        return ChainPlaces(self.workers, np.cumsum(begins) - 1, places, newest, down)


def places_of(
    placement: Placement | TargetId, chain: KeyChain, *, copies: int | None, with_down: bool = False
) -> ChainPlaces:
    """`Placement.of_chain`, also where there is one worker."""
    if isinstance(placement, Placement):
        return placement.of_chain(chain, copies=copies, with_down=with_down)
    return ChainPlaces((placement,), np.zeros(len(chain), np.intp), np.zeros((1, 1), np.intp), 1)


def places_to_write(placement: Placement | TargetId, chain: KeyChain, *, copies: int | None) -> ChainPlaces | TargetId:
    """Where new records of `chain` go; the only worker's id where there is one."""
    return placement if isinstance(placement, str) else placement.of_chain(chain, copies=copies).only_newest()


def routes_of(view: View, *, asked_host: str) -> tuple[WorkerRoute, ...]:
    """The workers of a view, by the id of their first target.

    Args:
        view: As a node gave it.
        asked_host: Host under which that node was reached; stands in for a worker that listens on every address.
    """
    routes = []
    for ids in workers_of(view):
        targets = [target for target in view.targets if target.id in ids]
        first = next(target for target in targets if target.id == ids[0])
        routes.append(
            WorkerRoute(
                id=first.id,
                addresses=tuple(_reachable(address, asked_host) for address in first.data),
                node_id=first.node_id,
                is_readable=any(target.state in READ_STATES for target in targets),
                is_down=all(target.state is TargetState.DOWN for target in targets),
            )
        )
    return tuple(routes)


def placement_of(view: View, routes: tuple[WorkerRoute, ...]) -> Placement | TargetId | None:
    """Where keys are: with the only worker of that id, or where a Placement says; None when nobody can be asked.

    A worker that is down counts: what it holds is looked for where others say that they have it not.
    """
    if len(routes) == 1:
        return routes[0].id
    asked = [route.id for route in routes if route.is_readable or route.is_down]
    if len(asked) <= 1:
        return asked[0] if asked else None
    return Placement(view)


def only_reader(placement: Placement | TargetId | None, routes: tuple[WorkerRoute, ...]) -> TargetId | None:
    """The worker that stands for all of them when something is read: the only one, or the only one that is left."""
    if placement is None or isinstance(placement, str):
        return placement
    readable = [route.id for route in routes if route.is_readable]
    return readable[0] if len(readable) == 1 else None


def _reachable(address: str, asked_host: str) -> str:
    host, port = split_address(address)
    if host not in _UNSPECIFIED_HOSTS:
        return address
    return f"[{asked_host}]:{port}" if ":" in asked_host else f"{asked_host}:{port}"

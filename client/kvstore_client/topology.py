"""Which target a key belongs to, by the view. Pure.

Targets that share their addresses are drives of one worker, which divides the keys among them itself; so what the
client tells apart are workers. With several, a run goes where weighted rendezvous hashing of its head puts it, which
moves only a new worker's share when one is added (Schindelhauer and Schomaker, "Weighted Distributed Hash Tables",
SPAA 2005).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstore.cluster.view import View
from kvstore.types.digest import digest
from kvstore_client.address import split_address
from kvstore_client.planner import TargetId, TargetOf

_UNSPECIFIED_HOSTS = frozenset({"0.0.0.0", "::"})
_HASH_BITS = 53  # as many as a float holds exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRoute:
    """How to reach one worker. `weight` is the sum over its targets."""

    id: TargetId
    addresses: tuple[str, ...]
    weight: float


def routes_of(view: View, *, asked_host: str) -> tuple[WorkerRoute, ...]:
    """The workers of a view, by the id of their first target.

    Args:
        view: As a node gave it.
        asked_host: Host under which that node was reached; stands in for a worker that listens on every address.
    """
    found: dict[tuple[str, ...], WorkerRoute] = {}
    for target in sorted(view.targets, key=lambda target: target.id):
        addresses = tuple(_reachable(address, asked_host) for address in target.data)
        if not addresses:
            continue
        known = found.get(addresses)
        found[addresses] = WorkerRoute(
            id=known.id if known else target.id,
            addresses=addresses,
            weight=target.weight + (known.weight if known else 0.0),
        )
    return tuple(found.values())


def placement_of(routes: tuple[WorkerRoute, ...]) -> TargetOf | TargetId | None:
    """Where a run's head belongs: the only worker's id, a function of the head, or None when there is no worker."""
    if len(routes) <= 1:
        return routes[0].id if routes else None
    weighted = [(route.id, route.id.encode(), route.weight) for route in routes if route.weight > 0]
    if not weighted:
        return routes[0].id

    def target_of(run_head: bytes) -> TargetId:
        return max(weighted, key=lambda one: (_score(run_head, one[1], one[2]), one[0]))[0]

    return target_of


def _score(run_head: bytes, target: bytes, weight: float) -> float:
    drawn = int.from_bytes(digest(b"kvstore.place.v1", run_head, target)[:8], "little") >> (64 - _HASH_BITS)
    return -weight / math.log((drawn + 0.5) / (1 << _HASH_BITS))


def _reachable(address: str, asked_host: str) -> str:
    host, port = split_address(address)
    if host not in _UNSPECIFIED_HOSTS:
        return address
    return f"[{asked_host}]:{port}" if ":" in asked_host else f"{asked_host}:{port}"

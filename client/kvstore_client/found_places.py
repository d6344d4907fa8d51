"""Where lookups have found keys that are not where they belong, as after a scale-out: reads begin there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from kvstore.cluster.run_places import NO_PLACE
from kvstore.cluster.view import TargetId
from kvstore.limits import DIGEST_BYTES, FOUND_KEYS_MAX, FOUND_NS
from kvstore.types.results import MissReason
from kvstore_client.incoming import HIT
from kvstore_client.planner import RecordPlan
from kvstore_client.topology import ChainPlaces

Found: TypeAlias = tuple[TargetId, TargetId]
"""Who has a key, and who lacks it although it belongs there."""
_ABSENT: Final = (int(MissReason.ABSENT), int(MissReason.EVICTED))
_UNKNOWN: Final = 0
_HAS: Final = 1
_LACKS: Final = 2


class FoundPlaces:
    """What lookups have told, for FOUND_NS, of FOUND_KEYS_MAX keys at most. Any number of threads may use it.

    It may be out of date: it says where to ask first, and nothing else.
    """

    __slots__ = ("_count", "_namespaces", "_until_ns")

    def __init__(self) -> None:
        self._namespaces: dict[bytes, dict[bytes, Found]] = {}
        self._count = 0
        self._until_ns = 0

    def of(self, namespace: bytes) -> Mapping[bytes, Found]:
        """By chunk key, what was found elsewhere."""
        if not self._namespaces or time.monotonic_ns() >= self._until_ns:
            return {}
        return self._namespaces.get(namespace, {})

    def forget(self) -> None:
        """Keys belong elsewhere now."""
        self._namespaces = {}
        self._count = 0

    def note(self, namespace: bytes, digests: bytes, found: Mapping[int, Found]) -> None:
        """Takes over what a lookup of these keys has found, by index; the others are where they belong, or nowhere."""
        now_ns = time.monotonic_ns()
        if now_ns >= self._until_ns or self._count + len(found) > FOUND_KEYS_MAX:
            self.forget()
        known = self._namespaces.get(namespace)
        if known is None:
            if not found:
                return
            known = self._namespaces.setdefault(namespace, {})
        for at in range(0, len(digests), DIGEST_BYTES):
            entry = found.get(at // DIGEST_BYTES)
            if entry is not None:
                known[digests[at : at + DIGEST_BYTES]] = entry
            else:
                known.pop(digests[at : at + DIGEST_BYTES], None)
        self._count += len(found)
        self._until_ns = now_ns + FOUND_NS


def found_elsewhere(where: ChainPlaces, plan: RecordPlan, answers: Sequence[bytes]) -> dict[int, Found]:
    """Keys that a place where they belong lacks, and another one has.

    Args:
        where: Places of all keys.
        plan: Of the lookup. All records of a chunk lie in one place, so those of the first section tell.
        answers: One status for each record of each batch of the plan.
    """
    if where.places.shape[1] < 2 or not any(answer.strip(b"\0") for answer in answers):
        return {}
    numbers = {worker: number for number, worker in enumerate(where.workers)}
    known = np.zeros((len(where.workers) + 1, plan.key_count), np.uint8)  # the last row stands for no place
    for batch, answer in zip(plan.batches, answers, strict=True):
        records, statuses = np.asarray(batch.records, np.intp), np.frombuffer(answer, np.uint8)
        is_first = records < plan.key_count
        kinds = np.where(statuses == HIT, _HAS, np.where(np.isin(statuses, _ABSENT), _LACKS, _UNKNOWN))
        known[numbers[batch.target], records[is_first]] = kinds[is_first]
    places = where.places[where.run_of]
    told = known[places, np.arange(plan.key_count)[:, np.newaxis]]
    has, lacks = told == _HAS, told[:, : where.newest] == _LACKS
    chosen = np.flatnonzero(has.any(axis=1) & lacks.any(axis=1))
    holders = places[chosen, has[chosen].argmax(axis=1)].tolist()
    lackers = places[chosen, lacks[chosen].argmax(axis=1)].tolist()
    workers = where.workers
    return {
        at: (workers[has_it], workers[lacks_it])
        for at, has_it, lacks_it in zip(chosen.tolist(), holders, lackers, strict=True)
    }


assert NO_PLACE == -1, "an index for which there is the last row"

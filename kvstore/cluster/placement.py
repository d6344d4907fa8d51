"""Placement: which targets hold a run, by weighted rendezvous hashing of its head. Pure.

Each target draws a number in (0, 1) for each run head, and the smallest -ln(number) / weight wins: a target gets its
weight's share of the runs, and adding or removing one moves only that share (Schindelhauer and Schomaker, "Weighted
Distributed Hash Tables", SPAA 2005). Every client computes this, in any language:

    seed(id)  = first 8 bytes, little endian, of BLAKE3("kvstore.target.v1" | id as UTF-8)
    drawn     = mix64(first 8 bytes, little endian, of the run head XOR seed(id)) >> 11
    cost      = -ln((drawn + 0.5) / 2^53) / weight            in double precision
    mix64     = the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014; constants of Stafford's Mix13)

Run heads are BLAKE3 digests, so 8 bytes of one are as good as drawn. Logarithms of two machines may differ in the last
bit; that would change the order of two targets for one head in about 2^50, which is a miss for it, never a wrong byte.

Copies of a run go to different failure domains while there are any left, then to different targets of the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.cluster.view import READ_STATES, TargetId, View
from kvstore.errors import InvalidRequest
from kvstore.limits import DIGEST_BYTES, PLACE_CELLS_MAX
from kvstore.types.digest import digest

Floats: TypeAlias = NDArray[np.float64]
Words: TypeAlias = NDArray[np.uint64]
Places: TypeAlias = NDArray[np.intp]

_SEED_TAG: Final = b"kvstore.target.v1"
_DRAWN_BITS: Final = 53  # as many as a double holds exactly
_MULTIPLIERS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))


class Ranking:
    """One placement, made ready for many heads: the targets that take part, in the order of their ids.

    Immutable; any number of threads may use one.
    """

    __slots__ = ("_domain_count", "_domains", "_rates", "_seeds", "ids")

    def __init__(self, weights: Mapping[TargetId, float], domains: Mapping[TargetId, str]) -> None:
        """
        Args:
            weights: By id; targets of weight 0 take no part.
            domains: Failure domain of each id.
        """
        self.ids: tuple[TargetId, ...] = tuple(sorted(name for name, weight in weights.items() if weight > 0))
        numbers: dict[str, int] = {}
        self._domains: Places = np.array(
            [numbers.setdefault(domains[name], len(numbers)) for name in self.ids], np.intp
        )
        self._domain_count = len(numbers)
        # one row a target: a row of heads is contiguous, which is what numpy is fast at
        self._seeds: Words = np.array([[seed_of(name)] for name in self.ids], np.uint64).reshape(-1, 1)
        self._rates: Floats = np.array([[-1.0 / weights[name]] for name in self.ids], np.float64).reshape(-1, 1)

    @classmethod
    def of(cls, view: View) -> Self:
        """Where new keys go."""
        return cls({target.id: target.placed_weight for target in view.targets}, _domains(view))

    @classmethod
    def before(cls, view: View) -> tuple[Self, ...]:
        """Where keys went before, for each previous placement that the view keeps: only targets that answer reads.

        While a target is draining, what it holds is found by these.
        """
        domains = _domains(view)
        readable = [target for target in view.targets if target.state in READ_STATES]
        return tuple(
            cls({target.id: previous.weights.get(target.id, target.weight) for target in readable}, domains)
            for previous in view.previous
        )

    @classmethod
    def with_down(cls, view: View, down: Collection[TargetId]) -> tuple[Self, ...]:
        """`of` and `before`, as they would be if these targets still took part: they may answer all the same."""
        domains = _domains(view)
        taking = [target for target in view.targets if target.state in READ_STATES or target.id in down]
        newest = {target.id: target.weight if target.id in down else target.placed_weight for target in taking}
        return cls(newest, domains), *(
            cls({target.id: previous.weights.get(target.id, target.weight) for target in taking}, domains)
            for previous in view.previous
        )

    def rank(self, run_head: bytes, count: int) -> tuple[TargetId, ...]:
        """The `count` best targets for one run, best first; fewer where there are not so many."""
        return tuple(self.ids[at] for at in self.rank_batch(run_head, count)[0])

    def rank_batch(self, run_heads: bytes | bytearray | memoryview, count: int) -> Places:
        """The best targets for many runs.

        Args:
            run_heads: n digests of 32 bytes, end to end.
            count: Places wanted for each.

        Returns:
            Indices into `ids`, shape (n, min(count, len(ids))), best first.

        Raises:
            InvalidRequest: `run_heads` is no whole number of digests, or `count` is below 1.
        """
        if len(run_heads) % DIGEST_BYTES or count < 1:
            raise InvalidRequest(
                f"rank of {len(run_heads)} bytes of run heads for {count} places; "
                f"pass digests of {DIGEST_BYTES} bytes and at least one place"
            )
        words = np.frombuffer(run_heads, np.dtype("<u8"))[:: DIGEST_BYTES // 8].astype(np.uint64)
        places = np.empty((len(words), min(count, len(self.ids))), np.intp)
        if places.shape[1]:
            step = max(1, PLACE_CELLS_MAX // len(self.ids))
            for at in range(0, len(words), step):
                self._rank(words[at : at + step], places[at : at + step])
        return places

    def _rank(self, words: Words, places: Places) -> None:
        """Fills one row of `places` for each word."""
        costs = self._costs(words)
        heads = np.arange(len(words))
        for nth in range(places.shape[1]):
            best = costs.argmin(axis=0)
            places[:, nth] = best
            if nth + 1 == places.shape[1]:
                return
            if nth + 1 == self._domain_count:
                # every domain has a copy: begin again with all of them, without the targets that have one
                costs = self._costs(words)
                for taken in places.T[: nth + 1]:
                    costs[taken, heads] = np.inf
            elif nth + 1 < self._domain_count:
                costs[self._domains[:, np.newaxis] == self._domains[best]] = np.inf
            else:
                costs[best, heads] = np.inf

    def _costs(self, words: Words) -> Floats:
        """Shape (targets, words): the smallest in a column wins."""
        cells = words ^ self._seeds
        _mix64(cells)
        cells >>= np.uint64(64 - _DRAWN_BITS)
        costs = cells.astype(np.float64)
        costs += 0.5
        costs *= 2.0**-_DRAWN_BITS
        np.log(costs, out=costs)
        costs *= self._rates
        return costs


def rank(view: View, run_head: bytes, count: int) -> tuple[TargetId, ...]:
    """The targets for one new run. For many, keep a `Ranking`."""
    return Ranking.of(view).rank(run_head, count)


def lookup_order(view: View, run_head: bytes, count: int) -> tuple[TargetId, ...]:
    """Where a run may be: the places of the newest placement, then those of each previous one, each target once."""
    rankings = (Ranking.of(view), *Ranking.before(view))
    return tuple(dict.fromkeys(name for ranking in rankings for name in ranking.rank(run_head, count)))


def seed_of(target_id: TargetId) -> int:
    """What makes a target's draws its own, 64 bits."""
    return int.from_bytes(digest(_SEED_TAG, target_id.encode("utf-8", "surrogatepass"))[:8], "little")


def loads(ranking: Ranking, places: Places) -> Mapping[TargetId, int]:
    """How many of these places each target has."""
    counts: Sequence[int] = np.bincount(places.ravel(), minlength=len(ranking.ids)).tolist()
    return dict(zip(ranking.ids, counts, strict=True))


def _mix64(words: Words) -> None:
    words ^= words >> _SHIFTS[0]
    words *= _MULTIPLIERS[0]
    words ^= words >> _SHIFTS[1]
    words *= _MULTIPLIERS[1]
    words ^= words >> _SHIFTS[2]


def _domains(view: View) -> dict[TargetId, str]:
    return {target.id: target.domain for target in view.targets}

"""A worker's queue pairs: at most one for each lane of a client process, shared by all its connections.

A client opens one when it first has payload for a lane, and the node closes what was idle for PAIR_IDLE_NS. So 1,152
client processes are at most 2,304 queue pairs of a worker, however many drives it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.errors import InvalidRequest, Overloaded
from kvstore.limits import PAIR_IDLE_NS, PAIRS_MAX
from kvstore.transport.rdma.marks import Lane, mark_of
from kvstore.transport.rdma.pair_offer import PairOffer
from kvstore.transport.rdma.rail import Pair, Rail
from kvstore.transport.rdma.verbs import SUCCESS


@dataclass(slots=True)
class _Entry:
    pair: Pair
    theirs: PairOffer
    used_ns: int
    is_probed: bool = False


class PairTable:
    """Time is an argument. Pairs that broke are forgotten; their client opens another one.

    Attributes:
        opened, broken: counts since the start.
        mtu_bytes: of the path of the pair that was opened last.
    """

    def __init__(self, rail: Rail, *, pairs_max: int = PAIRS_MAX) -> None:
        self._rail = rail
        self._pairs_max = pairs_max
        self._entries: dict[tuple[bytes, Lane], _Entry] = {}
        self.opened = 0
        self.broken = 0
        self.mtu_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, client_id: bytes, lane: Lane, theirs: PairOffer, now_ns: int) -> PairOffer:
        """Makes our end for a client's, in place of the one that was there. Answer with what is returned.

        Raises:
            Overloaded: there are too many already, none of them idle.
            VerbsFailure: the device refuses.
        """
        self._drop((client_id, lane))
        if len(self._entries) >= self._pairs_max:
            self.sweep(now_ns, idle_ns=0)
        if len(self._entries) >= self._pairs_max:
            raise Overloaded(f"{len(self._entries)} queue pairs are in use, at most {self._pairs_max} may be")
        pair = self._rail.new_pair(mark_of(lane), lambda *_: self._broke((client_id, lane)))
        try:
            ours = pair.offer()
            pair.connect(theirs)
        except BaseException:
            pair.close()
            raise
        self._entries[client_id, lane] = _Entry(pair, theirs, now_ns)
        self.opened += 1
        self.mtu_bytes = pair.mtu_bytes
        return ours

    def probe(self, client_id: bytes, lane: Lane, on_end: Callable[[int], None]) -> None:
        """The client has connected its end: reads across, and lets `ready` give the pair if that went well.

        Raises:
            InvalidRequest: there is no such pair.
            Unavailable: it broke.
        """
        entry = self._entries.get((client_id, lane))
        if entry is None:
            raise InvalidRequest(f"there is no {lane.name.lower()} queue pair to probe; open it first")

        def ended(status: int) -> None:
            entry.is_probed = status == SUCCESS
            if status != SUCCESS and self._entries.get((client_id, lane)) is entry:
                self._drop((client_id, lane))
            on_end(status)

        self._rail.probe(entry.pair, entry.theirs, ended)

    def ready(self, client_id: bytes, lane: Lane, now_ns: int) -> Pair | None:
        """The pair that a client's payload travels on, None when there is none or it is not probed."""
        entry = self._entries.get((client_id, lane))
        if entry is None or not entry.is_probed or not entry.pair.is_usable:
            return None
        entry.used_ns = now_ns
        return entry.pair

    def sweep(self, now_ns: int, *, idle_ns: int = PAIR_IDLE_NS) -> None:
        """Closes what nobody uses."""
        for key, entry in list(self._entries.items()):
            if not entry.pair.is_usable or (entry.pair.is_idle and now_ns - entry.used_ns >= idle_ns):
                self._drop(key)

    def forget_client(self, client_id: bytes) -> None:
        """The client's last connection is gone."""
        for lane in Lane:
            self._drop((client_id, lane))

    def close(self) -> None:
        """Closes all. Idempotent."""
        for key in list(self._entries):
            self._drop(key)

    def _broke(self, key: tuple[bytes, Lane]) -> None:
        self.broken += 1
        self._entries.pop(key, None)

    def _drop(self, key: tuple[bytes, Lane]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.pair.close()

"""Which work requests of a queue pair are posted next, and what their completions say: no verbs in here.

Transfers are carried out in order, in chains of CHAIN_REQUESTS_MAX, each ending in one completion. A transfer that
writes ends with a READ of its last byte: its answer comes after the writes are in the other side's memory, not only in
its device, so that a message sent by another way after that cannot overtake the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvstore.errors import Overloaded
from kvstore.limits import CHAIN_REQUESTS_MAX, PAIR_REQUESTS_MAX, PAIR_WAITING_MAX
from kvstore.transport.rdma.verbs import SUCCESS, Completion, Piece, Work


class Transfer:
    """Pieces that belong together, all one way.

    Attributes:
        kind: READ or WRITE.
        pieces: in order; at least one.
        on_end: called once, with the status: SUCCESS, or why some of it may not have been moved. No device writes to
            our memory for it any more then.
        on_quiet: called once, then or later: no device reads our memory for it any more either.
        has_ended: `on_end` has been called.
    """

    __slots__ = ("has_ended", "kind", "on_end", "on_quiet", "pieces", "pieces_posted")

    def __init__(
        self,
        kind: Work,
        pieces: Sequence[Piece],
        on_end: Callable[[int], None],
        on_quiet: Callable[[], None] | None = None,
    ) -> None:
        assert pieces
        self.kind = kind
        self.pieces = pieces
        self.on_end = on_end
        self.on_quiet = on_quiet
        self.pieces_posted = 0
        self.has_ended = False

    def end(self, status: int, *, is_quiet: bool) -> None:
        """Tells how it ended, unless that was told, and whether its memory is quiet."""
        if not self.has_ended:
            self.has_ended = True
            self.on_end(status)
        if is_quiet and self.on_quiet is not None:
            self.on_quiet()


class Chain:
    """What one call posts."""

    __slots__ = ("count", "ends_transfer", "kind", "pieces", "transfer", "work_id")

    def __init__(
        self, kind: Work, pieces: Sequence[Piece], work_id: int, transfer: Transfer, *, ends_transfer: bool
    ) -> None:
        self.kind = kind
        self.pieces = pieces
        self.work_id = work_id
        self.transfer = transfer
        self.ends_transfer = ends_transfer
        self.count = len(pieces)


class PairQueue:
    """The transfers of one queue pair.

    Attributes:
        posted: work requests that have not ended.
    """

    __slots__ = (
        "_chains",
        "_fence",
        "_ids",
        "_is_fence_due",
        "_requests_max",
        "_waiting",
        "_waiting_pieces",
        "posted",
    )

    def __init__(self, *, fence: tuple[int, int], ids: Iterator[int], requests_max: int = PAIR_REQUESTS_MAX) -> None:
        """
        Args:
            fence: address and local key of a byte of ours that reads may overwrite.
            ids: of chains, above 0 and never the same twice for all queue pairs of a completion queue: a device uses
                the number of a queue pair again while completions of the former one still lie there.
            requests_max: posted at once.
        """
        self._fence = fence
        self._ids = ids
        self._requests_max = requests_max
        self._waiting: deque[Transfer] = deque()
        self._waiting_pieces = 0
        self._chains: dict[int, Chain] = {}
        self._is_fence_due = False  # the first waiting transfer lacks nothing but its fence
        self.posted = 0

    @property
    def is_idle(self) -> bool:
        """Nothing waits, nothing is posted."""
        return not self._waiting and not self._chains

    def add(self, transfer: Transfer) -> None:
        """Raises Overloaded: too much waits already."""
        if self._waiting_pieces + len(transfer.pieces) > PAIR_WAITING_MAX:
            raise Overloaded(f"{self._waiting_pieces} pieces wait for a queue pair, at most {PAIR_WAITING_MAX} may")
        self._waiting.append(transfer)
        self._waiting_pieces += len(transfer.pieces)

    def next_chain(self, room: int) -> Chain | None:
        """What to post now, None when nothing waits or neither the pair nor `room` (work requests) takes any more."""
        room = min(room, self._requests_max - self.posted)
        if not self._waiting or room < 1:
            return None
        transfer = self._waiting[0]
        if self._is_fence_due:
            return self._fence_of(transfer)
        first = transfer.pieces_posted
        count = min(len(transfer.pieces) - first, CHAIN_REQUESTS_MAX, room)
        transfer.pieces_posted += count
        self._waiting_pieces -= count
        is_whole = transfer.pieces_posted == len(transfer.pieces)
        self._is_fence_due = is_whole and transfer.kind is Work.WRITE
        if is_whole and not self._is_fence_due:
            self._waiting.popleft()
        pieces = transfer.pieces if count == len(transfer.pieces) else transfer.pieces[first : first + count]
        return self._chain(transfer.kind, pieces, transfer, ends_transfer=is_whole and not self._is_fence_due)

    def holds(self, work_id: int) -> bool:
        """Whether it is a chain of ours that has not ended."""
        return work_id in self._chains

    def ended(self, completion: Completion) -> Transfer | None:
        """The chain that ended well, if it was its transfer's last: that transfer.

        Completions of a pair come in order, and a failed one means `drain`; so only good ones are told here.
        """
        assert completion.status == SUCCESS
        chain = self._chains.pop(completion.work_id)
        self.posted -= chain.count
        return chain.transfer if chain.ends_transfer else None

    def leave(self) -> list[tuple[Transfer, bool]]:
        """The queue pair is in error: the transfers that have ended by that, in order, and whether they are quiet.

        What was posted is not, until each of its chains is `flushed` or the queue pair is destroyed (`drain`). What may
        still write to memory of ours ends then only; what the device only reads from can be sent another way meanwhile.
        """
        stay = {one.transfer: None for one in self._chains.values()}
        posted, chains = self.posted, self._chains.copy()
        found = self.drain()
        self.posted, self._chains = posted, chains
        return [(one, one not in stay) for one in found if one not in stay or one.kind is Work.WRITE]

    def flushed(self, work_id: int) -> Transfer | None:
        """After `leave`: a chain is over, well or not. The transfer that is over by that."""
        chain = self._chains.pop(work_id, None)
        if chain is None or any(one.transfer is chain.transfer for one in self._chains.values()):
            return None
        return chain.transfer

    def drain(self) -> list[Transfer]:
        """The queue pair is gone: all transfers that were not over, in order."""
        found = list(dict.fromkeys([*(chain.transfer for chain in self._chains.values()), *self._waiting]))
        self._chains.clear()
        self._waiting.clear()
        self._waiting_pieces = self.posted = 0
        self._is_fence_due = False
        return found

    def _fence_of(self, transfer: Transfer) -> Chain:
        self._is_fence_due = False
        self._waiting.popleft()
        _, length, _, remote, remote_key = transfer.pieces[-1]
        address, key = self._fence
        return self._chain(
            Work.READ, [(address, 1, key, remote + length - 1, remote_key)], transfer, ends_transfer=True
        )

    def _chain(self, kind: Work, pieces: Sequence[Piece], transfer: Transfer, *, ends_transfer: bool) -> Chain:
        chain = Chain(kind, pieces, next(self._ids), transfer, ends_transfer=ends_transfer)
        self._chains[chain.work_id] = chain
        self.posted += chain.count
        return chain

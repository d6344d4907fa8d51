"""The client's end of a lane: opens its queue pair when payload first wants it, and takes it down to make memory quiet.

The client posts nothing. Its device answers READs and takes WRITEs while the queue pair works. It is put into the
error state, where it takes no packet, and destroyed: after that no byte of the client's memory is touched by anybody,
whatever the node still believes. A device that does not let go is not waited for beyond PAIR_QUIET_NS.
"""

from __future__ import annotations

from kvstore.limits import PAIR_QUIET_NS
from kvstore.transport.rdma.link import Link, LinkState
from kvstore.transport.rdma.marks import Lane, mark_of
from kvstore.transport.rdma.pair_offer import PairOffer
from kvstore.transport.rdma.rail import Pair, Rail
from kvstore.transport.rdma.statuses import Action, action_of
from kvstore.transport.rdma.verbs import SUCCESS


class ClientLane:
    """One lane to one worker. The steps of its handshake: `begin`, `answer`, `probed`.

    Attributes:
        link: whether there is a pair, and when the next may be made.
        lane: which.
        number: of our end that was made last, by which calls know it; -1 before the first.
    """

    def __init__(self, rail: Rail, lane: Lane) -> None:
        self.link = Link()
        self.lane = lane
        self._rail = rail
        self._pair: Pair | None = None
        self.number = -1

    @property
    def is_ready(self) -> bool:
        """Requests may name regions."""
        return self.link.state is LinkState.READY and self._pair is not None

    @property
    def mtu_bytes(self) -> int:
        """Of the path, 0 without one."""
        return self._pair.mtu_bytes if self._pair is not None else 0

    def begin(self, now_ns: int) -> PairOffer:
        """Makes our end; send the node what is returned. Raises VerbsFailure, having noted it."""
        self.link.begin(now_ns)
        try:
            self._pair = self._rail.new_pair(mark_of(self.lane), lambda *_: None)
            self.number = self._pair.number
            return self._pair.offer()
        except BaseException:
            self.broke(Action.REBUILD, now_ns)
            raise

    def answer(self, theirs: PairOffer, now_ns: int) -> None:
        """The node has made its end: connects ours; then ask it to probe. Raises VerbsFailure, having noted it."""
        assert self._pair is not None
        try:
            self._pair.connect(theirs)
        except BaseException:
            self.broke(Action.REBUILD, now_ns)
            raise

    def probed(self, status: int, now_ns: int) -> None:
        """What the node's probe ended with."""
        if status == SUCCESS:
            self.link.probed()
        else:
            self.broke(action_of(status), now_ns)

    def broke(self, action: Action, now_ns: int) -> None:
        """The node says that the pair is lost, or a step failed: our end goes too. Nothing when it went before."""
        if self.link.state in (LinkState.MAKING, LinkState.READY):
            self._close_pair()
            self.link.broke(action, now_ns)

    def silence(self, number: int) -> None:
        """Payload of a call that began with this end comes in a frame: nothing may be written behind it."""
        if number == self.number and self._pair is not None:
            self.retire()

    def lost(self, number: int, status: int, now_ns: int) -> None:
        """The node says that it has no pair any more for a call that began with this end."""
        if number != self.number or self.link.state in (LinkState.WAITING, LinkState.CLOSED):
            return
        action = action_of(status)
        if action is Action.FOLLOW:
            self.retire()  # it was closed on purpose; the next one may be made at once
        else:
            self._close_pair()
            self.link.broke(action, now_ns)

    def retire(self) -> None:
        """Makes our memory quiet at once: a call is given up while the node may still move its bytes."""
        self._close_pair()
        if self.link.state is not LinkState.CLOSED:
            self.link.retired()

    def close(self) -> None:
        """For good. Idempotent."""
        self._close_pair()
        self.link.close()

    def _close_pair(self) -> None:
        if self._pair is not None:
            # in error it takes no packet any more, and one that it was at is long done after so much time
            self._pair.close(wait_ns=PAIR_QUIET_NS)
            self._pair = None

"""One RDMA port with all the queue pairs of a process on it: posts chains, and tells how they ended.

One completion queue serves all pairs; its descriptor wakes the event loop. The work requests of all pairs together are
bounded by the queue's length, so that it holds every one of them if all fail.
"""

from __future__ import annotations

import itertools
import secrets
import select
from collections import deque
from collections.abc import Callable
from typing import Final

from kvstore.errors import Overloaded, Unavailable
from kvstore.limits import (
    COMPLETIONS_PER_TURN_MAX,
    PAIR_PROBE_BYTES,
    PAIR_READS_MAX,
    PAIR_REQUESTS_MAX,
    PAIRS_CLOSING_MAX,
    RAIL_CLOSE_NS_MAX,
    RAIL_REQUESTS_MAX,
)
from kvstore.transport.rdma.closing import Closer, Dying
from kvstore.transport.rdma.marks import Mark
from kvstore.transport.rdma.pair_offer import PROBE_WORD_BYTES, PairOffer, path_between
from kvstore.transport.rdma.pair_queue import PairQueue, Transfer
from kvstore.transport.rdma.regions import address_of
from kvstore.transport.rdma.statuses import Status, cause_of
from kvstore.transport.rdma.verbs import (
    SUCCESS,
    Access,
    Completion,
    Device,
    MemoryRegion,
    PairEnd,
    QueuePair,
    Verbs,
    VerbsFailure,
    Work,
)
from kvstore.transport.rdma_choice import PortChoice

_PACKET_NUMBERS: Final = 1 << 24


class Pair:
    """One queue pair of a rail, with what waits for it.

    Attributes:
        broken: why it ended by itself, a Status; None while it works.
        mtu_bytes: of the path; 0 before `connect`.
    """

    __slots__ = ("_mark", "_on_broken", "_ours", "_pair", "_queue", "_rail", "broken", "mtu_bytes", "probe_word")

    def __init__(
        self, rail: Rail, pair: QueuePair, queue: PairQueue, mark: Mark, on_broken: Callable[[Pair, int], None]
    ) -> None:
        self._rail = rail
        self._pair: QueuePair | None = pair
        self._queue = queue
        self._mark = mark
        self._on_broken = on_broken
        self._ours: PairOffer | None = None
        self.broken: int | None = None
        self.mtu_bytes = 0
        self.probe_word = b""

    @property
    def number(self) -> int:
        """The device's."""
        return self._pair.number if self._pair is not None else -1

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way."""
        return self._queue.is_idle

    @property
    def is_usable(self) -> bool:
        """It has neither been closed nor broken."""
        return self._pair is not None

    def offer(self) -> PairOffer:
        """What the other end must know; the same each time. Raises VerbsFailure."""
        if self._ours is None:
            assert self._pair is not None
            self._ours = self._rail.describe(self._pair)
        return self._ours

    def connect(self, theirs: PairOffer) -> None:
        """Makes it usable; the other end does the same. Raises VerbsFailure; then close it."""
        assert self._pair is not None
        path = path_between(
            self.offer(),
            theirs,
            port=self._rail.port_number,
            gid_index=self._rail.gid_index,
            mark=self._mark,
            access=self._rail.remote_access,
        )
        self._pair.connect(path)
        self.mtu_bytes = path.mtu_bytes

    def submit(self, transfer: Transfer) -> None:
        """Moves its bytes, after what waits already; `on_end` is never called from within.

        Raises:
            Unavailable: the pair is closed or broken.
            Overloaded: too much waits.
        """
        if self._pair is None or self.broken is not None:
            raise Unavailable("the queue pair is gone; make another one")
        self._queue.add(transfer)
        self._rail.pump(self)

    def close(self, *, wait_ns: int = 0) -> None:
        """Puts it into the error state, so that it moves nothing new, and has it destroyed. Idempotent.

        What has not ended ends as FLUSHED: what is read into memory of ours once no device writes there any more.
        See `PairQueue.leave`.

        Args:
            wait_ns: so long at most until it is destroyed.
        """
        if self._pair is not None:
            gone, self._pair = self._pair, None
            dying = self._rail.bury(gone, self._queue)
            if wait_ns:
                dying.wait(wait_ns)

    # --- the rail's --------------------------------------------------------------------------------------------------
    def post_next(self, room: int) -> int:
        """Posts one chain; how many work requests it has, 0 when there is none to post."""
        chain = self._queue.next_chain(room) if self._pair is not None else None
        if chain is None:
            return 0
        assert self._pair is not None
        self._pair.post(chain.kind, chain.pieces, chain.work_id)
        return chain.count

    def holds(self, work_id: int) -> bool:
        """As `PairQueue.holds`."""
        return self._queue.holds(work_id)

    def take(self, completion: Completion) -> Transfer | None:
        """A chain ended well."""
        return self._queue.ended(completion)

    @property
    def posted(self) -> int:
        """Work requests on their way."""
        return self._queue.posted

    def fail(self, status: int) -> None:
        """It is in error: closes it and tells its user, after every transfer was told."""
        if self.broken is None:
            self.broken = status
            self.close()
            self._on_broken(self, status)


class Rail:
    """See the module. Whoever owns the event loop calls `on_readable` when `fileno()` is readable.

    Attributes:
        device: open; the rail's from now on.
        remote_access: what other ends may do in the memory that is registered with this device's remote keys.
        payload_bytes: moved by transfers that ended well.
        posts, requests: calls into the library that posted, and work requests in these.
    """

    def __init__(self, device: Device, *, port_number: int, gid_index: int, remote_access: Access) -> None:
        """
        Args:
            device: open.
            port_number, gid_index: as `rdma_choice.choose_port` found.
            remote_access: LOCAL_READ (nothing) for a node; REMOTE_READ and REMOTE_WRITE for a client.

        Raises:
            VerbsFailure: the device refuses what every process needs of it.
        """
        self.device = device
        self.port_number = port_number
        self.gid_index = gid_index
        self.remote_access = remote_access
        self.payload_bytes = 0
        self.posts = 0
        self.requests = 0
        self._room = min(RAIL_REQUESTS_MAX, device.limits.completions_max)
        self._completions = device.completion_queue(self._room)
        self._pairs: dict[int, Pair] = {}
        self._dying: dict[int, Dying] = {}
        self._closer = Closer()
        self._ready = select.epoll()
        self._ready.register(self._completions.fileno(), select.EPOLLIN)
        self._ready.register(self._closer.fileno(), select.EPOLLIN)
        self._hungry: dict[Pair, None] = {}  # pairs that found no room, in order
        self._ended: deque[tuple[Transfer, int, bool]] = deque()  # as `Transfer.end` takes them
        self._ids = itertools.count(1)
        self._has_lost_device = False
        self._pad = memoryview(bytearray(2 * PAIR_PROBE_BYTES))
        try:
            access = Access.LOCAL_WRITE | Access.REMOTE_READ
            self._pad_region = device.register(address_of(self._pad), len(self._pad), access)
        except VerbsFailure:
            self._completions.close()
            self._closer.close()
            self._ready.close()
            raise
        self.probe_word = secrets.token_bytes(PROBE_WORD_BYTES)
        self._pad[:PAIR_PROBE_BYTES] = self.probe_word * (PAIR_PROBE_BYTES // PROBE_WORD_BYTES)
        self._completions.arm()

    def fileno(self) -> int:
        """For select or epoll."""
        return self._ready.fileno()

    @property
    def pair_count(self) -> int:
        """Queue pairs that are in use."""
        return len(self._pairs)

    @property
    def dying_count(self) -> int:
        """Queue pairs that are not destroyed yet."""
        return len(self._dying)

    @property
    def has_ended(self) -> bool:
        """Transfers wait to be told: call `on_readable` though the descriptor says nothing."""
        return bool(self._ended)

    def register(self, address: int, length_bytes: int, access: Access) -> MemoryRegion:
        """As `Device.register`."""
        return self.device.register(address, length_bytes, access)

    def new_pair(self, mark: Mark, on_broken: Callable[[Pair, int], None]) -> Pair:
        """A queue pair that is not connected. `on_broken` is told once, when it ends by itself.

        Raises:
            Overloaded: too many are still to be destroyed.
            VerbsFailure: the device refuses.
        """
        self._take_gone()
        if len(self._dying) >= PAIRS_CLOSING_MAX:
            raise Overloaded(
                f"{len(self._dying)} queue pairs wait to be destroyed, at most {PAIRS_CLOSING_MAX} may: is the wire of "
                f"{self.device.name} dead?"
            )
        made = self.device.queue_pair(self._completions, sends_max=PAIR_REQUESTS_MAX, receives_max=0)
        fence = (self._pad_region.address + PAIR_PROBE_BYTES, self._pad_region.local_key)
        sends_max = min(PAIR_REQUESTS_MAX, self.device.limits.work_requests_max)
        pair = Pair(self, made, PairQueue(fence=fence, ids=self._ids, requests_max=sends_max), mark, on_broken)
        self._pairs[made.number] = pair
        return pair

    def describe(self, pair: QueuePair) -> PairOffer:
        """Our end, as the port is now. Raises VerbsFailure."""
        port = self.device.port(self.port_number)
        end = PairEnd(
            number=pair.number,
            packet_number=secrets.randbelow(_PACKET_NUMBERS),
            lid=port.lid,
            gid=self.device.gid(self.port_number, self.gid_index),
        )
        return PairOffer(
            end=end,
            mtu_bytes=port.mtu_bytes,
            reads_max=max(1, min(self.device.limits.reads_max, PAIR_READS_MAX)),
            probe_address=self._pad_region.address,
            probe_key=self._pad_region.remote_key,
            probe_word=self.probe_word,
        )

    def probe(self, pair: Pair, theirs: PairOffer, on_end: Callable[[int], None]) -> None:
        """Reads more than one packet out of the other end, and compares: SUCCESS only if the bytes came across."""
        pad = memoryview(bytearray(PAIR_PROBE_BYTES))
        region = self.device.register(address_of(pad), len(pad), Access.LOCAL_WRITE)
        expected = theirs.probe_word * (PAIR_PROBE_BYTES // PROBE_WORD_BYTES)

        def ended(status: int) -> None:
            region.close()
            on_end(status if status != SUCCESS or pad == expected else Status.BAD_RESPONSE)

        piece = (region.address, len(pad), region.local_key, theirs.probe_address, theirs.probe_key)
        pair.submit(Transfer(Work.READ, [piece], ended))

    def on_readable(self) -> None:
        """Tells how transfers ended. Raises VerbsFailure: the device is gone; then `lose_device`."""
        self._take_gone()
        if self._has_lost_device:
            self._tell()
            return
        self._completions.take_events()
        left = COMPLETIONS_PER_TURN_MAX
        is_armed = False
        while left > 0:
            found = self._completions.poll(left)
            left -= len(found)
            if found:
                self._sort(found)
            elif is_armed:
                break
            else:
                self._completions.arm()  # and poll once more: what ended before it would not wake us
                is_armed = True
        if not is_armed:
            self._completions.arm()
        self._feed_hungry()
        self._tell()

    def lose_device(self) -> None:
        """It says nothing any more: ends all pairs, and tells it. `on_readable` goes on telling of those destroyed."""
        if not self._has_lost_device:
            self._has_lost_device = True
            self._ready.unregister(self._completions.fileno())  # it would wake the loop for ever
        self.close_pairs(within_ns=0)

    def close(self) -> None:
        """Ends all pairs, then the device. What has not ended is told. Idempotent.

        A device that does not let its pairs be destroyed in time is left to the end of the process.
        """
        if self._ready.closed or not self.close_pairs():
            return
        self._ready.close()
        self._closer.close()
        self._completions.close()
        self._pad_region.close()
        self.device.close()

    def close_pairs(self, within_ns: int = RAIL_CLOSE_NS_MAX) -> bool:
        """Ends all pairs, and tells what has not ended; whether no memory is used any more."""
        for pair in list(self._pairs.values()):
            pair.close()
        dying = list(self._dying.values())
        is_quiet = all(one.wait(within_ns) for one in dying)
        self._take_gone()
        self._tell()
        return is_quiet

    # --- its pairs' --------------------------------------------------------------------------------------------------
    def pump(self, pair: Pair) -> None:
        """Posts what the pair has waiting, as far as there is room.

        A chain that is refused takes room as well until the pair is gone: some of it may be posted.
        """
        room, posted = self._room, pair.posted
        try:
            while count := pair.post_next(self._room):
                self._room -= count
                self.posts += 1
                self.requests += count
        except VerbsFailure:
            self._room = room - (pair.posted - posted)
            pair.fail(Status.LOCAL_OPERATION)
            return
        if not self._room:
            self._hungry[pair] = None

    def bury(self, pair: QueuePair, queue: PairQueue) -> Dying:
        """The pair is to go. Its work requests keep their room until it is gone: each may end with a completion."""
        self._pairs.pop(pair.number, None)
        dying = self._dying[pair.number] = Dying(pair, queue)
        try:
            pair.fail()
        except VerbsFailure:
            pass  # it was never connected, or is in error already
        self._ended.extend((one, Status.FLUSHED, is_quiet) for one, is_quiet in queue.leave())
        self._closer.destroy(dying)
        return dying

    def _take_gone(self) -> None:
        for dying in self._closer.take():
            if self._dying.get(dying.number) is dying:
                del self._dying[dying.number]
            self._room += dying.posted
            self._ended.extend((one, Status.FLUSHED, True) for one in dying.queue.drain())

    def _tell(self) -> None:
        while self._ended:
            transfer, status, is_quiet = self._ended.popleft()
            transfer.end(status, is_quiet=is_quiet)

    def _sort(self, found: list[Completion]) -> None:
        failed: dict[int, list[Completion]] = {}
        for one in found:
            pair = self._pairs.get(one.pair_number)
            if pair is None or (one.work_id and not pair.holds(one.work_id)):
                self._flush(one)  # also of a pair that had the number before
                continue
            if one.status != SUCCESS or one.pair_number in failed:
                failed.setdefault(one.pair_number, []).append(one)
                continue
            before = pair.posted
            transfer = pair.take(one)
            self._room += before - pair.posted
            if transfer is not None:
                self.payload_bytes += sum(piece[1] for piece in transfer.pieces)
                self._ended.append((transfer, SUCCESS, True))
            self.pump(pair)
        for number, completions in failed.items():
            cause = cause_of(completions)
            self._pairs[number].fail(cause.status if cause is not None else Status.FLUSHED)
            for one in completions:
                self._flush(one)

    def _flush(self, one: Completion) -> None:
        """A completion of a pair that is not used any more."""
        dying = self._dying.get(one.pair_number)
        transfer = dying.queue.flushed(one.work_id) if dying is not None else None
        if transfer is not None:
            self._ended.append((transfer, Status.FLUSHED, True))

    def _feed_hungry(self) -> None:
        hungry, self._hungry = self._hungry, {}
        for pair in hungry:
            self.pump(pair)  # which puts it back where there is no room

    def __repr__(self) -> str:
        return f"<Rail {self.device.name}:{self.port_number}, {len(self._pairs)} pairs>"


def open_rail(verbs: Verbs, choice: PortChoice, *, remote_access: Access) -> Rail:
    """The rail on a port that `rdma_choice.choose_port` found.

    Raises:
        VerbsFailure: the device cannot be opened, or refuses what every process needs of it.
    """
    device = verbs.open(choice.port.device)
    try:
        return Rail(device, port_number=choice.port.port, gid_index=choice.gid.index, remote_access=remote_access)
    except VerbsFailure:
        device.close()
        raise

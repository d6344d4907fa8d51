"""Queue pairs on their way out: nobody waits for a slow device, and no memory is given back before it is quiet."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.errors import Overloaded
from kvstore.limits import PAIRS_CLOSING_MAX, KiB
from kvstore.testing.fake_verbs import FakeFabric, FakeHardware
from kvstore.testing.rdma_lab import client_rail, node_rail, turn_until
from kvstore.testing.rdma_suite import USUAL, RdmaJoint, slice_of
from kvstore.testing.rdma_town import gid
from kvstore.testing.transport_suite import Client, Fetched
from kvstore.testing.verbs_suite import Ground
from kvstore.transport.base import Landing
from kvstore.transport.rdma import closing, pair_handle
from kvstore.transport.rdma.client_lane import ClientLane
from kvstore.transport.rdma.marks import Lane, mark_of
from kvstore.transport.rdma.pair_handle import destroy_unlocked
from kvstore.transport.rdma.pair_queue import PairQueue, Transfer
from kvstore.transport.rdma.pairs import PairTable
from kvstore.transport.rdma.rail import Pair
from kvstore.transport.rdma.regions import address_of
from kvstore.transport.rdma.statuses import Status
from kvstore.transport.rdma.verbs import SUCCESS, Access, Work


class Bed:
    """A node's device that a test makes slow, a client's, and what they hold."""

    def __init__(self) -> None:
        self.node, self.client = FakeHardware(gids={3: gid(1)}), FakeHardware(gids={3: gid(2)})
        self.fabric = FakeFabric({"node0": self.node, "client0": self.client})

    def join(self) -> RdmaJoint:
        return RdmaJoint(Ground(verbs=self.fabric, names=("node0", "client0"), gid_index=3), USUAL)


def give(joint: RdmaJoint, item: int, data: bytes) -> list[int]:
    """Delivers an item; what is returned has a member once its memory is given back."""
    sent: list[int] = []
    view = memoryview(bytearray(data))
    joint.lab.deliver([slice_of(item, data)], [view], 1, payload_bytes=len(data), on_sent=lambda: sent.append(1))
    return sent


@pytest.fixture
def bed() -> Iterator[Bed]:
    made = Bed()
    yield made
    for hardware in (made.node, made.client):
        hardware.is_letting_go.set()


def test_a_slow_destroy_delays_nobody(bed: Bed) -> None:
    joint = bed.join()
    lab, memory = joint.lab, Client()
    joint.receive_into(memory.views)
    others = [client_rail(bed.fabric, "client0", 3) for _ in range(2)]
    bed.node.is_letting_go.clear()
    lab.pairs.close()  # the first is on its way out, for as long as the device likes
    assert (lab.rail.pair_count, lab.rail.dying_count) == (0, 1)
    joint.client.lane.retire()
    joint.open_pair()  # other ones are made,
    for number, other in enumerate(others):
        lane = ClientLane(other, Lane.FOREGROUND)
        lane.answer(lab.pairs.open(bytes([number]), Lane.FOREGROUND, lane.begin(0), 0), 0)
    data = os.urandom(256 * KiB)
    sent: list[int] = []
    view = memoryview(bytearray(data))
    lab.deliver([slice_of(3, data)], [view], 1, payload_bytes=len(data), on_sent=lambda: sent.append(1))
    turn_until([lab, joint.client], lambda: bool(sent and joint.arrived))  # and bytes moved
    assert memory.data(3, len(data)) == data
    assert lab.placed_bytes == len(data)
    assert lab.rail.dying_count == 1
    bed.node.is_letting_go.set()
    turn_until([lab], lambda: not lab.rail.dying_count)
    joint.close()


@pytest.mark.parametrize("is_flushing", [True, False])
def test_a_landing_is_given_back_when_its_work_is_flushed_or_its_pair_destroyed(bed: Bed, is_flushing: bool) -> None:
    joint = bed.join()
    memory = memoryview(bytearray(4096))
    joint.offer(0, [memoryview(b"a" * 4096)])
    bed.fabric.hold()
    joint.lab.fetch([Landing(item=0, buffer=memory)], 1, Fetched())
    quiet: list[int] = []
    bed.node.is_flushing = is_flushing
    bed.node.is_letting_go.clear()
    joint.lab.unfetch(lambda: quiet.append(1))
    assert not quiet, "the device may still write there"
    for _ in range(5):
        joint.lab.turn()
    assert quiet == ([1] if is_flushing else [])
    bed.node.is_letting_go.set()
    turn_until([joint.lab], lambda: bool(quiet))
    assert quiet == [1]
    bed.fabric.release()
    assert not any(memory)
    joint.close()


@pytest.mark.parametrize("is_flushing", [True, False])
@pytest.mark.parametrize("by", ["halt", "close"])
def test_memory_that_is_written_from_is_given_back_when_it_is_quiet(bed: Bed, by: str, is_flushing: bool) -> None:
    """Else what lies there next could still be sent."""
    joint = bed.join()
    joint.receive_into(Client().views)
    bed.fabric.hold()
    sent = give(joint, 3, b"a" * 4096)
    bed.node.is_flushing = is_flushing
    bed.node.is_letting_go.clear()
    if by == "halt":
        joint.lab.halt()
    else:
        joint.lab.close()
    assert not sent, "the device may still read it"
    for _ in range(5):
        joint.lab.rail.on_readable()
    assert sent == ([1] if is_flushing else [])
    bed.node.is_letting_go.set()
    turn_until([], lambda: bool(joint.lab.rail.on_readable() or sent))
    assert sent == [1]
    joint.close()


def test_a_failure_of_ours_sends_at_once_and_gives_back_later(bed: Bed) -> None:
    """Frames need not wait until the device is through with the memory; whoever wants it for other bytes must."""
    joint = bed.join()
    memory = Client()
    joint.receive_into(memory.views)
    bed.fabric.hold()
    sent = give(joint, 3, b"a" * 4096)
    bed.node.is_flushing = False
    bed.node.is_letting_go.clear()
    bed.node.refusals["post_send"] = deque([errno.ENOMEM])
    late = give(joint, 4, b"b" * 4096)
    turn_until([joint.lab, joint.client], lambda: len(joint.arrived) == 2)
    assert memory.data(3, 4096) + memory.data(4, 4096) == b"a" * 4096 + b"b" * 4096
    for _ in range(5):
        joint.lab.turn()
    assert (sent, late) == ([], [])
    bed.node.is_letting_go.set()
    turn_until([joint.lab], lambda: bool(sent and late))
    joint.close()


def test_work_that_is_refused_leaves_the_completion_queue_as_long_as_it_is(bed: Bed) -> None:
    """Room that was never taken must not be given back: more work could be posted than ends fit in."""
    joint = bed.join()
    joint.receive_into(Client().views)
    rail, room = joint.lab.rail, joint.lab.rail._room
    bed.node.refusals["post_send"] = deque([errno.ENOMEM])
    sent = give(joint, 3, b"a" * 4096)
    turn_until([joint.lab, joint.client], lambda: bool(sent) and not rail.dying_count)
    assert rail._room == room
    joint.close()


def test_a_pair_that_the_device_does_not_destroy_is_still_there(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "PAIR_DESTROY_AGAIN_NS", 1_000_000)
    joint = bed.join()
    memory = memoryview(bytearray(4096))
    joint.offer(0, [memoryview(b"a" * 4096)])
    bed.fabric.hold()
    joint.lab.fetch([Landing(item=0, buffer=memory)], 1, Fetched())
    quiet: list[int] = []
    bed.node.is_flushing = False
    bed.node.is_letting_go.clear()
    bed.node.refusals["destroy_qp"] = deque([errno.EBUSY])
    joint.lab.unfetch(lambda: quiet.append(1))
    turn_until([joint.lab], lambda: not bed.node.refusals["destroy_qp"])
    assert not joint.lab.rail.close_pairs(within_ns=50_000_000), "it is asked again, and takes its time"
    assert joint.lab.rail.dying_count == 1
    assert not quiet
    bed.node.is_letting_go.set()
    turn_until([joint.lab], lambda: bool(quiet))
    assert not joint.lab.rail.dying_count
    joint.close()


@pytest.mark.parametrize("has_ended_well", [True, False])
def test_what_an_old_pair_left_says_nothing_of_one_with_its_number(bed: Bed, has_ended_well: bool) -> None:
    """Devices use numbers again, and not all of them take completions out of the queue when a pair is destroyed."""
    rail, remote = node_rail(bed.fabric, "node0", 3), client_rail(bed.fabric, "client0", 3)
    table = PairTable(rail)
    source, into = memoryview(b"a" * 64), memoryview(bytearray(64))
    there = remote.register(address_of(source), 64, Access.REMOTE_READ)
    here = rail.register(address_of(into), 64, Access.LOCAL_WRITE)
    piece = (here.address, 64, here.local_key, there.address, there.remote_key)

    def read(ends: list[int]) -> tuple[Pair, ClientLane]:
        lane = ClientLane(remote, Lane.FOREGROUND)
        lane.answer(table.open(b"client", Lane.FOREGROUND, lane.begin(0), 0), 0)
        pair = table._entries[b"client", Lane.FOREGROUND].pair
        pair.submit(Transfer(Work.READ, [piece], ends.append))
        return pair, lane

    first_ends: list[int] = []
    second_ends: list[int] = []
    bed.fabric.is_held = not has_ended_well
    first, lane = read(first_ends)
    number = first.number
    lane.close()
    first.close(wait_ns=10**10)
    bed.fabric.hold()
    into[:] = bytes(64)
    bed.fabric._next_number = number - 2  # the client's is made before it
    second, lane = read(second_ends)
    assert second.number == number
    rail.on_readable()
    assert (first_ends, second_ends) == ([Status.FLUSHED], [])
    assert second.is_usable
    bed.fabric.release()
    rail.on_readable()
    assert second_ends == [SUCCESS]
    assert into == source
    lane.close()
    for region in (there, here):
        region.close()
    table.close()
    rail.close()
    remote.close()


def test_a_broken_pair_that_cannot_be_destroyed_costs_its_calls_nothing(bed: Bed) -> None:
    """What was to be fetched goes in frames once it is flushed."""
    joint = bed.join()
    value = os.urandom(128 * KiB)
    joint.offer(0, [memoryview(value)])
    joint.client._held[0][0].deregister()  # its region is no more
    bed.node.is_letting_go.clear()
    memory = memoryview(bytearray(len(value)))
    events = Fetched()
    joint.lab.fetch([Landing(item=0, buffer=memory)], 1, events)
    turn_until([joint.lab, joint.client], lambda: events.items == [0])
    assert memory == value
    assert joint.lab.rail.dying_count == 1
    bed.node.is_letting_go.set()
    joint.close()


def test_a_client_does_not_wait_for_a_device_that_does_not_let_go(bed: Bed) -> None:
    joint = bed.join()
    memory = Client()
    joint.receive_into(memory.views)
    bed.fabric.hold()
    data = b"a" * 4096
    joint.lab.deliver([slice_of(3, data)], [memoryview(data)], 1, payload_bytes=4096, on_sent=lambda: None)
    bed.client.is_letting_go.clear()
    joint.client.lane.retire()  # returns
    bed.fabric.release()  # a packet that is late finds an end in error
    joint.lab.rail.on_readable()
    assert not any(memory.memory[3])
    bed.client.is_letting_go.set()
    joint.close()


def test_scripted_devices_may_be_driven_by_several_threads(bed: Bed) -> None:
    """As in whole nodes: one posts, one destroys, and a test says when work ends."""
    rail, remote = node_rail(bed.fabric, "node0", 3), client_rail(bed.fabric, "client0", 3)
    table = PairTable(rail)
    is_over = threading.Event()
    ends: list[int] = []
    count = 0

    def release_again_and_again() -> None:
        while not is_over.is_set():
            bed.fabric.hold()
            bed.fabric.release()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            releasing = pool.submit(release_again_and_again)
            try:
                for _ in range(1000):
                    lane = ClientLane(remote, Lane.FOREGROUND)
                    lane.answer(table.open(b"client", Lane.FOREGROUND, lane.begin(0), 0), 0)
                    pair = table._entries[b"client", Lane.FOREGROUND].pair
                    for _ in range(20):
                        pair.submit(Transfer(Work.READ, [(0, 8, 0, 0, 0)], ends.append))
                        count += 1
                    pair.close()
                    lane.close()
                    turn_until([], lambda: rail.on_readable() or rail.dying_count < PAIRS_CLOSING_MAX // 2)
            finally:
                is_over.set()
            releasing.result()
    finally:
        sys.setswitchinterval(interval)
    assert rail.close_pairs(10**11)
    assert len(ends) == count
    rail.close()
    remote.close()


def test_so_many_pairs_may_be_on_their_way_out(bed: Bed) -> None:
    rail = node_rail(bed.fabric, "node0", 3)
    bed.node.is_letting_go.clear()
    for _ in range(PAIRS_CLOSING_MAX):
        rail.new_pair(mark_of(Lane.FOREGROUND), lambda *_: None).close()
    with pytest.raises(Overloaded, match="64 queue pairs wait to be destroyed"):
        rail.new_pair(mark_of(Lane.FOREGROUND), lambda *_: None)
    assert not rail.close_pairs(within_ns=0)
    bed.node.is_letting_go.set()
    assert rail.close_pairs()
    rail.new_pair(mark_of(Lane.FOREGROUND), lambda *_: None)
    rail.close()
    rail.close()
    assert not bed.fabric.pairs
    assert not bed.fabric.regions


def test_what_was_posted_is_quiet_last() -> None:
    queue = PairQueue(fence=(0xF000, 99), ids=itertools.count(1), requests_max=100)
    piece = (0, 10, 1, 70, 2)
    transfers = [Transfer(kind, [piece] * count, lambda status: None) for kind, count in _MIX]
    for transfer in transfers:
        queue.add(transfer)
    chains = []
    while (chain := queue.next_chain(1 << 20)) is not None:
        chains.append(chain)
    posted = queue.posted
    flying = [one for one in transfers if one.pieces_posted]
    ended = [(one, one not in flying) for one in transfers if one not in flying or one.kind is Work.WRITE]
    assert queue.leave() == ended
    assert queue.posted == posted, "their completions still come"
    assert [one for chain in chains if (one := queue.flushed(chain.work_id)) is not None] == flying
    assert queue.drain() == []


_MIX = [(Work.READ, 70), (Work.WRITE, 5), (Work.READ, 3), (Work.WRITE, 30), (Work.READ, 200)]


class _Handle(ctypes.Structure):
    """struct ibv_qp, as far as its number and type."""

    _fields_ = (
        ("pointers", ctypes.c_void_p * 6),
        ("handle", ctypes.c_uint32),
        ("qp_num", ctypes.c_uint32),
        ("state", ctypes.c_uint32),
        ("qp_type", ctypes.c_uint32),
    )


class _Holder:
    """An object of a library, with words in it that are no pointers."""

    __slots__ = ("first", "second")


class _Refusing:
    """A library whose device destroys nothing."""

    def ibv_destroy_qp(self, handle: ctypes.c_void_p) -> int:
        return errno.EBUSY


def test_a_handle_that_the_device_kept_is_there_for_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_handle, "_library", _Refusing)
    held = _Handle(qp_num=77, qp_type=2)  # an object of ctypes holds a pointer to its memory
    assert [destroy_unlocked(held, 77) for _ in range(2)] == [errno.EBUSY] * 2
    assert held.qp_num == 77


def test_an_object_without_a_handle_is_left_to_its_library() -> None:
    holder = _Holder()
    holder.first, holder.second = 1, _Handle(qp_num=5, qp_type=2)
    assert destroy_unlocked(holder, 77) is None
    assert holder.first == 1

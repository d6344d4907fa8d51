"""Queue pairs on their way out: nobody waits for a slow device, and no memory is given back before it is quiet."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

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
from kvstore.transport.rdma.client_lane import ClientLane
from kvstore.transport.rdma.marks import Lane, mark_of
from kvstore.transport.rdma.pair_handle import destroy_unlocked
from kvstore.transport.rdma.pair_queue import PairQueue, Transfer
from kvstore.transport.rdma.verbs import Work


class Bed:
    """A node's device that a test makes slow, a client's, and what they hold."""

    def __init__(self) -> None:
        self.node, self.client = FakeHardware(gids={3: gid(1)}), FakeHardware(gids={3: gid(2)})
        self.fabric = FakeFabric({"node0": self.node, "client0": self.client})

    def join(self) -> RdmaJoint:
        return RdmaJoint(Ground(verbs=self.fabric, names=("node0", "client0"), gid_index=3), USUAL)


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


def test_what_is_read_into_our_memory_ends_last() -> None:
    queue = PairQueue(fence=(0xF000, 99), requests_max=100)
    piece = (0, 10, 1, 70, 2)
    transfers = [Transfer(kind, [piece] * count, lambda status: None) for kind, count in _MIX]
    for transfer in transfers:
        queue.add(transfer)
    chains = []
    while (chain := queue.next_chain(1 << 20)) is not None:
        chains.append(chain)
    posted = queue.posted
    reads = [one for one in transfers if one.kind is Work.READ and one.pieces_posted]
    assert queue.leave() == [one for one in transfers if one not in reads]
    assert queue.posted == posted, "their completions still come"
    ended = [one for chain in chains if (one := queue.flushed(chain.work_id)) is not None]
    assert ended == reads
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


def test_an_object_without_a_handle_is_left_to_its_library() -> None:
    holder = _Holder()
    holder.first, holder.second = 1, _Handle(qp_num=5, qp_type=2)
    assert destroy_unlocked(holder, 77) is None
    assert holder.first == 1

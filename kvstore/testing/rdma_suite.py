"""The transport's conformance suite over RDMA, and what is RDMA's alone; tests say which devices."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvstore.errors import Unavailable
from kvstore.limits import PAIR_BACKOFF_NS_MIN, SLICE_BYTES_MAX, KiB, MiB
from kvstore.testing.rdma_lab import CLIENT_ID, LabClient, LabNode, client_rail, node_rail, turn_until
from kvstore.testing.transport_suite import Client, Conditions, Fetched, Joint, TransportSuite
from kvstore.testing.verbs_suite import Ground
from kvstore.transport.base import Landing, NodeChannel
from kvstore.transport.rdma.marks import Lane
from kvstore.wire.slices import NO_CONTENT_ID, Slice

USUAL = Conditions(name="usual")


class RdmaJoint:
    """See `transport_suite.Joint`. Memory is registered, and known to the node, from when a test first shows it."""

    def __init__(self, ground: Ground, conditions: Conditions) -> None:
        theirs, ours = socket.socketpair()
        if conditions.buffer_bytes:
            for end in (theirs, ours):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, conditions.buffer_bytes)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, conditions.buffer_bytes)
        self.lab = LabNode(theirs, node_rail(ground.verbs, ground.names[0], ground.gid_index))
        self.lab.before_delivery = self._name
        self.node: NodeChannel = self.lab
        self.client = LabClient(ours, client_rail(ground.verbs, ground.names[1], ground.gid_index))
        self.arrived = self.client.arrived
        self.is_named = True
        self.open_pair()

    def open_pair(self) -> None:
        """The handshake, to its end."""
        self.client.open_pair()
        turn_until([self.lab, self.client], lambda: self.client.lane.is_ready)

    def turn(self) -> None:
        """See `Joint.turn`."""
        self.lab.turn()
        self.client.turn()

    def receive_into(self, memory: Callable[[Slice], Sequence[memoryview]]) -> None:
        """See `Joint.receive_into`."""
        self.client.memory = memory

    def offer(self, item: int, fragments: Sequence[memoryview]) -> None:
        """See `Joint.offer`."""
        self.client.offers[item] = fragments
        descriptors, self.lab.places[item] = self.client.describe(fragments)
        self.lab.regions.learn(descriptors)

    def leave(self) -> None:
        """See `Joint.leave`."""
        self.client.shut()

    def close(self) -> None:
        """See `Joint.close`."""
        self.client.shut()
        self.lab.shut()

    def _name(self, slices: Sequence[Slice]) -> None:
        """Shows the node where the items of a delivery belong, as a GET does."""
        for one in slices if self.is_named else ():
            whole = one._replace(offset=0, length_bytes=one.record_bytes)
            descriptors, self.lab.places[one.item] = self.client.describe(self.client.memory(whole))
            self.lab.regions.learn(descriptors)


def slice_of(item: int, data: bytes) -> Slice:
    """A record in one slice, without checksums."""
    return Slice(item, 0, len(data), 0, True, NO_CONTENT_ID, len(data), 4096, b"")


class RdmaSuite(TransportSuite):
    """Inherit, and give the fixture `ground`."""

    @pytest.fixture
    def ground(self) -> Ground:
        """Which library, which devices."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _stand_on(self, ground: Ground) -> Iterator[None]:
        self._ground = ground
        self._joints: list[RdmaJoint] = []
        yield
        for joint in self._joints:
            joint.close()  # devices are closed by hand, whatever a test left open

    def join(self, conditions: Conditions) -> RdmaJoint:
        """See `TransportSuite.join`."""
        self._joints.append(RdmaJoint(self._ground, conditions))
        return self._joints[-1]

    def settle(self, joint: Joint) -> None:
        """See `TransportSuite.settle`."""
        assert isinstance(joint, RdmaJoint)
        rail = joint.lab.rail
        assert rail.close_pairs(10**11), "a queue pair was not destroyed"

    @pytest.mark.parametrize("turns", [0, 1, 2, 5, 20])
    def test_memory_is_not_written_after_unfetch(self, turns: int) -> None:
        """As for every transport; but here it may all have come before the first turn."""
        joint = self.join(USUAL)
        value = os.urandom(4 * MiB)
        memory = memoryview(bytearray(len(value)))
        joint.offer(0, [memoryview(value)])
        events = Fetched()
        joint.lab.fetch([Landing(item=0, buffer=memory)], 1, events)
        for _ in range(turns):
            joint.turn()
        joint.lab.unfetch()
        before, told = bytes(memory), list(events.items)
        assert told == ([] if joint.lab.losses else [0]), "what was on its way costs the pair"
        for _ in range(100):
            joint.turn()
        assert bytes(memory) == before
        assert events.items == told
        second = memoryview(bytearray(5))
        joint.offer(7, [memoryview(b"again")])
        joint.lab.fetch([Landing(item=7, buffer=second)], 2, events)
        self.turn_until(joint, lambda: events.items[len(told) :] == [7])
        assert bytes(second) == b"again"
        joint.close()

    def test_a_client_that_leaves_in_the_middle_of_a_fetch(self) -> None:
        """As for every transport; but here it may all have come before the client left."""
        joint = self.join(USUAL)
        memory = memoryview(bytearray(MiB))
        joint.offer(0, [memoryview(os.urandom(MiB))])
        events = Fetched()
        joint.lab.fetch([Landing(item=0, buffer=memory)], 1, events)
        joint.leave()
        with pytest.raises(Unavailable):
            self.turn_until(joint, lambda: False)
        joint.lab.close()
        before = bytes(memory)
        assert events.items in ([], [0])
        joint.lab.shut()
        assert bytes(memory) == before

    def give(self, joint: RdmaJoint, data: bytes) -> list[int]:
        """Delivers a record as item 3; the list grows when its memory is given back."""
        sent: list[int] = []
        view = memoryview(bytearray(data))
        joint.lab.deliver([slice_of(3, data)], [view], 1, payload_bytes=len(data), on_sent=lambda: sent.append(1))
        return sent

    def test_payload_does_not_travel_in_frames_nor_through_python(self) -> None:
        joint = self.join(USUAL)
        data = os.urandom(SLICE_BYTES_MAX)
        client = Client(skew=5)
        joint.receive_into(client.views)
        framed = joint.lab.writer.sent_bytes
        sent = self.give(joint, data)
        turn_until([joint.lab, joint.client], lambda: bool(sent and joint.arrived))
        assert client.data(3, len(data)) == data
        memory = memoryview(bytearray(len(data)))
        joint.offer(4, [memoryview(data)])
        events = Fetched()
        joint.lab.fetch([Landing(item=4, buffer=memory)], 1, events)
        turn_until([joint.lab, joint.client], lambda: events.items == [4])
        assert memory == data
        lab = joint.lab
        assert (lab.placed_bytes, lab.pulled_bytes, lab.fallback_bytes) == (len(data), len(data), 0)
        assert lab.writer.sent_bytes - framed < 1 * KiB, "frames carry descriptors only"
        joint.close()

    def test_work_requests_and_posts_of_a_mebibyte(self) -> None:
        joint = self.join(USUAL)
        client = Client()
        joint.receive_into(client.views)
        rail = joint.lab.rail
        before = rail.requests, rail.posts
        sent = self.give(joint, os.urandom(1 * MiB))
        turn_until([joint.lab, joint.client], lambda: bool(sent and joint.arrived))
        assert (rail.requests - before[0], rail.posts - before[1]) == (2, 2), "one write and its fence"
        joint.close()

    def test_wrong_key_falls_back_and_the_next_pair_works(self) -> None:
        joint = self.join(USUAL)
        client = Client()
        joint.receive_into(client.views)
        data = os.urandom(64 * KiB)
        whole = slice_of(3, data)
        [described], joint.lab.places[3] = joint.client.describe(client.views(whole))
        wrong = described._replace(remote_key=described.remote_key ^ 0x1F00)
        joint.lab.regions.learn([wrong])
        joint.is_named = False
        sent = self.give(joint, data)
        turn_until([joint.lab, joint.client], lambda: bool(sent and joint.arrived))
        assert client.data(3, len(data)) == data
        assert (joint.lab.fallback_bytes, joint.lab.losses) == (len(data), 1)
        assert not joint.client.lane.is_ready, "the client's end was closed before the bytes came again"
        self.reopen(joint)
        joint.lab.regions.learn([described])
        joint.arrived.clear()
        again = self.give(joint, data[::-1])
        turn_until([joint.lab, joint.client], lambda: bool(again and joint.arrived))
        assert client.data(3, len(data)) == data[::-1]
        assert joint.lab.placed_bytes == len(data)
        joint.close()

    def test_region_deregistered_early_costs_speed_only(self) -> None:
        joint = self.join(USUAL)
        value = bytearray(os.urandom(256 * KiB))
        joint.offer(0, [memoryview(value)])
        held, _ = joint.client._held.pop()
        joint.client.cache.release(held)
        memory = memoryview(bytearray(len(value)))
        events = Fetched()
        joint.lab.fetch([Landing(item=0, buffer=memory)], 1, events)
        turn_until([joint.lab, joint.client], lambda: events.items == [0])
        assert memory == value
        assert joint.lab.pulled_bytes == 0
        joint.close()

    def test_memory_is_quiet_once_the_client_retires(self) -> None:
        joint = self.join(USUAL)
        client = Client()
        joint.receive_into(client.views)
        sent = [self.give(joint, b"\xaa" * SLICE_BYTES_MAX) for _ in range(4)]
        joint.client.lane.retire()
        memory = client.memory[3]
        before = bytes(memory)
        held = joint.client.channel
        for _ in range(50):
            joint.lab.turn()  # the node goes on by itself; the client reads no frame any more
        assert bytes(memory) == before
        assert held.fileno() >= 0
        joint.lab.close()
        self.settle(joint)  # a thread destroys the queue pair; until then its device may read the memory
        assert all(sent), "memory is given back when the channel closes"
        joint.close()

    def test_idle_pairs_are_closed_and_come_back(self) -> None:
        joint = self.join(USUAL)
        pairs = joint.lab.pairs
        assert (len(pairs), joint.lab.rail.pair_count) == (1, 1)
        pairs.ready(CLIENT_ID, Lane.FOREGROUND, 5)
        pairs.sweep(6, idle_ns=10)
        assert len(pairs) == 1
        pairs.sweep(15, idle_ns=10)
        assert (len(pairs), joint.lab.rail.pair_count) == (0, 0)
        joint.client.lane.retire()
        joint.open_pair()
        assert pairs.opened == 2
        joint.close()

    def reopen(self, joint: RdmaJoint) -> None:
        """The pause after a break, then the handshake."""
        end_ns = time.monotonic_ns() + 100 * PAIR_BACKOFF_NS_MIN
        while not joint.client.lane.link.may_begin(time.monotonic_ns()):
            joint.turn()
            assert time.monotonic_ns() < end_ns
        joint.open_pair()

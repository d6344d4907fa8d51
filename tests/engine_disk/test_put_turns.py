"""Memory for puts goes to clients in turns: who holds least first, so nobody keeps a node by what he was given."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvstore.device.memory import MemoryDevice
from kvstore.engine.turns import Turns
from kvstore.limits import KiB, MiB
from kvstore.testing.store_rig import PutResult, StoreRig
from kvstore.types.results import Refused, Stored


@dataclass(slots=True)
class One:
    """A put that waits."""

    client: bytes
    length: int
    number: int
    settled: bool = False


@dataclass
class Node:
    """So much memory, given out in turns."""

    free: int
    turns: Turns[One] = field(default_factory=Turns)
    held: list[One] = field(default_factory=list)
    number: int = 0

    def ask(self, client: bytes, length: int) -> None:
        self.number += 1
        one = One(client, length, self.number)
        if self.turns or length > self.free:
            self.turns.append(client, one)
        else:
            self.give(one)

    def give(self, one: One) -> None:
        self.free -= one.length
        self.held.append(one)
        self.turns.took(one.client, one.length)

    def give_back(self, one: One) -> None:
        self.held.remove(one)
        self.free += one.length
        self.turns.gave(one.client, one.length)

    def serve(self) -> list[One]:
        """What is given to those who wait."""
        given_now = []
        while (one := self.turns.first()) is not None and one.length <= self.free:
            self.give(one)
            self.turns.served(one.client)
            given_now.append(one)
        return given_now

    def holds(self, client: bytes) -> int:
        return sum(one.length for one in self.held if one.client == client)


CLIENTS = [b"a", b"b", b"c", b"d"]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(CLIENTS), st.integers(1, 12)),
        st.tuples(st.just("back"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("late"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("sweep"), st.just(0), st.just(0)),
    ),
    max_size=120,
)


@given(STEPS)
def test_who_holds_least_is_first_and_each_clients_puts_go_in_order(steps: list[tuple[str, object, int]]) -> None:
    node = Node(free=24)
    passed: dict[bytes, list[bytes]] = {}  # by client that holds nothing and waits: who was served before it
    last: dict[bytes, int] = {}
    for what, which, length in steps:
        waiting = [one for one in node.turns if not one.settled]
        if what == "ask":
            assert isinstance(which, bytes)
            node.ask(which, length)
        elif what == "back" and node.held:
            assert isinstance(which, int)
            node.give_back(node.held[which % len(node.held)])
        elif what == "late" and waiting:
            assert isinstance(which, int)
            waiting[which % len(waiting)].settled = True
        elif what == "sweep":
            node.turns.sweep()
            assert len(node.turns) == sum(not one.settled for one in node.turns)
        while (first := node.turns.first()) is not None:
            waiting = [one for one in node.turns if not one.settled]
            assert node.holds(first.client) == min(node.holds(one.client) for one in waiting)
            if first.length > node.free:
                break
            node.give(first)
            node.turns.served(first.client)
            assert first.number > last.get(first.client, 0)
            last[first.client] = first.number
            passed.pop(first.client, None)
            for other in {one.client for one in waiting} - {first.client}:
                before = passed.setdefault(other, []) if not node.holds(other) else []
                assert first.client not in before, "somebody who holds nothing was passed twice by the same"
                before.append(first.client)
        for client in CLIENTS:
            assert node.turns.held_bytes(client) == node.holds(client)
            if not any(one.client == client and not one.settled for one in node.turns):
                passed.pop(client, None)
    for one in list(node.held):
        node.give_back(one)
    while node.serve():
        for one in list(node.held):
            node.give_back(one)
    assert not node.turns or node.turns.first() is None or node.turns.first().length > 24  # type: ignore[union-attr]


def test_twelve_who_do_not_send_share_with_one_who_does() -> None:
    """48 MiB of memory, 12 slow clients with 32 MiB asked for each: the thirteenth has its share as it comes free."""
    node = Node(free=48)
    slow = [bytes([number]) for number in range(12)]
    for client in slow:
        for _ in range(32):
            node.ask(client, 1)
    for _ in range(32):
        node.ask(b"quick", 1)
    given_to_quick = 0
    for _ in range(12):  # what slow ones finish now and then: ten of them hold nothing yet
        node.give_back(next(one for one in node.held if one.client in slow[:2]))
        given_to_quick += sum(one.client == b"quick" for one in node.serve())
    assert given_to_quick >= 1, "after twelve records, not after twelve windows"
    before = given_to_quick
    for _ in range(200):  # it sends at once what it is granted, and asks on
        one = next(one for one in node.held if one.client == b"quick")
        node.give_back(one)
        node.ask(b"quick", 1)
        given_to_quick += sum(one.client == b"quick" for one in node.serve())
    assert given_to_quick == before + 200, "what it gives back is its own again"


def test_a_client_alone_gets_all_there_is() -> None:
    node = Node(free=48)
    for _ in range(64):
        node.ask(b"alone", 1)
    assert node.holds(b"alone") == 48
    node.give_back(node.held[0])
    assert len(node.serve()) == 1
    assert node.holds(b"alone") == 48


def test_many_who_come_and_go_leave_nothing_behind() -> None:
    draw = random.Random(5)
    node = Node(free=8)
    for _ in range(5_000):
        node.ask(draw.randbytes(2), draw.randint(1, 4))
        node.give_back(draw.choice(node.held))
        node.serve()
        assert len(node.turns._heap) <= 2 * len(node.turns._lines) + 65
    while node.held:
        node.give_back(node.held[0])
        node.serve()
    assert not node.turns
    assert not node.turns._lines
    assert not node.turns._held


def begin(rig: StoreRig, client: bytes, count: int, *, commit: bool) -> list[PutResult]:
    ref = rig.namespace()
    draw = random.Random(client)
    return [
        rig.begin_put(ref, draw.randbytes(32), draw.randbytes(60 * KiB), client_id=client, commit=commit)
        for _ in range(count)
    ]


def test_a_store_whose_memory_others_hold_gives_a_newcomer_what_comes_free() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=48 * MiB), arena_bytes=2 * MiB)
    hogs = [begin(rig, b"hog%d" % number, 24, commit=False) for number in range(4)]
    newcomer = begin(rig, b"new", 40, commit=True)
    assert not any(one.ticket for one in newcomer)
    stuck = [one.ticket for one in hogs[0] if one.ticket is not None]
    for ticket in stuck[:3]:  # two others hold nothing either, and have waited longer
        ticket.abort()
    rig.settle(lambda: all(one.outcome is not None for one in newcomer))
    assert all(isinstance(one.outcome, Stored) for one in newcomer), "one record's memory served it throughout"
    for hog in hogs:
        for one in hog:
            if one.ticket is not None:
                one.ticket.abort()
    while any(one.ticket is None for hog in hogs for one in hog):
        rig.poll()
        for hog in hogs:
            for one in hog:
                if one.ticket is not None:
                    one.ticket.abort()
    rig.settle()
    assert rig.arena.used_bytes == 0
    assert not rig.store.writer.grants._held


def test_memory_of_parcels_counts_and_comes_back_whole_or_cut() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=48 * MiB), arena_bytes=4 * MiB)
    columns = rig.columns(rig.namespace(), [bytes([n]) * 32 for n in range(8)], 60 * KiB)
    grants = rig.store.writer.grants
    parcels = rig.store.writer.open_parcels(columns, 0, 8)
    assert grants.held_bytes(b"rig") == 8 * 64 * KiB
    parcels += [one.cut(1) for one in parcels if one.count > 1]
    assert grants.held_bytes(b"rig") == 8 * 64 * KiB
    for parcel in parcels:
        parcel.abort()
        parcel.abort()
    assert grants.held_bytes(b"rig") == 0


def test_those_who_waited_until_their_deadline_do_not_count_as_waiting() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=48 * MiB), arena_bytes=1 * MiB)
    hog = begin(rig, b"hog", 16, commit=False)
    draw, ref = random.Random(1), rig.namespace()
    late = rig.begin_put(ref, draw.randbytes(32), draw.randbytes(60 * KiB), client_id=b"hog", deadline_ns=10**9)
    other = rig.begin_put(ref, draw.randbytes(32), draw.randbytes(60 * KiB), client_id=b"b")
    rig.settle(lambda: late.outcome is not None)
    assert isinstance(late.outcome, Refused)
    before = rig.metrics.grants_waiting
    rig.settle(lambda: rig.metrics.grants_waiting < before)
    assert other.ticket is None
    assert len([one for one in hog if one.ticket is not None]) > 10

"""Conformance of a node's transport: every byte exact both ways, whatever the sizes, buffers and interruptions.

A transport's tests inherit `TransportSuite` and say how a node's channel and a client are joined, by a `Joint`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import pytest

from kvstore.errors import Unavailable
from kvstore.limits import FRAME_PAYLOAD_BYTES_MAX, SLICE_BYTES_MAX, KiB, MiB
from kvstore.transport.base import Landing, NodeChannel
from kvstore.types.checksum import crc_table
from kvstore.wire.slices import NO_CONTENT_ID, Slice

_BLOCK_BYTES = 4096
_TURNS_MAX = 300_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How bad the way is.

    Attributes:
        name: for test ids.
        buffer_bytes: of the transport's own buffers, 0 for its usual ones.
        step_bytes: how much an end receives at once at most, 0 for no limit.
        payload_bytes_max: largest payload worth trying under these conditions.
    """

    name: str
    buffer_bytes: int = 0
    step_bytes: int = 0
    payload_bytes_max: int = 5 * MiB


class Joint(Protocol):
    """A node's channel and a client's end, joined; a test moves both.

    Attributes:
        node: the channel under test.
        arrived: slices whose bytes are all at the client, in order.
        closed: whether the client has noticed that the node is gone.
    """

    node: NodeChannel
    arrived: list[Slice]

    def turn(self) -> None:
        """Moves both ends once. Raises what the node's channel raises."""

    def receive_into(self, memory: Callable[[Slice], Sequence[memoryview]]) -> None:
        """Where the client wants slices that are delivered to it."""

    def offer(self, item: int, fragments: Sequence[memoryview]) -> None:
        """What the client sends, or opens to the node, for an item once it is granted."""

    def leave(self) -> None:
        """The client is gone, without a word."""

    def close(self) -> None:
        """Closes both ends."""


@dataclass(slots=True)
class Fetched:
    """`FetchEvents` that remembers.

    Attributes:
        items: complete ones, in order.
        ends: up to where each item's bytes were said to be there.
        tables: CRC tables of those that came together.
    """

    items: list[int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    tables: bytes = b""

    def arrived(self, one: Slice, arrived_bytes: int) -> None:
        """Some of a slice is there."""
        assert 0 < arrived_bytes <= one.length_bytes
        self.ends[one.item] = max(self.ends.get(one.item, 0), one.offset + arrived_bytes)

    def fetched(self, item: int) -> None:
        """An item is complete."""
        self.items.append(item)

    def came(self, items: Sequence[int], tables: bytes, *, are_good: bool) -> None:
        """Items are complete."""
        self.items += items
        self.tables += tables


CONDITIONS = [
    Conditions(name="usual"),
    Conditions(name="tiny buffers", buffer_bytes=4 * KiB, payload_bytes_max=2 * MiB + 7),
    Conditions(name="small steps", step_bytes=1460),
    Conditions(name="one byte at a time", step_bytes=1, payload_bytes_max=9 * KiB),
]
SIZES = [1, 4095, 4096, 4097, 9 * KiB, 64 * KiB, MiB - 1, SLICE_BYTES_MAX, 5 * MiB]


def slices_of(item: int, data: bytes) -> list[Slice]:
    """A record as slices of at most SLICE_BYTES_MAX, with checksums."""
    pieces = range(0, len(data), SLICE_BYTES_MAX) if data else range(1)
    return [
        Slice(
            item=item,
            offset=at,
            length_bytes=len(data[at : at + SLICE_BYTES_MAX]),
            status=0,
            last=at + SLICE_BYTES_MAX >= len(data),
            content_id=NO_CONTENT_ID,
            record_bytes=len(data),
            block_bytes=_BLOCK_BYTES,
            crcs=crc_table(data[at : at + SLICE_BYTES_MAX], _BLOCK_BYTES),
        )
        for at in pieces
    ]


class Client:
    """The client's memory: one buffer for each item, skewed and in fragments as a test wants."""

    def __init__(self, *, skew: int = 0, fragment_bytes: int = 1 << 30) -> None:
        self._skew = skew
        self._fragment_bytes = fragment_bytes
        self.memory: dict[int, bytearray] = {}

    def views(self, one: Slice) -> list[memoryview]:
        """Where a slice belongs."""
        buffer = self.memory.setdefault(one.item, bytearray(self._skew + one.record_bytes + 64))
        start = self._skew + one.offset
        stop = start + one.length_bytes
        steps = range(start, stop, self._fragment_bytes)
        return [memoryview(buffer)[at : min(at + self._fragment_bytes, stop)] for at in steps]

    def data(self, item: int, length_bytes: int) -> bytes:
        """What has arrived of an item; nothing beside it was written."""
        buffer = self.memory[item]
        assert not any(buffer[: self._skew])
        assert not any(buffer[self._skew + length_bytes :])
        return bytes(buffer[self._skew : self._skew + length_bytes])


class TransportSuite:
    """Inherit, and give `join`."""

    def join(self, conditions: Conditions) -> Joint:
        """A new pair."""
        raise NotImplementedError

    @pytest.mark.parametrize("conditions", CONDITIONS, ids=lambda conditions: conditions.name)
    @pytest.mark.parametrize("length_bytes", SIZES)
    def test_what_is_delivered_arrives_exactly(self, conditions: Conditions, length_bytes: int) -> None:
        if length_bytes > conditions.payload_bytes_max:
            length_bytes = conditions.payload_bytes_max - length_bytes % 7
        joint = self.join(conditions)
        for skew, fragment_bytes in ((0, 1 << 30), (1, 1000), (511, 4096)):
            client = Client(skew=skew, fragment_bytes=fragment_bytes)
            joint.receive_into(client.views)
            data = bytearray(os.urandom(length_bytes))
            expected = bytes(data)
            self.deliver(joint, 3, data)
            assert client.data(3, length_bytes) == expected
        joint.close()

    def deliver(self, joint: Joint, item: int, data: bytearray) -> None:
        """Delivers a record slice by slice, and scribbles over its memory as soon as that is given back."""
        joint.arrived.clear()
        given_back = []
        slices = slices_of(item, bytes(data))
        for one in slices:
            view = memoryview(data)[one.offset : one.offset + one.length_bytes]

            def on_sent(view: memoryview = view) -> None:
                given_back.append(len(view))
                view[:] = bytes(len(view))

            joint.node.deliver([one], [view] if len(view) else [], 1, payload_bytes=len(view), on_sent=on_sent)
        self.turn_until(joint, lambda: len(joint.arrived) == len(slices) and len(given_back) == len(slices))
        assert joint.arrived == slices

    def test_many_slices_of_many_items_share_a_frame(self) -> None:
        joint = self.join(Conditions(name="usual"))
        client = Client(skew=3)
        joint.receive_into(client.views)
        values = [os.urandom(size) for size in (5, 0, 4096, 100_000, 0, 1, 65_536)]
        slices = [slices_of(item, value)[0] for item, value in enumerate(values)]
        sent: list[bool] = []
        joint.node.deliver(
            slices,
            [memoryview(value) for value in values if value],
            1,
            payload_bytes=sum(map(len, values)),
            on_sent=lambda: sent.append(True),
        )
        self.turn_until(joint, lambda: bool(sent) and len(joint.arrived) == len(slices))
        assert joint.arrived == slices
        for item, value in enumerate(values):
            if value:
                assert client.data(item, len(value)) == value
        joint.close()

    @pytest.mark.parametrize("conditions", CONDITIONS, ids=lambda conditions: conditions.name)
    @pytest.mark.parametrize("fragment_bytes", [1 << 30, 1000])
    def test_what_is_fetched_arrives_exactly(self, conditions: Conditions, fragment_bytes: int) -> None:
        joint = self.join(conditions)
        values = [os.urandom(min(size, conditions.payload_bytes_max)) for size in SIZES]
        memory = [memoryview(bytearray(len(value) + 65))[1:] for value in values]
        for item, value in enumerate(values):
            cuts = range(0, len(value), fragment_bytes)
            joint.offer(item, [memoryview(value)[at : at + fragment_bytes] for at in cuts])
        events = Fetched()
        landings = [Landing(item=item, buffer=memory[item][: len(value)]) for item, value in enumerate(values)]
        joint.node.fetch(landings[:2], 1, events)
        joint.node.fetch(landings[2:], 1, events)
        self.turn_until(joint, lambda: len(events.items) == len(values))
        assert sorted(events.items) == list(range(len(values)))
        for item, value in enumerate(values):
            assert bytes(memory[item][: len(value)]) == value
            assert not any(memory[item][len(value) :])
        joint.close()

    @pytest.mark.parametrize("turns", [1, 2, 3, 5, 8, 20])
    def test_memory_is_not_written_after_unfetch(self, turns: int) -> None:
        joint = self.join(Conditions(name="tiny buffers", buffer_bytes=4 * KiB))
        value = os.urandom(MiB)
        memory = memoryview(bytearray(len(value)))
        joint.offer(0, [memoryview(value)])
        events = Fetched()
        joint.node.fetch([Landing(item=0, buffer=memory)], 1, events)
        for _ in range(turns):
            joint.turn()
        joint.node.unfetch()
        before = bytes(memory)
        for _ in range(1000):
            joint.turn()
        assert bytes(memory) == before
        assert events.items == []
        second = memoryview(bytearray(5))
        joint.offer(7, [memoryview(b"again")])
        joint.node.fetch([Landing(item=7, buffer=second)], 2, events)
        self.turn_until(joint, lambda: events.items == [7])
        assert bytes(second) == b"again"
        joint.close()

    @pytest.mark.parametrize("turns", [0, 1, 2, 5])
    def test_a_client_that_leaves_in_the_middle_of_a_delivery(self, turns: int) -> None:
        joint = self.join(Conditions(name="tiny buffers", buffer_bytes=4 * KiB))
        client = Client()
        joint.receive_into(client.views)
        sent: list[int] = []
        data = os.urandom(FRAME_PAYLOAD_BYTES_MAX)
        for number, one in enumerate(slices_of(0, data)):
            view = memoryview(data)[one.offset : one.offset + one.length_bytes]
            joint.node.deliver([one], [view], 1, payload_bytes=len(view), on_sent=partial(sent.append, number))
        for _ in range(turns):
            joint.turn()
        joint.leave()
        with pytest.raises(Unavailable):
            self.turn_until(joint, lambda: False)
        joint.node.close()
        joint.node.close()
        self.settle(joint)
        assert sent == [0, 1], "memory is given back exactly once"

    def test_a_client_that_leaves_in_the_middle_of_a_fetch(self) -> None:
        joint = self.join(Conditions(name="tiny buffers", buffer_bytes=4 * KiB))
        memory = memoryview(bytearray(MiB))
        joint.offer(0, [memoryview(os.urandom(MiB))])
        events = Fetched()
        joint.node.fetch([Landing(item=0, buffer=memory)], 1, events)
        for _ in range(3):
            joint.turn()
        joint.leave()
        with pytest.raises(Unavailable):
            self.turn_until(joint, lambda: False)
        joint.node.close()
        assert events.items == []

    def settle(self, joint: Joint) -> None:
        """The node's channel is closed: returns when no device moves anything for it any more. Most have none."""

    def turn_until(self, joint: Joint, is_done: Callable[[], bool]) -> None:
        """Turns until `is_done`; fails after very many turns."""
        for _ in range(_TURNS_MAX):
            if is_done():
                return
            joint.turn()
        raise AssertionError("it never came")

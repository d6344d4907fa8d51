"""OFFERs whose records go in parcels end as they do one by one, whatever the client does with them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.device.memory import MemoryDevice
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.limits import SECOND_NS, SWEEP_NS, WRITE_WAVE_NS, KiB, MiB
from kvstore.server.batch import unpack_u32
from kvstore.testing.plane_lab import LabClient, PlaneLab, results_of
from kvstore.transport import put_lane
from kvstore.types.checksum import crc_table
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import ItemStatus, RefusedReason
from kvstore.wire.header import FrameType
from kvstore.wire.messages import Feature, Grant, Result
from kvstore.wire.slices import NO_CONTENT_ID, Slice

NAMESPACE = Namespace(
    tenant="default", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=8 * MiB, chunk_tokens=16)
)
NS = NAMESPACE.digest
BLOCK = 64 * KiB
STORED = (ItemStatus.STORED, "")
PLAIN = {"crc_tables": b"", "block_bytes": BLOCK, "deadline_ns": 100 * SECOND_NS}


@pytest.fixture(params=["compiled", "python"], autouse=True)
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What granted payload is received with."""
    assert put_lane.IS_COMPILED, put_lane.HOW
    monkeypatch.setattr(put_lane, "IS_COMPILED", request.param == "compiled")


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def value_of(number: int, length: int) -> bytes:
    return random.Random(number).randbytes(length)


class Node:
    """A data plane over a drive in memory, with parcels or without."""

    def __init__(self, *, with_parcels: bool, cache_bytes: int = 0, staging_bytes: int = 48 * MiB) -> None:
        chosen = EngineSettings(
            capacity_bytes=96 * MiB,
            segment_bytes=8 * MiB,
            cache_bytes=cache_bytes,
            staging_bytes=staging_bytes,
            prefault=False,
        )
        self.drive = DriveEngine(MemoryDevice(size_bytes=96 * MiB), chosen, now_ns=time.monotonic_ns())
        self.parcels = 0
        opened = self.drive.open_parcels

        def counted(*asked: object) -> object:
            found = opened(*asked) if with_parcels else ()  # type: ignore[arg-type]
            self.parcels += len(found)
            return found

        self.drive.open_parcels = counted  # type: ignore[method-assign, assignment]
        self.lab = PlaneLab(self.drive)
        self.client = self.lab.client(features=Feature.DATA_CRCS)
        self.client.register(NAMESPACE.manifest())

    def offer(self, numbers: list[int], length: int, **changes: object) -> LabClient:
        """Begins a put of these."""
        values = [value_of(number, length) for number in numbers]
        keys = [key_of(number) for number in numbers]
        offer = self.client.offer(NS, keys, values, **(PLAIN | changes))  # type: ignore[arg-type]
        self.client.start(offer)
        return self.client

    def granted(self, count: int) -> None:
        """Takes GRANT frames until so many items may be sent."""
        while count:
            count -= len(unpack_u32(self.client.expect(Grant).items))

    def settle(self) -> None:
        """Until nothing is on its way, and all memory but the cache's is back."""
        self.lab.turn_until(lambda: self.drive.idle and not self.drive.store.writer.pending)
        assert self.drive.cache.arena.used_bytes == self.drive.cache.used_bytes
        assert self.drive.store.ledger.usage.of("default").waiting_pages == 0

    def close(self) -> None:
        self.lab.close()
        self.drive.close()


@contextmanager
def both(**options: int) -> Iterator[tuple[Node, Node]]:
    nodes = Node(with_parcels=False, **options), Node(with_parcels=True, **options)
    try:
        yield nodes
        assert nodes[1].parcels
    finally:
        for node in nodes:
            node.close()


def a_slice(item: int, value: bytes, at: int, length: int, *, wrong: bool = False) -> tuple[Slice, bytes]:
    piece = value[at : at + length]
    crcs = crc_table(piece, BLOCK)
    if wrong:
        crcs = bytes([crcs[0] ^ 1]) + crcs[1:]
    is_last = at + len(piece) == len(value)
    return Slice(item, at, len(piece), 0, is_last, NO_CONTENT_ID, len(value), BLOCK, crcs), piece


def results_until_end(client: LabClient) -> dict[int, tuple[int, str]]:
    return client.end_put([])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_order_of_frames_and_slices(data: st.DataObject) -> None:
    length = data.draw(st.sampled_from([1, 5000, 65_537, 300 * KiB, 1 * MiB + 7]), label="length")
    count = data.draw(st.integers(1, min(40, 20 * MiB // length)), label="count")
    order = data.draw(st.permutations(range(count)), label="order")
    wrong = data.draw(st.frozensets(st.integers(0, count - 1), max_size=2), label="wrong")
    step = data.draw(st.sampled_from([BLOCK, 1 * MiB]), label="slice")
    in_frame = data.draw(st.integers(1, 8), label="slices in a frame")
    late = data.draw(st.frozensets(st.integers(0, count - 1), max_size=2), label="pauses before")
    there = data.draw(st.integers(0, 1), label="records that exist")
    with both(cache_bytes=8 * MiB) as nodes:
        said = []
        for node in nodes:
            for number in range(there):
                node.offer([number], length)
                node.granted(1)
                node.client.send_item(0, value_of(number, length), with_crcs=True)
                assert results_until_end(node.client) == {0: STORED}
            client = node.offer(list(range(count)), length)
            node.granted(count - there) if count > there else None
            waiting: list[tuple[Slice, bytes]] = []
            for item in order:
                if item < there:
                    continue
                if item in late:
                    node.lab.clock_ns += 2 * WRITE_WAVE_NS
                    node.lab.turn()
                for at in range(0, length, step):
                    waiting.append(a_slice(item, value_of(item, length), at, step, wrong=item in wrong and not at))
                    if len(waiting) == in_frame or sum(len(piece) for _, piece in waiting) >= 1 * MiB:
                        client.send_slices([one for one, _ in waiting], b"".join(piece for _, piece in waiting))
                        waiting = []
            if waiting:
                client.send_slices([one for one, _ in waiting], b"".join(piece for _, piece in waiting))
            said.append(results_until_end(client))
            node.settle()
            _, values = client.get(NS, [key_of(number) for number in range(count)], deadline_ns=100 * SECOND_NS)
            assert values == {
                item: value_of(item, length) for item in range(count) if item < there or item not in wrong
            }
        assert said[0] == said[1]
        for item in range(count):
            fits = (
                {RefusedReason.INVALID} if item in wrong and item >= there else {ItemStatus.STORED, ItemStatus.EXISTS}
            )
            assert said[1][item][0] in fits


@pytest.mark.parametrize("ends", ["cancel", "deadline", "breaks"])
def test_a_put_that_is_given_up_keeps_what_came_whole(ends: str) -> None:
    length, count, sent = 1 * MiB, 12, 5
    with both() as nodes:
        for node in nodes:
            client = node.offer(list(range(count)), length, deadline_ns=10 * SECOND_NS)
            node.granted(count)
            for item in range(sent):
                client.send_item(item, value_of(item, length), with_crcs=True)
            one, piece = a_slice(sent, value_of(sent, length), 0, length)
            client.send_torn([one], piece, 300_000)
            node.lab.turn()
            if ends == "breaks":
                client.channel.close()
            elif ends == "deadline":
                node.lab.clock_ns += 11 * SECOND_NS  # less than a peer may stand still
            else:
                node.lab.clock_ns += SWEEP_NS
                for _ in range(4):  # the sweep asks for every byte, which the kernel has gathered until then
                    node.lab.turn()
                node.lab.plane._connections.copy().pop().call.cancel()  # type: ignore[union-attr]
            if ends != "breaks":
                ended: dict[int, int] = {}
                frame = client.receive()
                while frame.type is FrameType.RESULT:
                    ended |= {item: status for item, status, _ in results_of(Result.decode(frame.body))}
                    frame = client.receive()
                assert frame.type is FrameType.END
                told = set(ended.values())
                assert ended.keys() == set(range(count)) if ends == "deadline" else told
            node.settle()
            reader = node.lab.client()
            _, values = reader.get(NS, [key_of(number) for number in range(count)])
            kept = set(values)
            if ends == "breaks":
                assert kept <= set(range(sent))  # nobody waits for them any more
            elif ends == "deadline":
                assert set(range(sent - 1)) <= kept <= set(range(sent))  # less than PAYLOAD_WAKE_BYTES is not taken yet
            else:
                assert kept == set(range(sent))
            assert all(values[item] == value_of(item, length) for item in kept)


def test_what_is_whole_does_not_wait_for_what_is_late() -> None:
    length = 1 * MiB
    for sent in ([0, 1, 2], [1, 4]):
        with both() as nodes:
            for node in nodes:
                client = node.offer(list(range(8)), length)
                node.granted(8)
                for item in sent:
                    client.send_item(item, value_of(item, length), with_crcs=True)
                node.lab.clock_ns += 2 * WRITE_WAVE_NS
                node.lab.turn_until(lambda: node.drive.metrics.stored_records == len(sent))  # noqa: B023
                for item in set(range(8)) - set(sent):
                    client.send_item(item, value_of(item, length), with_crcs=True)
                assert results_until_end(client) == dict.fromkeys(range(8), STORED)
                node.settle()


def test_received_is_told_at_once_and_pending_is_readable() -> None:
    length = 1 * MiB
    with both() as nodes:
        for node in nodes:
            node.lab.turn_until(lambda: node.drive.idle)  # noqa: B023
            client = node.offer(list(range(4)), length, wait=0)
            node.granted(4)
            for item in range(4):
                client.send_item(item, value_of(item, length), with_crcs=True)
            assert {status for status, _ in results_until_end(client).values()} == {ItemStatus.RECEIVED}
            node.settle()
            assert client.get(NS, [key_of(n) for n in range(4)])[1] == {n: value_of(n, length) for n in range(4)}


def test_a_second_put_of_records_in_parcels_exists_once_they_are_stored() -> None:
    length = 1 * MiB
    with both() as nodes:
        for node in nodes:
            first = node.offer(list(range(4)), length)
            node.granted(4)
            second = node.lab.client(client_id=b"D" * 16, features=Feature.DATA_CRCS)
            values = [value_of(n, length) for n in range(2, 6)]
            second.start(second.offer(NS, [key_of(n) for n in range(2, 6)], values, crc_tables=b""))
            assert set(unpack_u32(second.expect(Grant).items)) == {2, 3}
            for item in range(4):
                first.send_item(item, value_of(item, length), with_crcs=True)
            assert results_until_end(first) == dict.fromkeys(range(4), STORED)
            for item in (2, 3):
                second.send_item(item, values[item], with_crcs=True)
            exists = (ItemStatus.EXISTS, "")
            assert second.end_put(values, with_crcs=True) == {0: exists, 1: exists, 2: STORED, 3: STORED}
            node.settle()


def test_more_than_the_window_or_the_memory_goes_as_room_comes() -> None:
    length, count = 1 * MiB, 40
    with both(staging_bytes=16 * MiB) as nodes:
        for node in nodes:
            values = [value_of(n, length) for n in range(count)]
            node.offer(list(range(count)), length)
            assert node.client.end_put(values, with_crcs=True) == dict.fromkeys(range(count), STORED)
            node.settle()


def test_parcels_only_for_one_shape_without_wishes() -> None:
    node = Node(with_parcels=True)
    for changes in ({"durability": 1}, {"parts": b"\1\1"}, {"content_ids": b"c" * 32}, {"volatile_ttl_ns": SECOND_NS}):
        client = node.offer([1, 2], 70_000, **changes)
        client.end_put([value_of(1, 70_000), value_of(2, 70_000)], with_crcs=True)
    values = [value_of(3, 70_000), value_of(4, 70_001)]
    client.start(client.offer(NS, [key_of(3), key_of(4)], values, crc_tables=b""))
    assert client.end_put(values, with_crcs=True) == {0: STORED, 1: STORED}
    assert not node.parcels
    node.close()


def test_what_our_client_sends_takes_the_lane() -> None:
    """Nothing is placed by the reader, put after put over one connection."""
    node = Node(with_parcels=True)
    (connection,) = node.lab.plane._connections
    payload_bytes = 0
    for number in range(3):
        for length in (70_000, 1 * MiB):
            numbers = [1000 * number + length + n for n in range(5)]
            client = node.offer(numbers, length)
            node.granted(5)
            step = max(1, MiB // length)
            for at in range(0, 5, step):
                parts = [a_slice(n, value_of(numbers[n], length), 0, length) for n in range(5)[at : at + step]]
                client.send_slices([one for one, _ in parts], b"".join(piece for _, piece in parts))
            assert results_until_end(client) == dict.fromkeys(range(5), STORED)
            assert connection.channel._placed_count == 0
            payload_bytes += 5 * length
            assert connection.channel._received_bytes >= payload_bytes, "what the lane took counts as progress"
            assert client.get(NS, [key_of(n) for n in numbers])[1] == {
                at: value_of(n, length) for at, n in enumerate(numbers)
            }
    node.settle()
    node.close()

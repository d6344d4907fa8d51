"""Conformance of a way that payload takes, through a served node: the same tests for TCP, shared memory and RDMA.

A way inherits `ServedSuite` and says how node and client are set up for it. Every test goes through `kvstore serve` and
`KVClient`, and compares bytes: of hits, around them, and of what no longer belongs to a call.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Protocol

import numpy as np
import pytest

from kvstore.errors import InvalidRequest
from kvstore.limits import KiB, MiB
from kvstore.testing.serve_process import Ready, ServeProcess
from kvstore_client import (
    AsyncKVClient,
    Exists,
    Hit,
    KVClient,
    KVLayout,
    Miss,
    MissReason,
    Namespace,
    Part,
    Refused,
    RefusedReason,
    Stored,
)
from kvstore_client.namespace_handle import BoundNamespace

CHUNK: Final = 256 * KiB
TOKENS: Final = 16
SIZES: Final = (1, 511, 4095, 4096, 4097, 64 * KiB + 1, CHUNK, MiB - 1, 2 * MiB + 12_345)
MANY: Final = 8
WAIT_S: Final = 300
STOPPED_S: Final = 1.0  # the supervisor takes a worker for hung after seven seconds
EDGE: Final = 64
LAYOUT: Final = KVLayout(
    chunk_tokens=TOKENS,
    dtype="bf16",
    layers=6,
    shards=2,
    parts=(Part(name="kv", entry_bytes=4096), Part(name="indexer", entry_bytes=128)),
)
KV_LAYER, INDEXER_LAYER = TOKENS * 2048, TOKENS * 64
SHARD: Final = 6 * (KV_LAYER + INDEXER_LAYER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How node and client are set up.

    Attributes:
        transport: of `KVClient.connect`.
        says: what `KVClient.transports` has for a target.
    """

    transport: str
    says: str


class Node(Protocol):
    """A served node, and what only its side can do.

    Attributes:
        way: how it is set up.
        address: of its data port.
    """

    way: Way
    address: str

    def signal_worker(self, number: int) -> None:
        """Sends its worker a signal."""

    def moved_bytes(self) -> tuple[float, float]:
        """Payload that RDMA has written into clients' memory and read out of it, by its metrics."""


class LocalNode:
    """A node of this machine."""

    def __init__(self, process: ServeProcess, ready: Ready, way: Way) -> None:
        self.process = process
        self.way = way
        self.address = ready.data[0]
        self._pid = ready.pid

    def signal_worker(self, number: int) -> None:
        """See `Node`."""
        [child] = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        os.kill(int(child), number)

    def moved_bytes(self) -> tuple[float, float]:
        """See `Node`."""
        return 0, 0


def connect(node: Node, transport: str | None = None) -> KVClient:
    """A new client of it."""
    return KVClient.connect(node.address, transport=transport or node.way.transport, deadline=60)


class Stock:
    """Some records in a namespace of their own, and memory for as many."""

    def __init__(self, client: KVClient, count: int, size: int = CHUNK) -> None:
        self.ns = namespace_of(client, size)
        self.keys = self.ns.keys(list(range(TOKENS * count)))
        self.values = [noise(size, seed) for seed in range(count)]
        self.memory = client.alloc(count * size)
        self.buffers = [self.memory[at : at + size] for at in range(0, count * size, size)]

    def fill(self) -> None:
        """Stores them, out of the memory."""
        self.memory[:] = b"".join(self.values)
        outcomes = self.ns.put(self.keys, self.buffers)
        assert all(isinstance(one, Stored) and one.durable for one in outcomes), outcomes
        self.memory[:] = bytes(len(self.memory))

    def check(self, outcomes: Sequence[Hit | Miss]) -> int:
        """Compares every hit; how many there are."""
        hits = [at for at, one in enumerate(outcomes) if isinstance(one, Hit)]
        for at in hits:
            assert self.buffers[at] == self.values[at], f"wrong bytes in {at}"
        return len(hits)

    def read(self) -> None:
        """All of them are hits."""
        self.memory[:] = bytes(len(self.memory))
        assert self.check(self.ns.get_into(self.keys, self.buffers)) == len(self.keys)

    def until_it_moves(self) -> None:
        """Until the first bytes of a read have come."""
        wait_for(lambda: any(buffer[0] or buffer[-1] for buffer in self.buffers), "the first byte")


def namespace_of(client: KVClient, size: int = CHUNK, layout: KVLayout | None = None) -> BoundNamespace:
    """One that nobody has used."""
    layout = layout or KVLayout.opaque(chunk_bytes=size, chunk_tokens=TOKENS)
    return client.namespace(Namespace(tenant="default", model=os.urandom(8).hex(), weights="w", layout=layout))


def noise(length: int, seed: int) -> bytes:
    """Bytes that are nobody else's; neither the first nor the last is zero."""
    return b"" if not length else b"\x5a" + random.Random(seed).randbytes(max(length - 2, 0)) + b"\xa5" * (length > 1)


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    """Until it is so."""
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end, f"{what} never came"


class ServedSuite:
    """Inherit as Test..., and say `way`; `cache` is the node's."""

    way: ClassVar[Way]
    cache: ClassVar[str] = "16MiB"

    @pytest.fixture(scope="class")
    @classmethod
    def node(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
        """The node of all tests of a way."""
        way, folder = cls.way, tmp_path_factory.mktemp("served")
        usual = ("--cache", cls.cache, "--capacity", "128MiB", "--staging", "48MiB")
        with ServeProcess(folder, *usual) as process:
            yield LocalNode(process, process.wait_ready(), way)
            process.terminate()
            assert process.wait_exit() == 0, process.log
            assert "Traceback" not in process.log, process.log

    @pytest.fixture(scope="class")
    @classmethod
    def client(cls, node: Node) -> Iterator[KVClient]:
        """A client that tests share."""
        with connect(node) as made:
            yield made
            assert all(one.startswith(node.way.says) for one in made.transports().values())

    # --- bytes --------------------------------------------------------------------------------------------------------
    def test_records_of_every_length_come_back_whole(self, node: Node, client: KVClient) -> None:
        ns = namespace_of(client, max(SIZES))
        keys = ns.keys(list(range(TOKENS * len(SIZES))))
        values = [noise(size, size) for size in SIZES]
        memory = [client.alloc(size) for size in SIZES]
        for view, value in zip(memory, values, strict=True):
            view[:] = value
        before = node.moved_bytes()
        assert all(isinstance(one, Stored) and one.durable for one in ns.put(keys, memory))
        assert set(ns.put(keys, memory)) == {Exists()}
        for view in memory:
            view[:] = bytes(len(view))
        with ns.match(keys) as found:
            assert (found.chunks, found.pinned) == (len(SIZES), True)
            outcomes = ns.get_into(keys, memory)
        assert [one.length_bytes for one in outcomes if isinstance(one, Hit)] == list(SIZES)
        assert memory == values
        assert list(client.transports().values()) == [node.way.says]
        if node.way.transport == "rdma":
            wait_for(lambda: node.moved_bytes()[0] - before[0] >= sum(SIZES), "what was got, by RDMA,")
            wait_for(lambda: node.moved_bytes()[1] - before[1] >= sum(SIZES), "what was put, by RDMA,")

    @pytest.mark.parametrize("skew", [0, 1, 511])
    def test_nothing_outside_a_buffer_is_touched(self, client: KVClient, skew: int) -> None:
        count, size = 3, 100_003
        ns = namespace_of(client, size)
        keys = ns.keys(list(range(TOKENS * count)))
        values = [noise(size, seed) for seed in range(count)]
        area = client.alloc(skew + count * (size + EDGE))
        area[:] = b"\xee" * len(area)
        buffers = [area[at : at + size] for at in range(skew, len(area), size + EDGE)]
        for buffer, value in zip(buffers, values, strict=True):
            buffer[:] = value
        assert all(isinstance(one, Stored) for one in ns.put(keys, buffers))
        area[:] = b"\xee" * len(area)
        assert all(isinstance(one, Hit) for one in ns.get_into(keys, buffers))
        expected = b"\xee" * skew + b"".join(value + b"\xee" * EDGE for value in values)
        assert area == expected

    def test_fragments_make_an_item(self, client: KVClient) -> None:
        sizes = [1, 0, 4096, 5, 100_000, CHUNK - 104_102]
        ns = namespace_of(client)
        keys = ns.keys(list(range(TOKENS * 2)))
        values = [noise(CHUNK, seed) for seed in range(2)]
        area = client.alloc(CHUNK + EDGE * len(sizes))

        def pieces() -> list[memoryview]:
            at, found = 0, []
            for size in sizes:
                found.append(area[at : at + size])
                at += size + EDGE
            return found

        at = 0
        for piece in pieces():
            piece[:] = values[0][at : at + len(piece)]
            at += len(piece)
        foreign = bytearray(values[1])
        assert all(isinstance(one, Stored) for one in ns.put(keys, [pieces(), [foreign[:7], foreign[7:]]]))
        area[:] = bytes(len(area))
        own = [bytearray(CHUNK - 9), bytearray(9)]
        assert all(isinstance(one, Hit) for one in ns.get_into(keys, [pieces(), own]))
        assert b"".join(pieces()) == values[0]
        assert b"".join(own) == values[1]

    def test_ranges_of_records(self, client: KVClient) -> None:
        stock = Stock(client, 2)
        stock.fill()
        ranges = [(1, 10), (4095, 2), (8192, 4096), (100_000, 150_001), (CHUNK - 1, 1)]
        total = sum(length for _, length in ranges)
        memory = client.alloc(2 * total)
        into = [memory[:total], [memory[total : total + 5], memory[total + 5 :]]]
        assert all(isinstance(one, Hit) for one in stock.ns.get_into(stock.keys, into, ranges=ranges))
        expected = [b"".join(value[at : at + length] for at, length in ranges) for value in stock.values]
        assert memory == b"".join(expected)

    def test_layers_one_by_one(self, client: KVClient) -> None:
        count = 2
        ns = namespace_of(client, layout=LAYOUT)
        keys = ns.keys(list(range(TOKENS * count)))
        chunks = [noise(2 * SHARD, seed) for seed in range(count)]
        memory = client.alloc(count * 2 * SHARD)
        memory[:] = b"".join(chunks)
        for shard in (0, 1):
            with ns.writer(keys, shards=shard) as writer:
                for layer in (2, 0, 5, 1, 3, 4):
                    for index in range(count):
                        mine = memory[(2 * index + shard) * SHARD :][:SHARD]
                        kv = mine[layer * KV_LAYER :][:KV_LAYER]
                        writer.write(
                            index,
                            [kv, mine[6 * KV_LAYER + layer * INDEXER_LAYER :][:INDEXER_LAYER]],
                            layer=layer,
                        )
                assert all(isinstance(one, Stored) and one.durable for one in writer.commit())
        memory[:] = bytes(len(memory))
        whole = [memory[at : at + 2 * SHARD] for at in range(0, len(memory), 2 * SHARD)]
        assert all(isinstance(one, Hit) for one in ns.get_into(keys, whole))
        assert memory == b"".join(chunks)
        some = client.alloc(count * 2 * (KV_LAYER + INDEXER_LAYER))
        half = len(some) // count
        assert all(isinstance(one, Hit) for one in ns.get_into(keys, [some[:half], some[half:]], layers=[3]))
        for index, chunk in enumerate(chunks):
            expected = b""
            for shard in (0, 1):
                mine = chunk[shard * SHARD :][:SHARD]
                expected += mine[3 * KV_LAYER :][:KV_LAYER] + mine[6 * KV_LAYER + 3 * INDEXER_LAYER :][:INDEXER_LAYER]
            assert some[index * half :][:half] == expected

    def test_empty_records_and_empty_batches(self, client: KVClient) -> None:
        ns = namespace_of(client)
        keys = ns.keys(list(range(TOKENS * 3)))
        value = noise(CHUNK, 1)
        memory = client.alloc(CHUNK)
        memory[:] = value
        assert ns.put(keys[:0], []) == ns.get_into(keys[:0], []) == []
        assert all(isinstance(one, Stored) for one in ns.put(keys, [b"", memory, b""]))
        memory[:] = bytes(CHUNK)
        outcomes = ns.get_into(keys, [bytearray(0), memory, bytearray(9)])
        assert [one.length_bytes for one in outcomes if isinstance(one, Hit)] == [0, CHUNK, 0]
        assert memory == value

    def test_memory_of_every_kind(self, client: KVClient) -> None:
        """The node's way may not reach it all; it all arrives."""
        stock = Stock(client, 5)
        stock.fill()
        pinned = np.zeros(CHUNK, np.uint8)
        into = [
            mmap.mmap(-1, CHUNK),
            bytearray(CHUNK),
            np.zeros((CHUNK // 1024, 1024), np.uint8),
            (int(pinned.ctypes.data), CHUNK),
            client.alloc(CHUNK),
        ]
        assert all(isinstance(one, Hit) for one in stock.ns.get_into(stock.keys, into))
        found = [bytes(into[0]), bytes(into[1]), into[2].tobytes(), pinned.tobytes(), bytes(into[4])]
        assert found == stock.values

    def test_more_memory_than_a_connection_remembers(self, client: KVClient) -> None:
        count, size = 150, 4096
        ns = namespace_of(client, size)
        keys = ns.keys(list(range(TOKENS * count)))
        values = [noise(size, seed) for seed in range(count)]
        assert all(isinstance(one, Stored) for one in ns.put(keys, values))
        for _ in range(4):  # more than half of REGIONS_PER_CONNECTION_MAX in all
            memory = [client.alloc(size) for _ in range(count)]
            assert all(isinstance(one, Hit) for one in ns.get_into(keys, memory))
            assert memory == values

    # --- outcomes -----------------------------------------------------------------------------------------------------
    def test_received_is_readable_at_once_and_durable_soon(self, client: KVClient) -> None:
        stock = Stock(client, 4)
        stock.memory[:] = b"".join(stock.values)
        outcomes = stock.ns.put(stock.keys, stock.buffers, wait="received")
        assert all(isinstance(one, Stored) for one in outcomes)
        stock.memory[:] = bytes(len(stock.memory))  # it is the caller's again
        assert stock.check(stock.ns.get_into(stock.keys, stock.buffers, accept_pending=True)) == 4
        assert {type(one) for one in stock.ns.wait(stock.keys, 30)} == {Hit}
        stock.read()

    def test_misses_stand_beside_hits(self, client: KVClient) -> None:
        stock = Stock(client, 6)
        stock.memory[:] = b"".join(stock.values)
        kept = [0, 2, 5]
        for at in kept:
            assert isinstance(stock.ns.put(stock.keys[at : at + 1], [stock.buffers[at]])[0], Stored)
        stock.memory[:] = bytes(len(stock.memory))
        outcomes = stock.ns.get_into(stock.keys, stock.buffers)
        assert [at for at, one in enumerate(outcomes) if isinstance(one, Hit)] == kept
        assert {one.reason for one in outcomes if isinstance(one, Miss)} == {MissReason.ABSENT}
        assert stock.check(outcomes) == 3
        other = namespace_of(client)  # that no node has heard of
        assert other.get_into(other.keys(list(range(TOKENS * 6))), stock.buffers) == [Miss(MissReason.ABSENT)] * 6

    def test_a_bad_item_fails_alone_or_before_anything_is_sent(self, client: KVClient) -> None:
        stock = Stock(client, 2)
        stock.fill()
        small = client.alloc(CHUNK - 1)
        outcomes = stock.ns.get_into(stock.keys, [small, stock.buffers[1]])
        assert outcomes[0] == Miss(MissReason.LAYOUT)
        assert stock.check([Miss(MissReason.LAYOUT), outcomes[1]]) == 1
        with pytest.raises(InvalidRequest):
            stock.ns.get_into(stock.keys, [bytes(CHUNK), stock.buffers[1]])  # cannot be written
        typed = namespace_of(client, layout=LAYOUT)
        keys = typed.keys(list(range(TOKENS * 2)))
        with pytest.raises(InvalidRequest, match="item 1"):
            typed.get_into(keys, [client.alloc(2 * SHARD), client.alloc(2 * SHARD - 1)])
        put = typed.put(keys, [client.alloc(2 * SHARD - 1), client.alloc(2 * SHARD)])
        assert isinstance(put[0], Refused)
        assert put[0].reason is RefusedReason.INVALID
        assert isinstance(put[1], Stored)
        stock.read()

    def test_one_key_twice_and_many_callers_at_once(self, client: KVClient) -> None:
        stock = Stock(client, 8)
        stock.fill()
        twice = stock.keys[:1] + stock.keys[:1]
        first, second = client.alloc(CHUNK), client.alloc(CHUNK)
        assert {type(one) for one in stock.ns.get_into(twice, [first, second])} == {Hit}
        assert first == second == stock.values[0]

        def read(_: int) -> None:
            memory = client.alloc(8 * CHUNK)
            outcomes = stock.ns.get_into(stock.keys, [memory[at : at + CHUNK] for at in range(0, 8 * CHUNK, CHUNK)])
            assert all(isinstance(one, Hit) for one in outcomes)
            assert memory == b"".join(stock.values)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, range(8)))

    def test_what_one_client_puts_others_read(self, node: Node, client: KVClient) -> None:
        stock = Stock(client, 4)
        stock.fill()
        for transport in (None, "tcp"):
            with connect(node, transport) as other:
                ns = other.namespace(stock.ns.namespace)
                memory = other.alloc(4 * CHUNK)
                outcomes = ns.get_into(stock.keys, [memory[at : at + CHUNK] for at in range(0, 4 * CHUNK, CHUNK)])
                assert all(isinstance(one, Hit) for one in outcomes)
                assert memory == b"".join(stock.values)

    # --- calls that do not come to their end --------------------------------------------------------------------------
    def test_memory_is_quiet_after_the_deadline(self, node: Node) -> None:
        with connect(node) as client:
            stock = Stock(client, MANY)
            stock.fill()
            stock.read()
            stock.memory[:] = bytes(len(stock.memory))
            with stopped(node):
                outcomes = stock.ns.get_into(stock.keys, stock.buffers, deadline=STOPPED_S)
                before = bytes(stock.memory)
            assert stock.check(outcomes) < MANY
            assert {one.reason for one in outcomes if isinstance(one, Miss)} <= {
                MissReason.DEADLINE,
                MissReason.UNAVAILABLE,
            }
            elsewhere(node, stock)
            assert bytes(stock.memory) == before, "written after the return"
            stock.read()

    def test_a_put_that_is_given_up_stores_all_or_nothing(self, node: Node) -> None:
        with connect(node) as client:
            other = Stock(client, 4)
            other.fill()
            stock = Stock(client, MANY)
            stock.memory[:] = b"".join(stock.values)
            assert isinstance(stock.ns.put(stock.keys[:1], stock.buffers[:1])[0], Stored)
            with stopped(node):
                outcomes = stock.ns.put(stock.keys, stock.buffers, deadline=STOPPED_S)
                stock.memory[:] = b"\xee" * len(stock.memory)  # the caller's again
            refused = {one.reason for one in outcomes if isinstance(one, Refused)}
            assert refused
            assert refused <= {RefusedReason.DEADLINE, RefusedReason.OUTCOME_UNKNOWN}
            elsewhere(node, other)
            found = stock.ns.get_into(stock.keys, stock.buffers)
            assert stock.check(found) >= 1
            stock.memory[:] = b"".join(stock.values)
            again = stock.ns.put(stock.keys, stock.buffers, deadline=60)
            assert {type(one) for one in again} <= {Stored, Exists}
            stock.read()

    def test_memory_is_quiet_after_a_cancel(self, node: Node) -> None:
        with connect(node) as client:
            stock = Stock(client, MANY)
            stock.fill()

            async def give_up() -> bytes:
                mine = await AsyncKVClient.connect(node.address, transport=node.way.transport, deadline=60)
                async with mine:
                    ns = mine.namespace(stock.ns.namespace)
                    memory = mine.alloc(MANY * CHUNK)
                    buffers = [memory[at : at + CHUNK] for at in range(0, len(memory), CHUNK)]
                    assert all(isinstance(one, Hit) for one in await ns.get_into(stock.keys, buffers))
                    assert memory == b"".join(stock.values)
                    memory[:] = bytes(len(memory))
                    call = asyncio.ensure_future(ns.get_into(stock.keys, buffers))
                    while not call.done() and not any(buffer[0] or buffer[-1] for buffer in buffers):
                        await asyncio.sleep(0)
                    call.cancel()
                    try:
                        await call
                    except asyncio.CancelledError:
                        pass
                    before = bytes(memory)
                    elsewhere(node, stock)
                    assert bytes(memory) == before, "written after the cancel"
                    assert all(isinstance(one, Hit) for one in await ns.get_into(stock.keys, buffers))
                    return bytes(memory)

            assert asyncio.run(give_up()) == b"".join(stock.values)

    def test_a_client_is_killed_in_the_middle(self, node: Node, client: KVClient) -> None:
        stock = Stock(client, MANY)
        stock.fill()
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            try:
                while True:
                    stock.read()
                    os.write(theirs, b".")
            finally:
                os._exit(1)
        os.close(theirs)
        assert os.read(ours, 1) == b"."
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
        stock.read()

    def test_the_worker_is_killed_in_the_middle(self, node: Node) -> None:
        """The call ends by its deadline, its memory is quiet, and the way is taken again once there is a worker."""
        with connect(node) as client, ThreadPoolExecutor(1) as pool:
            stock = Stock(client, MANY)
            stock.fill()
            stock.read()
            stock.memory[:] = bytes(len(stock.memory))
            reading: Future[list[Hit | Miss]] = pool.submit(
                stock.ns.get_into, stock.keys, stock.buffers, deadline=STOPPED_S
            )
            stock.until_it_moves()
            node.signal_worker(signal.SIGKILL)
            stock.check(reading.result(WAIT_S))
            before = bytes(stock.memory)
            wait_for(lambda: all(stock.ns.contains(stock.keys)), "the next worker")
            assert bytes(stock.memory) == before
            stock.read()
            wait_for(lambda: stock.read() is None and set(client.transports().values()) == {node.way.says}, "the way")


@contextmanager
def stopped(node: Node) -> Iterator[None]:
    """The node's worker does nothing meanwhile."""
    node.signal_worker(signal.SIGSTOP)
    try:
        yield
    finally:
        node.signal_worker(signal.SIGCONT)


def elsewhere(node: Node, stock: Stock) -> None:
    """Another client reads the same: what the node had begun before has come to its end."""
    with connect(node, "tcp") as other:
        ns = other.namespace(stock.ns.namespace)
        memory = [bytearray(len(buffer)) for buffer in stock.buffers]
        assert all(isinstance(one, Hit) for one in ns.get_into(stock.keys, memory))
        assert memory == stock.values

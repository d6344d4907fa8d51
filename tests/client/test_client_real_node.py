"""The client against `kvstore serve`: real sockets, a real drive, SIGKILL and a restart on the same ports."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

from kvstore.limits import RANGES_PER_CALL_MAX, RANGES_PER_ITEM_MAX
from kvstore.testing.serve_process import ServeProcess
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.part import Part, PartKind, Retention
from kvstore.types.results import MissReason, RefusedReason
from kvstore_client import Exists, Hit, KVClient, Refused, Stored

OPAQUE = Namespace(
    tenant="default", model="m", weights="w", layout=KVLayout.opaque(chunk_bytes=300_000, chunk_tokens=16)
)
TYPED = Namespace(
    tenant="default",
    model="org/m",
    weights="w",
    layout=KVLayout(
        chunk_tokens=16,
        dtype="bf16",
        layers=6,
        shards=2,
        parts=(
            Part(name="kv", entry_bytes=512),
            Part(name="indexer", entry_bytes=32),
            Part(name="state", entry_bytes=1000, entries=1, kind=PartKind.SPARSE),
            Part(
                name="swa",
                entry_bytes=64,
                entries=16,
                kind=PartKind.SPARSE,
                retention=Retention.VOLATILE,
                ttl_ns=60 * 10**9,
            ),
        ),
    ),
)
TOKENS = list(range(16 * 12))


def noise(length: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(length)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with ServeProcess(tmp_path_factory.mktemp("node"), "--cache", "64MiB") as process:
        yield process.wait_ready()


@pytest.mark.parametrize("kind", ["grpc", "data"])
def test_either_address_serves_every_verb(served, kind) -> None:
    address = served.grpc if kind == "grpc" else served.data[0]
    namespace = Namespace(tenant="default", model=f"by {kind}", weights="w", layout=OPAQUE.layout)
    with KVClient.connect(address) as client:
        ns = client.namespace(namespace)
        sizes = [0, 1, 511, 512, 513, 4095, 4096, 4097, 65_536, 65_537, 300_000]
        keys = ns.keys(TOKENS[: 16 * len(sizes)])
        payloads = [noise(size, size) for size in sizes]
        with ns.match(keys) as found:
            assert (found.chunks, found.reason) == (0, MissReason.ABSENT)
        assert all(isinstance(one, Stored) and one.durable for one in ns.put(keys, payloads))
        assert set(ns.put(keys, payloads)) == {Exists()}
        memory = [client.alloc(size) for size in sizes]
        with ns.match(keys) as found:
            assert found.chunks == len(sizes)
            assert found.pinned
            assert found.load_seconds_estimate > 0
            results = ns.get_into(keys, memory)
        assert [one.length_bytes for one in results] == sizes
        assert [bytes(one) for one in memory] == payloads
        again = ns.get_into(keys, memory, content_ids=[one.content_id for one in results])
        assert all(isinstance(one, Hit) for one in again)
        part = bytearray(9)
        assert isinstance(ns.get_into(keys[10:], [part], ranges=[(65_530, 8), (200_000, 1)])[0], Hit)
        assert part == payloads[10][65_530:65_538] + payloads[10][200_000:200_001]
        assert ns.contains(keys) == [True] * len(sizes)
        assert {type(one) for one in ns.wait(keys, 5)} == {Hit}
        assert [type(one) for one in ns.delete(keys[8:])] == [Hit] * 3
        assert ns.contains(keys) == [True] * 8 + [False] * 3
        with ns.writer(keys[10:], lengths=[300_000]) as writer:
            for at in range(0, 300_000, 70_000):
                writer.write(0, payloads[10][at : at + 70_000], offset=at)
            with ns.match(keys[10:]) as found:
                assert (found.pending, found.reason) == (1, MissReason.PENDING)
            assert isinstance(writer.commit()[0], Stored)
        whole = bytearray(300_000)
        assert isinstance(ns.get_into(keys[10:], [whole])[0], Hit)
        assert whole == payloads[10]
        assert ns.drop()
        assert ns.contains(keys) == [False] * len(sizes)
        results = ns.put(keys[:2], payloads[:2], durability="power")
        assert all(isinstance(one, Stored) for one in results)


def test_ranges_are_asked_for_in_as_many_requests_as_it_takes(served) -> None:
    keys_max = RANGES_PER_CALL_MAX // RANGES_PER_ITEM_MAX
    layout = KVLayout.opaque(chunk_bytes=2 * RANGES_PER_ITEM_MAX, chunk_tokens=1)
    with KVClient.connect(served.grpc) as client:
        ns = client.namespace(Namespace(tenant="default", model="ranges", weights="w", layout=layout))
        keys = ns.keys(range(keys_max + 2))
        payloads = [noise(2 * RANGES_PER_ITEM_MAX, at) for at in range(len(keys))]
        assert all(isinstance(one, Stored) for one in ns.put(keys, payloads))
        memory = [bytearray(RANGES_PER_ITEM_MAX) for _ in keys]
        results = ns.get_into(keys, memory, ranges=[(2 * at, 1) for at in range(RANGES_PER_ITEM_MAX)])
        assert {type(one) for one in results} == {Hit}
        assert memory == [payload[::2] for payload in payloads]


def test_shards_layers_and_parts(served) -> None:
    with KVClient.connect(served.grpc) as client:
        ns = client.namespace(TYPED)
        keys = ns.keys(TOKENS[:128])
        halves = [[noise(26_112, 10 * at + shard) for at in range(8)] for shard in (0, 1)]
        for shard in (0, 1):
            assert {type(one) for one in ns.put(keys, halves[shard], shards=shard)} == {Stored}
        assert {type(one) for one in ns.put([keys[3], keys[7]], [noise(6000, 3)] * 2, part="state")} == {Stored}
        swa = 2 * 6 * 16 * 32
        assert {type(one) for one in ns.put(keys[7:], [noise(swa, 5)], part="swa")} == {Stored}
        boundaries = []
        for tokens in (63, 64, 65, 80, 128):
            with ns.match(ns.keys(TOKENS[:tokens]), need=["kv", "state"]) as found:
                boundaries.append(found.boundary)
        assert boundaries == [0, 64, 64, 64, 128]
        with ns.match(keys, need=["state", "swa"]) as found:
            assert found.boundary == 128
        layers = bytearray(2 * 2 * (16 * 256 + 16 * 16))
        assert isinstance(ns.get_into(keys[5:6], [layers], layers=[1, 2])[0], Hit)
        expected = b"".join(
            halves[shard][5][base + low * size : base + (low + 2) * size]
            for shard in (0, 1)
            for base, low, size in ((0, 1, 4096), (6 * 4096, 1, 256))
        )
        assert layers == expected
        window = bytearray(swa)
        assert isinstance(ns.get_into(keys[7:], [window], part="swa")[0], Hit)
        assert window == noise(swa, 5)


def test_threads_of_one_client(served) -> None:
    namespace = Namespace(tenant="default", model="threads", weights="w", layout=OPAQUE.layout)
    with KVClient.connect(served.grpc) as client:
        ns = client.namespace(namespace)
        keys = ns.keys(TOKENS)
        wrong = []

        def work(seed: int) -> None:
            dice = random.Random(seed)
            for _ in range(20):
                at = dice.randrange(12)
                size = 1000 + 20_000 * at
                if dice.random() < 0.4:
                    results = ns.put(keys[at : at + 1], [noise(size, at)])
                    if isinstance(results[0], Refused):
                        wrong.append(results)
                memory = bytearray(size)
                (result,) = ns.get_into(keys[at : at + 1], [memory])
                if isinstance(result, Hit) and bytes(memory) != noise(size, at):
                    wrong.append(result)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_killed_and_started_again_on_the_same_ports(tmp_path) -> None:
    """A put and a get are in flight when the node is killed: both end with statuses, and the next ones work."""
    arguments = ["--capacity", "64MiB"]
    with ServeProcess(tmp_path, *arguments) as process:
        ready = process.wait_ready()
        ports = {
            "--grpc-port": ready.grpc.rpartition(":")[2],
            "--data-port": ready.data[0].rpartition(":")[2],
        }
        client = KVClient.connect(ready.grpc)
        ns = client.namespace(OPAQUE)
        keys = ns.keys(TOKENS)
        payloads = [noise(200_000, at) for at in range(12)]
        stored = [isinstance(one, Stored) for one in ns.put(keys[:6], payloads[:6])]
        assert all(stored)
        found = ns.match(keys)
        assert found.pinned
        outcomes: dict[str, list] = {"put": [], "get": []}
        stop = threading.Event()

        def load() -> None:
            while not stop.is_set():
                memory = [bytearray(200_000) for _ in range(6)]
                results = ns.get_into(keys[:6], memory, deadline=5)
                for result, got, payload in zip(results, memory, payloads, strict=False):
                    assert not isinstance(result, Hit) or bytes(got) == payload
                outcomes["get"].append({type(one) for one in results})

        def save() -> None:
            more = ns.keys([9] * 16 * 12)
            while not stop.is_set():
                outcomes["put"].append({type(one) for one in ns.put(more, payloads, deadline=5)})
                ns.delete(more, deadline=5)

        threads = [threading.Thread(target=load), threading.Thread(target=save)]
        for thread in threads:
            thread.start()
        while not (outcomes["put"] and outcomes["get"]):
            time.sleep(0.01)
        os.killpg(process.process.pid, signal.SIGKILL)
        process.process.wait()
    ready_path = tmp_path / "ready.json"
    ready_path.unlink(missing_ok=True)
    with ServeProcess(tmp_path, *arguments, *[piece for pair in ports.items() for piece in pair]) as process:
        process.wait_ready()
        began = time.monotonic()
        new = ns.keys([5] * 16)
        while not isinstance(ns.put(new, [b"new"])[0], Stored | Exists):
            assert time.monotonic() - began < 2, "the next put works within two seconds"
        stop.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert not found.pinned
        found.release()
        memory = [bytearray(200_000) for _ in range(6)]
        assert {type(one) for one in ns.get_into(keys[:6], memory)} == {Hit}
        assert [bytes(one) for one in memory] == payloads[:6]
        assert client.stats()["restarts_noticed"] >= 1
        client.close()


def test_a_full_batch_above_every_limit(served) -> None:
    """100,000 keys in one call: split for the node, answered in order."""
    with KVClient.connect(served.grpc) as client:
        ns = client.namespace(OPAQUE)
        keys = ns.keys_from_hashes([at.to_bytes(8, "little") for at in range(100_000)], algorithm="test")
        chosen = [3, 65_535, 65_536, 99_999]
        for at in chosen:
            (result,) = ns.put(keys[at : at + 1], [bytes([at % 251])])
            assert isinstance(result, Stored | Exists)
        found = ns.contains(keys)
        assert [at for at, one in enumerate(found) if one] == chosen
        memory = memoryview(bytearray(100_000))
        results = ns.get_into(keys, [memory[at : at + 1] for at in range(100_000)])
        assert [at for at, one in enumerate(results) if isinstance(one, Hit)] == chosen
        assert [memory[at] for at in chosen] == [at % 251 for at in chosen]


def test_an_item_that_is_too_long_does_not_hurt_the_others(served) -> None:
    with KVClient.connect(served.grpc) as client:
        ns = client.namespace(OPAQUE)
        keys = ns.keys([1] * 48)
        results = ns.put([keys[0], keys[1], keys[0], keys[2]], [b"a", b"b", b"a", bytes(300_001)])
        assert [type(one) for one in results] == [Stored, Stored, Exists, Refused]
        assert results[3].reason is RefusedReason.INVALID

"""Records for memory that no node can reach, from a node on this host: one copy more than into memory of `alloc`."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.limits import BOUNCE_BYTES_MAX, KiB, MiB
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.telemetry.registry import number
from kvstore.testing.metrics_page import metric, wait_for_metric
from kvstore.testing.serve_process import Ready, ServeProcess
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore_client import Hit, KVClient, Miss, Stored, shm_bounce
from kvstore_client.namespace_handle import BoundNamespace
from kvstore_client.placed_inflow import PlacedInflow
from kvstore_client.shm import SharedMemory
from kvstore_client.shm_bounce import Bounce
from kvstore_client.stats import Counters

SIZE = MiB
COUNT = 8
MOVED = "kvstore_shared_moved_bytes_total"


@pytest.fixture(scope="module", params=["drive", "cache"])
def cache(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(cache: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    size = "0" if cache == "drive" else "128MiB"
    with ServeProcess(tmp_path_factory.mktemp("node"), "--cache", size, "--capacity", "512MiB") as process:
        yield process.wait_ready()


@pytest.fixture
def client(served: Ready) -> Iterator[KVClient]:
    with KVClient.connect(served.grpc, transport="shm") as made:
        yield made


def namespace_of(client: KVClient, chunk_bytes: int = SIZE) -> BoundNamespace:
    layout = KVLayout.opaque(chunk_bytes=chunk_bytes, chunk_tokens=16)
    return client.namespace(Namespace(tenant="default", model=os.urandom(4).hex(), weights="w", layout=layout))


def stored(ns: BoundNamespace, size: int = SIZE, count: int = COUNT) -> list[bytes]:
    """What has been put under the first keys."""
    values = [random.Random(seed).randbytes(size) for seed in range(count)]
    assert all(isinstance(one, Stored) for one in ns.put(ns.keys(list(range(16 * count))), values))
    return values


def in_fragments(size: int) -> list[bytearray]:
    """Memory of one record in pieces of odd lengths, of which no page is whole."""
    return [bytearray(1000), bytearray(size // 2), bytearray(size - size // 2 - 1000)]


def moved(served: Ready) -> dict[str, float]:
    return {way: metric(served, f'{MOVED}{{way="{way}"}}') for way in ("from_drive", "copied_in", "copied_out")}


@pytest.mark.parametrize("kind", ["plain", "fragments"])
def test_each_byte_is_copied_once_by_the_client(served: Ready, client: KVClient, cache: str, kind: str) -> None:
    ns = namespace_of(client)
    values = stored(ns)
    keys = ns.keys(list(range(16 * COUNT)))
    before, copied = moved(served), client.stats()["copied_bytes"]
    for turn in range(3):
        into = [bytearray(SIZE) if kind == "plain" else in_fragments(SIZE) for _ in range(COUNT)]
        assert all(isinstance(one, Hit) for one in ns.get_into(keys, into))
        assert [bytes(one) if isinstance(one, bytearray) else b"".join(one) for one in into] == values
        assert client.stats()["copied_bytes"] - copied == (turn + 1) * COUNT * SIZE
    # and by the node where the record lies in its memory; else the drive has put it where the client copies it from
    mover = "from_drive" if cache == "drive" else "copied_in"
    expected = before | {mover: before[mover] + 3 * COUNT * SIZE}
    wait_for_metric(served, f'{MOVED}{{way="{mover}"}}', expected[mover])
    assert moved(served) == expected


def test_memory_of_alloc_is_not_copied_by_the_client(client: KVClient) -> None:
    ns = namespace_of(client)
    values = stored(ns)
    memory = client.alloc(COUNT * SIZE)
    into = [memory[at * SIZE : (at + 1) * SIZE] for at in range(COUNT)]
    assert all(isinstance(one, Hit) for one in ns.get_into(ns.keys(list(range(16 * COUNT))), into))
    assert [bytes(one) for one in into] == values
    assert client.stats()["copied_bytes"] == 0


def test_a_batch_longer_than_that_memory_comes_in_parts(client: KVClient) -> None:
    count = BOUNCE_BYTES_MAX // (4 * MiB) + 3
    ns = namespace_of(client, 4 * MiB)
    values = stored(ns, 4 * MiB, count)
    into = [bytearray(4 * MiB) for _ in range(count)]
    assert all(isinstance(one, Hit) for one in ns.get_into(ns.keys(list(range(16 * count))), into))
    assert all(one == value for one, value in zip(into, values, strict=True))


def test_other_lengths_misses_and_small_records_are_what_they_are_over_tcp(client: KVClient) -> None:
    ns = namespace_of(client, 2 * MiB)
    keys = ns.keys(list(range(16 * 6)))
    values = [random.Random(seed).randbytes(size) for seed, size in enumerate((2 * MiB, 1, 2 * MiB - 4097, 64 * KiB))]
    assert all(isinstance(one, Stored) for one in ns.put(keys[:4], values))
    shared = client.alloc(2 * MiB)
    into = [bytearray(2 * MiB), bytearray(2 * MiB), shared, bytearray(2 * MiB), bytearray(2 * MiB), bytearray(100)]
    found = ns.get_into(keys, into)
    assert [one.length_bytes if isinstance(one, Hit) else one.reason.name for one in found] == [
        2 * MiB, 1, 2 * MiB - 4097, 64 * KiB, "ABSENT", "ABSENT"
    ]  # fmt: skip
    assert [bytes(one[: len(value)]) for one, value in zip(into, values, strict=False)] == values
    short = ns.get_into(keys[:2], [bytearray(MiB), bytearray(2 * MiB)])
    assert isinstance(short[0], Miss)
    assert short[0].reason.name == "LAYOUT"
    assert isinstance(short[1], Hit)


def test_small_records_in_one_piece_come_through_the_socket_whichever_way_they_are_read(client: KVClient) -> None:
    size, count = 64 * KiB, 32
    ns = namespace_of(client, SIZE)
    values = stored(ns, size, count)
    keys = ns.keys(list(range(16 * count)))
    for accept_pending in (False, True):  # the general way
        into = [bytearray(size) for _ in range(count)]
        assert all(isinstance(one, Hit) for one in ns.get_into(keys, into, accept_pending=accept_pending))
        assert into == values
    assert client.stats()["copied_bytes"] == 0


def test_an_empty_record_among_them_needs_no_place(client: KVClient) -> None:
    ns = namespace_of(client)
    keys = ns.keys(list(range(16 * 4)))
    values = [b"", os.urandom(SIZE), b"", os.urandom(SIZE)]
    assert all(isinstance(one, Stored) for one in ns.put(keys, values))
    into = [bytearray(len(one)) for one in values]
    assert all(isinstance(one, Hit) for one in ns.get_into(keys, into))
    assert into == values
    assert client.stats()["copied_bytes"] == 2 * SIZE


def test_status_tells_who_goes_by_shared_memory_and_what_has(served: Ready, client: KVClient) -> None:
    ns = namespace_of(client)
    stored(ns, count=2)
    with KVClient.connect(served.grpc, transport="tcp") as other:
        stored(namespace_of(other), count=1)
        wait_for_metric(served, "kvstore_connections_shared", 1)
        with ControlClient(served.grpc) as control:
            report = control.report()
        assert number(report.numbers, "dataplane", "shared_connections") == 1
        assert number(report.numbers, "dataplane", "connections") > 1


def test_a_node_that_is_killed_in_such_a_read_leaves_nothing_that_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs when the first records have come, and is killed while the client waits for the others."""
    count = 4 * COUNT
    with ServeProcess(tmp_path, "--cache", "0", "--capacity", "256MiB") as process:
        ready = process.wait_ready()
        with ControlClient(ready.grpc) as control:
            (worker,) = control.report().workers
        with KVClient.connect(ready.grpc, transport="shm", deadline=30) as client:
            ns = namespace_of(client)
            values = stored(ns, count=count)
            keys = ns.keys(list(range(16 * count)))
            assert all(isinstance(one, Hit) for one in ns.get_into(keys, [bytearray(SIZE) for _ in range(count)]))
            take, taken = PlacedInflow._take, []

            def take_and_stop(inflow: PlacedInflow, *args: int, is_final: bool) -> bool:
                if not taken:
                    os.kill(worker.pid, signal.SIGSTOP)
                    threading.Timer(0.2, os.kill, (worker.pid, signal.SIGKILL)).start()
                taken.append(is_final)
                return take(inflow, *args, is_final=is_final)

            monkeypatch.setattr(PlacedInflow, "_take", take_and_stop)
            into = [bytearray(SIZE) for _ in range(count)]
            found = ns.get_into(keys, into, deadline=2)
            monkeypatch.undo()
            seen = [bytes(one) for one in into]
            assert taken, "the answer had begun"
            for one, value, memory in zip(found, values, seen, strict=True):
                assert isinstance(one, Miss) or memory == value
            process.wait_ready()
            again = [bytearray(SIZE) for _ in range(count)]
            until_s = time.monotonic() + 60
            while not all(isinstance(one, Hit) for one in ns.get_into(keys, again, deadline=10)):
                assert time.monotonic() < until_s, "it serves again"
            assert again == values
            assert [bytes(one) for one in into] == seen, "nobody writes there after the return"


def test_memory_of_all_connections_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_bounce, "BOUNCE_BYTES_ALL_MAX", 6 * MiB)
    memory, counters = SharedMemory(), Counters()
    one, other = Bounce(memory, counters), Bounce(memory, counters)
    assert len(one.cut([MiB] * 2)) == 2
    assert len(other.cut([MiB] * 4)) == 4
    del other
    assert len(one.cut([MiB] * 6)) == 6, "what it had does not count beside what takes its place"
    third = Bounce(memory, counters)
    assert third.cut([MiB]) == [], "then it goes through the socket"
    one.forget()
    assert len(third.cut([MiB])) == 1

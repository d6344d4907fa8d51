"""Reads into shared memory the short ways: one record by its lane, several straight; and what else an answer may be."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from kvstore.limits import KiB, MiB
from kvstore.testing.serve_process import Ready, ServeProcess
from kvstore.types.checksum import crc_table
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason
from kvstore.wire.expected import whole_records
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.slices import FLAG_FINAL, Slice, encode_slices
from kvstore_client import Hit, KVClient, Miss, Stored, placed_inflow, placed_lane, read_verbs
from kvstore_client.namespace_handle import BoundNamespace
from kvstore_client.placed_inflow import PlacedInflow

COUNT = 8


@pytest.fixture(scope="module", params=["drive", "cache"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    cache = "0" if request.param == "drive" else "64MiB"
    with ServeProcess(tmp_path_factory.mktemp("node"), "--cache", cache, "--capacity", "256MiB") as process:
        yield process.wait_ready()


@pytest.fixture
def client(served: Ready) -> Iterator[KVClient]:
    with KVClient.connect(served.grpc, transport="shm") as made:
        yield made


class Shelf:
    """Records of one length in a node, and memory for them that is shared, and known to the node."""

    def __init__(self, client: KVClient, size: int) -> None:
        self.size = size
        layout = KVLayout.opaque(chunk_bytes=size, chunk_tokens=16)
        name = Namespace(tenant="default", model=f"lane {os.urandom(4).hex()}", weights="w", layout=layout)
        self.ns: BoundNamespace = client.namespace(name)
        self.keys = self.ns.keys(list(range(16 * COUNT)))
        self.memory = client.alloc(COUNT * size)
        self.memory[:] = self.expected = random.Random(size).randbytes(COUNT * size)
        self.buffers = [self.memory[at : at + size] for at in range(0, COUNT * size, size)]
        assert all(isinstance(one, Stored) for one in self.ns.put(self.keys, self.buffers))
        assert all(isinstance(one, Hit) for one in self.ns.get_into(self.keys, self.buffers))

    def clear(self) -> None:
        self.memory[:] = bytes(len(self.memory))

    def value(self, at: int) -> bytes:
        return self.expected[at * self.size : (at + 1) * self.size]


@pytest.fixture
def general_way(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What went the general way."""
    asked: list[object] = []

    def load(*args: object, **more: object) -> object:
        asked.append(more["begun"])
        return GENERAL(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(read_verbs, "load", load)
    return asked


GENERAL = read_verbs.load


@pytest.mark.parametrize("size", [16 * KiB, 64 * KiB, MiB])
def test_hits_take_the_short_ways(client: KVClient, size: int, general_way: list[object]) -> None:
    shelf = Shelf(client, size)
    general_way.clear()
    before = client.stats()
    for at in range(COUNT):
        shelf.clear()
        (found,) = shelf.ns.get_into(shelf.keys[at : at + 1], shelf.buffers[at : at + 1])
        assert isinstance(found, Hit)
        assert shelf.buffers[at] == shelf.value(at)
        assert bytes(shelf.memory).count(0) >= (COUNT - 1) * size, "nothing but the record's place is written"
    for _ in range(3):
        shelf.clear()
        assert all(isinstance(one, Hit) for one in shelf.ns.get_into(shelf.keys, shelf.buffers))
        assert shelf.memory == shelf.expected
    assert general_way == []
    after = client.stats()
    assert after["load_hits"] - before["load_hits"] == 4 * COUNT
    assert after["load_bytes"] - before["load_bytes"] == 4 * COUNT * size


@pytest.mark.parametrize("count", [1, COUNT])
def test_a_record_that_is_not_there_is_a_miss_and_costs_no_second_request(
    client: KVClient, count: int, general_way: list[object]
) -> None:
    shelf = Shelf(client, 64 * KiB)
    shelf.ns.delete(shelf.keys[count - 1 : count])
    general_way.clear()
    *hits, last = shelf.ns.get_into(shelf.keys[:count], shelf.buffers[:count])
    assert last == Miss(MissReason.ABSENT)
    assert all(isinstance(one, Hit) for one in hits)
    assert len(general_way) == 1
    assert general_way[0] is not None, "it went on with the answer to the first request"
    again = shelf.ns.get_into(shelf.keys[:count], shelf.buffers[:count])
    assert [type(one) for one in again] == [Hit] * (count - 1) + [Miss], "the connection lives"
    assert client.stats()["connections_broken"] == 0


def test_a_record_of_another_length_than_its_place_is_a_miss(client: KVClient) -> None:
    shelf = Shelf(client, 64 * KiB)
    for length in (32 * KiB, 128 * KiB):
        memory = client.alloc(2 * length)
        for _ in range(2):
            memory[:] = bytes(len(memory))
            got = shelf.ns.get_into(shelf.keys[:1], [memory[:length]])
            if length < shelf.size:
                assert got == [Miss(MissReason.LAYOUT)]
            else:
                assert isinstance(got[0], Hit)
                assert got[0].length_bytes == shelf.size
                assert memory[: shelf.size] == shelf.value(0)
            assert not any(memory[length:])


@pytest.mark.parametrize("count", [1, COUNT])
def test_bytes_that_are_not_right_are_asked_for_again_on_a_fresh_connection(
    client: KVClient, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(client, 64 * KiB)
    module, name = (placed_lane, "crcs_match") if count == 1 else (placed_inflow, "crcs_match_far")
    check, judged = getattr(module, name), []

    def garbled_once(view: memoryview, block_bytes: int, crcs: bytes) -> bool:
        if not judged:
            view[7:8] = bytes([view[7] ^ 1])  # as a stray write would
        judged.append(check(view, block_bytes, crcs))
        return judged[-1]

    monkeypatch.setattr(module, name, garbled_once)
    opened = client.stats()["connections_opened"]
    assert all(isinstance(one, Hit) for one in shelf.ns.get_into(shelf.keys[:count], shelf.buffers[:count]))
    assert judged[0] is False
    assert b"".join(shelf.buffers[:count]) == shelf.expected[: count * shelf.size]
    stats = client.stats()
    assert stats["connections_opened"] == opened + 1
    assert stats["corrupt_blocks"] == stats["corrupt_recovered"] == 1


def processes_below(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += processes_below(int(child))
    return found


@pytest.mark.parametrize("count", [1, COUNT])
def test_what_a_node_writes_after_the_deadline_is_not_seen(served: Ready, client: KVClient, count: int) -> None:
    """It is frozen while it has the request, and answers when we have returned."""
    shelf = Shelf(client, 64 * KiB)
    frozen = processes_below(served.pid)
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        results = shelf.ns.get_into(shelf.keys[:count], shelf.buffers[:count], deadline=0.2)
        assert all(isinstance(one, Miss) for one in results)
        shelf.memory[:] = b"mine" * (len(shelf.memory) // 4)
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    assert all(shelf.ns.contains(shelf.keys)), "it goes on: it has seen the request by then"
    assert shelf.memory == b"mine" * (len(shelf.memory) // 4)
    assert all(isinstance(one, Hit) for one in shelf.ns.get_into(shelf.keys, shelf.buffers)), "pages are shared again"
    assert shelf.memory == shelf.expected


def test_threads_share_the_lane(client: KVClient) -> None:
    shelf, wrong = Shelf(client, 64 * KiB), []

    def read(at: int) -> None:
        for _ in range(40):
            shelf.buffers[at][:8] = bytes(8)
            (found,) = shelf.ns.get_into(shelf.keys[at : at + 1], shelf.buffers[at : at + 1])
            if not isinstance(found, Hit) or shelf.buffers[at] != shelf.value(at):
                wrong.append((at, found))

    threads = [threading.Thread(target=read, args=(at,)) for at in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert wrong == []


# --- the frames of a straight read ----------------------------------------------------------------------------------
SIZE, BLOCK = 1024, 256


class Wire:
    """Stands for a connection: only what the inflow asks of it."""

    def __init__(self, sent: bytes, step: int) -> None:
        self.near, self.far = socket.socketpair()
        self.far.sendall(sent)
        self.far.close()
        self.step = step

    def receive_into(self, buffers: tuple[memoryview, ...], _: int) -> int:
        count = self.near.recv_into(buffers[0][: self.step])
        if not count:
            raise Unavailable("the end")
        return count


MEMORY = bytearray(random.Random(3).randbytes(4 * SIZE))
VIEWS = [memoryview(MEMORY)[at : at + SIZE] for at in range(0, 4 * SIZE, SIZE)]


def one_of(item: int, **changes: object) -> Slice:
    table = crc_table(VIEWS[item % 4], BLOCK)
    return Slice(item, 0, SIZE, 0, True, bytes([item]) * 16, SIZE, BLOCK, table)._replace(**changes)  # type: ignore[arg-type]


def placed(*slices: Slice, is_final: bool = False, request_id: int = 5) -> bytes:
    flags = len(slices) | (FLAG_FINAL if is_final else 0)
    return encode_head(FrameType.PLACED, request_id, encode_slices(slices), epoch=9, flags=flags)


def inflow_of(sent: bytes, step: int = 10_000) -> PlacedInflow:
    return PlacedInflow(Wire(sent, step), whole_records(SIZE, BLOCK), VIEWS, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [1, 7, 31, 100, 10_000])
def test_frames_in_any_order_grouping_and_drops(step: int) -> None:
    inflow = inflow_of(placed(one_of(2)) + placed(one_of(3), one_of(0)) + placed(one_of(1), is_final=True), step)
    assert inflow.receive() is None
    assert inflow.done == {item: bytes([item]) * 16 for item in range(4)}
    assert inflow.epoch == 9


@pytest.mark.parametrize(
    "bad",
    [
        placed(one_of(1), request_id=6),
        placed(one_of(0)),  # twice
        placed(one_of(1), one_of(1)),
        placed(one_of(4)),
        placed(one_of(1), is_final=True),  # before all are there
        placed(one_of(1, length_bytes=0, status=1, crcs=b"")),
        placed(one_of(1, last=False)),
        placed(one_of(1, record_bytes=SIZE + 1)),
        placed(one_of(1, block_bytes=512, crcs=bytes(8))),
        placed(one_of(1, crcs=bytes(16))),  # the bytes that lie there are others
        encode_head(FrameType.END, 5, b""),
        encode_head(FrameType.DATA, 5, encode_slices([one_of(1)]), payload_bytes=SIZE, flags=1),
    ],
)
def test_it_stops_at_what_it_does_not_expect_with_all_of_its_bytes(bad: bytes) -> None:
    inflow = inflow_of(placed(one_of(0)) + bad)
    rest = inflow.receive()
    assert rest == bad
    assert inflow.done == {0: bytes(16)}


def test_a_frame_changed_on_the_way_is_never_believed() -> None:
    sent = placed(*map(one_of, range(4)), is_final=True)
    for at in range(len(sent)):
        changed = sent[:at] + bytes([sent[at] ^ 8]) + sent[at + 1 :]
        rest = inflow_of(changed).receive()
        assert rest == changed[: len(rest or b"")], at
        assert rest, at


def test_a_frame_longer_than_the_memory_for_it() -> None:
    count = 200
    memory = [VIEWS[item % 4] for item in range(count)]
    slices = [one_of(item) for item in range(count)]
    wire = Wire(placed(*slices[:150]) + placed(*slices[150:], is_final=True), 5000)
    inflow = PlacedInflow(wire, whole_records(SIZE, BLOCK), memory, 5)  # type: ignore[arg-type]
    assert inflow.receive() is None
    assert len(inflow.done) == count

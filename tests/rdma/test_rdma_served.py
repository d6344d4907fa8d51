"""A served node and a whole client, on scripted RDMA devices: bytes, fallbacks, pairs, memory, and a fork."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore.errors import Unavailable
from kvstore.limits import PAIR_PROBE_BYTES, REGIONS_PER_CONNECTION_MAX, KiB, MiB
from kvstore.testing.fake_verbs import _Request
from kvstore.testing.rdma_town import Town
from kvstore.transport.rdma.verbs import PortState, Work
from kvstore.types.keys import KeyChain
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore_client import Hit, KVClient, Miss, Stored
from kvstore_client.aio import AsyncKVClient
from kvstore_client.namespace_handle import BoundNamespace
from kvstore_client.rdma import RdmaPort, RdmaPorts

CHUNK = 256 * KiB
COUNT = 16


@pytest.fixture(params=["cached", "from the drive"])
def town(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Town]:
    made = Town(tmp_path, cache_bytes=32 * MiB if request.param == "cached" else 0)
    yield made
    made.close()


@pytest.fixture
def cached_town(tmp_path: Path) -> Iterator[Town]:
    made = Town(tmp_path)
    yield made
    made.close()


def connect(town: Town, transport: str = "rdma") -> KVClient:
    client = KVClient.connect(town.address, lazy=True, transport=transport)
    client.session().core.rdma.open_with(lambda host: RdmaPort(town.client_rail(), "client0:1"))
    return client


def namespace_of(client: KVClient, chunk_bytes: int = CHUNK) -> BoundNamespace:
    layout = KVLayout.opaque(chunk_bytes=chunk_bytes, chunk_tokens=16)
    return client.namespace(Namespace(tenant="default", model=os.urandom(4).hex(), weights="w", layout=layout))


def noise(length: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(length)


def filled(ns: BoundNamespace, count: int, size: int = CHUNK) -> list[bytes]:
    values = [noise(size, seed) for seed in range(count)]
    outcomes = ns.put(ns.keys(list(range(16 * count))), values)
    assert all(isinstance(one, Stored) for one in outcomes), outcomes
    return values


def read_into(ns: BoundNamespace, keys: KeyChain, memory: np.ndarray) -> None:
    outcomes = ns.get_into(keys, list(memory))
    assert all(isinstance(one, Hit) for one in outcomes), outcomes


@pytest.mark.parametrize("size", [64 * KiB + 1, CHUNK, 3 * MiB])
def test_payload_goes_one_sided_both_ways(town: Town, size: int) -> None:
    count = 4 if size > MiB else COUNT
    with connect(town) as client:
        ns = namespace_of(client, size)
        values = filled(ns, count, size)
        assert town.metrics.pulled_bytes == count * size
        memory = np.zeros(count * size, np.uint8)
        buffers = [memory[at : at + size] for at in range(0, len(memory), size)]
        keys = ns.keys(list(range(16 * count)))
        assert [one.length_bytes for one in ns.get_into(keys, buffers) if isinstance(one, Hit)] == [size] * count
        assert memory.tobytes() == b"".join(values)
        assert town.metrics.placed_bytes == count * size
        assert town.metrics.fallback_bytes == 0
        assert client.transports()["t0"] == "rdma client0:1"
        assert town.on_node(lambda: town.service.pairs.opened) == 2, "one lane for reads, one for writes"


def test_small_records_and_odd_memory_arrive_as_well(town: Town) -> None:
    with connect(town) as client:
        ns = namespace_of(client)
        values = filled(ns, 6)
        keys = ns.keys(list(range(16 * 6)))
        area = mmap.mmap(-1, CHUNK)
        fragments = [bytearray(1000), bytearray(5), bytearray(0), bytearray(CHUNK - 1005)]
        own = bytearray(CHUNK)
        pinned = np.zeros(CHUNK, np.uint8)
        address = (int(pinned.ctypes.data), CHUNK)
        into = [area, fragments, own, address, memoryview(bytearray(CHUNK + 7))[3:-4], np.zeros((256, 1024), np.uint8)]
        assert all(isinstance(one, Hit) for one in ns.get_into(keys, into))
        found = [bytes(area), b"".join(fragments), bytes(own), pinned.tobytes(), bytes(into[4]), into[5].tobytes()]
        assert found == values
        assert town.metrics.placed_bytes == 6 * CHUNK
        small = namespace_of(client, 4096)
        [value] = filled(small, 1, 4096)
        one = bytearray(4096)
        assert isinstance(small.get_into(small.keys(list(range(16))), [one])[0], Hit)
        assert one == value


def test_tensors_are_used_in_place_by_address_and_length(town: Town) -> None:
    """Pinned or not: torch says where a tensor lies and how long it is, and the client needs no torch."""
    with connect(town) as client:
        ns = namespace_of(client)
        values = filled(ns, 4)
        keys = ns.keys(list(range(16 * 4)))
        tensor = torch.zeros((4, CHUNK // 2), dtype=torch.bfloat16)
        rows = [(row.data_ptr(), row.numel() * row.element_size()) for row in tensor]
        assert all(isinstance(one, Hit) for one in ns.get_into(keys, rows))
        assert tensor.view(torch.uint8).numpy().tobytes() == b"".join(values)
        assert town.metrics.placed_bytes == 4 * CHUNK
        [port] = client.session().core.rdma._open_ports()
        assert port.cache.registered_bytes == 0, "nobody tells when it is freed: not a call longer"
        other = client.namespace(Namespace(tenant="default", model="t", weights="w", layout=ns.layout))
        keys = other.keys(list(range(16 * 4)))
        assert all(isinstance(one, Stored) for one in other.put(keys, rows))
        pulled = town.metrics.pulled_bytes
        assert pulled == 8 * CHUNK
        view = tensor.view(torch.uint8).numpy()  # has an owner that can be watched
        view[:] = 0
        assert all(isinstance(one, Hit) for one in other.get_into(keys, list(view)))
        assert view.tobytes() == b"".join(values)


def test_the_node_registers_its_memory_at_the_start_and_never_in_a_call(town: Town) -> None:
    before = {key for key, region in town.fabric.regions.items() if region.device.name == "node0"}
    registered = sum(region.length_bytes for key, region in town.fabric.regions.items() if key in before)
    assert registered >= town.engine.cache.arena.size_bytes
    with connect(town) as client:
        ns = namespace_of(client)
        filled(ns, COUNT)
        memory = np.zeros((COUNT, CHUNK), np.uint8)
        read_into(ns, ns.keys(list(range(16 * COUNT))), memory)
        after = {key for key, region in town.fabric.regions.items() if region.device.name == "node0"}
        assert after == before, "the probe's was let go of as well"


@pytest.mark.parametrize(("node_mtu", "client_mtu"), [(4096, 1024), (512, 4096)])
def test_the_path_mtu_is_the_lesser_and_is_shown(cached_town: Town, node_mtu: int, client_mtu: int) -> None:
    town = cached_town
    town.node.mtu_bytes, town.client.mtu_bytes = node_mtu, client_mtu
    with connect(town) as client:
        filled(namespace_of(client), 2)
        assert {pair.path.mtu_bytes for pair in town.fabric.pairs.values() if pair.path} == {min(node_mtu, client_mtu)}
        town.on_node(lambda: town.service.sweep(0))
        assert town.metrics.mtu_bytes == min(node_mtu, client_mtu)


def test_both_ends_mark_what_they_send_as_the_most_urgent_class_of_the_lane(cached_town: Town) -> None:
    town = cached_town
    with connect(town) as client:
        ns = namespace_of(client)
        filled(ns, 2)  # a put: the background lane
        marks = {(pair.path.traffic_class, pair.path.service_level) for pair in town.fabric.pairs.values() if pair.path}
        assert marks == {(18 << 2 | 2, 2)}
        read_into(ns, ns.keys(list(range(32))), np.zeros((2, CHUNK), np.uint8))
        marks = {(pair.path.traffic_class, pair.path.service_level) for pair in town.fabric.pairs.values() if pair.path}
        assert marks == {(18 << 2 | 2, 2), (26 << 2 | 2, 3)}
        assert len(town.fabric.pairs) == 4, "two lanes, two ends"


def test_a_writer_that_is_given_up_never_reaches_memory_that_others_got(cached_town: Town) -> None:
    """The put's landings go to somebody else only once no READ can end there any more."""
    town = cached_town
    with connect(town) as client:
        ns = namespace_of(client)
        values = filled(ns, COUNT)
        late = namespace_of(client)
        theirs = np.full((COUNT, CHUNK), 0xEE, np.uint8)
        town.fabric.hold()
        outcomes = late.put(late.keys(list(range(16 * COUNT))), list(theirs), deadline=0.3)
        assert not any(isinstance(one, Stored) for one in outcomes)
        town.fabric.release()
        with connect(town) as other:
            again = other.namespace(late.namespace)
            keys = again.keys(list(range(16 * COUNT)))
            assert all(isinstance(one, Stored) for one in again.put(keys, values))
            memory = np.zeros((COUNT, CHUNK), np.uint8)
            read_into(again, keys, memory)
            assert memory.tobytes() == b"".join(values)
            read_into(ns, ns.keys(list(range(16 * COUNT))), memory)
            assert memory.tobytes() == b"".join(values)


def test_misses_and_records_of_other_lengths_are_told(town: Town) -> None:
    with connect(town) as client:
        ns = namespace_of(client)
        keys = ns.keys(list(range(16 * 4)))
        assert all(isinstance(one, Stored) for one in ns.put(keys[:2], [noise(CHUNK, 1), noise(1000, 2)]))
        memory = np.zeros((4, CHUNK), np.uint8)
        outcomes = ns.get_into(keys, [memory[0, : CHUNK - 1], memory[1], memory[2], memory[3]])
        assert [type(one) for one in outcomes] == [Miss, Hit, Miss, Miss]
        assert memory[1, :1000].tobytes() == noise(1000, 2)
        assert not memory[0].any(), "it has no room, and was not written"


def test_memory_is_registered_once_and_let_go_with_its_owner(cached_town: Town) -> None:
    town = cached_town
    with connect(town) as client:
        ns = namespace_of(client)
        filled(ns, COUNT)
        keys = ns.keys(list(range(16 * COUNT)))
        memory = np.zeros((COUNT, CHUNK), np.uint8)
        for _ in range(5):
            read_into(ns, keys, memory)
        [port] = client.session().core.rdma._open_ports()
        assert port.cache.registered_bytes == COUNT * CHUNK
        del memory
        assert port.cache.registered_bytes == 0


def test_a_port_that_goes_down_costs_speed_and_comes_back(cached_town: Town) -> None:
    town = cached_town
    with connect(town) as client:
        ns = namespace_of(client)
        values = filled(ns, COUNT)
        keys = ns.keys(list(range(16 * COUNT)))
        memory = np.zeros((COUNT, CHUNK), np.uint8)
        read_into(ns, keys, memory)
        placed = town.metrics.placed_bytes
        town.client.state = PortState.DOWN
        memory[:] = 0
        read_into(ns, keys, memory)
        assert memory.tobytes() == b"".join(values)
        assert town.metrics.placed_bytes == placed
        assert town.metrics.fallback_bytes == COUNT * CHUNK
        lanes = client.session().core.rdma.port_for("127.0.0.1").lanes
        assert not any(lane.is_ready for lane in lanes if lane.end.link.breaks), "our end went before the bytes came"
        town.client.state = PortState.ACTIVE
        while town.metrics.placed_bytes == placed:  # the pause after a break is a tenth of a second
            memory[:] = 0
            read_into(ns, keys, memory)
            assert memory.tobytes() == b"".join(values)


def test_a_wrong_key_is_told_anew_and_no_byte_is_wrong(cached_town: Town) -> None:
    town = cached_town
    with connect(town) as client:
        ns = namespace_of(client)
        values = filled(ns, COUNT)
        keys = ns.keys(list(range(16 * COUNT)))
        memory = np.zeros((COUNT, CHUNK), np.uint8)
        read_into(ns, keys, memory)
        for region in list(town.fabric.regions.values()):
            if region.device.name == "client0" and region.length_bytes == memory.nbytes:
                region.close()  # deregistered early: the node's key is wrong from now on
        memory[:] = 0
        read_into(ns, keys, memory)
        assert memory.tobytes() == b"".join(values)
        assert town.metrics.fallback_bytes > 0
        other = np.zeros((COUNT, CHUNK), np.uint8)
        placed = town.metrics.placed_bytes
        assert all(isinstance(one, Hit) for one in ns.get_into(keys, list(other)))
        assert other.tobytes() == b"".join(values)
        assert town.metrics.placed_bytes == placed + other.nbytes, "the next pair was made at once"


def test_a_call_that_is_given_up_leaves_memory_quiet(cached_town: Town) -> None:
    town = cached_town
    with connect(town) as client:
        ns = namespace_of(client)
        filled(ns, COUNT)
        keys = ns.keys(list(range(16 * COUNT)))
        memory = np.zeros((COUNT, CHUNK), np.uint8)
        read_into(ns, keys, memory)
        memory[:] = 0
        town.fabric.hold()
        outcomes = ns.get_into(keys, list(memory), deadline=0.2)
        assert all(isinstance(one, Miss) for one in outcomes)
        before = memory.tobytes()
        town.fabric.release()
        town.on_node(lambda: None)
        assert memory.tobytes() == before == bytes(len(before))
        read_into(ns, keys, memory)


def test_memory_that_cannot_be_registered_goes_in_frames(cached_town: Town) -> None:
    town = cached_town
    with connect(town) as client:
        ns = namespace_of(client)
        values = filled(ns, COUNT)
        town.client.limits = replace(town.client.limits, regions_max=0)
        memory = np.zeros((COUNT, CHUNK), np.uint8)
        outcomes = ns.get_into(ns.keys(list(range(16 * COUNT))), list(memory))
        assert all(isinstance(one, Hit) for one in outcomes)
        assert memory.tobytes() == b"".join(values)
        assert town.metrics.placed_bytes == 0
        assert "ulimit -l" in client.transports()["t0"]


def test_a_client_without_a_port_falls_back_once_with_auto_and_fails_with_rdma(cached_town: Town) -> None:
    town = cached_town

    def refuse(host: str) -> RdmaPort:
        raise Unavailable("no RDMA device here")

    with connect(town, "auto") as client:
        client.session().core.rdma.open_with(refuse)
        ns = namespace_of(client)
        filled(ns, 2)
        assert "no RDMA device here" in client.transports()["t0"]
        assert client.transports()["t0"].startswith("tcp")
        assert client.stats()["rdma_fallbacks"] == 1
    with connect(town, "rdma") as client:
        client.session().core.rdma.open_with(refuse)
        assert client.transports() == {}, "nothing has been agreed on yet"
        ns = namespace_of(client)
        [outcome] = ns.put(ns.keys(list(range(16))), [noise(CHUNK, 1)])
        assert "no RDMA device here" in outcome.detail
        assert client.transports() == {"t0": "none: transport rdma cannot be used: no RDMA device here"}
        with pytest.raises(Unavailable, match="no RDMA device here"):
            client.check_ways()


def test_two_threads_share_the_pairs_of_their_process(cached_town: Town) -> None:
    town = cached_town
    with connect(town) as client:
        ns = namespace_of(client)
        values = filled(ns, COUNT)
        keys = ns.keys(list(range(16 * COUNT)))

        def read(_: int) -> bool:
            memory = np.zeros((COUNT, CHUNK), np.uint8)
            outcomes = ns.get_into(keys, list(memory))
            return all(isinstance(one, Hit) for one in outcomes) and memory.tobytes() == b"".join(values)

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, range(24)))
        assert town.on_node(lambda: town.service.pairs.opened) <= 3


def test_a_forked_child_leaves_the_parents_memory_registered(cached_town: Town) -> None:
    town = cached_town
    with connect(town) as client:
        ns = namespace_of(client)
        filled(ns, 2)
        memory = np.zeros((2, CHUNK), np.uint8)
        keys = ns.keys(list(range(32)))
        read_into(ns, keys, memory)
        regions, pairs = set(town.fabric.regions), set(town.fabric.pairs)
        child = os.fork()
        if not child:
            status = 1
            try:
                client.session()  # its own; the parent's is let go of
                del memory
                client.close()
                status = 0 if set(town.fabric.regions) == regions and set(town.fabric.pairs) == pairs else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        read_into(ns, keys, memory)


def test_a_restart_of_rdma_is_noticed_and_pairs_are_made_anew(cached_town: Town) -> None:
    town = cached_town
    with connect(town) as client:
        ns = namespace_of(client)
        values = filled(ns, COUNT)
        keys = ns.keys(list(range(16 * COUNT)))
        memory = np.zeros((COUNT, CHUNK), np.uint8)
        read_into(ns, keys, memory)
        town.on_node(lambda: town.service.pairs.close())  # as its sweep of idle ones
        memory[:] = 0
        read_into(ns, keys, memory)
        placed = town.metrics.placed_bytes
        read_into(ns, keys, memory)
        assert town.metrics.placed_bytes == placed + memory.nbytes
        assert memory.tobytes() == b"".join(values)
        ports: RdmaPorts = client.session().core.rdma
        for port in ports._open_ports():
            port.close_idle(10**30)
            assert not any(lane.is_ready for lane in port.lanes)
        read_into(ns, keys, memory)


def test_the_worker_copies_no_payload(town: Town) -> None:
    """Every byte is moved once, by the device, between the client's memory and what the drive or the cache has."""
    posted: list[tuple[Work, int, int]] = []
    submit = town.fabric.submit

    def record(request: _Request) -> None:
        if request.pair.device.name == "node0":
            posted.extend((request.kind, piece[0], piece[1]) for piece in request.pieces)
        submit(request)

    town.fabric.submit = record  # type: ignore[method-assign]
    with connect(town) as client:
        ns = namespace_of(client)
        values = filled(ns, COUNT)
        memory = np.zeros((COUNT, CHUNK), np.uint8)
        sent = town.on_node(lambda: sum(one.channel.writer.sent_bytes for one in town.lab.plane._connections))
        read_into(ns, ns.keys(list(range(16 * COUNT))), memory)
        framed = town.on_node(lambda: sum(one.channel.writer.sent_bytes for one in town.lab.plane._connections)) - sent
        assert memory.tobytes() == b"".join(values)
    large = [(kind, address, length) for kind, address, length in posted if length > PAIR_PROBE_BYTES]
    for kind in (Work.READ, Work.WRITE):
        assert sum(length for one, _, length in large if one is kind) == COUNT * CHUNK, "each byte once, each way"
    arena = town.engine.cache.arena
    assert all(arena.address <= address <= arena.address + arena.size_bytes - length for _, address, length in large)
    assert framed < COUNT * KiB, "frames say where it lies, no more"


def test_the_asynchronous_client_uses_rdma_as_well(cached_town: Town) -> None:
    town = cached_town

    async def read_and_write() -> None:
        client = await AsyncKVClient.connect(town.address, lazy=True, transport="rdma")
        client.session().core.rdma.open_with(lambda host: RdmaPort(town.client_rail(), "client0:1"))
        await client.check_ways()
        layout = KVLayout.opaque(chunk_bytes=CHUNK, chunk_tokens=16)
        ns = client.namespace(Namespace(tenant="default", model="async", weights="w", layout=layout))
        keys = ns.keys(list(range(16 * COUNT)))
        values = [noise(CHUNK, seed) for seed in range(COUNT)]
        assert all(isinstance(one, Stored) for one in await ns.put(keys, values))
        memory = np.zeros((COUNT, CHUNK), np.uint8)
        assert all(isinstance(one, Hit) for one in await ns.get_into(keys, list(memory)))
        assert memory.tobytes() == b"".join(values)
        client.close()

    asyncio.run(read_and_write())
    assert town.metrics.placed_bytes == town.metrics.pulled_bytes == COUNT * CHUNK


def test_regions_that_are_gone_are_forgotten_in_time(cached_town: Town) -> None:
    """Memory that is new in each call, and pairs that break: the node is never told of more than it takes."""
    town = cached_town
    with connect(town) as client:
        ns = namespace_of(client)
        values = filled(ns, COUNT)
        keys = ns.keys(list(range(16 * COUNT)))
        for attempt in range(3 * REGIONS_PER_CONNECTION_MAX // COUNT):
            buffers = [bytearray(CHUNK) for _ in range(COUNT)]
            assert all(isinstance(one, Hit) for one in ns.get_into(keys, buffers))
            if not attempt % 8:
                town.on_node(town.service.pairs.close)
                assert buffers == values
        assert client.transports()["t0"] == "rdma client0:1"
        assert town.metrics.placed_bytes > town.metrics.fallback_bytes

"""Registered memory: kept while its owner lives, cut to the device's limits, within a bound; never stale."""

from __future__ import annotations

import errno
import gc
import mmap
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest, Overloaded, Unavailable
from kvstore.limits import REGIONS_PER_CONNECTION_MAX, MiB
from kvstore.testing.fake_verbs import FakeFabric, FakeHardware
from kvstore.transport.rdma.regions import ClientRegions, RegionCache, address_of
from kvstore.transport.rdma.verbs import Access
from kvstore.wire.pairs import RegionDescriptor, decode_regions, encode_regions
from kvstore.wire.shared import Place


class Bench:
    """A cache over a scripted device, which counts what is registered."""

    def __init__(self, *, region_bytes_max: int = 1 << 30, bytes_max: int = 1 << 30) -> None:
        self.hardware = FakeHardware(gids={1: bytes(16)})
        self.fabric = FakeFabric({"fake0": self.hardware})
        device = self.fabric.open("fake0")
        self.closed: list[int] = []

        def closed(ids: Sequence[int]) -> None:
            self.closed += ids

        self.cache = RegionCache(
            lambda address, length: device.register(address, length, Access.LOCAL_WRITE | Access.REMOTE_WRITE),
            region_bytes_max=region_bytes_max,
            bytes_max=bytes_max,
            on_close=closed,
        )

    @property
    def count(self) -> int:
        return len(self.fabric.regions)


def flat(array: np.ndarray) -> memoryview:  # type: ignore[type-arg]
    return memoryview(array).cast("B")


def test_memory_is_registered_once_and_whole() -> None:
    bench = Bench()
    array = np.zeros(1 * MiB, np.uint8)
    first = bench.cache.hold(flat(array[1000:2000]))
    second = bench.cache.hold(flat(array[:4096]))
    assert first is second
    assert (bench.count, bench.cache.hits, bench.cache.misses) == (1, 1, 1)
    [fragment] = first.places(address_of(flat(array)) + 1000, 1000)
    assert fragment == Place(first.descriptors[0].region, 1000, 1000)
    bench.cache.release(first)
    bench.cache.release(second)
    assert bench.count == 1, "kept for the next call"
    bench.cache.close()
    assert bench.count == 0


@pytest.mark.parametrize("make", [lambda: np.zeros(8192, np.uint8), lambda: mmap.mmap(-1, 8192)])
def test_a_region_ends_with_its_memory(make: object) -> None:
    bench = Bench()
    owner = make()  # type: ignore[operator]
    bench.cache.release(bench.cache.hold(memoryview(owner)[:100]))
    assert bench.count == 1
    del owner
    gc.collect()
    assert bench.count == 0
    assert bench.closed == [1]
    assert bench.cache.registered_bytes == 0


def test_memory_in_use_outlives_its_owner_until_the_call_ends() -> None:
    bench = Bench()
    array = np.zeros(8192, np.uint8)
    held = bench.cache.hold(flat(array))
    del array
    gc.collect()
    assert bench.count == 1
    bench.cache.release(held)
    assert bench.count == 0


def test_memory_without_an_owner_is_registered_for_one_call() -> None:
    bench = Bench()
    memory = bytearray(4096)  # takes no weak reference
    for number in (1, 2):
        held = bench.cache.hold(memoryview(memory))
        assert bench.count == 1
        bench.cache.release(held)
        assert bench.count == 0
        assert bench.cache.misses == number
    held = bench.cache.hold_address(address_of(memoryview(memory)), 4096)
    bench.cache.release(held)
    assert bench.count == 0


def test_a_lent_array_is_not_taken_for_the_owner_of_its_memory() -> None:
    bench = Bench()
    memory = bytearray(4096)
    array = np.frombuffer(memory, np.uint8)
    bench.cache.release(bench.cache.hold(flat(array)))
    assert bench.count == 0


@given(st.integers(1, 4096), st.integers(4, 400), st.data())
def test_fragments_are_cut_where_regions_meet(length: int, piece: int, data: st.DataObject) -> None:
    bench = Bench(region_bytes_max=piece)
    array = np.zeros(length, np.uint8)
    begin = address_of(flat(array))
    held = bench.cache.hold(flat(array))
    assert [one.length_bytes for one in held.descriptors] == [min(piece, length - at) for at in range(0, length, piece)]
    table = ClientRegions()
    table.learn(decode_regions(encode_regions(held.descriptors)))
    start = data.draw(st.integers(0, length - 1))
    count = data.draw(st.integers(1, length - start))
    fragments = held.places(begin + start, count)
    at = begin + start
    for fragment in fragments:
        assert table.resolve(fragment)[0] == at
        at += fragment.length_bytes
    assert at == begin + start + count


def test_the_bound_evicts_what_is_not_used_and_refuses_when_all_is() -> None:
    bench = Bench(bytes_max=10_000)
    arrays = [np.zeros(4000, np.uint8) for _ in range(4)]
    first = bench.cache.hold(flat(arrays[0]))
    bench.cache.release(bench.cache.hold(flat(arrays[1])))
    second = bench.cache.hold(flat(arrays[2]))  # 1 goes, not 0 which is in use
    assert bench.closed == [2]
    assert bench.cache.registered_bytes == 8000
    with pytest.raises(Overloaded, match="8000 registered bytes are in use"):
        bench.cache.hold(flat(arrays[3]))
    with pytest.raises(Overloaded, match="at most 10000 bytes"):
        bench.cache.hold(memoryview(bytes(10_001)))
    bench.cache.release(first)
    bench.cache.release(bench.cache.hold(flat(arrays[3])))
    bench.cache.release(second)
    bench.cache.close()
    assert bench.count == 0


def test_a_refusal_names_the_limits_and_leaves_nothing_registered() -> None:
    bench = Bench(region_bytes_max=1024)
    bench.hardware.refusals["reg_mr"] = deque([0, errno.ENOMEM])
    bench.hardware.refusals["reg_mr"].popleft()
    with pytest.raises(Unavailable, match="ulimit -l unlimited"):
        bench.cache.hold(memoryview(bytes(4096)))
    assert bench.count == 0
    bench.hardware.limits = replace(bench.hardware.limits, regions_max=2)  # the third of four is refused
    with pytest.raises(Unavailable, match="max_mr_size"):
        bench.cache.hold(memoryview(bytes(4096)))
    assert bench.count == 0
    assert bench.cache.registered_bytes == 0


def test_a_node_believes_no_fragment_outside_its_region() -> None:
    table = ClientRegions()
    table.learn([RegionDescriptor(5, 1000, 100, 7)])
    assert table.resolve(Place(5, 40, 60)) == (1040, 60, 7)
    for fragment in (Place(5, 41, 60), Place(5, 101, 0), Place(6, 0, 1)):
        with pytest.raises(InvalidRequest):
            table.resolve(fragment)
    table.forget([5])
    with pytest.raises(InvalidRequest, match="region 5 is not open"):
        table.resolve(Place(5, 0, 1))
    with pytest.raises(InvalidRequest, match="is none"):
        table.learn([RegionDescriptor(1, (1 << 64) - 1, 2, 1)])
    many = [RegionDescriptor(number, 1, 1, 1) for number in range(REGIONS_PER_CONNECTION_MAX)]
    table.learn(many)
    with pytest.raises(Overloaded, match="1024 regions"):
        table.learn([many[0]._replace(region=9999)])

"""Conformance of a verbs backend: what the data path relies on, over two devices that reach each other.

Tests inherit `VerbsSuite` and say which library and devices. It needs no second thread: reliable connections between
two devices of one process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvstore.limits import CHAIN_REQUESTS_MAX, KiB, MiB
from kvstore.transport.rdma.statuses import Action, Status, action_of, name_of
from kvstore.transport.rdma.verbs import (
    SUCCESS,
    Access,
    Completion,
    CompletionQueue,
    Device,
    MemoryRegion,
    PairEnd,
    PairPath,
    PairState,
    PortState,
    QueuePair,
    Verbs,
    VerbsFailure,
    Work,
)

_WAIT_S = 100.0
_ALL = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Two devices of one library, and the entries of their tables that reach each other."""

    verbs: Verbs
    names: tuple[str, str]
    gid_index: int


class Memory:
    """Pages that a test registers."""

    def __init__(self, length_bytes: int) -> None:
        self.map = mmap.mmap(-1, length_bytes)
        self.view = memoryview(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.length_bytes = length_bytes


@dataclass(slots=True)
class End:
    """One side: device, completion queue, queue pair, registered memory."""

    device: Device
    completions: CompletionQueue
    pair: QueuePair
    memory: Memory
    region: MemoryRegion
    gid: bytes
    found: list[Completion] = field(default_factory=list)

    def describe(self) -> PairEnd:
        """What the other side must know."""
        return PairEnd(number=self.pair.number, packet_number=self.pair.number & 0xFFFFFF, lid=0, gid=self.gid)

    def wait(self, count: int) -> list[Completion]:
        """So many completions; fails the test when they do not come."""
        end = time.monotonic() + _WAIT_S
        found: list[Completion] = []
        while len(found) < count:
            found += self.completions.poll(count - len(found))
            assert time.monotonic() < end, f"only {found} of {count} completions came"
        return found

    def close(self) -> None:
        """All of it, in order."""
        self.pair.close()
        self.region.close()
        self.completions.close()
        self.device.close()


def open_end(ground: Ground, name: str, length_bytes: int) -> End:
    """One side of a connection that is not made yet."""
    device = ground.verbs.open(name)
    completions = device.completion_queue(1024)
    memory = Memory(length_bytes)
    return End(
        device,
        completions,
        device.queue_pair(completions, sends_max=256, receives_max=16),
        memory,
        device.register(memory.address, length_bytes, _ALL),
        device.gid(1, ground.gid_index),
    )


def path_to(end: End, other: End, ground: Ground, *, timeout_exponent: int = 17, retry_count: int = 7) -> PairPath:
    """From one end to the other."""
    mtu = min(end.device.port(1).mtu_bytes, other.device.port(1).mtu_bytes)
    return PairPath(
        port=1,
        gid_index=ground.gid_index,
        mtu_bytes=mtu,
        traffic_class=0,
        service_level=0,
        packet_number=end.describe().packet_number,
        reads_out=4,
        reads_in=4,
        timeout_exponent=timeout_exponent,
        retry_count=retry_count,
        remote=other.describe(),
        remote_access=_ALL,
    )


class VerbsSuite:
    """Inherit, and give the fixture `ground`."""

    @pytest.fixture
    def ground(self) -> Ground:
        """Which library, which devices."""
        raise NotImplementedError

    @pytest.fixture
    def ends(self, ground: Ground) -> Iterator[tuple[End, End]]:
        """Two connected ends, 2 MiB registered at each."""
        here, there = (open_end(ground, name, 2 * MiB) for name in ground.names)
        here.pair.connect(path_to(here, there, ground))
        there.pair.connect(path_to(there, here, ground))
        yield here, there
        here.close()
        there.close()

    def test_devices_are_listed_and_a_strange_name_is_refused(self, ground: Ground) -> None:
        assert set(ground.names) <= set(ground.verbs.device_names())
        with pytest.raises(VerbsFailure, match="nosuch0"):
            ground.verbs.open("nosuch0")

    def test_a_device_tells_its_limits_port_and_gid(self, ends: tuple[End, End], ground: Ground) -> None:
        device = ends[0].device
        limits = device.limits
        assert min(limits.region_bytes_max, limits.regions_max, limits.pairs_max, limits.reads_max) > 0
        port = device.port(1)
        assert port.state == PortState.ACTIVE
        assert port.mtu_bytes in (256, 512, 1024, 2048, 4096)
        assert port.gid_count > ground.gid_index
        assert len(ends[0].gid) == 16
        assert ends[0].gid not in (bytes(16), ends[1].gid)
        with pytest.raises(VerbsFailure):
            device.port(77)

    def test_a_chain_of_writes_lands_and_ends_in_one_completion(self, ends: tuple[End, End]) -> None:
        here, there = ends
        here.memory.view[:] = os.urandom(here.memory.length_bytes)
        pieces = []
        for at in range(16):  # each to another place than its own
            to = (15 - at) * 64 * KiB
            address = here.memory.address + at * 64 * KiB
            pieces.append(
                (address, 64 * KiB, here.region.local_key, there.memory.address + to, there.region.remote_key)
            )
        here.pair.post(Work.WRITE, pieces, 7)
        [done] = here.wait(1)
        assert done[:3] == (7, SUCCESS, here.pair.number)
        assert here.completions.poll(8) == []
        for at in range(16):
            to = (15 - at) * 64 * KiB
            sent = here.memory.view[at * 64 * KiB : (at + 1) * 64 * KiB]
            assert there.memory.view[to : to + 64 * KiB] == sent, at
        assert not any(there.memory.view[1 * MiB :])

    def test_a_chain_of_reads_brings_what_is_there(self, ends: tuple[End, End]) -> None:
        here, there = ends
        there.memory.view[:] = os.urandom(there.memory.length_bytes)
        step = 30_011  # in no relation to pages or packets
        pieces = [
            (here.memory.address + at, step, here.region.local_key, there.memory.address + at, there.region.remote_key)
            for at in range(0, 32 * step, step)
        ]
        here.pair.post(Work.READ, pieces, 9)
        [done] = here.wait(1)
        assert done[:2] == (9, SUCCESS)
        assert here.memory.view[: 32 * step] == there.memory.view[: 32 * step]
        assert not any(here.memory.view[32 * step : 33 * step])

    def test_the_longest_chain_and_many_chains(self, ends: tuple[End, End]) -> None:
        here, there = ends
        here.memory.view[:] = os.urandom(here.memory.length_bytes)
        for number in range(3):
            pieces = [
                (
                    here.memory.address + at * 512,
                    512,
                    here.region.local_key,
                    there.memory.address + at * 512,
                    there.region.remote_key,
                )
                for at in range(number * CHAIN_REQUESTS_MAX, (number + 1) * CHAIN_REQUESTS_MAX)
            ]
            here.pair.post(Work.WRITE, pieces, number)
        here.pair.post(Work.WRITE, pieces[:1], 99)
        assert [done[:2] for done in here.wait(4)] == [(0, SUCCESS), (1, SUCCESS), (2, SUCCESS), (99, SUCCESS)]
        length = 3 * CHAIN_REQUESTS_MAX * 512
        assert there.memory.view[:length] == here.memory.view[:length]

    def test_a_message_is_received_where_it_was_expected(self, ends: tuple[End, End]) -> None:
        here, there = ends
        there.pair.post_receive((there.memory.address + 4096, 4096, there.region.local_key, 0, 0), 31)
        here.memory.view[:5] = b"hello"
        here.pair.post(Work.SEND, [(here.memory.address, 5, here.region.local_key, 0, 0)], 32)
        [sent], [received] = here.wait(1), there.wait(1)
        assert sent[:2] == (32, SUCCESS)
        assert received == Completion(31, SUCCESS, there.pair.number, 5)
        assert bytes(there.memory.view[4096:4102]) == b"hello\0"

    def test_the_descriptor_wakes_once_for_each_arming(self, ends: tuple[End, End]) -> None:
        here, there = ends
        here.completions.take_events()  # nothing there: it does not wait
        one = [(here.memory.address, 64, here.region.local_key, there.memory.address, there.region.remote_key)]
        for number in range(3):
            here.completions.arm()
            assert here.completions.poll(1) == []
            here.pair.post(Work.WRITE, one, number)
            assert select.select([here.completions], [], [], _WAIT_S)[0] == [here.completions]
            here.completions.take_events()
            assert here.wait(1)[0][:2] == (number, SUCCESS)
            assert select.select([here.completions], [], [], 0)[0] == []

    def test_what_a_wrong_key_costs(self, ends: tuple[End, End]) -> None:
        here, there = ends
        there.memory.view[:64] = b"\x55" * 64
        wrong = there.region.remote_key ^ 0x1F00
        good = (here.memory.address, 64, here.region.local_key, there.memory.address, there.region.remote_key)
        here.pair.post(Work.WRITE, [(*good[:4], wrong)], 1)
        here.pair.post(Work.WRITE, [good], 2)
        first, second = here.wait(2)
        assert first[:2] == (1, Status.REMOTE_ACCESS)
        assert second[:2] == (2, Status.FLUSHED)
        assert there.memory.view[:64] == b"\x55" * 64
        assert here.pair.state() == PairState.ERROR

    def test_a_region_that_is_closed_cannot_be_reached(self, ends: tuple[End, End]) -> None:
        here, there = ends
        there.region.close()
        there.region.close()
        piece = (here.memory.address, 4096, here.region.local_key, there.memory.address, there.region.remote_key)
        here.pair.post(Work.READ, [piece], 1)
        assert here.wait(1)[0][:2] == (1, Status.REMOTE_ACCESS)

    def test_nothing_is_written_behind_a_region(self, ends: tuple[End, End]) -> None:
        here, there = ends
        end = there.memory.address + there.memory.length_bytes
        piece = (here.memory.address, 4096, here.region.local_key, end - 4095, there.region.remote_key)
        here.pair.post(Work.WRITE, [piece], 1)
        assert here.wait(1)[0][:2] == (1, Status.REMOTE_ACCESS)

    def test_our_own_wrong_key_is_our_own_fault(self, ends: tuple[End, End]) -> None:
        here, there = ends
        wrong = here.region.local_key ^ 0x1F00
        here.pair.post(Work.WRITE, [(here.memory.address, 64, wrong, there.memory.address, there.region.remote_key)], 5)
        [done] = here.wait(1)
        assert (done.work_id, action_of(done.status)) == (5, Action.FAIL), name_of(done.status)

    def test_a_peer_that_is_gone_is_told_in_time(self, ground: Ground) -> None:
        here, there = (open_end(ground, name, 64 * KiB) for name in ground.names)
        here.pair.connect(path_to(here, there, ground, timeout_exponent=10, retry_count=1))
        there.pair.connect(path_to(there, here, ground))
        there.pair.close()
        piece = (here.memory.address, 64, here.region.local_key, there.memory.address, there.region.remote_key)
        here.pair.post(Work.WRITE, [piece, piece], 5)
        first, last = here.wait(2)
        assert first[:2] == (0, Status.RETRY_EXCEEDED), "of a chain only the last bears its id"
        assert last[:2] == (5, Status.FLUSHED)
        here.close()
        there.close()

    def test_failing_a_pair_flushes_what_was_posted(self, ends: tuple[End, End]) -> None:
        here, _ = ends
        for number in range(4):
            here.pair.post_receive((here.memory.address, 64, here.region.local_key, 0, 0), number)
        here.pair.fail()
        assert [done[:2] for done in here.wait(4)] == [(number, Status.FLUSHED) for number in range(4)]

    def test_a_new_pair_replaces_a_failed_one(self, ends: tuple[End, End], ground: Ground) -> None:
        here, there = ends
        here.pair.fail()
        for end in ends:
            end.pair.close()
            end.pair = end.device.queue_pair(end.completions, sends_max=64, receives_max=0)
        here.pair.connect(path_to(here, there, ground))
        there.pair.connect(path_to(there, here, ground))
        here.memory.view[:4] = b"back"
        piece = (here.memory.address, 4, here.region.local_key, there.memory.address, there.region.remote_key)
        here.pair.post(Work.WRITE, [piece], 1)
        assert here.wait(1)[0][:3] == (1, SUCCESS, here.pair.number)
        assert bytes(there.memory.view[:4]) == b"back"

    def test_refusals_name_the_verb(self, ends: tuple[End, End], ground: Ground) -> None:
        device = ends[0].device
        with pytest.raises(VerbsFailure) as refused:
            device.register(0, 1 * MiB, _ALL)  # nobody's memory
        assert refused.value.verb == "reg_mr"
        with pytest.raises(VerbsFailure) as refused, open("/dev/null", "rb") as no_memory:
            device.register_dmabuf(no_memory.fileno(), offset_bytes=0, length_bytes=4096, access=Access.LOCAL_WRITE)
        assert refused.value.verb == "reg_dmabuf_mr"
        path = path_to(*ends, ground)
        with pytest.raises(VerbsFailure) as refused:
            ends[0].pair.connect(path)  # it is connected already
        assert refused.value.verb == "modify_qp"

    def test_closing_twice_is_harmless(self, ground: Ground) -> None:
        end = open_end(ground, ground.names[0], 4096)
        for _ in range(2):
            end.close()

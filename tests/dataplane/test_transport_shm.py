"""Shared memory passes the conformance suite of transports, by the socket and by places; and what it refuses."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest, Overloaded
from kvstore.limits import (
    FRAME_BODY_BYTES_MAX,
    PAGE_BYTES,
    REGION_DESCRIPTORS_WAITING_MAX,
    REGIONS_MAX,
    REGIONS_PER_CONNECTION_MAX,
    SECOND_NS,
    SLICE_BYTES_MAX,
    KiB,
    MiB,
)
from kvstore.server.batch import unpack_u32
from kvstore.testing.transport_suite import Conditions, Joint, TransportSuite
from kvstore.transport.base import FetchEvents, Landing, NodeChannel
from kvstore.transport.shm import Peer, create_memory, memory_defect, open_memory, peer_of, unmap
from kvstore.transport.shm_node import DescriptorSocket, ShmNodeChannel
from kvstore.transport.shm_regions import MappedMemory, Regions, regions_max
from kvstore.transport.tcp import TcpChannel
from kvstore.wire.frames import Frame, FrameReader
from kvstore.wire.header import FrameType
from kvstore.wire.messages import Grant
from kvstore.wire.shared import Place, Region
from kvstore.wire.slices import NO_CONTENT_ID, Slice

ROOM_BYTES = 5 * MiB
ROOMS = 8
OFFERS_AT = ROOMS * ROOM_BYTES
SHARED_BYTES = OFFERS_AT + 16 * MiB
F_ADD_SEALS = 1033
SHRINK, GROW, WRITE = 2, 4, 8


class SteppingDescriptors(DescriptorSocket):
    """Receives at most so many bytes at once."""

    step_bytes = 0

    def _receive(self, buffers: Sequence[memoryview]) -> int:
        return super()._receive([buffers[0][: self.step_bytes]] if self.step_bytes else buffers)


class SocketJoint:
    """Two ends of a Unix socket; no places are named, so payload travels."""

    def __init__(self, conditions: Conditions) -> None:
        theirs, ours = socket.socketpair()
        for end in (theirs, ours) if conditions.buffer_bytes else ():
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, conditions.buffer_bytes)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, conditions.buffer_bytes)
        self.mapped = MappedMemory()
        self._node = ShmNodeChannel(theirs, self, body_bytes_max=FRAME_BODY_BYTES_MAX, memory=self.mapped)
        if conditions.step_bytes:
            self._step(conditions.step_bytes)
        self.node: NodeChannel = self._node
        self.ours = ours
        self._client = TcpChannel(ours, FrameReader(self))
        self.arrived: list[Slice] = []
        self._memory: Callable[[Slice], Sequence[memoryview]] = lambda one: []
        self._offers: dict[int, Sequence[memoryview]] = {}

    def _step(self, step_bytes: int) -> None:
        stepping = SteppingDescriptors.adopt(self._node._socket)
        stepping.step_bytes = step_bytes
        stepping.setblocking(False)
        self._node._socket = self._node._descriptors = stepping

    def turn(self) -> None:
        self.node.on_writable()
        for frame in self.node.on_readable():
            if frame.type is FrameType.DATA:
                self._node.landed(frame)
        if self._client.fileno() >= 0:
            self._client.on_writable()
            for frame in self._client.on_readable():
                self._take(frame)

    def receive_into(self, memory: Callable[[Slice], Sequence[memoryview]]) -> None:
        self._memory = memory

    def offer(self, item: int, fragments: Sequence[memoryview]) -> None:
        self._offers[item] = fragments

    def leave(self) -> None:
        self._client.close()

    def close(self) -> None:
        self._client.close()
        self.node.close()
        self.mapped.close(within_ns=10 * SECOND_NS)

    def _take(self, frame: Frame) -> None:
        self.arrived += frame.slices
        if frame.type is FrameType.GRANT:
            for item in unpack_u32(Grant.decode(frame.body).items):
                self._send(item, b"".join(self._offers[item]), frame.request_id)

    def _send(self, item: int, data: bytes, request_id: int) -> None:
        for at in range(0, len(data), SLICE_BYTES_MAX):
            piece = memoryview(data)[at : at + SLICE_BYTES_MAX]
            end = at + len(piece)
            one = Slice(item, at, len(piece), 0, end == len(data), NO_CONTENT_ID, len(data), 4096, b"")
            self._client.writer.push_slices([one], [piece], request_id, payload_bytes=len(piece))

    def place(self, frame: Frame) -> Sequence[memoryview]:
        return [view for one in frame.slices for view in self._memory(one)]

    def place_other(self, frame: Frame) -> Sequence[memoryview] | None:
        raise InvalidRequest(f"{frame.type.name} is not expected")

    def accepts_data(self, frame: Frame) -> bool:
        return bool(self._node._landings)

    def arriving(self, frame: Frame, arrived_bytes: int) -> None:
        """Nothing is checked before it is complete."""


class PlacesJoint(SocketJoint):
    """The same, and the client names places of its shared memory for everything that is moved."""

    def __init__(self, conditions: Conditions) -> None:
        super().__init__(conditions)
        fd = create_memory(SHARED_BYTES)
        self._shared = memoryview(mmap.mmap(fd, SHARED_BYTES))
        self._regions().add(1, fd, SHARED_BYTES)
        self._places_for(1)
        channel = self._node
        fetch = channel.fetch

        def fetch_from(landings: Sequence[Landing], request_id: int, events: FetchEvents, *, epoch: int = 0) -> None:
            if not conditions.buffer_bytes:  # else by the socket: what is interrupted must take some time
                self._take_from(landings, request_id)
            fetch(landings, request_id, events, epoch=epoch)

        self.fetch = fetch_from
        self.node = _Fetching(channel, self)

    def _regions(self) -> Regions:
        return self._node._regions

    def _places_for(self, request_id: int) -> None:
        rooms = [Place(1, item * ROOM_BYTES, ROOM_BYTES) for item in range(ROOMS)]
        self._node.place_into(rooms, request_id, count=ROOMS)

    def _take_from(self, landings: Sequence[Landing], request_id: int) -> None:
        """Puts the offers behind the rooms, and names where."""
        at = OFFERS_AT
        places = [Place(1, 0, 0)] * 16
        for landing in landings:
            for fragment in self._offers[landing.item]:
                self._shared[at : at + len(fragment)] = fragment
                at += len(fragment)
            length = len(landing.buffer)
            places[landing.item] = Place(1, at - length, length)
            at = -(-at // PAGE_BYTES) * PAGE_BYTES
        self._node.take_from(places, request_id, count=16)

    def _take(self, frame: Frame) -> None:
        for one in frame.slices if frame.type is FrameType.PLACED else ():
            start = one.item * ROOM_BYTES + one.offset
            for view in self._memory(one) if one.length_bytes else ():
                view[:] = self._shared[start : start + len(view)]
                start += len(view)
        super()._take(frame)


class _Fetching:
    """The channel under test; before each fetch the client says where its offers lie."""

    def __init__(self, channel: ShmNodeChannel, joint: PlacesJoint) -> None:
        self._channel = channel
        self.fetch = joint.fetch

    def __getattr__(self, name: str) -> object:
        return getattr(self._channel, name)


class TestBySocket(TransportSuite):
    def join(self, conditions: Conditions) -> Joint:
        return SocketJoint(conditions)


class TestByPlaces(TransportSuite):
    def join(self, conditions: Conditions) -> Joint:
        return PlacesJoint(conditions)


# --- what a node maps
def memfd(length_bytes: int, *, seals: int = SHRINK | GROW, allocate: bool = True, flags: int = 0) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC | flags)
    os.ftruncate(fd, length_bytes)
    if allocate:
        os.posix_fallocate(fd, 0, length_bytes)
    if seals:
        fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


@pytest.fixture
def regions() -> Iterator[Regions]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        memory = MappedMemory()
        made = Regions(memory, peer_of(ours))
        yield made
        made.close()
        memory.close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: memfd(64 * KiB, seals=0), "F_SEAL_SHRINK"),
        (lambda: memfd(64 * KiB, seals=GROW), "F_SEAL_SHRINK"),
        (lambda: memfd(64 * KiB, seals=SHRINK), "F_SEAL_GROW"),
        (lambda: memfd(64 * KiB, seals=SHRINK | GROW | WRITE), "forbid writing"),
        (lambda: memfd(32 * KiB), "has 32768 bytes"),
        (lambda: memfd(64 * KiB, allocate=False), "allocated"),
        (lambda: os.open("/dev/zero", os.O_RDWR), "no memfd"),
        (lambda: os.open("/dev/null", os.O_RDWR | os.O_PATH), "no memfd"),
        (lambda: os.pipe2(os.O_CLOEXEC)[0], "no memfd"),
        (lambda: os.eventfd(0), "no memfd"),
        (lambda: socket.socket().detach(), "no memfd"),
        (lambda: os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR), "memfd|seals"),
        (lambda: os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR), "F_SEAL_SHRINK"),
    ],
)
def test_what_is_no_sealed_memory_is_refused(make: Callable[[], int], words: str, regions: Regions) -> None:
    fd = make()
    with pytest.raises(InvalidRequest, match=words):
        regions.add(1, fd, 64 * KiB)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert len(regions) == 0


def test_sealed_memory_cannot_be_taken_from_under_us() -> None:
    fd = create_memory(64 * KiB)
    assert not memory_defect(fd, 64 * KiB)
    view = memoryview(open_memory(fd, 64 * KiB))
    for length in (0, 4096, 128 * KiB):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, length)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, F_ADD_SEALS, WRITE)
    os.close(fd)
    view[:] = b"x" * len(view)  # no SIGBUS


@pytest.mark.parametrize("length", [PAGE_BYTES, 2 * MiB, 5 * MiB + PAGE_BYTES])
def test_memory_is_whole_whatever_pages_the_kernel_has(length: int) -> None:
    """Huge pages where there are some: every byte is there, is zero at first, and is the same for both sides."""
    fd = create_memory(length)
    assert not memory_defect(fd, length)
    assert os.fstat(fd).st_size == length
    near, far = memoryview(mmap.mmap(fd, length)), memoryview(open_memory(fd, length))
    os.close(fd)
    assert near == bytes(length)
    noise = os.urandom(length)
    near[:] = noise
    assert far == noise


def test_no_more_memory_is_taken_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to no process, so the kernel would end others one by one to make room for it."""
    monkeypatch.setattr("kvstore.transport.shm.free_memory_bytes", lambda: 10 * MiB)
    os.close(create_memory(8 * MiB))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=f"{10 * MiB} bytes are more than this machine can give"):
        create_memory(10 * MiB)
    assert len(os.listdir("/proc/self/fd")) == before


def test_pages_that_were_punched_out_are_zeros_again() -> None:
    fd = create_memory(64 * KiB)
    view = memoryview(open_memory(fd, 64 * KiB))
    view[:] = b"x" * len(view)
    from kvstore.device.syscalls import FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, fallocate

    fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, 0, 64 * KiB)
    assert not any(view)
    view[:] = b"y" * len(view)
    os.close(fd)


def test_places_outside_of_regions_are_refused(regions: Regions) -> None:
    regions.add(7, create_memory(64 * KiB), 64 * KiB)
    assert len(regions.view(Place(7, 4096, 60 * KiB))) == 60 * KiB
    for place in (
        Place(8, 0, 4096),
        Place(7, 64 * KiB, 1),
        Place(7, 60 * KiB, 4097),
        Place(7, 1 << 63, 1),
        Place(7, 1, 4096),
    ):
        with pytest.raises(InvalidRequest, match="region"):
            regions.view(place)
    regions.drop(7)
    regions.drop(7)
    with pytest.raises(InvalidRequest, match="not open"):
        regions.view(Place(7, 0, 1))


def test_bounds_hold_and_count_what_is_mapped() -> None:
    ours, theirs = socket.socketpair()
    memory = MappedMemory(bytes_max=5 * MiB, client_bytes_max=4 * MiB)
    first, second = Regions(memory, peer_of(ours)), Regions(memory, peer_of(theirs))
    first.add(1, create_memory(2 * MiB), 2 * MiB)
    second.add(1, create_memory(2 * MiB), 2 * MiB)
    assert memory.mapped_bytes == 4 * MiB
    with pytest.raises(Overloaded, match="this process"):
        second.add(2, create_memory(PAGE_BYTES), PAGE_BYTES)
    with pytest.raises(InvalidRequest, match="in use"):
        first.add(1, create_memory(PAGE_BYTES), PAGE_BYTES)
    in_flight = first.view(Place(1, 0, MiB))
    first.close()
    assert memory.mapped_bytes == 4 * MiB, "a device read still goes there"
    in_flight[:] = b"z" * MiB
    del in_flight
    memory.close()  # waits
    assert memory.mapped_bytes == 2 * MiB
    second.close()
    memory.close()
    assert memory.mapped_bytes == 0
    ours.close()
    theirs.close()


def mappings_of(inode: int) -> int:
    return sum(f" {inode} " in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_who_drops_memory_does_not_wait_until_it_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 GiB takes up to .4 s, in which the loop would serve nobody."""
    go_on, began = threading.Event(), threading.Event()

    def waits(mapped: mmap.mmap) -> None:
        began.set()
        assert go_on.wait(30)
        unmap(mapped)

    monkeypatch.setattr("kvstore.transport.shm_unmapping.unmap", waits)
    memory = MappedMemory()
    regions = Regions(memory, Peer(pid=1, uid=0))
    fd = create_memory(9 * MiB)
    inode = os.fstat(fd).st_ino
    regions.add(1, fd, 9 * MiB)
    view = regions.view(Place(1, MiB, MiB))
    view[:] = b"a" * MiB
    regions.drop(1)
    assert not began.is_set()
    assert mappings_of(inode) == 1, "a device read still goes there"
    view[:] = b"b" * MiB
    del view  # returns while the thread is at it
    assert began.wait(30)
    assert (memory.mapped_bytes, mappings_of(inode)) == (9 * MiB, 1)
    go_on.set()
    memory.close()
    assert (memory.mapped_bytes, mappings_of(inode)) == (0, 0)


def test_memory_is_refused_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    memory = MappedMemory()
    with pytest.raises(Overloaded, match="can't start new thread"):
        Regions(memory, Peer(pid=1, uid=0)).add(1, create_memory(PAGE_BYTES), PAGE_BYTES)
    assert memory.mapped_bytes == 0
    memory.close()


def test_the_number_of_regions_is_bounded_for_a_process_and_for_all() -> None:
    """Each takes a descriptor of the node, which connections need as well."""
    memory = MappedMemory(regions_max=3, client_regions_max=2)
    first, second = Regions(memory, Peer(pid=1, uid=0)), Regions(memory, Peer(pid=1, uid=0))
    other = Regions(memory, Peer(pid=2, uid=0))
    for regions in (first, second):
        regions.add(1, create_memory(PAGE_BYTES), PAGE_BYTES)
    with pytest.raises(Overloaded, match="2 regions are shared by this process"):
        second.add(2, create_memory(PAGE_BYTES), PAGE_BYTES)
    other.add(1, create_memory(PAGE_BYTES), PAGE_BYTES)
    with pytest.raises(Overloaded, match="3 regions are shared by all clients"):
        other.add(2, create_memory(PAGE_BYTES), PAGE_BYTES)
    first.close()
    memory.close()
    second.add(2, create_memory(PAGE_BYTES), PAGE_BYTES)
    assert memory.mapped_regions == 3
    second.close()
    other.close()
    memory.close()
    assert (memory.mapped_regions, memory.mapped_bytes) == (0, 0)


def test_regions_leave_open_files_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed, expected in (
        (resource.RLIM_INFINITY, REGIONS_MAX),
        (1 << 20, REGIONS_MAX),
        (20_000, 10_000),
        (1_024, 512),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, allowed=allowed: (allowed, allowed))
        assert regions_max() == expected


def test_regions_of_a_connection_are_bounded(regions: Regions) -> None:
    for number in range(REGIONS_PER_CONNECTION_MAX):
        regions.add(number, create_memory(PAGE_BYTES), PAGE_BYTES)
    with pytest.raises(Overloaded, match="the limit is"):
        regions.add(REGIONS_PER_CONNECTION_MAX, create_memory(PAGE_BYTES), PAGE_BYTES)
    assert len(regions) == REGIONS_PER_CONNECTION_MAX


# --- descriptors
def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_that_nobody_claims_are_closed() -> None:
    joint = SocketJoint(Conditions(name="usual"))
    before = open_files()
    fd = create_memory(PAGE_BYTES)
    for _ in range(3):
        socket.send_fds(joint.ours, [b"KV"], [fd] * 4)
        joint._node._descriptors._receive([memoryview(bytearray(2))])
    assert open_files() == before + 1 + 12
    joint.node.close()
    assert open_files() < before + 1
    os.close(fd)
    joint.close()


def test_a_descriptor_that_is_no_memfd_is_not_kept() -> None:
    """Our own end of the socket would keep the connection open when we are gone."""
    joint = SocketJoint(Conditions(name="usual"))
    fd = create_memory(PAGE_BYTES)
    before = open_files()
    socket.send_fds(joint.ours, [b"KV"], [joint.ours.fileno(), fd])
    joint._node._descriptors._receive([memoryview(bytearray(2))])
    assert open_files() == before + 1
    with pytest.raises(InvalidRequest, match="no memfd"):
        joint._node.add_region(Region(region=1, length_bytes=PAGE_BYTES))
    joint._node.add_region(Region(region=1, length_bytes=PAGE_BYTES))
    socket.send_fds(joint.ours, [b"KV"], [joint.ours.fileno()])
    joint.ours.close()
    while joint._node._descriptors._receive([memoryview(bytearray(2))]):
        pass  # ends: nobody has the other end any more
    os.close(fd)
    joint.close()


def test_too_many_descriptors_are_closed_and_said() -> None:
    joint = SocketJoint(Conditions(name="usual"))
    fd = create_memory(PAGE_BYTES)
    before = open_files()
    socket.send_fds(joint.ours, [b"KV"], [fd] * (REGION_DESCRIPTORS_WAITING_MAX + 30))
    joint._node._descriptors._receive([memoryview(bytearray(2))])
    assert open_files() == before
    with pytest.raises(InvalidRequest, match="descriptors"):
        joint._node.add_region(Region(region=1, length_bytes=PAGE_BYTES))
    os.close(fd)
    joint.close()


def test_a_region_without_a_descriptor_is_refused() -> None:
    joint = SocketJoint(Conditions(name="usual"))
    with pytest.raises(InvalidRequest, match="SCM_RIGHTS"):
        joint._node.add_region(Region(region=1, length_bytes=PAGE_BYTES))
    joint.close()

"""RDMA devices that exist in this process only, and do what a script says.

Transfers are real (bytes move between registered memory, keys and bounds are checked as a device does), so the suite of
the backends runs on them; limits, tables, lost ports and work requests that never end are a test's to choose. It moves
at once, or when `FakeFabric.release` says so.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.limits import CHAIN_REQUESTS_MAX
from kvstore.transport.rdma.statuses import Status
from kvstore.transport.rdma.verbs import (
    ETHERNET,
    SUCCESS,
    Access,
    Completion,
    CompletionQueue,
    DeviceLimits,
    MemoryRegion,
    PairPath,
    PairState,
    Piece,
    Port,
    PortState,
    QueuePair,
    VerbsFailure,
    Work,
)

_LIMITS: Final = DeviceLimits(
    region_bytes_max=1 << 40, regions_max=1 << 16, pairs_max=1 << 16, work_requests_max=1 << 14,
    completions_max=1 << 16, reads_max=16,
)  # fmt: skip


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


_KEY_STEP: Final = 0x101  # so that a wrong key is not the next one's


@dataclass(slots=True, kw_only=True)
class FakeHardware:
    """What a device is; a test may change it at any time.

    Attributes:
        gids: by index in the table of port 1, the only one.
        state: of the port; while it is not ACTIVE nothing arrives, and work ends as RETRY_EXCEEDED.
        refusals: by verb ("reg_mr", ...): errno values that the next calls fail with.
        is_flushing: work that is on its way ends when its queue pair fails; else not before that is destroyed.
        is_letting_go: queue pairs are not destroyed while it is not set.
    """

    gids: dict[int, bytes]
    limits: DeviceLimits = _LIMITS
    mtu_bytes: int = 4096
    link_layer: int = ETHERNET
    lid: int = 0
    state: int = PortState.ACTIVE
    refusals: dict[str, deque[int]] = field(default_factory=dict)
    is_flushing: bool = True
    is_letting_go: threading.Event = field(default_factory=_set_event)

    def check(self, verb: str, about: str) -> None:
        """Raises what the script says."""
        waiting = self.refusals.get(verb)
        if waiting:
            raise VerbsFailure(verb, waiting.popleft(), about)


@dataclass(slots=True)
class _Request:
    pair: FakePair
    kind: Work
    pieces: list[Piece]
    work_id: int


class FakeFabric:
    """All devices of one network. `hold` keeps posted work from ending until `release`. Node, client, test and whoever
    destroys queue pairs may be threads of their own.

    Attributes:
        transferred: payload bytes that READ and WRITE have moved.
        posts: calls of `QueuePair.post`, each one chain.
        requests: work requests in these.
    """

    name = "fake"

    def __init__(self, hardware: dict[str, FakeHardware]) -> None:
        self.hardware = hardware
        self.is_held = False
        self.transferred = 0
        self.posts = 0
        self.requests = 0
        self.pairs: dict[int, FakePair] = {}
        self.regions: dict[int, FakeRegion] = {}  # by key, both keys of a region being equal
        self.lock = threading.RLock()
        self._waiting: deque[_Request] = deque()
        self._next_number = 17
        self._next_key = 0x1000

    def device_names(self) -> list[str]:
        """See `Verbs.device_names`."""
        if not self.hardware:
            raise VerbsFailure("get_device_list", errno.ENOSYS, "this machine")
        return list(self.hardware)

    def open(self, name: str) -> FakeDevice:
        """See `Verbs.open`."""
        if name not in self.hardware:
            raise VerbsFailure("open_device", errno.ENODEV, name)
        return FakeDevice(self, name, self.hardware[name])

    def hold(self) -> None:
        """Nothing that is posted ends."""
        with self.lock:
            self.is_held = True

    def release(self, count: int | None = None) -> None:
        """Carries out so many held chains, all by default, which also ends `hold`."""
        with self.lock:
            if count is None:
                self.is_held, count = False, len(self._waiting)
            while count > 0 and self._waiting:
                count -= 1
                self._carry_out(self._waiting.popleft())

    def submit(self, request: _Request) -> None:
        """A chain is posted."""
        with self.lock:
            self.posts += 1
            self.requests += len(request.pieces)
            self._waiting.append(request)
            if not self.is_held:
                self.release()

    def flush(self, pair: FakePair, *, quietly: bool) -> None:
        """The chains of a pair end undone; without completions when it is destroyed."""
        with self.lock:
            own = [one for one in self._waiting if one.pair is pair]
            self._waiting = deque(one for one in self._waiting if one.pair is not pair)
            for one in own if not quietly else ():
                self._end(one, 0, Status.FLUSHED)

    def new_number(self) -> int:
        """Of a queue pair."""
        with self.lock:
            self._next_number += 1
            return self._next_number

    def new_key(self) -> int:
        """Of a region."""
        with self.lock:
            self._next_key += _KEY_STEP
            return self._next_key

    def _carry_out(self, request: _Request) -> None:
        pair = request.pair
        if pair.current is not PairState.READY_TO_SEND:
            self._end(request, 0, Status.FLUSHED)
            return
        for position, piece in enumerate(request.pieces):
            status = self._transfer(pair, request.kind, piece)
            if status != SUCCESS:
                self._end(request, position, status)
                pair.fail()
                return
        self._end(request, len(request.pieces) - 1, SUCCESS)

    def _end(self, request: _Request, position: int, status: int) -> None:
        """One completion for the chain's end, or for each request from the one that failed."""
        kind = request.kind
        for at in range(position, len(request.pieces)):
            length = request.pieces[at][1] if kind is Work.READ else 0
            work_id = request.work_id if at == len(request.pieces) - 1 else 0
            request.pair.completions.add(Completion(work_id, status, request.pair.number, length))
            if status == SUCCESS:
                return
            status = Status.FLUSHED

    def _transfer(self, pair: FakePair, kind: Work, piece: Piece) -> int:
        local_address, length, local_key, remote_address, remote_key = piece
        needed = Access.LOCAL_WRITE if kind is Work.READ else Access.LOCAL_READ
        if not self._allows(pair.device, local_key, local_address, length, needed):
            return Status.LOCAL_PROTECTION
        peer = self.pairs.get(pair.remote_number)
        lives = peer is not None and peer.current in (PairState.READY_TO_RECEIVE, PairState.READY_TO_SEND)
        ports = [pair.device.hardware, peer.device.hardware if peer else pair.device.hardware]
        if peer is None or not lives or any(one.state != PortState.ACTIVE for one in ports):
            return Status.RETRY_EXCEEDED
        if kind is Work.SEND:
            return peer.receive(local_address, length)
        wanted = Access.REMOTE_READ if kind is Work.READ else Access.REMOTE_WRITE
        is_open = bool(peer.remote_access & wanted)
        if not is_open or not self._allows(peer.device, remote_key, remote_address, length, wanted):
            peer.fail()
            return Status.REMOTE_ACCESS
        into, out_of = (local_address, remote_address) if kind is Work.READ else (remote_address, local_address)
        ctypes.memmove(into, out_of, length)
        self.transferred += length
        return SUCCESS

    def _allows(self, device: FakeDevice, key: int, address: int, length: int, access: Access) -> bool:
        region = self.regions.get(key)
        return (
            region is not None
            and region.device is device
            and region.access & access == access
            and region.address <= address
            and address + length <= region.address + region.length_bytes
        )


class FakeDevice:
    """See `verbs.Device`."""

    def __init__(self, fabric: FakeFabric, name: str, hardware: FakeHardware) -> None:
        self.fabric = fabric
        self.name = name
        self.hardware = hardware

    @property
    def limits(self) -> DeviceLimits:
        """See `Device.limits`."""
        return self.hardware.limits

    def port(self, number: int) -> Port:
        """See `Device.port`."""
        self.hardware.check("query_port", self.name)
        if number != 1:
            raise VerbsFailure("query_port", errno.EINVAL, f"port {number} of {self.name}")
        found = self.hardware
        return Port(
            number=1, state=found.state, mtu_bytes=found.mtu_bytes, lid=found.lid, link_layer=found.link_layer,
            gid_count=max(found.gids, default=-1) + 1,
        )  # fmt: skip

    def gid(self, port: int, index: int) -> bytes:
        """See `Device.gid`."""
        if port != 1 or index not in self.hardware.gids:
            raise VerbsFailure("query_gid", errno.ENODATA, f"GID {index} of port {port} of {self.name}")
        return self.hardware.gids[index]

    def register(self, address: int, length_bytes: int, access: Access) -> MemoryRegion:
        """See `Device.register`."""
        about = f"{length_bytes} bytes on {self.name}"
        self.hardware.check("reg_mr", about)
        own = sum(region.device is self for region in list(self.fabric.regions.values()))
        if length_bytes > self.limits.region_bytes_max or own >= self.limits.regions_max:
            raise VerbsFailure("reg_mr", errno.ENOMEM, about)
        if address <= 0 or length_bytes <= 0:
            raise VerbsFailure("reg_mr", errno.EFAULT, about)
        return FakeRegion(self, address, length_bytes, access)

    def register_dmabuf(self, descriptor: int, *, offset_bytes: int, length_bytes: int, access: Access) -> MemoryRegion:
        """See `Device.register_dmabuf`."""
        raise VerbsFailure("reg_dmabuf_mr", errno.EOPNOTSUPP, f"descriptor {descriptor} on {self.name}")

    def completion_queue(self, count: int) -> CompletionQueue:
        """See `Device.completion_queue`."""
        self.hardware.check("create_cq", self.name)
        return FakeCompletions(self)

    def queue_pair(self, completions: CompletionQueue, *, sends_max: int, receives_max: int) -> QueuePair:
        """See `Device.queue_pair`."""
        assert isinstance(completions, FakeCompletions), "of this device"
        self.hardware.check("create_qp", self.name)
        own = sum(pair.device is self for pair in list(self.fabric.pairs.values()))
        if own >= self.limits.pairs_max:
            raise VerbsFailure("create_qp", errno.ENOMEM, self.name)
        return FakePair(self, completions)

    def close(self) -> None:
        """See `Device.close`."""
        parts: list[FakeRegion | FakePair] = [*self.fabric.regions.values(), *self.fabric.pairs.values()]
        if any(part.device is self for part in parts):
            raise VerbsFailure("dealloc_pd", errno.EBUSY, self.name)


class FakeRegion:
    """See `verbs.MemoryRegion`."""

    def __init__(self, device: FakeDevice, address: int, length_bytes: int, access: Access) -> None:
        self.device = device
        self.address = address
        self.length_bytes = length_bytes
        self.access = access
        self.local_key = self.remote_key = device.fabric.new_key()
        device.fabric.regions[self.local_key] = self

    def close(self) -> None:
        """See `MemoryRegion.close`."""
        self.device.fabric.regions.pop(self.local_key, None)


class FakeCompletions:
    """See `verbs.CompletionQueue`."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self._found: deque[Completion] = deque()
        self._is_armed = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def add(self, completion: Completion) -> None:
        """A work request ended."""
        self._found.append(completion)
        if self._is_armed:
            self._is_armed = False
            os.eventfd_write(self._event, 1)

    def fileno(self) -> int:
        """See `CompletionQueue.fileno`."""
        return self._event

    def arm(self) -> None:
        """See `CompletionQueue.arm`."""
        self._is_armed = True

    def take_events(self) -> None:
        """See `CompletionQueue.take_events`."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            pass

    def poll(self, count: int) -> list[Completion]:
        """See `CompletionQueue.poll`."""
        return [self._found.popleft() for _ in range(min(count, len(self._found)))]

    def close(self) -> None:
        """See `CompletionQueue.close`."""
        if any(pair.completions is self for pair in list(self.device.fabric.pairs.values())):
            raise VerbsFailure("destroy_cq", errno.EBUSY, self.device.name)
        if self._event >= 0:
            os.close(self._event)
            self._event = -1


class FakePair:
    """See `verbs.QueuePair`."""

    def __init__(self, device: FakeDevice, completions: FakeCompletions) -> None:
        self.device = device
        self.completions = completions
        self.number = device.fabric.new_number()
        self.current = PairState.RESET
        self.remote_number = 0
        self.remote_access = Access.LOCAL_READ
        self.path: PairPath | None = None
        self._receives: deque[tuple[Piece, int]] = deque()
        device.fabric.pairs[self.number] = self

    def state(self) -> int:
        """See `QueuePair.state`."""
        return self.current

    def connect(self, path: PairPath) -> None:
        """See `QueuePair.connect`."""
        self.device.hardware.check("modify_qp", f"queue pair {self.number}")
        if self.current is not PairState.RESET or path.mtu_bytes > self.device.hardware.mtu_bytes:
            raise VerbsFailure("modify_qp", errno.EINVAL, f"queue pair {self.number}")
        self.path = path
        self.remote_number, self.remote_access = path.remote.number, path.remote_access
        self.current = PairState.READY_TO_SEND

    def fail(self) -> None:
        """See `QueuePair.fail`."""
        with self.device.fabric.lock:
            if self.current is PairState.ERROR:
                return
            self.current = PairState.ERROR
            if self.device.hardware.is_flushing:
                self.device.fabric.flush(self, quietly=False)
            while self._receives:
                _, work_id = self._receives.popleft()
                self.completions.add(Completion(work_id, Status.FLUSHED, self.number, 0))

    def post(self, kind: Work, pieces: Sequence[Piece], work_id: int) -> None:
        """See `QueuePair.post`."""
        about = f"queue pair {self.number}"
        assert 0 < len(pieces) <= CHAIN_REQUESTS_MAX
        self.device.hardware.check("post_send", about)
        if self.current not in (PairState.READY_TO_SEND, PairState.ERROR):
            raise VerbsFailure("post_send", errno.EINVAL, about)
        self.device.fabric.submit(_Request(self, kind, list(pieces), work_id))

    def post_receive(self, piece: Piece, work_id: int) -> None:
        """See `QueuePair.post_receive`."""
        if self.current is PairState.ERROR:
            self.completions.add(Completion(work_id, Status.FLUSHED, self.number, 0))
        else:
            self._receives.append((piece, work_id))

    def receive(self, address: int, length: int) -> int:
        """A SEND of the other side arrives: its status there."""
        if not self._receives:
            return Status.RECEIVER_NOT_READY
        (into, room, _, _, _), work_id = self._receives.popleft()
        if length > room:
            self.fail()
            return Status.REMOTE_REQUEST
        ctypes.memmove(into, address, length)
        self.completions.add(Completion(work_id, SUCCESS, self.number, length))
        return SUCCESS

    def close(self) -> None:
        """See `QueuePair.close`."""
        self.device.hardware.check("destroy_qp", f"queue pair {self.number}")
        self.device.hardware.is_letting_go.wait()
        with self.device.fabric.lock:
            if self.device.fabric.pairs.pop(self.number, None) is not None:
                self.current = PairState.ERROR
                self.device.fabric.flush(self, quietly=True)
                self._receives.clear()

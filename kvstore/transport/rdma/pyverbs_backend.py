"""Verbs by `pyverbs` of rdma-core: Debian's python3-pyverbs (44), or a wheel of the same rdma-core as the system's.

Its enums moved from `pyverbs.enums` (44) to `pyverbs.libibverbs_enums` (59): we pass the numbers of the interface and
import neither. Every call holds the GIL; `get_cq_event` is therefore only made on a descriptor that does not block.

Scatter entries and work requests leak what they allocated (their `__dealloc` is no `__dealloc__`, 44 to 59) and copy
each other on construction: a device makes one chain of them for its lifetime, which every post fills with numbers. A
post is over when it returns, so that its queue pairs can share it.
"""

from __future__ import annotations

import errno
import ipaddress
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR, DmaBufMR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from kvstore.limits import CHAIN_REQUESTS_MAX
from kvstore.transport.rdma.pair_handle import destroy_unlocked
from kvstore.transport.rdma.queries import limits_of, port_of
from kvstore.transport.rdma.verbs import (
    MTU_CODES,
    Access,
    Completion,
    CompletionQueue,
    MemoryRegion,
    PairPath,
    PairState,
    Piece,
    Port,
    QueuePair,
    VerbsFailure,
    Work,
)

_SIGNALLED: Final = 2  # IBV_SEND_SIGNALED
_RELIABLE_CONNECTION: Final = 2  # IBV_QPT_RC
_STATE_MASK: Final = 1  # IBV_QP_STATE
_HOP_LIMIT: Final = 64
_RECEIVER_NOT_READY_TIMER: Final = 12  # 0.64 ms (InfiniBand specification 1.4, table 46)
_RETRY_FOREVER: Final = 7  # a receiver that is not ready is asked again without end
_DESCRIPTORS: Final = "/proc/self/fd"


_open: Final[dict[int, object]] = {}
"""What devices that were not closed stand on. The garbage collector frees cycles in any order, and the library would
then free queue pairs and regions of a context that is gone (a crash, seen): better it never goes."""


class PyverbsVerbs:
    """See `verbs.Verbs`."""

    name = "pyverbs"

    def device_names(self) -> list[str]:
        """See `Verbs.device_names`."""
        with _failures("get_device_list", "this machine"):
            return [device.name.decode() for device in get_device_list()]

    def open(self, name: str) -> PyverbsDevice:
        """See `Verbs.open`."""
        if name not in self.device_names():
            raise VerbsFailure("open_device", errno.ENODEV, name)
        with _failures("open_device", name):
            return PyverbsDevice(name, Context(name=name))


class PyverbsDevice:
    """See `verbs.Device`."""

    def __init__(self, name: str, context: Context) -> None:
        self.name = name
        self._context = context
        with _failures("alloc_pd", name):
            self._domain = PD(context)
            found = context.query_device()
            self._chain = _new_chain()
        _open[id(self)] = (context, self._domain)
        self.limits = limits_of(found)

    def port(self, number: int) -> Port:
        """See `Device.port`."""
        with _failures("query_port", f"port {number} of {self.name}"):
            return port_of(number, self._context.query_port(number))

    def gid(self, port: int, index: int) -> bytes:
        """See `Device.gid`."""
        with _failures("query_gid", f"GID {index} of port {port} of {self.name}"):
            return ipaddress.IPv6Address(self._context.query_gid(port, index).gid).packed

    def register(self, address: int, length_bytes: int, access: Access) -> MemoryRegion:
        """See `Device.register`."""
        about = f"{length_bytes} bytes on {self.name}"
        if not address:
            raise VerbsFailure("reg_mr", errno.EFAULT, about)  # pyverbs would take memory of its own
        with _failures("reg_mr", about):
            return PyverbsRegion(MR(self._domain, length_bytes, int(access), address=address), address, length_bytes)

    def register_dmabuf(self, descriptor: int, *, offset_bytes: int, length_bytes: int, access: Access) -> MemoryRegion:
        """See `Device.register_dmabuf`."""
        with _failures("reg_dmabuf_mr", f"{length_bytes} bytes of descriptor {descriptor} on {self.name}"):
            made = DmaBufMR(self._domain, length_bytes, int(access), descriptor, offset=offset_bytes)
        return PyverbsRegion(made, offset_bytes, length_bytes)

    def completion_queue(self, count: int) -> CompletionQueue:
        """See `Device.completion_queue`."""
        with _failures("create_cq", f"{count} completions on {self.name}"):
            channel, descriptor = _open_channel(self._context)
            return PyverbsCompletions(CQ(self._context, count, None, channel, 0), channel, descriptor)

    def queue_pair(self, completions: CompletionQueue, *, sends_max: int, receives_max: int) -> QueuePair:
        """See `Device.queue_pair`."""
        assert isinstance(completions, PyverbsCompletions), "of this device"
        with _failures("create_qp", f"{sends_max} sends and {receives_max} receives on {self.name}"):
            room = QPCap(max_send_wr=sends_max, max_recv_wr=max(1, receives_max), max_send_sge=1, max_recv_sge=1)
            queue = completions.queue
            wanted = QPInitAttr(qp_type=_RELIABLE_CONNECTION, scq=queue, rcq=queue, cap=room, sq_sig_all=0)
            return PyverbsPair(QP(self._domain, wanted), self._chain)

    def close(self) -> None:
        """See `Device.close`."""
        with _failures("close_device", self.name):
            self._domain.close()
            self._context.close()
        _open.pop(id(self), None)


class PyverbsRegion:
    """See `verbs.MemoryRegion`."""

    __slots__ = ("_region", "address", "length_bytes", "local_key", "remote_key")

    def __init__(self, region: MR, address: int, length_bytes: int) -> None:
        self._region = region
        self.address = address
        self.length_bytes = length_bytes
        self.local_key = int(region.lkey)
        self.remote_key = int(region.rkey)

    def close(self) -> None:
        """See `MemoryRegion.close`."""
        with _failures("dereg_mr", f"{self.length_bytes} bytes"):
            self._region.close()


class PyverbsCompletions:
    """See `verbs.CompletionQueue`."""

    __slots__ = ("_channel", "_descriptor", "queue")

    def __init__(self, queue: CQ, channel: CompChannel, descriptor: int) -> None:
        self.queue = queue
        self._channel = channel
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        """See `CompletionQueue.fileno`."""
        return self._descriptor

    def arm(self) -> None:
        """See `CompletionQueue.arm`."""
        with _failures("req_notify_cq", "a completion queue"):
            self.queue.req_notify()

    def take_events(self) -> None:
        """See `CompletionQueue.take_events`."""
        count = 0
        try:
            while True:
                self._channel.get_cq_event(self.queue)
                count += 1
        except PyverbsRDMAError as error:
            if error.error_code not in (errno.EAGAIN, errno.EINTR):
                raise VerbsFailure("get_cq_event", error.error_code, "a completion queue") from None
        if count:
            self.queue.ack_events(count)

    def poll(self, count: int) -> list[Completion]:
        """See `CompletionQueue.poll`."""
        with _failures("poll_cq", "a completion queue"):
            _, found = self.queue.poll(count)
        return [Completion(one.wr_id, int(one.status), one.qp_num, one.byte_len) for one in found]

    def close(self) -> None:
        """See `CompletionQueue.close`."""
        with _failures("destroy_cq", "a completion queue"):
            self.queue.close()
            self._channel.close()


class PyverbsPair:
    """See `verbs.QueuePair`."""

    __slots__ = ("_chain", "_pair", "number")

    def __init__(self, pair: QP, chain: list[tuple[SendWR, SGE]]) -> None:
        self._pair = pair
        self.number = int(pair.qp_num)
        self._chain = chain

    def state(self) -> int:
        """See `QueuePair.state`."""
        with _failures("query_qp", f"queue pair {self.number}"):
            found, _ = self._pair.query(_STATE_MASK)
        return int(found.qp_state)

    def connect(self, path: PairPath) -> None:
        """See `QueuePair.connect`."""
        remote = path.remote
        is_global = remote.gid != bytes(len(remote.gid))
        with _failures("modify_qp", f"queue pair {self.number} to {remote}"):
            route = GlobalRoute(
                dgid=GID(str(ipaddress.IPv6Address(remote.gid).exploded)),
                sgid_index=path.gid_index,
                hop_limit=_HOP_LIMIT,
                traffic_class=path.traffic_class,
            )
            wanted = QPAttr(port_num=path.port)
            wanted.ah_attr = AHAttr(
                port_num=path.port, is_global=int(is_global), gr=route, dlid=remote.lid, sl=path.service_level
            )
            wanted.qp_access_flags = int(path.remote_access)
            wanted.path_mtu = MTU_CODES[path.mtu_bytes]
            wanted.dest_qp_num = remote.number
            wanted.rq_psn = remote.packet_number
            wanted.sq_psn = path.packet_number
            wanted.max_rd_atomic = path.reads_out
            wanted.max_dest_rd_atomic = path.reads_in
            wanted.min_rnr_timer = _RECEIVER_NOT_READY_TIMER
            wanted.timeout = path.timeout_exponent
            wanted.retry_cnt = path.retry_count
            wanted.rnr_retry = _RETRY_FOREVER
            self._pair.to_rts(wanted)

    def fail(self) -> None:
        """See `QueuePair.fail`."""
        with _failures("modify_qp", f"queue pair {self.number}"):
            self._pair.modify(QPAttr(qp_state=int(PairState.ERROR)), _STATE_MASK)

    def post(self, kind: Work, pieces: Sequence[Piece], work_id: int) -> None:
        """See `QueuePair.post`."""
        # always the end of the chain, since the last request of all is the one that names no next
        chain, opcode = self._chain[len(self._chain) - len(pieces) :], int(kind)
        for (request, entry), (address, length, key, remote, remote_key) in zip(chain, pieces, strict=True):
            entry.addr = address
            entry.length = length
            entry.lkey = key
            request.opcode = opcode
            request.set_wr_rdma(remote_key, remote)
        chain[-1][0].wr_id = work_id  # the same one always: the others keep their 0
        try:
            self._pair.post_send(chain[0][0])
        except PyverbsRDMAError as error:
            raise VerbsFailure("post_send", error.error_code, f"queue pair {self.number}") from None

    def post_receive(self, piece: Piece, work_id: int) -> None:
        """See `QueuePair.post_receive`."""
        address, length, key, _, _ = piece
        with _failures("post_recv", f"queue pair {self.number}"):
            entry = SGE(address, length, key)
            request = RecvWR(wr_id=work_id, num_sge=1, sg=[entry])
            try:
                self._pair.post_recv(request)
            finally:
                entry.close()
                request.close()

    def close(self) -> None:
        """See `QueuePair.close`."""
        status = destroy_unlocked(self._pair, self.number)
        if status:
            raise VerbsFailure("destroy_qp", status, f"queue pair {self.number}")
        with _failures("destroy_qp", f"queue pair {self.number}"):
            self._pair.close()  # does nothing to one that is closed


class _Nowhere:
    """Takes posts, and does nothing."""

    qp_num = 0

    def post_send(self, requests: object) -> None:
        """See the library."""


def dry_pair() -> QueuePair:
    """A queue pair whose posts go nowhere: what is left of their cost is Python's."""
    return PyverbsPair(_Nowhere(), _new_chain())


def _new_chain() -> list[tuple[SendWR, SGE]]:
    """CHAIN_REQUESTS_MAX work requests, each naming the next and its own entry; only the last is signalled."""
    chain: list[tuple[SendWR, SGE]] = []
    for position in range(CHAIN_REQUESTS_MAX):
        entry = SGE(0, 0, 0)
        flags = _SIGNALLED if position == CHAIN_REQUESTS_MAX - 1 else 0
        request = SendWR(num_sge=1, sg=[entry], send_flags=flags)
        request.sg_list = entry  # itself, not the copy that it made
        if chain:
            chain[-1][0].next_wr = request
        chain.append((request, entry))
    return chain


def _open_channel(context: Context) -> tuple[CompChannel, int]:
    """A channel and its descriptor, which rdma-core 44 keeps to itself: it is the one that was not there before."""
    before = _event_descriptors()
    channel = CompChannel(context)
    known = getattr(channel, "fd", None)
    if known is not None:
        return channel, int(known)
    made = _event_descriptors() - before
    if len(made) != 1:
        channel.close()
        raise VerbsFailure("create_comp_channel", errno.EBADF, f"a channel that is one of {made}; install ibverbs")
    return channel, made.pop()


def _event_descriptors() -> set[int]:
    """Descriptors of this process that tell events of RDMA devices."""
    found = set()
    for name in os.listdir(_DESCRIPTORS):
        try:
            if "infinibandevent" in os.readlink(f"{_DESCRIPTORS}/{name}"):
                found.add(int(name))
        except FileNotFoundError:
            continue  # that of the listing itself
    return found


@contextmanager
def _failures(verb: str, about: str) -> Iterator[None]:
    try:
        yield
    except PyverbsRDMAError as error:
        raise VerbsFailure(verb, error.error_code, about) from None
    except PyverbsError as error:
        raise VerbsFailure(verb, 0, f"{about} ({error})") from None

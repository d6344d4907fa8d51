"""Verbs by the PyPI package `ibverbs`: loads libibverbs when used, and lets go of the GIL while a verb runs."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import ibverbs

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

_SIGNALLED: Final = int(ibverbs.SendFlags.SIGNALED)
_HOP_LIMIT: Final = 64
_RECEIVER_NOT_READY_TIMER: Final = 12  # 0.64 ms (InfiniBand specification 1.4, table 46)
_RETRY_FOREVER: Final = 7  # a receiver that is not ready is asked again without end


class IbverbsVerbs:
    """See `verbs.Verbs`."""

    name = "ibverbs"

    def device_names(self) -> list[str]:
        """See `Verbs.device_names`."""
        with _failures("get_device_list", "this machine"):
            return [device.name for device in ibverbs.get_device_list()]

    def open(self, name: str) -> IbverbsDevice:
        """See `Verbs.open`."""
        with _failures("open_device", name):
            for device in ibverbs.get_device_list():
                if device.name == name:
                    return IbverbsDevice(name, device.open())
        raise VerbsFailure("open_device", errno.ENODEV, name)


class IbverbsDevice:
    """See `verbs.Device`."""

    def __init__(self, name: str, context: ibverbs.Context) -> None:
        self.name = name
        self._context = context
        with _failures("alloc_pd", name):
            self._domain = context.alloc_pd()
            found = context.query_device()
        _make_immortal(context)
        _make_immortal(self._domain)
        self.limits = limits_of(found)

    def port(self, number: int) -> Port:
        """See `Device.port`."""
        with _failures("query_port", f"port {number} of {self.name}"):
            return port_of(number, self._context.query_port(number))

    def gid(self, port: int, index: int) -> bytes:
        """See `Device.gid`."""
        with _failures("query_gid", f"GID {index} of port {port} of {self.name}"):
            return bytes(self._context.query_gid(port, index).raw)

    def register(self, address: int, length_bytes: int, access: Access) -> MemoryRegion:
        """See `Device.register`."""
        with _failures("reg_mr", f"{length_bytes} bytes on {self.name}"):
            return IbverbsRegion(self._domain.reg_mr(address, length_bytes, int(access)), address)

    def register_dmabuf(self, descriptor: int, *, offset_bytes: int, length_bytes: int, access: Access) -> MemoryRegion:
        """See `Device.register_dmabuf`."""
        with _failures("reg_dmabuf_mr", f"{length_bytes} bytes of descriptor {descriptor} on {self.name}"):
            made = self._domain.reg_dmabuf_mr(offset_bytes, length_bytes, offset_bytes, descriptor, int(access))
        return IbverbsRegion(made, offset_bytes)

    def completion_queue(self, count: int) -> CompletionQueue:
        """See `Device.completion_queue`."""
        with _failures("create_cq", f"{count} completions on {self.name}"):
            channel = self._context.create_comp_channel()
            return IbverbsCompletions(self._context.create_cq(count, channel), channel)

    def queue_pair(self, completions: CompletionQueue, *, sends_max: int, receives_max: int) -> QueuePair:
        """See `Device.queue_pair`."""
        assert isinstance(completions, IbverbsCompletions), "of this device"
        with _failures("create_qp", f"{sends_max} sends and {receives_max} receives on {self.name}"):
            wanted = ibverbs.QPInitAttr(
                send_cq=completions.queue,
                recv_cq=completions.queue,
                max_send_wr=sends_max,
                max_recv_wr=max(1, receives_max),
            )
            return IbverbsPair(self._domain.create_qp(wanted))

    def close(self) -> None:
        """See `Device.close`."""
        with _failures("close_device", self.name):
            self._domain.close()
            self._context.close()


class IbverbsRegion:
    """See `verbs.MemoryRegion`."""

    __slots__ = ("_region", "address", "length_bytes", "local_key", "remote_key")

    def __init__(self, region: ibverbs.MR, address: int) -> None:
        self._region = region
        self.address = address
        self.length_bytes = int(region.length)
        self.local_key = int(region.lkey)
        self.remote_key = int(region.rkey)

    def close(self) -> None:
        """See `MemoryRegion.close`."""
        with _failures("dereg_mr", f"{self.length_bytes} bytes"):
            self._region.close()


class IbverbsCompletions:
    """See `verbs.CompletionQueue`."""

    __slots__ = ("_channel", "queue")

    def __init__(self, queue: ibverbs.CQ, channel: ibverbs.CompChannel) -> None:
        self.queue = queue
        self._channel = channel
        os.set_blocking(channel.fd, False)

    def fileno(self) -> int:
        """See `CompletionQueue.fileno`."""
        return int(self._channel.fd)

    def arm(self) -> None:
        """See `CompletionQueue.arm`."""
        with _failures("req_notify_cq", "a completion queue"):
            self.queue.req_notify()

    def take_events(self) -> None:
        """See `CompletionQueue.take_events`."""
        count = 0
        try:
            while True:
                self._channel.get_cq_event()
                count += 1
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EINTR):
                raise VerbsFailure("get_cq_event", error.errno or 0, "a completion queue") from None
        if count:
            self.queue.ack_events(count)

    def poll(self, count: int) -> list[Completion]:
        """See `CompletionQueue.poll`."""
        with _failures("poll_cq", "a completion queue"):
            found = self.queue.poll(count)
        return [Completion(one.wr_id, int(one.status), one.qp_num, one.byte_len) for one in found]

    def close(self) -> None:
        """See `CompletionQueue.close`."""
        with _failures("destroy_cq", "a completion queue"):
            self.queue.close()
            self._channel.close()


class IbverbsPair:
    """See `verbs.QueuePair`."""

    __slots__ = ("_pair", "number")

    def __init__(self, pair: ibverbs.QP) -> None:
        self._pair = pair
        self.number = int(pair.qp_num)

    def state(self) -> int:
        """See `QueuePair.state`."""
        with _failures("query_qp", f"queue pair {self.number}"):
            self._pair.query()  # else `state` is what this process set last
            return int(self._pair.state)

    def connect(self, path: PairPath) -> None:
        """See `QueuePair.connect`."""
        remote = path.remote
        end = ibverbs.QPInfo(
            qp_num=remote.number,
            psn=remote.packet_number,
            lid=remote.lid,
            gid=remote.gid,
            port=path.port,
            mtu=MTU_CODES[path.mtu_bytes],
        )
        with _failures("modify_qp", f"queue pair {self.number} to {end}"):
            self._pair.to_init(path.port, int(path.remote_access))
            self._pair.to_rtr(
                end,
                sgid_index=path.gid_index,
                mtu=MTU_CODES[path.mtu_bytes],
                hop_limit=_HOP_LIMIT,
                min_rnr_timer=_RECEIVER_NOT_READY_TIMER,
                max_dest_rd_atomic=path.reads_in,
                sl=path.service_level,
                traffic_class=path.traffic_class,
            )
            self._pair.to_rts(
                path.packet_number,
                timeout=path.timeout_exponent,
                retry_cnt=path.retry_count,
                rnr_retry=_RETRY_FOREVER,
                max_rd_atomic=path.reads_out,
            )

    def fail(self) -> None:
        """See `QueuePair.fail`."""
        with _failures("modify_qp", f"queue pair {self.number}"):
            self._pair.modify(int(ibverbs.QPAttrMask.STATE), qp_state=int(PairState.ERROR))

    def post(self, kind: Work, pieces: Sequence[Piece], work_id: int) -> None:
        """See `QueuePair.post`."""
        request, entry, opcode = ibverbs.SendWR, ibverbs.SGE, int(kind)
        chain = [
            request(0, [entry(address, length, key)], opcode, 0, remote, remote_key)
            for address, length, key, remote, remote_key in pieces
        ]
        chain[-1].wr_id = work_id
        chain[-1].send_flags = _SIGNALLED
        try:
            self._pair.post_send(chain)
        except OSError as error:
            raise VerbsFailure("post_send", error.errno or 0, f"queue pair {self.number}") from None

    def post_receive(self, piece: Piece, work_id: int) -> None:
        """See `QueuePair.post_receive`."""
        with _failures("post_recv", f"queue pair {self.number}"):
            self._pair.post_recv(ibverbs.RecvWR(work_id, [ibverbs.SGE(*piece[:3])]))

    def close(self) -> None:
        """See `QueuePair.close`."""
        status = destroy_unlocked(self._pair, self.number)
        if status:
            raise VerbsFailure("destroy_qp", status, f"queue pair {self.number}")
        with _failures("destroy_qp", f"queue pair {self.number}"):
            self._pair.close()  # does nothing to one that is closed


def _make_immortal(thing: object) -> None:
    """Never frees it: two small objects for each device that a process opens, closed or not.

    Whoever forgets to close a device, or fails to, leaves it to the garbage collector or the interpreter's end, which
    free in any order; the library then deregisters memory of a context that is gone, and crashes (seen).
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class _Nowhere:
    """Takes posts, and does nothing."""

    qp_num = 0

    def post_send(self, requests: object) -> None:
        """See the library."""


def dry_pair() -> QueuePair:
    """A queue pair whose posts go nowhere: what is left of their cost is Python's."""
    return IbverbsPair(_Nowhere())


@contextmanager
def _failures(verb: str, about: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise VerbsFailure(verb, error.errno or 0, about) from None

"""TCP passes the conformance suite of transports; and what is TCP's alone: addresses, options, errors by name."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import pytest

from kvstore.errors import DeadlineExceeded, InvalidRequest, Unavailable
from kvstore.limits import FRAME_BODY_BYTES_MAX, SLICE_BYTES_MAX
from kvstore.server.batch import unpack_u32
from kvstore.testing.transport_suite import Conditions, Joint, TransportSuite
from kvstore.transport.base import NodeChannel
from kvstore.transport.tcp import TcpChannel, address_of, connect_tcp, listen_tcp, tune
from kvstore.transport.tcp_node import TcpNodeChannel
from kvstore.wire.frames import Frame, FrameReader
from kvstore.wire.header import FrameType
from kvstore.wire.messages import Grant, Ping
from kvstore.wire.slices import NO_CONTENT_ID, Slice


class Stepping(socket.socket):
    """A socket that receives at most so many bytes at once."""

    step_bytes = 0

    def recv_into(self, buffer: memoryview, *_: int) -> int:  # type: ignore[override]
        return super().recv_into(buffer, min(self.step_bytes, len(buffer)))

    def recvmsg_into(self, buffers: Sequence[memoryview], *_: int):  # type: ignore[no-untyped-def, override]
        return super().recvmsg_into([buffers[0][: self.step_bytes]])


def loopback_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection."""
    with listen_tcp("127.0.0.1", 0) as listening:
        ours = connect_tcp("127.0.0.1", listening.getsockname()[1], timeout_ns=10**10)
        listening.setblocking(True)
        theirs, _ = listening.accept()
    return ours, theirs


class TcpJoint:
    """Two ends of one loopback connection. The node's `Other` lets all DATA of the current request through."""

    def __init__(self, conditions: Conditions) -> None:
        # between TCP sockets, buffers below a segment stall on delayed acknowledgements: Unix sockets have none
        ours, theirs = socket.socketpair() if conditions.buffer_bytes else loopback_pair()
        self._node_socket, client_socket = self._under(conditions, theirs), self._under(conditions, ours)
        self._node = TcpNodeChannel(self._node_socket, self, body_bytes_max=FRAME_BODY_BYTES_MAX)
        self.node: NodeChannel = self._node
        self._client = TcpChannel(client_socket, FrameReader(self))
        if conditions.buffer_bytes:
            for end in (self._node_socket, client_socket):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, conditions.buffer_bytes)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, conditions.buffer_bytes)
        self.arrived: list[Slice] = []
        self._memory: Callable[[Slice], Sequence[memoryview]] = lambda one: []
        self._offers: dict[int, Sequence[memoryview]] = {}
        self._granted_id = 0

    def _under(self, conditions: Conditions, made: socket.socket) -> socket.socket:
        if not conditions.step_bytes:
            return made
        stepping = Stepping(fileno=made.detach())
        stepping.step_bytes = conditions.step_bytes
        return stepping

    # --- Joint ------------------------------------------------------------------------------------------------------
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

    # --- the two ends -----------------------------------------------------------------------------------------------
    def _take(self, frame: Frame) -> None:
        self.arrived += frame.slices
        if frame.type is FrameType.GRANT:
            self._granted_id = frame.request_id
            for item in unpack_u32(Grant.decode(frame.body).items):
                self._send(item, self._offers[item], frame.request_id)

    def _send(self, item: int, fragments: Sequence[memoryview], request_id: int) -> None:
        total = sum(map(len, fragments))
        for at in range(0, total, SLICE_BYTES_MAX):
            length = min(SLICE_BYTES_MAX, total - at)
            one = Slice(item, at, length, 0, at + length == total, NO_CONTENT_ID, total, 4096, b"")
            self._client.writer.push_slices([one], cut(fragments, at, length), request_id, payload_bytes=length)

    def place(self, frame: Frame) -> Sequence[memoryview]:
        return [view for one in frame.slices for view in self._memory(one)]

    def place_other(self, frame: Frame) -> Sequence[memoryview] | None:
        raise InvalidRequest(f"{frame.type.name} is not expected")

    def accepts_data(self, frame: Frame) -> bool:
        return bool(self._node._landings)


def cut(fragments: Sequence[memoryview], start: int, length: int) -> list[memoryview]:
    """Bytes start..start + length of fragments, as views of them."""
    pieces = []
    at = 0
    for fragment in fragments:
        low, high = max(start - at, 0), min(start + length - at, len(fragment))
        if low < high:
            pieces.append(fragment[low:high])
        at += len(fragment)
    return pieces


class TestTcp(TransportSuite):
    def join(self, conditions: Conditions) -> Joint:
        return TcpJoint(conditions)


def test_addresses_that_cannot_be_used_say_what_to_change() -> None:
    with listen_tcp("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert address_of(taken) == f"127.0.0.1:{port}"
        with pytest.raises(Unavailable, match=f"port {port}"):
            listen_tcp("127.0.0.1", port)
    with pytest.raises(InvalidRequest, match=r"203\.0\.113\.7"):
        listen_tcp("203.0.113.7", 0)
    with pytest.raises(Unavailable, match="cannot be reached"):
        connect_tcp("127.0.0.1", port, timeout_ns=10**9)


def test_a_peer_that_does_not_answer_is_a_deadline() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting: list[socket.socket] = []

        def fill() -> None:
            while len(waiting) < 8:
                waiting.append(connect_tcp(*address, timeout_ns=10**8))

        with pytest.raises(DeadlineExceeded, match="did not answer"):
            fill()
        for one in waiting:
            one.close()


def test_ipv6_addresses_are_bracketed() -> None:
    with socket.socket(socket.AF_INET6) as bound:
        bound.bind(("::1", 0))
        assert address_of(bound) == f"[::1]:{bound.getsockname()[1]}"


def test_nothing_is_paced_on_one_host() -> None:
    ends = loopback_pair()
    for end in ends:
        tune(end)
        chosen = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert chosen.rstrip(b"\0") == b"reno"
        end.close()


def test_a_broken_connection_is_unavailable_by_errno_name() -> None:
    ours, theirs = socket.socketpair()
    channel = TcpChannel(ours, FrameReader())
    theirs.close()
    channel.send(Ping(), 1)
    with pytest.raises(Unavailable, match="EPIPE"):
        channel.on_writable()
    with pytest.raises(Unavailable, match="closed the connection"):
        channel.on_readable()
    channel.close()
    assert channel.pending_bytes == 0

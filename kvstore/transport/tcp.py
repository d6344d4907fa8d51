"""Frames over a stream socket, TCP or Unix: scatter-gather both ways, payload straight to and from its memory.

Receiving is one `recvmsg_into` for each readiness event, the payload's remaining destination first and a read-ahead
buffer behind it. Sending is `sendmsg` over the queue of iovecs. Neither side copies payload in Python.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
import termios
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.errors import DeadlineExceeded, InvalidRequest, Unavailable
from kvstore.limits import IO_VECTORS_MAX, SECOND_NS
from kvstore.transport.exchange import OnDescriptors
from kvstore.transport.outflow import Outflow
from kvstore.wire.frames import Frame, FrameReader, FrameWriter
from kvstore.wire.schema import Message

assert os.sysconf("SC_IOV_MAX") >= IO_VECTORS_MAX, "sendmsg(2) would refuse our longest list of iovecs"

LISTEN_BACKLOG: Final = 1024
LOOPBACK_SEND_BUFFER_BYTES: Final = 384 * 1024
"""1 MiB x32 over loopback: 0.98 of a raw pair at 0.49 CPU s/GB with 256 to 384 KiB, 0.82 at 0.59 with the kernel's own
sizing, 0.63 with 128 KiB, interleaved on 2 cores."""
_UNPACED: Final = b"reno"
"""In every kernel, and allowed for every user. With bbr, which paces, a client took .38 s/GB to put and not .29."""
_RETRY: Final = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR, errno.ENOBUFS})
_SENDS_PER_EVENT_MAX: Final = 8
_SOCKET: Final = socket.SOL_SOCKET
_DISCARD_BYTES: Final = 64 * 1024


class TcpChannel:
    """One connected socket, which it owns and makes non-blocking. See `kvstore.transport.base.Channel`."""

    __slots__ = (
        "_has_broken",
        "_leave_bytes",
        "_outflow",
        "_peer",
        "_received_bytes",
        "_socket",
        "reader",
        "writer",
    )

    def __init__(self, connected: socket.socket, reader: FrameReader, writer: FrameWriter | None = None) -> None:
        """
        Args:
            connected: TCP or Unix stream socket.
            reader: With the sink that knows where payload belongs.
            writer: A new one by default.
        """
        connected.setblocking(False)
        tune(connected)
        self._socket = connected
        self._peer = _peer_of(connected)
        self._received_bytes = 0  # by `on_readable`
        self._has_broken = False
        self._outflow: Outflow | None = None  # to whom it is lent
        self._leave_bytes = 0
        self.reader = reader
        self.writer = writer or FrameWriter()

    def fileno(self) -> int:
        """For select or epoll; -1 once closed."""
        return self._socket.fileno()

    @property
    def peer(self) -> str:
        """ "host:port" of the other side, for messages."""
        return self._peer

    @property
    def pending_bytes(self) -> int:
        """Queued and not taken by the kernel yet."""
        return self.writer.pending_bytes + self.writer.sent_bytes - self.sent_bytes

    @property
    def sent_bytes(self) -> int:
        """Taken by the kernel so far."""
        outflow = self._outflow
        return self.writer.sent_bytes + (0 if outflow is None else outflow.sent_bytes(self._socket.fileno()))

    def on_readable(self) -> list[Frame]:
        """Receives once, as much as the current frame and the read-ahead take. See `Channel.on_readable`."""
        buffers = self.reader.buffers()
        if not buffers:
            return []
        try:
            count = self._socket.recv_into(buffers[0]) if len(buffers) == 1 else self._socket.recvmsg_into(buffers)[0]
        except OSError as error:
            if error.errno in _RETRY:
                return []
            raise self._broken(error) from None
        if not count:
            self.reader.end_of_stream()
            raise Unavailable(f"{self._peer} closed the connection")
        self._received_bytes += count
        return self.reader.advance(count)

    def on_writable(self) -> bool:
        """Sends what is queued. See `Channel.on_writable`."""
        self.take_back()
        writer = self.writer
        for _ in range(_SENDS_PER_EVENT_MAX):
            if not writer.pending_bytes:
                return True
            buffers = writer.buffers()
            try:
                count = self._socket.send(buffers[0]) if len(buffers) == 1 else self._socket.sendmsg(buffers)
            except OSError as error:
                if error.errno in _RETRY:
                    return False
                raise self._broken(error) from None
            pending = writer.pending_bytes
            writer.advance(count)
            if count < pending and len(buffers) < IO_VECTORS_MAX:
                return False  # it took a part, so it is full
        return not writer.pending_bytes

    def send_at_once(
        self, head: bytes, payload: Sequence[memoryview], *, payload_bytes: int, on_sent: Callable[[], None]
    ) -> bool:
        """Sends a frame while nothing is queued, and queues what the kernel does not take of it (False).

        `on_sent` is called as by `FrameWriter.push`. Raises Unavailable after having called it.
        """
        assert not self.writer.pending_bytes, "frames would overtake each other"
        try:
            count = self._socket.sendmsg([head, *payload])
        except OSError as error:
            if error.errno not in _RETRY:
                on_sent()
                raise self._broken(error) from None
            count = 0
        if count == len(head) + payload_bytes:
            on_sent()
            return True
        self.writer.push(head, payload, payload_bytes=payload_bytes, on_sent=on_sent)
        self.writer.advance(count)
        return False

    def lend(self, outflow: Outflow, *, leave_bytes: int) -> None:
        """Lends the socket, which is full and watched for EPOLLOUT, with what is queued.

        Args:
            outflow: of the loop that watches it.
            leave_bytes: what may be left when the loop tells that the socket is writable.
        """
        self.take_back()
        if self.writer.pending_bytes > leave_bytes:
            outflow.lend(self._socket.fileno(), self.writer.buffers(), leave_bytes)
            self._outflow = outflow
            self._leave_bytes = leave_bytes

    def take_back(self) -> bool:
        """The socket is no longer lent; whether it was, and as much has gone out as it was lent for."""
        outflow = self._outflow
        if outflow is None:
            return False
        self._outflow = None
        self.writer.advance(outflow.take_back(self._socket.fileno()))
        return self.writer.pending_bytes <= self._leave_bytes

    @property
    def was_heard(self) -> bool:
        """Before `close`: whether the peer has taken all that was queued, as far as the kernel knows.

        One that closes its socket with something unread resets the connection.
        """
        if self._has_broken or self.writer.pending_bytes or self.fileno() < 0:
            return False
        try:
            unread = fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4))
            return not int.from_bytes(unread, sys.byteorder) and not self._socket.getsockopt(_SOCKET, socket.SO_ERROR)
        except OSError:
            return False

    @property
    def connected(self) -> socket.socket:
        """The socket, for who does with it in one step what is several here; it stays this channel's."""
        return self._socket

    @property
    def on_descriptors(self) -> OnDescriptors | None:
        """Who takes the descriptors that come with the bytes; None where there can't be any."""
        return None

    def took_none(self, error: OSError) -> int:
        """0 after a call that the socket only put off. Raises Unavailable after any other error."""
        if error.errno not in _RETRY:
            raise self._broken(error) from None
        return 0

    def send(self, message: Message, request_id: int, *, epoch: int = 0) -> None:
        """Queues a message."""
        self.writer.push_message(message, request_id, epoch=epoch)

    def end_output(self) -> None:
        """Tells the peer that nothing more will come; it can still read what was sent. Raises Unavailable."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise self._broken(error) from None

    def discard(self) -> bool:
        """Throws away what has arrived; False once the peer has closed. Raises Unavailable."""
        try:
            return bool(self._socket.recv(_DISCARD_BYTES))
        except OSError as error:
            if error.errno in _RETRY:
                return True
            raise self._broken(error) from None

    def close(self) -> None:
        """Closes the socket and drops what is queued. Idempotent."""
        self.take_back()
        self._socket.close()
        self.writer.drop()

    def _broken(self, error: OSError) -> Unavailable:
        self._has_broken = True
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        return Unavailable(f"the connection to {self._peer} broke: {name} ({error.strerror})")


def tune(connected: socket.socket) -> None:
    """Options that both ends of a payload connection want: no delay, and on one host a send buffer that fits the cache.

    Between hosts the kernel sizes the buffer by the path. On loopback it would grow to 4 MiB, and payload would leave
    the CPU's cache before the reader copies it (see LOOPBACK_SEND_BUFFER_BYTES). There it also does without congestion
    control that paces: between two processes is no path to be gentle with, and each timer costs an exit of the VM.
    """
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        is_local = connected.getsockname()[0] == connected.getpeername()[0]
    except OSError:
        return  # it is gone already, as the next read will say
    if is_local:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_SEND_BUFFER_BYTES)
        with contextlib.suppress(OSError):  # where this one may not be chosen
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)


def listen_tcp(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A non-blocking listening socket on one address; port 0 is any free one.

    Raises:
        InvalidRequest: The address cannot be used; the text says what to change.
        Unavailable: Somebody else listens there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((host, port))
        made.listen(LISTEN_BACKLOG)
    except OSError as error:
        made.close()
        kind = Unavailable if error.errno == errno.EADDRINUSE else InvalidRequest
        raise kind(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose a free port and an own address"
        ) from None
    return made


def connect_tcp(host: str, port: int, *, timeout_ns: int) -> socket.socket:
    """A connected socket, blocking until it is there.

    Raises:
        DeadlineExceeded: Nobody answered in time.
        Unavailable: The peer refused, or cannot be reached.
    """
    try:
        return socket.create_connection((host, port), timeout_ns / SECOND_NS)
    except TimeoutError:
        raise DeadlineExceeded(f"{host}:{port} did not answer within {timeout_ns / SECOND_NS:g} s") from None
    except OSError as error:
        raise Unavailable(f"{host}:{port} cannot be reached: {error.strerror or error}") from None


def address_of(bound: socket.socket) -> str:
    """ "host:port" of a bound socket, "[host]:port" for IPv6."""
    name = bound.getsockname()
    return f"[{name[0]}]:{name[1]}" if bound.family == socket.AF_INET6 else f"{name[0]}:{name[1]}"


def _peer_of(connected: socket.socket) -> str:
    if connected.family == socket.AF_UNIX:
        return f"unix socket {connected.fileno()}"
    try:
        name: Sequence[object] = connected.getpeername()
    except OSError:
        return "a peer that is gone"
    return f"{name[0]}:{name[1]}"

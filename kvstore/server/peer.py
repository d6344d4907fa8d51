"""A connection to another worker of the cluster, on this worker's own event loop: calls one after the other.

It speaks the data plane's protocol as a client does. Whatever the other side does ends here at worst: a call that fails
takes its connection with it, and nothing that this worker serves waits for it.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from kvstore.errors import (
    Closed,
    DeadlineExceeded,
    FormatUnsupported,
    Internal,
    InvalidRequest,
    KVStoreError,
    Unavailable,
)
from kvstore.limits import PEER_CALL_NS, PEER_CONNECT_NS, PEER_IDLE_NS
from kvstore.server.loop import BROKEN, READABLE, WRITABLE, Loop
from kvstore.transport.tcp import TcpChannel
from kvstore.types.flow import FlowClass
from kvstore.wire.failures import error_of
from kvstore.wire.frames import Frame, FrameReader
from kvstore.wire.header import VERSION, FrameType
from kvstore.wire.messages import ID_BYTES, ErrorReply, Feature, Hello, Welcome
from kvstore.wire.schema import Message
from kvstore.wire.session import ClientSession, Verdict

log = logging.getLogger(__name__)

SocketAddress = tuple[str, int] | tuple[str, int, int, int]
"""As `socket.getaddrinfo` gives it."""

_UNDER_WAY: Final = frozenset({errno.EINPROGRESS, errno.EAGAIN, errno.EINTR})


class PeerCall(Protocol):
    """One request to another worker. Ends with `arrived` answering True, or with `failed`, once.

    Attributes:
        message: the request.
    """

    @property
    def message(self) -> Message: ...

    def place(self, frame: Frame) -> Sequence[memoryview]:
        """Where the payload of a DATA frame belongs. Raises KVStoreError for a frame that is not what was asked for."""

    def arrived(self, frame: Frame) -> bool:
        """A frame of the answer; True when it was the last. Raises KVStoreError for what should not be in it."""

    def failed(self, error: KVStoreError) -> None:
        """There will be no (further) answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """Who we say that we are.

    Attributes:
        client_id: 16 bytes, random, of this worker's life.
        token: that the cluster's nodes know each other by; empty where none is needed.
    """

    client_id: bytes
    token: bytes = b""


class _State(Enum):
    CONNECTING = "connecting"
    GREETING = "greeting"
    READY = "ready"
    CLOSED = "closed"


class Peer:
    """See the module. Made connected or on its way there.

    Attributes:
        boot_id: of the worker that is expected there; zeros expect anybody.
        epoch: of the other side's view, as its last frame said.
    """

    def __init__(
        self,
        loop: Loop,
        family: int,
        address: SocketAddress,
        *,
        greeting: Greeting,
        boot_id: bytes,
        on_closed: Callable[[Peer, KVStoreError], None],
        clock: Callable[[], int],
    ) -> None:
        """
        Args:
            boot_id: 16 bytes, see the attribute.
            on_closed: called once, before the calls in progress are told, when nothing more will come of it.
            clock: the time of this turn of the loop.

        Raises:
            Unavailable: No connection can even be begun.
        """
        self._loop = loop
        self._greeting = greeting
        self.boot_id = boot_id
        self._on_closed = on_closed
        self._session = ClientSession()
        self._calls: deque[PeerCall] = deque()
        self._call: PeerCall | None = None
        self._channel: TcpChannel | None = None
        self._interest = WRITABLE
        self._clock = clock
        self._due_ns = clock() + PEER_CONNECT_NS
        self._state = _State.CONNECTING
        self.epoch = 0
        self.name = f"{address[0]}:{address[1]}"
        self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        code = self._socket.connect_ex(address)
        if code and code not in _UNDER_WAY:
            self._socket.close()
            raise Unavailable(f"{self.name} cannot be reached: {errno.errorcode.get(code, code)}")
        loop.watch(self._socket.fileno(), self._on_event, WRITABLE)

    # --- asking -----------------------------------------------------------------------------------------------------
    def ask(self, call: PeerCall) -> None:
        """Carry out a call when those before it have ended. Raises Closed."""
        if self._state is _State.CLOSED:
            raise Closed(f"the connection to {self.name} is closed")
        self._calls.append(call)
        self._guard(self._begin_next)

    @property
    def is_idle(self) -> bool:
        """Nothing was asked that is not answered."""
        return self._call is None and not self._calls

    @property
    def is_closed(self) -> bool:
        """Nothing more will come of it."""
        return self._state is _State.CLOSED

    @property
    def due_ns(self) -> int:
        """When `expire` has something to do, unless something arrives before."""
        return self._due_ns

    def expire(self, now_ns: int) -> None:
        """The time for what is in progress is over, or nobody has asked for anything for long."""
        if now_ns < self._due_ns or self._state is _State.CLOSED:
            return
        if self._state is _State.READY and self.is_idle:
            self.close(Closed(f"the connection to {self.name} was idle"))
        else:
            self.close(DeadlineExceeded(f"{self.name} was silent for too long while {self._state.value}"))

    def close(self, error: KVStoreError) -> None:
        """End all calls with this error, and the connection. Idempotent."""
        if self._state is _State.CLOSED:
            return
        self._state = _State.CLOSED
        self._loop.forget(self._socket.fileno())
        self._session.close()
        if self._channel is not None:
            self._channel.close()
        self._socket.close()
        calls = [*([self._call] if self._call is not None else []), *self._calls]
        self._call = None
        self._calls.clear()
        self._on_closed(self, error)
        for call in calls:
            call.failed(error)

    def _begin_next(self) -> None:
        channel = self._channel
        if self._state is not _State.READY or self._call is not None or channel is None:
            return
        if not self._calls:
            self._due_ns = self._clock() + PEER_IDLE_NS
            return
        call = self._call = self._calls.popleft()
        self._due_ns = self._clock() + PEER_CALL_NS
        message = call.message
        channel.send(message, self._session.start(message.TYPE))
        self._send(channel)

    # --- the socket -------------------------------------------------------------------------------------------------
    def _on_event(self, events: int) -> None:
        self._guard(lambda: self._move(events))

    def _guard(self, work: Callable[[], None]) -> None:
        """Runs what the other side has caused; every fault that it ends with closes the connection."""
        try:
            work()
        except KVStoreError as error:
            self.close(error)
        except OSError as error:
            self.close(Unavailable(f"the connection to {self.name} broke: {error.strerror or error}"))
        except Exception:
            log.exception("a call to %s ended with a defect of this program", self.name)
            self.close(Internal(f"a call to {self.name} ended with a defect of this program"))

    def _move(self, events: int) -> None:
        if self._state is _State.CONNECTING:
            self._connected()
            return
        channel = self._channel
        assert channel is not None, "made when the connection is"
        if events & WRITABLE:
            self._send(channel)
        if events & (READABLE | BROKEN):
            for frame in channel.on_readable():
                if self._state is _State.CLOSED:
                    return
                self._take(frame)
            failure = channel.reader.failure
            if failure is not None and self._state is not _State.CLOSED:
                raise failure

    def _connected(self) -> None:
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise Unavailable(f"{self.name} cannot be reached: {errno.errorcode.get(code, code)}")
        channel = self._channel = TcpChannel(self._socket, FrameReader(self))
        self._state = _State.GREETING
        hello = Hello(
            version_min=VERSION,
            version_max=VERSION,
            features=Feature.PULL,
            client_id=self._greeting.client_id,
            boot_id=self.boot_id,
            token=self._greeting.token,
            flow=FlowClass.BACKGROUND,
        )
        channel.send(hello, self._session.hello())
        self._send(channel)

    def _send(self, channel: TcpChannel) -> None:
        interest = READABLE if channel.on_writable() else READABLE | WRITABLE
        if interest != self._interest:
            self._interest = interest
            self._loop.change(channel.fileno(), interest)

    def place(self, frame: Frame) -> Sequence[memoryview]:
        """See `PayloadSink`."""
        if self._call is None or frame.type is not FrameType.DATA or frame.request_id != self._session.request_id:
            raise InvalidRequest(f"{self.name} sends payload that nobody asked for")
        return self._call.place(frame)

    def _take(self, frame: Frame) -> None:
        if self._session.receive(frame.type, frame.request_id, is_final=frame.is_final) is Verdict.IGNORE:
            return
        self.epoch = max(self.epoch, frame.epoch)
        if frame.type is FrameType.ERROR:
            self._refused(ErrorReply.decode(frame.body))
        elif self._state is _State.GREETING:
            self._greeted(Welcome.decode(frame.body))
        elif self._call is not None:
            self._due_ns = self._clock() + PEER_CALL_NS  # it goes on: a long answer is no silence
            if self._call.arrived(frame):
                self._call = None
        self._begin_next()

    def _refused(self, reply: ErrorReply) -> None:
        """The node refused the call, or the connection."""
        error = error_of(reply.code, reply.text)
        if reply.closing or self._call is None:
            raise error
        call, self._call = self._call, None
        call.failed(error)

    def _greeted(self, welcome: Welcome) -> None:
        if self.boot_id != bytes(ID_BYTES) and welcome.boot_id != self.boot_id:
            raise Unavailable(
                f"{self.name} is another worker than the view says, or was started again: its boot id is "
                f"{welcome.boot_id.hex()}, not {self.boot_id.hex()}"
            )
        if not welcome.features & Feature.PULL:
            raise FormatUnsupported(f"node {welcome.node_id} at {self.name} keeps no copies: upgrade it")
        self._state = _State.READY

"""One connection to a worker or supervisor, over TCP or a Unix socket of this host, driven by generators.

A generator does its I/O on the connection's socket and yields READ or WRITE when it must wait for it; who drives it
(a thread, a selector loop, asyncio) waits and goes on. In blocking mode it never yields for payload: the kernel waits,
with the call's deadline as its timeout, and one `recvmsg` brings a whole frame.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator, Sequence
from typing import Final, TypeVar

from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, Unavailable
from kvstore.limits import CONNECT_NS_MAX, DRAIN_BYTES_MAX, DRAIN_NS_MAX, SECOND_NS, SLICE_BYTES_MAX
from kvstore.transport.exchange import handle_of
from kvstore.types.flow import FlowClass
from kvstore.wire.failures import error_of
from kvstore.wire.frames import Frame, FrameReader, FrameWriter
from kvstore.wire.header import HEADER_BYTES, VERSION, FrameType, encode_head
from kvstore.wire.messages import Cancel, ErrorReply, Feature, Hello, Welcome
from kvstore.wire.pairs import Lost
from kvstore.wire.schema import Message
from kvstore.wire.session import ClientSession, State, Verdict
from kvstore_client.dial import dial
from kvstore_client.parties import Greeting, PayloadOwner
from kvstore_client.rdma_places import join_rdma
from kvstore_client.shm_places import ConnectionRegions, Reach, learn_way, send_with_descriptor
from kvstore_client.waiting import (
    READ,
    WAIT_ALL_BYTES_MAX,
    WAIT_ALL_BYTES_MIN,
    WRITE,
    Quick,
    Steps,
    fill,
    first_bytes,
    set_timeout,
)

__all__ = ["READ", "WRITE", "Connection", "Steps"]

_FEATURES: Final = Feature.FINAL_DATA | Feature.DATA_CRCS | Feature.PULL | Feature.READER_CHECKS
_DRAINABLE: Final = frozenset({State.READ, State.ANSWER})
M = TypeVar("M", bound=Message)


class Connection:
    """A socket with its session. Owned by one call at a time; not thread-safe but for `interrupt`.

    Attributes:
        asked_ns: When the call in progress began; see `has_heard`.
        blocking: True lets the kernel wait; False yields instead.
        connect_ns_max: How long opening it may take.
        deadline_ns: Monotonic; blocking waits end there with DeadlineExceeded.
        ends_with_data: The node may end a read of hits with its last DATA frame.
        is_fresh: False once it served a call: then a break may only mean that the node was restarted meanwhile.
        is_abandoned: Its last call was given up, and the rest of the answer is still on its way; see `abandon`.
        has_heard: True once any byte of the answer to the current call has arrived.
        idle_since_ns: When the last call ended.
        pause_ns: How long an answer may stand still, where there is another way to the node; 0 is until the deadline.
        welcome: What the node takes.
        regions: What the node can reach of our memory; None where payload goes by TCP.
        quick: Socket, receive and next request id, while it is open; None also if reads may not end with data.
        receive_timeout_ns: The kernel's timeout for receiving; 0 is none.
        waste: Memory for payload that nobody wants any more.
    """

    __slots__ = (
        "_address",
        "_greeting",
        "_later_deadline_ns",
        "_owner",
        "_pid",
        "_placed",
        "_reader",
        "_refusal",
        "_send_timeout_ns",
        "_session",
        "_socket",
        "_unread",
        "_waste",
        "_writer",
        "asked_ns",
        "blocking",
        "connect_ns_max",
        "deadline_ns",
        "ends_with_data",
        "flow",
        "has_heard",
        "idle_since_ns",
        "is_abandoned",
        "is_fresh",
        "pause_ns",
        "quick",
        "receive_timeout_ns",
        "regions",
        "welcome",
    )

    def __init__(self, address: str, *, greeting: Greeting, flow: FlowClass) -> None:
        """
        Args:
            address: "host:port".
            greeting: Who we are.
            flow: Class of every call on this connection.
        """
        self._address = address
        self._greeting = greeting
        self.flow = flow
        self._pid = os.getpid()
        self._socket: socket.socket | None = None
        self._waste: memoryview | None = None
        self.asked_ns = 0
        self.blocking = True
        self.connect_ns_max = CONNECT_NS_MAX
        self.deadline_ns = 0
        self._later_deadline_ns = self.pause_ns = 0
        self.idle_since_ns = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._reader = FrameReader(self)
        self._writer = FrameWriter()
        self._session = ClientSession()
        self._owner: PayloadOwner | None = None
        self._placed: Frame | None = None  # whose payload is on its way into the owner's memory
        self._refusal: KVStoreError | None = None
        self._unread = memoryview(b"")
        self.receive_timeout_ns = 0
        self._send_timeout_ns = 0
        self.is_fresh = True
        self.ends_with_data = False
        self.is_abandoned = False
        self.has_heard = False
        self.welcome: Welcome | None = None
        self.regions: Reach | None = None
        self.quick: Quick | None = None

    @property
    def address(self) -> str:
        """ "host:port" of the peer."""
        return self._address

    @property
    def is_open(self) -> bool:
        """True between a good HELLO and `close`."""
        return self.welcome is not None and self._socket is not None

    @property
    def is_idle(self) -> bool:
        """True when the next call may begin: the last one ended and left nothing behind."""
        return (
            self.welcome is not None
            and self._socket is not None
            and self._session.state is State.IDLE
            and not self._writer.pending_bytes
            and not self._unread
        )

    @property
    def waste(self) -> memoryview:
        """SLICE_BYTES_MAX bytes that nobody reads."""
        if self._waste is None:
            self._waste = memoryview(bytearray(SLICE_BYTES_MAX))
        return self._waste

    def fileno(self) -> int:
        """Of the socket; -1 when there is none."""
        return -1 if self._socket is None else self._socket.fileno()

    def open(self) -> Steps:
        """Connects and greets.

        Raises:
            Unavailable: Nobody listens there or answers within CONNECT_NS_MAX, or the peer speaks another protocol.
            DeadlineExceeded: The call's deadline passed first.
            KVStoreError: The node refused the HELLO (Denied, Overloaded, ...).
        """
        call_deadline_ns, later_ns = self.deadline_ns, self._later_deadline_ns
        self.wait_for_word(0, min(call_deadline_ns, time.monotonic_ns() + self.connect_ns_max))
        try:
            yield from self._connect()
            yield from self._greet()
            yield from self._go_over()
        except DeadlineExceeded:
            if time.monotonic_ns() >= call_deadline_ns:
                raise
            raise Unavailable(
                f"node at {self._address} did not answer within {self.connect_ns_max / SECOND_NS:g} s; "
                "is it overloaded, cut off, or no port of a node for gRPC or data?"
            ) from None
        self.deadline_ns, self._later_deadline_ns = call_deadline_ns, later_ns

    def wait_for_word(self, heard_by_ns: int, deadline_ns: int) -> None:
        """The call in progress ends at `deadline_ns`; before if nothing has come at `heard_by_ns`, unless that is 0."""
        self.deadline_ns = heard_by_ns or deadline_ns
        self._later_deadline_ns = deadline_ns if heard_by_ns else 0

    def begin(
        self,
        message: Message,
        *,
        owner: PayloadOwner | None = None,
        payload: Sequence[memoryview] = (),
        payload_bytes: int = 0,
    ) -> None:
        """Begins a call: queues its first frame, which carries `payload` when there is some."""
        request_id = self._session.start(message.TYPE)
        self._owner = owner
        self.has_heard = False
        head = encode_head(
            message.TYPE,
            request_id,
            message.encode(),
            payload_bytes=payload_bytes,
            epoch=self._greeting.view_epoch,
        )
        self._writer.push(head, payload, payload_bytes=payload_bytes)

    def start(
        self,
        message: Message,
        *,
        owner: PayloadOwner | None = None,
        payload: Sequence[memoryview] = (),
        payload_bytes: int = 0,
    ) -> Steps:
        """Begins a call and sends its first frame."""
        self.begin(message, owner=owner, payload=payload, payload_bytes=payload_bytes)
        return self._flush()

    def start_raw(
        self, frame_type: FrameType, body: bytes, *, flags: int, payload: Sequence[memoryview], payload_bytes: int
    ) -> Steps:
        """Begins a call whose body is slices."""
        request_id = self._session.start(frame_type)
        self._owner = None
        self.has_heard = False
        head = encode_head(frame_type, request_id, body, payload_bytes=payload_bytes, flags=flags)
        self._writer.push(head, payload, payload_bytes=payload_bytes)
        return self._flush()

    def send_data(self, body: bytes, *, flags: int, payload: Sequence[memoryview], payload_bytes: int) -> Steps:
        """Sends a DATA frame of the call in progress straight from the caller's memory."""
        self._session.send(FrameType.DATA)
        head = encode_head(FrameType.DATA, self._session.request_id, body, payload_bytes=payload_bytes, flags=flags)
        self._writer.push(head, payload, payload_bytes=payload_bytes)
        return self._flush()

    def receive(self) -> Generator[int, None, list[Frame]]:
        """The next frames of the call in progress, at least one. Raises as `try_receive`."""
        while True:
            frames = self.try_receive()
            if frames is not None:
                return frames
            yield READ

    def try_flush(self) -> bool:
        """Sends what is queued; False when the socket takes no more (not when `blocking`).

        Raises:
            Unavailable: The connection broke.
            DeadlineExceeded: The deadline passed first.
        """
        writer, held = self._writer, self._require_socket()
        while writer.pending_bytes:
            flags: int = socket.MSG_NOSIGNAL
            if self.blocking:
                self._send_timeout_ns = self._arm(held, socket.SO_SNDTIMEO, self._send_timeout_ns)
            else:
                flags |= socket.MSG_DONTWAIT
            try:
                writer.advance(held.sendmsg(writer.buffers(), (), flags))
            except BlockingIOError:
                if not self.blocking:
                    return False
            except OSError as error:
                raise self._broken(error) from None
        return True

    def try_receive(self) -> list[Frame] | None:
        """The next frames of the call in progress, at least one; None when nothing is there (not when `blocking`).

        Raises:
            KVStoreError: What an ERROR frame said. The call is over; the connection lives unless it said otherwise.
            Unavailable: The connection broke, or the node broke the protocol.
            DeadlineExceeded: The deadline passed first. The call is still open: close the connection.
        """
        while True:
            if self._refusal is not None:
                refusal, self._refusal = self._refusal, None
                raise refusal
            count = self._receive_some()
            if count is None:
                return None
            try:
                arrived = self._reader.advance(count)
                if arrived:
                    if self._placed in arrived:
                        self._placed = None
                    frames = self._accept(arrived)
                    if frames:
                        return frames
                elif self._placed is not None and self._owner is not None:
                    placed = self._placed
                    self._owner.arriving(placed, placed.payload_bytes - self._reader.wanted_bytes)
            except KVStoreError as error:
                raise self._breach(error) from error

    def send_at_once(self, frame_type: FrameType, body: bytes) -> int:
        """Begins a call on an idle connection, and sends its first frame; returns the request id.

        What `begin` and `try_flush` do together, with less work. Raises as `try_flush`.
        """
        assert self.blocking, "it would have to wait"
        request_id = self._session.start(frame_type)
        self._owner = None
        self.has_heard = False
        head = encode_head(frame_type, request_id, body, epoch=self._greeting.view_epoch)
        held = self._require_socket()
        self._send_timeout_ns = self._arm(held, socket.SO_SNDTIMEO, self._send_timeout_ns)
        try:
            count = held.send(head, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            count = 0
        except OSError as error:
            raise self._broken(error) from None
        if count < len(head):
            self._writer.push(head)
            self._writer.advance(count)
            self.try_flush()
        return request_id

    def end_at_once(self, epoch: int) -> None:
        """The call of `send_at_once` was answered by frames, the last one final, received with `quick`."""
        self._session.receive(FrameType.DATA, self._session.request_id, is_final=True)
        if epoch:
            self._greeting.saw_epoch(epoch)

    def give_back_bytes(self, received: bytes) -> None:
        """Bytes of the call of `send_at_once` that were received and are not what was expected: read them again."""
        self._unread = memoryview(received)

    def read_begun(self, received: bytes, request: FrameType = FrameType.GET) -> None:
        """A GET (GET_INTO) was begun with `quick`, and so much of its answer has come: read on the usual way."""
        self._session.read_begun(request)
        self._owner = None
        self.has_heard = False
        self._unread = memoryview(received)

    def arm_receive(self, wait_ns: int) -> None:
        """Sets the kernel's timeout for receiving."""
        self.receive_timeout_ns = set_timeout(self._require_socket(), socket.SO_RCVTIMEO, wait_ns)

    def belongs_to(self, owner: PayloadOwner | None) -> None:
        """From now on `owner` takes the payload of the call in progress; None when it is over."""
        self._owner = owner

    def ask(self, message: Message, answer: type[M]) -> Generator[int, None, M]:
        """A call of one frame each way. Raises as `receive`."""
        yield from self.start(message)
        frames = yield from self.receive()
        return self.decode(answer, frames[0])

    def ask_with_descriptor(self, message: Message, answer: type[M], fd: int) -> Generator[int, None, M]:
        """As `ask`, with a descriptor for the node. Over a Unix socket only; nothing may be queued."""
        self.begin(message)
        try:
            self._writer.advance(send_with_descriptor(self._require_socket(), self._writer.buffers(), fd))
        except OSError as error:
            raise self._broken(error) from None
        yield from self._flush()
        return self.decode(answer, (yield from self.receive())[0])

    def decode(self, kind: type[M], frame: Frame) -> M:
        """The message in a frame. Raises Unavailable when it is another one, or malformed."""
        try:
            if frame.type is not kind.TYPE:
                raise InvalidRequest(f"{frame.type.name} came instead of {kind.TYPE.name}")
            return kind.decode(frame.body)
        except InvalidRequest as error:
            raise self._breach(error) from error

    def abandon(self) -> bool:
        """Gives up the call in progress, whose memory is not touched any more, and keeps the connection if it can.

        The node is told to stop; what it has sent by then is drained when the connection is used next. Returns False,
        with nothing done, when only closing will do: while bytes are still to be sent, or in a call that writes.
        """
        if self._session.state not in _DRAINABLE or self._writer.pending_bytes or not self.is_open:
            return False
        self._reader.divert()
        self._owner = self._placed = None
        self._session.send(FrameType.CANCEL)
        head = encode_head(FrameType.CANCEL, self._session.request_id, Cancel().encode())
        try:
            self.is_abandoned = self._require_socket().send(head, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(
                head
            )
        except OSError:
            self.is_abandoned = False
        return self.is_abandoned

    def recover(self) -> Steps:
        """After `abandon`: drains the rest if that is little and comes soon; else it has to be opened anew."""
        call_deadline_ns, later_ns = self.deadline_ns, self._later_deadline_ns
        self.wait_for_word(0, min(call_deadline_ns, time.monotonic_ns() + DRAIN_NS_MAX))
        left_bytes = DRAIN_BYTES_MAX
        try:
            while self._session.state is not State.IDLE and left_bytes > 0:
                frames = yield from self.receive()
                left_bytes -= sum(frame.payload_bytes for frame in frames)
        except KVStoreError:
            pass  # an ERROR ended that call, or the connection is no good any more, which the state tells
        self.deadline_ns, self._later_deadline_ns = call_deadline_ns, later_ns
        if self._session.state is State.IDLE:
            self.is_abandoned = False
        else:
            self.close()
            self._begin_anew()

    def place(self, frame: Frame) -> Sequence[memoryview]:
        """PayloadSink of the reader: the call in progress knows, and stragglers are thrown away."""
        if self._owner is None or frame.request_id != self._session.request_id:
            self._placed = None
            return self._reader.scratch_views(frame.payload_bytes)
        self._placed = frame
        if self.regions is not None:
            self.regions.framed()
        return self._owner.place(frame)

    def close(self) -> None:
        """Closes the socket; nothing is written to any buffer afterwards. In a forked child only its copy closes."""
        self._session.close()
        self._writer.drop()
        self._owner = None
        self.quick = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def interrupt(self) -> None:
        """From another thread: wakes the call in progress, which then fails as Unavailable."""
        held = self._socket
        if held is not None and self._pid == os.getpid():
            try:
                held.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is gone already, which is what was asked for

    def _connect(self) -> Steps:
        local = self._greeting.local
        if (near := local.connect()) is not None:
            self._socket, self.regions = near, ConnectionRegions(local.memory, local.counters)
            return
        yield from dial(self._address, self._hold)

    def _hold(self, held: socket.socket) -> None:
        self._socket = held

    def _go_over(self) -> Steps:
        """From TCP to the node's socket for its own host, where there is one; TCP again when that fails."""
        local = self._greeting.local
        if self.regions is None and local.is_wanted and (yield from learn_way(self, local)):
            self.close()
            self._begin_anew()
            yield from self._connect()
            yield from self._greet()
        if self.regions is None:
            local.check(self.close)
            self.regions = join_rdma(self, self._require_socket(), self._greeting.rdma)

    def _greet(self) -> Steps:
        hello = Hello(
            version_min=VERSION,
            version_max=VERSION,
            features=_FEATURES | self._greeting.features,
            client_id=self._greeting.client_id,
            boot_id=self._greeting.seen_boot_id(),
            token=self._greeting.token,
            flow=self.flow,
        )
        self._writer.push_message(hello, self._session.hello())
        yield from self._flush()
        frames = yield from self.receive()
        welcome = self.decode(Welcome, frames[0])
        self._greeting.check(welcome, self._address)
        self.welcome = welcome
        self.ends_with_data = bool(self.welcome.features & Feature.FINAL_DATA)
        if self.ends_with_data:
            self._reader.allow_final_data()
            held = self._require_socket()
            self.quick = (handle_of(held), held.recvmsg_into, self._session.next_id)
        self._greeting.welcomed(self.welcome)

    def _flush(self) -> Steps:
        while not self.try_flush():
            yield WRITE

    def _receive_some(self) -> int | None:
        """Receives into the reader's buffers once; None when nothing is there."""
        reader = self._reader
        try:
            buffers = reader.buffers()
        except KVStoreError as error:
            raise self._breach(error) from error
        if self._unread:
            return self._read_again(buffers)
        flags: int = socket.MSG_DONTWAIT
        if self.blocking:
            flags = 0
            wanted = reader.wanted_bytes
            if wanted > WAIT_ALL_BYTES_MAX:
                flags = socket.MSG_WAITALL
                buffers = first_bytes(buffers, WAIT_ALL_BYTES_MAX)
            elif wanted >= WAIT_ALL_BYTES_MIN and reader.in_payload:
                flags = socket.MSG_WAITALL
                if not reader.ends_call:
                    # a header follows; waiting for more than it could wait for ever
                    buffers[-1] = buffers[-1][:HEADER_BYTES]
        return self.receive_into(buffers, flags)

    def receive_into(self, buffers: Sequence[memoryview | bytearray], flags: int) -> int | None:
        """Receives once; None when nothing is there (not when `blocking`). Raises as `try_receive`."""
        held = self._require_socket()
        while True:
            if self.blocking:
                self.receive_timeout_ns = self._arm(held, socket.SO_RCVTIMEO, self.receive_timeout_ns)
            try:
                count = held.recvmsg_into(buffers, 0, flags)[0]
                break
            except BlockingIOError:
                if not self.blocking:
                    return None
            except OSError as error:
                raise self._broken(error) from None
        if not count:
            raise Unavailable(f"node at {self._address} closed the connection; it may be restarting")
        self.has_heard = True
        if self._later_deadline_ns and self.pause_ns:
            self.deadline_ns = min(self._later_deadline_ns, time.monotonic_ns() + self.pause_ns)
        elif self._later_deadline_ns:
            self.deadline_ns, self._later_deadline_ns = self._later_deadline_ns, 0
        return count

    def _read_again(self, buffers: Sequence[memoryview]) -> int:
        """Hands out what `give_back_bytes` was given, as if it came from the socket."""
        count = fill(buffers, self._unread)
        self._unread = self._unread[count:]
        self.has_heard = True
        return count

    def _accept(self, arrived: list[Frame]) -> list[Frame]:
        """The frames of the call in progress. An ERROR among them is raised after them, by `receive`."""
        session = self._session
        frames = []
        for frame in arrived:
            if frame.epoch:
                self._greeting.saw_epoch(frame.epoch)
            if session.receive(frame.type, frame.request_id, is_final=frame.is_final) is Verdict.IGNORE:
                continue
            if frame.type is FrameType.ERROR:
                reply = ErrorReply.decode(frame.body)
                self._refusal = error_of(reply.code, reply.text)
                if reply.closing:
                    session.close()
            elif frame.type is FrameType.LOST:
                if self.regions is not None:
                    self.regions.lost(Lost.decode(frame.body).status)
            else:
                frames.append(frame)
        return frames

    def _arm(self, held: socket.socket, option: int, armed_ns: int) -> int:
        """Sets a kernel timeout to what is left until the deadline; returns it."""
        left_ns = self.deadline_ns - time.monotonic_ns()
        if left_ns <= 0:
            raise DeadlineExceeded(f"the call's deadline passed while it waited for the node at {self._address}")
        if left_ns <= armed_ns <= left_ns + (left_ns >> 6):
            return armed_ns
        return set_timeout(held, option, left_ns)

    def _require_socket(self) -> socket.socket:
        if self._socket is None:
            raise Unavailable(f"the connection to {self._address} is closed")
        return self._socket

    def _broken(self, error: OSError) -> Unavailable:
        return Unavailable(
            f"the connection to {self._address} broke: {error.strerror or error}; the node may be restarting"
        )

    def _breach(self, error: KVStoreError) -> Unavailable:
        """The peer did what the protocol forbids: nothing more from this connection can be trusted."""
        self._session.close()
        return Unavailable(f"node at {self._address} broke the protocol: {error}")

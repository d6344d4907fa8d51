"""One connection of the data plane: its channel, its session, the call in progress, and what happens when they fail.

This is the root of all work that a peer causes: whatever goes wrong with it ends here, as an ERROR frame, and at worst
the connection closes. The worker goes on.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from kvstore.engine.api import Engine
from kvstore.errors import DeadlineExceeded, Internal, InvalidRequest, KVStoreError, Overloaded, Unavailable
from kvstore.limits import (
    FRAME_AIM_BYTES,
    FRAME_BODY_BYTES_MAX,
    HELLO_BODY_BYTES_MAX,
    HELLO_WAIT_NS,
    IDLE_WAIT_NS,
    INLINE_PUT_BYTES_MAX,
    LINGER_NS,
    READ_AHEAD_BYTES,
    SECOND_NS,
)
from kvstore.server import rdma_calls
from kvstore.server.accepted import node_channel
from kvstore.server.call import Call
from kvstore.server.clients import Client
from kvstore.server.headway import Headway, Patience
from kvstore.server.lane import AnswerLane
from kvstore.server.loop import BROKEN, READABLE, WRITABLE, Loop
from kvstore.server.rdma import RdmaService
from kvstore.server.tenants import Permit, Scope
from kvstore.telemetry.logs import RepeatLogger
from kvstore.telemetry.metrics import DataplaneMetrics, Verb, error_index
from kvstore.transport.base import PlaceChannel
from kvstore.transport.shm_node import ShmNodeChannel
from kvstore.transport.shm_regions import MappedMemory
from kvstore.types.flow import FlowClass
from kvstore.wire.body import MemoryBudget
from kvstore.wire.failures import code_of, text_of
from kvstore.wire.frames import Frame
from kvstore.wire.header import FrameType
from kvstore.wire.messages import ErrorReply, Feature
from kvstore.wire.schema import Message
from kvstore.wire.session import ServerSession, State, Verdict

log = logging.getLogger(__name__)

OnSent: TypeAlias = Callable[[], None]


class Plane(Protocol):
    """What a connection needs of the data plane."""

    loop: Loop
    metrics: DataplaneMetrics
    faults: RepeatLogger
    epoch: int
    now_ns: int
    clock: Callable[[], int]
    requests_memory: MemoryBudget
    shared_memory: MappedMemory
    rdma: RdmaService | None
    quick_engine: Engine | None
    handlers: Mapping[FrameType, Callable[[Connection, Frame], None]]

    def place_writer_slices(self, connection: Connection, frame: Frame) -> Sequence[memoryview] | None:
        """Destination of a WRITER_WRITE's payload."""

    def wake_engine(self) -> None:
        """The engine has work, though none of its descriptors says so."""

    def gather(self, hand_over: Callable[[], None]) -> None:
        """Calls `hand_over`, which gives the engine what waits for more of its kind, WRITE_WAVE_NS from now."""

    def want_send(self, connection: Connection) -> None:
        """The connection wants a turn to send."""

    def closed(self, connection: Connection) -> None:
        """The connection is gone."""


class Connection:
    """A client's connection, or with `is_admin` the supervisor's.

    Attributes:
        client: who it is, from HELLO on.
        flow: class of its requests, from HELLO.
        permit: what its token allows; None is everything, to every tenant.
        ends_with_data: Feature.FINAL_DATA was agreed on.
        takes_data_crcs: Feature.DATA_CRCS was.
        reader_checks: Feature.READER_CHECKS was.
        shares_memory: Feature.SHARED_MEMORY was agreed on.
        placing: the channel, where it reaches into the client's memory.
        call: the request in progress.
        opened: the last WRITER_OPEN that was answered over it: its request id, and the writers.
        due_ns: when it is closed unless something arrives before (HELLO, idle and lingering limits).
        clock: monotonic; for durations, where the time of the turn is too coarse.
        in_turn: it stands in the data plane's queue of senders.
        is_blocked: the socket takes nothing more now.
    """

    __slots__ = (
        "_handlers",
        "_headway",
        "_held_bytes",
        "_interest",
        "_lane",
        "_lingering",
        "_memory",
        "_overload",
        "_plane",
        "_waits_writable",
        "call",
        "channel",
        "client",
        "clock",
        "due_ns",
        "ends_with_data",
        "flow",
        "in_turn",
        "is_admin",
        "is_blocked",
        "is_closed",
        "metrics",
        "opened",
        "permit",
        "placing",
        "reader_checks",
        "session",
        "shares_memory",
        "takes_data_crcs",
    )

    def __init__(self, accepted: socket.socket, plane: Plane, *, due_ns: int, is_admin: bool = False) -> None:
        self._plane = plane
        self.metrics = plane.metrics
        self.clock = plane.clock
        self._handlers = plane.handlers
        self.channel = node_channel(
            accepted,
            self,
            body_bytes_max=HELLO_BODY_BYTES_MAX,
            budget=None if is_admin else plane.requests_memory,  # people must get through when peers hold it all
            memory=None if is_admin else plane.shared_memory,
            rdma=None if is_admin else plane.rdma,
        )
        self._memory = plane.requests_memory  # from HELLO on its client's share of it
        self._held_bytes = 0  # of it, for the call in progress
        self._overload: Overloaded | None = None  # why the inline payload on its way is thrown away
        self.session = ServerSession()
        self.is_admin = is_admin
        self.client: Client | None = None
        self.permit: Permit | None = None
        self.flow = FlowClass.BACKGROUND
        self.ends_with_data = False
        self.takes_data_crcs = False
        self.reader_checks = False
        self.shares_memory = False
        self.placing: PlaceChannel | None = None
        self.call: Call | None = None
        self.opened: tuple[int, Sequence[int]] | None = None
        self.due_ns = due_ns
        self.in_turn = False
        self.is_closed = False
        self._lingering = False
        self._lane: AnswerLane | None = None  # from HELLO on, until the last words
        self._headway = Headway()
        self.is_blocked = False
        self._waits_writable = False
        self._interest: int = READABLE
        plane.loop.watch(self.channel.fileno(), self._on_event)

    @property
    def epoch(self) -> int:
        """Of the node's view."""
        return self._plane.epoch

    @property
    def rdma(self) -> RdmaService | None:
        """Of the worker."""
        return self._plane.rdma

    @property
    def now_ns(self) -> int:
        """The time of this turn of the loop."""
        return self._plane.now_ns

    # --- receiving --------------------------------------------------------------------------------------------------
    def _on_event(self, events: int) -> None:
        if events != READABLE and events & WRITABLE and self.is_blocked:
            self._send_on()
        if events & (READABLE | BROKEN) and not self.is_closed:
            try:
                lane = self._lane
                if lane is not None:
                    frames = lane.receive()
                    if frames is None:
                        return  # it was a request, and is answered
                elif self._lingering:
                    self._discard()
                    return
                else:
                    frames = self.channel.on_readable()
                for frame in frames:
                    self._arrived(frame)
                self._check_stream()
            except Exception as error:  # noqa: BLE001 -- the root of everything that a peer causes
                self.broke(error)
            if self.channel.reader.paused and not self.is_closed:
                self._watch()

    def _arrived(self, frame: Frame) -> None:
        if self._lingering or self.is_closed:
            return
        if not frame.payload_bytes and self.session.receive(frame.type, frame.request_id) is Verdict.IGNORE:
            if frame.type is FrameType.CANCEL and self.placing is not None:
                self.placing.cancelled_late(frame.request_id)
            return
        if frame.type is FrameType.DATA:
            self.channel.landed(frame)
            return
        self.due_ns = self._plane.now_ns + IDLE_WAIT_NS
        if len(frame.body) > READ_AHEAD_BYTES:
            self._hold(len(frame.body))  # what the call keeps of it is about as long
        try:
            if self._overload is not None:
                overload, self._overload = self._overload, None
                raise overload
            # the session lets requests and CANCEL through, nothing else
            self._handlers[frame.type](self, frame)
        except KVStoreError as error:
            if self.session.request is None:
                raise
            self._abandon_call()
            self.fail(error)

    def place_other(self, frame: Frame) -> Sequence[memoryview] | None:
        """Payload begins (transport.tcp_node.OtherPayload): of an inline OFFER, or of WRITER_WRITE."""
        self.session.receive(frame.type, frame.request_id)
        if frame.type is FrameType.WRITER_WRITE:
            return self._plane.place_writer_slices(self, frame)
        if frame.payload_bytes > INLINE_PUT_BYTES_MAX:
            raise InvalidRequest(
                f"OFFER frame carries {frame.payload_bytes} bytes of payload, the limit is {INLINE_PUT_BYTES_MAX}: "
                "send the data after its GRANT"
            )
        try:
            self._hold(frame.payload_bytes)
        except Overloaded as error:
            self._overload = error  # nothing of it is stored, and the client hears so
            return self.channel.reader.scratch_views(frame.payload_bytes)
        return [memoryview(bytearray(frame.payload_bytes))]

    def accepts_data(self, frame: Frame) -> bool:
        """DATA begins (transport.tcp_node.OtherPayload): of the call in progress, or late."""
        return self.session.receive(frame.type, frame.request_id) is Verdict.ACCEPT

    def resume(self, destination: Sequence[memoryview]) -> None:
        """Memory for the payload that the reader is paused at is there."""
        self.guard(lambda: self._resume(destination))

    def _resume(self, destination: Sequence[memoryview]) -> None:
        for frame in self.channel.reader.place_later(destination):
            self._arrived(frame)
        self._check_stream()
        if not self.is_closed:
            self._watch()

    def _check_stream(self) -> None:
        """Raises what is wrong with the frame behind those that arrived: the peer may wait for our answer to it."""
        failure = self.channel.reader.failure
        if failure is not None and not self._lingering and not self.is_closed:
            raise failure

    def _hold(self, length_bytes: int) -> None:
        """Memory that a request takes until it ends. Raises Overloaded when all connections' together is used up."""
        if not self.is_admin:
            self._memory.take(length_bytes, is_large=length_bytes > INLINE_PUT_BYTES_MAX)
            self._held_bytes += length_bytes

    def _let_go(self) -> None:
        self._memory.give_back(self._held_bytes)
        self._held_bytes = 0

    # --- sending ----------------------------------------------------------------------------------------------------
    def wake_engine(self) -> None:
        """The engine was given work outside of a request's first frame: let it move in this turn."""
        self._plane.wake_engine()

    def gather(self, hand_over: Callable[[], None]) -> None:
        """As the data plane's; what goes wrong in `hand_over` ends here."""
        self._plane.gather(lambda: self.guard(hand_over))

    def send_final_data(self, head: bytes, payload: Sequence[memoryview], payload_bytes: int, on_sent: OnSent) -> None:
        """Ends the request in progress with a DATA frame (see `can_answer_at_once`). Raises Unavailable."""
        self.session.send_final_data()
        if self._held_bytes:
            self._let_go()
        if not self.channel.send_at_once(head, payload, payload_bytes=payload_bytes, on_sent=on_sent):
            self._block()

    def end_with_data(self, call: Call) -> None:
        """`call` ends with the DATA frame that is queued next."""
        assert call is self.call, "a call that is not in progress has ended"
        self.session.send_final_data()
        self.call = None
        if self._held_bytes:
            self._let_go()

    def send_rest(self, head: bytes, payload: memoryview, *, sent_bytes: int, on_sent: OnSent) -> None:
        """Queues what the socket did not take of a frame that was sent past the queue."""
        writer = self.channel.writer
        writer.push(head, (payload,), payload_bytes=len(payload), on_sent=on_sent)
        writer.advance(sent_bytes)
        self._block()

    def _block(self) -> None:
        """The socket takes nothing more now."""
        self.is_blocked = True
        self._watch()
        self._lend()

    def _lend(self) -> None:
        """The loop sends what is queued while it waits; first until more is wanted behind it, then the rest."""
        outflow = self._plane.loop.outflow
        if outflow is not None and not self.is_closed:
            is_much = self.channel.writer.pending_bytes >= FRAME_AIM_BYTES
            self.channel.lend(outflow, leave_bytes=FRAME_AIM_BYTES - 1 if is_much and self.call is not None else 0)

    @property
    def can_answer_at_once(self) -> bool:
        """Whether nothing stands before an answer, in this connection's queue or in others' turns."""
        return not (self.in_turn or self.is_blocked or self.channel.writer.pending_bytes)

    def request_send(self) -> None:
        """There is output: take a turn, unless the socket takes nothing now."""
        if not self.in_turn and not self.is_blocked and not self.is_closed:
            self._plane.want_send(self)

    def send_now(self) -> None:
        """Sends a first frame from within the request's own event; what is left takes its turns."""
        if self.in_turn or self.is_blocked:
            return
        self.in_turn = True  # no turn for what is queued meanwhile
        more = self.send_turn()
        self.in_turn = False
        if more:
            self._plane.want_send(self)

    def _send_on(self) -> None:
        """The socket takes some more: no turn for that, only for what is still to be queued when it took all."""
        channel = self.channel
        try:
            if channel.take_back():
                self.is_blocked = channel.writer.pending_bytes > 0  # little is left: it goes with what follows
            else:
                self.is_blocked = not channel.on_writable()
            call = self.call
            if call is not None and channel.writer.pending_bytes < FRAME_AIM_BYTES and call.has_output():
                if self.is_blocked:
                    call.pump()  # to have it at hand when the socket takes more
                else:
                    self.request_send()
            elif not self.is_blocked:
                self._went_out()
            if self.is_blocked:
                self._lend()
        except Exception as error:  # noqa: BLE001 -- the root of everything that a peer causes
            self.broke(error)

    def send_turn(self) -> bool:
        """Sends about one frame of payload; True when another turn is wanted."""
        if self.is_closed:
            return False
        try:
            self._send()
        except Exception as error:  # noqa: BLE001 -- the root of everything that a peer causes
            self.broke(error)
        call = self.call
        return call is not None and not self.is_blocked and not self.is_closed and call.has_output()

    def _send(self) -> None:
        call = self.call
        channel = self.channel
        if call is not None and channel.writer.pending_bytes < FRAME_AIM_BYTES and call.has_output():
            call.pump()
        self.is_blocked = not channel.on_writable()
        self._went_out()
        if self.is_blocked:
            self._lend()

    def _went_out(self) -> None:
        """The socket was given what is queued, or as much as it takes."""
        if self.is_blocked is not self._waits_writable:
            self._watch()
        if self._lingering and not self.is_blocked:
            self.channel.end_output()  # what we leave unread must not reset the connection before they are read

    def _has_output(self) -> bool:
        call = self.call
        return call is not None and not self.is_closed and call.has_output()

    def finish(self, call: Call, message: Message) -> None:
        """`call` is over, `message` its last frame."""
        assert call is self.call, "a call that is not in progress has ended"
        self.answer(message)

    def answer(self, message: Message) -> None:
        """The last frame of the request in progress."""
        plane = self._plane
        self.session.send(message.TYPE)
        self.channel.send(message, self.session.request_id, epoch=plane.epoch)
        self.call = None
        if self._held_bytes:
            self._let_go()
        self.request_send()

    def fail(self, error: KVStoreError) -> None:
        """The request in progress ends with ERROR; the connection lives on."""
        self.metrics.errors[error_index(error)] += 1
        self.answer(ErrorReply(code=code_of(error), text=text_of(error), closing=False))

    # --- ending -----------------------------------------------------------------------------------------------------
    def guard(self, work: Callable[[], None]) -> None:
        """Runs `work`, which the peer has caused; every fault that it ends with is handled here."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 -- the root of everything that a peer causes
            self.broke(error)

    def broke(self, error: Exception) -> None:
        """The work for this connection ended with `error`: it closes, after last words if the peer can hear them."""
        if isinstance(error, Unavailable):
            self.close()  # the peer is gone: its own affair
        elif isinstance(error, Overloaded):
            self._plane.faults.warning("overloaded", f"{self.channel.peer}: {error}")
            self.give_up(error)
        elif isinstance(error, KVStoreError):
            self.metrics.protocol_errors += 1
            self._plane.faults.warning("protocol", f"{self.channel.peer}: {error}")
            self.give_up(error)
        else:
            log.error("defect while serving %s", self.channel.peer, exc_info=error)
            self.give_up(Internal("the node has a defect; its log has the details"))

    def give_up(self, error: KVStoreError) -> None:
        """Last words, then close: the connection cannot be used any more."""
        if self.is_closed or self._lingering:
            self.close()
            return
        self.metrics.errors[error_index(error)] += 1
        self._abandon_call()
        self.session.close()
        self.channel.send(
            ErrorReply(code=code_of(error), text=text_of(error), closing=True), 0, epoch=self._plane.epoch
        )
        self._lingering = True
        self._lane = None
        self.due_ns = self._plane.now_ns + LINGER_NS
        self._watch()
        self.request_send()

    def expire(self) -> None:
        """`due_ns` has passed: it has not greeted, was idle for long, or does not read our last words."""
        if self.session.state is State.NEW:
            wait_s = HELLO_WAIT_NS // SECOND_NS
            self.give_up(DeadlineExceeded(f"no HELLO came within {wait_s} s of connecting: send it first"))
        elif self._lingering or (self.session.request is None and not self.is_admin):
            self.close()

    def watch_progress(self, patience: Patience) -> None:
        """Called now and then: gives up a peer that holds memory, and neither reads nor sends on."""
        if self._lingering or self.is_admin:
            return
        stall_ns, arrives_ns = patience.stall_ns, patience.arrives_ns
        moved_bytes, now_ns, headway = self.channel.progress, self._plane.now_ns, self._headway
        call_id, least = self.session.request_id, patience.least_rate(self._held_of_engine())
        if headway.is_stalled(moved_bytes, call_id=call_id, now_ns=now_ns, stall_ns=stall_ns, least=least):
            text = f"read nor sent on {least} bytes a second for {stall_ns // SECOND_NS} s in the middle of a call"
            self._gave_out(f"the peer neither {text}")
        elif headway.is_late(self.channel.reader.request, now_ns=now_ns, arrives_ns=arrives_ns):
            self._gave_out(f"a request was not whole {arrives_ns // SECOND_NS} s after it began: send smaller batches")

    def _held_of_engine(self) -> int:
        """Memory of the engine that only this peer can set free, about."""
        call = self.call
        return max(self.channel.held_bytes, 0 if call is None else call.held_bytes)

    @property
    def uses_memory(self) -> bool:
        """Payload moves over it, or is about to."""
        call = self.call
        return bool(self.channel.pending_bytes) if call is None else call.verb in (Verb.GET, Verb.PUT)

    def _gave_out(self, text: str) -> None:
        self.metrics.deadlines += 1
        self.give_up(DeadlineExceeded(text))

    def close(self) -> None:
        """Closes at once; the call in progress is abandoned. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._lane = None
        self._plane.loop.forget(self.channel.fileno())
        self._forget_unheard()
        self.session.close()
        self._abandon_call()
        self.channel.close()
        self._let_go()
        self._plane.closed(self)

    def _forget_unheard(self) -> None:
        """Writers whose ids stand in an answer that the client has not taken: it can never write to them."""
        opened, client = self.opened, self.client
        if opened is None or client is None or opened[0] != self.session.request_id or self.channel.was_heard:
            return
        client.doom_unknown(opened[1])
        self._plane.wake_engine()

    def greeted(self, client: Client, flow: FlowClass, features: Feature) -> None:
        """HELLO was accepted, and these features were agreed on."""
        self.ends_with_data = Feature.FINAL_DATA in features
        self.takes_data_crcs = Feature.DATA_CRCS in features
        self.reader_checks = Feature.READER_CHECKS in features
        if Feature.SHARED_MEMORY in features and isinstance(self.channel, ShmNodeChannel):
            self.shares_memory = True
            self.placing = self.channel
        rdma_calls.agree(self, features, self.rdma)
        self.client = client
        self.flow = flow
        if not self.is_admin:
            self._let_go()  # of HELLO's body, which is done with
            self._memory = client.requests_memory
            self.channel.reader.use_budget(self._memory)
        self.channel.reader.allow_bodies(FRAME_BODY_BYTES_MAX)
        if self.ends_with_data:
            self._lane = AnswerLane(self, self._plane)

    @property
    def uses_rdma(self) -> bool:
        """Feature.RDMA was agreed on."""
        return self.placing is not None and not self.shares_memory

    def allow(self, permit: Permit, handlers: Mapping[FrameType, Callable[[Connection, Frame], None]]) -> None:
        """What it may do from now on, and the handlers that keep to that."""
        self.permit = permit
        self._handlers = handlers
        if Scope.READ not in permit.scopes:
            self._lane = None

    @property
    def is_idle(self) -> bool:
        """No request in progress and nothing left to send."""
        return self.session.state in (State.IDLE, State.NEW) and not self.channel.pending_bytes

    def _abandon_call(self) -> None:
        call, self.call = self.call, None
        if call is not None:
            self.metrics.cancelled += 1
            call.abandon()
        self.channel.unfetch()

    def _discard(self) -> None:
        try:
            if not self.channel.discard():
                self.close()
        except Unavailable:
            self.close()

    def _watch(self) -> None:
        """Tells the loop what this connection waits for, if that has changed."""
        interest = 0 if self.channel.reader.paused and not self._lingering else READABLE
        # write interest stays while more follows at once: it would be wanted back in the next turn
        self._waits_writable = self.is_blocked or (self._waits_writable and self._has_output())
        if self._waits_writable:
            interest |= WRITABLE
        if interest != self._interest:
            self._interest = interest
            self._plane.loop.change(self.channel.fileno(), interest)

"""What may follow what on a connection: tables of legal transitions, for both sides, without I/O.

A call owns its connection: one request, then its frames, then its end. `request_id` tells a call's frames from
stragglers of a call that was cancelled or answered early.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final

from kvstore.errors import Closed, InvalidRequest
from kvstore.wire.header import FrameType as F

REQUEST_ID_MAX: Final = 0xFFFF_FFFF


class State(IntEnum):
    """Where a connection stands; for a call, the kind of its dialogue."""

    NEW = 0
    GREETING = 1
    IDLE = 2
    ANSWER = 3
    READ = 4
    WRITE = 5
    CLOSED = 6


_IDLE: Final = State.IDLE

REQUESTS: Final[dict[F, State]] = {
    F.PING: State.ANSWER,
    F.MANIFEST: State.ANSWER,
    F.VIEW: State.ANSWER,
    F.MATCH: State.ANSWER,
    F.UNPIN: State.ANSWER,
    F.GET: State.READ,
    F.OFFER: State.WRITE,
    F.WRITER_OPEN: State.ANSWER,
    F.WRITER_WRITE: State.ANSWER,
    F.WRITER_COMMIT: State.WRITE,
    F.WRITER_ABORT: State.ANSWER,
    F.WAIT: State.ANSWER,
    F.DELETE: State.ANSWER,
    F.DROP: State.ANSWER,
    F.PREFETCH: State.ANSWER,
    F.ADMIN: State.ANSWER,
    F.LOCAL: State.ANSWER,
    F.PULL: State.ANSWER,
    F.HEADS: State.ANSWER,
    F.FORGET: State.ANSWER,
    F.REGION: State.ANSWER,
    F.REGION_DROP: State.ANSWER,
    F.GET_INTO: State.READ,
    F.OFFER_FROM: State.WRITE,
    F.PAIR: State.ANSWER,
    F.PROBE: State.ANSWER,
    F.REGIONS: State.ANSWER,
}
"""Frames that begin a call, and the dialogue that they begin."""

ANSWERS: Final[dict[F, F]] = {
    F.PING: F.PONG,
    F.MANIFEST: F.END,
    F.VIEW: F.VIEW_REPLY,
    F.MATCH: F.MATCH_REPLY,
    F.UNPIN: F.END,
    F.GET: F.END,
    F.OFFER: F.END,
    F.WRITER_OPEN: F.WRITER_OPENED,
    F.WRITER_WRITE: F.END,
    F.WRITER_COMMIT: F.END,
    F.WRITER_ABORT: F.END,
    F.WAIT: F.END,
    F.DELETE: F.END,
    F.DROP: F.END,
    F.PREFETCH: F.END,
    F.ADMIN: F.ADMIN_REPLY,
    F.LOCAL: F.LOCAL_REPLY,
    F.PULL: F.END,
    F.HEADS: F.HEADS_REPLY,
    F.FORGET: F.END,
    F.REGION: F.END,
    F.REGION_DROP: F.END,
    F.GET_INTO: F.END,
    F.OFFER_FROM: F.END,
    F.PAIR: F.PAIRED,
    F.PROBE: F.END,
    F.REGIONS: F.END,
}
"""The frame that ends each call well; ERROR may end any of them instead, END also a cancelled one."""

TO_NODE: Final[dict[State, dict[F, State]]] = {
    State.NEW: {F.HELLO: State.GREETING},
    State.GREETING: {},
    State.IDLE: dict(REQUESTS),
    State.ANSWER: {F.CANCEL: State.ANSWER},
    State.READ: {F.CANCEL: State.READ},
    State.WRITE: {F.CANCEL: State.WRITE, F.DATA: State.WRITE},
    State.CLOSED: {},
}
"""Frames from the client that each state allows, and the state after."""

TO_CLIENT: Final[dict[State, dict[F, State]]] = {
    State.NEW: {F.ERROR: State.CLOSED},
    State.GREETING: {F.WELCOME: State.IDLE, F.ERROR: State.CLOSED},
    State.IDLE: {F.ERROR: State.CLOSED},
    State.ANSWER: {F.ERROR: State.IDLE},
    State.READ: {
        F.DATA: State.READ,
        F.PLACED: State.READ,
        F.LOST: State.READ,
        F.END: State.IDLE,
        F.ERROR: State.IDLE,
    },
    State.WRITE: {
        F.GRANT: State.WRITE,
        F.RESULT: State.WRITE,
        F.LOST: State.WRITE,
        F.END: State.IDLE,
        F.ERROR: State.IDLE,
    },
    State.CLOSED: {},
}
"""Frames from the node that each state allows, and the state after. In ANSWER, the one of ANSWERS and END as well."""

STRAGGLERS: Final = frozenset({F.DATA, F.CANCEL})
"""Frames of an older call that a node ignores: they crossed with the call's end."""


class Verdict(Enum):
    """What to do with a frame that arrived."""

    ACCEPT = "accept"
    IGNORE = "ignore"


class _Session:
    """State of one connection; both sides hold the same, each from its own view."""

    __slots__ = ("_request", "_request_id", "_state")

    def __init__(self) -> None:
        self._state = State.NEW
        self._request: F | None = None
        self._request_id = 0

    @property
    def state(self) -> State:
        """Where the connection stands."""
        return self._state

    @property
    def request_id(self) -> int:
        """Of the call in progress, or of the last one."""
        return self._request_id

    @property
    def request(self) -> F | None:
        """The verb of the call in progress, or None between calls."""
        return self._request

    def close(self) -> None:
        """Nothing more is legal."""
        self._state = State.CLOSED
        self._request = None

    def _node_frame(self, frame: F) -> State | None:
        """The state after a frame from the node, or None when it is not legal."""
        after = TO_CLIENT[self._state].get(frame)
        if after is None and self._state is State.ANSWER and self._request is not None:
            return State.IDLE if frame in (ANSWERS[self._request], F.END) else None
        return after

    def _enter(self, state: State) -> None:
        self._state = state
        if state is State.IDLE or state is State.CLOSED:
            self._request = None

    def _illegal(self, frame: F, who: str) -> InvalidRequest:
        verb = f" of {self._request.name}" if self._request else ""
        return InvalidRequest(
            f"{who} {frame.name} is not legal in state {self._state.name.lower()}{verb}: see docs/protocol.md"
        )


class ServerSession(_Session):
    """The node's side."""

    __slots__ = ()

    def receive(self, frame: F, request_id: int) -> Verdict:
        """A frame came from the client.

        Raises:
            InvalidRequest: It is not legal now; answer ERROR and close.
        """
        state = self._state
        if frame in STRAGGLERS and (
            state is State.IDLE or (request_id != self._request_id and state not in (State.NEW, State.GREETING))
        ):
            return Verdict.IGNORE
        after = TO_NODE[state].get(frame)
        if after is None:
            raise self._illegal(frame, "received")
        if state is State.IDLE or state is State.NEW:
            self._request = frame if frame in REQUESTS else None
            self._request_id = request_id
        self._state = after
        return Verdict.ACCEPT

    def send(self, frame: F) -> None:
        """The node is about to send a frame of the call in progress. Raises AssertionError for our own defect."""
        after = self._node_frame(frame)
        assert after is not None, f"node sends {frame.name} in state {self._state.name} of {self._request}"
        self._state = after
        if after is State.IDLE or after is State.CLOSED:
            self._request = None

    def begin_plain(self, request_id: int) -> bool:
        """A GET came that is answered at once or not at all; False when it must go by `receive`."""
        if self._state is not _IDLE:
            return False
        self._request_id = request_id
        return True

    def send_final_data(self) -> None:
        """The node is about to send the DATA or PLACED frame that ends a read. AssertionError for our own defect."""
        assert self._state is State.READ, f"node ends {self._request} with DATA in state {self._state.name}"
        self._state = State.IDLE
        self._request = None


class ClientSession(_Session):
    """The client's side."""

    __slots__ = ()

    def hello(self) -> int:
        """HELLO is about to be sent; returns its request id. Raises InvalidRequest when it was sent before."""
        self._require(F.HELLO)
        self._state = State.GREETING
        return self._request_id

    def start(self, request: F) -> int:
        """A call begins; returns the request id for all its frames.

        Raises:
            Closed: The connection is closed.
            InvalidRequest: Another call is in progress, or `request` does not begin a call.
        """
        after = self._require(request)
        self._request_id = self._request_id % REQUEST_ID_MAX + 1
        self._request = request
        self._state = after
        return self._request_id

    def next_id(self) -> int:
        """The request id of a GET that is begun on an idle connection and, as a rule, ended by whoever begins it.

        When another answer comes than it expects, `read_begun` lets the call take the usual way.
        """
        self._request_id = request_id = self._request_id % REQUEST_ID_MAX + 1
        return request_id

    def read_begun(self, request: F) -> None:
        """The request of `next_id`, a GET or GET_INTO, has been sent, and its answer is still to be received."""
        self._state = self._require(request)
        self._request = request

    def send(self, frame: F) -> None:
        """DATA or CANCEL of the call in progress is about to be sent. Raises InvalidRequest when it is not legal."""
        if frame in REQUESTS or frame is F.HELLO:
            raise self._illegal(frame, "sending")
        self._state = self._require(frame)

    def receive(self, frame: F, request_id: int, *, is_final: bool = False) -> Verdict:
        """A frame came from the node. IGNORE means that it belongs to an older call: drop it and its payload.

        Args:
            is_final: DATA or PLACED that ends the call (slices.FLAG_FINAL).

        Raises:
            InvalidRequest: It is not legal now; close the connection.
        """
        if self._state is State.CLOSED:
            return Verdict.IGNORE
        if request_id != self._request_id and self._state is not State.NEW:
            if frame is F.ERROR and request_id == 0:
                self._enter(State.CLOSED)  # the node gives up the connection, not a call
                return Verdict.ACCEPT
            return Verdict.IGNORE
        after = self._node_frame(frame)
        if after is None or (is_final and self._state is not State.READ):
            raise self._illegal(frame, "received")
        self._enter(State.IDLE if is_final else after)
        return Verdict.ACCEPT

    def _require(self, frame: F) -> State:
        if self._state is State.CLOSED:
            raise Closed(f"{frame.name} on a closed connection: open a new one")
        after = TO_NODE[self._state].get(frame)
        if after is None:
            raise self._illegal(frame, "sending")
        return after

"""One request in progress on a connection."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from kvstore.errors import KVStoreError
from kvstore.limits import LINGER_NS
from kvstore.telemetry.metrics import Verb
from kvstore.types.results import MissReason
from kvstore.wire.messages import End
from kvstore.wire.schema import Message

if TYPE_CHECKING:
    from kvstore.server.connection import Connection


P = ParamSpec("P")
C = TypeVar("C", bound="Call")


def shielded(
    method: Callable[Concatenate[C, P], None],
) -> Callable[Concatenate[C, P], None]:
    """For what the engine calls back: a defect in it costs its own connection, and never reaches the engine."""

    @wraps(method)
    def run(self: C, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 -- the root of a callback's work
            self.connection.broke(error)

    return run


class Call:
    """Base of every call. It ends exactly once: by `finish` or `fail` of its own, by `cancel`, or by `abandon`.

    Output is pulled, never pushed: a call that has something to say calls `connection.request_send()`, and the data
    plane calls `pump` when it is the connection's turn and the socket takes more.

    Attributes:
        verb: what it is counted as.
        started_ns, deadline_ns: monotonic; after the deadline, `overdue` is called now and then.
        over: it has ended; callbacks that still come are ignored.
    """

    __slots__ = ("connection", "deadline_ns", "over", "request_id", "started_ns", "verb")

    def __init__(self, connection: Connection, verb: Verb, *, now_ns: int, deadline_ns: int) -> None:
        self.connection = connection
        self.verb = verb
        self.request_id = connection.session.request_id
        self.started_ns = now_ns
        self.deadline_ns = deadline_ns
        self.over = False

    @property
    def held_bytes(self) -> int:
        """Of the engine's memory, until the peer has read on; what it has to send is the channel's to know."""
        return 0

    def has_output(self) -> bool:
        """Whether `pump` would queue anything now."""
        return False

    def pump(self) -> None:
        """Queues the next output: at most one frame of payload, and the end of the call when nothing else is left."""

    def cancel(self) -> None:
        """The client wants it to end now; its END still goes out."""
        self.release()
        self.finish(End())

    def overdue(self) -> None:
        """The deadline has passed. Calls whose deadline the engine keeps do nothing here."""

    def close_unread(self) -> None:
        """`overdue` of a read: the engine keeps the deadline, but a client that does not read must not hold memory."""
        connection = self.connection
        if connection.now_ns > self.deadline_ns + LINGER_NS:
            connection.metrics.deadlines += 1
            connection.close()

    def abandon(self) -> None:
        """The connection is gone, or the call failed."""
        if not self.over:
            self.over = True
            self.release()

    def release(self) -> None:
        """Gives back what the call holds of the engine; nothing is delivered any more. Idempotent."""

    def finish(self, message: Message) -> None:
        """The last frame of a call that went well."""
        if not self.over:
            self.over = True
            self.connection.finish(self, message)

    def fail(self, error: KVStoreError) -> None:
        """Ends with ERROR."""
        if not self.over:
            self.over = True
            self.release()
            self.connection.fail(error)


def end_read(call: Call, statuses: bytes) -> None:
    """Ends a read with END: a status of each item, 0 where it was loaded, else its MissReason."""
    metrics = call.connection.metrics
    metrics.get_ns.observe(call.connection.clock() - call.started_ns)
    _end_counted(call, statuses)


def end_absent(call: Call, count: int) -> None:
    """Ends a read of `count` items of a namespace that is not known here. It took no time, so none is counted."""
    _end_counted(call, bytes([MissReason.ABSENT]) * count)


def _end_counted(call: Call, statuses: bytes) -> None:
    metrics = call.connection.metrics
    loaded = statuses.count(0)
    metrics.loaded_records += loaded
    if loaded != len(statuses):
        for reason in MissReason:
            missed = statuses.count(reason)
            metrics.misses[reason] += missed
            metrics.failed_records += missed
    call.finish(End(statuses=statuses))


class Answer(Call):
    """A call that waits for one callback of the engine, and is answered by one END.

    Attributes:
        end_wait: makes the engine forget that it was asked, where it can.
    """

    __slots__ = ("_count", "end_wait")

    def __init__(self, connection: Connection, verb: Verb, *, count: int, now_ns: int, deadline_ns: int) -> None:
        super().__init__(connection, verb, now_ns=now_ns, deadline_ns=deadline_ns)
        self._count = count
        self.end_wait: Callable[[], None] | None = None

    @shielded
    def done(self, statuses: bytes = b"", *, value: int = 0) -> None:
        """The engine has answered."""
        self.finish(End(statuses=statuses, value=value))

    def cancel(self) -> None:
        """Ends as if the deadline had come."""
        self.release()
        self.finish(End(statuses=bytes([MissReason.DEADLINE]) * self._count))

    def release(self) -> None:
        if self.end_wait is not None:
            self.end_wait()

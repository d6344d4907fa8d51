"""Jobs of one frame each way: matches, waits, deletes, prefetches and what else is asked about keys."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvstore.cluster.view import TargetId
from kvstore.errors import DeadlineExceeded, Unavailable, UnknownNamespace
from kvstore.limits import READ_RETRIES_MAX
from kvstore.types.flow import FlowClass
from kvstore.wire.messages import End, Manifest, MatchReply
from kvstore.wire.schema import Message
from kvstore_client.connection import Connection, Steps
from kvstore_client.planner import TargetBatch, split_records
from kvstore_client.rounds import Job

A = TypeVar("A", bound=Message)


class KeysJob(Job, Generic[A]):
    """Asks one target about its keys, in as many requests as its batch limit needs.

    Attributes:
        answers: One for each request, in order; all of them when `failure` is None.
        boot_id: Of the worker that gave them.
    """

    __slots__ = ("_answer", "_ask", "_has_statuses", "answers", "batch", "boot_id")

    def __init__(
        self,
        *,
        batch: TargetBatch,
        flow: FlowClass,
        deadline_ns: int,
        ask: Callable[[bytes, int], Message],
        answer: type[A],
        has_statuses: bool = True,
    ) -> None:
        """
        Args:
            ask: Makes the request for a blob of keys and the nanoseconds that are left.
            answer: Message that answers it.
            has_statuses: It must have one for each key.
        """
        super().__init__(target=batch.target, flow=flow, deadline_ns=deadline_ns, retries_max=READ_RETRIES_MAX)
        self.batch = batch
        self._ask = ask
        self._answer = answer
        self._has_statuses = has_statuses
        self.boot_id = b""
        self.answers: list[A] = []

    def run(self, connection: Connection) -> Steps:
        """Asks request after request; one deadline for all."""
        self.answers.clear()
        assert connection.welcome is not None
        self.boot_id = connection.welcome.boot_id
        for number, piece in enumerate(split_records(self.batch, items_max=connection.welcome.batch_items_max)):
            if number:
                self.arm(connection)
            answer = yield from connection.ask(self._ask(piece.keys, left_ns(self)), self._answer)
            statuses = statuses_in(answer)
            if len(statuses) != len(piece.records) and (statuses or self._has_statuses):
                raise Unavailable(
                    f"node at {connection.address} answered {len(piece.records)} keys with {len(statuses)} statuses"
                )
            self.answers.append(answer)

    def statuses(self) -> bytes | None:
        """One status per key of the batch, zeros where answers have none; None when the target did not answer."""
        if self.failure is not None:
            return None
        if not self._has_statuses:
            return bytes(len(self.batch.records))
        return b"".join([statuses_in(answer) for answer in self.answers])


class TellJob(Job):
    """One request without keys, answered with END; sends the manifest first when the node asks for it.

    Attributes:
        value: Of the END; 0 before it has come.
    """

    __slots__ = ("_manifest", "_message", "value")

    def __init__(
        self, *, target: TargetId, flow: FlowClass, deadline_ns: int, message: Message, manifest: Manifest | None = None
    ) -> None:
        super().__init__(target=target, flow=flow, deadline_ns=deadline_ns, retries_max=READ_RETRIES_MAX)
        self._message = message
        self._manifest = manifest
        self.value = 0

    def run(self, connection: Connection) -> Steps:
        """Asks once, or twice around the manifest."""
        try:
            end = yield from connection.ask(self._message, End)
        except UnknownNamespace:
            if self._manifest is None:
                raise
            yield from connection.ask(self._manifest, End)
            end = yield from connection.ask(self._message, End)
        self.value = end.value


def left_ns(job: Job) -> int:
    """What is left of a job's time, a little less, so that the node's answer arrives before the connection gives up.

    Raises:
        DeadlineExceeded: Nothing is left.
    """
    left = job.deadline_ns - time.monotonic_ns()
    if left <= 0:
        raise DeadlineExceeded("the call's deadline passed before the request was sent")
    return left - left // 20


def statuses_in(answer: Message) -> bytes:
    """The statuses that an answer carries, if it does."""
    return answer.statuses if isinstance(answer, End | MatchReply) else b""

"""The lane: one whole record into one piece of memory, from a node whose connection is idle, in one function.

`straight` serves several records; this serves the read that a decoding engine makes most, with what can be known
beforehand prepared: the request but for its key, and every field of the answer. When anything else is the case, the
call goes on the usual way from where it stands, with every byte that was received.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from kvstore.errors import ChecksumMismatch, DeadlineExceeded, KVStoreError, Unavailable
from kvstore.limits import DIGEST_BYTES, SLICE_BYTES_MAX
from kvstore.transport.exchange import Answer, read_exchange
from kvstore.types.checksum import crc32c, crc_table
from kvstore.types.keys import KeyChain
from kvstore.types.results import Hit, Miss
from kvstore.wire.plain import plain_data
from kvstore.wire.slices import Slice
from kvstore_client.connection import Connection
from kvstore_client.loads import Begun, node_deadline_ns
from kvstore_client.options import deadline_after
from kvstore_client.planner import Keys
from kvstore_client.regions import Item, region_of
from kvstore_client.target import RATE_BYTES_MIN, TargetLink
from kvstore_client.writer import Session

if TYPE_CHECKING:
    from kvstore_client.client import KVClient

_LANES_MAX: Final = 64  # lengths and deadlines that one namespace is read with
_HITS_MAX: Final = 1024  # results that are kept, to be given again: they are made of constants


class ReadLane:
    """Reads of records of one length, from the one target of a view, with one deadline. Thread-safe.

    Attributes:
        is_usable: False once it must be made anew: after a fork, when the client was closed, or with another view.
    """

    _IS_PLACED: ClassVar = False

    def __init__(
        self,
        session: Session,
        *,
        target: str,
        link: TargetLink,
        namespace: bytes,
        record_bytes: int,
        block_bytes: int,
        duration_ns: int,
    ) -> None:
        """
        Args:
            target: The reader that it is for; the very object.
            link: Of it.
            namespace: Digest.
            record_bytes: Of each record and destination; above 0, at most SLICE_BYTES_MAX.
            block_bytes: Checksum block that the records have if they were written by the book.
            duration_ns: Deadline of each call, from its start; above 0.
        """
        core = session.core
        self._session = session
        self._core = core
        self._counters = core.counters
        self._first_attempt = core.budget.first_attempt
        self._driver = session.driver
        self._flow = core.options.flow
        self._target = target
        self._link = link
        exchange = read_exchange(
            namespace,
            node_deadline_ns(duration_ns),
            record_bytes=record_bytes,
            block_bytes=block_bytes,
            is_placed=self._IS_PLACED,
        )
        self._send = exchange.send
        self._receive = exchange.receive
        self._ask = exchange.ask
        self._record_bytes = record_bytes
        self._block_bytes = block_bytes
        self._duration_ns = duration_ns
        self._armed_ns_max = duration_ns + (duration_ns >> 6)
        self._is_one_block = record_bytes <= block_bytes
        self._is_timed = record_bytes >= RATE_BYTES_MIN
        self._hits: dict[bytes, Hit] = {}

    @property
    def is_usable(self) -> bool:
        """See the class."""
        session = self._session
        return not session.is_closed and session.pid == os.getpid() and self._core.reader is self._target

    def read(self, key: bytes, view: memoryview) -> list[Hit | Miss] | Begun | int:
        """Reads one record.

        Args:
            key: Record key.
            view: Flat, writable, `record_bytes` long.

        Returns:
            The hit; or what to go on with; or when the call must begin anew its deadline, 0 if it has not begun.
        """
        now_ns = time.monotonic_ns()
        link = self._link
        if self._core.wants_view(now_ns):
            return 0
        connection = self._driver.take_ready(link, self._flow, now_ns)
        if connection is None:
            return 0
        quick = connection.quick
        assert quick is not None, "a connection that is not open was taken for ready"
        handle, _, next_id = quick
        connection.deadline_ns = deadline_ns = now_ns + self._duration_ns
        try:
            request_id = next_id()
            if not self._send(handle, request_id, link.view_epoch, key, b""):
                raise Unavailable("a request did not fit the socket of an idle connection")
            if not self._duration_ns <= connection.receive_timeout_ns <= self._armed_ns_max:
                connection.arm_receive(self._duration_ns)
            try:
                answer = self._receive(handle, request_id, view)
            except BlockingIOError:
                return self._go_on(connection, b"")  # too late, and it is known there what to do about it
            if not isinstance(answer, tuple):
                if answer:
                    return self._go_on(connection, answer)
                if answer is None:
                    raise ChecksumMismatch("a DATA frame was changed on the way; the connection must be opened anew")
                raise Unavailable(f"node at {connection.address} closed the connection; it may be restarting")
            count, epoch, content_id, table = answer
            if count != self._record_bytes:
                count = self._receive_rest(connection, view, count)
                if count != self._record_bytes:
                    return self._go_on(connection, self._head_again(answer, request_id) + bytes(view[:count]))
            if epoch > self._core.newest_epoch:
                self._core.saw_epoch(epoch)
            found = crc32c(view, 0).to_bytes(4, "little") if self._is_one_block else crc_table(view, self._block_bytes)
            if found != table:
                return self._ask_again(connection, content_id, table)
        except (KVStoreError, OSError):
            connection.close()
            self._driver.give_back(link, connection, time.monotonic_ns(), has_broken=True)
            return deadline_ns
        except BaseException:
            connection.close()
            self._driver.give_back(link, connection, time.monotonic_ns(), has_broken=False)
            raise
        return self._done(connection, content_id, now_ns)

    def _done(self, connection: Connection, content_id: bytes, now_ns: int) -> list[Hit | Miss]:
        """The record has come and is right."""
        link = self._link
        connection.idle_since_ns = now_ns
        self._driver.put_ready(link, connection)
        if self._is_timed:
            link.note_read(self._record_bytes, time.monotonic_ns() - now_ns)
        self._first_attempt()
        counters = self._counters
        counters.load_items += 1
        counters.load_hits += 1
        counters.load_bytes += self._record_bytes
        return [self._hits.get(content_id) or self._new_hit(content_id)]

    def _receive_rest(self, connection: Connection, view: memoryview, count: int) -> int:
        """Receives what is missing of the payload; how much of it there is then, less after the deadline."""
        try:
            while count < self._record_bytes:
                count += connection.receive_into((view[count:],), socket.MSG_WAITALL) or 0
        except DeadlineExceeded:
            pass  # it will be again, where it is known what to do about it
        return count

    def _head_again(self, answer: Answer, request_id: int) -> bytes:
        """The head that was received: all of it is known."""
        _, epoch, content_id, table = answer
        return plain_data(self._record_bytes, self._block_bytes).head(content_id, table, request_id, epoch)

    def _go_on(self, connection: Connection, received: bytes) -> Begun:
        """The answer is another one than expected: it is read by who knows all of them, from its first byte on."""
        connection.read_begun(received)
        return Begun(self._target, (self._link, connection), (), connection.deadline_ns)

    def _ask_again(self, connection: Connection, content_id: bytes, table: bytes) -> Begun:
        """The bytes do not match: whatever garbles them there shall not do it to the second try."""
        connection.close()
        self._driver.give_back(self._link, connection, time.monotonic_ns(), has_broken=False)
        length = self._record_bytes
        arrived = Slice(0, 0, length, 0, True, content_id, length, self._block_bytes, table)
        return Begun(self._target, None, (arrived,), connection.deadline_ns)

    def _new_hit(self, content_id: bytes) -> Hit:
        if len(self._hits) >= _HITS_MAX:
            self._hits.clear()
        hit = self._hits[content_id] = Hit(length_bytes=self._record_bytes, content_id=content_id)
        return hit


class Lanes:
    """The lanes of one namespace of a client: one for each length and deadline that calls have had."""

    def __init__(self, client: KVClient, *, namespace: bytes, block_bytes: int, record_bytes: int | None) -> None:
        """
        Args:
            client: Whose calls they are.
            namespace: Digest.
            block_bytes: Checksum block of its records.
            record_bytes: Length of its records; None when the layout does not fix it.
        """
        self._client = client
        self._namespace = namespace
        self._block_bytes = block_bytes
        self._exact_bytes = record_bytes
        self._lanes: dict[tuple[int, float | None, type[ReadLane]], ReadLane] = {}

    def read(
        self, keys: Keys, buffers: Sequence[Item], deadline: float | None, kind: type[ReadLane] = ReadLane
    ) -> list[Hit | Miss] | Begun | int:
        """Reads the record of one key into one piece of memory; see `ReadLane.read`. 0 for anything else.

        Args:
            kind: Of lane: how the record comes.

        Raises:
            InvalidRequest: As `get_into`.
            Closed: The client is closed.
        """
        if type(keys) is not KeyChain or len(buffers) != 1:
            return 0
        key = keys.digests
        if len(key) != DIGEST_BYTES or (keys.namespace_digest != self._namespace and keys.namespace_digest):
            return 0
        view = buffers[0]
        if type(view) is not memoryview or view.readonly or view.ndim != 1 or view.format != "B" or not view.contiguous:
            views = region_of(view, index=0, writable=True).views
            if len(views) != 1:
                return 0
            view = views[0]
        length = len(view)
        lane = self._lanes.get((length, deadline, kind))
        if lane is None or not lane.is_usable:
            lane = self._new_lane(length, deadline, kind)
            if lane is None:
                return 0
        return lane.read(key, view)

    def _new_lane(self, length: int, deadline: float | None, kind: type[ReadLane]) -> ReadLane | None:
        """A lane for such calls; None where the usual way has something to decide."""
        session = self._client.session()
        target = session.core.reader
        duration_ns = deadline_after(0, deadline, self._client.options.deadline_ns)
        if (
            type(target) is not str
            or duration_ns <= 0
            or not 0 < length <= SLICE_BYTES_MAX
            or self._exact_bytes not in (None, length)
        ):
            return None
        try:
            link = session.core.link(target)
        except Unavailable:
            return None
        if len(self._lanes) >= _LANES_MAX:
            self._lanes.clear()
        lane = self._lanes[length, deadline, kind] = kind(
            session,
            target=target,
            link=link,
            namespace=self._namespace,
            record_bytes=length,
            block_bytes=self._block_bytes,
            duration_ns=duration_ns,
        )
        return lane

"""WRITER_OPEN, WRITER_WRITE, WRITER_COMMIT, WRITER_ABORT: records that arrive layer by layer.

A writer belongs to its client, not to a connection: slices and commit may come over any of the client's connections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvstore.engine.api import Durability, Engine, NamespaceRef, PutTicket
from kvstore.errors import ChecksumMismatch, InvalidRequest
from kvstore.limits import REQUEST_NS_MAX, WRITER_BYTES_PER_CLIENT_MAX, WRITERS_PER_CLIENT_MAX
from kvstore.server.batch import Batch, pack_u32, unpack_u32
from kvstore.server.call import Call, shielded
from kvstore.server.clients import Client
from kvstore.server.outcomes import Outcomes, one_line
from kvstore.server.writer import Opening, Writer
from kvstore.telemetry.metrics import Verb
from kvstore.types.checksum import block_count
from kvstore.types.content_id import content_id
from kvstore.types.results import Exists, ItemStatus, Refused, RefusedReason, Stored
from kvstore.wire.frames import Frame
from kvstore.wire.header import FrameType
from kvstore.wire.messages import ID_BYTES, End, WriterAbort, WriterCommit, WriterOpen, WriterOpened
from kvstore.wire.slices import Slice

if TYPE_CHECKING:
    from kvstore.server.connection import Connection

_GONE = RefusedReason.DEADLINE
_GONE_TEXT = "is not open: it was committed, aborted, or not written to for its time to live"


class WriterOpenCall(Call):
    """One WRITER_OPEN: answered once every item was granted or refused."""

    __slots__ = ("_answered", "_batch", "_client", "_details", "_end", "_ids", "_open", "_opening", "_statuses")

    def __init__(self, connection: Connection, opening: WriterOpen, client: Client, *, now_ns: int) -> None:
        super().__init__(connection, Verb.WRITER, now_ns=now_ns, deadline_ns=now_ns + opening.deadline_ns)
        self._open = opening
        self._batch = Batch(opening)
        self._opening = Opening(opening.opening_id)
        self._client = client
        self._end: Callable[[], None] | None = None  # its entry in the client's openings
        count = self._batch.count
        self._ids = [0] * count
        self._statuses = bytearray([RefusedReason.DEADLINE]) * count
        self._details = [""] * count
        self._answered = 0

    def start(self, engine: Engine, namespace: NamespaceRef) -> None:
        """Asks for every item that the client's bounds leave room for."""
        client, opening_id = self._client, self._open.opening_id
        if opening_id:
            client.forget_opening(opening_id)
            self._end = client.openings[opening_id] = partial(self.connection.guard, self.cancel)
        count_left = WRITERS_PER_CLIENT_MAX - len(client.writers)
        bytes_left = WRITER_BYTES_PER_CLIENT_MAX - client.writer_bytes
        asked = []
        for item in range(self._batch.count):
            length = self._batch.lengths[item]
            defect = self._batch.defect(item)
            if defect:
                self._refuse(item, Refused(RefusedReason.INVALID, defect))
            elif count_left < 1 or bytes_left < length:
                limits = f"{WRITERS_PER_CLIENT_MAX} writers and {WRITER_BYTES_PER_CLIENT_MAX} bytes a client"
                detail = f"item {item} of {length} bytes would be over the limit of {limits}: commit some first"
                self._refuse(item, Refused(RefusedReason.OVERLOADED, detail))
            else:
                count_left -= 1
                bytes_left -= length
                asked.append(item)
        for item in asked:
            spec = self._batch.spec(
                item,
                namespace=namespace,
                flow=self.connection.flow,
                deadline_ns=self.deadline_ns,
                client_id=client.id,
            )
            engine.open_put(spec, partial(self._on_grant, item), streaming=True)
        self._end_if_complete()

    def refuse_all(self, outcome: Refused) -> None:
        """Nothing is opened."""
        for item in range(self._batch.count):
            self._refuse(item, outcome)
        self._end_if_complete()

    def cancel(self) -> None:
        self.finish(End())  # first: what the aborted ones let go must not be granted to this call
        self._abort_opened()

    def overdue(self) -> None:
        """The engine answers items at the deadline; nothing to do."""

    def release(self) -> None:
        self._abort_opened()

    @shielded
    def _on_grant(self, item: int, granted: PutTicket | Exists | Refused) -> None:
        if isinstance(granted, Refused):
            self._refuse(item, granted)
        elif isinstance(granted, Exists):
            self._statuses[item] = ItemStatus.EXISTS
            self._answered += 1
        elif self.over:
            granted.abort()
        else:
            writer = Writer(
                granted,
                record_bytes=self._batch.lengths[item],
                block_bytes=self._batch.block_bytes(item),
                ttl_ns=self._open.ttl_ns,
                now_ns=self.connection.now_ns,
                opening=self._opening,
            )
            self._ids[item] = self._client.add_writer(writer)
            self._statuses[item] = ItemStatus.GRANTED
            self._answered += 1
        self._end_if_complete()

    def _refuse(self, item: int, refusal: Refused) -> None:
        self._statuses[item] = refusal.reason
        self._details[item] = one_line(refusal.detail)
        self._answered += 1

    def _end_if_complete(self) -> None:
        if self._answered == self._batch.count and not self.over:
            details = "\n".join(self._details) if any(self._details) else ""
            self._leave_openings()
            self.connection.opened = self.request_id, self._ids
            self.finish(WriterOpened(writer_ids=pack_u32(self._ids), statuses=bytes(self._statuses), details=details))

    def _leave_openings(self) -> None:
        """Takes its own entry back: one that was refused at once has none, and the id's may be of an earlier try."""
        opening_id, openings = self._open.opening_id, self._client.openings
        if self._end is not None and openings.get(opening_id) is self._end:
            del openings[opening_id]

    def _abort_opened(self) -> None:
        """The client will never learn these ids."""
        ids, self._ids = self._ids, []
        self._leave_openings()
        self._client.doom(ids)


class WriterWriteCall(Call):
    """One WRITER_WRITE: memory for each slice, its payload, then the engine's verification."""

    __slots__ = ("_client", "_memory", "_missing", "_slices", "_starting", "_statuses", "_writers")

    def __init__(self, connection: Connection, client: Client, frame: Frame, *, now_ns: int) -> None:
        super().__init__(connection, Verb.WRITER, now_ns=now_ns, deadline_ns=now_ns + REQUEST_NS_MAX)
        count = len(frame.slices)
        self._client = client
        self._slices = frame.slices
        self._writers: list[Writer | None] = [None] * count  # those whose slice is on its way
        self._memory: list[memoryview | None] = [None] * count
        self._statuses = bytearray([ItemStatus.RECEIVED]) * count
        self._missing = 0
        self._starting = True

    def place(self, now_ns: int) -> Sequence[memoryview] | None:
        """Asks the engine for memory; None when some of it comes later, and the connection is resumed then."""
        for index, one in enumerate(self._slices):
            writer = self._client.writers.get(one.item)
            refusal = _refusal(writer, one)
            if writer is None or refusal is not None:
                self._statuses[index] = refusal or _GONE
                continue
            writer.begin_slice(now_ns)
            self._writers[index] = writer
            self._missing += 1
            writer.ticket.slice_buffer(one.length_bytes, partial(self._on_memory, index))
        self._starting = False
        return None if self._missing else self._views()

    def arrived(self, now_ns: int) -> None:
        """The payload is here: hand it to the engine, answer."""
        metrics = self.connection.metrics
        for index, one in enumerate(self._slices):
            writer, memory = self._writers[index], self._memory[index]
            if writer is None or memory is None:
                continue
            self._writers[index] = None
            metrics.received_bytes[self.connection.flow] += one.length_bytes
            try:
                writer.ticket.slice_filled(one.offset, memory, one.crcs)
            except (ChecksumMismatch, InvalidRequest):
                self._statuses[index] = RefusedReason.INVALID
                self._give_up_writer(one.item, writer)
            writer.touch(now_ns)
            writer.end_slice()
        self.finish(End(statuses=bytes(self._statuses)))

    def release(self) -> None:
        """The payload will not come whole: its writers end, since their memory may be half filled."""
        for index, one in enumerate(self._slices):
            writer = self._writers[index]
            if writer is not None:
                self._writers[index] = None
                self._give_up_writer(one.item, writer)
                writer.end_slice()

    @shielded
    def _on_memory(self, index: int, memory: memoryview | None) -> None:
        if self.over:
            return
        self._missing -= 1
        self._memory[index] = memory
        writer = self._writers[index]
        if memory is None and writer is not None:
            self._statuses[index] = RefusedReason.OVERLOADED
            self._writers[index] = None
            writer.end_slice()
        if not self._missing and not self._starting:
            self.connection.resume(self._views())

    def _give_up_writer(self, writer_id: int, writer: Writer) -> None:
        if self._client.writers.get(writer_id) is writer:
            self._client.take_writer(writer_id)
        writer.doom()

    def _views(self) -> list[memoryview]:
        """The destination: the engine's memory, and scratch for slices that are refused."""
        views: list[memoryview] = []
        for memory, one in zip(self._memory, self._slices, strict=True):
            if memory is not None:
                views.append(memory)
            else:
                views += self.connection.channel.reader.scratch_views(one.length_bytes)
        return views


class WriterCommitCall(Call):
    """One WRITER_COMMIT: RESULT for each writer as it ends, then END."""

    __slots__ = ("_client", "_commit", "_count", "_ended", "_outcomes")

    def __init__(self, connection: Connection, client: Client, commit: WriterCommit, *, now_ns: int) -> None:
        super().__init__(connection, Verb.WRITER, now_ns=now_ns, deadline_ns=now_ns + commit.deadline_ns)
        self._client = client
        self._commit = commit
        self._count = len(commit.writer_ids) // 4
        self._ended: set[int] = set()
        self._outcomes = Outcomes()

    def refuse_all(self, refusal: Refused) -> None:
        """No writer is committed; they stay open."""
        for item in range(self._count):
            self._end(item, refusal)
        self.connection.request_send()

    def start(self) -> None:
        """
        Raises:
            InvalidRequest: The CRC tables do not fit the writers.
        """
        commit = self._commit
        writer_ids = unpack_u32(commit.writer_ids)
        writers = [self._client.writers.get(writer_id) for writer_id in writer_ids]
        words = sum(block_count(one.record_bytes, one.block_bytes) for one in writers if one is not None)
        if words * 4 != len(commit.crc_tables) and None not in writers:
            raise InvalidRequest(
                f"WRITER_COMMIT.crc_tables has {len(commit.crc_tables) // 4} words, its writers need {words}"
            )
        at = 0
        for item, (writer_id, writer) in enumerate(zip(writer_ids, writers, strict=True)):
            if writer is None or None in writers:
                # without every writer's length nobody can tell which words are whose
                self._end(item, Refused(_GONE, f"writer {writer_id} {_GONE_TEXT}, or another of this commit is"))
                continue
            stop = at + 4 * block_count(writer.record_bytes, writer.block_bytes)
            if writer.receiving:
                self._end(
                    item, Refused(RefusedReason.INVALID, f"writer {writer_id} has slices on their way: wait for them")
                )
            elif self._client.take_writer(writer_id) is None:
                self._end(item, Refused(RefusedReason.INVALID, f"writer {writer_id} stands twice in this commit"))
            else:
                chosen = commit.content_ids[item * ID_BYTES : (item + 1) * ID_BYTES]
                self._commit_one(item, writer, commit.crc_tables[at:stop], chosen)
            at = stop
        self.connection.request_send()

    def has_output(self) -> bool:
        return not self.over and (bool(self._outcomes) or len(self._ended) == self._count)

    def pump(self) -> None:
        connection = self.connection
        for result in self._outcomes.take():
            connection.session.send(FrameType.RESULT)
            connection.channel.send(result, self.request_id, epoch=connection.epoch)
        if len(self._ended) == self._count:
            self.finish(End())

    def cancel(self) -> None:
        self.overdue()

    def overdue(self) -> None:
        for item in range(self._count):
            self._end(item, Refused(RefusedReason.OUTCOME_UNKNOWN, "the deadline passed while it was being committed"))

    def _commit_one(self, item: int, writer: Writer, crc_table: bytes, chosen: bytes) -> None:
        writer.opening.is_heard = True
        commit = self._commit
        is_named = any(chosen)
        if is_named and chosen[:8] != content_id(writer.record_bytes, crc_table, b"")[:8]:
            writer.ticket.abort()
            self._end(item, Refused(RefusedReason.INVALID, "the content id is not of these bytes; make it of them"))
            return
        try:
            writer.ticket.commit(
                crc_table=crc_table,
                content_id=chosen if is_named else None,
                durability=Durability(commit.durability),
                on_received=None if commit.wait else partial(self._on_received, item),
                on_done=partial(self._end, item),
            )
        except ChecksumMismatch as error:
            writer.ticket.abort()
            self._end(item, Refused(RefusedReason.INVALID, str(error)))

    @shielded
    def _on_received(self, item: int) -> None:
        if item not in self._ended and not self.over:
            self._ended.add(item)
            self._outcomes.add(item, ItemStatus.RECEIVED)
            self.connection.request_send()

    @shielded
    def _end(self, item: int, outcome: Stored | Exists | Refused) -> None:
        if item not in self._ended and not self.over:
            self._ended.add(item)
            self._outcomes.add_outcome(item, outcome)
            self.connection.request_send()


def open_writers(
    connection: Connection,
    body: bytes | bytearray,
    client: Client,
    engine: Engine,
    *,
    refusal: Refused | None,
    now_ns: int,
) -> None:
    """Begins a WRITER_OPEN; with `refusal` every item ends so."""
    opening = WriterOpen.decode(body)
    call = WriterOpenCall(connection, opening, client, now_ns=now_ns)
    connection.call = call
    namespace = engine.namespace(opening.namespace)
    if refusal is not None:
        call.refuse_all(refusal)
    elif namespace is None:
        detail = f"namespace {opening.namespace.hex()} is not known here: send its manifest, then ask again"
        call.refuse_all(Refused(RefusedReason.UNKNOWN_NAMESPACE, detail))
    else:
        call.start(engine, namespace)


def abort_writers(client: Client, message: WriterAbort) -> End:
    """Forgets writers; unknown ids are ignored."""
    client.doom(unpack_u32(message.writer_ids))
    return End()


def _refusal(writer: Writer | None, one: Slice) -> RefusedReason | None:
    """Why a slice cannot be taken, None when it can."""
    if writer is None:
        return _GONE
    fits = one.record_bytes == writer.record_bytes and one.block_bytes == writer.block_bytes
    is_whole = one.length_bytes % writer.block_bytes == 0 or one.offset + one.length_bytes == writer.record_bytes
    has_crcs = len(one.crcs) == 4 * block_count(one.length_bytes, writer.block_bytes)
    return None if fits and is_whole and has_crcs and one.length_bytes else RefusedReason.INVALID

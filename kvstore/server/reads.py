"""GET: pieces of records on their way from the engine to the client's connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from kvstore.engine.api import CachedItem, Engine, NamespaceRef, Parcel, ParcelSource, ReadSpec, ReadyItem
from kvstore.limits import (
    DIGEST_BYTES,
    FRAME_AIM_BYTES,
    FRAME_PAYLOAD_BYTES_MAX,
    MEMORY_READ_BYTES_MAX,
    READ_PART_REPEATS,
    SLICE_BYTES_MAX,
    SLICES_PER_FRAME_MAX,
)
from kvstore.server.call import Call, end_absent, end_read
from kvstore.server.piece_call import OPEN, PieceCall
from kvstore.server.read_parts import has_parts, parts_of
from kvstore.telemetry.metrics import DataplaneMetrics, Verb
from kvstore.types.results import MissReason
from kvstore.wire.expected import plain_get
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.messages import Get
from kvstore.wire.ranges import decode_ranges
from kvstore.wire.slices import FLAG_FINAL, Slice, encode_slices

if TYPE_CHECKING:
    from kvstore.server.connection import Connection, OnSent

_new_slice = tuple.__new__  # a third of what the constructor of a named tuple costs


class ReadCall(PieceCall):
    """One GET. Pieces and parcels go out as DATA, a frame each turn; they are held until the socket has taken them."""

    __slots__ = ("_cut_at", "_is_whole", "_metrics", "_parcels", "_sent_parcels")

    def __init__(
        self, connection: Connection, count: int, metrics: DataplaneMetrics, *, now_ns: int, deadline_ns: int
    ) -> None:
        super().__init__(connection, count, now_ns=now_ns, deadline_ns=deadline_ns)
        self._metrics = metrics
        self._cut_at = 0  # bytes of the first piece that went out in earlier frames
        self._parcels: deque[ParcelSource] = deque()  # those that something has landed of
        self._sent_parcels: list[Parcel] = []  # only what they were of is looked at
        self._is_whole = False  # no ranges, any copy: the last frame may end the call

    def go_on(self, engine: Engine, spec: ReadSpec, now_ns: int, *, sent: int) -> None:
        """Begins with the items behind the first `sent`, whose keys are the spec's: those have been sent already."""
        self._statuses[:sent] = bytes(sent)
        self._is_whole = True
        self._hold(engine.read(spec, Behind(self, sent), now_ns=now_ns))
        self._starting = False

    def start(self, engine: Engine, spec: ReadSpec, now_ns: int) -> bool:
        """See `PieceCall.start`."""
        self._is_whole = spec.ranges is None and spec.content_ids is None and self.connection.ends_with_data
        return super().start(engine, spec, now_ns)

    # --- ReadSink ---------------------------------------------------------------------------------------------------
    def landed(self, source: ParcelSource) -> None:
        """Records to take, right before they are sent."""
        if source not in self._parcels:
            self._parcels.append(source)
        if not self.connection.in_turn:
            self.connection.request_send()

    def missed(self, index: int, reason: MissReason) -> None:
        """An item that will not come; END says so."""
        self._statuses[index] = reason
        self._is_whole = False

    # --- Call -------------------------------------------------------------------------------------------------------
    def has_output(self) -> bool:
        return bool(self._parcels) or bool(self._pieces) or (self._finished and not self.over)

    def pump(self) -> None:
        if self._parcels:
            self._send_parcel()
        elif self._pieces:
            self._send_frame()
        if self._finished and not self._pieces and not self.over:
            self._end()

    def release(self) -> None:
        self._parcels.clear()
        if self._cut_at:
            # earlier slices of this piece may still be queued: its memory is theirs
            self.connection.channel.writer.when_sent(self._pieces.popleft().release)
            self._cut_at = 0
        super().release()

    def _send_parcel(self) -> None:
        """Sends the next parcel: it is checked now, when the socket takes it. Drives take turns."""
        sources = self._parcels
        while sources:
            source = sources[0]
            parcel = source.take()
            if parcel is not None:
                sources.rotate(-1)
                self._sent_parcels.append(parcel)
                self._push(parcel.body, parcel.count, parcel.payload, parcel.payload_bytes, parcel.release)
                return
            sources.remove(source)

    def _send_frame(self) -> None:
        """Packs pieces into one DATA frame: many small ones together, a large one cut at checksum blocks."""
        pieces, statuses = self._pieces, self._statuses
        if len(pieces[0].data) > SLICE_BYTES_MAX:
            self._send_cut()
            return
        slices: list[Slice] = []
        sent: list[ReadyItem] = []
        total = 0
        for item in islice(pieces, SLICES_PER_FRAME_MAX):
            length = len(item.data)
            if total + length > FRAME_AIM_BYTES and sent:
                break
            total += length
            sent.append(item)
            index, last = item.index, item.last
            slices.append(
                _new_slice(
                    Slice,
                    (
                        index,
                        item.offset,
                        length,
                        0,
                        last,
                        item.content_id,
                        item.record_bytes,
                        item.block_bytes,
                        item.crcs,
                    ),
                )
            )
            if last:
                statuses[index] = 0
        if len(sent) == len(pieces):
            pieces.clear()
        else:
            for _ in sent:
                pieces.popleft()
        self._queue(slices, [item.data for item in sent if item.data], total, sent)

    def _send_cut(self) -> None:
        """Sends a frame of the first piece, which is too large for one."""
        item = self._pieces[0]
        slices, payload, total = self._cut(item)
        sent: list[ReadyItem] = []
        if not self._cut_at:  # else more of it follows, in frames of its own
            sent.append(self._pieces.popleft())
            if item.last:
                self._statuses[item.index] = 0
        self._queue(slices, payload, total, sent)

    def _queue(self, slices: list[Slice], payload: list[memoryview], total: int, sent: list[ReadyItem]) -> None:
        self._push(encode_slices(slices), len(slices), payload, total, partial(release_all, sent))

    def _push(self, body: bytes, count: int, payload: list[memoryview], total: int, on_sent: OnSent) -> None:
        """Queues a frame; the last one of a call without a miss ends it."""
        connection = self.connection
        is_final = self._finished and self._is_whole and not self._pieces
        if is_final:
            count |= FLAG_FINAL
            self.over = True
            metrics = self._metrics
            metrics.get_ns.observe(connection.clock() - self.started_ns)
            metrics.loaded_records += len(self._statuses)
            connection.end_with_data(self)
        else:
            connection.session.send(FrameType.DATA)
        head = encode_head(
            FrameType.DATA, self.request_id, body, payload_bytes=total, epoch=connection.epoch, flags=count
        )
        connection.channel.writer.push(head, payload, payload_bytes=total, on_sent=on_sent)
        self._metrics.sent_bytes[connection.flow] += total

    def _cut(self, item: ReadyItem) -> tuple[list[Slice], list[memoryview], int]:
        """The next part of a large piece, whole checksum blocks; `_cut_at` is 0 again when it was the last."""
        block_bytes = item.block_bytes
        at = self._cut_at
        left = len(item.data) - at
        length = min(left, SLICE_BYTES_MAX // block_bytes * block_bytes)
        first = at // block_bytes * 4
        words = -(-length // block_bytes) * 4
        one = Slice(
            item=item.index,
            offset=item.offset + at,
            length_bytes=length,
            status=0,
            last=item.last and length == left,
            content_id=item.content_id,
            record_bytes=item.record_bytes,
            block_bytes=block_bytes,
            crcs=item.crcs[first : first + words],
        )
        self._cut_at = at + length if length < left else 0
        return [one], [item.data[at : at + length]], length

    def _end(self) -> None:
        for parcel in self._sent_parcels:
            for index in parcel.indices:
                self._statuses[index] = 0
        super()._end()


class PartedReadCall(ReadCall):
    """One GET of so much that it is read part by part: the next one begins, in a turn of its own, when the last has
    gone out."""

    __slots__ = ("_asked_ns", "_engine", "_next", "_part_ended", "_parts")

    def start(self, engine: Engine, spec: ReadSpec, now_ns: int) -> bool:
        """See `PieceCall.start`."""
        self._is_whole = spec.ranges is None and spec.content_ids is None and self.connection.ends_with_data
        self._begin(engine, spec, now_ns, first=0)
        return False

    def go_on(self, engine: Engine, spec: ReadSpec, now_ns: int, *, sent: int) -> None:
        """See `ReadCall.go_on`."""
        self._statuses[:sent] = bytes(sent)
        self._is_whole = True
        self._begin(engine, spec, now_ns, first=sent)

    def _begin(self, engine: Engine, spec: ReadSpec, now_ns: int, *, first: int) -> None:
        self._engine = engine
        self._parts = ((first + at, part) for at, part in parts_of(spec))
        self._next = next(self._parts, None)
        self._start_part(now_ns)

    def _start_part(self, now_ns: int) -> None:
        assert self._next is not None, "no part is left"
        first, spec = self._next
        self._asked_ns = now_ns
        self._next = next(self._parts, None)
        self._part_ended = False
        self._starting = True
        handle = self._engine.read(spec, Behind(self, first), now_ns=now_ns)
        self._starting = False
        if not self._part_ended:
            self._hold(handle)
        self.connection.wake_engine()
        self.connection.request_send()

    def finished(self) -> None:
        """Nothing more comes of this part, or at all."""
        self._part_ended = True
        if self._next is None:
            super().finished()
            return
        self._handle = None
        if not self._starting:
            self.connection.request_send()

    def has_output(self) -> bool:
        return super().has_output() or (self._part_ended and self._next is not None)

    def pump(self) -> None:
        if self._part_ended and self._next is not None and not self._pieces and not self._parcels:
            if self.connection.now_ns != self._asked_ns:  # a part that is all misses has ended in the turn it began in
                self._start_part(self.connection.now_ns)
        else:
            super().pump()

    def release(self) -> None:
        self._next = None
        super().release()


class Behind:
    """Sink of the items behind the first ones of a batch: their indices become those of the batch."""

    def __init__(self, call: PieceCall, first: int) -> None:
        self._call = call
        self._first = first
        self.finished = call.finished

    def ready(self, item: ReadyItem) -> None:
        item.index += self._first
        self._call.ready(item)

    def missed(self, index: int, reason: MissReason) -> None:
        self._call.missed(index + self._first, reason)


class MemoryCall(Call):
    """One GET of records that all lay in memory when it came: some frames of them are made when the socket takes more.

    Only what is in those is held. When something is gone that is still to come, the rest goes the general way.
    """

    BYTES_MAX: ClassVar = MEMORY_READ_BYTES_MAX
    """Of what is taken at a time."""

    __slots__ = ("_at", "_count", "_engine", "_keys", "_metrics", "_namespace", "_records", "_sent_bytes", "_step")

    def __init__(
        self,
        connection: Connection,
        engine: Engine,
        namespace: NamespaceRef,
        keys: bytes,
        records: Sequence[CachedItem],
        *,
        now_ns: int,
        deadline_ns: int,
    ) -> None:
        """Takes over the first `records`, held."""
        super().__init__(connection, Verb.GET, now_ns=now_ns, deadline_ns=deadline_ns)
        self._engine = engine
        self._namespace = namespace
        self._keys = keys
        self._count = len(keys) // DIGEST_BYTES
        self._metrics = connection.metrics
        self._records: Sequence[CachedItem] | None = records
        self._step = len(records)  # how many were taken at a time
        self._at = 0
        self._sent_bytes: int | None = None  # of the connection, when it was seen to be overdue

    def has_output(self) -> bool:
        return not self.over

    def pump(self) -> None:
        connection = self.connection
        if connection.now_ns >= self.deadline_ns:
            self.cancel()
            return
        records, self._records = self._records, None
        if records is None:
            front = self._keys[self._at * DIGEST_BYTES : (self._at + 2 * self._step) * DIGEST_BYTES]
            records = self._engine.take_cached(
                self._namespace, front, now_ns=connection.now_ns, bytes_max=self.BYTES_MAX
            )
            if records is None:
                self._go_on()
                return
        self._step = len(records)
        taken = 0
        while taken < len(records):
            slices, payload, total = frame_of(records, taken, self._at)
            stop = taken + len(slices)
            self._at += len(slices)
            if self._at == self._count:
                self._metrics.loaded_records += self._count
            self._send(slices, payload, total, partial(release_all, records[taken:stop]))
            taken = stop

    def _send(self, slices: list[Slice], payload: list[memoryview], total: int, on_sent: OnSent) -> None:
        """Queues a frame; the last one ends the call."""
        connection = self.connection
        if self._at == self._count:
            self.over = True
            connection.end_with_data(self)
            self._metrics.get_ns.observe(connection.clock() - self.started_ns)
        else:
            connection.session.send(FrameType.DATA)
        connection.channel.writer.push_slices(
            slices,
            payload,
            self.request_id,
            payload_bytes=total,
            epoch=connection.epoch,
            is_final=self.over,
            on_sent=on_sent,
        )
        self._metrics.sent_bytes[connection.flow] += total

    def cancel(self) -> None:
        """Ends with what was sent; the rest is past its deadline."""
        self.release()
        end_read(self, bytes(self._at) + bytes([OPEN]) * (self._count - self._at))

    def overdue(self) -> None:
        """One who reads on, however slowly, is told of the end behind what is queued."""
        before, self._sent_bytes = self._sent_bytes, self.connection.channel.sent_bytes
        if before is not None and self._sent_bytes > before:
            self.cancel()
        else:
            self.close_unread()

    def release(self) -> None:
        records, self._records = self._records, None
        if records is not None:
            release_all(records)

    def _go_on(self) -> None:
        connection, now_ns = self.connection, self.connection.now_ns
        self.over = True
        spec = ReadSpec(
            namespace=self._namespace,
            keys=self._keys[self._at * DIGEST_BYTES :],
            flow=connection.flow,
            deadline_ns=self.deadline_ns,
            reader_checks=connection.reader_checks,
        )
        kind = PartedReadCall if has_parts(spec) else ReadCall
        call = kind(connection, self._count, self._metrics, now_ns=self.started_ns, deadline_ns=self.deadline_ns)
        connection.call = call
        call.go_on(self._engine, spec, now_ns, sent=self._at)
        connection.wake_engine()
        connection.request_send()


def start_get(connection: Connection, body: bytes | bytearray, engine: Engine, *, now_ns: int) -> bool:
    """Begins the GET in `body`; True when the engine has something left to do.

    Raises:
        InvalidRequest: The message is malformed.
    """
    metrics = connection.metrics
    plain = plain_get(body) if connection.ends_with_data else None
    if plain is not None and _answer_from_memory(connection, engine, *plain, now_ns=now_ns):
        metrics.calls[Verb.GET] += 1
        return False
    get = None
    ranges: Sequence[Sequence[tuple[int, int]]] | None = None
    if plain is not None:
        digest, keys, left_ns = plain  # judged already
    else:
        get = Get.decode(body)
        digest, keys, left_ns = get.namespace, get.keys, get.deadline_ns
        ranges = decode_ranges(get)
    metrics.calls[Verb.GET] += 1
    count = len(keys) // DIGEST_BYTES
    namespace = engine.namespace(digest)
    deadline_ns = now_ns + left_ns
    if namespace is None:
        connection.call = absent = ReadCall(connection, count, metrics, now_ns=now_ns, deadline_ns=deadline_ns)
        end_absent(absent, count)
        return False
    if get is None:
        spec = ReadSpec(
            namespace=namespace,
            keys=keys,
            flow=connection.flow,
            deadline_ns=deadline_ns,
            reader_checks=connection.reader_checks,
        )
    else:
        spec = ReadSpec(
            namespace=namespace,
            keys=keys,
            flow=connection.flow,
            deadline_ns=deadline_ns,
            ranges=ranges,
            content_ids=get.content_ids or None,
            accept_pending=get.accept_pending,
            verify=get.verify,
            reader_checks=connection.reader_checks,
        )
    kind = PartedReadCall if (ranges is not None or count > READ_PART_REPEATS) and has_parts(spec) else ReadCall
    call = kind(connection, count, metrics, now_ns=now_ns, deadline_ns=deadline_ns)
    connection.call = call
    return not call.start(engine, spec, now_ns)


def _answer_from_memory(
    connection: Connection, engine: Engine, digest: bytes, keys: bytes, deadline_ns: int, *, now_ns: int
) -> bool:
    """Answers a GET when all of it lies in memory and the connection is free: with one frame, or begins; else False."""
    namespace = engine.namespace(digest)
    if namespace is None or not keys or not deadline_ns or not connection.can_answer_at_once:
        return False
    records = engine.take_cached(namespace, keys, now_ns=now_ns, bytes_max=MEMORY_READ_BYTES_MAX)
    if records is None:
        return False
    slices, payload, total = frame_of(records, 0, 0)
    if len(slices) * DIGEST_BYTES < len(keys):
        connection.call = MemoryCall(
            connection, engine, namespace, keys, records, now_ns=now_ns, deadline_ns=now_ns + deadline_ns
        )
        connection.send_now()
        return True
    head = encode_head(
        FrameType.DATA,
        connection.session.request_id,
        encode_slices(slices),
        payload_bytes=total,
        epoch=connection.epoch,
        flags=len(slices) | FLAG_FINAL,
    )
    connection.send_final_data(head, payload, total, partial(release_all, records))
    metrics = connection.metrics
    metrics.sent_bytes[connection.flow] += total
    metrics.get_ns.observe(connection.clock() - now_ns)
    metrics.loaded_records += len(slices)
    return True


def frame_of(records: Sequence[CachedItem], start: int, item: int) -> tuple[list[Slice], list[memoryview], int]:
    """Slices, payload and its length of a frame of as many whole records from `start` on as it takes, at least one.

    Args:
        records: none longer than SLICE_BYTES_MAX.
        start: the first of them.
        item: its index in the request.
    """
    slices: list[Slice] = []
    payload: list[memoryview] = []
    total = 0
    for index, record in enumerate(islice(records, start, start + SLICES_PER_FRAME_MAX), item):
        facts = record.facts
        length = facts.record_bytes
        total += length
        if total > FRAME_PAYLOAD_BYTES_MAX:
            return slices, payload, total - length
        fields = (index, 0, length, 0, True, facts.content_id, length, facts.block_bytes, facts.crcs)
        slices.append(_new_slice(Slice, fields))
        if length:
            payload.append(record.view)
    return slices, payload, total


def release_all(sent: Sequence[ReadyItem | CachedItem]) -> None:
    """Gives back what has been sent, or will not be."""
    for item in sent:
        item.release()

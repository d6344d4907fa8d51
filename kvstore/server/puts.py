"""OFFER: records on their way from the client's connection into the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstore.engine.api import Engine, NamespaceRef, PutColumns, PutParcel, PutTicket
from kvstore.errors import ChecksumMismatch, InvalidRequest
from kvstore.limits import (
    BATCH_ITEMS_MAX,
    PUT_WINDOW_BYTES,
    PUT_WINDOW_ITEMS,
    RESULTS_WAIT_NS,
    WRITE_WAVE_BYTES,
)
from kvstore.server.batch import Batch
from kvstore.server.call import Call, shielded
from kvstore.server.outcomes import Outcomes
from kvstore.telemetry.metrics import Verb
from kvstore.transport.base import Landing
from kvstore.types.results import Exists, ItemStatus, Refused, RefusedReason, Stored
from kvstore.wire.header import FrameType
from kvstore.wire.messages import End, Offer
from kvstore.wire.slices import Slice

if TYPE_CHECKING:
    from kvstore.server.connection import Connection


_FIRST_ITEMS: Final = 4
_LATE_WAVES: Final = 2  # how often a parcel of which more has come meanwhile is waited for once more


class PutCall(Call):
    """One OFFER. Items are opened within a window, granted as the engine has memory, and end one by one.

    An item is open (asked of the engine), granted (its payload is on its way), committed, or ended. Items of one shape
    go in parcels, where the engine gives them; `_parcels` says which item is in which, and `_tickets` holds those that
    go alone, as long as they are not committed.
    """

    __slots__ = (
        "_advancing",
        "_alone_until",
        "_are_alike",
        "_batch",
        "_columns",
        "_committed",
        "_ended",
        "_ended_count",
        "_engine",
        "_inline",
        "_landings",
        "_namespace",
        "_next",
        "_open_bytes",
        "_open_count",
        "_outcomes",
        "_parcels",
        "_sent_ns",
        "_tickets",
        "_wait_durable",
        "_wave",
        "_wave_bytes",
        "_wave_number",
    )

    def __init__(
        self,
        connection: Connection,
        offer: Offer,
        batch: Batch,
        engine: Engine,
        namespace: NamespaceRef | None,
        payload: memoryview | None,
        *,
        now_ns: int,
    ) -> None:
        """
        Args:
            payload: All items' bytes when they came with the offer.
            namespace: None refuses every item.
        """
        super().__init__(connection, Verb.PUT, now_ns=now_ns, deadline_ns=now_ns + offer.deadline_ns)
        self._batch = batch
        self._engine = engine
        self._namespace = namespace
        self._wait_durable = offer.wait == 1
        self._inline = _cut(payload, batch.lengths) if payload is not None else None
        self._next = 0
        self._open_count = 0
        self._open_bytes = 0
        self._ended = bytearray(batch.count)
        self._ended_count = 0
        self._committed: set[int] = set()
        self._tickets: dict[int, PutTicket] = {}
        self._columns: PutColumns | None = None
        self._alone_until = 0  # up to here the engine gives no parcels
        self._parcels: dict[int, PutParcel] = {}
        self._landings: list[Landing] = []
        self._are_alike = True  # the landings: all in parcels
        self._wave: list[int] = []  # arrived, but not handed over yet
        self._wave_bytes = 0
        self._wave_number = 0
        self._outcomes = Outcomes()
        self._sent_ns = now_ns  # when results were sent last
        self._advancing = False

    def start(self) -> None:
        """Opens what the window allows. The first few are granted at once, so that the client sends meanwhile."""
        assert self._namespace is not None
        assert self.connection.client is not None
        if self._inline is None:
            self._columns = self._batch.columns(
                namespace=self._namespace,
                flow=self.connection.flow,
                deadline_ns=self.deadline_ns,
                client_id=self.connection.client.id,
            )
        self._advance(items_max=_FIRST_ITEMS)
        if self._landings and self._next < self._batch.count:
            self.connection.send_now()
        self._advance()
        self.connection.request_send()

    def refuse_all(self, reason: RefusedReason, detail: str) -> None:
        """Nothing of the batch is taken."""
        self._advancing = True  # no item's end opens the next one
        for item in range(self._batch.count):
            self._end(item, Refused(reason, detail))

    # --- Call -------------------------------------------------------------------------------------------------------
    def has_output(self) -> bool:
        return not self.over and (bool(self._landings) or self._is_complete() or self._results_are_due())

    def pump(self) -> None:
        connection = self.connection
        if self._landings:
            landings, self._landings = connection.channel.share_of(self._landings, self.request_id)
            connection.session.send(FrameType.GRANT)
            block_bytes = 0
            if self._columns is not None and self._are_alike:
                block_bytes = self._columns.block_bytes
            self._are_alike = True
            connection.channel.fetch(landings, self.request_id, self, epoch=connection.epoch, block_bytes=block_bytes)
        is_complete = self._is_complete()
        if is_complete or self._results_are_due():
            self._sent_ns = connection.now_ns
            for result in self._outcomes.take():
                connection.session.send(FrameType.RESULT)
                connection.channel.send(result, self.request_id, epoch=connection.epoch)
        if is_complete:
            connection.metrics.put_ns.observe(connection.clock() - self.started_ns)
            self.finish(End())

    def cancel(self) -> None:
        self._give_up("the client cancelled the call")

    def overdue(self) -> None:
        self.connection.metrics.deadlines += 1
        self._give_up("the deadline passed before it was stored; give more time or offer less at once")

    def release(self) -> None:
        self._hand_over()
        self._landings = []
        tickets, self._tickets = self._tickets, {}
        parcels, self._parcels = self._parcels, {}

        def give_back() -> None:
            for ticket in tickets.values():
                ticket.abort()
            for parcel in parcels.values():
                parcel.abort()
            if tickets or parcels:
                self.connection.wake_engine()

        self.connection.channel.unfetch(give_back)

    # --- FetchEvents ------------------------------------------------------------------------------------------------
    def arrived(self, one: Slice, arrived_bytes: int) -> None:
        """Some of a slice is in its record's buffer."""
        parcel = self._parcels.get(one.item)
        if parcel is not None:
            parcel.arrived(one.item, one.offset, arrived_bytes, one.crcs)
            return
        ticket = self._tickets.get(one.item)
        if ticket is not None:
            ticket.arrived(one.offset, arrived_bytes, one.crcs)

    def fetched(self, item: int) -> None:
        """All bytes of an item are in its buffer. The engine gets several at once while more are coming."""
        connection = self.connection
        length = self._batch.lengths[item]
        connection.metrics.received_bytes[connection.flow] += length
        parcel = self._parcels.get(item)
        if parcel is not None:
            parcel.missing -= 1
            if not parcel.missing:
                self._commit_parcel(parcel)
                connection.wake_engine()
            elif parcel.missing == parcel.count - 1:
                self._gather_parcel(parcel, _LATE_WAVES)
            return
        wave = self._wave
        wave.append(item)
        self._wave_bytes += length
        if self._wave_bytes >= WRITE_WAVE_BYTES or len(wave) == len(self._tickets):
            self._hand_over()
        elif len(wave) == 1:
            connection.gather(partial(self._hand_over_late, self._wave_number))

    def _hand_over_late(self, wave_number: int) -> None:
        """Nothing more came soon enough."""
        if wave_number == self._wave_number:
            self._hand_over()

    def came(self, items: Sequence[int], tables: bytes, *, are_good: bool) -> None:
        """All bytes of items in parcels are in their buffers, with these CRC tables."""
        connection = self.connection
        count = len(items)
        connection.metrics.received_bytes[connection.flow] += count * self._batch.lengths[items[0]]
        step = len(tables) // count
        at = 0
        while at < count and not self.over:
            first = items[at]
            parcel = self._parcels[first]
            some = min(count - at, parcel.first + parcel.count - first)
            parcel.came(
                first, tables[at * step : (at + some) * step] if some < count else tables, some, are_good=are_good
            )
            at += some
            parcel.missing -= some
            if not parcel.missing:
                self._commit_parcel(parcel)
                connection.wake_engine()
            elif parcel.missing + some == parcel.count:
                self._gather_parcel(parcel, _LATE_WAVES)

    def _gather_parcel(self, parcel: PutParcel, waves_left: int) -> None:
        self.connection.gather(partial(self._commit_late, parcel, parcel.missing, waves_left))

    def _commit_late(self, parcel: PutParcel, missing_before: int, waves_left: int) -> None:
        """Where the rest of a parcel does not come soon enough, what is whole goes on without it."""
        if self.over or self._parcels.get(parcel.first) is not parcel:
            return
        if waves_left and parcel.missing < missing_before:
            self._gather_parcel(parcel, waves_left - 1)
            return
        self._commit_whole(parcel)
        self.connection.wake_engine()

    def _commit_whole(self, parcel: PutParcel) -> None:
        """What is whole of a parcel goes on: the first records together, or each alone."""
        there = parcel.count - parcel.missing
        whole = parcel.whole()
        if not there:
            return
        if all(whole[:there]) and parcel.missing:
            self._commit_parcel(self._cut(parcel, there))
            return
        for one, is_whole in zip(self._singles(parcel), whole, strict=True):
            if is_whole:
                self._commit_parcel(one)

    def _cut(self, parcel: PutParcel, count: int) -> PutParcel:
        part = parcel.cut(count)
        self._parcels.update(dict.fromkeys(range(part.first, part.first + part.count), part))
        return part

    def _singles(self, parcel: PutParcel) -> list[PutParcel]:
        """A parcel as parcels of one record."""
        return [*(self._cut(parcel, 1) for _ in range(parcel.count - 1)), parcel]

    def _commit_parcel(self, parcel: PutParcel) -> None:
        items = range(parcel.first, parcel.first + parcel.count)
        try:
            is_good = parcel.filled()
        except ChecksumMismatch as error:
            del self._parcels[parcel.first]
            self._end(parcel.first, Refused(RefusedReason.INVALID, str(error)))
            return
        if not is_good:
            for one in self._singles(parcel):
                self._commit_parcel(one)
            return
        for item in items:
            del self._parcels[item]
        self._committed.update(items)
        parcel.commit(
            on_received=None if self._wait_durable else self._on_parcel_received, on_done=self._on_parcel_done
        )

    def _hand_over(self) -> None:
        """The items that have arrived go on, all in one go: one write, one commit."""
        wave, self._wave, self._wave_bytes = self._wave, [], 0
        self._wave_number += 1
        for item in wave:
            ticket = self._tickets.get(item)
            if ticket is not None:
                self._filled(item, ticket)
        if wave:
            self.connection.wake_engine()

    # --- the way of an item -----------------------------------------------------------------------------------------
    def _advance(self, items_max: int = BATCH_ITEMS_MAX) -> None:
        if self._advancing:
            return  # called back from an item that ended at once: the loop below goes on
        self._advancing = True
        batch = self._batch
        stop = min(batch.count, self._next + items_max)
        try:
            while self._next < stop and not self.over:
                length = batch.lengths[self._next]
                is_full = self._open_count >= PUT_WINDOW_ITEMS or self._open_bytes + length > PUT_WINDOW_BYTES
                if self._open_count and is_full:
                    return
                if self._columns is not None and self._next >= self._alone_until and self._open_parcels(self._columns):
                    continue
                item = self._next
                self._next += 1
                self._open_count += 1
                self._open_bytes += length
                self._open(item)
        finally:
            self._advancing = False

    def _open_parcels(self, columns: PutColumns) -> bool:
        """Opens what the window allows, in parcels; False where the engine gives none."""
        room = min((PUT_WINDOW_BYTES - self._open_bytes) // columns.payload_bytes, PUT_WINDOW_ITEMS - self._open_count)
        first = self._next
        stop = min(first + max(room, 1), self._batch.count)
        parcels = self._engine.open_parcels(columns, first, stop)
        if not parcels:
            self._alone_until = stop
            return False
        for parcel in parcels:
            items = range(parcel.first, parcel.first + parcel.count)
            self._parcels.update(dict.fromkeys(items, parcel))
            self._landings += map(Landing, items, parcel.buffers)
            self._next = items.stop
        self._open_count += self._next - first
        self._open_bytes += (self._next - first) * columns.payload_bytes
        self.connection.request_send()
        return True

    def _open(self, item: int) -> None:
        defect = self._batch.defect(item)
        if defect:
            self._end(item, Refused(RefusedReason.INVALID, defect))
            return
        connection = self.connection
        assert self._namespace is not None
        assert connection.client is not None
        spec = self._batch.spec(
            item,
            namespace=self._namespace,
            flow=connection.flow,
            deadline_ns=self.deadline_ns,
            client_id=connection.client.id,
        )
        self._engine.open_put(spec, partial(self._on_grant, item))

    @shielded
    def _on_grant(self, item: int, granted: PutTicket | Exists | Refused) -> None:
        if isinstance(granted, Exists | Refused):
            self._end(item, granted)
            return
        if self.over or self._ended[item]:
            granted.abort()
            return
        self._tickets[item] = granted
        buffer = granted.buffer
        assert buffer is not None, "a put with a CRC table has memory"
        if self._inline is not None:
            buffer[:] = self._inline[item]
            self.connection.metrics.received_bytes[self.connection.flow] += len(buffer)
            self._filled(item, granted)
        elif len(buffer):
            self._landings.append(Landing(item=item, buffer=buffer))
            self._are_alike = False
            self.connection.request_send()
        else:
            self._filled(item, granted)

    def _filled(self, item: int, ticket: PutTicket) -> None:
        del self._tickets[item]
        try:
            ticket.filled()
        except ChecksumMismatch as error:
            self._end(item, Refused(RefusedReason.INVALID, str(error)))
            return
        self._committed.add(item)
        ticket.commit(
            on_received=None if self._wait_durable else partial(self._on_received, item),
            on_done=partial(self._end, item),
        )

    @shielded
    def _on_received(self, item: int) -> None:
        if not self._is_ended(item):
            self._outcomes.add(item, ItemStatus.RECEIVED)
            self._count_end(item)

    @shielded
    def _on_parcel_received(self, first: int, count: int) -> None:
        if not self.over:
            self._outcomes.add_many(range(first, first + count), ItemStatus.RECEIVED)
            self._count_ends(first, count)

    @shielded
    def _on_parcel_done(self, first: int, count: int, outcome: bytes | Refused) -> None:
        if self._is_ended(first):
            return  # the call is over, or they ended as received: all of them
        items = range(first, first + count)
        if isinstance(outcome, bytes):
            self._outcomes.add_many(items, ItemStatus.STORED, outcome)
        else:
            for item in items:
                self._outcomes.add_outcome(item, outcome)
        self._count_ends(first, count)

    @shielded
    def _end(self, item: int, outcome: Stored | Exists | Refused) -> None:
        if not self._is_ended(item):
            self._outcomes.add_outcome(item, outcome)
            self._count_end(item)

    def _is_ended(self, item: int) -> bool:
        return self.over or bool(self._ended[item])

    def _count_ends(self, first: int, count: int) -> None:
        """Items of one length, which were open, have ended."""
        self._ended[first : first + count] = b"\1" * count
        self._ended_count += count
        self._open_count -= count
        self._open_bytes -= count * self._batch.lengths[first]
        self._committed.difference_update(range(first, first + count))
        self._after_end()

    def _count_end(self, item: int) -> None:
        self._ended[item] = 1
        self._ended_count += 1
        if item < self._next:
            self._open_count -= 1
            self._open_bytes -= self._batch.lengths[item]
        self._committed.discard(item)
        self._after_end()

    def _after_end(self) -> None:
        if self._next < self._batch.count:
            self._advance()
        if self.has_output():
            self.connection.request_send()

    def _results_are_due(self) -> bool:
        """Before the end, results go in company: each frame costs a send here and wakes the client for nothing."""
        return bool(self._outcomes) and self.connection.now_ns - self._sent_ns >= RESULTS_WAIT_NS

    def _is_complete(self) -> bool:
        return self._ended_count == self._batch.count

    def _give_up(self, why: str) -> None:
        """Ends every item that has not ended, and the call."""
        if self.over:
            return
        self._hand_over()  # what has come whole is stored
        for parcel in list(dict.fromkeys(self._parcels.values())):
            self._commit_whole(parcel)
        committed = set(self._committed)
        self.release()
        self._next = self._batch.count
        for item, ended in enumerate(bytes(self._ended)):
            if not ended:
                unknown = item in committed
                reason = RefusedReason.OUTCOME_UNKNOWN if unknown else RefusedReason.DEADLINE
                self._ended[item] = 1
                self._outcomes.add(item, reason, detail=why)
        self._ended_count = self._batch.count
        self.connection.request_send()


def start_offer(
    connection: Connection,
    offer: Offer,
    payload: Sequence[memoryview],
    engine: Engine,
    *,
    refusal: Refused | None,
    now_ns: int,
) -> None:
    """Begins an OFFER; with `refusal` every item ends so.

    Raises:
        InvalidRequest: Its parts contradict each other.
    """
    batch = Batch(offer, may_lack_crcs=connection.takes_data_crcs and not offer.inline)
    connection.metrics.calls[Verb.PUT] += 1
    inline = payload[0] if payload else memoryview(b"") if offer.inline else None
    if inline is not None and sum(batch.lengths) != len(inline):
        raise InvalidRequest(
            f"OFFER carries {len(inline)} bytes of payload, its {batch.count} lengths sum to {sum(batch.lengths)}"
        )
    namespace = engine.namespace(offer.namespace)
    call = PutCall(connection, offer, batch, engine, namespace, inline, now_ns=now_ns)
    connection.call = call
    if refusal is not None:
        call.refuse_all(refusal.reason, refusal.detail)
    elif namespace is None:
        detail = f"namespace {offer.namespace.hex()} is not known here: send its manifest, then ask again"
        call.refuse_all(RefusedReason.UNKNOWN_NAMESPACE, detail)
    else:
        call.start()
    connection.request_send()


def _cut(payload: memoryview, lengths: tuple[int, ...]) -> list[memoryview]:
    pieces = []
    at = 0
    for length in lengths:
        pieces.append(payload[at : at + length])
        at += length
    return pieces

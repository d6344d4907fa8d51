"""OFFER: records on their way from the client's connection into the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstore.engine.api import Engine, NamespaceRef, PutTicket
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


class PutCall(Call):
    """One OFFER. Items are opened within a window, granted as the engine has memory, and end one by one.

    An item is open (asked of the engine), granted (its payload is on its way), committed, or ended; `_tickets` holds
    the granted ones that are not committed yet.
    """

    __slots__ = (
        "_advancing",
        "_batch",
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
        self._landings: list[Landing] = []
        self._wave: list[int] = []  # arrived, but not handed over yet
        self._wave_bytes = 0
        self._wave_number = 0
        self._outcomes = Outcomes()
        self._sent_ns = now_ns  # when results were sent last
        self._advancing = False

    def start(self) -> None:
        """Opens what the window allows. The first few are granted at once, so that the client sends meanwhile."""
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
            connection.channel.fetch(landings, self.request_id, self, epoch=connection.epoch)
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
        self.connection.channel.unfetch()
        self._landings = []
        tickets, self._tickets = self._tickets, {}
        for ticket in tickets.values():
            ticket.abort()

    # --- FetchEvents ------------------------------------------------------------------------------------------------
    def arrived(self, one: Slice, arrived_bytes: int) -> None:
        """Some of a slice is in its ticket's buffer."""
        ticket = self._tickets.get(one.item)
        if ticket is not None:
            ticket.arrived(one.offset, arrived_bytes, one.crcs)

    def fetched(self, item: int) -> None:
        """All bytes of an item are in its ticket's buffer. The engine gets several at once while more are coming."""
        connection = self.connection
        length = self._batch.lengths[item]
        connection.metrics.received_bytes[connection.flow] += length
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
                item = self._next
                self._next += 1
                self._open_count += 1
                self._open_bytes += length
                self._open(item)
        finally:
            self._advancing = False

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
    def _end(self, item: int, outcome: Stored | Exists | Refused) -> None:
        if not self._is_ended(item):
            self._outcomes.add_outcome(item, outcome)
            self._count_end(item)

    def _is_ended(self, item: int) -> bool:
        return self.over or bool(self._ended[item])

    def _count_end(self, item: int) -> None:
        self._ended[item] = 1
        self._ended_count += 1
        if item < self._next:
            self._open_count -= 1
            self._open_bytes -= self._batch.lengths[item]
        self._committed.discard(item)
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

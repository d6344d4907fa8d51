"""The lane of a connection that asks for one record after the other: one function from the request to the answer.

A GET of one whole record that lies in memory, alone in what was received, on a connection that owes nothing: that is
answered here, without a frame, a message or a call object, with the checks that the general way makes. So is such a
GET_INTO over shared memory. Whatever else was received stays where it is, for `FrameReader`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.limits import IDLE_WAIT_NS
from kvstore.telemetry.metrics import Verb
from kvstore.transport.exchange import AnswerExchange, answer_exchange
from kvstore.transport.shm_node import ShmNodeChannel
from kvstore.types.checksum import crc32c
from kvstore.wire.frames import Frame
from kvstore.wire.header import HEADER_BYTES
from kvstore.wire.plain import CRC_AT, PLAIN_GETS, PLAIN_GETS_INTO, data_head, placed_head, record_head

if TYPE_CHECKING:
    from kvstore.server.connection import Connection, Plane

_GET: Final = int(Verb.GET)
_KINDS: Final = {kind.frame_bytes: kind for kind in (*PLAIN_GETS, *PLAIN_GETS_INTO)}
_NOTHING: Final = memoryview(b"")


class AnswerLane:
    """Receives for a connection on which final DATA was agreed on."""

    __slots__ = (
        "_connection",
        "_exchange",
        "_flow",
        "_metrics",
        "_namespaces",
        "_plane",
        "_reader",
        "_session",
        "_shared",
        "_view",
        "_writer",
    )

    def __init__(self, connection: Connection, plane: Plane) -> None:
        channel = connection.channel
        self._connection = connection
        self._plane = plane
        self._session = connection.session
        self._metrics = connection.metrics
        self._flow = connection.flow
        self._reader = channel.reader
        self._writer = channel.writer
        self._shared = channel if isinstance(channel, ShmNodeChannel) and connection.shares_memory else None
        self._exchange: AnswerExchange | None = None  # from the first request on: most connections never read
        self._view = memoryview(b"")
        self._namespaces: dict[int, bytes] = {}  # that GETs of these lengths ask, which the exchange knows

    def receive(self) -> list[Frame] | None:
        """Receives once: the frames that have arrived, as `TcpNodeChannel.on_readable`, or None: all is done.

        Raises:
            KVStoreError: As `TcpNodeChannel.on_readable`.
        """
        view = self._reader.between_frames()
        connection = self._connection
        is_busy = connection.call is not None  # whose payload may go past the reader
        if view is None or is_busy or connection.in_turn or connection.is_blocked or self._writer.pending_bytes:
            return connection.channel.on_readable()
        exchange = self._exchange
        if exchange is None:
            self._view = view
            channel = connection.channel
            self._exchange = exchange = answer_exchange(channel.connected, view, channel.on_descriptors)
        try:
            got = exchange.receive()
        except OSError as error:
            connection.channel.took_none(error)
            return []
        if isinstance(got, tuple):
            count, request_id, key, place = got
            if self._answer(self._namespaces[count], request_id, key, place):
                return None
            return self._reader.advance(count)
        if not got:
            return connection.channel.on_readable()  # which says what the end of the stream means
        if got in _KINDS and self._judge(got):
            return None
        return self._reader.advance(got)

    def may_see(self, namespace: bytes) -> bool:
        """Whether the namespace is there for the connection's tenant; a namespace stays its tenant's for ever."""
        permit, engine = self._connection.permit, self._plane.quick_engine
        if permit is None:
            return True
        known = engine.namespace(namespace) if engine is not None else None
        return known is not None and permit.may_see(known.tenant)

    def _judge(self, count: int) -> bool:
        """Judges what was received; answers it, and learns what it looks like, when it is a GET for the lane."""
        view = self._view
        kind = _KINDS[count]
        start, request_id, sizes, crc, before_key, key, behind_key = kind.unpack_from(view)
        if start != kind.start or crc32c(view[HEADER_BYTES:count], crc32c(view[:CRC_AT], 0)) != crc:
            return False
        namespace = kind.namespace_of(sizes, before_key, behind_key)
        if namespace is None or not self.may_see(namespace) or (kind.place_bytes and self._shared is None):
            return False
        assert self._exchange is not None, "judged before it was received"
        self._exchange.learn(count, kind.place_bytes)
        self._namespaces[count] = namespace
        return self._answer(namespace, request_id, key, bytes(view[count - kind.place_bytes : count]))

    def _answer(self, namespace: bytes, request_id: int, key: bytes, place: bytes) -> bool:
        """Answers a GET, or with a place a GET_INTO; False, and nothing has happened, when it is not for here."""
        plane = self._plane
        engine = plane.quick_engine
        if engine is None or not self._session.begin_plain(request_id):
            return False
        now_ns = plane.now_ns
        record = engine.look_cached(namespace, key, now_ns=now_ns)
        if record is None:
            return False
        payload = record.view
        head = record.reply
        if not head:
            record.reply = head = record_head(record.facts)
        payload_bytes = len(payload)
        connection, exchange, epoch = self._connection, self._exchange, plane.epoch
        assert exchange is not None, "answered before it was received"
        try:
            if not place:
                count = exchange.answer(head, payload, request_id, epoch)
            else:
                assert self._shared is not None, "a GET_INTO was learned"
                into = self._shared.views.get(place) or self._shared.view_of(place)
                if into is None or len(into) != payload_bytes:
                    return False
                count = exchange.place(head, payload, into, request_id, epoch)
                self._shared.memory.copied_in_bytes += payload_bytes
        except OSError as error:
            count = connection.channel.took_none(error)
        if count != (len(head) if place else len(head) + payload_bytes):
            if place:
                head, payload = placed_head(head), _NOTHING
            record.hold()
            head = data_head(head, request_id, epoch)
            connection.send_rest(head, payload, sent_bytes=count, on_sent=record.release)
        connection.due_ns = now_ns + IDLE_WAIT_NS
        metrics = self._metrics
        metrics.calls[_GET] += 1
        metrics.sent_bytes[self._flow] += payload_bytes
        metrics.loaded_records += 1
        metrics.get_ns.observe(plane.clock() - now_ns)
        return True

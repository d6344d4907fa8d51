"""The lane of a connection that asks for one record after the other: one function from the request to the answer.

A GET of one whole record that lies in memory, alone in what was received, on a connection that owes nothing: that is
answered here, without a frame, a message or a call object, with the checks that the general way makes. Whatever else
was received stays where it is, for `FrameReader`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.limits import IDLE_WAIT_NS
from kvstore.telemetry.metrics import Verb
from kvstore.types.checksum import crc32c
from kvstore.wire.frames import Frame
from kvstore.wire.header import HEADER_BYTES
from kvstore.wire.plain import (
    CRC_AT,
    GET_START,
    PLAIN_GETS,
    PlainGet,
    data_body,
    data_head,
)

if TYPE_CHECKING:
    from kvstore.server.connection import Connection, Plane

_GET: Final = int(Verb.GET)


class _Form:
    """One kind of GET, and what was judged of the last one: the next is most often the same but for id, key and CRC."""

    __slots__ = ("before_crc", "before_key", "behind_key", "body", "kind", "lane", "namespace", "sizes", "unpack_from")

    def __init__(self, kind: PlainGet, view: memoryview, lane: ReadLane) -> None:
        self.lane = lane
        self.kind = kind
        self.unpack_from = kind.unpack_from
        self.before_crc = view[:CRC_AT]
        self.body = view[HEADER_BYTES : kind.frame_bytes]
        self.sizes = self.before_key = self.behind_key = b""
        self.namespace = b""

    def judge(self, sizes: bytes, before_key: bytes, behind_key: bytes) -> bool:
        """Whether a frame with these parts is for the lane."""
        namespace = self.kind.namespace_of(sizes, before_key, behind_key)
        if namespace is None or not self.lane.may_see(namespace):
            return False
        self.sizes, self.before_key, self.behind_key = sizes, before_key, behind_key
        self.namespace = namespace
        return True


class ReadLane:
    """Receives for a connection on which final DATA was agreed on."""

    __slots__ = ("_connection", "_flow", "_forms", "_metrics", "_plane", "_reader", "_receive", "_send", "_session")

    def __init__(self, connection: Connection, plane: Plane) -> None:
        channel = connection.channel
        self._connection = connection
        self._plane = plane
        self._session = connection.session
        self._metrics = connection.metrics
        self._flow = connection.flow
        self._reader = channel.reader
        self._receive = channel.connected.recv_into
        self._send = channel.connected.sendmsg
        self._forms: dict[int, _Form] = {}

    def receive(self) -> list[Frame] | None:
        """Receives once: the frames that have arrived, as `TcpNodeChannel.on_readable`, or None: all is done.

        Raises:
            KVStoreError: As `TcpNodeChannel.on_readable`.
        """
        view = self._reader.between_frames()
        connection = self._connection
        if view is None or not connection.can_answer_at_once:
            return connection.channel.on_readable()
        try:
            count = self._receive(view)
        except OSError as error:
            connection.channel.took_none(error)
            return []
        if not count:
            return connection.channel.on_readable()  # which says what the end of the stream means
        forms = self._forms
        if count in forms and self._answer(forms[count], view):
            return None
        if not forms:
            forms.update({kind.frame_bytes: _Form(kind, view, self) for kind in PLAIN_GETS})
        return self._reader.advance(count)

    def may_see(self, namespace: bytes) -> bool:
        """Whether the namespace is there for the connection's tenant; a namespace stays its tenant's for ever."""
        grant, engine = self._connection.grant, self._plane.quick_engine
        if grant is None:
            return True
        known = engine.namespace(namespace) if engine is not None else None
        return known is not None and grant.may_see(known.tenant)

    def _answer(self, form: _Form, view: memoryview) -> bool:
        """Answers the GET in `view`; False, and nothing has happened, when it is not for here."""
        start, request_id, sizes, crc, before_key, key, behind_key = form.unpack_from(view)
        plane = self._plane
        engine = plane.quick_engine
        if (
            start != GET_START
            or engine is None
            or crc32c(form.body, crc32c(form.before_crc, 0)) != crc
            or not (
                (before_key == form.before_key and behind_key == form.behind_key and sizes == form.sizes)
                or form.judge(sizes, before_key, behind_key)
            )
            or not self._session.begin_plain(request_id)
        ):
            return False
        now_ns = plane.now_ns
        record = engine.look_cached(form.namespace, key, now_ns=now_ns)
        if record is None:
            return False
        payload = record.view
        payload_bytes = len(payload)
        reply = record.reply
        if not reply:
            record.reply = reply = data_body(record.facts)
        head = data_head(reply, request_id, payload_bytes=payload_bytes, epoch=plane.epoch)
        connection = self._connection
        try:
            count = self._send((head, payload))
        except OSError as error:
            count = connection.channel.took_none(error)
        if count != len(head) + payload_bytes:
            record.hold()
            connection.send_rest(head, payload, sent_bytes=count, on_sent=record.release)
        connection.due_ns = now_ns + IDLE_WAIT_NS
        metrics = self._metrics
        metrics.calls[_GET] += 1
        metrics.sent_bytes[self._flow] += payload_bytes
        metrics.loaded_records += 1
        metrics.get_ns.observe(plane.clock() - now_ns)
        return True

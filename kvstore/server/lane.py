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
    GET_FRONT,
    GET_MIDDLE,
    GET_START,
    GET_TAIL,
    PLAIN_GETS,
    PlainGet,
    data_body,
    data_head,
)

if TYPE_CHECKING:
    from kvstore.server.connection import Connection, Plane

_GET: Final = int(Verb.GET)


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
        self._forms: dict[int, tuple[PlainGet, memoryview, memoryview]] = {}

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
        form = self._forms.get(count) or self._form_of(count, view)
        if form is not None and self._answer(*form, view):
            return None
        return self._reader.advance(count)

    def _form_of(self, count: int, view: memoryview) -> tuple[PlainGet, memoryview, memoryview] | None:
        """The kind of GET that has so many bytes, and what of the read-ahead its checksum covers."""
        for form in PLAIN_GETS:
            if form.frame_bytes == count:
                self._forms[count] = found = (form, view[:CRC_AT], view[HEADER_BYTES:count])
                return found
        return None

    def _answer(self, form: PlainGet, before_crc: memoryview, body: memoryview, view: memoryview) -> bool:
        """Answers the GET in `view`; False, and nothing has happened, when it is not for here."""
        start, request_id, sizes, flags, crc, front, digest, middle, key, deadline, tail = form.unpack_from(view)
        plane = self._plane
        engine = plane.quick_engine
        if (
            start != GET_START
            or sizes != form.sizes
            or flags
            or front != GET_FRONT
            or middle != GET_MIDDLE
            or tail != GET_TAIL
            or not form.deadline_over < deadline <= form.deadline_max
            or crc32c(body, crc32c(before_crc, 0)) != crc
            or engine is None
            or not self._session.begin_plain(request_id)
        ):
            return False
        now_ns = plane.now_ns
        record = engine.look_cached(digest, key, now_ns=now_ns)
        if record is None:
            return False
        payload = record.view
        reply = record.reply
        if not reply:
            record.reply = reply = data_body(record.facts)
        head = data_head(reply, request_id, payload_bytes=len(payload), epoch=plane.epoch)
        connection = self._connection
        try:
            count = self._send((head, payload))
        except OSError as error:
            count = connection.channel.took_none(error)
        if count != len(head) + len(payload):
            record.hold()
            connection.send_rest(head, payload, sent_bytes=count, on_sent=record.release)
        connection.due_ns = now_ns + IDLE_WAIT_NS
        metrics = self._metrics
        metrics.calls[_GET] += 1
        metrics.sent_bytes[self._flow] += len(payload)
        metrics.loaded_records += 1
        metrics.get_ns.observe(plane.clock() - now_ns)
        return True

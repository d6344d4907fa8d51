"""A data plane and its clients on one thread, joined by real sockets: tests decide who moves when.

Nothing runs between two calls of a test. A client that waits for frames turns the data plane's loop until they come.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvstore.engine.api import Engine
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.limits import SECOND_NS
from kvstore.server.admission import Admission, OpenAdmission
from kvstore.server.batch import pack_u32, unpack_u32
from kvstore.server.dataplane import DataPlane, Identity
from kvstore.server.loop import Loop
from kvstore.telemetry.metrics import DataplaneMetrics
from kvstore.transport.tcp import TcpChannel, listen_tcp
from kvstore.types.checksum import crc_table
from kvstore.types.flow import FlowClass
from kvstore.wire.codec import Plain, pack_plain
from kvstore.wire.failures import error_of
from kvstore.wire.frames import Frame, FrameReader
from kvstore.wire.header import VERSION, FrameType, encode_head
from kvstore.wire.messages import (
    End,
    ErrorReply,
    Feature,
    Get,
    Grant,
    Hello,
    Manifest,
    Offer,
    Result,
    Welcome,
)
from kvstore.wire.schema import Message
from kvstore.wire.session import ClientSession, Verdict
from kvstore.wire.slices import NO_CONTENT_ID, Slice, encode_slices

_GIVE_UP_S = 20.0
_M = TypeVar("_M", bound=Message)


class LabVerbs:
    """Admin verbs of the lab: `echo` gives its arguments back."""

    def __init__(self) -> None:
        self.is_alone = False

    def carry_out(self, verb: str, arguments: Plain) -> bytes:
        """Only `echo` is known."""
        if verb != "echo":
            raise InvalidRequest(f"verb {verb!r} is unknown")
        return pack_plain(arguments)

    def supervisor_gone(self) -> None:
        """Remembered."""
        self.is_alone = True


class PlaneLab:
    """A data plane that listens on loopback.

    Attributes:
        clock_ns: added to the real time, to let timers come due.
    """

    def __init__(self, engine: Engine, *, admission: Admission | None = None) -> None:
        self.clock_ns = 0
        self.verbs = LabVerbs()
        self.metrics = DataplaneMetrics()
        self.loop = Loop()
        self.plane = DataPlane(
            self.loop,
            identity=Identity(node_id="lab", boot_id=b"B" * 16),
            admission=admission or OpenAdmission(),
            admin=self.verbs,
            metrics=self.metrics,
            clock=lambda: time.monotonic_ns() + self.clock_ns,
        )
        listening = listen_tcp("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        self.plane.serve(engine)
        self.plane.listen(listening)

    def turn(self, *, wait_ns: int = 0) -> None:
        """One turn of the worker's loop."""
        planned_ns = self.plane.wait_ns()
        self.loop.turn(wait_ns if planned_ns is None else min(wait_ns, planned_ns), self.plane.woke)
        self.plane.turn()

    def turn_until(self, is_done: Callable[[], bool]) -> None:
        """Turns until `is_done`; fails after a while."""
        give_up = time.monotonic() + _GIVE_UP_S
        while not is_done():
            self.turn(wait_ns=1_000_000)
            if time.monotonic() > give_up:
                raise AssertionError("it never came")

    def socket(self) -> socket.socket:
        """A raw connection."""
        return socket.create_connection(("127.0.0.1", self.port))

    def client(
        self,
        *,
        client_id: bytes = b"C" * 16,
        flow: FlowClass = FlowClass.DECODE_READ,
        features: Feature = Feature.NONE,
    ) -> LabClient:
        """A connection that has greeted."""
        made = LabClient(self, self.socket())
        made.hello(client_id=client_id, flow=flow, features=features)
        return made

    def close(self) -> None:
        """Closes the data plane and its loop."""
        self.plane.close()
        self.plane.shared_memory.close(within_ns=10 * SECOND_NS)
        self.loop.close()


class LabClient:
    """A client that does what a test says, legal or not. It checks every checksum that it gets.

    Attributes:
        frames: arrived and not taken yet.
        data: bytes of the items of the GET in progress.
        pieces: the slices that brought them.
    """

    def __init__(self, lab: PlaneLab, connected: socket.socket) -> None:
        self.lab = lab
        self.session = ClientSession()
        self.channel = TcpChannel(connected, FrameReader(self))
        self.frames: list[Frame] = []
        self.data: dict[int, bytearray] = {}
        self.pieces: list[Slice] = []
        self.is_closed = False

    # --- frames -----------------------------------------------------------------------------------------------------
    def place(self, frame: Frame) -> Sequence[memoryview]:
        """PayloadSink."""
        views = []
        for one in frame.slices:
            data = self.data.setdefault(one.item, bytearray(one.record_bytes))
            views.append(memoryview(data)[one.offset : one.offset + one.length_bytes])
        return views

    def send(self, message: Message, request_id: int, *, epoch: int = 0, payload: bytes = b"") -> None:
        """Sends a frame as it is."""
        self.send_raw(
            encode_head(message.TYPE, request_id, message.encode(), payload_bytes=len(payload), epoch=epoch) + payload
        )

    def send_raw(self, data: bytes) -> None:
        """Sends bytes, turning the data plane while the socket is full."""
        self.channel.writer.push(data)
        self.flush()

    def flush(self) -> None:
        """Sends what is queued."""
        self.lab.turn_until(self.channel.on_writable)

    def receive(self) -> Frame:
        """The next frame. Raises what an ERROR frame says, and Unavailable at the end of the stream."""
        self.lab.turn_until(self._arrived)
        frame = self.frames.pop(0)
        if self.session.receive(frame.type, frame.request_id, is_final=frame.is_final) is Verdict.IGNORE:
            return self.receive()
        if frame.type is FrameType.ERROR:
            reply = ErrorReply.decode(frame.body)
            self.is_closed = reply.closing
            raise error_of(reply.code, reply.text)
        return frame

    def expect(self, kind: type[_M]) -> _M:
        """The next frame, which must be of that kind."""
        frame = self.receive()
        assert frame.type is kind.TYPE, f"{frame.type.name} came instead of {kind.TYPE.name}"
        return kind.decode(frame.body)

    def _arrived(self) -> bool:
        if not self.frames:
            self.frames += self.channel.on_readable()
            for frame in self.frames:
                self._check(frame)
        return bool(self.frames)

    def _check(self, frame: Frame) -> None:
        for one in frame.slices if frame.type is not FrameType.PLACED else ():
            self.data.setdefault(one.item, bytearray(one.record_bytes))
            data = memoryview(self.data[one.item])[one.offset : one.offset + one.length_bytes]
            assert crc_table(data, one.block_bytes) == one.crcs, f"wrong bytes in {one}"
            self.pieces.append(one)

    # --- calls ------------------------------------------------------------------------------------------------------
    def hello(
        self, *, client_id: bytes = b"C" * 16, flow: FlowClass = FlowClass.DECODE_READ, **changes: Any
    ) -> Welcome:
        """HELLO, WELCOME."""
        fields: dict[str, Any] = {
            "version_min": VERSION,
            "version_max": VERSION,
            "features": 0,
            "client_id": client_id,
            "boot_id": bytes(16),
            "token": b"",
            "flow": flow,
        }
        self.send(Hello(**(fields | changes)), self.session.hello())
        welcome = self.expect(Welcome)
        if welcome.features & Feature.FINAL_DATA:
            self.channel.reader.allow_final_data()
        return welcome

    def start(self, message: Message, *, epoch: int = 0, payload: bytes = b"") -> int:
        """Begins a call."""
        request_id = self.session.start(message.TYPE)
        self.send(message, request_id, epoch=epoch, payload=payload)
        return request_id

    def call(self, message: Message, answer: type[_M], *, epoch: int = 0) -> _M:
        """A call that is answered by one frame."""
        self.start(message, epoch=epoch)
        return self.expect(answer)

    def register(self, manifest: bytes = b"manifest") -> None:
        """MANIFEST."""
        self.call(Manifest(manifest=manifest), End)

    def get(self, namespace: bytes, keys: Sequence[bytes], **fields: Any) -> tuple[bytes, dict[int, bytes]]:
        """GET: statuses, and the bytes of the hits."""
        self.start_get(namespace, keys, **fields)
        return self.end_get()

    def start_get(self, namespace: bytes, keys: Sequence[bytes], **fields: Any) -> int:
        """GET without waiting."""
        self.data, self.pieces = {}, []
        plain: dict[str, Any] = {"namespace": namespace, "keys": b"".join(keys), "deadline_ns": 5 * SECOND_NS}
        return self.start(Get(**(plain | fields)))

    def end_get(self) -> tuple[bytes, dict[int, bytes]]:
        """Takes DATA until END, or until it says that it is the end."""
        while True:
            frame = self.receive()
            if frame.is_final:
                return bytes(len(self.data)), {item: bytes(data) for item, data in self.data.items()}
            if frame.type is FrameType.END:
                statuses = End.decode(frame.body).statuses
                return statuses, {item: bytes(self.data[item]) for item, status in enumerate(statuses) if not status}

    def offer(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        *,
        block_bytes: int = 65536,
        **fields: Any,
    ) -> Offer:
        """An OFFER of some records, to be changed by a test."""
        plain: dict[str, Any] = {
            "namespace": namespace,
            "keys": b"".join(keys),
            "lengths": pack_u32([len(value) for value in values]),
            "block_bytes": pack_u32([block_bytes]),
            "crc_tables": b"".join(crc_table(value, block_bytes) for value in values),
            "deadline_ns": 5 * SECOND_NS,
        }
        return Offer(**(plain | fields))

    def put(
        self, namespace: bytes, keys: Sequence[bytes], values: Sequence[bytes], *, epoch: int = 0, **fields: Any
    ) -> dict[int, tuple[int, str]]:
        """OFFER, and DATA as granted: status and detail of each item."""
        offer = self.offer(namespace, keys, values, **fields)
        self.start(offer, epoch=epoch, payload=b"".join(values) if offer.inline else b"")
        return self.end_put(values)

    def end_put(self, values: Sequence[bytes], *, with_crcs: bool = False) -> dict[int, tuple[int, str]]:
        """Sends what is granted, takes RESULT until END."""
        ended: dict[int, tuple[int, str]] = {}
        while True:
            frame = self.receive()
            if frame.type is FrameType.GRANT:
                for item in unpack_u32(Grant.decode(frame.body).items):
                    self.send_item(item, values[item], with_crcs=with_crcs)
            elif frame.type is FrameType.RESULT:
                for item, status, detail in results_of(Result.decode(frame.body)):
                    assert item not in ended, f"item {item} ended twice"
                    ended[item] = status, detail
            else:
                assert frame.type is FrameType.END
                return ended

    def send_item(self, item: int, value: bytes, *, slice_bytes: int = 1 << 20, with_crcs: bool = False) -> None:
        """DATA frames with one record, a slice each."""
        for at in range(0, len(value), slice_bytes):
            piece = value[at : at + slice_bytes]
            crcs = crc_table(piece, 65536) if with_crcs else b""
            one = Slice(item, at, len(piece), 0, at + len(piece) == len(value), NO_CONTENT_ID, len(value), 65536, crcs)
            self.send_slices([one], piece)

    def send_slices(self, slices: Sequence[Slice], payload: bytes, *, frame_type: FrameType = FrameType.DATA) -> None:
        """One frame of slices of the call in progress."""
        self.channel.writer.push_slices(
            slices,
            [memoryview(payload)] if payload else [],
            self.session.request_id,
            payload_bytes=len(payload),
            frame_type=frame_type,
        )
        self.flush()

    def send_torn(
        self, slices: Sequence[Slice], payload: bytes, sent_bytes: int, *, frame_type: FrameType = FrameType.DATA
    ) -> bytes:
        """Sends only the first bytes of a frame of slices; returns the rest of it."""
        head = encode_head(
            frame_type,
            self.session.request_id,
            encode_slices(slices),
            payload_bytes=len(payload),
            flags=len(slices),
        )
        whole = head + payload
        self.send_raw(whole[:sent_bytes])
        for _ in range(10):
            self.lab.turn()
        return whole[sent_bytes:]

    def close(self) -> None:
        """Closes the socket."""
        self.channel.close()


def results_of(result: Result) -> list[tuple[int, int, str]]:
    """Item, status and detail of each entry of a RESULT."""
    items = unpack_u32(result.items)
    details = result.details.split("\n") if result.details else [""] * len(items)
    return list(zip(items, result.statuses, details, strict=True))


def error_raised(act: Callable[[], object]) -> KVStoreError:
    """The error that `act` ends with."""
    try:
        act()
    except KVStoreError as error:
        return error
    raise AssertionError("no error was raised")

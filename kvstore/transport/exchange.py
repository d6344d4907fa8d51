"""The two ends of a read of one record that is answered at once: request and answer, each sent and received in a step.

The record comes behind the answer, or lies in shared memory where the request says that it belongs.

Compiled when the extension is there (`_exchange.c`), in Python otherwise: the same frames, the same checks, the same
tests. In both nothing is believed that was not compared, and whatever is not the one frame that is expected is handed
back as it came, for `FrameReader`, which knows every frame.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Final, Literal, Protocol, TypeAlias

from kvstore.limits import (
    ANSWER_LOOK_NS,
    CHECKSUM_BYTES_MIN,
    DIGEST_BYTES,
    REGION_DESCRIPTORS_WAITING_MAX,
    SLICE_BYTES_MAX,
)
from kvstore.types.checksum import crc32c
from kvstore.types.compiled import require_interface
from kvstore.wire.expected import PLACED_START
from kvstore.wire.header import HEADER_BYTES
from kvstore.wire.plain import CRC_AT, DATA_FLAGS, GET_KEY_AT, GetFrames, PlainData, data_head, placed_head, plain_data
from kvstore.wire.shared import PLACE_BYTES
from kvstore.wire.slices import DESCRIPTOR_BYTES

try:
    from kvstore.transport import _exchange

    require_interface(_exchange)
except ImportError as missing:
    IS_COMPILED = False
    HOW = f"in Python: kvstore.transport._exchange cannot be used ({missing})"
else:
    IS_COMPILED = True
    HOW = "compiled"
    assert HEADER_BYTES + DESCRIPTOR_BYTES + SLICE_BYTES_MAX // CHECKSUM_BYTES_MIN * 4 <= _exchange.HEAD_BYTES_MAX
    assert REGION_DESCRIPTORS_WAITING_MAX <= _exchange.DESCRIPTORS_MAX
    assert _exchange.PLACED_START.to_bytes(4, "little") == PLACED_START

_SEND_FLAGS: Final = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
_NOTHING: Final = memoryview(bytearray(0))
_FORMS_MAX: Final = 4  # kinds of request that a node compares with: deadlines of four bytes and of eight
_BEHIND_KEY_AT: Final = GET_KEY_AT + DIGEST_BYTES
_u32: Final = struct.Struct("<I").unpack_from
_Head = tuple[bytearray, memoryview, memoryview]

Handle: TypeAlias = "socket.socket | int"
"""A connected socket as an exchange takes it, from `handle_of`. It stays the connection's."""

OnDescriptors: TypeAlias = Callable[[list[int], bool], None]
"""Takes over descriptors that were received; True when more came and are lost."""

Answer: TypeAlias = tuple[int, int, bytes, bytes]
"""How much of the payload has come, the node's epoch, content id and CRC table of the record."""


class ReadExchange(Protocol):
    """The client's end: reads of records of one namespace, length, checksum block and deadline. Thread-safe."""

    def send(self, handle: Handle, request_id: int, epoch: int, key: bytes, place: bytes, /) -> bool:
        """Sends a request; False when the socket did not take all of it, and is of no use any more. Raises OSError.

        Args:
            place: Of the record, in shared memory; b"" for GET.
        """

    def receive(self, handle: Handle, request_id: int, view: memoryview, /) -> Answer | bytes | None:
        """Receives the answer: the head, and of the payload what is there.

        Args:
            handle: Blocking, with a timeout.
            request_id: Of the request.
            view: Where the record belongs; exactly as long. Empty when it does not come here.

        Returns:
            The answer, when every byte of its head is as it must be. The payload has not been checked. Else the bytes
            that have come, from the start of the frame on; none when the peer has closed the connection. None when
            the head's checksum says that it was changed on the way.

        Raises:
            BlockingIOError: Nothing came in time.
            OSError: The connection broke.
        """

    def ask(
        self, handle: Handle, request_id: int, epoch: int, key: bytes, place: bytes, wait_ns: int, /
    ) -> Answer | bytes | Literal[False] | None:
        """Sends a request for a record that comes to its place, and receives the answer: `send` and `receive` in one.

        The compiled one looks for the answer for ANSWER_LOOK_NS before it sleeps, unless one of the last took longer.

        Args:
            wait_ns: For so long; above 0. In Python it is the handle's timeout that counts.

        Returns:
            As `receive`; False when the socket did not take all of the request, and is of no use any more.

        Raises:
            BlockingIOError: As `receive`.
            OSError: The connection broke.
        """


class AnswerExchange(Protocol):
    """The node's end, for one connection."""

    def receive(self) -> tuple[int, int, bytes, bytes] | int:
        """Receives once into the view that it was given.

        Returns:
            How much has come, request id, key and place, when it is exactly one request, in all other bytes like one
            that was learned, with the right checksum. Else how much has come.

        Raises:
            OSError: As `socket.recv_into` of a non-blocking socket.
        """

    def learn(self, frame_bytes: int, place_bytes: int, /) -> None:
        """The request of this length in the view was judged: those like it need not be. Its last bytes are a place."""

    def answer(self, head: bytes, payload: memoryview, request_id: int, epoch: int, /) -> int:
        """Sends a head as `plain.record_head` makes it, and the payload. Says how much of both. Raises OSError."""

    def place(self, head: bytes, payload: memoryview, into: memoryview, request_id: int, epoch: int, /) -> int:
        """Copies the payload to `into`, as long as it is, then sends `plain.placed_head` of the head: it lies there.

        Says how much of the head was sent. Raises OSError.
        """


def handle_of(connected: socket.socket) -> Handle:
    """The socket as the exchanges take it."""
    return connected.fileno() if IS_COMPILED else connected


def read_exchange(
    namespace: bytes, deadline_ns: int, *, record_bytes: int, block_bytes: int, is_placed: bool = False
) -> ReadExchange:
    """The client's end.

    Args:
        namespace: Digest.
        deadline_ns: That the node is told.
        record_bytes: Of each record; above 0, at most SLICE_BYTES_MAX.
        block_bytes: Checksum block that the records have if they were written by the book.
        is_placed: It is GET_INTO: the records come to their places in shared memory.
    """
    gets = GetFrames(namespace, deadline_ns, is_placed=is_placed)
    data = plain_data(record_bytes, block_bytes, is_placed=is_placed)
    if not IS_COMPILED:
        return PureReadExchange(gets, data)
    place_bytes = PLACE_BYTES if is_placed else 0
    return _exchange.ReadExchange(
        frame=gets.encode(bytes(DIGEST_BYTES), 0, 0, bytes(place_bytes)),
        head=data.example,
        key_at=GET_KEY_AT,
        place_bytes=place_bytes,
        record_bytes=0 if is_placed else record_bytes,
        look_ns=ANSWER_LOOK_NS if is_placed else 0,
    )


def answer_exchange(
    connected: socket.socket, view: memoryview, on_descriptors: OnDescriptors | None = None
) -> AnswerExchange:
    """The node's end.

    Args:
        connected: Non-blocking; not closed while the exchange is used.
        view: Where requests are received; longer than a GET of one record.
        on_descriptors: Owns those that come with the bytes of a Unix socket, and is told when more came than
            there is room for. In Python `connected` itself keeps them.
    """
    if not IS_COMPILED:
        return PureAnswerExchange(connected, view)
    return _exchange.AnswerExchange(
        handle=connected.fileno(), view=view, key_at=GET_KEY_AT, on_descriptors=on_descriptors
    )


class PureReadExchange:
    """`ReadExchange` in Python."""

    __slots__ = ("_data", "_encode", "_heads")

    def __init__(self, gets: GetFrames, data: PlainData) -> None:
        self._encode = gets.encode
        self._data = data
        self._heads: list[_Head] = []  # memory for heads, of the calls that are over

    def send(self, handle: Handle, request_id: int, epoch: int, key: bytes, place: bytes, /) -> bool:
        """See `ReadExchange`."""
        assert not isinstance(handle, int), "a handle of the compiled exchange"
        frame = self._encode(key, request_id, epoch, place)
        return handle.send(frame, _SEND_FLAGS) == len(frame)

    def receive(self, handle: Handle, request_id: int, view: memoryview, /) -> Answer | bytes | None:
        """See `ReadExchange`."""
        assert not isinstance(handle, int), "a handle of the compiled exchange"
        data, kept = self._data, self._heads
        head, before_crc, body = parts = kept.pop() if kept else self._new_head()
        count = handle.recvmsg_into((head, view))[0]
        start, answered_id, sizes, epoch, flags, crc, before, content_id, rest, table = data.unpack_from(head)
        if (
            count < data.head_bytes
            or answered_id != request_id
            or start != data.start
            or sizes != data.sizes
            or flags != DATA_FLAGS
            or before != data.before
            or rest != data.rest
        ):
            return b"".join((head, view))[:count]
        if crc32c(body, crc32c(before_crc, 0)) != crc:
            return None
        kept.append(parts)
        return count - data.head_bytes, epoch, content_id, table

    def ask(
        self, handle: Handle, request_id: int, epoch: int, key: bytes, place: bytes, wait_ns: int, /
    ) -> Answer | bytes | Literal[False] | None:
        """See `ReadExchange`."""
        try:
            if not self.send(handle, request_id, epoch, key, place):
                return False
        except BlockingIOError:
            return False
        return self.receive(handle, request_id, _NOTHING)

    def _new_head(self) -> _Head:
        head = bytearray(self._data.head_bytes)
        view = memoryview(head)
        return head, view[:CRC_AT], view[HEADER_BYTES:]


class PureAnswerExchange:
    """`AnswerExchange` in Python."""

    __slots__ = ("_forms", "_receive", "_send", "_view")

    def __init__(self, connected: socket.socket, view: memoryview) -> None:
        self._receive = connected.recv_into
        self._send = connected.sendmsg
        self._view = view
        self._forms: dict[int, tuple[int, tuple[bytes, bytes, bytes, bytes]]] = {}

    def receive(self) -> tuple[int, int, bytes, bytes] | int:
        """See `AnswerExchange`."""
        view = self._view
        count = self._receive(view)
        place_at, form = self._forms.get(count, (0, None))
        if (
            form is None
            or form != self._parts(place_at)
            or crc32c(view[HEADER_BYTES:count], crc32c(view[:CRC_AT], 0)) != _u32(view, CRC_AT)[0]
        ):
            return count
        return count, _u32(view, 4)[0], bytes(view[GET_KEY_AT:_BEHIND_KEY_AT]), bytes(view[place_at:count])

    def learn(self, frame_bytes: int, place_bytes: int, /) -> None:
        """See `AnswerExchange`."""
        if len(self._forms) >= _FORMS_MAX and frame_bytes not in self._forms:
            self._forms.clear()
        self._forms[frame_bytes] = frame_bytes - place_bytes, self._parts(frame_bytes - place_bytes)

    def answer(self, head: bytes, payload: memoryview, request_id: int, epoch: int, /) -> int:
        """See `AnswerExchange`."""
        return self._send((data_head(head, request_id, epoch), payload))

    def place(self, head: bytes, payload: memoryview, into: memoryview, request_id: int, epoch: int, /) -> int:
        """See `AnswerExchange`."""
        into[:] = payload
        return self._send((data_head(placed_head(head), request_id, epoch),))

    def _parts(self, end: int) -> tuple[bytes, bytes, bytes, bytes]:
        """All of a request but its request id, checksum, key and place."""
        view = self._view
        return (
            bytes(view[:4]),
            bytes(view[8:CRC_AT]),
            bytes(view[HEADER_BYTES:GET_KEY_AT]),
            bytes(view[_BEHIND_KEY_AT:end]),
        )

"""Granted payload that comes as our own client sends it: whole records of one shape, in the order of their grant.

What a frame looks like is known before it comes, but for its checksums. So each is received with one call, header and
payload straight to where they belong, and compared instead of decoded. Whatever else comes is no fault: its bytes are
given to the `FrameReader`, which knows every frame, and so is the rest of the grant.

Compiled when the extension is there (`_put_lane.c`), in Python otherwise: one suite runs over both.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

from kvstore.limits import FRAME_AIM_BYTES, SLICE_BYTES_MAX, SLICES_PER_FRAME_MAX, KiB
from kvstore.transport.base import Landing
from kvstore.types.checksum import crc32c, crcs_match
from kvstore.types.compiled import require_crc_instruction, require_interface
from kvstore.wire.expected import DATA_START
from kvstore.wire.frames import Frame, FrameReader
from kvstore.wire.header import HEADER_BYTES, MAGIC, VERSION, FrameType
from kvstore.wire.slices import DESCRIPTOR_BYTES, FLAG_LAST, NO_CONTENT_ID, encode_fields

try:
    from kvstore.transport import _put_lane

    require_interface(_put_lane)
    require_crc_instruction(_put_lane)
except ImportError as missing:
    IS_COMPILED = False
    HOW = f"in Python: kvstore.transport._put_lane cannot be used ({missing})"
else:
    IS_COMPILED = True
    HOW = "compiled"

_START: Final = struct.Struct("<2sBBIII")  # of a header: up to the length of the payload; epoch, flags and CRC follow
_FLAGS_AT: Final = 24
_CRC_AT: Final = HEADER_BYTES - 4
_BEHIND_ITEM: Final = struct.Struct("<QIBBH16sQI")  # of a slice
_CHECKED_AT_ONCE_BYTES: Final = 256 * KiB
"""So much of a record with a frame of its own is received before it is checked, as a client does when it reads."""


MORE: Final = 0
OTHER: Final = 1
CLOSED: Final = 2
"""What `PutLane.receive` ends with: what was there has been taken, another frame came, the peer sends no more."""

Came: TypeAlias = "list[tuple[list[int], bytes, bool]]"
"""Items whose bytes are all there, their CRC tables one after the other, and whether they are known to match."""


class PutLane(Protocol):
    """The frames that bring a grant's records: `put_lane` makes one."""

    @property
    def received_bytes(self) -> int:
        """So far, to see that the client sends."""

    @property
    def expected_bytes(self) -> int:
        """Of frames, that have not come."""

    @property
    def is_over(self) -> bool:
        """All that was granted has come."""

    def expect(self, landings: Sequence[Landing], /) -> None:
        """One GRANT names these. Their memory is held until they are told of, or given back by `take_apart`."""

    def receive(self, connected: socket.socket, bytes_max: int, /) -> tuple[int, Came]:
        """Receives what is there, until about `bytes_max` have come.

        Returns:
            MORE, OTHER (`take_apart` then) or CLOSED, and what has come whole.

        Raises:
            OSError: The connection broke, and nothing has come whole in this call.
        """

    def take_apart(self) -> tuple[bytes, list[Landing]]:
        """What has come of the frame in progress, and where all that has not come whole belongs. The lane is spent."""


def takes(landings: Sequence[Landing]) -> bool:
    """Whether records of the first one's length fit a slice each, as a lane needs it."""
    return 0 < len(landings[0].buffer) <= SLICE_BYTES_MAX


def put_lane(request_id: int, *, record_bytes: int, block_bytes: int) -> PutLane:
    """A lane for the payload of one request.

    Args:
        record_bytes: of each record, see `takes`.
        block_bytes: the checksum block of all of them.
    """
    if not IS_COMPILED:
        return PythonLane(request_id, record_bytes=record_bytes, block_bytes=block_bytes)
    words = -(-record_bytes // block_bytes)
    behind = _BEHIND_ITEM.pack(0, record_bytes, 0, FLAG_LAST, words, NO_CONTENT_ID, record_bytes, block_bytes)
    return _put_lane.Lane(
        request_id=request_id,
        start=DATA_START,
        behind=behind,
        block_bytes=block_bytes,
        record_bytes=record_bytes,
        per_frame=_per_frame(record_bytes),
        piece_bytes=_CHECKED_AT_ONCE_BYTES,
    )


class PythonLane:
    """See `PutLane`."""

    __slots__ = (
        "_block_bytes",
        "_body",
        "_came",
        "_checked_bytes",
        "_crc",
        "_frame",
        "_groups",
        "_has_one_word",
        "_head",
        "_head_bytes",
        "_is_alone",
        "_is_good",
        "_left_bytes",
        "_per_frame",
        "_record_bytes",
        "_request_id",
        "_rest",
        "_start",
        "_step_bytes",
        "_table_bytes",
        "expected_bytes",
        "received_bytes",
    )

    def __init__(self, request_id: int, *, record_bytes: int, block_bytes: int) -> None:
        """See `put_lane`."""
        self._request_id = request_id
        self._record_bytes = record_bytes
        self._block_bytes = block_bytes
        self._table_bytes = 4 * -(-record_bytes // block_bytes)
        self._per_frame = _per_frame(record_bytes)
        # a record with a frame of its own is checked by what each call has received, while the CPU's cache still has it
        self._is_alone = self._per_frame == 1
        self._has_one_word = self._is_alone and record_bytes <= block_bytes
        blocks = 1 if self._has_one_word else block_bytes
        self._step_bytes = max(_CHECKED_AT_ONCE_BYTES // blocks, 1) * blocks
        self._crc = 0  # of its one block, so far
        self._checked_bytes = 0  # of its whole blocks
        self._is_good = True
        self._head = memoryview(bytearray(HEADER_BYTES + self._per_frame * (DESCRIPTOR_BYTES + self._table_bytes)))
        self._groups: deque[deque[Landing]] = deque()
        self._frame: list[Landing] = []  # whose frame is on its way
        self._rest: list[memoryview] = []  # where the rest of it belongs
        self._left_bytes = 0  # of it
        self._head_bytes = 0
        self._start = b""  # of its header
        self._body = b""  # its descriptors
        self._came: Came = []
        self.expected_bytes = 0
        self.received_bytes = 0

    def expect(self, landings: Sequence[Landing], /) -> None:
        """See `PutLane.expect`."""
        count = len(landings)
        frames = -(-count // self._per_frame)
        a_record = DESCRIPTOR_BYTES + self._table_bytes + self._record_bytes
        self.expected_bytes += frames * HEADER_BYTES + count * a_record
        self._groups.append(deque(landings))
        if not self._frame:
            self._next_frame()

    @property
    def is_over(self) -> bool:
        """See `PutLane.is_over`."""
        return not self._frame

    def receive(self, connected: socket.socket, bytes_max: int, /) -> tuple[int, Came]:
        """See `PutLane.receive`."""
        stop = self.received_bytes + bytes_max
        ended = MORE
        while self._frame and self.received_bytes < stop:
            rest = self._rest
            if self._is_alone:
                rest = [*rest[:-1], rest[-1][: self._step_bytes]]
            try:
                count = connected.recvmsg_into(rest, 0, socket.MSG_DONTWAIT)[0]
            except BlockingIOError:
                break
            except OSError:
                if self._came:
                    break  # what the socket has to say beside that it says again
                raise
            if not count:
                ended = MORE if self._came else CLOSED
                break
            if not self._advance(count):
                ended = OTHER
                break
            if count < sum(map(len, rest)):
                break
        came, self._came = self._came, []
        return ended, came

    def _advance(self, count: int) -> bool:
        """So many bytes have come into `_rest`. False when they are not what was expected."""
        self.received_bytes += count
        self.expected_bytes -= count
        left = self._left_bytes = self._left_bytes - count
        rest = self._rest
        if self._is_alone:
            came = count - len(rest[0]) if len(rest) > 1 else count
            if came >= 0:
                payload = rest[-1]
                self._rest = [payload[came:]]
                if self._has_one_word:
                    self._crc = crc32c(payload[:came], self._crc)
                else:
                    self._check_to(self._record_bytes - left)
            else:
                self._rest = [rest[0][count:], rest[1]]
        elif left:
            self._rest = _behind(rest, count)
        if left:
            came = self._head_bytes + len(self._frame) * self._record_bytes - left
            return came < HEADER_BYTES or came - count >= HEADER_BYTES or self._starts_well()
        head, body = self._head[: self._head_bytes], self._body
        words_at = HEADER_BYTES + len(body)
        if (
            not self._starts_well()
            or head[HEADER_BYTES:words_at] != body
            or crc32c(head[HEADER_BYTES:], crc32c(head[:_CRC_AT], 0)).to_bytes(4, "little")
            != head[_CRC_AT:HEADER_BYTES]
        ):
            return False
        items = [landing.item for landing in self._frame]
        tables = bytes(head[words_at:])
        are_good = self._is_alone and self._is_good
        if self._has_one_word:
            are_good = self._crc.to_bytes(4, "little") == tables
        self._next_frame()
        self._came.append((items, tables, are_good))
        return True

    def _check_to(self, end: int) -> None:
        """The record's bytes are there up to `end`: check the blocks that are whole now, by the words in its header."""
        start, block = self._checked_bytes, self._block_bytes
        if end < self._record_bytes:
            end -= end % block
        if end > start:
            words_at = HEADER_BYTES + DESCRIPTOR_BYTES
            words = self._head[words_at + start // block * 4 : words_at + -(-end // block) * 4]
            if not crcs_match(self._frame[0].buffer[start:end], block, words):
                self._is_good = False
            self._checked_bytes = end

    def take_apart(self) -> tuple[bytes, list[Landing]]:
        """See `PutLane.take_apart`."""
        payload = [landing.buffer for landing in self._frame]
        came = self._head_bytes + len(self._frame) * self._record_bytes - self._left_bytes if self._frame else 0
        whole = b"".join([self._head[: self._head_bytes], *payload])[:came]
        landings = [*self._frame, *(landing for group in self._groups for landing in group)]
        self._frame, self._rest, self._left_bytes = [], [], 0
        self._groups.clear()
        return whole, landings

    def _starts_well(self) -> bool:
        head = self._head
        return head[: _START.size] == self._start and head[_FLAGS_AT:_CRC_AT] == len(self._frame).to_bytes(4, "little")

    def _next_frame(self) -> None:
        """What the client sends next: small records share a frame, as `FRAME_AIM_BYTES` says."""
        self._crc = self._checked_bytes = 0
        self._is_good = True
        groups = self._groups
        while groups and not groups[0]:
            groups.popleft()
        if not groups:
            self._frame, self._rest, self._left_bytes = [], [], 0
            return
        group = groups[0]
        length = self._record_bytes
        if self._is_alone:
            landing = group.popleft()
            if self._body:
                self._body = landing.item.to_bytes(4, "little") + self._body[4:]
                self._frame = [landing]
                self._rest = [self._head, landing.buffer]
                self._left_bytes = self._head_bytes + length
                return
            frame = [landing]
        else:
            frame = [group.popleft() for _ in range(min(self._per_frame, len(group)))]
        self._frame = frame
        count, words = len(frame), self._table_bytes >> 2
        fields: list[int | bytes] = []
        for landing in frame:
            fields += (landing.item, 0, length, 0, FLAG_LAST, words, NO_CONTENT_ID, length, self._block_bytes)
        self._body = encode_fields(fields, (b"",) * count)  # the words stand behind it
        body_bytes = count * (DESCRIPTOR_BYTES + self._table_bytes)
        self._head_bytes = HEADER_BYTES + body_bytes
        self._start = _START.pack(MAGIC, VERSION, FrameType.DATA, self._request_id, body_bytes, count * length)
        self._rest = [self._head[: self._head_bytes], *(landing.buffer for landing in frame)]
        self._left_bytes = self._head_bytes + count * length


def _per_frame(record_bytes: int) -> int:
    return max(1, min(FRAME_AIM_BYTES // record_bytes, SLICES_PER_FRAME_MAX))


def replay(reader: FrameReader, data: bytes) -> list[Frame]:
    """Gives bytes that were received elsewhere to the reader; returns and raises as `FrameReader.advance`."""
    view = memoryview(data)
    frames: list[Frame] = []
    while len(view):
        count = 0
        for buffer in reader.buffers():
            piece = view[count : count + len(buffer)]
            buffer[: len(piece)] = piece
            count += len(piece)
        frames += reader.advance(count)
        view = view[count:]
    return frames


def _behind(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of `views` behind `count` bytes, less than all."""
    for at, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[at + 1 :]]
        count -= len(view)
    raise AssertionError("more bytes than there was room for")

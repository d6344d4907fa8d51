"""Granted payload that comes as our own client sends it: whole records of one shape, in the order of their grant.

What a frame looks like is known before it comes, but for its checksums. So each is received with one call, header and
payload straight to where they belong, and compared instead of decoded. Whatever else comes is no fault: its bytes are
given to the `FrameReader`, which knows every frame, and so is the rest of the grant.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Final

from kvstore.limits import FRAME_AIM_BYTES, SLICE_BYTES_MAX, SLICES_PER_FRAME_MAX
from kvstore.transport.base import FetchEvents, Landing
from kvstore.types.checksum import crc32c
from kvstore.wire.frames import Frame, FrameReader
from kvstore.wire.header import HEADER_BYTES, MAGIC, VERSION, FrameType
from kvstore.wire.slices import DESCRIPTOR_BYTES, FLAG_LAST, NO_CONTENT_ID, encode_fields

_START: Final = struct.Struct("<2sBBIII")  # of a header: up to the length of the payload; epoch, flags and CRC follow
_FLAGS_AT: Final = 24
_CRC_AT: Final = HEADER_BYTES - 4


class PutLane:
    """The frames that bring a grant's records.

    Attributes:
        received_bytes: so far, to see that the client sends.
    """

    __slots__ = (
        "_at",
        "_block_bytes",
        "_body",
        "_frame",
        "_groups",
        "_head",
        "_head_bytes",
        "_per_frame",
        "_record_bytes",
        "_request_id",
        "_rest",
        "_start",
        "_table_bytes",
        "left_bytes",
        "received_bytes",
    )

    def __init__(self, request_id: int, *, record_bytes: int, block_bytes: int) -> None:
        """
        Args:
            record_bytes: of each record, see `takes`.
            block_bytes: the checksum block of all of them.
        """
        self._request_id = request_id
        self._record_bytes = record_bytes
        self._block_bytes = block_bytes
        self._table_bytes = 4 * -(-record_bytes // block_bytes)
        self._per_frame = max(1, min(FRAME_AIM_BYTES // record_bytes, SLICES_PER_FRAME_MAX))
        self._head = bytearray(HEADER_BYTES + self._per_frame * (DESCRIPTOR_BYTES + self._table_bytes))
        self._groups: deque[deque[Landing]] = deque()
        self._frame: list[Landing] = []  # whose frame is on its way
        self._rest: list[memoryview] = []  # where the rest of it belongs
        self._at = 0  # bytes of it that have come
        self._head_bytes = 0
        self._start = b""  # of its header
        self._body = b""  # its descriptors
        self.left_bytes = 0  # of it
        self.received_bytes = 0

    @staticmethod
    def takes(landings: Sequence[Landing]) -> bool:
        """Whether records of the first one's length fit a slice each."""
        return 0 < len(landings[0].buffer) <= SLICE_BYTES_MAX

    def expect(self, landings: Sequence[Landing]) -> None:
        """One GRANT names these."""
        self._groups.append(deque(landings))
        if not self._frame:
            self._next_frame()

    @property
    def is_over(self) -> bool:
        """All that was granted has come."""
        return not self._frame

    @property
    def rest(self) -> list[memoryview]:
        """Where the next bytes of the stream belong."""
        return self._rest

    def advance(self, count: int, events: FetchEvents) -> bool:
        """So many bytes have come into `rest`. False when they are not what was expected: `take_apart` then."""
        self.received_bytes += count
        at = self._at = self._at + count
        left = self.left_bytes = self.left_bytes - count
        if left:
            self._rest = _behind(self._rest, count)
            return at < HEADER_BYTES or self._starts_well()
        words_at = HEADER_BYTES + len(self._body)
        head = self._head
        if (
            not self._starts_well()
            or head[HEADER_BYTES:words_at] != self._body
            or crc32c(memoryview(head)[HEADER_BYTES : self._head_bytes], crc32c(memoryview(head)[:_CRC_AT]))
            != int.from_bytes(head[_CRC_AT:HEADER_BYTES], "little")
        ):
            return False
        came, self._frame = self._frame, []
        tables = bytes(memoryview(head)[words_at : self._head_bytes])
        self._next_frame()
        events.came([landing.item for landing in came], tables)
        return True

    def take_apart(self) -> tuple[bytes, list[Landing]]:
        """What has come of the frame in progress, and where all that has not come whole belongs. The lane is spent."""
        payload = [landing.buffer for landing in self._frame]
        whole = b"".join([bytes(memoryview(self._head)[: self._head_bytes]), *payload])[: self._at]
        landings = [*self._frame, *(landing for group in self._groups for landing in group)]
        self._frame, self._rest, self._at, self.left_bytes = [], [], 0, 0
        self._groups.clear()
        return whole, landings

    def _starts_well(self) -> bool:
        head = self._head
        return head[: len(self._start)] == self._start and head[_FLAGS_AT:_CRC_AT] == len(self._frame).to_bytes(
            4, "little"
        )

    def _next_frame(self) -> None:
        """What the client sends next: small records share a frame, as `FRAME_AIM_BYTES` says."""
        self._at = 0
        groups = self._groups
        while groups and not groups[0]:
            groups.popleft()
        if not groups:
            self._frame, self._rest, self.left_bytes = [], [], 0
            return
        group = groups[0]
        frame = self._frame = [group.popleft() for _ in range(min(self._per_frame, len(group)))]
        count, length, block = len(frame), self._record_bytes, self._block_bytes
        fields: list[int | bytes] = []
        words = self._table_bytes >> 2
        for landing in frame:
            fields += (landing.item, 0, length, 0, FLAG_LAST, words, NO_CONTENT_ID, length, block)
        self._body = encode_fields(fields, (b"",) * count)  # the words stand behind it
        body_bytes = count * (DESCRIPTOR_BYTES + self._table_bytes)
        self._head_bytes = HEADER_BYTES + body_bytes
        self._start = _START.pack(MAGIC, VERSION, FrameType.DATA, self._request_id, body_bytes, count * length)
        self._rest = [memoryview(self._head)[: self._head_bytes], *(landing.buffer for landing in frame)]
        self.left_bytes = self._head_bytes + count * length


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

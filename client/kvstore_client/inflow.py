"""The answer to a straight read as it flows in: frame after frame, whole records into the caller's memory.

Everything is compared and every checksum computed as the general way does (`loads`, `incoming`), but without an object
for each frame, slice and record. It stops at whatever it does not expect, with the bytes of that frame, for the general
way to read again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from itertools import repeat
from typing import Final

from kvstore.errors import KVStoreError
from kvstore.limits import IO_VECTORS_MAX
from kvstore.types.checksum import crc32c
from kvstore.wire.expected import WholeRecords
from kvstore.wire.header import HEADER_BYTES
from kvstore_client.connection import Connection
from kvstore_client.waiting import first_bytes

_PIECE_BYTES: Final = 256 * 1024
"""Received and checked at a time, so that the CPU's cache still has it; see docs/decisions/hot-path.md."""
_ZEROS: Final = repeat(0)  # what each checksum begins with
_WAIT_ALL: Final = socket.MSG_WAITALL
_now_ns = time.monotonic_ns
_Memory = memoryview | bytearray


class Inflow:
    """The frames of one read on a connection, which no one else receives from.

    Attributes:
        done: Content id of each item that has come whole and matched its checksums, so far.
        epoch: The node's view, in the last frame; 0 when it named none.
    """

    __slots__ = (
        "_blocks_max",
        "_connection",
        "_deadline_ns",
        "_rearm_at_ns",
        "_receive",
        "_records",
        "_request_id",
        "_views",
        "done",
        "epoch",
    )

    def __init__(
        self, connection: Connection, records: WholeRecords, views: Sequence[memoryview], request_id: int
    ) -> None:
        """
        Args:
            connection: The request was sent on it; its deadline is ours.
            records: What is expected.
            views: Where each item belongs.
            request_id: Of the request.
        """
        self._connection = connection
        self._records = records
        self._views = views
        self._request_id = request_id
        assert connection.quick is not None, "the node ends reads with data only where that was agreed on"
        self._receive = connection.quick[1]
        self._deadline_ns = connection.deadline_ns
        # from when on the kernel's timeout is too long for what is left; at once when it is too short, or none
        armed_ns = connection.receive_timeout_ns
        is_enough = armed_ns >= self._deadline_ns - _now_ns()
        self._rearm_at_ns = self._deadline_ns - armed_ns + (armed_ns >> 6) if is_enough else 0
        mean_bytes = records.record_bytes // max(1, len(records.cuts))
        self._blocks_max = min(IO_VECTORS_MAX - 1, max(1, _PIECE_BYTES // mean_bytes))
        self.done: dict[int, bytes] = {}
        self.epoch = 0

    def receive(self) -> bytes | None:
        """Receives until all items are done: None. Else all bytes of the frame that it stopped at, as far as it came.

        It stops at a frame that is not expected, is garbled, or does not come whole: the deadline has passed, or the
        connection broke, which whoever goes on will see for themselves.
        """
        records, views, done = self._records, self._views, self.done
        head, behind = bytearray(HEADER_BYTES), bytearray(HEADER_BYTES)
        came = self._fill((head,), HEADER_BYTES)
        if came < HEADER_BYTES:
            return bytes(head[:came])
        while True:
            frame = records.begin(head, self._request_id)
            if frame is None:
                return bytes(head)
            count, body_bytes, is_final = frame
            body = bytearray(body_bytes)
            came = self._fill((body,), body_bytes)
            if came < body_bytes:
                return bytes(head + body[:came])
            opened = records.open(head, body, count)
            if opened is None:
                return bytes(head + body)
            items, content_ids, words = opened
            if (
                max(items) >= len(views)
                or len(set(items)) != count
                or not done.keys().isdisjoint(items)
                or (is_final and len(done) + count != len(views))
            ):
                return bytes(head + body)
            blocks = self._blocks_of(items)
            came = self._take(blocks, words, None if is_final else behind)
            if came >= 0:
                return b"".join((head, body, *first_bytes([*blocks, memoryview(behind)], came)))
            done.update(zip(items, content_ids, strict=True))
            if is_final:
                self.epoch = records.epoch(head)
                return None
            head, behind = behind, head

    def _blocks_of(self, items: Sequence[int]) -> list[memoryview]:
        """The checksum blocks of some items, in order. Loops in C: there may be hundreds for each frame."""
        views = list(map(self._views.__getitem__, items))
        cuts = self._records.cuts
        if not cuts:
            return views
        blocks: list[memoryview] = []
        for view in views:
            blocks += map(view.__getitem__, cuts)
        return blocks

    def _take(self, blocks: list[memoryview], words: list[int], behind: bytearray | None) -> int:
        """Receives and checks the payload of a frame, and the header behind it when there is to be one.

        Returns:
            -1 when all is well; else how many bytes have come.
        """
        step, last = self._blocks_max, len(blocks) - self._blocks_max
        fill = self._fill
        taken = at = 0
        while True:
            piece = blocks[at : at + step]
            wanted = sum(map(len, piece))
            if behind is None or at < last:
                came = fill(piece, wanted)
            else:
                wanted += HEADER_BYTES
                came = fill((*piece, behind), wanted)
            taken += came
            if came != wanted or list(map(crc32c, piece, _ZEROS)) != words[at : at + step]:
                return taken
            if at >= last:
                return -1
            at += step

    def _fill(self, buffers: Sequence[_Memory], wanted_bytes: int) -> int:
        """Receives until the buffers are full; how many bytes came, less when there will be no more in time."""
        came = 0
        while True:
            try:
                if _now_ns() >= self._rearm_at_ns and not self._arm():
                    return came
                count = self._receive(buffers, 0, _WAIT_ALL)[0]
            except (OSError, KVStoreError):
                return came
            came += count
            if came == wanted_bytes or not count:
                return came
            buffers = _behind(buffers, count)  # the deadline came, or a signal

    def _arm(self) -> bool:
        """Sets the kernel's timeout to what is left until the deadline; False when that is nothing.

        A little more than is left, so that it will do for the next call with such a deadline, too.
        """
        left_ns = self._deadline_ns - _now_ns()
        if left_ns <= 0:
            return False
        self._connection.arm_receive(left_ns + (left_ns >> 8))
        self._rearm_at_ns = self._deadline_ns - left_ns + (left_ns >> 7)
        return True


def _behind(buffers: Sequence[_Memory], count: int) -> list[memoryview]:
    """What of the buffers lies behind their first `count` bytes."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if count < len(buffer):
            rest.append(memoryview(buffer)[count:])
        count = max(0, count - len(buffer))
    return rest

"""The answer to a straight read as it flows in: frame after frame, records into the caller's memory.

Everything is compared and every checksum computed as the general way does (`loads`, `incoming`), but without an object
for each frame, slice and record. It stops at whatever it does not expect, with the bytes of that frame, for the general
way to read again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Final

from kvstore.errors import KVStoreError
from kvstore.limits import IO_VECTORS_MAX
from kvstore.transport import inflow as compiled
from kvstore.types.checksum import crc32c
from kvstore.wire.expected import LongRecords, WholeRecords, epoch_of
from kvstore.wire.header import HEADER_BYTES
from kvstore_client.connection import Connection
from kvstore_client.waiting import first_bytes

_PIECE_BYTES: Final = 256 * 1024
"""Received and checked at a time, so that the CPU's cache still has it; see docs/decisions/hot-path.md."""
_ZEROS: Final = repeat(0)  # what each checksum begins with
_WAIT_ALL: Final = socket.MSG_WAITALL
_now_ns = time.monotonic_ns
_Memory = memoryview | bytearray


class Timed:
    """The deadline of one read on a connection, which no one else receives from."""

    __slots__ = ("_connection", "_deadline_ns", "_rearm_at_ns")

    def __init__(self, connection: Connection) -> None:
        """The request was sent on the connection, whose deadline is ours."""
        self._connection = connection
        self._deadline_ns = connection.deadline_ns
        # from when on the kernel's timeout is too long for what is left; at once when it is too short, or none
        armed_ns = connection.receive_timeout_ns
        is_enough = armed_ns >= self._deadline_ns - _now_ns()
        self._rearm_at_ns = self._deadline_ns - armed_ns + (armed_ns >> 6) if is_enough else 0

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


class CompiledInflow(Timed):
    """What `WholeInflow` is, in one compiled call (`kvstore.transport.inflow`)."""

    __slots__ = ("_receiver", "begun")

    def __init__(
        self, connection: Connection, records: WholeRecords, views: Sequence[memoryview], request_id: int
    ) -> None:
        """As `WholeInflow`."""
        super().__init__(connection)
        assert connection.quick is not None, "the node ends reads with data only where that was agreed on"
        self._receiver = compiled.WholeReceiver(
            connection.quick[0], records, views, request_id, piece_bytes=_PIECE_BYTES
        )
        self.begun: dict[int, tuple[bytes, int]] = {}

    @property
    def done(self) -> dict[int, bytes]:
        """See `Inflow`."""
        return self._receiver.done()

    @property
    def epoch(self) -> int:
        """See `Inflow`."""
        return self._receiver.epoch

    def content_ids(self) -> Sequence[bytes]:
        """See `Inflow`."""
        return self._receiver.content_ids()

    def receive(self) -> bytes | None:
        """See `Inflow`."""
        receiver = self._receiver
        while True:
            is_done = receiver.receive(self._rearm_at_ns)
            if is_done is None and self._is_armed():
                continue
            rest = receiver.rest()
            if not is_done:
                return rest
            if rest:
                self._connection.close()  # what stands behind a whole answer belongs to no call
            return None

    def _is_armed(self) -> bool:
        try:
            return self._arm()
        except (OSError, KVStoreError):
            return False


class Inflow(Timed):
    """The frames of one read on a connection, which no one else receives from.

    What records are expected is for a subclass to know.

    Attributes:
        done: Content id of each item that has come whole and matched its checksums, so far.
        begun: Content id of each item of which so many bytes from its start have come and matched, but not all.
        epoch: The node's view, in the last frame; 0 when it named none.
    """

    __slots__ = (
        "_begin",
        "_blocks_max",
        "_receive",
        "_request_id",
        "_views",
        "begun",
        "done",
        "epoch",
    )

    def __init__(
        self,
        connection: Connection,
        views: Sequence[memoryview],
        request_id: int,
        *,
        begin: Callable[[bytearray, int], tuple[int, int, bool] | None],
        block_bytes: int,
    ) -> None:
        """
        Args:
            connection: The request was sent on it; its deadline is ours.
            views: Where each item belongs.
            request_id: Of the request.
            begin: As `WholeRecords.begin`.
            block_bytes: Of the pieces of memory that `_open` gives, about.
        """
        assert connection.quick is not None, "the node ends reads with data only where that was agreed on"
        super().__init__(connection)
        self._views = views
        self._request_id = request_id
        self._begin = begin
        self._receive = connection.quick[1]
        self._blocks_max = min(IO_VECTORS_MAX - 1, max(1, _PIECE_BYTES // block_bytes))
        self.done: dict[int, bytes] = {}
        self.begun: dict[int, tuple[bytes, int]] = {}
        self.epoch = 0

    def content_ids(self) -> Sequence[bytes]:
        """The content ids of all items, which are all done."""
        return list(map(self.done.__getitem__, range(len(self._views))))

    def receive(self) -> bytes | None:
        """Receives until all items are done: None. Else all bytes of the frame that it stopped at, as far as it came.

        It stops at a frame that is not expected, is garbled, or does not come whole: the deadline has passed, or the
        connection broke, which whoever goes on will see for themselves.
        """
        head, behind = bytearray(HEADER_BYTES), bytearray(HEADER_BYTES)
        came = self._fill((head,), HEADER_BYTES)
        if came < HEADER_BYTES:
            return bytes(head[:came])
        while True:
            frame = self._begin(head, self._request_id)
            if frame is None:
                return bytes(head)
            count, body_bytes, is_final = frame
            body = bytearray(body_bytes)
            came = self._fill((body,), body_bytes)
            if came < body_bytes:
                return bytes(head + body[:came])
            opened = self._open(head, body, count)
            if opened is None or (is_final and not self._would_end()):
                return bytes(head + body)
            blocks, words = opened
            came = self._take(blocks, words, None if is_final else behind)
            if came >= 0:
                return b"".join((head, body, *first_bytes([*blocks, memoryview(behind)], came)))
            self._note_arrived()
            if is_final:
                self.epoch = epoch_of(head)
                return None
            head, behind = behind, head

    def _open(self, head: bytearray, body: bytearray, count: int) -> tuple[list[memoryview], list[int]] | None:
        """The checksum blocks of the caller's memory that a frame fills, in order, and their CRC words.

        None for a frame that is not expected.
        """
        raise NotImplementedError

    def _would_end(self) -> bool:
        """Whether with the frame that `_open` has seen all items are done."""
        raise NotImplementedError

    def _note_arrived(self) -> None:
        """The frame that `_open` has seen has come, and matched its checksums."""
        raise NotImplementedError

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


class WholeInflow(Inflow):
    """Records that each come in one slice, in any order and grouping. Loops in C: there may be hundreds in a frame."""

    __slots__ = ("_arriving", "_records")

    def __init__(
        self, connection: Connection, records: WholeRecords, views: Sequence[memoryview], request_id: int
    ) -> None:
        """As `Inflow`; each of `views` is as long as each of `records`."""
        block_bytes = records.record_bytes // max(1, len(records.cuts))
        super().__init__(connection, views, request_id, begin=records.begin, block_bytes=block_bytes)
        self._records = records
        self._arriving: tuple[Sequence[int], Sequence[bytes]] = ((), ())

    def _open(self, head: bytearray, body: bytearray, count: int) -> tuple[list[memoryview], list[int]] | None:
        opened = self._records.open(head, body, count)
        if opened is None:
            return None
        items, content_ids, words = opened
        if max(items) >= len(self._views) or len(set(items)) != count or not self.done.keys().isdisjoint(items):
            return None
        self._arriving = items, content_ids
        views = list(map(self._views.__getitem__, items))
        cuts = self._records.cuts
        if not cuts:
            return views, words
        blocks: list[memoryview] = []
        for view in views:
            blocks += map(view.__getitem__, cuts)
        return blocks, words

    def _would_end(self) -> bool:
        return len(self.done) + len(self._arriving[0]) == len(self._views)

    def _note_arrived(self) -> None:
        self.done.update(zip(*self._arriving, strict=True))


class LongInflow(Inflow):
    """Records that come in several slices: those of each in order, next to those of others, in any cut."""

    __slots__ = ("_arriving", "_records")

    def __init__(
        self, connection: Connection, records: LongRecords, views: Sequence[memoryview], request_id: int
    ) -> None:
        """As `Inflow`; each of `views` is as long as each of `records`."""
        super().__init__(connection, views, request_id, begin=records.begin, block_bytes=records.block_bytes)
        self._records = records
        self._arriving: dict[int, tuple[bytes, int]] = {}

    def _open(self, head: bytearray, body: bytearray, count: int) -> tuple[list[memoryview], list[int]] | None:
        slices = self._records.open(head, body, count)
        if slices is None:
            return None
        arriving: dict[int, tuple[bytes, int]] = {}
        self._arriving = arriving
        size = self._records.block_bytes
        blocks: list[memoryview] = []
        words: list[int] = []
        for item, offset, length, _, _, content_id, _, _, crcs in slices:
            if item >= len(self._views) or item in self.done:
                return None
            if (arriving.get(item) or self.begun.get(item) or (content_id, 0)) != (content_id, offset):
                return None
            end = offset + length
            arriving[item] = content_id, end
            view = self._views[item][offset:end]
            blocks += [view[at : at + size] for at in range(0, length, size)]
            words += memoryview(crcs).cast("I")
        return blocks, words

    def _would_end(self) -> bool:
        ends = sum(until == self._records.record_bytes for _, until in self._arriving.values())
        return len(self.done) + ends == len(self._views)

    def _note_arrived(self) -> None:
        self.begun.update(self._arriving)
        for item, (content_id, until) in self._arriving.items():
            if until == self._records.record_bytes:
                self.done[item] = content_id
                del self.begun[item]


def whole_inflow(
    connection: Connection, records: WholeRecords, views: Sequence[memoryview], request_id: int
) -> CompiledInflow | WholeInflow:
    """See `WholeInflow`; compiled where that was built."""
    assert connection.quick is not None, "the node ends reads with data only where that was agreed on"
    if compiled.IS_COMPILED and isinstance(connection.quick[0], int):
        return CompiledInflow(connection, records, views, request_id)
    return WholeInflow(connection, records, views, request_id)


def _behind(buffers: Sequence[_Memory], count: int) -> list[memoryview]:
    """What of the buffers lies behind their first `count` bytes."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if count < len(buffer):
            rest.append(memoryview(buffer)[count:])
        count = max(0, count - len(buffer))
    return rest

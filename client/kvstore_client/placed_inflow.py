"""The answer to a straight read into shared memory as it flows in: what the node has put where it belongs.

`inflow`, where only the frames travel: each tells of records whose bytes lie in the caller's memory, and of their
checksums. It stops at whatever it does not expect, with the bytes of that frame, for the general way to read again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from kvstore.errors import KVStoreError
from kvstore.types.checksum import crcs_match_far
from kvstore.wire.expected import WholeRecords, epoch_of
from kvstore.wire.header import HEADER_BYTES
from kvstore_client.connection import Connection

_AHEAD_BYTES: Final = 8 * 1024
_now_ns = time.monotonic_ns


class PlacedInflow:
    """The PLACED frames of one read on a connection, which no one else receives from.

    Attributes:
        done: Content id of each item that lies in its place and matched its checksums, so far.
        begun: None are, ever; see `Inflow`.
        epoch: The node's view, in the last frame; 0 when it named none.
    """

    __slots__ = (
        "_block_bytes",
        "_bounced",
        "_connection",
        "_memory",
        "_records",
        "_request_id",
        "_views",
        "begun",
        "done",
        "epoch",
    )

    def __init__(
        self,
        connection: Connection,
        records: WholeRecords,
        views: Sequence[memoryview],
        request_id: int,
        bounced: Sequence[memoryview] = (),
    ) -> None:
        """
        Args:
            connection: The request was sent on it; its deadline is ours.
            records: What is expected.
            views: Where each item belongs; each as long as each of `records`.
            request_id: Of the request.
            bounced: Where the node puts each item, when it is to be copied from there.
        """
        self._connection = connection
        self._records = records
        self._views = views
        self._bounced = bounced
        self._request_id = request_id
        self._memory = memoryview(bytearray(_AHEAD_BYTES))
        self.done: dict[int, bytes] = {}
        self.begun: dict[int, tuple[bytes, int]] = {}
        self.epoch = 0

    def content_ids(self) -> Sequence[bytes]:
        """Of each item, in order, once all are done."""
        return list(map(self.done.__getitem__, range(len(self._views))))

    def receive(self) -> bytes | None:
        """Receives until all items are done: None. Else all bytes from the frame on that it stopped at.

        It stops at a frame that is not expected, is garbled or tells of bytes that are, and when the deadline has
        passed or the connection broke, which whoever goes on will see for themselves.
        """
        begin, request_id = self._records.begin_placed, self._request_id
        start = end = 0
        while True:
            wanted = HEADER_BYTES
            frame = None
            if end - start >= HEADER_BYTES:
                frame = begin(self._memory[start : start + HEADER_BYTES], request_id)
                if frame is None:
                    return bytes(self._memory[start:end])
                wanted += frame[1]
            if frame is None or end - start < wanted:
                if start + wanted > len(self._memory):
                    start, end = self._make_room(start, end, wanted)
                count = self._receive_some(end)
                if not count:
                    return bytes(self._memory[start:end])
                end += count
                continue
            count, _, is_final = frame
            if not self._take(start, start + wanted, count, is_final=is_final):
                return bytes(self._memory[start:end])
            if is_final:
                return None
            start += wanted

    def _take(self, start: int, end: int, count: int, *, is_final: bool) -> bool:
        """Whether a frame is as expected, and so are the bytes that it tells of."""
        body_at = start + HEADER_BYTES
        head = self._memory[start:body_at]
        opened = self._records.open_placed(head, self._memory[body_at:end], count)
        if opened is None:
            return False
        items, content_ids, table = opened
        views, done = self._views, self.done
        if max(items) >= len(views) or len(set(items)) != count or not done.keys().isdisjoint(items):
            return False
        if is_final and len(done) + count != len(views):
            return False
        block_bytes, step = self._records.block_bytes, len(table) // count
        at, bounced = 0, self._bounced
        for item in items:
            if bounced:
                views[item][:] = bounced[item]
            if not crcs_match_far(views[item], block_bytes, table[at : at + step]):
                return False
            at += step
        done.update(zip(items, content_ids, strict=True))
        if is_final:
            self.epoch = epoch_of(head)
        return True

    def _receive_some(self, at: int) -> int:
        """Receives what is there, waiting for it; 0 when there will be no more in time."""
        try:
            return self._connection.receive_into((self._memory[at:],), 0) or 0
        except KVStoreError:
            return 0

    def _make_room(self, start: int, end: int, wanted_bytes: int) -> tuple[int, int]:
        """Moves what is there to the front of memory that has room for so much; where it lies then."""
        length = end - start
        longer = memoryview(bytearray(max(_AHEAD_BYTES, wanted_bytes)))
        longer[:length] = self._memory[start:end]
        self._memory = longer
        return 0, length

"""The lane of a record that the node puts into shared memory: `lane`, where only the answer travels."""

from __future__ import annotations

import time
from typing import ClassVar

from kvstore.errors import ChecksumMismatch, KVStoreError, Unavailable
from kvstore.types.checksum import crcs_match
from kvstore.types.results import Hit, Miss
from kvstore.wire.header import FrameType
from kvstore_client.connection import Connection
from kvstore_client.lane import ReadLane
from kvstore_client.loads import Begun
from kvstore_client.shm_places import PLACED_BYTES_MIN, ConnectionRegions, place_at


class PlacedLane(ReadLane):
    """`ReadLane` into memory of `alloc`. What the node may still write there when a read ends early is taken back."""

    _IS_PLACED: ClassVar = True

    def read(self, key: bytes, view: memoryview) -> list[Hit | Miss] | Begun | int:
        """See `ReadLane.read`; 0 also when it is other memory, or the node does not know it yet."""
        if self._record_bytes < PLACED_BYTES_MIN:
            return 0
        now_ns = time.monotonic_ns()
        link = self._link
        if self._core.wants_view(now_ns):
            return 0
        connection = self._driver.take_ready(link, self._flow, now_ns)
        if connection is None:
            return 0
        regions, quick = connection.regions, connection.quick
        place = regions.place_of(view) if isinstance(regions, ConnectionRegions) else None
        if place is None or quick is None:
            self._driver.put_ready(link, connection)
            return 0
        assert isinstance(regions, ConnectionRegions), "there are no places without"
        handle, _, next_id = quick
        connection.deadline_ns = deadline_ns = now_ns + self._duration_ns
        try:
            if not self._duration_ns <= connection.receive_timeout_ns <= self._armed_ns_max:
                connection.arm_receive(self._duration_ns)
            try:
                answer = self._ask(handle, next_id(), link.view_epoch, key, place, self._duration_ns)
            except BlockingIOError:
                return self._read_on(connection, b"", view)  # too late, and it is known there what to do about it
            if not isinstance(answer, tuple):
                if answer:
                    return self._read_on(connection, answer, view)
                if answer is False:
                    raise Unavailable("a request did not fit the socket of an idle connection")
                if answer is None:
                    raise ChecksumMismatch("a PLACED frame was changed on the way; the connection must be opened anew")
                raise Unavailable(f"node at {connection.address} closed the connection; it may be restarting")
            _, epoch, content_id, table = answer
            if epoch > self._core.newest_epoch:
                self._core.saw_epoch(epoch)
            if not crcs_match(view, self._block_bytes, table):
                return self._ask_again(connection, content_id, table)
        except BaseException as error:
            is_ours = isinstance(error, KVStoreError | OSError)
            try:
                regions.take_back(place_at(view))  # first: a second signal may end this before its end
            finally:
                connection.close()
                self._driver.give_back(link, connection, time.monotonic_ns(), has_broken=is_ours)
            if not is_ours:
                raise
            return deadline_ns
        return self._done(connection, content_id, now_ns)

    def _read_on(self, connection: Connection, received: bytes, view: memoryview) -> Begun:
        """As `_go_on`."""
        connection.read_begun(received, FrameType.GET_INTO)
        return Begun(self._target, (self._link, connection), (), connection.deadline_ns, places=place_at(view))

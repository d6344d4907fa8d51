"""The straight way of a small read: whole records of one length, one target, one connection that is idle now.

Most reads of a decoding engine are like that, and all they need is one frame each way. This does what `read_verbs.load`
does when all goes well, without asking what else could be. When something else is, it hands over to `load` where it
stands; every byte that a Hit tells of has been verified here as there.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from kvstore.errors import DeadlineExceeded, KVStoreError
from kvstore.limits import FRAME_PAYLOAD_BYTES_MAX, SLICE_BYTES_MAX, SLICES_PER_FRAME_MAX
from kvstore.types.checksum import crc_table
from kvstore.types.results import Hit, Miss
from kvstore.wire.expected import ExpectedData, expected_data, get_body
from kvstore.wire.header import FrameType
from kvstore_client.blocking import BlockingDriver
from kvstore_client.connection import Connection
from kvstore_client.core import ClientCore
from kvstore_client.loads import Begun, node_deadline_ns
from kvstore_client.regions import Item, region_of


def plain_views(buffers: Sequence[Item], key_count: int) -> list[memoryview] | None:
    """The caller's memory when each item of it is one piece, all of one length that the straight way can serve.

    Raises:
        InvalidRequest: As `region_of`.
    """
    if not 0 < len(buffers) == key_count <= SLICES_PER_FRAME_MAX:
        return None
    length = -1
    views: list[memoryview] = []
    for index, buffer in enumerate(buffers):
        pieces = region_of(buffer, index=index, writable=True).views
        if len(pieces) != 1 or (len(pieces[0]) != length and index):
            return None
        length = len(pieces[0])
        views.append(pieces[0])
    return views if 0 < length <= SLICE_BYTES_MAX and length * key_count <= FRAME_PAYLOAD_BYTES_MAX else None


def read_straight(
    core: ClientCore,
    driver: BlockingDriver,
    *,
    namespace: bytes,
    keys: bytes,
    views: list[memoryview],
    block_bytes: int,
    deadline_ns: int,
) -> list[Hit | Miss] | Begun | None:
    """Reads records into `views`, from `plain_views`.

    Args:
        namespace: Digest.
        keys: Record keys.
        block_bytes: Checksum block that the records have if they were written by the book.

    Returns:
        The hits; or what to go on with; or None when nothing has happened, or the connection broke: begin anew.
    """
    target = core.placement
    now_ns = time.monotonic_ns()
    if type(target) is not str or core.wants_view(now_ns) or deadline_ns <= now_ns:
        return None
    borrowed = driver.borrow(target, now_ns)
    if borrowed is None:
        return None
    link, connection = borrowed
    expected = expected_data(len(views), len(views[0]), block_bytes)
    connection.deadline_ns = deadline_ns
    is_kept = has_broken = False
    try:
        request_id = connection.send_at_once(
            FrameType.GET, get_body(namespace, keys, node_deadline_ns(deadline_ns - now_ns))
        )
        head = bytearray(expected.head_bytes)
        if not _receive(connection, expected, head, views, request_id):
            is_kept = True
            return Begun(target, (link, connection), (), deadline_ns)
        epoch, found = expected.open(head)
        if found is None:
            connection.give_back_bytes(b"".join((head, *views)))
            is_kept = True
            return Begun(target, (link, connection), (), deadline_ns)
        connection.end_at_once(epoch)
        is_good = True
        for view, (_, crcs) in zip(views, found, strict=True):
            is_good &= crc_table(view, block_bytes) == crcs
        if not is_good:
            connection.close()  # whatever garbles bytes there shall not do it to the second try
            return Begun(target, None, expected.slices(found), deadline_ns)
    except KVStoreError:
        has_broken = True
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    finally:
        if not is_kept:
            driver.give_back(link, connection, time.monotonic_ns(), has_broken=has_broken)
    length = len(views[0])
    link.note_read(expected.payload_bytes, connection.idle_since_ns - now_ns)
    core.budget.first_attempt()
    counters = core.counters
    counters.load_items += len(views)
    counters.load_hits += len(views)
    counters.load_bytes += expected.payload_bytes
    return [Hit(length_bytes=length, content_id=content_id) for content_id, _ in found]


def _receive(
    connection: Connection, expected: ExpectedData, head: bytearray, views: list[memoryview], request_id: int
) -> bool:
    """Receives the expected frame into `head` and `views`; False, and all bytes given back, when another one comes."""
    buffers: list[memoryview | bytearray] = [head, *views]
    total = expected.head_bytes + expected.payload_bytes
    count = 0
    try:
        count = connection.receive_into(buffers, 0) or 0
        if expected.begins(head, count, request_id):
            while count < total:
                count += connection.receive_into(_behind(buffers, count), socket.MSG_WAITALL) or 0
            return True
    except DeadlineExceeded:
        pass  # it will be again, where it is known what to do about it
    connection.give_back_bytes(b"".join(_until(buffers, count)))
    return False


def _behind(buffers: Sequence[memoryview | bytearray], count: int) -> list[memoryview]:
    """What of the buffers lies behind their first `count` bytes."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if count < len(buffer):
            rest.append(memoryview(buffer)[count:])
        count = max(0, count - len(buffer))
    return rest


def _until(buffers: Sequence[memoryview | bytearray], count: int) -> list[memoryview]:
    """The first `count` bytes of the buffers."""
    first: list[memoryview] = []
    for buffer in buffers:
        first.append(memoryview(buffer)[: max(0, count)])
        count -= len(buffer)
    return first

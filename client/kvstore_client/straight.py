"""The straight way of a read: whole records of one length, one target, one connection that is idle now.

Most reads of an engine are like that. This does what `read_verbs.load` does when all goes well, without asking what
else could be. When something else is, it hands over to `load` where it stands: with the items that are done, and with
the bytes that it can't tell what they are. Every byte that a Hit tells of has been verified here as there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Final, cast

from kvstore.errors import KVStoreError
from kvstore.limits import BATCH_ITEMS_MAX, PAYLOAD_BYTES_MAX, PLACES_PER_CALL_MAX, SLICE_BYTES_MAX
from kvstore.types.results import Hit, Miss, hits_of
from kvstore.wire.expected import LongRecords, get_body, get_into_body, whole_records
from kvstore.wire.header import FrameType
from kvstore_client.blocking import BlockingDriver
from kvstore_client.connection import Connection
from kvstore_client.core import ClientCore
from kvstore_client.inflow import CompiledInflow, Inflow, LongInflow, whole_inflow
from kvstore_client.loads import Begun, node_deadline_ns
from kvstore_client.placed_inflow import PlacedInflow
from kvstore_client.regions import Item, region_of
from kvstore_client.shm_places import ConnectionRegions, Places, bounces, take_back

_facts = attrgetter("format", "ndim", "contiguous", "readonly")
_FLAT: Final = {("B", 1, True, False)}
_VIEWS: Final = {memoryview}


def plain_views(buffers: Sequence[Item], key_count: int) -> Sequence[memoryview] | None:
    """The caller's memory when each item of it is one piece, all of one length that the straight way can serve.

    Raises:
        InvalidRequest: As `region_of`.
    """
    if not 0 < len(buffers) == key_count <= BATCH_ITEMS_MAX:
        return None
    if set(map(type, buffers)) == _VIEWS and set(map(_facts, buffers)) == _FLAT:
        views = cast("Sequence[memoryview]", buffers)  # as region_of finds them, each in fewer steps
    else:
        views = []
        for index, buffer in enumerate(buffers):
            pieces = region_of(buffer, index=index, writable=True).views
            if len(pieces) != 1:
                return None
            views += pieces
    lengths = set(map(len, views))
    return views if len(lengths) == 1 and 0 < lengths.pop() <= PAYLOAD_BYTES_MAX else None


def read_straight(
    core: ClientCore,
    driver: BlockingDriver,
    *,
    namespace: bytes,
    keys: bytes,
    views: Sequence[memoryview],
    block_bytes: int,
    deadline_ns: int,
    is_placed: bool = False,
) -> list[Hit | Miss] | Begun | None:
    """Reads records into `views`, from `plain_views`.

    Args:
        namespace: Digest.
        keys: Record keys.
        block_bytes: Checksum block that the records have if they were written by the book.
        is_placed: The node is to put them there itself: it is shared memory.

    Returns:
        The hits; or what to go on with; or None when nothing has happened, or the request could not be sent: begin
        anew.
    """
    target = core.reader
    now_ns = time.monotonic_ns()
    if type(target) is not str or core.wants_view(now_ns) or deadline_ns <= now_ns:
        return None
    borrowed = driver.borrow(target, now_ns)
    if borrowed is None:
        return None
    link, connection = borrowed
    count, length = len(views), len(views[0])
    connection.deadline_ns = deadline_ns
    is_kept = has_broken = False
    places: Places | None = None
    try:
        assert connection.welcome is not None, "a connection that is not open was borrowed"
        if count > connection.welcome.batch_items_max:
            return None
        inflow: Inflow | CompiledInflow | PlacedInflow
        is_bounced = not is_placed and length <= SLICE_BYTES_MAX and bounces(connection, count=count, length=length)
        is_placed = is_placed or is_bounced
        if is_placed:
            places = _places_of(connection, views, is_bounced=is_bounced)
            if places is None:
                return None
            body = get_into_body(namespace, keys, node_deadline_ns(deadline_ns - now_ns), places.blob)
        else:
            body = get_body(namespace, keys, node_deadline_ns(deadline_ns - now_ns))
        request_id = connection.send_at_once(FrameType.GET_INTO if is_placed else FrameType.GET, body)
        if is_placed:
            assert places is not None, "it was sent with them"
            bounced = list(places.found) if is_bounced else ()
            inflow = PlacedInflow(connection, whole_records(length, block_bytes), views, request_id, bounced)
        elif length <= SLICE_BYTES_MAX:
            inflow = whole_inflow(connection, whole_records(length, block_bytes), views, request_id)
        else:
            inflow = LongInflow(connection, LongRecords(length, block_bytes), views, request_id)
        rest = inflow.receive()
        if rest is not None:
            connection.give_back_bytes(rest)
            is_kept = True
            begun, places = Begun(target, (link, connection), (), deadline_ns, inflow.done, inflow.begun, places), None
            return begun
        places = None
        connection.end_at_once(inflow.epoch)
    except KVStoreError:
        has_broken = True
        connection.close()
        return None
    except BaseException:
        if places is not None:
            take_back(connection, places)
        connection.close()
        raise
    finally:
        try:
            if places is not None:
                take_back(connection, places)  # first: a second signal may end this before its end
        finally:
            if not is_kept:
                driver.give_back(link, connection, time.monotonic_ns(), has_broken=has_broken)
    total = count * length
    link.note_read(total, connection.idle_since_ns - now_ns)
    core.budget.first_attempt()
    counters = core.counters
    counters.load_items += count
    counters.load_hits += count
    counters.load_bytes += total
    if is_bounced:
        counters.copied_bytes += total
    return hits_of(length, inflow.content_ids())


@contextmanager
def handing_over(driver: BlockingDriver, begun: Begun | None) -> Iterator[list[Begun]]:
    """While a read that was begun here goes over to its job; what is appended to the list is the later one.

    When that ends before the job has begun, as by Ctrl-C, the connection is closed and given back, and what the node
    may still put into places is not seen.
    """
    held = [begun] if begun is not None else []
    try:
        yield held
    except BaseException:
        for one in held:
            _give_up(driver, one)
        raise


def _give_up(driver: BlockingDriver, begun: Begun) -> None:
    if begun.connection is None:
        return
    link, connection = begun.connection
    if connection.deadline_ns != begun.deadline_ns or not link.uses(connection):
        return  # its job has had it, and has given it back; others may have it now
    try:
        if begun.places is not None:
            take_back(connection, begun.places)  # first: a second signal may end this before its end
    finally:
        connection.close()
        driver.give_back(link, connection, time.monotonic_ns(), has_broken=False)


def _places_of(connection: Connection, views: Sequence[memoryview], *, is_bounced: bool) -> Places | None:
    """Where the node is to put records; None when it does not know all of the memory, or they are too long."""
    regions = connection.regions
    if not isinstance(regions, ConnectionRegions) or not connection.ends_with_data or len(views[0]) > SLICE_BYTES_MAX:
        return None
    if is_bounced:
        return regions.bounced_places_of(len(views), len(views[0]))
    return regions.places_of(views) if len(views) <= PLACES_PER_CALL_MAX else None

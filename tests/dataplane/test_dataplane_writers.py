"""The layer-wise writer over real sockets: slices in any order, bounds, and what ends a writer."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from kvstore.engine.api import NamespaceRef
from kvstore.errors import InvalidRequest
from kvstore.limits import SECOND_NS, WRITERS_PER_CLIENT_MAX
from kvstore.server.batch import pack_u32, unpack_u32
from kvstore.testing.dict_engine import DictEngine
from kvstore.testing.plane_lab import LabClient, PlaneLab
from kvstore.types.checksum import crc_table
from kvstore.types.results import ItemStatus, MissReason, RefusedReason
from kvstore.wire.header import FrameType
from kvstore.wire.messages import End, WriterAbort, WriterOpened
from kvstore.wire.slices import NO_CONTENT_ID, Slice
from tests.dataplane.written import commit, key_of, opening, write

STORED = (ItemStatus.STORED, "")
EXISTS = (ItemStatus.EXISTS, "")


def test_a_record_is_written_layer_by_layer(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    value = os.urandom(10_000)
    client, other = lab.client(), lab.client()
    opened = client.call(opening(namespace, [1], len(value)), WriterOpened)
    assert opened.statuses == bytes([ItemStatus.GRANTED])
    (writer_id,) = unpack_u32(opened.writer_ids)
    assert write(client, writer_id, value, 4096, 8192) == bytes([ItemStatus.RECEIVED])
    assert write(other, writer_id, value, 0, 4096) == bytes([ItemStatus.RECEIVED]), (
        "a client's writers are on all its connections"
    )
    assert client.get(namespace.digest, [key_of(1)])[0] == bytes([MissReason.ABSENT])
    assert write(client, writer_id, value, 8192, 10_000) == bytes([ItemStatus.RECEIVED])
    assert commit(other, [writer_id], [value]) == [(0, ItemStatus.STORED, "")]
    assert client.get(namespace.digest, [key_of(1)])[1] == {0: value}
    assert client.call(opening(namespace, [1], len(value)), WriterOpened).statuses == bytes([ItemStatus.EXISTS])


def test_many_slices_in_one_frame_some_of_them_bad(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    value = os.urandom(8192)
    client = lab.client()
    good, bad = unpack_u32(client.call(opening(namespace, [1, 2], 8192), WriterOpened).writer_ids)
    client.session.start(FrameType.WRITER_WRITE)
    table = crc_table(value, 4096)
    shape = Slice(good, 0, 8192, 0, False, NO_CONTENT_ID, 8192, 4096, table)
    slices = [
        shape,
        shape._replace(item=bad, crcs=b"abcdefgh"),
        shape._replace(item=999),
        shape._replace(item=good, record_bytes=9000),
    ]
    client.send_slices(slices, value * 4, frame_type=FrameType.WRITER_WRITE)
    assert list(client.expect(End).statuses) == [
        ItemStatus.RECEIVED,
        RefusedReason.INVALID,
        RefusedReason.DEADLINE,
        RefusedReason.INVALID,
    ]
    assert engine.aborted == 1
    assert [status for _, status, _ in commit(client, [good], [value])] == [ItemStatus.STORED]
    assert [status for _, status, _ in commit(client, [bad], [value])] == [RefusedReason.DEADLINE]


def send_without_memory(client: LabClient, engine: DictEngine, namespace: NamespaceRef, value: bytes) -> int:
    """Opens a writer, and sends all of it while there is no memory: its id."""
    (writer_id,) = unpack_u32(client.call(opening(namespace, [1], len(value)), WriterOpened).writer_ids)
    engine.hold_grants = True
    client.session.start(FrameType.WRITER_WRITE)
    one = Slice(writer_id, 0, len(value), 0, False, NO_CONTENT_ID, len(value), 4096, crc_table(value, 4096))
    client.send_slices([one], value, frame_type=FrameType.WRITER_WRITE)
    return writer_id


def test_slices_wait_for_memory_and_the_stream_with_them(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    value = os.urandom(8192)
    client = lab.client()
    writer_id = send_without_memory(client, engine, namespace, value)
    for _ in range(10):
        lab.turn()
    assert not client._arrived()
    engine.let_go()
    assert client.expect(End).statuses == bytes([ItemStatus.RECEIVED])
    assert commit(client, [writer_id], [value]) == [(0, ItemStatus.STORED, "")]


def test_slices_without_memory_are_refused(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    client = lab.client()
    send_without_memory(client, engine, namespace, os.urandom(8192))
    lab.turn()
    lab.clock_ns += 6 * SECOND_NS
    assert client.expect(End).statuses == bytes([RefusedReason.OVERLOADED])


def test_a_connection_lost_in_a_slice_ends_the_writer(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    value = os.urandom(8192)
    client, other = lab.client(), lab.client()
    (writer_id,) = unpack_u32(client.call(opening(namespace, [1], 8192), WriterOpened).writer_ids)
    client.session.start(FrameType.WRITER_WRITE)
    one = Slice(writer_id, 0, 8192, 0, False, NO_CONTENT_ID, 8192, 4096, crc_table(value, 4096))
    client.send_torn([one], value, 3000, frame_type=FrameType.WRITER_WRITE)
    assert [status for _, status, _ in commit(other, [writer_id], [value])] == [RefusedReason.INVALID]
    client.close()
    lab.turn_until(lambda: lab.metrics.connections == 1)
    assert engine.aborted == 1
    assert write(other, writer_id, value, 0, 4096) == bytes([RefusedReason.DEADLINE])
    assert engine.gone == [], "the client has another connection"


def test_writers_end_after_their_time_to_live_and_by_abort(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    client = lab.client()
    opened = client.call(opening(namespace, [1, 2], 8192, ttl_ns=3 * SECOND_NS), WriterOpened)
    first, second = unpack_u32(opened.writer_ids)
    value = os.urandom(8192)
    lab.clock_ns += 2 * SECOND_NS
    assert write(client, first, value, 0, 4096) == bytes([ItemStatus.RECEIVED])
    lab.clock_ns += 2 * SECOND_NS
    lab.turn()
    assert engine.aborted == 1, "only the one that nobody wrote to"
    client.call(WriterAbort(writer_ids=pack_u32([first, second, 77])), End)
    assert engine.aborted == 2
    assert not engine.pending


def test_a_fenced_node_commits_no_writer_that_was_open_before(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    client = lab.client()
    (writer_id,) = unpack_u32(client.call(opening(namespace, [1], 4096), WriterOpened).writer_ids)
    value = os.urandom(4096)
    write(client, writer_id, value, 0, 4096)
    lab.plane.fenced_from_ns = 0
    ((_, status, detail),) = commit(client, [writer_id], [value])
    assert (status, "is fenced" in detail) == (RefusedReason.FENCED, True)
    lab.plane.fenced_from_ns = 1 << 62
    assert [status for _, status, _ in commit(client, [writer_id], [value])] == [ItemStatus.STORED]


def test_bounds_on_writers_of_one_client(lab: PlaneLab, namespace: NamespaceRef) -> None:
    client = lab.client()
    numbers = list(range(WRITERS_PER_CLIENT_MAX + 2))
    opened = client.call(opening(namespace, numbers, 4096), WriterOpened)
    assert opened.statuses.count(ItemStatus.GRANTED) == WRITERS_PER_CLIENT_MAX
    assert list(opened.statuses[-2:]) == [RefusedReason.OVERLOADED] * 2
    assert str(WRITERS_PER_CLIENT_MAX) in opened.details
    unknown = replace(opening(namespace, [1], 4096), namespace=bytes(32))
    assert client.call(unknown, WriterOpened).statuses == bytes([RefusedReason.UNKNOWN_NAMESPACE])


def test_commits_that_do_not_fit(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    client = lab.client()
    value = os.urandom(8192)
    one, two = unpack_u32(client.call(opening(namespace, [1, 2], 8192), WriterOpened).writer_ids)
    with pytest.raises(InvalidRequest, match="crc_tables"):
        commit(client, [one], [value + value])
    write(client, one, value, 0, 8192)
    ended = commit(client, [one, one], [value, value])
    assert [status for _, status, _ in ended] == [ItemStatus.STORED, RefusedReason.INVALID]
    assert [status for _, status, _ in commit(client, [two], [value])] == [RefusedReason.INVALID], "nothing was written"
    assert not engine.pending
    client.session.start(FrameType.WRITER_WRITE)
    nothing = Slice(1, 0, 0, 0, False, NO_CONTENT_ID, 0, 4096, b"")
    client.send_slices([nothing], b"", frame_type=FrameType.WRITER_WRITE)
    with pytest.raises(InvalidRequest, match="without payload"):
        client.expect(End)

"""WRITER_OPEN whose answer does not reach the client: asked again by another way, or cut off."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest

from kvstore.engine.api import NamespaceRef
from kvstore.errors import InvalidRequest
from kvstore.limits import SECOND_NS
from kvstore.server.batch import pack_u32, unpack_u32
from kvstore.testing.dict_engine import DictEngine
from kvstore.testing.plane_lab import LabClient, PlaneLab
from kvstore.types.checksum import crc_table
from kvstore.types.results import ItemStatus, RefusedReason
from kvstore.wire.header import FrameType
from kvstore.wire.messages import End, Ping, Pong, WriterOpen, WriterOpened
from kvstore.wire.slices import NO_CONTENT_ID, Slice

HOUR_NS = 3600 * SECOND_NS
VALUE = os.urandom(8192)


def opening(namespace: NamespaceRef, *, opening_id: bytes = b"") -> WriterOpen:
    return WriterOpen(
        namespace=namespace.digest,
        keys=bytes(31) + b"\1" + bytes(31) + b"\2",
        lengths=pack_u32([len(VALUE)] * 2),
        block_bytes=pack_u32([4096]),
        deadline_ns=HOUR_NS,
        ttl_ns=HOUR_NS,
        opening_id=opening_id,
    )


def write(client: LabClient, writer_id: int) -> int:
    client.session.start(FrameType.WRITER_WRITE)
    table = crc_table(VALUE, 4096)
    one = Slice(writer_id, 0, len(VALUE), 0, False, NO_CONTENT_ID, len(VALUE), 4096, table)
    client.send_slices([one], VALUE, frame_type=FrameType.WRITER_WRITE)
    return client.expect(End).statuses[0]


def has_writers(lab: PlaneLab) -> bool:
    return any(client.writers for client in lab.plane._clients)


def test_who_asks_again_gets_what_the_lost_answer_named(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    """The first answer has left the node; its writers must not be in the way of those of the second try."""
    ask = opening(namespace, opening_id=os.urandom(16))
    silent, other = lab.client(), lab.client()
    lost = unpack_u32(silent.call(ask, WriterOpened).writer_ids)
    again = other.call(ask, WriterOpened)
    assert again.statuses == bytes([ItemStatus.GRANTED]) * 2
    assert engine.aborted == 2
    assert write(other, lost[0]) != ItemStatus.RECEIVED
    assert write(other, unpack_u32(again.writer_ids)[0]) == ItemStatus.RECEIVED
    another = replace(opening(namespace, opening_id=os.urandom(16)), keys=bytes(31) + b"\3" + bytes(31) + b"\4")
    assert other.call(another, WriterOpened).statuses == again.statuses
    assert engine.aborted == 2, "another opening takes nothing away"


def test_an_earlier_try_that_comes_late_ends_nothing(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    """A silent way delivers it while the client, answered by another one, writes already."""
    ask = opening(namespace, opening_id=os.urandom(16))
    other, silent = lab.client(), lab.client()
    one, two = unpack_u32(other.call(ask, WriterOpened).writer_ids)
    assert write(other, one) == ItemStatus.RECEIVED
    silent.start(ask)
    for _ in range(5):
        lab.turn()
    silent.close()
    lab.turn_until(lambda: lab.metrics.connections == 1)
    assert engine.aborted == 0
    assert write(other, two) == ItemStatus.RECEIVED, "not written to yet, but named by the same answer"
    assert write(other, one) == ItemStatus.RECEIVED


def test_who_asks_again_takes_the_place_of_an_opening_that_waits(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    ask = opening(namespace, opening_id=os.urandom(16))
    silent, other = lab.client(), lab.client()
    engine.hold_grants = True
    silent.start(ask)
    for _ in range(5):
        lab.turn()
    other.start(ask)
    assert silent.expect(End), "it has ended"
    engine.let_go()
    assert other.expect(WriterOpened).statuses == bytes([ItemStatus.GRANTED]) * 2


def test_a_repeat_that_is_refused_leaves_the_first_try_to_be_ended(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    ask = opening(namespace, opening_id=os.urandom(16))
    silent, other = lab.client(), lab.client()
    engine.hold_grants = True
    silent.start(ask)
    for _ in range(5):
        lab.turn()
    refused = other.call(replace(ask, namespace=os.urandom(32)), WriterOpened)
    assert refused.statuses == bytes([RefusedReason.UNKNOWN_NAMESPACE]) * 2
    other.start(ask)
    assert silent.expect(End), "it has ended"
    engine.let_go()
    assert other.expect(WriterOpened).statuses == bytes([ItemStatus.GRANTED]) * 2


def test_writers_whose_answer_was_not_read_end_at_once(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    cut, other = lab.client(), lab.client()
    cut.start(opening(namespace))
    lab.turn_until(lambda: has_writers(lab))
    for _ in range(5):
        lab.turn()
    cut.close()
    lab.turn_until(lambda: lab.metrics.connections == 1)
    assert engine.aborted == 2
    assert not has_writers(lab)
    assert other.call(opening(namespace), WriterOpened).statuses == bytes([ItemStatus.GRANTED]) * 2


@pytest.mark.parametrize("how", ["closes", "says more", "writes", "writes one"])
def test_writers_of_which_their_client_knows_stay(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef, how: str
) -> None:
    first, other = lab.client(), lab.client()
    one, two = unpack_u32(first.call(opening(namespace), WriterOpened).writer_ids)
    if how == "writes":
        assert write(other, one) == write(other, two) == ItemStatus.RECEIVED
    if how == "writes one":
        assert write(other, one) == ItemStatus.RECEIVED
    if how == "says more":
        assert first.call(Ping(), Pong)
    if how != "closes":
        first.channel.connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
    first.close()
    lab.turn_until(lambda: lab.metrics.connections == 1)
    assert engine.aborted == 0
    assert write(other, one) == write(other, two) == ItemStatus.RECEIVED


def test_an_opening_id_has_its_length(lab: PlaneLab, namespace: NamespaceRef) -> None:
    with pytest.raises(InvalidRequest, match="opening_id"):
        lab.client().call(opening(namespace, opening_id=bytes(32)), WriterOpened)

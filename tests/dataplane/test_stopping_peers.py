"""Peers that stop in the middle of anything give back what they hold."""

from __future__ import annotations

import os

from kvstore.engine.api import NamespaceRef
from kvstore.limits import LINGER_NS, PEER_STALL_NS, PEER_STALL_WAITED_NS, SECOND_NS, MiB
from kvstore.server.batch import unpack_u32
from kvstore.testing.dict_engine import DictEngine
from kvstore.testing.plane_lab import LabClient, PlaneLab
from kvstore.types.checksum import crc_table
from kvstore.types.results import MissReason
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.messages import End, Grant, Wait, WriterOpened
from kvstore.wire.slices import NO_CONTENT_ID, Slice
from tests.dataplane.written import key_of, opening


def test_a_peer_that_stops_in_the_middle_gives_everything_back(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    value = os.urandom(2 * MiB)
    hour_ns = 3600 * SECOND_NS
    engine.put_now(namespace, key_of(9), os.urandom(32 * MiB))
    torn, offering, inline, writing, reading, waiting = (lab.client(client_id=bytes([at]) * 16) for at in range(6))
    torn.send_raw(b"KV\1")
    offering.start(offering.offer(namespace.digest, [key_of(1)], [value], deadline_ns=hour_ns))
    offering.expect(Grant)
    offer = inline.offer(namespace.digest, [key_of(2)], [value[:9000]], deadline_ns=hour_ns, inline=True)
    inline.send_raw(encode_head(offer.TYPE, inline.session.start(offer.TYPE), offer.encode(), payload_bytes=9000))
    (writer_id,) = unpack_u32(writing.call(opening(namespace, [3], 8192, ttl_ns=hour_ns), WriterOpened).writer_ids)
    writing.session.start(FrameType.WRITER_WRITE)
    one = Slice(writer_id, 0, 8192, 0, False, NO_CONTENT_ID, 8192, 4096, crc_table(value[:8192], 4096))
    writing.send_torn([one], value[:8192], 3000, frame_type=FrameType.WRITER_WRITE)
    reading.start_get(namespace.digest, [key_of(9)], deadline_ns=hour_ns)
    waiting.start(Wait(namespace=namespace.digest, keys=key_of(1), deadline_ns=hour_ns))
    for step_ns in (SECOND_NS, PEER_STALL_NS - 2 * SECOND_NS):
        lab.clock_ns += step_ns
        for _ in range(5):
            lab.turn()
    assert lab.metrics.connections == 6, "they have time"
    offering.send_slices([Slice(0, 0, MiB, 0, False, NO_CONTENT_ID, len(value), 65536, b"")], value[:MiB])
    for step_ns in (2 * SECOND_NS, 2 * SECOND_NS, 2 * LINGER_NS):
        lab.clock_ns += step_ns
        for _ in range(5):
            lab.turn()
    assert lab.metrics.connections == 2, "one goes on, one waits as it may"
    assert engine.held_bytes == 0
    lab.clock_ns += 2 * PEER_STALL_NS
    lab.turn_until(lambda: lab.metrics.connections == 1)
    assert not engine.pending
    assert waiting.expect(End).statuses == bytes([MissReason.ABSENT])


def test_a_peer_that_stops_has_less_time_while_puts_of_others_wait_for_memory(
    lab: PlaneLab, namespace: NamespaceRef
) -> None:
    lab.plane.calls_wait = lambda: True
    first, second = (lab.client(client_id=bytes([at]) * 16) for at in range(2))

    def offers(client: LabClient, number: int) -> None:
        offer = client.offer(namespace.digest, [key_of(number)], [os.urandom(MiB)], deadline_ns=3600 * SECOND_NS)
        client.start(offer)
        client.expect(Grant)

    def rests() -> None:
        for _ in range(4):
            lab.clock_ns += PEER_STALL_WAITED_NS // 2
            lab.turn()

    offers(first, 1)
    rests()
    assert lab.metrics.connections == 2, "what waits can only be its own"
    offers(second, 2)
    rests()
    lab.clock_ns += 2 * LINGER_NS
    lab.turn_until(lambda: lab.metrics.connections == 1)
    for _ in range(5):
        lab.turn()
    assert lab.metrics.connections == 1, "what still waits can only be the other's own"

"""OFFER over real sockets: every item ends once, and one bad item never fails the batch."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from kvstore.engine.api import NamespaceRef
from kvstore.errors import Denied, InvalidRequest, StaleView
from kvstore.limits import (
    DROPS_AHEAD_MAX,
    INLINE_PUT_BYTES_MAX,
    PEER_RATE_BYTES_SECOND_MIN,
    PUT_WINDOW_BYTES,
    SECOND_NS,
    MiB,
)
from kvstore.server.batch import pack_u32, unpack_u32
from kvstore.testing.dict_engine import DictEngine
from kvstore.testing.plane_lab import LabClient, PlaneLab, error_raised
from kvstore.types.checksum import crc_table
from kvstore.types.digest import digest
from kvstore.types.results import ItemStatus, MissReason, Refused, RefusedReason
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.messages import Admin, AdminReply, Cancel, Delete, Drop, End, Feature, Grant
from kvstore.wire.slices import NO_CONTENT_ID, Slice, encode_slices
from tests.dataplane.written import key_of, stored

STORED = (ItemStatus.STORED, "")
EXISTS = (ItemStatus.EXISTS, "")


def test_checksums_may_come_with_the_data(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    values = [os.urandom(size) for size in (0, 1, 65537, MiB, 3 * MiB + 5)]
    keys = [key_of(number) for number in range(len(values))]
    client = lab.client(features=Feature.DATA_CRCS)
    client.start(client.offer(namespace.digest, keys, values, crc_tables=b""))
    assert client.end_put(values, with_crcs=True) == dict.fromkeys(range(len(values)), STORED)
    assert [stored(engine, namespace, number) for number in range(len(values))] == values


def test_wrong_or_missing_checksums_of_the_data_refuse_the_item_alone(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    values = [os.urandom(MiB), os.urandom(70_000), os.urandom(70_000)]
    client = lab.client(features=Feature.DATA_CRCS)
    client.start(client.offer(namespace.digest, [key_of(number) for number in range(3)], values, crc_tables=b""))
    assert len(unpack_u32(client.expect(Grant).items)) == 3
    whole = Slice(0, 0, MiB, 0, True, NO_CONTENT_ID, MiB, 65536, crc_table(values[0], 65536))
    client.send_slices([whole._replace(crcs=bytes(4) + whole.crcs[4:])], values[0])
    plain = Slice(1, 0, 70_000, 0, True, NO_CONTENT_ID, 70_000, 65536, b"")
    client.send_slices([plain], values[1])
    client.send_slices([plain._replace(item=2, crcs=crc_table(values[2], 65536))], values[2])
    ended = client.end_put(values)
    assert [ended[item][0] for item in range(3)] == [RefusedReason.INVALID, RefusedReason.INVALID, ItemStatus.STORED]
    assert stored(engine, namespace, 0) is stored(engine, namespace, 1) is None


def test_only_those_who_agreed_leave_checksums_out_of_an_offer(lab: PlaneLab, namespace: NamespaceRef) -> None:
    value = os.urandom(5000)
    with pytest.raises(InvalidRequest, match="crc_tables"):
        lab.client().put(namespace.digest, [key_of(1)], [value], crc_tables=b"")
    with pytest.raises(InvalidRequest, match="crc_tables"):
        lab.client(features=Feature.DATA_CRCS).put(namespace.digest, [key_of(1)], [value], crc_tables=b"", inline=True)


def test_a_slow_sender_is_seen_to_send(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    value = os.urandom(MiB)
    client = lab.client()
    client.start(client.offer(namespace.digest, [key_of(1)], [value], deadline_ns=600 * SECOND_NS))
    client.expect(Grant)
    one = Slice(0, 0, MiB, 0, True, NO_CONTENT_ID, MiB, 65536, b"")
    rest = client.send_torn([one], value, 200)
    step = PEER_RATE_BYTES_SECOND_MIN  # less than the node lets the kernel gather
    for _ in range(12):
        client.send_raw(rest[:step])
        rest = rest[step:]
        lab.clock_ns += SECOND_NS * 9 // 10
        lab.turn()
        lab.turn()
    client.send_raw(rest)
    assert client.end_put([value]) == {0: STORED}


def test_records_of_every_size_are_stored(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    values = [os.urandom(size) for size in (0, 1, 4096, 65537, MiB, MiB + 1, 3 * MiB)]
    keys = [key_of(number) for number in range(len(values))]
    client = lab.client()
    assert client.put(namespace.digest, keys, values) == dict.fromkeys(range(len(values)), STORED)
    assert [stored(engine, namespace, number) for number in range(len(values))] == values
    assert client.get(namespace.digest, keys)[1] == dict(enumerate(values))
    assert lab.metrics.received_bytes[0] == sum(map(len, values))


def test_small_batches_bring_their_bytes_along(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    values = [b"one", b"", b"three"]
    keys = [key_of(number) for number in range(3)]
    client = lab.client()
    assert client.put(namespace.digest, keys, values, inline=True) == dict.fromkeys(range(3), STORED)
    assert [stored(engine, namespace, number) for number in range(3)] == values
    assert client.put(namespace.digest, [key_of(9)], [b""], inline=True) == {0: STORED}
    assert client.put(namespace.digest, [], [], inline=True) == {}
    assert client.put(namespace.digest, [], []) == {}
    with pytest.raises(InvalidRequest, match=str(INLINE_PUT_BYTES_MAX)):
        client.put(namespace.digest, [key_of(10)], [bytes(INLINE_PUT_BYTES_MAX + 1)], inline=True)
    assert client.is_closed, "payload that is not read cannot be skipped"


def test_a_batch_with_duplicates_existing_and_bad_items(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    a, b, c, d = (key_of(number) for number in range(4))
    engine.put_now(namespace, b, b"there already")
    values = [b"a" * 9, b"b" * 9, b"a" * 9, b"c" * 9, b"d" * 9]
    tables = [crc_table(value, 65536) for value in values]
    tables[3] = b"oops"
    client = lab.client()
    for inline in (False, True):
        ended = client.put(namespace.digest, [a, b, a, c, d], values, inline=inline, crc_tables=b"".join(tables))
        assert {item: status for item, (status, _) in ended.items()} == {
            0: EXISTS[0] if inline else STORED[0],
            1: EXISTS[0],
            2: EXISTS[0],
            3: RefusedReason.INVALID,
            4: EXISTS[0] if inline else STORED[0],
        }
        assert "checksum" in ended[3][1]
    assert stored(engine, namespace, 3) == b"d" * 9
    assert stored(engine, namespace, 2) is None
    assert not engine.pending


def test_what_is_wrong_with_one_item_is_said_of_it(lab: PlaneLab, namespace: NamespaceRef) -> None:
    client = lab.client()
    value = b"v" * 10
    offer = replace(
        client.offer(namespace.digest, [key_of(number) for number in range(4)], [value] * 4),
        lengths=pack_u32([10, 65 * MiB, 10, 10]),
        block_bytes=pack_u32([65536, 65536, 100, 65536]),
        crc_tables=crc_table(value, 65536) + bytes(4 * 1040) + bytes(4) + crc_table(value, 65536),
        parts=bytes([0, 0, 0, 200]),
    )
    client.start(offer)
    ended = client.end_put([value] * 4)
    assert ended[0] == STORED
    for item, word in ((1, "67108864"), (2, "checksum blocks of 100"), (3, "part 200")):
        assert ended[item][0] == RefusedReason.INVALID
        assert word in ended[item][1]


def test_contradictory_offers_fail_the_call_only(lab: PlaneLab, namespace: NamespaceRef) -> None:
    client = lab.client()
    with pytest.raises(InvalidRequest, match="crc_tables"):
        client.put(namespace.digest, [key_of(1)], [b"x"], crc_tables=bytes(8))
    with pytest.raises(InvalidRequest, match="sum to"):
        client.put(namespace.digest, [key_of(1)], [b"x"], inline=True, lengths=pack_u32([2]))
    assert client.put(namespace.digest, [key_of(1)], [b"x"]) == {0: STORED}


def test_unknown_namespace_draining_and_stale_views_are_refused(lab: PlaneLab, namespace: NamespaceRef) -> None:
    client = lab.client()
    ended = client.put(digest(b"other"), [key_of(1)], [b"x"])
    assert ended[0][0] == RefusedReason.UNKNOWN_NAMESPACE
    client.register(b"other")
    assert client.put(digest(b"other"), [key_of(1)], [b"x"]) == {0: STORED}
    lab.plane.set_view(7, b"view")
    with pytest.raises(StaleView, match="7"):
        client.put(namespace.digest, [key_of(1)], [b"x"], epoch=6)
    assert client.put(namespace.digest, [key_of(1)], [b"x"], epoch=7) == {0: STORED}
    for message in (Delete(namespace=namespace.digest, keys=key_of(1)), Drop(namespace=namespace.digest)):
        with pytest.raises(StaleView, match=f"{message.TYPE.name} was planned by view 6, the node has 7"):
            client.call(message, End, epoch=6)
    lab.plane.is_draining = True
    ended = client.put(namespace.digest, [key_of(2), key_of(3)], [b"x", b"y"], inline=True)
    assert [status for status, _ in ended.values()] == [RefusedReason.DRAINING] * 2
    assert client.get(namespace.digest, [key_of(1)])[1] == {0: b"x"}


def test_a_drop_begins_a_generation_once(lab: PlaneLab, namespace: NamespaceRef) -> None:
    client = lab.client()
    client.put(namespace.digest, [key_of(1)], [b"x"])
    now = client.call(Drop(namespace=namespace.digest), End).value
    assert now == namespace.generation + 1
    assert client.get(namespace.digest, [key_of(1)])[1] == {}
    assert client.call(Drop(namespace=namespace.digest, generation=now + 3), End).value == now + 3
    client.put(namespace.digest, [key_of(1)], [b"y"])
    for older in (now, now + 3):
        assert client.call(Drop(namespace=namespace.digest, generation=older), End).value == now + 3
    assert client.get(namespace.digest, [key_of(1)])[1] == {0: b"y"}
    now += 100_000  # what one that has just joined may have missed: a drop a minute for 69 days
    assert client.call(Drop(namespace=namespace.digest, generation=now + 3), End).value == now + 3
    far = now + 4 + DROPS_AHEAD_MAX
    with pytest.raises(InvalidRequest, match=f"begins generation {far}"):
        client.call(Drop(namespace=namespace.digest, generation=far), End)


def test_an_engine_that_refuses_is_quoted(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    engine.refuse = Refused(RefusedReason.NO_SPACE, "drive is full:\nadd one")
    ended = lab.client().put(namespace.digest, [key_of(1)], [b"x"])
    assert ended == {0: (RefusedReason.NO_SPACE, "drive is full: add one")}


def test_received_ends_before_durable(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    engine.hold_commits = True
    client = lab.client()
    assert client.put(namespace.digest, [key_of(1)], [b"x"], wait=0) == {0: (ItemStatus.RECEIVED, "")}
    assert client.get(namespace.digest, [key_of(1)])[0] == bytes([MissReason.PENDING])
    assert client.get(namespace.digest, [key_of(1)], accept_pending=True)[1] == {0: b"x"}
    waiting = lab.client()
    client.start(client.offer(namespace.digest, [key_of(2)], [b"y"]))
    for _ in range(5):
        lab.turn()
    engine.let_go()
    assert client.end_put([b"y"]) == {0: STORED}
    assert waiting.get(namespace.digest, [key_of(1)])[1] == {0: b"x"}


def test_grants_come_as_memory_does_within_the_window(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    engine.hold_grants = True
    value = bytes(4 * MiB)
    count = 3 * PUT_WINDOW_BYTES // len(value)
    client = lab.client()
    client.start(client.offer(namespace.digest, [key_of(number) for number in range(count)], [value] * count))
    for _ in range(5):
        lab.turn()
    assert len(engine._grants) == PUT_WINDOW_BYTES // len(value), "the rest of the batch waits its turn"
    engine.let_go()
    assert client.end_put([value] * count) == dict.fromkeys(range(count), STORED)


def test_a_batch_of_many_tiny_items(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    count = 5000
    keys = [key_of(number) for number in range(count)]
    ended = lab.client().put(namespace.digest, keys, [b"v"] * count, inline=True)
    assert ended == dict.fromkeys(range(count), STORED)
    assert len(engine.records) == count


def start_put(client: LabClient, namespace: NamespaceRef, value: bytes) -> None:
    client.start(client.offer(namespace.digest, [key_of(1)], [value]))
    assert unpack_u32(client.expect(Grant).items) == (0,)


def test_a_client_that_dies_in_the_middle_leaves_nothing(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    value = os.urandom(3 * MiB)
    for sent_bytes in (0, 100, MiB // 2, MiB + 20):
        client, second = lab.client(), lab.client(client_id=b"D" * 16)
        start_put(client, namespace, value)
        one = Slice(0, 0, MiB, 0, False, NO_CONTENT_ID, len(value), 65536, b"")
        client.send_torn([one], value[:MiB], sent_bytes)
        second.start(second.offer(namespace.digest, [key_of(1)], [value]))
        lab.turn()
        client.close()
        assert second.end_put([value]) == {0: STORED}, "the waiting put takes over"
        assert stored(engine, namespace, 1) == value
        assert not engine.pending
        del engine.records[(namespace.id, 0, key_of(1))]
        second.close()
        lab.turn_until(lambda: not lab.metrics.connections)
    assert engine.aborted == 4


def test_cancel_in_the_middle_of_a_put(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    value = os.urandom(2 * MiB)
    client = lab.client()
    engine.hold_commits = True
    client.start(client.offer(namespace.digest, [key_of(1), key_of(2)], [value, b"small"]))
    items = list(unpack_u32(client.expect(Grant).items))
    assert items == [0, 1]
    client.send_item(1, b"small")
    one = Slice(0, 0, MiB, 0, False, NO_CONTENT_ID, len(value), 65536, b"")
    client.send_slices([one], value[:MiB])
    request_id = client.session.request_id
    client.session.send(FrameType.CANCEL)
    client.send(Cancel(), request_id)
    client.send_slices([one._replace(offset=MiB)], value[MiB:])  # crosses with the end of the call
    ended = client.end_put([])
    assert ended[0][0] == RefusedReason.DEADLINE
    assert ended[1][0] == RefusedReason.OUTCOME_UNKNOWN
    assert engine.aborted == 1
    engine.let_go()
    assert client.put(namespace.digest, [key_of(1)], [value]) == {0: STORED}
    assert stored(engine, namespace, 2) == b"small"


def test_a_put_whose_data_never_comes_ends_at_its_deadline(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    value = os.urandom(2 * MiB)
    client = lab.client()
    start_put(client, namespace, value)
    one = Slice(0, 0, MiB, 0, False, NO_CONTENT_ID, len(value), 65536, b"")
    rest = client.send_torn([one], value[:MiB], MiB // 2)
    lab.clock_ns += 10 * SECOND_NS
    ended = client.end_put([])
    assert ended[0][0] == RefusedReason.DEADLINE
    assert "deadline" in ended[0][1]
    assert engine.aborted == 1
    # the rest of that frame is thrown away, and the connection goes on
    client.send_raw(rest)
    assert client.put(namespace.digest, [key_of(1)], [b"x"]) == {0: STORED}


def test_data_that_crosses_with_the_deadline_is_thrown_away(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    value = os.urandom(2 * MiB)
    client = lab.client()
    start_put(client, namespace, value)
    one = Slice(0, 0, MiB, 0, False, NO_CONTENT_ID, len(value), 65536, b"")
    client.send_slices([one], value[:MiB])
    lab.turn()
    lab.clock_ns += 10 * SECOND_NS
    (connection,) = lab.plane._connections
    assert connection.call is not None
    lab.plane.woke()
    connection.call.overdue()  # its END has not gone out yet
    client.send_slices([one._replace(offset=MiB)], value[MiB:])
    assert client.end_put([])[0][0] == RefusedReason.DEADLINE
    assert client.put(namespace.digest, [key_of(1)], [value]) == {0: STORED}
    assert stored(engine, namespace, 1) == value


@pytest.mark.parametrize(
    ("change", "says"),
    [({"item": 5}, "not granted"), ({"offset": 65536}, "send in order"), ({"record_bytes": 3 * MiB}, "were offered")],
)
def test_data_that_was_not_granted_closes_the_connection(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef, change: dict[str, int], says: str
) -> None:
    value = os.urandom(2 * MiB)
    client = lab.client()
    start_put(client, namespace, value)
    one = Slice(0, 0, MiB, 0, False, NO_CONTENT_ID, len(value), 65536, b"")
    client.send_slices([one._replace(**change)], value[:MiB])
    assert says in str(error_raised(client.receive))
    assert client.is_closed
    assert engine.aborted == 1


def test_data_without_an_offer_closes_the_connection_but_late_data_does_not(
    lab: PlaneLab, namespace: NamespaceRef
) -> None:
    client = lab.client()
    one = Slice(0, 0, 5, 0, True, NO_CONTENT_ID, 5, 65536, b"")
    client.send_slices([one], b"hello")  # between calls: a straggler, thrown away
    assert client.put(namespace.digest, [key_of(1)], [b"x"]) == {0: STORED}
    client.start_get(namespace.digest, [key_of(1)])
    client.send_slices([one], b"hello")
    client.end_get()


def test_what_is_wrong_behind_a_good_frame_is_said_though_nothing_more_comes(
    lab: PlaneLab, namespace: NamespaceRef
) -> None:
    client = lab.client()
    value = b"x" * 1000
    start_put(client, namespace, value)
    one = Slice(0, 0, len(value), 0, True, NO_CONTENT_ID, len(value), 65536, b"")
    request_id = client.session.request_id
    head = encode_head(FrameType.DATA, request_id, encode_slices([one]), payload_bytes=len(value), flags=1)
    client.send_raw((head + value) * 2)  # arrives at once: the first is taken, the second is one too many
    assert "send in order" in str(error_raised(client.receive))
    assert client.is_closed

    client = lab.client()
    old_id, request_id = client.session.request_id, client.session.start(FrameType.OFFER)
    late = encode_head(FrameType.CANCEL, old_id, Cancel().encode())  # of a call that has ended meanwhile
    offer = client.offer(namespace.digest, [key_of(2)], [value], inline=True)
    body, payload_bytes = offer.encode(), INLINE_PUT_BYTES_MAX + 1
    client.send_raw(late + encode_head(FrameType.OFFER, request_id, body, payload_bytes=payload_bytes))
    assert f"the limit is {INLINE_PUT_BYTES_MAX}" in str(error_raised(client.receive)), "its payload is never sent"
    assert client.is_closed


def test_admin_is_not_for_clients(lab: PlaneLab) -> None:
    client = lab.client()
    with pytest.raises(Denied, match="supervisor"):
        client.call(Admin(verb="echo", arguments=b"\x80"), AdminReply)

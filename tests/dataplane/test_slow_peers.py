"""Peers that send or read a byte now and then, those that are slow and honest, and who holds what of the memory."""

from __future__ import annotations

import os

import pytest

from kvstore.engine.api import NamespaceRef
from kvstore.errors import DeadlineExceeded, Overloaded
from kvstore.limits import (
    BODY_FIRST_BYTES,
    FRAME_BODY_BYTES_MAX,
    INLINE_PUT_BYTES_MAX,
    LINGER_NS,
    PEER_RATE_BYTES_SECOND_MIN,
    PEER_STALL_NS,
    PEER_STALL_WAITED_NS,
    REQUEST_ARRIVES_NS,
    REQUEST_ARRIVES_WAITED_NS,
    REQUESTS_BYTES_MAX,
    REQUESTS_BYTES_PER_CLIENT_MAX,
    REQUESTS_BYTES_SMALL,
    SECOND_NS,
    SWEEP_NS,
    KiB,
    MiB,
)
from kvstore.server.headway import Headway
from kvstore.testing.dict_engine import DictEngine
from kvstore.testing.plane_lab import LabClient, PlaneLab
from kvstore.types.results import ItemStatus
from kvstore.wire.body import MemoryBudget
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.messages import Get, Grant, Ping, Pong
from kvstore.wire.slices import NO_CONTENT_ID, Slice

HOUR_NS = 3600 * SECOND_NS
RATE = PEER_RATE_BYTES_SECOND_MIN


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def begin_body(client: LabClient, sent_bytes: int) -> None:
    """A GET of the longest body, of which only so much comes."""
    head = encode_head(FrameType.GET, client.session.request_id + 1, b"")
    client.send_raw(head[:8] + FRAME_BODY_BYTES_MAX.to_bytes(4, "little") + head[12:] + bytes(sent_bytes))


def pass_time(lab: PlaneLab, step_ns: int) -> None:
    lab.clock_ns += step_ns
    for _ in range(5):
        lab.turn()


# --- headway: pure -------------------------------------------------------------------------------------------------
def test_who_moves_less_than_the_least_rate_stands_still() -> None:
    peer = Headway()
    least = PEER_RATE_BYTES_SECOND_MIN * PEER_STALL_WAITED_NS // SECOND_NS
    seen = [
        peer.is_stalled(moved, call_id=1, now_ns=now, stall_ns=PEER_STALL_WAITED_NS, least=RATE)
        for moved, now in ((0, 0), (1, SECOND_NS), (2, PEER_STALL_WAITED_NS), (least - 1, 2 * PEER_STALL_WAITED_NS - 1))
    ]
    assert seen == [False] * 4
    late_ns = 2 * PEER_STALL_WAITED_NS
    assert peer.is_stalled(least - 1, call_id=1, now_ns=late_ns, stall_ns=PEER_STALL_WAITED_NS, least=RATE)
    assert not peer.is_stalled(least, call_id=1, now_ns=late_ns, stall_ns=PEER_STALL_WAITED_NS, least=RATE)
    assert not peer.is_stalled(least + 1, call_id=1, now_ns=2 * late_ns - 1, stall_ns=PEER_STALL_WAITED_NS, least=RATE)
    assert peer.is_stalled(least + 2, call_id=1, now_ns=2 * late_ns, stall_ns=PEER_STALL_WAITED_NS, least=RATE)


def test_who_has_just_moved_does_not_stand_still() -> None:
    peer = Headway()
    seen = [
        peer.is_stalled(moved, call_id=1, now_ns=now, stall_ns=PEER_STALL_NS, least=RATE)
        for moved, now in (
            (0, 0),
            (500_000, PEER_STALL_NS - SECOND_NS),
            (500_000, PEER_STALL_NS),
            (500_000, 2 * PEER_STALL_NS - SECOND_NS - 1),
            (500_000, 2 * PEER_STALL_NS - SECOND_NS),
        )
    ]
    assert seen == [False, False, False, False, True]


@pytest.mark.parametrize("begins_anew", [(None, 1), (5, 1), (20, 2)], ids=["nothing expected", "part done", "new call"])
def test_what_ends_in_time_is_no_standing_still(begins_anew: tuple[int | None, int]) -> None:
    peer = Headway()
    moved, call_id = begins_anew
    assert not peer.is_stalled(10, call_id=1, now_ns=0, stall_ns=PEER_STALL_NS, least=RATE)
    assert not peer.is_stalled(moved, call_id=call_id, now_ns=PEER_STALL_NS, stall_ns=PEER_STALL_NS, least=RATE)
    assert not peer.is_stalled(moved, call_id=call_id, now_ns=2 * PEER_STALL_NS - 1, stall_ns=PEER_STALL_NS, least=RATE)
    assert peer.is_stalled(moved, call_id=call_id, now_ns=2 * PEER_STALL_NS, stall_ns=PEER_STALL_NS, least=RATE) is (
        moved is not None
    )


def test_the_time_of_a_request_is_its_own() -> None:
    peer, one, two = Headway(), object(), object()
    assert not peer.is_late(one, now_ns=0, arrives_ns=10)
    assert not peer.is_late(two, now_ns=9, arrives_ns=10)
    assert not peer.is_late(two, now_ns=18, arrives_ns=10)
    assert peer.is_late(two, now_ns=19, arrives_ns=10)
    assert not peer.is_late(None, now_ns=30, arrives_ns=10)


# --- budget: pure --------------------------------------------------------------------------------------------------
def test_a_client_has_its_share_and_small_requests_theirs() -> None:
    whole = MemoryBudget(100, small_bytes=20)
    one, two, three = (MemoryBudget(50, whose="one client", whole=whole) for _ in range(3))
    one.take(50, is_large=True)
    with pytest.raises(Overloaded, match="over the 50 bytes that the requests of one client"):
        one.take(1)
    assert (whole.used_bytes, whole.refused_count) == (50, 0), "its own affair"
    two.take(30, is_large=True)
    with pytest.raises(Overloaded, match="over the 80 bytes that the requests of all connections"):
        three.take(1, is_large=True)
    three.take(20)
    assert (three.used_bytes, whole.used_bytes, whole.refused_count) == (20, 100, 1)
    for share in (one, two, three):
        share.give_back(share.used_bytes)
    assert not whole.used_bytes


# --- a byte now and then -------------------------------------------------------------------------------------------
def test_a_byte_now_and_then_is_no_progress(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    engine.put_now(namespace, key_of(9), os.urandom(32 * MiB))
    sending, reading = lab.client(client_id=b"s" * 16), lab.client(client_id=b"r" * 16)
    sending.start(sending.offer(namespace.digest, [key_of(1)], [bytes(MiB)], deadline_ns=HOUR_NS))
    sending.expect(Grant)
    sending.send_torn([Slice(0, 0, MiB, 0, True, NO_CONTENT_ID, MiB, 65536, b"")], bytes(MiB), 200)
    reading.start_get(namespace.digest, [key_of(9)], deadline_ns=HOUR_NS)
    pass_time(lab, SWEEP_NS)
    for _ in range(20):
        assert lab.metrics.connections, "it has time"
        sending.channel.connected.send(b"\0")
        reading.channel.connected.recv(1)  # nothing goes out for it: to us it stands still
        pass_time(lab, PEER_STALL_NS // 10)
    pass_time(lab, SWEEP_NS)
    with pytest.raises(DeadlineExceeded, match="neither read nor sent on 32768 bytes a second for 30 s"):
        sending.receive()
    pass_time(lab, 2 * LINGER_NS)
    lab.turn_until(lambda: not lab.metrics.connections)
    assert engine.held_bytes == 0


def test_a_request_is_whole_in_its_time(lab: PlaneLab, namespace: NamespaceRef) -> None:
    memory = lab.plane.requests_memory
    body, inline = lab.client(client_id=b"b" * 16), lab.client(client_id=b"i" * 16)
    begin_body(body, 100)
    offer = inline.offer(namespace.digest, [key_of(2)], [bytes(90_000)], inline=True, deadline_ns=HOUR_NS)
    inline.send_raw(encode_head(offer.TYPE, inline.session.start(offer.TYPE), offer.encode(), payload_bytes=90_000))
    step_bytes = PEER_RATE_BYTES_SECOND_MIN + KiB
    pass_time(lab, SWEEP_NS)
    for _ in range(REQUEST_ARRIVES_NS // SECOND_NS - 1):
        body.send_raw(bytes(step_bytes))
        inline.send_raw(bytes(100))
        pass_time(lab, SECOND_NS)
    assert lab.metrics.connections == 2
    assert memory.used_bytes > step_bytes
    pass_time(lab, SECOND_NS + SWEEP_NS)
    for client in (body, inline):
        with pytest.raises(DeadlineExceeded, match=r"was not whole 30 s after|neither read nor sent"):
            client.receive()
    pass_time(lab, 2 * LINGER_NS)
    lab.turn_until(lambda: not memory.used_bytes)


def test_honest_slow_clients_are_not_cut(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    """One gets a hundredth of a link of 1 Gbit/s, and stands still for a second each time, while others wait."""
    lab.plane.calls_wait = lambda: True
    step_bytes = 125_000 * 2
    value = os.urandom(2 * MiB)
    slow, other = lab.client(client_id=b"s" * 16), lab.client(client_id=b"o" * 16)
    other.start(other.offer(namespace.digest, [key_of(2)], [bytes(MiB)], deadline_ns=HOUR_NS))
    slow.start(slow.offer(namespace.digest, [key_of(1)], [value], block_bytes=MiB, deadline_ns=HOUR_NS))
    slow.expect(Grant)
    for at in (0, MiB):
        one = Slice(0, at, MiB, 0, at == MiB, NO_CONTENT_ID, 2 * MiB, MiB, b"")
        rest = slow.send_torn([one], value[at : at + MiB], 100)
        while rest:
            slow.send_raw(rest[:step_bytes])
            rest = rest[step_bytes:]
            pass_time(lab, 2 * SECOND_NS)
    assert slow.end_put([value])[0][0] == ItemStatus.STORED


def test_who_is_just_fast_enough_does_not_keep_memory_from_others(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    """More than the least rate, and for ever with all of a window: others waited for their whole deadlines."""
    waits = False
    lab.plane.calls_wait = lambda: waits
    slow, other = lab.client(client_id=b"s" * 16), lab.client(client_id=b"o" * 16)
    values = [os.urandom(MiB) for _ in range(24)]
    slow.start(slow.offer(namespace.digest, [key_of(n) for n in range(24)], values, deadline_ns=HOUR_NS))
    slow.expect(Grant)
    engine.hold_grants = True
    other.start(other.offer(namespace.digest, [key_of(99)], [bytes(MiB)], deadline_ns=HOUR_NS))
    rest = slow.send_torn([Slice(0, 0, MiB, 0, True, NO_CONTENT_ID, MiB, 65536, b"")], values[0], 200)

    def go_on(seconds: int) -> None:
        nonlocal rest
        for _ in range(seconds):
            slow.send_raw(rest[: 2 * RATE])
            rest = rest[2 * RATE :]
            pass_time(lab, SECOND_NS)

    pass_time(lab, SWEEP_NS)
    go_on(10)
    assert not lab.metrics.deadlines, "nobody waited"
    waits = True
    pass_time(lab, SWEEP_NS)
    assert lab.metrics.deadlines == 1
    engine.hold_grants = False
    pass_time(lab, 2 * LINGER_NS)
    lab.turn_until(lambda: lab.metrics.connections == 1)


def test_what_is_held_for_a_reader_is_known(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    reading, ended = lab.client(), lab.client()
    for number in range(32):
        engine.put_now(namespace, key_of(number), os.urandom(MiB))
    reading.start_get(namespace.digest, [key_of(number) for number in range(32)], deadline_ns=HOUR_NS)
    pass_time(lab, SWEEP_NS)
    held = [one.call.held_bytes for one in lab.plane._connections if one.call is not None]
    assert held == [pytest.approx(engine.held_bytes, abs=4 * MiB)]
    assert held[0] > 8 * MiB, "more than sockets take"
    assert [one.uses_memory for one in lab.plane._connections].count(True) == 1
    ended.close()


# --- memory that requests take --------------------------------------------------------------------------------------
def test_bodies_not_quite_sent_leave_small_requests_their_memory(lab: PlaneLab, namespace: NamespaceRef) -> None:
    """As many clients as it takes; with all the memory that their bodies got, puts of others ended as unknown."""
    memory = lab.plane.requests_memory
    memory.limit_bytes = 8 * MiB + 4 * INLINE_PUT_BYTES_MAX
    memory.small_bytes = 4 * INLINE_PUT_BYTES_MAX
    holders = [lab.client(client_id=key_of(at)[-16:]) for at in range(4)]
    for holder in holders:
        begin_body(holder, FRAME_BODY_BYTES_MAX - 100)
    assert memory.refused_count, "two bodies take all that large ones may"
    assert memory.used_bytes >= 2 * FRAME_BODY_BYTES_MAX
    values = [os.urandom(INLINE_PUT_BYTES_MAX - 1000)]
    for number in range(4):
        client = lab.client(client_id=key_of(100 + number)[-16:])
        assert client.put(namespace.digest, [key_of(number)], values, inline=True)[0][0] == ItemStatus.STORED


def test_who_holds_what_others_need_has_less_time(lab: PlaneLab) -> None:
    memory = lab.plane.requests_memory
    memory.limit_bytes, memory.small_bytes = 3 * BODY_FIRST_BYTES, 0
    holders = [lab.client(client_id=key_of(at)[-16:]) for at in range(3)]
    for holder in holders:
        begin_body(holder, 100)
    pass_time(lab, SWEEP_NS)
    pass_time(lab, REQUEST_ARRIVES_WAITED_NS)
    assert lab.metrics.connections == 3, "nobody needs it"
    late = lab.client(client_id=b"l" * 16)
    begin_body(late, 100)
    with pytest.raises(Overloaded):
        late.receive()
    pass_time(lab, SWEEP_NS)
    pass_time(lab, 2 * LINGER_NS)
    lab.turn_until(lambda: not memory.used_bytes)


def test_one_client_holds_no_more_than_its_share(lab: PlaneLab) -> None:
    count = REQUESTS_BYTES_PER_CLIENT_MAX // FRAME_BODY_BYTES_MAX
    holders = [lab.client() for _ in range(count)]
    for holder in holders:
        begin_body(holder, FRAME_BODY_BYTES_MAX - 100)
    assert lab.plane.requests_memory.used_bytes == REQUESTS_BYTES_PER_CLIENT_MAX
    over = lab.client()
    begin_body(over, 100)
    with pytest.raises(Overloaded, match="requests of one client"):
        over.receive()
    other = lab.client(client_id=b"o" * 16)
    begin_body(other, FRAME_BODY_BYTES_MAX - 100)
    assert lab.plane.requests_memory.used_bytes == REQUESTS_BYTES_PER_CLIENT_MAX + FRAME_BODY_BYTES_MAX
    for holder in (*holders, other):
        holder.close()
    lab.turn_until(lambda: not lab.plane.requests_memory.used_bytes)


def test_an_inline_put_without_memory_is_refused_and_the_connection_lives(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    memory = lab.plane.requests_memory
    memory.limit_bytes = 50_000
    client = lab.client()
    with pytest.raises(Overloaded, match="try again later"):
        client.put(namespace.digest, [key_of(1)], [os.urandom(60_000)], inline=True)
    assert not client.is_closed
    assert client.call(Ping(), Pong)
    ask = Get(namespace=namespace.digest, keys=key_of(1), deadline_ns=SECOND_NS)
    assert client.get(namespace.digest, [key_of(1)])[0] != b"\0", f"{ask} must miss"
    memory.limit_bytes = REQUESTS_BYTES_MAX - REQUESTS_BYTES_SMALL
    assert client.put(namespace.digest, [key_of(1)], [bytes(60_000)], inline=True)[0][0] == ItemStatus.STORED
    assert not memory.used_bytes

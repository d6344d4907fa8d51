"""Connections: greeting, small verbs, hostile bytes, bounds, time limits. Whatever a peer does costs that peer only."""

from __future__ import annotations

import errno
import os
import resource
import socket
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.engine.api import NamespaceRef
from kvstore.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    Denied,
    FormatUnsupported,
    InvalidRequest,
    KVStoreError,
    Overloaded,
    Unavailable,
    UnknownNamespace,
)
from kvstore.limits import (
    BODY_FIRST_BYTES,
    FRAME_BODY_BYTES_MAX,
    HELLO_BODY_BYTES_MAX,
    HELLO_WAIT_NS,
    IDLE_WAIT_NS,
    LINGER_NS,
    SECOND_NS,
)
from kvstore.server import dataplane
from kvstore.testing.dict_engine import DictEngine
from kvstore.testing.plane_lab import LabClient, PlaneLab, error_raised
from kvstore.types.digest import digest
from kvstore.types.results import MissReason
from kvstore.wire.codec import pack_plain, unpack_plain
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.messages import (
    Admin,
    AdminReply,
    Cancel,
    Delete,
    Drop,
    End,
    Feature,
    Get,
    Hello,
    Manifest,
    Match,
    MatchReply,
    Ping,
    Pong,
    Prefetch,
    Unpin,
    ViewReply,
    ViewRequest,
    Wait,
)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def raw_client(lab: PlaneLab) -> LabClient:
    return LabClient(lab, lab.socket())


# --- greeting -------------------------------------------------------------------------------------------------------
def test_welcome_says_who_the_node_is_and_what_it_takes(lab: PlaneLab) -> None:
    lab.plane.set_view(5, b"view")
    welcome = raw_client(lab).hello(features=0xFF)
    assert (welcome.version, welcome.node_id, welcome.boot_id, welcome.epoch) == (1, "lab", b"B" * 16, 5)
    assert welcome.body_bytes_max == FRAME_BODY_BYTES_MAX
    known = Feature.FINAL_DATA | Feature.DATA_CRCS | Feature.PULL | Feature.READER_CHECKS
    assert welcome.features == known, "unknown features are not used"
    assert raw_client(lab).hello(features=0).features == 0, "nor those that the client does not name"


def test_versions_that_do_not_meet_are_told_both_ranges(lab: PlaneLab) -> None:
    client = raw_client(lab)
    with pytest.raises(FormatUnsupported, match="2 to 9, this node 1"):
        client.hello(version_min=2, version_max=9)
    assert client.is_closed
    assert raw_client(lab).hello(version_min=0, version_max=9).version == 1


def test_another_header_version_or_protocol_gets_a_clear_error(lab: PlaneLab) -> None:
    for first_bytes, says in (
        (b"KV\x09\x01" + bytes(28), "version 9"),
        (b"GET / HTTP/1.1\r\nHost: node\r\n\r\n ..", "b'GE'"),
    ):
        client = raw_client(lab)
        client.send_raw(first_bytes)
        with pytest.raises(FormatUnsupported, match=says):
            client.receive()
        with pytest.raises(Unavailable):
            client.receive()
    assert lab.metrics.protocol_errors == 2


def test_nothing_is_legal_before_hello(lab: PlaneLab, namespace: NamespaceRef) -> None:
    for message in (Ping(), Match(namespace=namespace.digest, keys=b""), Cancel()):
        client = raw_client(lab)
        client.send(message, 1)
        assert message.TYPE.name in str(error_raised(client.receive))
        assert client.is_closed
    twice = lab.client()
    fields = {"version_min": 1, "version_max": 1, "features": 0, "token": b"", "flow": 0}
    twice.send(Hello(client_id=bytes(16), boot_id=bytes(16), **fields), 0)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="HELLO"):
        twice.receive()


class Guard:
    """An admission that knows one token."""

    def admit(self, hello: Hello) -> None:
        if hello.token != b"open sesame":
            raise Denied("token is not that of any tenant")


def test_the_admission_looks_at_the_token(engine: DictEngine) -> None:
    lab = PlaneLab(engine, admission=Guard())
    with pytest.raises(Denied, match="tenant"):
        raw_client(lab).hello(token=b"please")
    assert raw_client(lab).hello(token=b"open sesame")
    lab.close()


def test_before_hello_a_peer_can_make_the_node_hold_little(lab: PlaneLab) -> None:
    client = raw_client(lab)
    client.send_raw(encode_head(FrameType.HELLO, 0, bytes(HELLO_BODY_BYTES_MAX + 1)))
    with pytest.raises(InvalidRequest, match=str(HELLO_BODY_BYTES_MAX)):
        client.receive()


# --- the small verbs ------------------------------------------------------------------------------------------------
def test_match_pins_and_counts_lookups(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    client = lab.client()
    keys = b"".join(map(key_of, range(4)))
    for number in (0, 1, 3):
        engine.put_now(namespace, key_of(number), b"12345")
    reply = client.call(Match(namespace=namespace.digest, keys=keys, pin_ttl_ns=SECOND_NS), MatchReply)
    assert reply.statuses == bytes([0, 0, MissReason.ABSENT, 0])
    assert reply.pinned
    assert reply.hit_bytes == 15
    client.call(Unpin(pin_id=reply.pin_id), End)
    assert engine.unpinned == [reply.pin_id]
    client.call(Match(namespace=namespace.digest, keys=keys, touch=False, count=False), MatchReply)
    unknown = client.call(Match(namespace=bytes(32), keys=keys), MatchReply)
    assert unknown.statuses == bytes([MissReason.ABSENT] * 4)
    assert (lab.metrics.lookups, lab.metrics.lookup_keys, lab.metrics.lookup_hits) == (2, 8, 3)
    assert lab.metrics.match_ns.total_ns > 0


def test_namespaces_are_registered_and_dropped(lab: PlaneLab, engine: DictEngine) -> None:
    client = lab.client()
    name = digest(b"mine")
    with pytest.raises(UnknownNamespace, match=name.hex()):
        client.call(Drop(namespace=name), End)
    client.register(b"mine")
    client.register(b"mine")
    client.put(name, [key_of(1)], [b"x"])
    client.call(Drop(namespace=name), End)
    assert client.get(name, [key_of(1)])[0] == bytes([MissReason.ABSENT])
    with pytest.raises(InvalidRequest, match="empty"):
        client.call(Manifest(manifest=b""), End)
    assert not client.is_closed


def test_delete_prefetch_wait_view_ping(lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef) -> None:
    client = lab.client()
    engine.put_now(namespace, key_of(1), b"x")
    keys = key_of(1) + key_of(2)
    assert client.call(Prefetch(namespace=namespace.digest, keys=keys), End).value == 1
    assert client.call(Prefetch(namespace=bytes(32), keys=keys), End).value == 0
    absent = bytes([MissReason.ABSENT])
    assert client.call(Wait(namespace=namespace.digest, keys=keys, deadline_ns=0), End).statuses == b"\0" + absent
    assert client.call(Delete(namespace=namespace.digest, keys=keys), End).statuses == b"\0" + absent
    assert client.call(Delete(namespace=bytes(32), keys=keys), End).statuses == absent * 2
    assert client.call(Wait(namespace=bytes(32), keys=keys, deadline_ns=0), End).statuses == absent * 2
    client.call(Ping(), Pong)
    lab.plane.set_view(3, b"the view")
    assert client.call(ViewRequest(known_epoch=0), ViewReply) == ViewReply(epoch=3, view=b"the view")
    assert client.call(ViewRequest(known_epoch=3), ViewReply) == ViewReply(epoch=3, view=b"")
    client.start(Ping())
    assert client.receive().epoch == 3, "every frame carries the epoch"


def test_wait_ends_when_the_put_does_or_at_the_deadline_or_by_cancel(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    engine.hold_commits = True
    writer, waiter = lab.client(), lab.client()
    writer.put(namespace.digest, [key_of(1)], [b"x"], wait=0)
    wait = Wait(namespace=namespace.digest, keys=key_of(1), deadline_ns=SECOND_NS // 50)
    pending = bytes([MissReason.PENDING])
    assert waiter.call(wait, End).statuses == pending
    request_id = waiter.start(replace(wait, deadline_ns=60 * SECOND_NS))
    lab.turn()
    waiter.session.send(FrameType.CANCEL)
    waiter.send(Cancel(), request_id)
    assert waiter.expect(End).statuses == bytes([MissReason.DEADLINE])
    leaver = lab.client()
    leaver.start(replace(wait, deadline_ns=60 * SECOND_NS))
    lab.turn_until(lambda: bool(engine._waits))
    leaver.close()
    lab.turn_until(lambda: lab.metrics.connections == 2)
    writer.call(Unpin(pin_id=1), End)
    lab.turn()
    assert not engine._waits, "nobody waits any more"
    waiter.start(replace(wait, deadline_ns=60 * SECOND_NS))
    lab.turn()
    engine.let_go()
    assert waiter.expect(End).statuses == b"\0"


# --- hostile bytes --------------------------------------------------------------------------------------------------
def test_a_damaged_header_closes_the_connection(lab: PlaneLab, namespace: NamespaceRef) -> None:
    client = lab.client()
    frame = bytearray(encode_head(FrameType.GET, 1, Get(namespace=namespace.digest, keys=b"", deadline_ns=1).encode()))
    frame[40] ^= 1
    client.send_raw(bytes(frame))
    with pytest.raises(ChecksumMismatch):
        client.receive()
    assert client.is_closed


def test_sizes_above_the_limits_are_refused_at_the_header(lab: PlaneLab) -> None:
    client = lab.client()
    head = encode_head(FrameType.GET, 1, b"")
    huge = head[:8] + (FRAME_BODY_BYTES_MAX + 1).to_bytes(4, "little") + head[12:]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    client.send_raw(huge)
    with pytest.raises(InvalidRequest, match=str(FRAME_BODY_BYTES_MAX)):
        client.receive()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096


def test_what_requests_take_has_one_bound_for_all_connections(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    memory = lab.plane.requests_memory
    memory.limit_bytes = 3 * BODY_FIRST_BYTES
    head = encode_head(FrameType.GET, 1, b"")
    holders = [lab.client() for _ in range(3)]
    for holder in holders:
        holder.send_raw(head[:8] + FRAME_BODY_BYTES_MAX.to_bytes(4, "little") + head[12:])
    lab.turn_until(lambda: memory.used_bytes == 3 * BODY_FIRST_BYTES)
    keys = b"".join(key_of(number) for number in range(1000))
    ask = Match(namespace=namespace.digest, keys=keys)
    over = lab.client()
    with pytest.raises(Overloaded, match=f"over the {3 * BODY_FIRST_BYTES} bytes"):
        over.call(ask, MatchReply)
    assert over.is_closed
    assert lab.client().call(Ping(), Pong), "small requests pass"
    assert lab.metrics.protocol_errors == 0
    holders[0].close()
    lab.turn_until(lambda: memory.used_bytes == 2 * BODY_FIRST_BYTES)
    asker = lab.client()
    assert len(asker.call(ask, MatchReply).statuses) == 1000
    engine.hold_commits = True
    writer = lab.client()
    writer.put(namespace.digest, [key_of(1)], [b"x"], wait=0)
    asker.start(Wait(namespace=namespace.digest, keys=key_of(1) + keys, deadline_ns=60 * SECOND_NS))
    lab.turn_until(lambda: bool(engine._waits))
    assert memory.used_bytes > 2 * BODY_FIRST_BYTES + len(keys), "a call in progress holds its keys"
    asker.close()
    lab.turn_until(lambda: memory.used_bytes == 2 * BODY_FIRST_BYTES)
    for holder in holders[1:]:
        holder.close()
    lab.turn_until(lambda: not memory.used_bytes)


def test_answers_and_stray_frames_from_a_client_are_refused(lab: PlaneLab) -> None:
    for frame_type in (FrameType.WELCOME, FrameType.END, FrameType.GRANT, FrameType.ERROR):
        client = lab.client()
        client.send_raw(encode_head(frame_type, 1, b"\x90"))
        with pytest.raises(InvalidRequest, match=frame_type.name):
            client.receive()
        assert client.is_closed


def test_last_words_arrive_although_the_peer_keeps_sending(lab: PlaneLab) -> None:
    client = lab.client()
    client.channel.writer.push(b"nonsense" * 100_000)
    client.channel.on_writable()
    with pytest.raises(FormatUnsupported):
        client.receive()
    client.close()
    lab.turn_until(lambda: not lab.metrics.connections)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_bytes_harm_anybody_else(data: st.DataObject) -> None:
    engine = DictEngine()
    lab = PlaneLab(engine)
    namespace = engine.add_namespace(b"manifest")
    engine.put_now(namespace, key_of(1), b"value")
    healthy, hostile = lab.client(), lab.client(client_id=b"H" * 16)
    offer = hostile.offer(namespace.digest, [key_of(2)], [b"x" * 5000])
    frames = [
        encode_head(FrameType.GET, 1, Get(namespace=namespace.digest, keys=key_of(1), deadline_ns=10**9).encode()),
        encode_head(FrameType.OFFER, 2, offer.encode()),
        encode_head(FrameType.MATCH, 3, Match(namespace=namespace.digest, keys=key_of(1)).encode()),
        encode_head(FrameType.DATA, 2, data.draw(st.binary(max_size=60)), payload_bytes=20, flags=1) + bytes(20),
        data.draw(st.binary(max_size=100)),
    ]
    stream = bytearray(b"".join(data.draw(st.lists(st.sampled_from(frames), min_size=1, max_size=5))))
    for _ in range(data.draw(st.integers(0, 3))):
        if stream:
            stream[data.draw(st.integers(0, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    hostile.channel.writer.push(bytes(stream))
    try:
        hostile.channel.on_writable()
        for _ in range(5):
            lab.turn()
        assert healthy.get(namespace.digest, [key_of(1)]) == (b"\0", {0: b"value"})
        hostile.close()
        lab.turn_until(lambda: lab.metrics.connections == 1)
        assert not engine.pending or engine.hold_commits
    except KVStoreError as error:
        raise AssertionError(f"the healthy client was hurt: {error}") from error
    assert engine.held_bytes == 0
    lab.close()
    engine.close()


# --- bounds and time ------------------------------------------------------------------------------------------------
def test_connections_over_the_limit_are_told(lab: PlaneLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataplane, "CONNECTIONS_MAX", 2)
    first, second = lab.client(), lab.client()
    with pytest.raises(Overloaded, match="limit is 2"):
        raw_client(lab).receive()
    first.call(Ping(), Pong)
    second.close()
    lab.turn_until(lambda: lab.metrics.connections < 3)
    lab.clock_ns += 2 * LINGER_NS
    lab.turn_until(lambda: lab.metrics.connections == 1)
    assert lab.client().call(Ping(), Pong)
    assert lab.metrics.rejected == 1


def test_running_out_of_descriptors_does_not_end_the_node(lab: PlaneLab, monkeypatch: pytest.MonkeyPatch) -> None:
    client = lab.client()
    listening = lab.plane._listeners[0]
    tries = 0

    class Exhausted:
        fileno = staticmethod(listening.fileno)

        def accept(self) -> tuple[socket.socket, object]:
            nonlocal tries
            tries += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    lab.loop._handlers[listening.fileno()] = lambda _: lab.plane._accept(Exhausted())  # type: ignore[arg-type]
    waiting = lab.socket()
    for _ in range(20):
        client.call(Ping(), Pong)
    assert tries == 1, "it does not spin on the one that waits"
    lab.loop._handlers[listening.fileno()] = lambda _: lab.plane._accept(listening)
    lab.clock_ns += SECOND_NS
    lab.turn_until(lambda: lab.metrics.connections == 2)
    waiting.close()


def test_a_flood_of_bad_frames_is_one_line_in_the_log(lab: PlaneLab, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        client = raw_client(lab)
        client.send_raw(b"x" * 64)
        with pytest.raises(FormatUnsupported):
            client.receive()
    assert len([line for line in caplog.messages if "does not speak this protocol" in line]) == 1
    assert lab.metrics.protocol_errors == 5


def test_who_does_not_greet_in_time_is_closed(lab: PlaneLab) -> None:
    client = raw_client(lab)
    lab.turn_until(lambda: lab.metrics.connections == 1)
    lab.clock_ns += HELLO_WAIT_NS + SECOND_NS
    with pytest.raises(DeadlineExceeded, match="HELLO"):
        client.receive()
    lab.clock_ns += 2 * LINGER_NS
    lab.turn_until(lambda: not lab.metrics.connections)


def test_idle_connections_are_closed_busy_ones_are_not(
    lab: PlaneLab, engine: DictEngine, namespace: NamespaceRef
) -> None:
    idle, busy, waiting = lab.client(), lab.client(), lab.client()
    engine.hold_commits = True
    waiting.put(namespace.digest, [key_of(1)], [b"x"], wait=0)
    waiting.start(Wait(namespace=namespace.digest, keys=key_of(1), deadline_ns=3000 * SECOND_NS))
    lab.clock_ns += IDLE_WAIT_NS // 2
    busy.call(Ping(), Pong)
    lab.clock_ns += IDLE_WAIT_NS // 2 + SECOND_NS
    lab.turn_until(lambda: lab.metrics.connections == 2)
    with pytest.raises(Unavailable):
        idle.receive()
    busy.call(Ping(), Pong)
    engine.let_go()
    waiting.expect(End)


def test_a_client_is_gone_with_its_last_connection(lab: PlaneLab, engine: DictEngine) -> None:
    first, second, other = lab.client(), lab.client(), lab.client(client_id=b"O" * 16)
    first.close()
    lab.turn_until(lambda: lab.metrics.connections == 2)
    assert engine.gone == []
    second.close()
    lab.turn_until(lambda: lab.metrics.connections == 1)
    assert engine.gone == [b"C" * 16]
    other.call(Ping(), Pong)


def test_a_stopping_node_refuses_requests_and_connections(lab: PlaneLab, namespace: NamespaceRef) -> None:
    client = lab.client()
    lab.plane.stop()
    with pytest.raises(Unavailable, match="shutting down"):
        client.get(namespace.digest, [key_of(1)])
    with pytest.raises(ConnectionRefusedError):
        lab.socket()
    assert lab.plane.calls_active == 0


# --- administration -------------------------------------------------------------------------------------------------
def test_the_supervisor_speaks_admin_on_its_own_socket(lab: PlaneLab, namespace: NamespaceRef) -> None:
    ours, theirs = socket.socketpair()
    lab.plane.add_admin(theirs)
    supervisor = LabClient(lab, ours)
    supervisor.hello(client_id=b"S" * 16)
    lab.clock_ns += 2 * IDLE_WAIT_NS
    lab.turn()
    arguments: dict[str, object] = {"a": [1, None, "x", b"y", 2.5]}
    reply = supervisor.call(Admin(verb="echo", arguments=pack_plain(arguments)), AdminReply)  # type: ignore[arg-type]
    assert unpack_plain(reply.value, what="reply") == arguments
    with pytest.raises(InvalidRequest, match="unknown"):
        supervisor.call(Admin(verb="fly", arguments=pack_plain({})), AdminReply)
    with pytest.raises(InvalidRequest, match="arguments of echo"):
        supervisor.call(Admin(verb="echo", arguments=b"\xc1"), AdminReply)
    with pytest.raises(UnknownNamespace):
        supervisor.call(Match(namespace=bytes(32), keys=b""), MatchReply)
    assert not lab.verbs.is_alone
    supervisor.close()
    lab.turn_until(lambda: lab.verbs.is_alone)

"""Nodes that break off, stall, lie or garble: a miss is legal, a wrong byte or an exception never."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time

import pytest

from kvstore.errors import Closed, Denied, InvalidRequest, Overloaded, StaleView, Unavailable
from kvstore.limits import SECOND_NS
from kvstore.types.checksum import crc_table
from kvstore.types.results import MissReason, RefusedReason
from kvstore.wire import messages as m
from kvstore.wire.codec import pack_plain
from kvstore.wire.failures import code_of
from kvstore.wire.header import FrameType, encode_head
from kvstore.wire.slices import Slice
from kvstore_client import Exists, Hit, KVClient, Miss, Refused, Stored
from kvstore_client.options import ClientOptions

TOKENS = list(range(16 * 8))
SIZE = 100_000
BLOCK = 65_536


@pytest.fixture
def client(node):
    with KVClient.connect(node.address, deadline=20) as made:
        yield made


@pytest.fixture
def stored(client, opaque):
    """A namespace with eight chunks of SIZE bytes, their keys and payloads."""
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS)
    payloads = [random.Random(at).randbytes(SIZE) for at in range(8)]
    assert all(isinstance(one, Stored) for one in ns.put(keys, payloads))
    return ns, keys, payloads


def memories() -> list[bytearray]:
    return [bytearray(b"\xaa" * SIZE) for _ in range(8)]


def check(results, memory, payloads) -> None:
    """Every hit is right."""
    for result, got, payload in zip(results, memory, payloads, strict=True):
        if isinstance(result, Hit):
            assert bytes(got) == payload


def prefix(results) -> int:
    return next((at for at, one in enumerate(results) if not isinstance(one, Hit)), len(results))


def flip_item(item: int, times: list[int]):
    def garble(slices, payloads) -> None:
        if slices[0].item == item and payloads and times[0] > 0:
            times[0] -= 1
            payloads[0] = payloads[0][:-1] + bytes([payloads[0][-1] ^ 1])

    return garble


def test_one_garbled_block_is_asked_for_again_and_is_right(client, node, stored) -> None:
    ns, keys, payloads = stored
    node.garble = flip_item(5, [1])
    opened = len(node.hellos)
    memory = memories()
    results = ns.get_into(keys, memory)
    assert prefix(results) == 8
    check(results, memory, payloads)
    assert node.count(FrameType.GET) == 2
    assert len(node.hellos) == opened + 2, "the second try takes a fresh connection"
    assert client.stats()["corrupt_blocks"] == 1
    assert client.stats()["corrupt_recovered"] == 1


def test_a_block_that_stays_garbled_is_a_counted_miss(client, node, stored) -> None:
    ns, keys, payloads = stored
    node.garble = lambda slices, payloads: flip_item(0, [1])(slices, payloads) if len(payloads[0]) == 34_464 else None
    memory = memories()
    results = ns.get_into(keys[:1], memory[:1])
    assert isinstance(results[0], Hit), "the last slice is garbled only when slices are that small"
    node.slice_bytes = BLOCK
    results = ns.get_into(keys[:1], memory[:1])
    assert results == [Miss(MissReason.CORRUPT)]
    assert client.stats()["corrupt_blocks"] == 2
    assert client.stats()["load_misses.corrupt"] == 1
    node.garble = None
    assert isinstance(ns.get_into(keys[:1], memory[:1])[0], Hit)
    check([Hit(length_bytes=SIZE)], memory[:1], payloads[:1])


def answer_item_5_with(status: int):
    def script(link, frame) -> bool:
        if frame.type is not FrameType.GET:
            return False
        node, get = link.node, m.Get.decode(frame.body)
        statuses = bytearray(len(get.keys) // 32)
        for item in range(len(statuses)):
            record = node.records[get.namespace, get.keys[item * 32 : item * 32 + 32]]
            if item == 5:
                statuses[item] = status
                link.send_data(frame, [Slice(item, 0, 0, status, True, bytes(16), 0, 0, b"")], [])
            else:
                link._send_record(frame, item, record, [(0, SIZE)])
        link.send(frame, m.End(statuses=bytes(statuses)))
        return True

    return script


@pytest.mark.parametrize("reason", list(MissReason))
def test_a_failed_chunk_has_its_reason_and_the_prefix_ends_before_it(node, stored, reason) -> None:
    ns, keys, payloads = stored
    node.script = answer_item_5_with(reason)
    memory = memories()
    results = ns.get_into(keys, memory)
    assert prefix(results) == 5
    assert results[5] == Miss(reason)
    assert [isinstance(one, Hit) for one in results[6:]] == [True, True]
    check(results, memory, payloads)


def break_after(bytes_sent: int, *, times: int, then=lambda link: link.kill()):
    """Sends the first bytes of the right answer to GET, then does something else."""
    left = [times]

    def script(link, frame) -> bool:
        if frame.type is not FrameType.GET or left[0] == 0:
            return False
        left[0] -= 1
        out = Limited(link.socket, bytes_sent)
        real, link.socket = link.socket, out
        link.answer(frame)
        link.socket = real
        then(link)
        return True

    return script


class Limited:
    """A socket that sends its first bytes only."""

    def __init__(self, real: socket.socket, left: int) -> None:
        self._real = real
        self._left = left

    def sendall(self, data: bytes) -> None:
        self._real.sendall(data[: self._left])
        self._left -= min(self._left, len(data))

    def __getattr__(self, name: str):
        return getattr(self._real, name)


@pytest.mark.parametrize("sent", [0, 1, 31, 32, 33, 100, 200, 70_000, SIZE + 40, SIZE + 150, 5 * SIZE + 1000])
@pytest.mark.parametrize("closing", ["kill", "close"])
def test_an_answer_that_breaks_off_is_asked_for_again(node, stored, sent, closing) -> None:
    ns, keys, payloads = stored
    then = (lambda link: link.kill()) if closing == "kill" else (lambda link: link.socket.shutdown(socket.SHUT_RDWR))
    node.script = break_after(sent, times=1, then=then)
    memory = memories()
    results = ns.get_into(keys, memory)
    assert prefix(results) == 8
    check(results, memory, payloads)


def test_answers_that_always_break_off_are_misses_and_the_prefix_counts(client, node, stored) -> None:
    ns, keys, payloads = stored
    node.script = break_after(3 * SIZE + 1000, times=10**6, then=lambda link: link.socket.shutdown(socket.SHUT_RDWR))
    memory = memories()
    began = time.monotonic()
    results = ns.get_into(keys, memory)
    check(results, memory, payloads)
    assert prefix(results) >= 3, "what came whole before the break is kept"
    assert time.monotonic() - began < 10
    assert client.stats()["connections_broken"] >= 1


def stall(link) -> None:
    """Waits until the client goes away."""
    link.socket.settimeout(30)
    try:
        while link.socket.recv(1 << 16):
            pass
    except OSError:
        pass
    raise ConnectionError


@pytest.mark.parametrize("sent", [0, 50, 70_000, 3 * SIZE + 1000])
@pytest.mark.parametrize("kind", ["deadline", "soft_deadline"])
def test_a_stalled_answer_ends_at_the_deadline_with_the_prefix(node, stored, sent, kind) -> None:
    ns, keys, payloads = stored
    node.script = break_after(sent, times=1, then=stall)
    memory = memories()
    began = time.monotonic()
    results = ns.get_into(keys, memory, **{kind: 0.3})
    elapsed = time.monotonic() - began
    assert 0.25 < elapsed < 5
    assert prefix(results) == (3 if sent > 3 * SIZE else 0)
    assert results[-1] == Miss(MissReason.DEADLINE)
    check(results, memory, payloads)
    assert prefix(ns.get_into(keys, memory)) == 8, "the next call gets a fresh connection"


def test_late_bytes_never_land_in_a_buffer_that_was_given_back(node, stored) -> None:
    ns, keys, _ = stored
    released = threading.Event()
    finished = threading.Event()

    def send_rest(link) -> None:
        released.wait(30)
        try:
            link.socket.sendall(b"\x55" * SIZE)
        except OSError:
            pass
        finished.set()
        raise ConnectionError

    node.script = break_after(SIZE // 2, times=1, then=send_rest)
    memory = memories()
    assert prefix(ns.get_into(keys, memory, deadline=0.2)) == 0
    before = [bytes(one) for one in memory]
    released.set()
    assert finished.wait(30)
    assert prefix(ns.get_into(keys, memories())) == 8
    assert [bytes(one) for one in memory] == before


def test_a_trickle_is_cut_at_the_deadline(node, stored) -> None:
    ns, keys, _ = stored

    def trickle(link) -> None:
        try:
            while True:
                link.socket.sendall(b"\0")
                time.sleep(0.01)
        except OSError:
            raise ConnectionError from None

    node.script = break_after(200, times=1, then=trickle)
    began = time.monotonic()
    assert prefix(ns.get_into(keys, memories(), deadline=0.3)) == 0
    assert time.monotonic() - began < 3


def test_a_deadline_that_has_passed_sends_nothing(node, stored) -> None:
    ns, keys, _ = stored
    before = node.count(FrameType.GET)
    assert ns.get_into(keys, memories(), deadline=0) == [Miss(MissReason.DEADLINE)] * 8
    results = ns.put(keys, [b"x"] * 8, deadline=0)
    assert {one.reason for one in results} == {RefusedReason.DEADLINE}
    assert ns.match(keys, deadline=-1).chunks == 0
    assert ns.contains(keys, deadline=0) == [False] * 8
    assert node.count(FrameType.GET) == before


def lie(kind: str):
    """An answer to GET that is well formed and wrong."""

    def script(link, frame) -> bool:
        if frame.type is not FrameType.GET:
            return False
        get = m.Get.decode(frame.body)
        count = len(get.keys) // 32
        record = link.node.records[get.namespace, get.keys[:32]]
        payload, total, ident = record.payload, SIZE, record.content_id

        def send(
            item: int, low: int, high: int, *, last: bool, content_id: bytes = ident, crcs: bytes | None = None
        ) -> None:
            data = payload[low:high]
            table = crc_table(data, BLOCK) if crcs is None else crcs
            one = Slice(item, low, high - low, 0, last, content_id, total, BLOCK, table)
            link.send_data(frame, [one], [data])

        ends = True
        if kind == "other record length":
            total, payload = SIZE + 5000, payload + bytes(5000)
            send(0, 0, total, last=True)
        elif kind == "two copies":
            send(0, 0, BLOCK, last=False)
            send(0, BLOCK, SIZE, last=True, content_id=bytes(range(16)))
        elif kind == "hole":
            send(0, BLOCK, SIZE, last=True)
        elif kind == "the same slice twice":
            send(0, 0, BLOCK, last=False)
            send(0, 0, BLOCK, last=True)
        elif kind == "a slice after the last":
            slices = [
                Slice(0, 0, SIZE, 0, True, ident, SIZE, BLOCK, crc_table(payload, BLOCK)),
                Slice(0, 0, BLOCK, 0, False, ident, SIZE, BLOCK, crc_table(bytes(BLOCK), BLOCK)),
            ]
            link.send_data(frame, slices, [payload, bytes(BLOCK)])
        elif kind == "no checksums":
            send(0, 0, SIZE, last=True, crcs=b"")
        elif kind == "item out of range":
            send(count, 0, SIZE, last=True)
        elif kind == "end without data":
            pass
        elif kind == "end of too few":
            link.send(frame, m.End(statuses=b""))
            return True
        elif kind == "slice inside a block":
            send(0, 0, 100, last=False)
        elif kind == "wrong frame":
            link.send(frame, m.MatchReply(statuses=b"", pin_id=0, pinned=False, hit_bytes=0, load_ns=0))
            return True
        elif kind == "garbage":
            link.socket.sendall(random.Random(1).randbytes(5000))
            ends = False
        elif kind == "http":
            link.socket.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
            ends = False
        elif kind == "bad header checksum":
            head = bytearray(encode_head(FrameType.END, frame.request_id, m.End(statuses=bytes(count)).encode()))
            head[-1] ^= 1
            link.socket.sendall(head)
            ends = False
        elif kind == "huge body":
            link.socket.sendall(struct.pack("<2sBBIIIQII", b"KV", 1, 13, frame.request_id, 1 << 31, 0, 0, 0, 0))
            ends = False
        elif kind == "unknown status":
            link.send(frame, m.End(statuses=bytes([200]) * count))
            return True
        if ends:
            link.send(frame, m.End(statuses=bytes(count)))
        return True

    return script


LIES = {
    "two copies": MissReason.CORRUPT,
    "hole": MissReason.UNAVAILABLE,
    "the same slice twice": MissReason.UNAVAILABLE,
    "a slice after the last": MissReason.UNAVAILABLE,
    "no checksums": MissReason.UNAVAILABLE,
    "item out of range": MissReason.UNAVAILABLE,
    "end without data": MissReason.UNAVAILABLE,
    "end of too few": MissReason.UNAVAILABLE,
    "slice inside a block": MissReason.UNAVAILABLE,
    "wrong frame": MissReason.UNAVAILABLE,
    "garbage": MissReason.UNAVAILABLE,
    "http": MissReason.UNAVAILABLE,
    "bad header checksum": MissReason.UNAVAILABLE,
    "huge body": MissReason.UNAVAILABLE,
    "unknown status": MissReason.UNAVAILABLE,
}


@pytest.mark.parametrize("kind", LIES)
def test_a_lying_node_gives_misses_never_hits(node, stored, kind) -> None:
    ns, keys, payloads = stored
    node.script = lie(kind)
    memory = memories()
    assert ns.get_into(keys[:1], memory[:1], deadline=5) == [Miss(LIES[kind])]
    node.script = None
    node.restart(forget_manifests=False)
    results = eventually_hits(ns, keys, memory)
    check(results, memory, payloads)


def eventually_hits(ns, keys, memory):
    """The breaker may be open for a moment after so many broken answers."""
    until = time.monotonic() + 20
    while True:
        results = ns.get_into(keys, memory)
        if prefix(results) == len(results) or time.monotonic() > until:
            assert prefix(results) == len(results)
            return results
        time.sleep(0.02)


def test_another_record_length_is_a_layout_miss(client, node) -> None:
    from kvstore.types.layout import KVLayout
    from kvstore.types.namespace import Namespace
    from kvstore.types.part import Part

    layout = KVLayout(chunk_tokens=16, dtype="x", layers=1, parts=(Part(name="kv", entry_bytes=SIZE // 16),))
    ns = client.namespace(Namespace(tenant="t", model="m", weights="w", layout=layout))
    keys = ns.keys(TOKENS[:16])
    assert layout.chunk_bytes == SIZE
    assert isinstance(ns.put(keys, [bytes(SIZE)])[0], Stored)
    node.script = lie("other record length")
    assert ns.get_into(keys, [bytearray(SIZE)]) == [Miss(MissReason.LAYOUT)]
    assert ns.get_into(keys, [bytearray(10)], ranges=[(0, 10)]) == [Miss(MissReason.LAYOUT)]


def refuse_with(
    error, *, verbs=(FrameType.GET, FrameType.OFFER, FrameType.MATCH, FrameType.DELETE, FrameType.DROP), times=10**6
):
    left = [times]

    def script(link, frame) -> bool:
        if frame.type not in verbs or left[0] == 0:
            return False
        left[0] -= 1
        link.send(frame, m.ErrorReply(code=code_of(error), text=str(error), closing=False))
        return True

    return script


def test_an_overloaded_node_is_asked_again_within_the_budget(client, node, stored) -> None:
    ns, keys, _ = stored
    node.script = refuse_with(Overloaded("busy"), times=1)
    assert prefix(ns.get_into(keys, memories())) == 8
    assert client.stats()["retries"] == 1
    node.script = refuse_with(Overloaded("busy"))
    assert set(ns.get_into(keys, memories())) == {Miss(MissReason.OVERLOADED)}
    assert {one.reason for one in ns.put(keys, [b"other"] * 8)} == {RefusedReason.OVERLOADED}
    with ns.match(keys) as found:
        assert found.reason is MissReason.OVERLOADED
        assert found.chunks == 0


def test_the_retry_budget_runs_out(client, node, stored) -> None:
    ns, keys, _ = stored
    node.script = refuse_with(Overloaded("busy"))
    for _ in range(12):
        ns.get_into(keys[:1], memories()[:1])
    stats = client.stats()
    assert stats["retries"] <= 20
    assert stats["retries_denied"] > 0


def test_what_the_caller_did_wrong_is_raised(node, stored) -> None:
    ns, keys, _ = stored
    node.script = refuse_with(InvalidRequest("no such thing"))
    with pytest.raises(InvalidRequest, match="no such thing"):
        ns.get_into(keys, memories())
    with pytest.raises(InvalidRequest, match="no such thing"):
        ns.match(keys)
    node.script = refuse_with(Denied("not yours"))
    with pytest.raises(Denied):
        ns.drop()
    assert {one.reason for one in ns.put(keys, [b"x"] * 8)} == {RefusedReason.DENIED}


def test_a_name_with_several_addresses_is_tried_one_by_one(node, monkeypatch) -> None:
    real = socket.getaddrinfo

    def both(host, port, **kinds):
        found = real("127.0.0.2" if host == "two.example" else host, port, **kinds)  # where nobody listens
        return found + real("127.0.0.1", port, **kinds)

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with KVClient.connect(f"two.example:{node.port}", deadline=20) as client:
        assert client.stats()["connections_opened"] >= 1


def test_nobody_there(opaque) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    with pytest.raises(Unavailable, match="cannot be reached"):
        KVClient.connect(address)
    with KVClient.connect(address, lazy=True) as client:
        ns = client.namespace(opaque)
        keys = ns.keys(TOKENS)
        began = time.monotonic()
        for _ in range(20):
            assert ns.get_into(keys, memories()) == [Miss(MissReason.UNAVAILABLE)] * 8
            with ns.match(keys) as found:
                assert (found.chunks, found.reason) == (0, MissReason.UNAVAILABLE)
            assert {type(one) for one in ns.put(keys, [b"x"] * 8)} == {Refused}
            assert ns.contains(keys) == [False] * 8
            assert ns.prefetch(keys) == 0
            assert ns.delete(keys) == [Miss(MissReason.UNAVAILABLE)] * 8
            assert not ns.drop()
            with ns.writer(keys) as writer:
                assert {type(one) for one in writer.statuses} == {Refused}
        assert time.monotonic() - began < 10
        assert client.stats()["breaker_opened"] >= 1


def test_a_node_that_accepts_and_never_greets(opaque) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with KVClient.connect(address, lazy=True) as client:
        began = time.monotonic()
        ns = client.namespace(opaque)
        results = ns.get_into(ns.keys(TOKENS), memories(), deadline=0.3)
        assert {type(one) for one in results} == {Miss}
        assert time.monotonic() - began < 3
    listener.close()


def test_any_of_several_addresses_will_do(node, opaque) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    dead = f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    with KVClient.connect([dead, node.address]) as client:
        ns = client.namespace(opaque)
        assert isinstance(ns.put(ns.keys(TOKENS[:16]), [b"x"])[0], Stored)
    node.data = (dead, node.address)
    with KVClient.connect(node.address) as client:
        ns = client.namespace(opaque)
        assert isinstance(ns.get_into(ns.keys(TOKENS[:16]), [bytearray(1)])[0], Hit), "the second rail serves"


@pytest.mark.parametrize("address", ["", "host", "host:", ":7400", "host:0", "host:70000", "host:x"])
def test_addresses_that_make_no_sense(address) -> None:
    with pytest.raises(InvalidRequest, match="host:port"):
        KVClient.connect(address, lazy=True)


def test_a_put_whose_connection_breaks_is_offered_again(client, node, opaque) -> None:
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS)
    done = []

    def script(link, frame) -> bool:
        if frame.type is FrameType.OFFER and len(done) < 1 and node.manifests:
            done.append(frame)
            link.answer(frame) if len(done) == 2 else None
            link.kill()
            return True
        return False

    node.script = script
    assert all(isinstance(one, Stored) for one in ns.put(keys, [b"x"] * 8))


def test_a_put_that_was_carried_out_before_the_break_exists(client, node, opaque) -> None:
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS)
    ns.put(keys[:1], [b"warm"])
    done = []

    def script(link, frame) -> bool:
        if frame.type is not FrameType.OFFER or done:
            return False
        done.append(frame)
        real, link.socket = link.socket, Limited(link.socket, 0)
        link.answer(frame)
        link.socket = real
        link.kill()
        return True

    node.script = script
    assert set(ns.put(keys[1:], [b"x"] * 7)) == {Exists()}


def test_a_put_that_always_breaks_is_unknown_not_raised(client, node, opaque) -> None:
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS)

    def script(link, frame) -> bool:
        if frame.type is FrameType.OFFER:
            link.kill()
            return True
        return False

    node.script = script
    results = ns.put(keys, [b"x"] * 8)
    assert {one.reason for one in results} == {RefusedReason.OUTCOME_UNKNOWN}
    assert results[0].detail


@pytest.mark.parametrize("error", [Overloaded("busy"), Denied("not any more"), InvalidRequest("no")])
def test_a_refusal_after_a_break_does_not_tell_what_the_break_has_hidden(client, node, opaque, error) -> None:
    ns = client.namespace(opaque)
    keys = ns.keys(TOKENS)
    ns.put(keys[:1], [b"warm"])
    refuse = refuse_with(error)
    broken = []

    def script(link, frame) -> bool:
        if frame.type is FrameType.OFFER and not broken:
            broken.append(frame)
            link.kill()
            return True
        return bool(broken) and refuse(link, frame)

    node.script = script
    assert {one.reason for one in ns.put(keys[1:], [b"x"] * 7)} == {RefusedReason.OUTCOME_UNKNOWN}


def test_a_restarted_node_is_noticed(client, node, stored) -> None:
    """Same port, other boot id, manifests forgotten: gets and puts go on, pins are gone."""
    ns, keys, payloads = stored
    found = ns.match(keys)
    assert found.pinned
    node.restart()
    memory = memories()
    results = ns.get_into(keys, memory)
    assert prefix(results) == 8
    check(results, memory, payloads)
    assert not found.pinned
    found.release()
    assert node.count(FrameType.UNPIN) == 0
    assert client.stats()["restarts_noticed"] == 1
    assert client.stats()["pins_lost"] == 1
    before = node.count(FrameType.MANIFEST)
    assert isinstance(ns.put(ns.keys([5] * 16), [b"new"])[0], Stored)
    assert node.count(FrameType.MANIFEST) == before + 1


def test_a_restart_during_a_put_and_a_get(client, node, stored) -> None:
    ns, keys, payloads = stored
    state = {"get": 1, "put": 1}

    def script(link, frame) -> bool:
        kind = {FrameType.GET: "get", FrameType.OFFER: "put"}.get(frame.type)
        if kind is None or not state[kind]:
            return False
        state[kind] = 0
        node.restart()
        raise ConnectionError

    node.script = script
    memory = memories()
    results = ns.get_into(keys, memory)
    assert prefix(results) == 8
    check(results, memory, payloads)
    assert isinstance(ns.put(ns.keys([5] * 16), [b"new"])[0], Stored)


def test_a_node_that_comes_back_serves_again_within_two_seconds(client, node, stored) -> None:
    ns, keys, _ = stored
    node.stop()
    for _ in range(10):
        assert set(ns.get_into(keys, memories())) == {Miss(MissReason.UNAVAILABLE)}
    assert isinstance(ns.put(keys[:1], [b"x"])[0], Refused)
    node.start()
    began = time.monotonic()
    while not isinstance(ns.put(ns.keys([7] * 16), [b"x"])[0], Stored | Exists):
        assert time.monotonic() - began < 2
        time.sleep(0.01)


def test_a_node_that_moves_is_found_by_the_view(node, opaque) -> None:
    """The data port changes; the address that gives the view stays."""
    other = type(node)(records=node.records, manifests=node.manifests, epoch=2)
    with KVClient.connect(node.address) as client:
        ns = client.namespace(opaque)
        ns.put(ns.keys(TOKENS[:16]), [b"x"])
        other.start()
        try:
            node.epoch = 2
            node.data = (other.address,)
            ns.contains(ns.keys(TOKENS[:16]))
            memory = bytearray(1)
            assert isinstance(ns.get_into(ns.keys(TOKENS[:16]), [memory])[0], Hit)
            assert memory == b"x"
            assert other.count(FrameType.GET) == 1
        finally:
            other.stop()


def test_closing_wakes_a_call_in_progress(node, opaque) -> None:
    client = KVClient.connect(node.address)
    ns = client.namespace(opaque)
    ns.put(ns.keys(TOKENS[:16]), [b"x"])
    waiting = threading.Event()

    def script(link, frame) -> bool:
        if frame.type is FrameType.GET:
            waiting.set()
            stall(link)
        return False

    node.script = script
    raised = []

    def call() -> None:
        try:
            ns.get_into(ns.keys(TOKENS[:16]), [bytearray(1)])
        except Closed as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert waiting.wait(30)
    client.close()
    thread.join(30)
    assert raised


def test_more_threads_than_connections(node, opaque) -> None:
    with KVClient.connect(node.address) as client:
        ns = client.namespace(opaque)
        keys = ns.keys(TOKENS)
        payloads = [random.Random(at).randbytes(5000) for at in range(8)]
        ns.put(keys, payloads)
        wrong = []

        def work(seed: int) -> None:
            dice = random.Random(seed)
            for _ in range(15):
                at = dice.randrange(8)
                memory = bytearray(5000)
                result = ns.get_into(keys[at : at + 1], [memory])[0]
                if not isinstance(result, Hit) or bytes(memory) != payloads[at]:
                    wrong.append(result)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        reading = [hello for hello in node.hellos if hello.flow == 0]
        assert len(reading) <= 3, "one for the view, two to read"


def test_a_call_that_finds_no_free_connection_ends_at_its_deadline(node, opaque) -> None:
    options = ClientOptions(connections_per_target=1)
    with KVClient.connect(node.address, options=options) as client:
        ns = client.namespace(opaque)
        ns.put(ns.keys(TOKENS[:16]), [b"x"])
        waiting, go_on = threading.Event(), threading.Event()

        def script(link, frame) -> bool:
            if frame.type is FrameType.GET:
                waiting.set()
                go_on.wait(30)
            return False

        node.script = script
        first = []
        thread = threading.Thread(target=lambda: first.extend(ns.get_into(ns.keys(TOKENS[:16]), [bytearray(1)])))
        thread.start()
        assert waiting.wait(30)
        assert ns.get_into(ns.keys(TOKENS[:16]), [bytearray(1)], deadline=0.1) == [Miss(MissReason.DEADLINE)]
        go_on.set()
        thread.join(30)
        assert isinstance(first[0], Hit)


@pytest.mark.parametrize("sent", [0, 40, SIZE // 2, SIZE + 200])
def test_after_a_deadline_the_rest_is_drained_and_the_connection_kept(node, stored, monkeypatch, sent) -> None:
    """The node sends the rest of the answer after the caller has its memory back: scratch takes it."""
    monkeypatch.setattr("kvstore_client.connection.DRAIN_NS_MAX", 60 * SECOND_NS)  # a busy machine is no reason
    ns, keys, payloads = stored
    assert prefix(ns.get_into(keys, memories())) == 8  # opens the connection, which needs no share of the deadline
    released = threading.Event()

    def script(link, frame) -> bool:
        if frame.type is not FrameType.GET or released.is_set():
            return False
        whole = bytearray()
        real, link.socket = link.socket, Recorder(whole)
        link.answer(frame)
        link.socket = real
        real.sendall(whole[:sent])
        released.wait(30)
        real.sendall(whole[sent:])
        return True

    node.script = script
    memory = memories()
    opened = len(node.hellos)
    assert prefix(ns.get_into(keys, memory, soft_deadline=0.4)) == (1 if sent > SIZE else 0)
    before = [bytes(one) for one in memory]
    released.set()
    again = memories()
    results = ns.get_into(keys, again)
    assert prefix(results) == 8
    check(results, again, payloads)
    assert [bytes(one) for one in memory] == before
    assert len(node.hellos) == opened, "one connection to read with, and it was kept"
    assert FrameType.CANCEL in node.calls


class Recorder:
    """Stands in for a socket and keeps what is sent."""

    def __init__(self, whole: bytearray) -> None:
        self._whole = whole

    def sendall(self, data: bytes) -> None:
        self._whole += data


def test_a_write_planned_with_an_old_view_is_planned_again(client, node, stored) -> None:
    ns, _, _ = stored
    asked = node.count(FrameType.VIEW)
    seen = []

    def script(link, frame) -> bool:
        if frame.type is not FrameType.OFFER:
            return False
        seen.append(frame.epoch)
        if frame.epoch >= node.epoch:
            return False
        error = StaleView("planned with an old view")
        link.send(frame, m.ErrorReply(code=code_of(error), text=str(error), closing=False))
        return True

    node.script = script
    node.epoch = 7
    assert isinstance(ns.put(ns.keys([5] * 16), [b"new"])[0], Stored)
    assert seen == [1, 7]
    assert node.count(FrameType.VIEW) == asked + 1


def test_a_node_that_comes_back_on_another_port_is_found(opaque, node) -> None:
    """The data port changes while nobody answers for the view either; later both are there again."""
    view_node = type(node)(epoch=3, boot_id=b"v" * 16)
    view_node.start()
    view_node.data = (node.address,)
    with KVClient.connect(view_node.address) as client:
        ns = client.namespace(opaque)
        keys = ns.keys(TOKENS[:16])
        assert isinstance(ns.put(keys, [b"x"])[0], Stored)
        view_node.stop()
        node.stop()
        for _ in range(5):
            assert ns.get_into(keys, [bytearray(1)]) == [Miss(MissReason.UNAVAILABLE)]
        node.port = 0
        node.start()
        view_node.epoch = 4
        view_node.data = (node.address,)
        view_node.start()
        began = time.monotonic()
        while not isinstance(ns.get_into(keys, [bytearray(1)])[0], Hit):
            assert time.monotonic() - began < 5
            time.sleep(0.01)
    view_node.stop()


def test_a_view_without_targets_is_asked_for_again(opaque, node) -> None:
    """A supervisor answers before its worker does."""
    address = node.address
    empty = type(node)(epoch=1)
    empty.start()
    empty.view = lambda: pack_plain({"epoch": empty.epoch, "node_id": "s", "targets": []})
    with KVClient.connect(empty.address) as client:
        ns = client.namespace(opaque)
        keys = ns.keys(TOKENS[:16])
        assert isinstance(ns.put(keys, [b"x"])[0], Refused)
        del empty.view
        empty.epoch, empty.data = 2, (address,)
        began = time.monotonic()
        while not isinstance(ns.put(keys, [b"x"])[0], Stored):
            assert time.monotonic() - began < 5
            time.sleep(0.01)
    empty.stop()


@pytest.mark.parametrize("kind", ["flip", "cut", "insert"])
def test_no_damage_of_the_stream_gives_a_wrong_byte(node, opaque, kind) -> None:
    """One byte of a whole answer is changed, lost or added, anywhere in headers, bodies or payload."""
    with KVClient.connect(node.address) as writer:
        ns = writer.namespace(opaque)
        keys = ns.keys(TOKENS[:64])
        payloads = [random.Random(at).randbytes(9000 * at) for at in range(4)]
        assert all(isinstance(one, Stored) for one in ns.put(keys, payloads))
    dice = random.Random(kind)
    damaged = [0]

    def script(link, frame) -> bool:
        if frame.type is not FrameType.GET or damaged[0] <= 0:
            return False
        damaged[0] -= 1
        whole = bytearray()
        real, link.socket = link.socket, Recorder(whole)
        link.answer(frame)
        link.socket = real
        at = dice.choice([dice.randrange(len(whole)), dice.randrange(200)])
        if kind == "flip":
            whole[at] ^= 1 << dice.randrange(8)
        elif kind == "cut":
            del whole[at]
        else:
            whole.insert(at, dice.randrange(256))
        real.sendall(whole)
        return True

    node.script = script
    for _ in range(60):
        with KVClient.connect(node.address) as client:
            damaged[0] = dice.choice([1, 1, 3])
            memory = [bytearray(9000 * at) for at in range(4)]
            results = client.namespace(opaque).get_into(keys, memory, deadline=1)
            for result, got, payload in zip(results, memory, payloads, strict=True):
                if isinstance(result, Hit):
                    assert bytes(got) == payload
                else:
                    assert result.reason in (MissReason.UNAVAILABLE, MissReason.CORRUPT, MissReason.DEADLINE)

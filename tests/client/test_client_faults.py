"""Connections that break, nodes that refuse or are not there: what is tried again, and what is said in the end."""

from __future__ import annotations

import random
import socket
import threading
import time

import pytest

from kvstore.errors import Closed, Denied, InvalidRequest, Overloaded, Unavailable
from kvstore.types.results import MissReason, RefusedReason
from kvstore.wire import messages as m
from kvstore.wire.failures import code_of
from kvstore.wire.header import FrameType
from kvstore_client import Exists, Hit, KVClient, Miss, Refused, Stored
from tests.client.stored_chunks import SIZE, TOKENS, Limited, break_after, check, memories, prefix


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

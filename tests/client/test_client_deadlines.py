"""Answers that stall or trickle, and calls that wait for a connection: a call ends at its deadline, with the prefix."""

from __future__ import annotations

import threading
import time

import pytest

from kvstore.limits import SECOND_NS
from kvstore.types.results import MissReason, RefusedReason
from kvstore.wire.header import FrameType
from kvstore_client import Hit, KVClient, Miss
from kvstore_client.options import ClientOptions
from kvstore_client.rounds import Verb, ViewJob
from tests.client.stored_chunks import SIZE, TOKENS, break_after, check, memories, prefix


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


def test_jobs_of_one_round_for_one_target_do_not_wait_for_each_other(node) -> None:
    with KVClient.connect(node.address, options=ClientOptions(connections_per_target=1)) as client:
        session = client.session()
        (target,) = session.core.target_ids()
        until_ns = time.monotonic_ns() + 20 * SECOND_NS
        jobs = [ViewJob(session.core, target, until_ns) for _ in range(3)]

        def rounds() -> Verb[None]:
            yield jobs[:1]  # the connection has served before
            yield jobs[1:]

        session.driver.run(rounds())
        assert [job.failure for job in jobs] == [None] * 3


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

"""Copies and places of several nodes: what one does not have another one gives, and what is dead is given up once."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kvstore import limits
from kvstore.errors import InvalidRequest, QuotaExceeded
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason, RefusedReason
from kvstore.wire.failures import code_of
from kvstore.wire.header import FrameType
from kvstore.wire.messages import ErrorReply
from kvstore_client import AsyncKVClient, Exists, Hit, KVClient, Miss, Stored

COUNT = 24
LAYOUT = KVLayout.opaque(chunk_bytes=2000, chunk_tokens=4, run_bytes=6000)
NAMESPACE = Namespace(tenant="default", model="m", weights="w", layout=LAYOUT)
KEYS = NAMESPACE.keys(list(range(4 * COUNT)))
PAYLOADS = [bytes([at]) * (100 + at) for at in range(COUNT)]


def read(ns) -> list[Hit | Miss]:
    memory = [bytearray(len(one)) for one in PAYLOADS]
    results = ns.get_into(KEYS, memory)
    assert all(bytes(memory[at]) == PAYLOADS[at] for at, one in enumerate(results) if isinstance(one, Hit))
    return results


def test_every_copy_is_written_and_any_one_is_enough(cluster) -> None:
    cluster.show(copies=2)
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        assert {(type(one), one.copies) for one in ns.put(KEYS, PAYLOADS)} == {(Stored, 2)}
        assert sum(len(one.records) for one in cluster.nodes) == 2 * COUNT
        assert set(ns.put(KEYS, PAYLOADS)) == {Exists(2)}
    for dead in range(3):
        with KVClient.connect(cluster.nodes[0].address) as client:
            ns = client.namespace(NAMESPACE)
            cluster.nodes[dead].stop()
            assert {type(one) for one in read(ns)} == {Hit}
            with ns.match(KEYS) as found:
                assert found.chunks == COUNT
                assert found.pinned
            assert all(ns.contains(KEYS))
            cluster.nodes[dead].start()


def test_a_put_says_on_how_many_places_it_lies(cluster) -> None:
    cluster.show(copies=2)
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        cluster.nodes[2].stop()
        results = ns.put(KEYS, PAYLOADS, deadline=5)
        assert {type(one) for one in results} == {Stored}
        assert {one.copies for one in results} == {1, 2}
        assert sum(one.copies for one in results) == sum(len(one.records) for one in cluster.nodes)


def test_keys_that_moved_are_found_where_they_were_in_one_round_trip(cluster) -> None:
    cluster.show(states={2: "away"})
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        cluster.show(states={2: "joining"}, previous=[{"t2": 0.0}])
        assert {type(one) for one in read(ns)} == {Hit}
        cluster.clear_calls()
        with ns.match(KEYS) as found:
            assert found.chunks == COUNT
            assert found.pinned
        assert cluster.counts(FrameType.MATCH) == [1, 1, 1]
        assert {type(one) for one in read(ns)} == {Hit}
        assert not cluster.nodes[2].records
        assert {type(one) for one in ns.delete(KEYS)} == {Hit}
        assert not any(one.records for one in cluster.nodes)


def test_a_draining_target_is_read_and_not_written(cluster) -> None:
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        kept = len(cluster.nodes[1].records)
        assert kept
        cluster.show(states={1: "draining"}, previous=[{"t1": 1.0}])
        assert {type(one) for one in read(ns)} == {Hit}
        other = ns.keys(list(range(1000, 1000 + 4 * COUNT)))
        assert {type(one) for one in ns.put(other, PAYLOADS)} == {Stored}
        assert len(cluster.nodes[1].records) == kept


def test_a_silent_copy_is_given_up_for_the_other_one(cluster) -> None:
    cluster.show(copies=2)
    go_on = threading.Event()
    with KVClient.connect(cluster.nodes[0].address, deadline=20) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)

        def silent(link, frame) -> bool:
            if frame.type in (FrameType.GET, FrameType.HELLO, FrameType.MATCH):
                go_on.wait(60)
            return False

        cluster.nodes[1].script = silent
        try:
            assert {type(one) for one in read(ns)} == {Hit}
            assert client.stats()["breaker_opened"] == 1
            cluster.clear_calls()
            assert {type(one) for one in read(ns)} == {Hit}
            with ns.match(KEYS) as found:
                assert found.chunks == COUNT
            assert not cluster.nodes[1].count(FrameType.GET), "a broken target is not asked"
        finally:
            go_on.set()


def test_another_node_at_a_targets_address_is_not_asked_for_its_keys(cluster) -> None:
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        kept = {key for _, key in cluster.nodes[2].records}
        cluster.nodes[2].restart()
        cluster.nodes[2].node_id = "stranger"
        cluster.clear_calls()
        results = read(ns)
        assert {at for at, one in enumerate(results) if one == Miss(MissReason.UNAVAILABLE)} == {
            at for at in range(COUNT) if KEYS[at].digest in kept
        }
        assert set(cluster.nodes[2].calls) <= {FrameType.HELLO, FrameType.VIEW}
        cluster.nodes[2].node_id = "n2"
        client.refresh()
        assert {type(one) for one in ns.wait(KEYS)} <= {Hit, Miss}


def test_tasks_read_copies_as_threads_do(cluster) -> None:
    cluster.show(copies=2)

    async def work() -> None:
        async with await AsyncKVClient.connect(cluster.nodes[0].address) as client:
            ns = client.namespace(NAMESPACE)
            assert {one.copies for one in await ns.put(KEYS, PAYLOADS)} == {2}
            cluster.nodes[1].stop()
            memory = [bytearray(len(one)) for one in PAYLOADS]
            assert {type(one) for one in await ns.get_into(KEYS, memory)} == {Hit}
            assert [bytes(one) for one in memory] == PAYLOADS
            async with ns.match(KEYS) as found:
                assert found.chunks == COUNT

    asyncio.run(work())


def test_copies_of_a_put_are_one_version_and_say_what_their_namespace_wants(cluster) -> None:
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE, copies=3)
        assert {one.copies for one in ns.put(KEYS, PAYLOADS)} == {3}
        assert len({tuple(sorted(one.records)) for one in cluster.nodes}) == 1
        for key in cluster.nodes[0].records:
            assert len({one.records[key].content_id for one in cluster.nodes}) == 1
        assert [one.wanted_copies for one in cluster.nodes] == [{NAMESPACE.digest: 3}] * 3
        memory = [bytearray(50) for _ in KEYS]
        ids = [one.content_id for one in read(ns)]
        for dead in (1, 2):
            cluster.nodes[dead].stop()
            parts = ns.get_into(KEYS, memory, ranges=[(10, 50)], content_ids=ids)
            assert {type(one) for one in parts} == {Hit}
            assert [bytes(one) for one in memory] == [one[10:60] for one in PAYLOADS]


@pytest.mark.parametrize("copies", [0, 4, "2", -1])
def test_a_number_of_copies_that_makes_no_sense_is_refused(cluster, copies) -> None:
    with KVClient.connect(cluster.nodes[0].address) as client, pytest.raises(InvalidRequest, match="copies is"):
        client.namespace(NAMESPACE, copies=copies)


def test_a_writer_fills_every_copy(cluster) -> None:
    cluster.show(copies=2)
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        with ns.writer(KEYS, lengths=[len(one) for one in PAYLOADS]) as writer:
            for at, one in enumerate(PAYLOADS):
                writer.write(at, one[:70])
                writer.write(at, one[70:], offset=70)
            results = writer.commit()
        assert {(type(one), one.copies) for one in results} == {(Stored, 2)}
        assert sum(len(one.records) for one in cluster.nodes) == 2 * COUNT
        for key in {key for one in cluster.nodes for key in one.records}:
            assert len({one.records[key].content_id for one in cluster.nodes if key in one.records}) == 1
        with ns.writer(KEYS, lengths=[len(one) for one in PAYLOADS]) as writer:
            assert set(writer.statuses) == {Exists(2)}
        cluster.nodes[1].stop()
        assert {type(one) for one in read(ns)} == {Hit}


def test_a_writer_goes_on_with_the_copies_that_are_left(cluster) -> None:
    cluster.show(copies=2)
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        with ns.writer(KEYS, lengths=[len(one) for one in PAYLOADS]) as writer:
            cluster.nodes[1].stop()
            for at, one in enumerate(PAYLOADS):
                writer.write(at, one)
            results = writer.commit()
        assert {type(one) for one in results} == {Stored}
        assert {one.copies for one in results} == {1, 2}
        assert {type(one) for one in read(ns)} == {Hit}


def test_who_lacks_what_another_one_has_is_told_so(cluster) -> None:
    cluster.show(states={2: "away"})
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        cluster.show(states={2: "joining"}, previous=[{"t2": 0.0}])
        client.refresh()
        assert {type(one) for one in read(ns)} == {Hit}
        (told,) = cluster.nodes[2].pulls
        assert told.namespace == NAMESPACE.digest
        assert told.source in ("t0", "t1")
        source = cluster.nodes[int(told.source[1])]
        keys = {told.keys[at : at + 32] for at in range(0, len(told.keys), 32)}
        assert keys <= {key for _, key in source.records}
        assert keys
        assert {type(one) for one in read(ns)} == {Hit}
        assert client.stats()["repair_hints"] <= 2, "hints are rare"
        assert not any(one.pulls for one in cluster.nodes[:2])


def test_ranks_give_their_group_to_every_node(cluster) -> None:
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        with ns.match(KEYS, group=b"g" * 16) as found:
            assert found.chunks == COUNT
        assert [one.groups for one in cluster.nodes] == [[b"g" * 16]] * 3
        with pytest.raises(InvalidRequest, match="group"):
            ns.match(KEYS, group=b"short")


@pytest.mark.usefixtures("short_patience")
def test_a_frozen_target_is_a_miss_before_the_deadline_and_a_slow_one_is_waited_for(cluster) -> None:
    go_on = threading.Event()
    with KVClient.connect(cluster.nodes[0].address, deadline=30) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        kept = {key for _, key in cluster.nodes[1].records}
        lost = {at for at in range(COUNT) if KEYS[at].digest in kept}
        gets = []

        def slow(link, frame) -> bool:
            if frame.type is FrameType.GET:
                gets.append(frame)
                if len(gets) == 1:
                    go_on.wait(60)
            return False

        def frozen(link, frame) -> bool:
            go_on.wait(60)
            return False

        try:
            cluster.nodes[1].script = slow
            assert {type(one) for one in read(ns)} == {Hit}, "it answers a HELLO, so it is asked again"
            assert client.stats()["breaker_opened"] == 0
            cluster.nodes[1].script = frozen
            results = read(ns)
            assert {at for at, one in enumerate(results) if one == Miss(MissReason.UNAVAILABLE)} == lost
            assert client.stats()["breaker_opened"] == 1
        finally:
            go_on.set()


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("has_older_places", [True, False])
def test_a_target_that_is_slow_in_a_storm_is_asked_again_until_it_answers(cluster, has_older_places) -> None:
    """It answers nobody, not even a HELLO, and then it does: no record is a miss for that."""
    go_on = threading.Event()
    with KVClient.connect(cluster.nodes[0].address, deadline=30) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        cluster.show(previous=[{"t1": 0.0}] if has_older_places else None)
        greetings = []

        def slow(link, frame) -> bool:
            if frame.type is FrameType.HELLO:
                greetings.append(frame)
                if len(greetings) == 3:
                    go_on.set()
            go_on.wait(60)
            return False

        cluster.nodes[1].script = slow
        try:
            assert {type(one) for one in read(ns)} == {Hit}
            assert client.stats()["breaker_opened"] == 1
            with ns.match(KEYS) as found:
                assert found.chunks == COUNT
        finally:
            go_on.set()


@pytest.mark.usefixtures("short_patience")
def test_calls_that_wait_for_a_frozen_target_do_not_keep_others_from_live_ones(cluster) -> None:
    with KVClient.connect(cluster.nodes[0].address, deadline=30) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        kept = {key for _, key in cluster.nodes[0].records}  # the first in the order in which connections are taken
        link = client.session().core.link("t0")
        held = [link.take(client.options.flow, 0) for _ in range(client.options.connections_per_target)]
        for one in held:
            assert one is not None, "these are what calls hold that hear nothing"
            one.asked_ns = time.monotonic_ns()
        results = read(ns)
        assert {at for at, one in enumerate(results) if one == Miss(MissReason.UNAVAILABLE)} == {
            at for at in range(COUNT) if KEYS[at].digest in kept
        }
        for one in held:
            assert one is not None
            link.give_back(one, 0)
        assert {type(one) for one in read(ns)} == {Hit}


def test_the_only_reader_that_is_left_is_read_the_short_way_and_the_others_for_what_it_lacks(cluster) -> None:
    """Two of three are down by the view, and fenced: they answer reads."""
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        held = {key for _, key in cluster.nodes[0].records}
        here = next(at for at in range(COUNT) if KEYS[at].digest in held)
        there = next(at for at in range(COUNT) if KEYS[at].digest not in held)
        cluster.show(states={1: "down", 2: "down"})
        client.refresh()
        assert {type(one) for one in read(ns)} == {Hit}
        core = client.session().core
        assert core.reader == "t0"
        cluster.clear_calls()
        for at in (here, there):
            memory = bytearray(len(PAYLOADS[at]))
            for _ in range(2):
                assert isinstance(ns.get_into(KEYS[at : at + 1], [memory])[0], Hit)
                assert bytes(memory) == PAYLOADS[at]
            if at == here:
                assert cluster.counts(FrameType.GET) == [2, 0, 0]
        run = [at for at in range(COUNT) if KEYS[at].digest in held][:3]
        cluster.clear_calls()
        memory = [bytearray(len(PAYLOADS[at])) for at in run]
        assert {type(one) for one in ns.get_into(KEYS[run[0] : run[-1] + 1], memory)} == {Hit}
        assert [bytes(one) for one in memory] == [PAYLOADS[at] for at in run]
        assert cluster.counts(FrameType.GET) == [1, 0, 0]
        cluster.show()
        client.refresh()
        assert core.reader is None
        assert {type(one) for one in read(ns)} == {Hit}


def test_nothing_is_written_where_every_target_drains(cluster) -> None:
    cluster.show(states={0: "draining", 1: "draining", 2: "draining"})
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        results = ns.put(KEYS, PAYLOADS)
        with ns.writer(KEYS) as writer:
            assert writer.statuses == results
            writer.write(0, PAYLOADS[0])
            assert writer.commit() == results
        assert {(one.reason, "takes new records" in one.detail) for one in results} == {
            (RefusedReason.OVERLOADED, True)
        }
        assert not any(ns.contains(KEYS))


def test_a_node_that_could_not_be_told_how_many_copies_is_told_with_the_next_put(cluster) -> None:
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE, copies=3)
        refuses = True

        def full(link, frame) -> bool:
            if refuses and frame.type is FrameType.MANIFEST:
                link.send(frame, ErrorReply(code=code_of(QuotaExceeded("")), text="not now", closing=False))
                return True
            return False

        cluster.nodes[1].script = full
        assert {one.copies for one in ns.put(KEYS[:4], PAYLOADS[:4])} == {2}
        refuses = False
        cluster.nodes[1].manifests.add(NAMESPACE.digest)  # another client's put has told of it, not of the copies
        assert {one.copies for one in ns.put(KEYS[4:], PAYLOADS[4:])} == {3}
        assert [one.wanted_copies for one in cluster.nodes] == [{NAMESPACE.digest: 3}] * 3


@pytest.mark.parametrize("verb", [FrameType.UNPIN, FrameType.WRITER_ABORT])
def test_a_silent_target_keeps_no_other_one_from_letting_go(cluster, verb) -> None:
    go_on = threading.Event()
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        if verb is FrameType.UNPIN:
            ns.put(KEYS, PAYLOADS)
            held = ns.match(KEYS).release
        else:
            held = ns.writer(KEYS).abort
        assert all(one.pins or one.writers for one in cluster.nodes)
        cluster.nodes[0].script = lambda link, frame: frame.type is verb and not go_on.wait(60)
        held()
        assert not any(one.pins or one.writers for one in cluster.nodes[1:])
        go_on.set()


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("verb", ["put", "delete", "match"])
def test_a_frozen_target_is_asked_no_more_once_the_view_says_that_it_is_down(cluster, monkeypatch, verb) -> None:
    monkeypatch.setattr("kvstore_client.core.random.shuffle", lambda names: names.sort())  # t0 is asked for the view
    for name in ("copies.LAST_SILENCE_NS", "write_verbs.LAST_SILENCE_NS", "asking.PLACE_SILENCE_NS"):
        monkeypatch.setattr(f"kvstore_client.{name}", limits.LAST_SILENCE_NS // 8)
    go_on = threading.Event()

    def frozen(link, frame) -> bool:
        go_on.wait(60)
        return False

    cluster.show(copies=2)
    with KVClient.connect(cluster.nodes[0].address, deadline=30) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        cluster.show(copies=2, states={1: "down"})
        cluster.nodes[1].script = frozen
        try:
            if verb == "put":
                other = NAMESPACE.keys(list(range(1000, 1000 + 4 * COUNT)))
                assert [one.copies for one in ns.put(other, PAYLOADS)] == [2] * COUNT
            elif verb == "delete":
                # by the newer view the frozen one has no say: it hears of the delete when it is back
                assert all(isinstance(one, Hit) for one in ns.delete(KEYS)), "they were deleted by the older view"
                assert not cluster.nodes[0].records
            else:
                with ns.match(KEYS) as found:
                    assert found.chunks == COUNT
            stats = client.stats()
            wanted = (1, 0) if verb == "match" else (0, 1)
            assert (stats["breaker_opened"], stats["retries"]) == wanted, "one copy tells all a match needs"
        finally:
            go_on.set()

"""Copies and places of several nodes: what one does not have another one gives, and what is dead is given up once."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from kvstore import limits
from kvstore.cluster.view import View
from kvstore.errors import InvalidRequest, QuotaExceeded, Unavailable
from kvstore.limits import PLACE_SILENCE_NS, PULL_NS_MAX, SECOND_NS, VIEW_OLDER_NS
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason, RefusedReason
from kvstore.wire.codec import pack_plain, unpack_plain
from kvstore.wire.failures import code_of
from kvstore.wire.header import FrameType
from kvstore.wire.messages import ErrorReply, Match, MatchReply
from kvstore_client import AsyncKVClient, Exists, Hit, KVClient, Miss, Stored
from kvstore_client import core as core_module
from kvstore_client.connection import Connection
from kvstore_client.hints import hint

COUNT = 24
LAYOUT = KVLayout.opaque(chunk_bytes=2000, chunk_tokens=4, run_bytes=6000)
NAMESPACE = Namespace(tenant="default", model="m", weights="w", layout=LAYOUT)
KEYS = NAMESPACE.keys(list(range(4 * COUNT)))
PAYLOADS = [bytes([at]) * (100 + at) for at in range(COUNT)]


class Nodes:
    """Scripted nodes with one view of all."""

    def __init__(self, nodes) -> None:
        self.nodes = nodes
        self.epoch = 0
        self.show()

    def show(
        self, *, copies: int = 1, states: dict[int, str] | None = None, previous: list[dict] | None = None
    ) -> None:
        self.epoch += 1
        targets = [
            {
                "id": f"t{at}",
                "data": [one.address],
                "weight": 1.0,
                "state": (states or {}).get(at, "serving"),
                "node_id": f"n{at}",
            }
            for at, one in enumerate(self.nodes)
            if (states or {}).get(at) != "away"
        ]
        view = {
            "epoch": self.epoch,
            "node_id": "",
            "cluster": "c",
            "targets": targets,
            "replicas": {"copies": copies, "head_copies": copies},
            "previous": [{"epoch": self.epoch, "keep_ns": 10**9, "weights": weights} for weights in previous or []],
        }
        packed = pack_plain(view)
        for at, one in enumerate(self.nodes):
            one.node_id = f"n{at}"
            one.epoch = self.epoch
            one.view = lambda: packed

    def clear_calls(self) -> None:
        for one in self.nodes:
            one.calls.clear()

    def counts(self, verb: FrameType) -> list[int]:
        return [one.count(verb) for one in self.nodes]


@pytest.fixture
def cluster(node):
    made = [node, *(type(node)() for _ in range(2))]
    for one in made[1:]:
        one.start()
    yield Nodes(made)
    for one in made[1:]:
        one.stop()


@pytest.fixture
def short_patience(monkeypatch) -> None:
    """A tenth of the times after which a target is taken for dead."""
    for name in (
        "spread.LAST_SILENCE_NS",
        "rounds.CONNECT_NS_MAX",
        "rounds.BREAKER_SILENCE_NS",
        "retry.BREAKER_SILENCE_NS",
    ):
        monkeypatch.setattr(f"kvstore_client.{name}", getattr(limits, name.partition(".")[2]) // 8)


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


def test_a_view_is_not_replaced_by_an_older_one_and_a_dead_seed_is_passed_over(cluster) -> None:
    old = cluster.nodes[0].view()
    cluster.show()
    cluster.nodes[0].view = lambda: old
    cluster.nodes[0].epoch = 1
    dead, _, fresh = (one.address for one in cluster.nodes)
    with KVClient.connect([fresh, dead]) as client:
        core = client.session().core
        for _ in range(6):
            client.refresh()
            assert core.view is not None
            assert core.view.epoch == cluster.epoch
        cluster.nodes[0].stop()
        cluster.nodes[1].stop()
        for _ in range(6):
            client.refresh()
    with KVClient.connect([dead, fresh]) as client:
        assert client.session().core.view.epoch == cluster.epoch


def test_a_cluster_that_began_anew_is_believed_in_the_end(cluster) -> None:
    cluster.epoch = 50
    cluster.show()
    with KVClient.connect(cluster.nodes[0].address) as client:
        core = client.session().core
        known = core.view
        cluster.epoch = 0
        cluster.show()
        client.refresh()
        assert core.view is known
        core._older_since_ns -= VIEW_OLDER_NS
        client.refresh()
        assert core.view.epoch == 1
        assert not core.wants_view(time.monotonic_ns())


def test_a_dead_rail_costs_bandwidth_and_nothing_else(node) -> None:
    rail = socket.create_server(("127.0.0.1", 0))
    dead = f"127.0.0.1:{rail.getsockname()[1]}"
    node.data = (node.address, dead)
    rail.close()
    with KVClient.connect(node.address) as client:
        ns = client.namespace(NAMESPACE)
        assert {type(one) for one in ns.put(KEYS, PAYLOADS)} == {Stored}
        for _ in range(4):
            assert {type(one) for one in read(ns)} == {Hit}
        assert client.stats()["breaker_opened"] == 0
        assert client.stats()["retries"] == 0


def test_all_rails_are_used(node) -> None:
    other = socket.create_server(("127.0.0.1", 0))
    node.data = (node.address, f"127.0.0.1:{other.getsockname()[1]}")
    threading.Thread(target=node._accept, args=(other,), daemon=True).start()
    with KVClient.connect(node.address) as client:
        ns = client.namespace(NAMESPACE)
        for _ in range(6):
            ns.put(KEYS, PAYLOADS)
        ports = [link.socket.getsockname()[1] for link in node.links]
        assert set(ports) == {node.port, other.getsockname()[1]}
    other.close()


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


def test_a_hint_does_not_outlive_the_deadline_of_its_read(cluster) -> None:
    with KVClient.connect(cluster.nodes[0].address) as client:
        core = client.session().core
        now_ns = time.monotonic_ns()
        lacking = {("t1", "t0"): KEYS[0].digest}
        assert list(hint(core, NAMESPACE.digest, lacking, now_ns)) == []
        ((job,),) = hint(core, NAMESPACE.digest, lacking, now_ns + PULL_NS_MAX // 2)
        assert job.deadline_ns <= now_ns + PULL_NS_MAX // 2


def test_a_connection_that_was_never_used_is_not_taken_for_a_silent_one(cluster) -> None:
    with KVClient.connect(cluster.nodes[0].address) as client:
        link = client.session().core.link("t1")
        for _ in range(client.options.connections_per_target):
            now_ns = time.monotonic_ns()
            assert link.take(client.options.flow, now_ns) is not None
        assert link.take(client.options.flow, now_ns) is None
        link.check_word(PLACE_SILENCE_NS, now_ns + PLACE_SILENCE_NS - 1)
        with pytest.raises(Unavailable, match="have heard nothing"):
            link.check_word(PLACE_SILENCE_NS, now_ns + PLACE_SILENCE_NS)


def test_a_drained_connection_serves_its_next_call_until_that_ones_deadline(cluster, monkeypatch) -> None:
    """Draining hears the rest of the last answer; whether the next one is silent is not known by that."""
    go_on = threading.Event()
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        core = client.session().core
        cluster.nodes[0].script = lambda link, frame: frame.type is FrameType.MATCH and not go_on.wait(60)
        connection = Connection(cluster.nodes[0].address, greeting=core.link("t0"), flow=client.options.flow)
        connection.wait_for_word(0, time.monotonic_ns() + 60 * SECOND_NS)
        list(connection.open())
        connection.begin(Match(namespace=NAMESPACE.digest, keys=KEYS[0].digest))
        assert connection.try_flush()
        assert connection.abandon()
        go_on.set()
        monkeypatch.setattr("kvstore_client.connection.DRAIN_NS_MAX", 40 * SECOND_NS)  # a busy machine is no reason
        heard_by_ns = time.monotonic_ns() + 50 * SECOND_NS
        connection.wait_for_word(heard_by_ns, heard_by_ns + SECOND_NS)
        list(connection.recover())
        assert connection.is_idle
        assert connection.deadline_ns == heard_by_ns, "nothing has come of the next call"
        list(connection.ask(Match(namespace=NAMESPACE.digest, keys=KEYS[0].digest), MatchReply))
        assert connection.deadline_ns == heard_by_ns + SECOND_NS
        connection.close()


def test_the_slower_of_two_threads_does_not_bring_the_older_view_back(cluster, monkeypatch) -> None:
    old = cluster.nodes[0].view()
    cluster.show()
    new = cluster.nodes[0].view()
    with KVClient.connect(cluster.nodes[0].address, lazy=True) as client:
        core = client.session().core
        real, other = core_module.routes_of, None

        def adopt(packed: bytes) -> None:
            core.adopt(
                View.from_plain(unpack_plain(packed, what="view")), source="@" + cluster.nodes[0].address, now_ns=1
            )

        def overtaken(view: View, *, asked_host: str):
            nonlocal other
            if other is None:
                other = threading.Thread(target=adopt, args=(new,))
                other.start()
                other.join(0.2)  # it gets ahead of this thread, if it may
            return real(view, asked_host=asked_host)

        monkeypatch.setattr(core_module, "routes_of", overtaken)
        adopt(old)
        other.join()
        assert core.view.epoch == core.link("t0").view_epoch == cluster.epoch


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


def test_a_call_that_is_interrupted_while_it_waits_keeps_no_connection(cluster, monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        links = [client.session().core.link(f"t{at}") for at in range(3)]
        counts = range(client.options.connections_per_target)
        monkeypatch.setattr("kvstore_client.blocking.BlockingDriver._wait_for_connection", interrupted)
        held = [links[2].take(client.options.flow, 0) for _ in counts]
        with pytest.raises(KeyboardInterrupt):
            ns.match(KEYS)
        assert all(held)
        assert all(link.take(client.options.flow, 0) for link in links[:2] for _ in counts)


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("verb", ["put", "delete", "match"])
def test_a_frozen_target_is_asked_no_more_once_the_view_says_that_it_is_down(cluster, monkeypatch, verb) -> None:
    monkeypatch.setattr("kvstore_client.core.random.shuffle", lambda names: names.sort())  # t0 is asked for the view
    for name in ("copies.LAST_SILENCE_NS", "write_verbs.LAST_SILENCE_NS", "read_verbs.PLACE_SILENCE_NS"):
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
                assert Miss(MissReason.UNAVAILABLE) in ns.delete(KEYS), "that one may still have it"
                assert not cluster.nodes[0].records
            else:
                with ns.match(KEYS) as found:
                    assert found.chunks == COUNT
            stats = client.stats()
            assert (stats["breaker_opened"], stats["retries"]) == (0, 1)
        finally:
            go_on.set()

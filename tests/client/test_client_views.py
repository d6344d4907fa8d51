"""Views of a cluster that come and go, addresses of a node, and the connections that calls share."""

from __future__ import annotations

import socket
import threading
import time
from functools import partial

import pytest

from kvstore.cluster.view import View
from kvstore.errors import StaleView, Unavailable
from kvstore.limits import DROPS_AHEAD_MAX, PLACE_SILENCE_NS, PULL_NS_MAX, SECOND_NS, VIEW_OLDER_NS
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import MissReason
from kvstore.wire.codec import unpack_plain
from kvstore.wire.failures import code_of
from kvstore.wire.header import FrameType
from kvstore.wire.messages import Drop, End, ErrorReply, Match, MatchReply
from kvstore_client import Hit, KVClient, Miss, Stored
from kvstore_client import core as core_module
from kvstore_client.connection import Connection
from kvstore_client.hints import hint

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


@pytest.mark.parametrize("away", [(2,), (1, 2)])
def test_what_is_deleted_or_dropped_by_an_old_view_is_gone_from_the_new_places_too(cluster, away) -> None:
    dropped = Namespace(tenant="default", model="dropped", weights="w", layout=LAYOUT)
    dropped_keys = dropped.keys(list(range(4 * COUNT)))
    cluster.show(states=dict.fromkeys(away, "away"))
    with KVClient.connect(cluster.nodes[0].address) as behind:
        assert len(behind.session().core.target_ids()) == 3 - len(away)
        cluster.show()
        with KVClient.connect(cluster.nodes[0].address) as client:
            client.namespace(NAMESPACE).put(KEYS, PAYLOADS)
            client.namespace(dropped).put(dropped_keys, PAYLOADS)
            assert all(one.records for one in cluster.nodes)
            assert {type(one) for one in behind.namespace(NAMESPACE).delete(KEYS)} == {Hit}
            assert not any(client.namespace(NAMESPACE).contains(KEYS))
        with KVClient.connect(cluster.nodes[0].address) as client:
            cluster.show(states=dict.fromkeys(away, "away"))
            behind.refresh()
            cluster.show()
            assert behind.namespace(dropped).drop()
            assert not any(client.namespace(dropped).contains(dropped_keys))
            assert not any(one.records for one in cluster.nodes)


@pytest.mark.parametrize("ahead", [5, 2 * DROPS_AHEAD_MAX])
def test_a_drop_is_false_where_one_counts_far_fewer_drops_than_others(cluster, ahead) -> None:
    for node, generation in zip(cluster.nodes, (ahead, 1, ahead), strict=True):
        node.generation = generation
    with KVClient.connect(cluster.nodes[0].address) as client:
        client.namespace(NAMESPACE).put(KEYS, PAYLOADS)
        assert client.namespace(NAMESPACE).drop() is (ahead < DROPS_AHEAD_MAX)
        assert not any(client.namespace(NAMESPACE).contains(KEYS)), "it is dropped all the same"
    assert cluster.nodes[1].generation == (ahead + 1 if ahead < DROPS_AHEAD_MAX else 2)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_delete_follows_each_newer_view_that_it_hears_of(cluster, refuses) -> None:
    """Also when another one comes while it follows the first, and when a node refuses what was planned before it."""
    with KVClient.connect(cluster.nodes[0].address) as client:
        client.namespace(NAMESPACE).put(KEYS, PAYLOADS)
    cluster.show(states={1: "away", 2: "away"})
    with KVClient.connect(cluster.nodes[0].address, deadline=60) as behind:
        assert len(behind.session().core.target_ids()) == 1
        later = [{}, {2: "away"}]

        def changes(link, frame) -> bool:
            if frame.type is not FrameType.DELETE:
                return False
            if later:
                cluster.show(states=later.pop())
                if refuses:
                    error = StaleView("the delete was planned with an older view")
                    link.send(frame, ErrorReply(code=code_of(error), text=str(error), closing=False))
                    return True
            return False

        cluster.nodes[0].script = changes
        assert {type(one) for one in behind.namespace(NAMESPACE).delete(KEYS)} == {Hit}
        assert not later
        assert not any(one.records for one in cluster.nodes)


def test_a_drop_that_is_refused_for_its_older_view_is_planned_anew(cluster) -> None:
    with KVClient.connect(cluster.nodes[0].address) as client:
        client.namespace(NAMESPACE).put(KEYS, PAYLOADS)
    cluster.show(states={1: "away", 2: "away"})
    with KVClient.connect(cluster.nodes[0].address, deadline=60) as behind:
        assert len(behind.session().core.target_ids()) == 1
        later = [{}, {2: "away"}, {}]

        def refuses(link, frame) -> bool:
            if frame.type is not FrameType.DROP or not later:
                return False
            cluster.show(states=later.pop(0))
            error = StaleView("the drop was planned with an older view")
            link.send(frame, ErrorReply(code=code_of(error), text=str(error), closing=False))
            return True

        cluster.nodes[0].script = refuses
        assert behind.namespace(NAMESPACE).drop()
        assert not later
        assert not any(one.records for one in cluster.nodes)


def test_a_drop_brings_those_that_have_counted_fewer_to_the_highest_generation(cluster) -> None:
    """Without that the others would hide, when they compare, what is put from now on."""
    told: list[tuple[str, int]] = []

    def counts(name: str, generation: int, link, frame) -> bool:
        if frame.type is not FrameType.DROP:
            return False
        asked = Drop.decode(frame.body).generation
        told.append((name, asked))
        link.send(frame, End(value=asked or generation))
        return True

    for node, generation in zip(cluster.nodes, (5, 3, 0), strict=True):  # the last one does not say
        node.script = partial(counts, node.address, generation)
    with KVClient.connect(cluster.nodes[0].address) as client:
        assert client.namespace(NAMESPACE).drop()
    first, second, third = (node.address for node in cluster.nodes)
    assert sorted(told) == sorted([(first, 0), (second, 0), (third, 0), (second, 5)])


def test_a_delete_tells_nothing_of_places_that_it_had_no_time_for(cluster) -> None:
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)

        def changes(link, frame) -> bool:
            if frame.type is FrameType.DELETE:
                cluster.show()  # each time: it never has the newest one
            return False

        cluster.nodes[0].script = changes
        told = {one.reason for one in ns.delete(KEYS, deadline=0.5)}
        assert told <= {MissReason.DEADLINE, MissReason.UNAVAILABLE}, "the view may not come in the last moments"


def test_a_drop_that_nobody_was_told_of_has_failed(cluster) -> None:
    nobody = dict.fromkeys(range(3), "away")
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        assert {type(one) for one in ns.put(KEYS, PAYLOADS)} == {Stored}
        cluster.show(states=nobody)
        client.refresh()
        assert not client.session().core.target_ids()
        assert not ns.drop(), "a node that recovers gives a view, and has no drive yet"
        cluster.show()
        assert ns.drop()
        assert not any(ns.contains(KEYS))
        assert not any(one.records for one in cluster.nodes)


def test_a_target_that_left_while_all_was_dropped_is_no_failure(cluster) -> None:
    cluster.show()
    with KVClient.connect(cluster.nodes[0].address) as client:
        ns = client.namespace(NAMESPACE)
        ns.put(KEYS, PAYLOADS)
        cluster.show(states={2: "away"})
        cluster.nodes[2].stop()
        assert ns.drop()
        assert not any(ns.contains(KEYS))


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

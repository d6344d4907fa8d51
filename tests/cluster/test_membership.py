"""Nodes that find each other through a real etcd, lose it, and find each other again."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from kvstore.cluster import transitions
from kvstore.cluster.catalog import (
    REPLICAS_NAME,
    VIEW_NAME,
    Document,
    document_name,
    documents_of,
    target_name,
    view_of,
)
from kvstore.cluster.charter import CLUSTER_ID_NAME, PEER_TOKEN_NAME
from kvstore.cluster.membership import Membership
from kvstore.cluster.plain import encode
from kvstore.cluster.registration import NodeNote, RelayRegistration, encode_registration
from kvstore.cluster.store import NO_LEASE
from kvstore.cluster.view import ReplicaPolicy, View, encode_view
from kvstore.limits import SECOND_NS
from kvstore.testing.etcd_process import EtcdProcess
from tests.cluster.members_lab import (
    DOWN,
    DRAINING,
    JOINING,
    SERVING,
    TTL_NS,
    WAIT_SECONDS,
    cluster_on,
    registration,
    run,
    until,
)


def test_nodes_find_each_other(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd, 0, 1, 2) as cluster:
            await until(lambda: all(len(node.states()) == 3 for node in cluster.nodes))
            await until(lambda: not any(node.member.fenced for node in cluster.nodes))
            await until(lambda: len({node.view.epoch for node in cluster.nodes}) == 1)
            views = {encode_view(node.view) for node in cluster.nodes}
            assert len(views) == 1
            assert list(cluster.nodes[0].states().values()).count(SERVING) == 1  # the first; the others fill

    run(body)


def test_all_nodes_hold_one_peer_token_and_the_one_that_replaces_it(
    shared_etcd: EtcdProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def body() -> None:
        async with cluster_on(shared_etcd, 0, 1, 2) as cluster:

            def tokens() -> set[bytes]:
                return {node.member.peer_token for node in cluster.nodes}

            store = cluster.open_store()
            await until(lambda: len(tokens()) == 1 and b"" not in tokens())
            (first,) = tokens()
            entry = (await store.load()).entries[PEER_TOKEN_NAME]
            assert (entry.value.encode(), entry.lease) == (first, NO_LEASE)
            await store.put(PEER_TOKEN_NAME, "an operator's choice")
            await until(lambda: tokens() == {b"an operator's choice"})
            await store.put(PEER_TOKEN_NAME, "short")
            await until(lambda: tokens() == {b""})  # guessable: nobody is a peer by it
            await store.delete(PEER_TOKEN_NAME)
            await until(lambda: len(tokens()) == 1 and b"" not in tokens())
            (last,) = tokens()
            assert last != first
            await store.close()
            for token in (first, last, b"an operator's choice"):
                assert token.decode() not in caplog.text

    run(body)


def test_a_relay_is_in_the_view_while_its_lease_holds(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd, 0) as cluster:
            (node,) = cluster.nodes
            await cluster.settled(t0=SERVING)
            relay = RelayRegistration(id="r1", data=("10.1.0.1:7501",), node_id="decode-1", label="rack")
            agent = Membership(cluster.open_store(), cluster=cluster.name, ttl_ns=TTL_NS)
            agent.register_relay(relay)
            task = asyncio.ensure_future(agent.run())
            await until(lambda: not agent.fenced)
            await until(lambda: len(node.view.relays) == 1)
            (seen,) = node.view.relays
            assert (seen.id, seen.data, seen.label, seen.state) == ("r1", relay.data, "rack", SERVING)
            assert agent.view is not None
            assert [target.id for target in agent.view.targets] == ["t0"], "it follows the view"
            agent.drain()
            await until(lambda: [one.state for one in node.view.relays] == [DRAINING])
            task.cancel()  # without a word, as by kill -9
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: node.view.relays == ())
            again = Membership(cluster.open_store(), cluster=cluster.name, ttl_ns=TTL_NS)
            again.register_relay(relay)
            task = asyncio.ensure_future(again.run())
            await until(lambda: [one.state for one in node.view.relays] == [SERVING])
            await again.close()
            await until(lambda: node.view.relays == ())
            await asyncio.gather(task, return_exceptions=True)
            assert node.states() == {"t0": SERVING}

    run(body)


def test_tools_are_told_of_every_node(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd, 0, 1) as cluster:
            for node in cluster.nodes:
                node.member.announce(NodeNote(node_id=node.id, grpc=f"{node.id}:7400"))
            await until(lambda: all(node.member.notes.keys() == {"t0", "t1"} for node in cluster.nodes))
            await cluster.nodes[1].die()
            await until(lambda: cluster.nodes[0].member.notes.keys() == {"t0"})

    run(body)


def test_a_node_with_drives_of_another_cluster_does_not_join(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd, cluster_id="aa" * 16) as cluster:
            first = cluster.add(0)
            await cluster.settled(t0=SERVING)
            store = cluster.open_store()
            assert (await store.load()).entries[CLUSTER_ID_NAME].value == "aa" * 16, "drawn by the one that came first"
            stranger = cluster.add(1, cluster_id="bb" * 16)
            await until(lambda: "another id" in stranger.member.failure)
            assert (stranger.member.fenced, first.states()) == (True, {"t0": SERVING})
            await store.put(CLUSTER_ID_NAME, "bb" * 16)  # the operator says which it is
            await until(lambda: first.states() == {"t0": SERVING, "t1": JOINING})
            assert not first.member.fenced, "who was in it stays in it, and says so in its log"
            await store.close()

    run(body)


def test_a_node_that_dies_is_down_and_comes_back_with_its_drive(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd, 0) as cluster:
            (first,) = cluster.nodes
            await cluster.settled(t0=SERVING)
            second = cluster.add(1)
            await cluster.settled(t0=SERVING, t1=JOINING)
            await second.die()
            await cluster.settled(t0=SERVING, t1=DOWN)
            again = cluster.add(1)
            await cluster.settled(t0=SERVING, t1=SERVING)
            assert first.view.previous[0].weights == {"t1": 0.0}
            assert again.target(1).session != second.target(1).session

    run(body)


def test_a_restart_within_the_lease_is_not_noticed_as_a_death(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd, 0, 1, ttl_ns=60 * SECOND_NS) as cluster:
            first, second = cluster.nodes
            await until(lambda: len(first.states()) == 2 and not second.member.fenced)
            await second.die()
            cluster.add(1)
            await until(lambda: first.target(1).session != second.target(1).session)
            assert all(view.target("t1") is None or view.target("t1").state is not DOWN for view in first.views)  # type: ignore[union-attr]

    run(body)


def test_who_says_goodbye_is_down_at_once_and_a_drained_one_leaves(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd, 0, 1, 2) as cluster:
            first, second, third = cluster.nodes
            await until(lambda: len(first.states()) == 3 and not any(node.member.fenced for node in cluster.nodes))
            third.member.drain()
            await until(lambda: first.states()["t2"] is DRAINING)
            assert not third.member.fenced  # it still says itself what is left to do
            await third.close()
            await until(lambda: "t2" not in first.states())
            await second.close()
            await until(lambda: first.states()["t1"] is DOWN)
            await first.close()
            image = await (store := cluster.open_store()).load()
            await store.close()
            last = view_of(image.entries)
            assert last is not None
            assert {target.id: target.state for target in last.targets} == {"t0": DOWN, "t1": DOWN}
            assert set(image.entries) == {VIEW_NAME, PEER_TOKEN_NAME}

    run(body)


def test_a_node_that_ends_waits_for_no_store_that_was_silent_before(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd, 0) as cluster:
            (node,) = cluster.nodes
            await until(lambda: len(node.states()) == 1 and not node.member.fenced)
            node.store.cut()
            await until(lambda: "cut off" in node.member.failure)
            assert node.member._lease is not None
            node.store.is_mute = True
            async with asyncio.timeout(WAIT_SECONDS / 2):
                await node.close()

    run(body)


def test_a_node_that_cannot_reach_etcd_is_fenced_before_others_give_it_up(
    shared_etcd: EtcdProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def body() -> None:
        async with cluster_on(shared_etcd, 0, 1) as cluster:
            first, second = cluster.nodes
            await until(lambda: len(first.states()) == 2 and first.view == second.view)
            await until(lambda: not any(node.member.fenced for node in cluster.nodes))
            was_fenced = []
            first_changed = first.member._on_change

            def note() -> None:
                first_changed()
                if first.states().get("t1") is DOWN:
                    was_fenced.append(second.member.fenced)

            first.member._on_change = note
            last = second.view
            second.store.cut()
            await until(lambda: second.member.fenced)
            assert second.view == last  # what it knew stays
            assert "cut off" in second.member.failure
            await until(lambda: second.member.fence.startswith("lease lost "))
            assert "unreachable: " in second.member.fence
            await until(lambda: "and serves reads: lease lost " in caplog.text)
            await until(lambda: first.states()["t1"] is DOWN)
            assert all(was_fenced)
            second.store.mend()
            await until(lambda: not second.member.fenced and first.states()["t1"] is SERVING)
            await until(lambda: second.member.failure == second.member.fence == "")
            await until(lambda: "this node is not fenced any more" in caplog.text)

    run(body)


def test_a_fence_from_outside_is_noticed_and_answered_with_a_new_session(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd, 0, 1) as cluster:
            first, second = cluster.nodes
            await until(lambda: len(first.states()) == 2 and not any(node.member.fenced for node in cluster.nodes))
            session = first.target(1).session
            store = cluster.open_store()
            image = await store.load()
            stored = view_of(image.entries)
            assert stored is not None
            fenced = transitions.fence(stored, ["t1"])
            await store.put(VIEW_NAME, encode_view(fenced), expected=image.entries[VIEW_NAME].revision)
            await store.close()
            await until(lambda: fenced in second.views)
            await until(lambda: first.target(1).session != session and not second.member.fenced)

    run(body)


def test_a_target_that_another_node_registers_is_not_fought_over(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd, 0, 1) as cluster:
            first, second = cluster.nodes
            await until(lambda: len(first.states()) == 2 and not any(node.member.fenced for node in cluster.nodes))
            store = cluster.open_store()
            lease = await store.grant(ttl_ns=60 * SECOND_NS)
            moved = replace(registration(1, address="10.0.0.9:7401"), node_id="n9", session="other")
            await store.put(target_name("t1"), encode_registration(moved), lease=lease.id)
            await until(lambda: second.member.fenced and first.target(1).node_id == "n9")
            assert not first.member.fenced
            await store.close()

    run(body)


def test_a_node_on_a_reused_address_is_not_taken_for_the_old_one(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd, 0, 1) as cluster:
            first, second = cluster.nodes
            await until(lambda: len(first.states()) == 2 and not any(node.member.fenced for node in cluster.nodes))
            await second.die()
            cluster.add(2, address="10.0.0.1:7401")
            await until(lambda: len(first.states()) == 3)
            assert (first.target(1).state, first.target(1).data) == (DOWN, ())
            assert first.target(2).data == ("10.0.0.1:7401",)

    run(body)


def test_a_view_that_nobody_understands_leaves_the_last_one(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd, 0) as cluster:
            (node,) = cluster.nodes
            await cluster.settled(t0=SERVING)
            last = node.view
            store = cluster.open_store()
            await store.put(VIEW_NAME, '{"epoch":99,"of":"the future"}')
            await until(lambda: "upgrade" in node.member.failure or "lacks" in node.member.failure)
            assert node.view == last
            await store.put(VIEW_NAME, encode_view(replace(last, epoch=100)))
            await store.close()
            await until(lambda: node.view.epoch >= 100 and not node.member.fenced)

    run(body)


def test_the_policy_of_copies_reaches_every_view(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd, 0, 1) as cluster:
            await until(lambda: all(len(node.states()) == 2 for node in cluster.nodes))
            store = cluster.open_store()
            wanted = ReplicaPolicy(copies=2, head_copies=3, head_runs=2)
            await store.put(REPLICAS_NAME, encode(wanted.to_plain()))
            await until(lambda: all(node.view.replicas == wanted for node in cluster.nodes))
            await store.put(REPLICAS_NAME, '{"copies": 17}')  # makes no sense: nothing changes, and nobody stops
            await store.put(document_name(Document.TENANT, "größe/1"), "{}")
            image = await store.load()
            assert documents_of(image.entries, Document.TENANT) == {"größe/1": "{}"}
            await store.close()
            cluster.add(2)
            await until(lambda: all(len(node.states()) == 3 for node in cluster.nodes))
            assert all(node.view.replicas == wanted for node in cluster.nodes)

    run(body)


def test_epochs_grow_over_a_store_that_lost_its_newest_views(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd, 0) as cluster:
            (node,) = cluster.nodes
            await cluster.settled(t0=SERVING)
            known = replace(node.view, epoch=node.view.epoch + 40)
            second = cluster.add(1, known=known)
            await until(lambda: len(node.states()) == 2 and not second.member.fenced)
            assert node.view.epoch > known.epoch

    run(body)


def test_a_view_that_somebody_took_back_is_raised_again(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd, 0) as cluster:
            (node,) = cluster.nodes
            await cluster.settled(t0=SERVING)
            newest = node.view.epoch
            store = cluster.open_store()
            await store.put(VIEW_NAME, encode_view(replace(node.view, epoch=1)))
            await until(lambda: node.view.epoch > newest)
            await store.delete(VIEW_NAME)
            await until(lambda: node.view.epoch > newest + 1)
            await store.close()

    run(body)


def test_a_target_that_is_registered_no_more_is_down_at_once(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd, 0, 1, ttl_ns=60 * SECOND_NS) as cluster:
            first, second = cluster.nodes
            await until(lambda: len(first.states()) == 2 and not second.member.fenced)
            second.member.register([])
            await until(lambda: first.states()["t1"] is DOWN and second.member.fenced)
            second.member.register([registration(1)])
            await until(lambda: first.states()["t1"] is SERVING and not second.member.fenced)

    run(body)


def test_a_view_of_another_cluster_is_forgotten(shared_etcd: EtcdProcess) -> None:
    async def body() -> None:
        async with cluster_on(shared_etcd) as cluster:
            foreign = View(epoch=1_000, node_id="", targets=(), cluster="another")
            node = cluster.add(0, known=foreign)
            await cluster.settled(t0=SERVING)
            assert node.view.epoch < 1_000

    run(body)


@pytest.mark.parametrize("wiped", [False, True], ids=["restarted", "came back empty"])
def test_all_of_etcd_is_lost_and_comes_back(tmp_path_factory: pytest.TempPathFactory, wiped: bool) -> None:
    async def body() -> None:
        async with cluster_on(etcd, 0, 1, 2, ttl_ns=5 * SECOND_NS) as cluster:
            await until(lambda: all(len(node.states()) == 3 for node in cluster.nodes))
            await until(lambda: not any(node.member.fenced for node in cluster.nodes))
            last = {node.id: node.view for node in cluster.nodes}
            seen = {node.id: len(node.views) for node in cluster.nodes}
            await asyncio.to_thread(etcd.kill_all)
            await until(lambda: all(node.member.fenced for node in cluster.nodes))
            for node in cluster.nodes:
                assert node.view == last[node.id]
                assert node.member.failure
            await asyncio.to_thread(etcd.wipe if wiped else etcd.restart_all)
            await until(lambda: not any(node.member.fenced for node in cluster.nodes))
            await until(lambda: len({node.view.epoch for node in cluster.nodes}) == 1)
            for node in cluster.nodes:
                assert node.view.epoch >= last[node.id].epoch
                for view in (*node.views[seen[node.id] :], node.view):
                    states = {target.id: target.state for target in view.targets}
                    assert states.keys() == {"t0", "t1", "t2"}
                    assert DOWN not in states.values()  # nobody lost a run by it

    with EtcdProcess(tmp_path_factory.mktemp("etcd")) as etcd:
        run(body)

"""Nodes with two network cards: both are used, and one that is dead costs bandwidth, never a read.

Each card is a network of its own; clients and nodes reach each other by both, etcd is on the first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.testing.cluster_lab import ClusterLab, LabOptions, until
from kvstore.types.results import Exists, Hit, Stored
from kvstore_bench.chains import Chains, ChainShape, content_of
from kvstore_bench.traffic import Traffic
from kvstore_client import AsyncKVClient, KVClient
from tests.manynodes.filled_cluster import Cluster, filled

SEED = 2
DEADLINE_S = 4.0  # half of it, or a second, may go by the dead rail; a busy machine may stall for another second
SLACK_S = 1.5
VICTIM = "n1"
READS = 60


@pytest.fixture(scope="module", params=["one worker", "by default"])
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """By default each card is the rail of a worker with a drive of its own."""
    folder = tmp_path_factory.mktemp("rails")
    options = LabOptions(rails=2)
    if request.param == "by default":
        options = LabOptions(rails=2, workers=0, drives=2, capacity="128MiB")
    lab = ClusterLab(folder, nodes=2, in_namespaces=True, options=options)
    with filled(lab, Chains(count=4, seed=SEED, shape=ChainShape(tokens=8_192, runs=8))) as made:
        yield made


def silent_first(lab: ClusterLab, *, is_dead: bool) -> None:
    """Nothing passes between clients and the victim by its first rail, without a word."""
    assert lab.net is not None
    place = lab.nodes[VICTIM].place
    assert place is not None
    (lab.net.block if is_dead else lab.net.unblock)(place, [lab.net.outside[0]])


def no_second_cable(lab: ClusterLab, *, is_dead: bool) -> None:
    """Nobody hears from the victim by its second rail."""
    assert lab.net is not None
    place = lab.nodes[VICTIM].place
    assert place is not None
    (lab.net.cut if is_dead else lab.net.mend)(place, rail=1)


def uses_all_rails(client: KVClient) -> bool:
    """Whether the client takes no address of any target for dead, and has a connection by each."""
    core = client.session().core
    links = [core.link(target) for target in core.target_ids()]
    return all(
        not link.rests(address) and address in link.used_addresses() for link in links for address in link.addresses
    )


def test_each_node_is_reached_by_both_rails(cluster: Cluster) -> None:
    view = cluster.lab.view(VICTIM)
    assert view is not None
    for target in view.targets:
        place = cluster.lab.nodes[target.node_id].place
        assert place is not None
        assert sorted(address.rpartition(":")[0] for address in target.data) == sorted(place.addresses)


@pytest.mark.parametrize("fail", [silent_first, no_second_cable])
def test_a_dead_rail_costs_no_read(cluster: Cluster, fail: Callable[..., None]) -> None:
    lab, chains = cluster.lab, cluster.chains
    with Traffic(cluster.client, chains, seed=SEED, deadline_s=DEADLINE_S) as traffic:
        until(lambda: uses_all_rails(cluster.client), "all rails of all nodes are used")
        fail(lab, is_dead=True)
        try:
            struck_s = time.monotonic()
            until(lambda: len(traffic.ended_since(struck_s, "get")) >= READS, "reads go on")
            with KVClient.connect(lab.data_addresses()) as fresh:
                assert chains.read(fresh).share == 1.0, "who comes while the rail is dead reads all"
        finally:
            fail(lab, is_dead=False)
    failed = [call for call in traffic.calls if call.reasons]
    assert not failed, f"seed {SEED}: {failed[:5]}; {cluster.client.stats()}"
    late = [call for call in traffic.calls if call.seconds > DEADLINE_S + SLACK_S]
    assert not late, f"seed {SEED}: past the deadline of {DEADLINE_S} s: {late}"


def test_a_client_for_tasks_reads_all_while_a_rail_is_dead(cluster: Cluster) -> None:
    lab, chains = cluster.lab, cluster.chains
    chain = chains.keys[0]
    size = chains.shape.chunk_bytes

    async def read(client: AsyncKVClient) -> set[type]:
        buffers = [bytearray(size) for _ in chain]
        outcomes = await client.namespace(chains.namespace).get_into(chain, buffers, deadline=4 * DEADLINE_S)
        for key, buffer, outcome in zip(chain, buffers, outcomes, strict=True):
            assert not isinstance(outcome, Hit) or buffer == content_of(key.digest, size), f"seed {SEED}: wrong bytes"
        return {type(one) for one in outcomes}

    async def work() -> None:
        async with await AsyncKVClient.connect(lab.data_addresses()) as client:
            assert await read(client) == {Hit}
            for fail in (silent_first, no_second_cable):
                fail(lab, is_dead=True)
                try:
                    for _ in range(3):
                        assert await read(client) == {Hit}, fail.__name__
                    async with await AsyncKVClient.connect(lab.data_addresses()) as fresh:
                        assert await read(fresh) == {Hit}, "who comes while the rail is dead"
                finally:
                    fail(lab, is_dead=False)

    asyncio.run(work())


def test_single_reads_of_a_lone_node_outlive_a_rail(tmp_path: Path) -> None:
    """What has the shortest way elsewhere: one chunk, of the only node."""
    with ClusterLab(tmp_path, nodes=(VICTIM,), store="file", in_namespaces=True, options=LabOptions(rails=2)) as lab:
        chains = Chains(count=1, seed=SEED, shape=ChainShape(tokens=512, runs=8))
        (chain,) = chains.keys
        with KVClient.connect(lab.data_addresses()) as client:
            until(lambda: all(isinstance(one, Stored | Exists) for one in chains.put(client)), "the node serves")
            bound = client.namespace(chains.namespace)

            def is_hit(at: int) -> bool:
                (outcome,) = chains.read_chain(bound, chain[at : at + 1], deadline=DEADLINE_S)
                return isinstance(outcome, Hit)

            for fail in (silent_first, no_second_cable):
                until(lambda: is_hit(0) and uses_all_rails(client), "both rails are used")
                fail(lab, is_dead=True)
                assert all(map(is_hit, range(len(chain)))), f"{fail.__name__}: {client.stats()}"
                fail(lab, is_dead=False)

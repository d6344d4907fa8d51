"""Eight nodes, one more, and one less: what a cluster keeps of its prefixes when its size changes.

The tests of this module share one cluster and run in their order; each leaves eight nodes behind.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.cluster.placement import Ranking
from kvstore.cluster.view import TargetState, View
from kvstore.limits import DIGEST_BYTES
from kvstore.testing.cluster_lab import ClusterLab, LabOptions, until
from kvstore.types.results import Hit
from kvstore_bench.chains import Chains, ChainShape
from kvstore_bench.traffic import Traffic
from tests.manynodes.filled_cluster import Cluster, filled

SEED = 56
NODES = 8
CHAINS = 120
SHAPE = ChainShape(tokens=32_768, chunk_tokens=512, chunk_bytes=4096, runs=4)
SINGLES = ChainShape(tokens=2_048, chunk_tokens=1, chunk_bytes=512, runs=2_048)
DEADLINE_S = 2.0
SLACK_S = 1.5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = LabOptions(drain_timeout="5s")
    lab = ClusterLab(tmp_path_factory.mktemp("scale"), nodes=NODES, etcd_members=3, options=options)
    with filled(lab, Chains(count=CHAINS, seed=SEED, shape=SHAPE)) as made:
        yield made


def digests_of(chains: Chains) -> bytes:
    return b"".join(key.digest for chain in chains.keys for key in chain)


def held_by(lab: ClusterLab, chains: Chains, name: str) -> NDArray[np.bool_]:
    """Which chunks lie on a node, chain after chain; asked of the node itself."""
    blob, step = digests_of(chains), 1_024 * DIGEST_BYTES
    answers = [lab.lookup(name, chains.namespace.digest, blob[at : at + step]) for at in range(0, len(blob), step)]
    assert all(answer is not None for answer in answers), f"node {name} does not answer"
    statuses = np.frombuffer(b"".join(answer for answer in answers if answer is not None), np.uint8)
    return np.equal(statuses, 0)


def first_places(view: View, chains: Chains) -> list[str]:
    """Node of the first place of each run, in the newest placement."""
    nodes = {target.id: target.node_id for target in view.targets}
    ranking = Ranking.of(view)
    return [nodes[ranking.ids[at]] for at in ranking.rank_batch(b"".join(chains.run_heads()), 1)[:, 0]]


def view_of(cluster: Cluster) -> View:
    view = cluster.lab.view("n0")
    assert view is not None
    return view


def load_ratio(counts: Mapping[str, int]) -> float:
    return max(counts.values()) * len(counts) / sum(counts.values())


def test_load_is_even(cluster: Cluster) -> None:
    singles = Chains(count=2, seed=SEED + 1, shape=SINGLES, model="singles")
    singles.put_all(cluster.client)
    counts = {name: int(held_by(cluster.lab, singles, name).sum()) for name in cluster.lab.nodes}
    assert load_ratio(counts) <= 1.3, f"seed {SEED}: {counts}"


def test_one_of_eight_that_is_dead_costs_at_most_two_eighths(cluster: Cluster) -> None:
    lab, chains, victim = cluster.lab, cluster.chains, "n3"
    assert chains.usable(cluster.client).share == 1.0
    held_elsewhere = np.zeros(len(digests_of(chains)) // DIGEST_BYTES, bool)
    for name in lab.nodes:
        if name != victim:
            held_elsewhere |= held_by(lab, chains, name)
    with Traffic(cluster.client, chains, seed=SEED, deadline_s=DEADLINE_S) as traffic:
        lab.stop(victim)  # worse than dead: its connections stay open, and nobody answers
        at_once = chains.usable(cluster.client, deadline=DEADLINE_S)
        assert at_once.share >= 1 - 2 / NODES, f"seed {SEED}"
        lab.wait_state(victim, TargetState.DOWN)
        known_s = time.monotonic()
        until(lambda: len(traffic.ended_since(known_s, "get", "match")) >= 50, "traffic goes on")
        settled_s = time.monotonic()
        settled = chains.usable(cluster.client, deadline=DEADLINE_S)
        assert settled.share >= 1 - 2 / NODES, f"seed {SEED}"
        bound = cluster.client.namespace(chains.namespace)
        hits = [isinstance(one, Hit) for chain in chains.keys for one in chains.read_chain(bound, chain)]
        assert np.array_equal(np.array(hits), held_elsewhere), "what lies on live targets is read, all of it"
        lab.cont(victim)
        lab.wait_settled()
        until(lambda: chains.usable(cluster.client).share == 1.0, "all is there again")
    late = [call for call in traffic.calls if call.seconds > DEADLINE_S + SLACK_S]
    assert not late, f"seed {SEED}: past the deadline of {DEADLINE_S} s: {late}"
    waited = [call for call in traffic.ended_since(settled_s, "get", "match") if call.seconds >= DEADLINE_S]
    assert not waited, f"seed {SEED}: calls that waited for a node that is known to be dead: {waited}"


def test_a_ninth_node_costs_no_prefix_and_takes_its_share(cluster: Cluster) -> None:
    lab, chains = cluster.lab, cluster.chains
    before = first_places(view_of(cluster), chains)
    with Traffic(cluster.client, chains, seed=SEED + 2, deadline_s=DEADLINE_S) as traffic:
        lab.add("n8")
        lab.wait_settled()
        assert chains.usable(cluster.client).share >= 0.99, f"seed {SEED}: at once"
        after = first_places(view_of(cluster), chains)
        moved = [new for old, new in zip(before, after, strict=True) if old != new]
        assert set(moved) == {"n8"}, "runs move to the new node alone"
        assert 0.6 / 9 < len(moved) / len(before) < 1.5 / 9, f"seed {SEED}: {len(moved)} of {len(before)} runs"

        fresh = Chains(count=1, seed=SEED + 3, shape=SINGLES, model="fresh")
        fresh.put_all(cluster.client)
        counts = {name: int(held_by(lab, fresh, name).sum()) for name in lab.nodes}
        assert counts["n8"] <= 2 * sum(counts.values()) / 9, f"seed {SEED}: the empty node is flooded: {counts}"
        assert load_ratio(counts) <= 1.3, f"seed {SEED}: {counts}"
    failed = [call for call in traffic.calls if call.verb != "put" and call.reasons]
    assert not failed, f"seed {SEED}: readers saw {failed[:3]}"
    assert chains.read(cluster.client).share >= 0.99


def test_what_moved_is_copied_to_its_new_place(cluster: Cluster) -> None:
    lab, chains = cluster.lab, cluster.chains
    wanted = np.repeat([name == "n8" for name in first_places(view_of(cluster), chains)], SHAPE.chunks // SHAPE.runs)

    def arrived() -> bool:
        chains.read(cluster.client)
        return bool((held_by(lab, chains, "n8") & wanted).sum() >= 0.99 * wanted.sum())

    until(arrived, f"seed {SEED}: {wanted.sum()} chunks lie where the newest placement says")
    assert chains.usable(cluster.client).share >= 0.99, f"seed {SEED}: after settling"


def test_a_drained_node_leaves_without_a_reader_noticing(cluster: Cluster) -> None:
    lab, chains = cluster.lab, cluster.chains
    with Traffic(cluster.client, chains, seed=SEED + 4, deadline_s=DEADLINE_S) as traffic:
        done = lab.drain("n8")
        assert done.returncode == 0, done.stderr
        until(lambda: lab.states("n0").get("n8") is not TargetState.SERVING, "it takes no new keys")
        assert chains.usable(cluster.client).share >= 0.99, f"seed {SEED}: while it drains"
        lab.terminate("n8")
        assert lab.wait_exit("n8") == 0, lab.log("n8")
        until(lambda: "n8" not in lab.states("n0"), "it has left the view")
        assert chains.usable(cluster.client).share >= 0.99, f"seed {SEED}: at once"
    failed = [call for call in traffic.calls if call.verb != "put" and call.reasons]
    assert not failed, f"seed {SEED}: {len(failed)} of {len(traffic.calls)} reads failed: {failed[:3]}"
    lab.wait_settled()
    assert chains.read(cluster.client).share >= 0.99, f"seed {SEED}: after settling"

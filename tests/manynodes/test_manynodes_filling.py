"""Drives of unequal size, drives that are full, and an empty one that joins them.

The tests with `full` share one cluster and run in their order: its drives have been written more than they hold.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.testing.cluster_lab import ClusterLab, until
from kvstore.types.keys import KeyChain
from kvstore.types.results import Hit, MissReason, Stored
from kvstore_bench.chains import Chains, ChainShape
from kvstore_client import KVClient

SEED = 55
SIZES = {"n0": 1, "n1": 4, "n2": 4, "n3": 8}
CAPACITY_MIB = 64
SINGLES = ChainShape(tokens=4_096, chunk_tokens=1, chunk_bytes=512, runs=4_096)
WRITES = ChainShape(tokens=1_000, chunk_tokens=1, chunk_bytes=16_384, runs=1_000)
LARGE = ChainShape(tokens=4_096, chunk_tokens=64, chunk_bytes=65_536, runs=8)
FILL_CHAINS = 80
RANKS = 4
RANK_TURNS = 3
AHEAD_CHAINS = 4  # may go before all ranks have asked
PRESSED_CHAINS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    lab: ClusterLab
    client: KVClient
    chains: Chains


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Full]:
    """Four equal drives after writes of 1.25 times what they hold."""
    with ClusterLab(tmp_path_factory.mktemp("full"), nodes=4) as lab:
        lab.wait_settled()
        with KVClient.connect(lab.data_addresses()) as client:
            chains = Chains(count=FILL_CHAINS, seed=SEED, shape=LARGE)
            chains.put_all(client)
            yield Full(lab=lab, client=client, chains=chains)


def counts_of(lab: ClusterLab, chains: Chains) -> dict[str, int]:
    """How many chunks each node holds; asked of the nodes themselves."""
    keys = [key.digest for chain in chains.keys for key in chain]
    counts = {}
    for name in lab.running():
        found = [
            lab.lookup(name, chains.namespace.digest, b"".join(keys[at : at + 1_024]))
            for at in range(0, len(keys), 1_024)
        ]
        assert None not in found, f"node {name} does not answer"
        counts[name] = sum(answer.count(0) for answer in found if answer is not None)
    return counts


def load_ratio(counts: Mapping[str, int], sizes: Mapping[str, int]) -> float:
    """Load of the target that has most for its size, over the mean."""
    loads = {name: counts[name] / sizes[name] for name in counts}
    return max(loads.values()) / (sum(counts.values()) / sum(sizes[name] for name in counts))


def test_unequal_drives_are_loaded_by_their_size(tmp_path: Path) -> None:
    with ClusterLab(tmp_path, nodes=()) as lab:
        for name, size in SIZES.items():
            lab.add(name, "--capacity", f"{size * CAPACITY_MIB}MiB")
        lab.wait_settled()
        singles = Chains(count=1, seed=SEED, shape=SINGLES, model="singles")
        with KVClient.connect(lab.data_addresses()) as client:
            singles.put_all(client)
        counts = counts_of(lab, singles)
        assert load_ratio(counts, SIZES) <= 1.3, f"seed {SEED}: {counts}"


def test_full_drives_take_what_is_new_and_give_up_what_is_old(full: Full) -> None:
    found = full.chains.usable(full.client)
    assert found.tokens[0] < LARGE.tokens, "more was written than there is room for"
    newest = found.tokens[-FILL_CHAINS // 4 :]
    assert newest == (LARGE.tokens,) * len(newest), f"seed {SEED}: {found.tokens}"
    assert set(full.chains.read(full.client).failures) <= {str(MissReason.EVICTED)}


def test_an_empty_drive_is_not_flooded_by_full_ones(full: Full) -> None:
    lab = full.lab
    lab.add("n4")
    lab.wait_settled()
    full.client.refresh()
    fresh = Chains(count=1, seed=SEED + 1, shape=WRITES, model="fresh")
    outcomes = fresh.put(full.client, deadline=2.0)
    assert all(isinstance(one, Stored) for one in outcomes), "none was refused or late"
    counts = counts_of(lab, fresh)
    assert 0 < counts["n4"] <= 2 * sum(counts.values()) / 5, f"seed {SEED}: {counts}"
    assert load_ratio(counts, dict.fromkeys(counts, 1)) <= 1.3, f"seed {SEED}: {counts}"


@contextmanager
def pressure(lab: ClusterLab, seed: int) -> Iterator[list[int]]:
    """Somebody writes all the while; what is yielded grows by one for each chain that was written."""
    written: list[int] = []
    end = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            with KVClient.connect(lab.data_addresses()) as client:
                while not end.is_set():
                    Chains(count=1, seed=seed + len(written), shape=LARGE, model="pressure").put(client)
                    written.append(1)
        except BaseException as error:  # noqa: BLE001 -- a thread's root: it is raised below
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield written
    finally:
        end.set()
        thread.join()
    assert not failures, failures


def soon_to_go(full: Full) -> KeyChain:
    """Writes all chains once more, so that some are there whatever went before; the one that goes next but a few."""
    full.chains.put_all(full.client)
    tokens = full.chains.usable(full.client).tokens
    whole = [at for at, found in enumerate(tokens) if found == LARGE.tokens]
    return full.chains.keys[whole[AHEAD_CHAINS]]


@pytest.mark.parametrize("turn", range(RANK_TURNS))
def test_ranks_that_ask_together_hold_what_is_about_to_go(full: Full, turn: int) -> None:
    """Four ranks ask for the oldest chain while others push it out; they are told one length, and read all of it."""
    lab, chains = full.lab, full.chains
    answers: list[tuple[int, bool]] = []
    failures: list[BaseException] = []
    all_have_asked = threading.Barrier(RANKS)
    chain = soon_to_go(full)

    def ask(written: list[int]) -> None:
        try:
            with KVClient.connect(lab.data_addresses()) as client:
                bound = client.namespace(chains.namespace)
                with bound.match(chain, group=f"evicted {turn:08}".encode()) as match:
                    answers.append((match.chunks, match.pinned))
                    all_have_asked.wait(timeout=30)
                    known = len(written)
                    until(lambda: len(written) >= known + PRESSED_CHAINS, "others write on")
                    outcomes = chains.read_chain(bound, chain[: match.chunks]) if match.chunks else []
                    lost = {at: one for at, one in enumerate(outcomes) if not isinstance(one, Hit)}
                    assert not lost, f"of {match}, {len(written) - known} chains later: {lost}"
        except BaseException as error:  # noqa: BLE001 -- a thread's root: it is raised below
            failures.append(error)
            all_have_asked.abort()

    with pressure(lab, SEED + 1_000 * (turn + 1)) as written:
        until(lambda: bool(written), "others write")
        threads = [threading.Thread(target=ask, args=(written,)) for _ in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    assert len(set(answers)) == 1, f"seed {SEED}, turn {turn}: {answers}"
    chunks, is_pinned = answers[0]
    assert chunks, f"seed {SEED}, turn {turn}: it went before anybody asked"
    assert is_pinned

"""Many clients at once: all are served, none runs out of ports, and those that ask together get one answer."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvstore.testing.cluster_lab import ClusterLab
from kvstore.types.results import Hit
from kvstore_bench.chains import Chains, ChainShape, content_of
from kvstore_client import KVClient
from tests.manynodes.filled_cluster import Cluster, filled

SEED = 36
CLIENTS = 200
PROCESSES = 8
RANKS = 4
RANK_TURNS = 8
SERVED_WITHIN_S = 10.0
LOCAL_PORTS = 100
TRANSFERS = 1_000

CROWD = """
import sys, threading, time
from kvstore_bench.chains import Chains, ChainShape
from kvstore_client import Hit, KVClient

seed, count, *addresses = sys.argv[1:]
chains = Chains(count=4, seed=int(seed), shape=ChainShape(tokens=8_192, runs=8))
start, served, faults = threading.Event(), [], []

def work(at):
    start.wait()
    began = time.monotonic()
    with KVClient.connect(addresses) as client:
        outcomes = chains.read_chain(client.namespace(chains.namespace), chains.keys[at % len(chains.keys)])
        misses = [one for one in outcomes if not isinstance(one, Hit)]
        if misses:
            faults.append(f"{len(misses)} of {len(outcomes)}: {misses[0]}; {client.stats()}")
    served.append(time.monotonic() - began)

threads = [threading.Thread(target=work, args=(at,)) for at in range(int(count))]
for thread in threads:
    thread.start()
print("ready", flush=True)
sys.stdin.readline()
start.set()
for thread in threads:
    thread.join()
assert not faults, faults
assert len(served) == int(count)
print(max(served))
"""

FEW_PORTS = """
import sys
from pathlib import Path
from kvstore_bench.chains import Chains, ChainShape
from kvstore_client import Hit, KVClient

seed, ports, transfers, *addresses = sys.argv[1:]
Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(f"40000 {40000 + int(ports) - 1}")
chains = Chains(count=4, seed=int(seed), shape=ChainShape(tokens=8_192, runs=8))
with KVClient.connect(addresses) as client:
    bound = client.namespace(chains.namespace)
    for at in range(int(transfers)):
        chain = chains.keys[at % len(chains.keys)]
        outcomes = chains.read_chain(bound, chain[at % 100 : at % 100 + 16])
        assert all(isinstance(one, Hit) for one in outcomes), (at, outcomes)
print("done")
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    lab = ClusterLab(tmp_path_factory.mktemp("crowd"), nodes=3, in_namespaces=True)
    with filled(lab, Chains(count=4, seed=SEED, shape=ChainShape(tokens=8_192, runs=8))) as made:
        yield made


def together(count: int, work: Callable[[int], None]) -> None:
    """`count` threads that begin at one moment; raises what the first of them raised."""
    failures: list[BaseException] = []
    start = threading.Barrier(count)

    def run(at: int) -> None:
        try:
            start.wait()
            work(at)
        except BaseException as error:  # noqa: BLE001 -- a thread's root: it is raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_two_hundred_clients_that_come_at_once_are_all_served(cluster: Cluster) -> None:
    """Each is a client of its own, with its own connections and identity: threads of a few processes."""
    command = [sys.executable, "-c", CROWD, str(SEED), str(CLIENTS // PROCESSES), *cluster.lab.data_addresses()]
    with ExitStack() as stack:
        crowd = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(PROCESSES)
        ]
        for process in crowd:
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        began_s = time.monotonic()
        for process in crowd:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        longest_s = [float(process.communicate(timeout=60)[0]) for process in crowd]
        took_s = time.monotonic() - began_s
    assert max(longest_s) <= SERVED_WITHIN_S, f"the last one after {max(longest_s):.1f} s"
    assert took_s <= 2 * SERVED_WITHIN_S


def test_a_client_with_few_ports_does_not_use_them_up(cluster: Cluster) -> None:
    lab = cluster.lab
    assert lab.net is not None
    place = lab.net.add("narrow")
    arguments = ("-c", FEW_PORTS, str(SEED), str(LOCAL_PORTS), str(TRANSFERS), *lab.data_addresses())
    done = subprocess.run(lab.command_in(place, *arguments), capture_output=True, text=True, timeout=100)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("turn", range(RANK_TURNS))
def test_ranks_that_ask_together_get_one_pinned_answer_while_the_prefix_grows(cluster: Cluster, turn: int) -> None:
    """Four ranks with a client each ask while the chunks behind the prefix are put."""
    addresses = cluster.lab.data_addresses()
    chains = Chains(count=1, seed=SEED + 100 + turn, shape=ChainShape(tokens=1_024, runs=4), model="ranks")
    (chain,) = chains.keys
    written = len(chain) // 2
    payloads = [content_of(key.digest, chains.shape.chunk_bytes) for key in chain]
    answers: list[tuple[int, bool]] = []
    all_have_asked = threading.Barrier(RANKS)

    def work(at: int) -> None:
        with KVClient.connect(addresses) as client:
            bound = client.namespace(chains.namespace)
            if at == RANKS:
                bound.put(chain[written:], payloads[written:])
                return
            with bound.match(chain, group=f"request {turn:08}".encode()) as match:
                answers.append((match.chunks, match.pinned))
                all_have_asked.wait(timeout=30)
                outcomes = chains.read_chain(bound, chain[: match.chunks])
                assert all(isinstance(one, Hit) for one in outcomes), outcomes

    with KVClient.connect(addresses) as client:
        client.namespace(chains.namespace).put(chain[:written], payloads[:written])
    together(RANKS + 1, work)
    assert len(set(answers)) == 1, f"seed {SEED}, turn {turn}: {answers}"
    chunks, is_pinned = answers[0]
    assert is_pinned
    assert chunks >= written

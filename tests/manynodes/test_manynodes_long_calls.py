"""Clients that do one thing for long (case 38): a read of fifteen seconds, and 1 GiB of memory that nodes map. Nobody
is taken for dead meanwhile, and what they hold stays theirs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

from kvstore.cluster.view import PLACED_STATES
from kvstore.limits import GiB
from kvstore.testing.cluster_lab import ClusterLab, LabOptions, until
from kvstore.testing.metrics_page import metric
from kvstore.types.results import Exists, Hit, Stored
from kvstore_bench.chains import Chains, ChainShape, content_of
from kvstore_bench.traffic import Traffic
from kvstore_client import KVClient

SEED = 3_800
LEASE_S = 10
READ_S = 15
RATE_BYTES_S = 1_000_000
CHUNK_BYTES = 65_536
LONG = ChainShape(
    tokens=READ_S * RATE_BYTES_S // CHUNK_BYTES, chunk_tokens=1, chunk_bytes=CHUNK_BYTES, runs=1
)  # what the card of its node lets through in so long
SHAPE = ChainShape(tokens=4_096, runs=8)
SHORT_LEASE_S = 2
DEADLINE_S = 2.0
SLACK_S = 1.5

REGISTERS = """
import json, sys, threading
from kvstore_bench.chains import Chains, ChainShape, content_of
from kvstore_client import Hit, KVClient, Stored

seed, length, *addresses = sys.argv[1:]
shape = ChainShape(tokens=4_096, runs=8)
chains = Chains(count=2, seed=int(seed), shape=shape)
mine = Chains(count=1, seed=int(seed) + 1, shape=shape, model="mine")
end, faults, reads = threading.Event(), [], []


def goes_on():
    try:
        while not end.is_set():
            reads.append(all(isinstance(one, Hit) for one in chains.read_chain(bound, chains.keys[0])))
    except BaseException as error:
        faults.append(repr(error))


with KVClient.connect(addresses, transport="shm") as client:
    bound, own = client.namespace(chains.namespace), client.namespace(mine.namespace)
    size, part = shape.chunk_bytes, mine.keys[0][:4]
    held = bound.match(chains.keys[1], pin_ttl=60.0)
    writer = own.writer(part, ttl=60.0)
    thread = threading.Thread(target=goes_on)
    thread.start()
    memory = client.alloc(int(length), prefault=True)
    keys = chains.keys[1]
    places = [memory[at * size : (at + 1) * size] for at in range(len(keys))]
    step = len(memory) // len(keys) // size * size
    places[1:] = [memory[at * step : at * step + size] for at in range(1, len(keys))]
    outcomes = bound.get_into(keys, places, deadline=30)
    right = [isinstance(one, Hit) and place == content_of(key.digest, size)
             for key, place, one in zip(keys, places, outcomes)]
    for at in range(len(part)):
        writer.write(at, content_of(part[at].digest, size))
    committed = [type(one).__name__ for one in writer.commit()]
    end.set()
    thread.join()
    print(json.dumps({"right": sum(right), "all": len(keys), "pinned": held.pinned, "committed": committed,
                      "reads": reads.count(True), "failed_reads": reads.count(False), "faults": faults}), flush=True)
    sys.stdin.readline()
    held.release()
    del places, memory
"""


def test_a_read_longer_than_the_lease_ends_well_and_its_node_stays_a_member(tmp_path: Path) -> None:
    """Signs of life of the node go by the same card as the payload, whose queue is full all the time."""
    options = LabOptions(capacity="256MiB", staging="64MiB", lease_ttl=f"{LEASE_S}s")
    with ClusterLab(tmp_path, nodes=2, etcd_members=1, in_namespaces=True, options=options) as lab:
        lab.wait_settled()
        assert lab.net is not None
        chains = Chains(count=1, seed=SEED, shape=LONG)
        with KVClient.connect(lab.data_addresses()) as client:
            chains.put_all(client)
            chain = chains.keys[0]
            name = next(
                one for one in lab.nodes if lab.lookup(one, chains.namespace.digest, chain.digests[:32]) == b"\0"
            )
            other = next(one for one in lab.nodes if one != name)
            before = lab.target_of(name)
            place = lab.nodes[name].place
            assert place is not None
            for one in lab.nodes.values():  # whichever copy is read
                assert one.place is not None
                lab.net.limit(one.place, bytes_per_s=RATE_BYTES_S)
            memory = [bytearray(CHUNK_BYTES) for _ in chain]
            outcomes: list[object] = []
            bound = client.namespace(chains.namespace)
            thread = threading.Thread(target=lambda: outcomes.extend(bound.get_into(chain, memory, deadline=60.0)))
            began_s = time.monotonic()
            thread.start()
            while thread.is_alive():
                assert all(state in PLACED_STATES for state in lab.states(other).values()), "nobody is called dead"
                thread.join(0.5)
            assert time.monotonic() - began_s > LEASE_S, "it was no long read"
            misses = {at: one for at, one in enumerate(outcomes) if not isinstance(one, Hit)}
            assert not misses, f"{misses}; {client.stats()}"
            assert len(outcomes) == len(chain)
            assert all(memory[at] == content_of(key.digest, CHUNK_BYTES) for at, key in enumerate(chain))
            assert client.stats()["breaker_opened"] == 0
        assert lab.target_of(name).boot_id == before.boot_id


def test_a_client_that_registers_a_gibibyte_keeps_what_it_holds_and_hurts_nobody(tmp_path: Path) -> None:
    options = LabOptions(capacity="256MiB", lease_ttl=f"{SHORT_LEASE_S}s")
    with ClusterLab(tmp_path, nodes=2, etcd_members=1, options=options) as lab:
        lab.wait_settled()
        chains = Chains(count=2, seed=SEED, shape=SHAPE)
        before = {name: lab.target_of(name).boot_id for name in lab.nodes}
        with KVClient.connect(lab.data_addresses()) as client:
            chains.put_all(client)
            with Traffic(client, chains, seed=SEED, deadline_s=DEADLINE_S) as traffic:
                until(lambda: len(traffic.calls) >= 10, "traffic runs")
                arguments = (str(SEED), str(GiB), *lab.data_addresses())
                with subprocess.Popen(
                    [sys.executable, "-c", REGISTERS, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                ) as process:
                    assert process.stdout is not None
                    found = json.loads(process.stdout.readline())
                    mapped = [metric(one.addresses, "kvstore_shared_memory_bytes") for one in lab.nodes.values()]
                    assert lab.is_settled(), "nobody was called dead"
                    process.communicate("end\n", timeout=60)
                traffic.check()
                late = [call for call in traffic.calls if call.seconds > DEADLINE_S + SLACK_S]
            fresh = Chains(count=1, seed=SEED + 7, shape=SHAPE, model="afterwards")
            assert all(isinstance(one, Stored | Exists) for one in fresh.put(client))
        assert max(mapped) >= GiB, "it was registered"
        assert found["faults"] == [], "a wrong byte, or an exception that no call may raise"
        assert (found["right"], found["failed_reads"]) == (found["all"], 0)
        assert found["reads"] > 0, "its other calls went on"
        assert found["pinned"]
        assert set(found["committed"]) == {"Stored"}
        assert not late, f"past the deadline of {DEADLINE_S} s: {late}"
        assert {name: lab.target_of(name).boot_id for name in lab.nodes} == before

"""Processes that live and do nothing for longer than every lease, grant and pin (case 38): a worker that is too busy, a
client that holds the GIL, a client that is stopped. Nothing is wrong afterwards, and nobody has to be restarted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvstore.cluster.view import PLACED_STATES
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.testing.cluster_lab import ClusterLab, LabOptions, until
from kvstore_bench.chains import Chains, ChainShape
from kvstore_bench.traffic import Traffic
from kvstore_client import KVClient
from tests.manynodes.filled_cluster import Cluster, filled

SEED = 38
STALL_S = 12
LEASE_S = 2
TTL_S = 4
DEADLINE_S = 2.0
SLACK_S = 1.5
SHAPE = ChainShape(tokens=4_096, runs=8)

STALLED = """
import ctypes, json, sys, threading, time
from kvstore_bench.chains import Chains, ChainShape, content_of
from kvstore_client import Exists, Hit, KVClient, Refused, Stored

how, seed, stall, ttl, *addresses = sys.argv[1:]
shape = ChainShape(tokens=4_096, runs=8)
chains = Chains(count=3, seed=38, shape=shape)
mine = Chains(count=2, seed=int(seed), shape=shape, model="mine")
end, faults, written, reads = threading.Event(), [], [], []


def guard(work):
    try:
        while not end.wait(0.02):
            work()
    except BaseException as error:
        faults.append(repr(error))


with KVClient.connect(addresses) as client:
    bound, own = client.namespace(chains.namespace), client.namespace(mine.namespace)

    def read():
        reads.append(chains.read_chain(bound, chains.keys[0]))

    def write():
        (chain,) = Chains(count=1, seed=int(seed) + len(written) + 1, shape=shape, model="busy").keys
        busy = client.namespace(Chains(count=1, seed=1, shape=shape, model="busy").namespace)
        payloads = [content_of(key.digest, shape.chunk_bytes) for key in chain]
        outcomes = busy.put(chain, payloads, deadline=3)
        written.append((busy, chain, [isinstance(one, Stored | Exists) for one in outcomes]))

    threads = [threading.Thread(target=guard, args=(work,)) for work in (read, write)]
    held = bound.match(chains.keys[1], pin_ttl=float(ttl))
    part = mine.keys[0][:4]
    writer = own.writer(part, ttl=float(ttl))
    writer.write(0, content_of(part[0].digest, shape.chunk_bytes))
    for thread in threads:
        thread.start()
    while not (reads and written):
        time.sleep(0.01)
    before = {"chunks": held.chunks, "pinned": held.pinned}
    print("stalls", flush=True)
    if how == "gil":
        ctypes.PyDLL(None).sleep(int(stall))  # a call of PyDLL keeps the GIL: no other thread of this process runs
    else:
        sys.stdin.readline()
    print("goes on", flush=True)
    sys.stdin.readline()  # the pins have run out; the very calls that were cut off have come to an end, too
    late = chains.read_chain(bound, chains.keys[1])
    committed = [type(one).__name__ for one in writer.commit()]
    held.release()
    end.set()
    for thread in threads:
        thread.join()
    with bound.match(chains.keys[1]) as again:
        after = {"chunks": again.chunks, "pinned": again.pinned}
    fresh = [type(one).__name__ for one in mine.put(client, only=[1])]
    with own.writer(part) as second:
        for at in range(len(part)):
            second.write(at, content_of(part[at].digest, shape.chunk_bytes))
        anew = [type(one).__name__ for one in second.commit()]
    kept = 0
    for busy, chain, stored in written:
        outcomes = Chains(count=1, seed=1, shape=shape, model="busy").read_chain(busy, chain)
        kept += all(isinstance(one, Hit) or not was for one, was in zip(outcomes, stored))
    print(json.dumps({
        "before": before, "after": after, "faults": faults, "late": sum(isinstance(one, Hit) for one in late),
        "committed": committed, "fresh": fresh, "anew": anew, "written": len(written), "kept": kept,
        "last_read": sum(isinstance(one, Hit) for one in chains.read_chain(bound, chains.keys[0])),
        "all": len(chains.keys[0]),
    }))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = LabOptions(capacity="256MiB", lease_ttl=f"{LEASE_S}s")
    lab = ClusterLab(tmp_path_factory.mktemp("stalls"), nodes=3, etcd_members=1, options=options)
    with filled(lab, Chains(count=3, seed=SEED, shape=SHAPE)) as made:
        yield made


def gauge(lab: ClusterLab, family: str) -> float:
    """Of all nodes together, as Prometheus sees it."""
    total = 0.0
    for node in lab.nodes.values():
        with urllib.request.urlopen(f"http://{node.addresses.metrics}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        total += sum(
            float(value) for value in re.findall(rf"^{family}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE)
        )
    return total


@contextmanager
def stalled(cluster: Cluster, how: str, seed: int) -> Iterator[subprocess.Popen[str]]:
    """A client process that has a pin, an open writer, a read and a put in progress, and does nothing from now on."""
    arguments = (how, str(seed), str(STALL_S), str(TTL_S), *cluster.lab.data_addresses())
    with subprocess.Popen(
        [sys.executable, "-c", STALLED, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "stalls\n"
            if how == "stop":
                os.kill(process.pid, signal.SIGSTOP)
            yield process
        finally:
            process.kill()


def goes_on(process: subprocess.Popen[str], how: str) -> None:
    assert process.stdin is not None
    if how == "stop":
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("go on\n")
        process.stdin.flush()
    assert process.stdout is not None
    assert process.stdout.readline() == "goes on\n"


def test_clients_that_stall_beyond_every_lease_go_on_without_a_restart(cluster: Cluster) -> None:
    lab = cluster.lab
    lab.wait_settled()
    assert (gauge(lab, "kvstore_pins"), gauge(lab, "kvstore_open_writers")) == (0, 0)
    ways = ("gil", "stop")
    with ExitStack() as stack:
        processes = [stack.enter_context(stalled(cluster, how, SEED + 1_000 * at)) for at, how in enumerate(ways)]
        began_s = time.monotonic()
        until(lambda: gauge(lab, "kvstore_pins") == 0, "pins run out by themselves", seconds=TTL_S + 30)
        until(lambda: gauge(lab, "kvstore_open_writers") == 0, "so do open writers", seconds=TTL_S + 30)
        assert lab.is_settled(), "nobody else is hurt"
        while time.monotonic() < began_s + STALL_S:
            assert cluster_reads(cluster)
        for process, how in zip(processes, ways, strict=True):
            goes_on(process, how)
        told = [json.loads(process.communicate("end\n", timeout=60)[0]) for process in processes]
    for how, found in zip(ways, told, strict=True):
        count = found["all"]
        assert found["before"] == {"chunks": count, "pinned": True}, how
        assert found["faults"] == [], f"{how}: a wrong byte, or an exception that no call may raise"
        assert found["late"] == count, f"{how}: without its pin it reads what is there"
        assert set(found["committed"]) <= {"Refused"}, f"{how}: its writer has run out: {found['committed']}"
        assert found["after"] == {"chunks": count, "pinned": True}, how
        assert set(found["fresh"]) == {"Stored"}, how
        assert set(found["anew"]) <= {"Stored", "Exists"}, how
        assert found["kept"] == found["written"], f"{how}: what was acknowledged is there"
        assert found["last_read"] == count, how
    until(lambda: gauge(lab, "kvstore_pins") == 0, "nothing is left of them")
    until(lambda: gauge(lab, "kvstore_open_writers") == 0, "nothing is left of them")


def cluster_reads(cluster: Cluster) -> bool:
    with KVClient.connect(cluster.lab.data_addresses()) as client:
        return cluster.chains.read(client).share == 1.0


def test_a_worker_that_is_busy_beyond_the_lease_stays_a_member(cluster: Cluster) -> None:
    """Its supervisor renews the lease: it is not called dead, nothing is moved, and it has what it had."""
    lab = cluster.lab
    lab.wait_settled()
    before = lab.target_of("n1")
    with ControlClient(lab.nodes["n1"].addresses.grpc) as control:
        pid = control.report().workers[0].pid
    with (
        KVClient.connect(lab.data_addresses()) as client,
        Traffic(client, cluster.chains, seed=SEED, deadline_s=DEADLINE_S) as traffic,
    ):
        until(lambda: len(traffic.calls) >= 10, "traffic runs")
        os.kill(pid, signal.SIGSTOP)
        try:
            end_s = time.monotonic() + 3 * LEASE_S
            while time.monotonic() < end_s:
                assert lab.states("n0")["n1"] in PLACED_STATES
                traffic.check()
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: cluster.chains.read(client).share == 1.0, "all is there again")
        fresh = Chains(count=1, seed=SEED + 7, shape=SHAPE, model="after the stall")
        until(lambda: all(type(one).__name__ in ("Stored", "Exists") for one in fresh.put(client)), "writes reach it")
        traffic.check()
        late = [call for call in traffic.calls if call.seconds > DEADLINE_S + SLACK_S]
    assert not late, f"past the deadline of {DEADLINE_S} s: {late}"
    after = lab.target_of("n1")
    assert after.boot_id == before.boot_id, "it was never restarted"

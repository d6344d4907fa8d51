"""How a cluster's speed grows with its targets, each behind a network of a stated rate.

Every node has a network namespace whose card is limited (tc-tbf(8)), so that many of them stay below what this machine
can do; the limit is a bare sender in one of these namespaces, measured in turns with the cluster. What is read lies in
the nodes' RAM. Lookups are measured without a limit.
"""

from __future__ import annotations

import itertools
import random
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvstore.limits import KiB, MiB
from kvstore.testing.cluster_lab import ClusterLab, LabOptions
from kvstore.types.results import Hit
from kvstore_bench.chains import Chains, ChainShape
from kvstore_bench.measure import GB, Limit, Row, Sample, interleaved
from kvstore_bench.peers.sockets import touched
from kvstore_bench.processes import cpu_ns_of, descendants, own_cpu_ns
from kvstore_client import KVClient

TARGET_COUNTS: Final = (1, 2, 4, 8)
LOOKUP_TARGETS: Final = (1, 4, 16)
LOOKUP_KEYS: Final = 2_000
RATE_BYTES_S: Final = 16_000_000
_CLIENTS: Final = 4
_READERS: Final = 16
_BATCH_CHUNKS: Final = 8  # of a call, for each target: little, so that the last call of a stretch counts little
_CHUNKS: Final = 1_024  # of each target, each a run of its own: with few runs one target would have more than its share
_SETTLE_SECONDS: Final = 0.5
_MTU_BYTES: Final = 9_000
_SEED: Final = 3
_CHUNK_BYTES: Final = 64 * KiB
_BURST_BYTES: Final = 2 * MiB  # more than what waits in a limited card, and may come faster
_SENDER_PORT: Final = 5_000
_SENDER: Final = f"""
import socket
listener = socket.create_server(("0.0.0.0", {_SENDER_PORT}))
data = bytes({MiB})
while True:
    near, _ = listener.accept()
    try:
        while True:
            near.sendall(data)
    except OSError:
        near.close()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long and how much."""

    pairs: int
    seconds: float
    lookups: int

    @classmethod
    def of(cls, *, quick: bool) -> Effort:
        return cls(pairs=3, seconds=1.0, lookups=60) if quick else cls(pairs=5, seconds=2.5, lookups=300)


def throughput(*, quick: bool, folder: Path) -> Iterator[Row]:
    """One row for each count of targets: the rate of gets over so many times that of one bare sender."""
    effort = Effort.of(quick=quick)
    for count in TARGET_COUNTS:
        lab_folder = folder / f"throughput-{count}"
        lab_folder.mkdir()
        options = LabOptions(capacity="256MiB", cache="192MiB", staging="64MiB")
        with ClusterLab(lab_folder, nodes=count, in_namespaces=True, options=options, mtu_bytes=_MTU_BYTES) as lab:
            lab.wait_settled()
            yield _throughput(lab, count, effort)


def lookups(*, quick: bool, folder: Path) -> Iterator[Row]:
    """One row for each count of targets: the time of one match of a long prefix, which is all there."""
    effort = Effort.of(quick=quick)
    for count in LOOKUP_TARGETS:
        lab_folder = folder / f"lookups-{count}"
        lab_folder.mkdir()
        with ClusterLab(lab_folder, nodes=count) as lab:
            lab.wait_settled()
            yield _lookups(lab, count, effort)


def _lookups(lab: ClusterLab, count: int, effort: Effort) -> Row:
    shape = ChainShape(tokens=LOOKUP_KEYS * 64, chunk_tokens=64, chunk_bytes=512, runs=125)
    chains = Chains(count=1, seed=_SEED, shape=shape, model="lookup")
    (chain,) = chains.keys
    with KVClient.connect(lab.data_addresses()) as client:
        chains.put_all(client)
        namespace = client.namespace(chains.namespace)
        took_ms = []
        client_ns, node_ns = own_cpu_ns(), _cpu_ns(lab)
        for _ in range(effort.lookups):
            began_ns = time.perf_counter_ns()
            with namespace.match(chain) as found:
                took_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
                if found.chunks != LOOKUP_KEYS:
                    raise RuntimeError(f"match found {found.chunks} of {LOOKUP_KEYS} chunks")
        client_ns, node_ns = own_cpu_ns() - client_ns, _cpu_ns(lab) - node_ns
    took_ms.sort()
    return Row(
        name=f"match of {LOOKUP_KEYS} keys, {count} target{'s' * (count > 1)}",
        unit="ms",
        value=statistics.median(took_ms),
        higher_is_better=False,
        details={
            "p90_ms": took_ms[len(took_ms) * 9 // 10],
            "min_ms": took_ms[0],
            "cpu_client_ms": client_ns / 1e6 / effort.lookups,
            "cpu_nodes_ms": node_ns / 1e6 / effort.lookups,
        },
    )


def _throughput(lab: ClusterLab, count: int, effort: Effort) -> Row:
    chunks = _CHUNKS * count
    shape = ChainShape(tokens=chunks, chunk_tokens=1, chunk_bytes=_CHUNK_BYTES, runs=chunks)
    chains = Chains(count=1, seed=_SEED, shape=shape, model="throughput")
    assert lab.net is not None
    with ExitStack() as stack:
        clients = [stack.enter_context(KVClient.connect(lab.data_addresses())) for _ in range(_CLIENTS)]
        rate_of = stack.enter_context(_bare_sender(lab))
        chains.put_all(clients[0])
        for client in clients:  # into the nodes' RAM, and every connection opened
            chains.read(client)
        for node in lab.nodes.values():
            assert node.place is not None
            lab.net.limit(node.place, bytes_per_s=RATE_BYTES_S)

        def ours() -> Sample:
            with Readers(clients, chains, batch_chunks=_BATCH_CHUNKS * count) as readers:
                readers.sample(lab, _SETTLE_SECONDS)
                return readers.sample(lab, effort.seconds)

        samples, limits = interleaved(effort.pairs, ours, lambda: rate_of(effort.seconds / 2))
    ratios = [
        sample.work_bytes / sample.seconds / limit.bytes_per_s / count
        for sample, limit in zip(samples, limits, strict=True)
    ]
    return Row(
        name=f"get, {count} target{'s' * (count > 1)} of {RATE_BYTES_S / 1e6:g} MB/s each",
        unit="of each target",
        value=statistics.median(ratios),
        must=0.9,
        aim=0.95,
        details={
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "mb_per_s": statistics.median(sample.work_bytes / sample.seconds for sample in samples) / 1e6,
            "limit_mb_per_s": statistics.median(limit.bytes_per_s for limit in limits) / 1e6,
            "cpu_s_per_gb": statistics.median(sample.cpu_s_per_gb for sample in samples),
        },
    )


class Readers:
    """Threads that each load pieces of a chain again and again, through a few clients. A context manager."""

    def __init__(self, clients: Sequence[KVClient], chains: Chains, *, batch_chunks: int) -> None:
        self._batch_chunks = batch_chunks
        self._namespaces = [client.namespace(chains.namespace) for client in clients]
        (self._chain,) = chains.keys
        self._areas = [touched(batch_chunks * _CHUNK_BYTES) for _ in range(_READERS)]
        self._done: list[int] = []
        self._failures: list[BaseException] = []
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._load, args=(at,)) for at in range(_READERS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def sample(self, lab: ClusterLab, seconds: float) -> Sample:
        """What was loaded in so many seconds; calls go on before and after. Raises what a call raised."""
        client, node = own_cpu_ns(), _cpu_ns(lab)
        before, began_s = len(self._done), time.perf_counter()
        self._end.wait(seconds)
        after, took_s = len(self._done), time.perf_counter() - began_s
        if self._failures:
            raise self._failures[0]
        return Sample(
            seconds=took_s,
            work_bytes=sum(self._done[before:after]),
            operations=after - before,
            cpu_client_ns=own_cpu_ns() - client,
            cpu_node_ns=_cpu_ns(lab) - node,
        )

    def _load(self, at: int) -> None:
        draw = random.Random(at)
        area, namespace = self._areas[at], self._namespaces[at % _CLIENTS]
        buffers = [area[first : first + _CHUNK_BYTES] for first in range(0, len(area), _CHUNK_BYTES)]
        try:
            while not self._end.is_set():
                first = draw.randrange(len(self._chain) - self._batch_chunks)
                outcomes = namespace.get_into(self._chain[first : first + self._batch_chunks], buffers)
                if not all(isinstance(one, Hit) for one in outcomes):
                    raise RuntimeError(
                        f"a chunk was not there: {[one for one in outcomes if not isinstance(one, Hit)]}"
                    )
                self._done.append(len(area))
        except BaseException as error:  # noqa: BLE001 -- a thread's root: the next sample raises it
            self._failures.append(error)


@contextmanager
def _bare_sender(lab: ClusterLab) -> Iterator[Callable[[float], Limit]]:
    """What one limited place lets a bare socket send, by a place of its own."""
    assert lab.net is not None
    place = lab.net.add("bare")
    process = subprocess.Popen(lab.command_in(place, "-c", _SENDER))
    try:
        _connected(place.address).close()
        lab.net.limit(place, bytes_per_s=RATE_BYTES_S)

        def rate_of(seconds: float) -> Limit:
            area, total = touched(MiB), 0
            with _connected(place.address) as near:
                while total < _BURST_BYTES:
                    total += near.recv_into(area)
                cpu, total = own_cpu_ns() + cpu_ns_of(process.pid), 0
                began_s = time.perf_counter()
                while time.perf_counter() - began_s < seconds:
                    total += near.recv_into(area)
                rate = total / (time.perf_counter() - began_s)
                cpu = own_cpu_ns() + cpu_ns_of(process.pid) - cpu
            return Limit(bytes_per_s=rate, pair_cpu_s_per_gb=cpu / 1e9 / (total / GB))

        yield rate_of
    finally:
        process.kill()
        process.wait()


def _connected(address: str) -> socket.socket:
    for attempt in itertools.count():
        try:
            return socket.create_connection((address, _SENDER_PORT), timeout=10)
        except ConnectionRefusedError:
            if attempt > 100:
                raise RuntimeError("the bare sender does not listen") from None
            time.sleep(0.05)
    raise AssertionError


def _cpu_ns(lab: ClusterLab) -> int:
    pids = [node.process.process.pid for node in lab.nodes.values() if node.process is not None]
    return sum(cpu_ns_of(pid) for root in pids for pid in descendants(root))

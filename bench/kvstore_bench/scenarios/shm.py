"""The transport over shared memory: one client beside its node, both ends of every transfer on this machine.

Reads go into memory of `client.alloc()`. The limit of what lies in the node's RAM is one copy of the same bytes to the
same memory (numpy), that of what lies on the drive is fio at depth 32 on the same file.

One call at a time, but for the rows "two batches in flight": there two threads of the one client read, each a batch at
a time, since fio keeps its depth all the time while one batch after the other lets the drive stand still in between.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.limits import GiB, KiB, MiB
from kvstore.server.private_folder import private_folder
from kvstore_bench.measure import Limit, Row, Sample, interleaved, timed, timed_together
from kvstore_bench.peers import fio
from kvstore_bench.peers.sockets import touched
from kvstore_bench.processes import Node, own_cpu_ns
from kvstore_bench.scenarios.micro import BATCH, CHUNK_TOKENS, fill, get_step, namespace_subset, scattered_keys
from kvstore_client import Hit, KVClient, KVLayout, Namespace, Stored
from kvstore_client.namespace_handle import BoundNamespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long and how much."""

    pairs: int
    seconds: float
    ram_bytes: int
    cold_bytes: int
    singles: int

    @classmethod
    def full(cls) -> Effort:
        return cls(pairs=7, seconds=1.5, ram_bytes=256 * MiB, cold_bytes=2 * GiB, singles=3_000)

    @classmethod
    def quick(cls) -> Effort:
        return cls(pairs=5, seconds=0.4, ram_bytes=128 * MiB, cold_bytes=512 * MiB, singles=600)


class Bench:
    """A node, and a client that shares memory with it."""

    def __init__(self, node: Node, effort: Effort, *, flow: str = "decode_read") -> None:
        self.node, self.effort = node, effort
        self.client = KVClient.connect(node.address, flow=flow, transport="shm")

    def namespace(self, chunk_bytes: int, client: KVClient | None = None) -> BoundNamespace:
        """A namespace of plain chunks of one size."""
        layout = KVLayout.opaque(chunk_bytes=chunk_bytes, chunk_tokens=CHUNK_TOKENS)
        name = Namespace(tenant="bench", model=f"shm-{chunk_bytes}", weights="sha256:none", layout=layout)
        return (client or self.client).namespace(name)

    def sample(self, step: Callable[[], int]) -> Sample:
        """Time `step` for the effort's seconds, with the CPU of client and node."""
        return timed(
            step,
            seconds=self.effort.seconds,
            operations_per_step=BATCH,
            client_cpu=own_cpu_ns,
            node_cpu=self.node.cpu_ns,
        )

    def sample_together(self, steps: Sequence[Callable[[], int]]) -> Sample:
        """As `sample`, with each of `steps` in a thread of its own."""
        return timed_together(
            steps,
            seconds=self.effort.seconds,
            operations_per_step=BATCH,
            client_cpu=own_cpu_ns,
            node_cpu=self.node.cpu_ns,
        )

    def buffers(self, chunk_bytes: int) -> list[memoryview]:
        """Shared memory for one batch."""
        memory = self.client.alloc(BATCH * chunk_bytes, prefault=True)
        return [memory[at : at + chunk_bytes] for at in range(0, len(memory), chunk_bytes)]


def copy_limit(buffers: list[memoryview], seconds: float) -> Limit:
    """Rate of copying other memory into the buffers, one after the other."""
    size = len(buffers[0])
    source = np.frombuffer(touched(8 * BATCH * size), dtype=np.uint8)
    into = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers]
    total, at, cpu_ns, start = 0, 0, own_cpu_ns(), time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for one in into:
            np.copyto(one, source[at : at + size])
            at = (at + size) % len(source)
            total += size
    return Limit(bytes_per_s=total / elapsed, pair_cpu_s_per_gb=(own_cpu_ns() - cpu_ns) / total)


def details_of(samples: list[Sample], limits: list[Limit]) -> tuple[float, dict[str, float]]:
    """Median per-pair ratio, and the figures behind it."""
    ratios = [
        sample.work_bytes / sample.seconds / limit.bytes_per_s for sample, limit in zip(samples, limits, strict=True)
    ]
    return statistics.median(ratios), {
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "gb_per_s": statistics.median(sample.gb_per_s for sample in samples),
        "limit_gb_per_s": statistics.median(limit.bytes_per_s for limit in limits) / 1e9,
        "client_s_per_gb": statistics.median(sample.cpu_client_ns / sample.work_bytes for sample in samples),
        "node_s_per_gb": statistics.median(sample.cpu_node_ns / sample.work_bytes for sample in samples),
    }


def cached_get(bench: Bench, chunk_bytes: int, must: float | None, aim: float | None) -> list[Row]:
    """Batches of 32 from the node's RAM against one copy."""
    namespace = bench.namespace(chunk_bytes)
    keys = scattered_keys(namespace, bench.effort.ram_bytes // chunk_bytes)
    fill(namespace, keys, chunk_bytes)
    buffers = bench.buffers(chunk_bytes)
    batches = [keys[at : at + BATCH] for at in range(0, len(keys) - BATCH + 1, BATCH)]
    step = get_step(namespace, batches, buffers, chunk_bytes)
    for _ in batches:
        step()
    ratio, details = details_of(
        *interleaved(
            bench.effort.pairs, lambda: bench.sample(step), lambda: copy_limit(buffers, bench.effort.seconds / 2)
        )
    )
    name = f"shm cached get {chunk_bytes // KiB} KiB x{BATCH}"
    return [Row(name=name, unit="of memcpy", value=ratio, must=must, aim=aim, details=details)]


def other_memory_get(bench: Bench, chunk_bytes: int) -> list[Row]:
    """Batches of 32 from the node's RAM into memory that is not shared, turn by turn with a client that uses TCP."""
    keys = scattered_keys(bench.namespace(chunk_bytes), bench.effort.ram_bytes // 2 // chunk_bytes)
    fill(bench.namespace(chunk_bytes), keys, chunk_bytes)
    memory = touched(BATCH * chunk_bytes)
    buffers = [memory[at : at + chunk_bytes] for at in range(0, len(memory), chunk_bytes)]
    batches = [keys[at : at + BATCH] for at in range(0, len(keys) - BATCH + 1, BATCH)]
    with KVClient.connect(bench.node.address, flow="decode_read", transport="tcp") as other:
        step, tcp_step = (
            get_step(bench.namespace(chunk_bytes, client), batches, buffers, chunk_bytes)
            for client in (bench.client, other)
        )
        for _ in batches:
            step()
            tcp_step()

        def limit() -> Limit:
            sample = bench.sample(tcp_step)
            return Limit(bytes_per_s=sample.work_bytes / sample.seconds, pair_cpu_s_per_gb=sample.cpu_s_per_gb)

        samples, limits = interleaved(bench.effort.pairs, lambda: bench.sample(step), limit)
    ratio, details = details_of(samples, limits)
    details["tcp_s_per_gb"] = statistics.median(one.pair_cpu_s_per_gb for one in limits)
    return [
        Row(
            name=f"shm cached get {chunk_bytes // KiB} KiB x{BATCH}, other memory",
            unit="of TCP",
            value=ratio,
            details=details,
        )
    ]


def cold_get(bench: Bench, chunk_bytes: int, must: float, aim: float) -> list[Row]:
    """Batches of 32 scattered chunks from the drive, node cache off, against fio at depth 32 on the same file.

    With two batches in flight, by which the rate is judged, and one after the other.
    """
    namespace = bench.namespace(chunk_bytes)
    keys = scattered_keys(namespace, bench.effort.cold_bytes // 2 // chunk_bytes)
    fill(namespace, keys, chunk_bytes)
    buffers = bench.buffers(chunk_bytes)
    order = list(range(len(keys)))
    random.Random(5).shuffle(order)
    batches = [namespace_subset(keys, order[at : at + BATCH]) for at in range(0, len(order) - BATCH + 1, BATCH)]
    step = get_step(namespace, batches, buffers, chunk_bytes)
    both = [step, get_step(namespace, batches[len(batches) // 2 :], bench.buffers(chunk_bytes), chunk_bytes)]
    two: list[Sample] = []

    def limit() -> Limit | None:
        sample = bench.sample_together(both)
        found = fio.random_read(
            bench.node.data_dir / "kvstore.data",
            block_bytes=chunk_bytes,
            depth=32,
            offset=64 * MiB,
            size_bytes=bench.effort.cold_bytes // 2,
            seconds=max(1.0, bench.effort.seconds),
        )
        if found is None:
            return None
        two.append(sample)
        copied = copy_limit(buffers, bench.effort.seconds / 4)
        return Limit(bytes_per_s=found.bytes_per_s, pair_cpu_s_per_gb=copied.pair_cpu_s_per_gb)

    samples, limits = interleaved(bench.effort.pairs, lambda: bench.sample(step), limit)
    name = f"shm cold get {chunk_bytes // KiB} KiB x{BATCH}"
    return [
        row
        for title, taken, targets in (
            (f"{name}, two batches in flight", two, (must, aim)),
            (f"{name}, one batch in flight", samples, (None, None)),
        )
        for row in cold_rows(title, taken, limits, *targets)
    ]


def cold_rows(
    name: str, samples: list[Sample], limits: list[Limit], must: float | None, aim: float | None
) -> list[Row]:
    """Rate and CPU. The CPU is judged however many batches are in flight, beside that of one copy of the same bytes."""
    ratio, details = details_of(samples, limits)
    copy_cpu = statistics.median(limit.pair_cpu_s_per_gb for limit in limits)
    cpu = statistics.median(sample.cpu_s_per_gb for sample in samples)
    return [
        Row(name=name, unit="of fio depth 32", value=ratio, must=must, aim=aim, details=details),
        Row(
            name=f"{name}, CPU",
            unit="s/GB",
            value=cpu,
            must=0.25,
            aim=0.15,
            higher_is_better=False,
            details={"copy_s_per_gb": copy_cpu},
        ),
    ]


def single_get(bench: Bench) -> list[Row]:
    """One 64 KiB chunk from RAM, turn by turn over shared memory and over TCP, from one node."""
    chunk_bytes = 64 * KiB
    keys = scattered_keys(bench.namespace(chunk_bytes), 64)
    fill(bench.namespace(chunk_bytes), keys, chunk_bytes)
    with KVClient.connect(bench.node.address, transport="tcp") as other:
        ways = [
            (bench.namespace(chunk_bytes), bench.client.alloc(chunk_bytes, prefault=True)),
            (bench.namespace(chunk_bytes, other), other.alloc(chunk_bytes, prefault=True)),
        ]
        times: list[list[int]] = [[], []]
        for turn in range(bench.effort.singles):
            key = keys[turn % 64 : turn % 64 + 1]
            for taken, (namespace, buffer) in zip(times, ways, strict=True):
                start = time.perf_counter_ns()
                (result,) = namespace.get_into(key, [buffer])
                taken.append(time.perf_counter_ns() - start)
                if not isinstance(result, Hit):
                    raise RuntimeError(f"a read that must hit did not: {result}")
    shared, tcp = statistics.median(times[0]) / 1e3, statistics.median(times[1]) / 1e3
    details = {"p50_us": shared, "tcp_p50_us": tcp, "p99_us": sorted(times[0])[len(times[0]) * 99 // 100] / 1e3}
    return [
        Row(
            name="shm single get 64 KiB, p50",
            unit="of TCP",
            value=shared / tcp,
            must=1.0,
            higher_is_better=False,
            details=details,
        )
    ]


def durable_put(bench: Bench) -> list[Row]:
    """Durable puts of 1 MiB x32 out of shared memory, into recycled segments."""
    namespace = bench.namespace(MiB)
    buffers = bench.buffers(MiB)
    rng = random.Random(17)
    for buffer in buffers:
        buffer[:] = rng.randbytes(len(buffer))

    def step() -> int:
        keys = namespace.keys_from_hashes([rng.randbytes(32) for _ in range(BATCH)], algorithm="bench")
        results = namespace.put(keys, buffers, wait="durable")
        if bad := [result for result in results if not isinstance(result, Stored)]:
            raise RuntimeError(f"a put that must be stored was not: {bad[0]}")
        return BATCH * MiB

    for _ in range(24):
        step()
    samples, limits = interleaved(
        bench.effort.pairs, lambda: bench.sample(step), lambda: copy_limit(buffers, bench.effort.seconds / 2)
    )
    ratio, details = details_of(samples, limits)
    return [Row(name=f"shm durable put 1 MiB x{BATCH}", unit="of memcpy", value=ratio, details=details)]


@contextmanager
def _bench(effort: Effort, folder: Path, *, capacity_bytes: int, cache_bytes: int, flow: str) -> Iterator[Bench]:
    with (
        private_folder(folder, purpose="shm") as data_dir,
        Node(data_dir=data_dir, capacity_bytes=capacity_bytes, cache_bytes=cache_bytes) as node,
    ):
        bench = Bench(node, effort, flow=flow)
        node.settle()
        try:
            yield bench
        finally:
            bench.client.close()


def run(*, quick: bool, folder: Path, only: str = "") -> Iterator[Row]:
    """The rows, as they are measured. `only` takes groups whose name contains it: ram, cold, put."""
    effort = Effort.quick() if quick else Effort.full()
    if not only or only in "ram":
        with _bench(effort, folder, capacity_bytes=2 * GiB, cache_bytes=GiB, flow="decode_read") as bench:
            yield from cached_get(bench, MiB, 0.45, 0.6)
            yield from cached_get(bench, 64 * KiB, None, None)
            yield from other_memory_get(bench, MiB)
            yield from single_get(bench)
    if (not only or only in "cold") and fio.available():
        with _bench(effort, folder, capacity_bytes=3 * GiB, cache_bytes=0, flow="decode_read") as bench:
            yield from cold_get(bench, MiB, 0.95, 0.98)
    if not only or only in "put":
        with _bench(effort, folder, capacity_bytes=512 * MiB, cache_bytes=128 * MiB, flow="writeback") as bench:
            yield from durable_put(bench)

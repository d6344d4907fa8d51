"""The base benchmark of one node and one client on one machine: reads from RAM and SSD, durable puts, lookups.

One client, one call at a time, but for the rows "two batches in flight": there two threads of the one client read or
put, each a batch at a time, since fio keeps its depth and the raw pair its stream all the time, while one batch after
the other lets drive and wire stand still in between. A client may have that many calls at one worker. Payload is
random and written before it is read.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.limits import GiB, KiB, MiB
from kvstore.server.private_folder import private_folder
from kvstore.types.keys import KeyChain
from kvstore_bench.measure import Limit, Row, Sample, interleaved, ratio_details, timed, timed_together
from kvstore_bench.peers import fio
from kvstore_bench.peers.drive_pair import DrivePair
from kvstore_bench.peers.sockets import RawPair, touched
from kvstore_bench.processes import Node, one_core_each, own_cpu_ns
from kvstore_bench.scenarios import recovery
from kvstore_client import Hit, KVClient, KVLayout, Namespace, Stored
from kvstore_client.namespace_handle import BoundNamespace

CHUNK_TOKENS = 64
MEMORY_FOLDER = Path("/dev/shm")
BATCH = 32
SINGLE_WARM_UP = 300
SINGLE_BLOCK = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long and how much: the full run, or `--quick` (under a minute, for a first look)."""

    pairs: int
    seconds: float
    ram_bytes: int
    cold_bytes: int
    put_capacity_bytes: int
    recovery_chunks: int

    @classmethod
    def full(cls) -> Effort:
        return cls(
            pairs=7,
            seconds=1.5,
            ram_bytes=256 * MiB,
            cold_bytes=3 * GiB,
            put_capacity_bytes=2 * GiB,
            recovery_chunks=1_000_000,
        )

    @classmethod
    def quick(cls) -> Effort:
        return cls(
            pairs=3,
            seconds=0.4,
            ram_bytes=128 * MiB,
            cold_bytes=512 * MiB,
            put_capacity_bytes=512 * MiB,
            recovery_chunks=50_000,
        )


class Bench:
    """One node, one client, one raw pair, and memory for one batch."""

    def __init__(self, node: Node, pair: RawPair, effort: Effort, *, flow: str = "decode_read") -> None:
        self.node, self.pair, self.effort = node, pair, effort
        self.client = KVClient.connect(node.address, flow=flow)

    def namespace(self, chunk_bytes: int) -> BoundNamespace:
        """A namespace of plain chunks of one size."""
        layout = KVLayout.opaque(chunk_bytes=chunk_bytes, chunk_tokens=CHUNK_TOKENS)
        return self.client.namespace(
            Namespace(tenant="bench", model=f"micro-{chunk_bytes}", weights="sha256:none", layout=layout)
        )

    def sample(self, step: Callable[[], int], operations: int) -> Sample:
        """Time `step` for the effort's seconds, with the CPU of client and node."""
        return timed(
            step,
            seconds=self.effort.seconds,
            operations_per_step=operations,
            client_cpu=own_cpu_ns,
            node_cpu=self.node.cpu_ns,
        )

    def sample_together(self, steps: Sequence[Callable[[], int]], operations: int) -> Sample:
        """The same with each of `steps` in a thread of its own."""
        return timed_together(
            steps,
            seconds=self.effort.seconds,
            operations_per_step=operations,
            client_cpu=own_cpu_ns,
            node_cpu=self.node.cpu_ns,
        )


def scattered_keys(namespace: BoundNamespace, count: int) -> KeyChain:
    """Keys without positions: every chunk its own run, so that no two lie together by design."""
    rng = random.Random(count)
    return namespace.keys_from_hashes([rng.randbytes(32) for _ in range(count)], algorithm="bench")


def fill(namespace: BoundNamespace, keys: KeyChain, chunk_bytes: int) -> None:
    """Write every key durably. Raises RuntimeError when one is refused."""
    source = touched(BATCH * chunk_bytes)
    rng = random.Random(7)
    for offset in range(0, len(source), MiB):
        end = min(offset + MiB, len(source))
        source[offset:end] = rng.randbytes(end - offset)
    buffers = [source[i * chunk_bytes : (i + 1) * chunk_bytes] for i in range(BATCH)]
    for first in range(0, len(keys), BATCH):
        batch = keys[first : first + BATCH]
        results = namespace.put(batch, buffers[: len(batch)], wait="durable")
        if bad := [result for result in results if not isinstance(result, Stored)]:
            raise RuntimeError(f"filling failed at chunk {first}: {bad[0]}")


def get_step(
    namespace: BoundNamespace, batches: Sequence[KeyChain], buffers: Sequence[memoryview], chunk_bytes: int
) -> Callable[[], int]:
    """A step that reads the next of `batches` and insists on hits."""
    state = 0

    def step() -> int:
        nonlocal state
        keys = batches[state % len(batches)]
        state += 1
        results = namespace.get_into(keys, buffers[: len(keys)])
        if bad := [result for result in results if not isinstance(result, Hit)]:
            raise RuntimeError(f"a read that must hit did not: {bad[0]}")
        return len(keys) * chunk_bytes

    return step


def pair_limit(pair: RawPair | DrivePair, step: Callable[[], None], work_bytes: int, seconds: float) -> Limit:
    """Rate and CPU of a pair, repeating `step`."""
    total, cpu_ns, start = 0, own_cpu_ns() + pair.cpu_ns(), time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        step()
        total += work_bytes
    cpu_ns = own_cpu_ns() + pair.cpu_ns() - cpu_ns
    return Limit(bytes_per_s=total / elapsed, pair_cpu_s_per_gb=cpu_ns / total)


@contextmanager
def bare_pair(bench: Bench, size_bytes: int) -> Iterator[DrivePair]:
    """A bare pair whose file lies on the node's drive."""
    with private_folder(bench.node.data_dir.parent, purpose="bare") as folder:
        pair = DrivePair(folder / "bare.data", size_bytes)
        try:
            yield pair
        finally:
            pair.close()


def bare_row(name: str, unit: str, samples: Sequence[Sample], limits: Sequence[Limit], bare: Sequence[Limit]) -> Row:
    """What is left for a store of this shape here: the bare pair against the same limit, in the same moments."""
    ratios = [one.bytes_per_s / limit.bytes_per_s for one, limit in zip(bare, limits, strict=True)]
    ours = [sample.work_bytes / sample.seconds / one.bytes_per_s for sample, one in zip(samples, bare, strict=True)]
    cpu = [sample.cpu_s_per_gb / one.pair_cpu_s_per_gb for sample, one in zip(samples, bare, strict=True)]
    return Row(
        name=f"{name}, bare pair with a drive",
        unit=unit,
        value=statistics.median(ratios),
        details={
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "gb_per_s": statistics.median(one.bytes_per_s for one in bare) / 1e9,
            "cpu_s_per_gb": statistics.median(one.pair_cpu_s_per_gb for one in bare),
            "ours_of_bare": statistics.median(ours),
            "our_cpu_of_bare": statistics.median(cpu),
        },
    )


def cpu_row(name: str, details: dict[str, float], must: float, aim: float | None) -> Row:
    """CPU of client and node beside that of the raw pair, which moves the same bytes and does nothing else."""
    return Row(
        name=f"{name} CPU",
        unit="s/GB",
        value=details["cpu_s_per_gb"],
        must=must,
        aim=aim,
        higher_is_better=False,
        details={key: details[key] for key in ("raw_pair_s_per_gb", "cpu_of_raw_pair")},
    )


def shuffled_batches(keys: KeyChain, batch: int) -> list[KeyChain]:
    """The keys in batches, in random order of batches and (by hash order at put) of places."""
    batches = [keys[i : i + batch] for i in range(0, len(keys) - batch + 1, batch)]
    random.Random(3).shuffle(batches)
    return batches


def ram_get(bench: Bench, chunk_bytes: int, must: float, aim: float, cpu: tuple[float, float] | None) -> list[Row]:
    """Batches of 32 from the node's RAM against the raw pair."""
    namespace = bench.namespace(chunk_bytes)
    keys = scattered_keys(namespace, bench.effort.ram_bytes // chunk_bytes)
    fill(namespace, keys, chunk_bytes)
    memory = touched(BATCH * chunk_bytes)
    buffers = [memory[i * chunk_bytes : (i + 1) * chunk_bytes] for i in range(BATCH)]
    batches = shuffled_batches(keys, BATCH)
    step = get_step(namespace, batches, buffers, chunk_bytes)
    for _ in batches:
        step()
    samples, limits = interleaved(
        bench.effort.pairs,
        lambda: bench.sample(step, BATCH),
        lambda: pair_limit(bench.pair, lambda: bench.pair.get(buffers), len(memory), bench.effort.seconds),
    )
    ratio, details = ratio_details(samples, limits)
    name = f"RAM get {chunk_bytes // KiB} KiB x{BATCH}"
    rows = [Row(name=name, unit="of raw pair", value=ratio, must=must, aim=aim, details=details)]
    if cpu is not None:
        rows.append(cpu_row(name, details, *cpu))
    return rows


def cold_get(bench: Bench, chunk_bytes: int, must: float, aim: float, cpu: tuple[float, float | None]) -> list[Row]:
    """Batches of 32 scattered chunks from SSD, node cache off, against fio at depth 32 on the same file.

    With two batches in flight, by which it is judged, and one after the other.
    """
    namespace = bench.namespace(chunk_bytes)
    keys = scattered_keys(namespace, bench.effort.cold_bytes // 2 // chunk_bytes)
    fill(namespace, keys, chunk_bytes)
    memory = touched(BATCH * chunk_bytes)
    buffers = [memory[i * chunk_bytes : (i + 1) * chunk_bytes] for i in range(BATCH)]
    order = list(range(len(keys)))
    random.Random(5).shuffle(order)
    hashes_order = [namespace_subset(keys, order[i : i + BATCH]) for i in range(0, len(order) - BATCH + 1, BATCH)]
    step = get_step(namespace, hashes_order, buffers, chunk_bytes)
    other_memory = touched(BATCH * chunk_bytes)
    other_buffers = [other_memory[i * chunk_bytes : (i + 1) * chunk_bytes] for i in range(BATCH)]
    both = [step, get_step(namespace, hashes_order[len(hashes_order) // 2 :], other_buffers, chunk_bytes)]
    data_file = bench.node.data_dir / "kvstore.data"
    bare: list[Limit] = []
    two: list[Sample] = []

    def limit(drive_pair: DrivePair) -> Limit | None:
        sample = bench.sample_together(both, BATCH)
        found = fio.random_read(
            data_file,
            block_bytes=chunk_bytes,
            depth=32,
            offset=64 * MiB,
            size_bytes=bench.effort.cold_bytes // 2,
            seconds=max(1.0, bench.effort.seconds),
        )
        if found is None:
            return None
        two.append(sample)
        bare.append(pair_limit(drive_pair, lambda: drive_pair.get(buffers), len(memory), bench.effort.seconds))
        pair = pair_limit(bench.pair, lambda: bench.pair.get(buffers), len(memory), bench.effort.seconds / 2)
        return Limit(bytes_per_s=found.bytes_per_s, pair_cpu_s_per_gb=pair.pair_cpu_s_per_gb)

    with bare_pair(bench, min(bench.effort.cold_bytes // 2, GiB)) as drive_pair:
        samples, limits = interleaved(bench.effort.pairs, lambda: bench.sample(step, BATCH), lambda: limit(drive_pair))
    name = f"cold get {chunk_bytes // KiB} KiB x{BATCH}"
    ratio, details = ratio_details(two, limits)
    one_ratio, one_details = ratio_details(samples, limits)
    return [
        Row(
            name=f"{name}, two batches in flight",
            unit="of fio depth 32",
            value=ratio,
            must=must,
            aim=aim,
            details=details,
        ),
        cpu_row(f"{name}, two batches in flight", details, *cpu),
        Row(name=f"{name}, one batch in flight", unit="of fio depth 32", value=one_ratio, details=one_details),
        bare_row(name, "of fio depth 32", samples, limits, bare),
    ]


def namespace_subset(keys: KeyChain, order: Sequence[int]) -> KeyChain:
    """The keys at `order`, as one position-less sequence."""
    subset = keys[order[0] : order[0] + 1]
    for index in order[1:]:
        subset = subset + keys[index : index + 1]
    return subset


def run_get(bench: Bench) -> list[Row]:
    """V4.1-Flash sized chunks, 256 neighbours of one chain a batch, cold: node CPU per chunk."""
    chunk_bytes, batch = 56 * KiB, 256
    namespace = bench.namespace(chunk_bytes)
    chains = max(4, bench.effort.cold_bytes // 4 // chunk_bytes // batch)
    rng = random.Random(11)
    batches = []
    for _ in range(chains):
        keys = namespace.keys([rng.randrange(1 << 17) for _ in range(CHUNK_TOKENS * batch)])
        fill(namespace, keys, chunk_bytes)
        batches.append(keys)
    memory = touched(batch * chunk_bytes)
    buffers = [memory[i * chunk_bytes : (i + 1) * chunk_bytes] for i in range(batch)]
    rng.shuffle(batches)
    step = get_step(namespace, batches, buffers, chunk_bytes)
    samples = [bench.sample(step, batch) for _ in range(bench.effort.pairs)]
    per_chunk = statistics.median(sample.cpu_node_ns / 1e3 / sample.operations for sample in samples)
    details = {
        "gb_per_s": statistics.median(sample.gb_per_s for sample in samples),
        "client_us_per_chunk": statistics.median(sample.cpu_client_ns / 1e3 / sample.operations for sample in samples),
    }
    return [
        Row(
            name="cold get 56 KiB x256 in runs, node CPU",
            unit="us/chunk",
            value=per_chunk,
            must=20,
            aim=8,
            higher_is_better=False,
            details=details,
        )
    ]


def put_step(bench: Bench, seed: int) -> Callable[[], int]:
    """A step that puts a batch of fresh keys of 1 MiB, out of memory of its own, and insists on their being stored."""
    namespace = bench.namespace(MiB)
    rng = random.Random(seed)
    memory = touched(BATCH * MiB)
    memory[:] = rng.randbytes(len(memory))
    buffers = [memory[i * MiB : (i + 1) * MiB] for i in range(BATCH)]

    def step() -> int:
        keys = namespace.keys_from_hashes([rng.randbytes(32) for _ in range(BATCH)], algorithm="bench")
        results = namespace.put(keys, buffers, wait="durable")
        if bad := [result for result in results if not isinstance(result, Stored)]:
            raise RuntimeError(f"a put that must be stored was not: {bad[0]}")
        return len(memory)

    return step


def durable_put(bench: Bench) -> list[Row]:
    """Durable puts of 1 MiB x32 into recycled segments against the raw pair; first writes into fresh extents apart.

    With two batches in flight, by which it is judged, and one after the other. What the drive alone takes stands beside
    both, where there is fio: where it writes slower than the wire carries, it is the limit.
    """
    both = [put_step(bench, seed) for seed in (13, 17)]
    step = both[0]
    memory = touched(BATCH * MiB)
    buffers = [memory[i * MiB : (i + 1) * MiB] for i in range(BATCH)]
    fresh = timed(
        step,
        seconds=min(1.0, bench.effort.seconds),
        operations_per_step=BATCH,
        client_cpu=own_cpu_ns,
        node_cpu=bench.node.cpu_ns,
    )
    written = fresh.work_bytes
    while written < 1.5 * bench.effort.put_capacity_bytes:
        written += step()
    bare: list[Limit] = []
    two: list[Sample] = []
    drive: list[float] = []
    has_fio = fio.available()

    def limit(drive_pair: DrivePair, file: Path) -> Limit | None:
        sample = bench.sample_together(both, BATCH)
        if has_fio:
            found = fio.overwrite(file, block_bytes=4 * MiB, depth=4, seconds=max(1.0, bench.effort.seconds))
            if found is None:
                return None
            drive.append(found.bytes_per_s)
        two.append(sample)
        bare.append(pair_limit(drive_pair, lambda: drive_pair.put(buffers), len(memory), bench.effort.seconds))
        return pair_limit(bench.pair, lambda: bench.pair.put(buffers), len(memory), bench.effort.seconds)

    with bare_pair(bench, min(bench.effort.put_capacity_bytes, GiB)) as drive_pair:
        samples, limits = interleaved(
            bench.effort.pairs, lambda: bench.sample(step, BATCH), lambda: limit(drive_pair, drive_pair.path)
        )
    name = f"durable put 1 MiB x{BATCH}"
    ratio, details = put_details(two, limits, drive)
    one_ratio, one_details = put_details(samples, limits, drive)
    one_details["fresh_extents_gb_per_s"] = fresh.gb_per_s
    return [
        Row(
            name=f"{name}, two batches in flight", unit="of raw pair", value=ratio, must=0.6, aim=0.85, details=details
        ),
        cpu_row(f"{name}, two batches in flight", details, 0.6, 0.45),
        Row(name=f"{name}, one batch in flight", unit="of raw pair", value=one_ratio, details=one_details),
        bare_row(name, "of raw pair", samples, limits, bare),
    ]


def put_details(samples: list[Sample], limits: list[Limit], drive: Sequence[float]) -> tuple[float, dict[str, float]]:
    """As `ratio_details`, with what the drive alone writes in the same moments, in bytes per second; [] without fio."""
    ratio, details = ratio_details(samples, limits)
    if not drive:
        return ratio, details
    shares = [sample.work_bytes / sample.seconds / rate for sample, rate in zip(samples, drive, strict=True)]
    details["drive_gb_per_s"] = statistics.median(drive) / 1e9
    details["of_drive"] = statistics.median(shares)
    return ratio, details


def lookups(bench: Bench) -> list[Row]:
    """Deriving 2,000 keys, and matching them when they are derived."""
    count = 2_000
    namespace = bench.namespace(4 * KiB)
    rng = random.Random(19)
    tokens = [rng.randrange(1 << 17) for _ in range(count * CHUNK_TOKENS)]
    repeats = 30 if bench.effort.pairs < 5 else 200
    derive_ms = median_ms(lambda: namespace.keys(tokens), repeats)
    keys = namespace.keys(tokens)
    fill(namespace, keys, 4 * KiB)

    def match() -> None:
        with namespace.match(keys) as found:
            if found.chunks != count:
                raise RuntimeError(f"matched {found.chunks} of {count} chunks")

    match_ms = median_ms(match, repeats)
    return [
        Row(name="derive 2,000 keys, p50", unit="ms", value=derive_ms, must=3, higher_is_better=False),
        Row(name="match 2,000 keys, p50", unit="ms", value=match_ms, must=2, aim=0.8, higher_is_better=False),
    ]


def median_ms(step: Callable[[], object], repeats: int) -> float:
    """Median time of `step` in ms."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        step()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e6


def single_get(bench: Bench) -> list[Row]:
    """One 64 KiB chunk from RAM, each beside a Python ping-pong of the same bytes at the same moment.

    The first exchanges of both are not counted: memory, sockets and the CPU's caches are not as they will be. The
    ratio is taken within blocks, and their median given, so that a moment in which both are slow counts once. Node and
    ping-pong's far side sit on the same core, we on another: both are woken over the same way.
    """
    chunk_bytes = 64 * KiB
    namespace = bench.namespace(chunk_bytes)
    keys = scattered_keys(namespace, 64)
    fill(namespace, keys, chunk_bytes)
    buffer = touched(chunk_bytes)

    def exchange(at: int) -> tuple[int, int]:
        """One read and one ping-pong, in ns."""
        key = keys[at % 64 : at % 64 + 1]
        start = time.perf_counter_ns()
        (result,) = namespace.get_into(key, [buffer])
        elapsed_ns = time.perf_counter_ns() - start
        if not isinstance(result, Hit):
            raise RuntimeError(f"a read that must hit did not: {result}")
        return elapsed_ns, bench.pair.ping_ns(buffer)

    ours: list[int] = []
    limits: list[int] = []
    ratios: list[float] = []
    with one_core_each(os.getpid(), [*bench.node.pids(), bench.pair.pid]):
        for at in range(SINGLE_WARM_UP):
            exchange(at)
        for _ in range(5 if bench.effort.pairs < 5 else 30):
            read_ns, ping_ns = zip(*[exchange(at) for at in range(SINGLE_BLOCK)], strict=True)
            ratios.append(statistics.median(read_ns) / statistics.median(ping_ns))
            ours += read_ns
            limits += ping_ns
    return [
        Row(
            name="single get 64 KiB, p50",
            unit="of ping-pong",
            value=statistics.median(ratios),
            must=1.3,
            higher_is_better=False,
            details={
                "p50_us": statistics.median(ours) / 1e3,
                "ping_pong_p50_us": statistics.median(limits) / 1e3,
                "p99_us": sorted(ours)[len(ours) * 99 // 100] / 1e3,
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
            },
        )
    ]


@contextmanager
def bench_with(
    effort: Effort, folder: Path, pair: RawPair, *, capacity_bytes: int, cache_bytes: int, flow: str
) -> Iterator[Bench]:
    """A fresh node on a fresh data dir under `folder`, and a client."""
    with (
        private_folder(folder, purpose="micro") as data_dir,
        Node(data_dir=data_dir, capacity_bytes=capacity_bytes, cache_bytes=cache_bytes) as node,
    ):
        bench = Bench(node, pair, effort, flow=flow)
        node.settle()
        try:
            yield bench
        finally:
            bench.client.close()


def run(*, quick: bool, folder: Path, only: str = "") -> Iterator[Row]:
    """All rows of the scenario; `only` keeps groups by name. Raises RuntimeError when a step fails.

    The groups `fast:read` and `fast:write` are cold reads and puts once more, on a drive in memory: what is left when
    the drive is no limit. They have no targets, and `--quick` leaves them out unless they are asked for.
    """
    effort = Effort.quick() if quick else Effort.full()
    small = replace(
        effort, cold_bytes=min(effort.cold_bytes, GiB), put_capacity_bytes=min(effort.put_capacity_bytes, GiB)
    )
    ram, cold, put = _groups(effort)
    scattered = [step for step in cold if step is not run_get]
    groups = [
        ("ram", folder, effort, 2 * GiB, 1 * GiB, "decode_read", ram),
        ("cold", folder, effort, 2 * effort.cold_bytes + GiB, 0, "decode_read", cold),
        ("put", folder, effort, effort.put_capacity_bytes, 128 * MiB, "writeback", put),
    ]
    if MEMORY_FOLDER.is_dir() and (not quick or only):
        groups += [
            ("fast:read", MEMORY_FOLDER, small, 3 * GiB, 0, "decode_read", scattered),
            ("fast:write", MEMORY_FOLDER, small, small.put_capacity_bytes, 128 * MiB, "writeback", put),
        ]
    pair = RawPair()
    try:
        for group, place, chosen, capacity_bytes, cache_bytes, flow, steps in groups:
            if only and only not in group:
                continue
            with bench_with(
                chosen, place, pair, capacity_bytes=capacity_bytes, cache_bytes=cache_bytes, flow=flow
            ) as bench:
                for step in steps:
                    rows = step(bench)
                    yield from rows if place is folder else map(_on_memory, rows)
    finally:
        pair.close()
    if not only or only in "recovery":
        yield from recovery.run(chunks=effort.recovery_chunks, folder=folder)


def _on_memory(row: Row) -> Row:
    return replace(row, name=f"{row.name}, drive in memory", must=None, aim=None)


def _groups(effort: Effort) -> tuple[list[Callable[[Bench], list[Row]]], ...]:
    ram: list[Callable[[Bench], list[Row]]] = [
        lambda bench: ram_get(bench, 1 * MiB, 0.9, 1.0, (0.37, 0.30)),
        lambda bench: ram_get(bench, 256 * KiB, 0.8, 0.9, None),
        lambda bench: ram_get(bench, 64 * KiB, 0.75, 0.9, None),
        single_get,
        lookups,
    ]
    cold: list[Callable[[Bench], list[Row]]] = [run_get]
    if fio.available():
        cold = [
            lambda bench: cold_get(bench, 1 * MiB, 0.9, 0.95, (0.5, 0.35)),
            lambda bench: cold_get(bench, 64 * KiB, 0.7, 0.9, (0.5, None)),
            run_get,
        ]
    return ram, cold, [durable_put]

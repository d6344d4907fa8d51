"""The store beside others, each in turn with it in one run: the same batches, the same memory, client and server here.

Every contender moves batches of 32 through one connection of one client and keeps one batch on its way, but that the
store's rows of cold reads and puts have two, as in `micro`. Only the store sums what it moves, on both sides; only what
is said to survive kill -9 does.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from kvstore.limits import GiB, KiB, MiB
from kvstore.server.private_folder import private_folder
from kvstore_bench.measure import Limit, Row, Sample, interleaved, ratio_details, timed, timed_together
from kvstore_bench.peers import fio, mooncake, redis
from kvstore_bench.peers.mooncake import Mooncake
from kvstore_bench.peers.redis import Redis
from kvstore_bench.peers.sockets import RawPair, touched
from kvstore_bench.processes import own_cpu_ns
from kvstore_bench.scenarios.micro import (
    BATCH,
    Bench,
    Effort,
    bench_with,
    fill,
    get_step,
    pair_limit,
    put_step,
    scattered_keys,
    shuffled_batches,
)

# What the targets of `micro` were set beside: CPU in s/GB, and the rate of durable puts as a share of the raw pair.
_RAM_CPU_OF_REDIS: Final = 0.37 / 0.35
_PUT_CPU_OF_REDIS: Final = 0.60 / 0.70
_PUT_RATE_OF_REDIS: Final = 0.60 / 0.30
_COLD_CPU_OF_MOONCAKE: Final = 0.50 / 1.07

_REDIS_BYTES: Final = 256 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Who is measured.

    Attributes:
        steps: each moves a batch and returns its bytes; all of them run at once, in threads of their own.
        server_cpu_ns: CPU time of the other side so far.
    """

    name: str
    steps: Sequence[Callable[[], int]]
    server_cpu_ns: Callable[[], int]

    def sample(self, seconds: float) -> Sample:
        """One stretch of work."""
        if len(self.steps) == 1:
            return timed(
                self.steps[0],
                seconds=seconds,
                operations_per_step=BATCH,
                client_cpu=own_cpu_ns,
                node_cpu=self.server_cpu_ns,
            )
        return timed_together(
            self.steps, seconds=seconds, operations_per_step=BATCH, client_cpu=own_cpu_ns, node_cpu=self.server_cpu_ns
        )


def compare(
    what: str, unit: str, contenders: Sequence[Contender], limit: Callable[[], Limit | None], effort: Effort
) -> tuple[list[Row], dict[str, list[Sample]]]:
    """A row for each contender, measured in turn, against one limit; and all samples by name."""
    first, *others = contenders
    samples: dict[str, list[Sample]] = {other.name: [] for other in others}

    def limit_and_others() -> Limit | None:
        found = limit()
        if found is not None:
            for other in others:
                samples[other.name].append(other.sample(effort.seconds))
        return found

    samples[first.name], limits = interleaved(effort.pairs, lambda: first.sample(effort.seconds), limit_and_others)
    rows = []
    for contender in contenders:
        ratio, details = ratio_details(samples[contender.name], limits)
        details.pop("node_us_per_operation")
        rows.append(Row(name=f"{what}: {contender.name}", unit=unit, value=ratio, details=details))
    return rows, samples


def beside(name: str, unit: str, ours: Sequence[Sample], theirs: Sequence[Sample], *, must: float, of_cpu: bool) -> Row:
    """Our CPU, or our rate, as a share of a peer's: the median over the rounds, since both change with the hour."""
    shares = [
        one.cpu_s_per_gb / other.cpu_s_per_gb if of_cpu else one.gb_per_s / other.gb_per_s
        for one, other in zip(ours, theirs, strict=True)
    ]
    details = {"share_min": min(shares), "share_max": max(shares)}
    return Row(
        name=name, unit=unit, value=statistics.median(shares), must=must, higher_is_better=not of_cpu, details=details
    )


def raw_limit(bench: Bench, move: Callable[[Sequence[memoryview]], None], buffers: Sequence[memoryview]) -> Limit:
    """The raw pair with the same batches."""
    return pair_limit(bench.pair, lambda: move(buffers), sum(map(len, buffers)), bench.effort.seconds)


def batch_memory(chunk_bytes: int) -> tuple[memoryview, list[memoryview]]:
    """Random bytes of one batch, and its chunks."""
    memory = touched(BATCH * chunk_bytes)
    rng = random.Random(23)
    for offset in range(0, len(memory), MiB):
        memory[offset : offset + MiB] = rng.randbytes(min(MiB, len(memory) - offset))
    return memory, [memory[i * chunk_bytes : (i + 1) * chunk_bytes] for i in range(BATCH)]


def names_of(count: int) -> list[list[bytes]]:
    """Keys of a peer in batches: as long as ours, so that they cost the same to send."""
    keys = [b"%032d" % number for number in range(count)]
    return [keys[first : first + BATCH] for first in range(0, count - BATCH + 1, BATCH)]


def in_turn(batches: Sequence[list[bytes]], move: Callable[[list[bytes]], None], batch_bytes: int) -> Callable[[], int]:
    """A step that moves the next of `batches`, round and round."""
    at = 0

    def step() -> int:
        nonlocal at
        move(batches[at % len(batches)])
        at += 1
        return batch_bytes

    return step


def reads_from(store: Mooncake, buffers: Sequence[memoryview], batches: Sequence[list[bytes]]) -> Callable[[], int]:
    """A step that reads the next batch of a Mooncake store, and insists on all of it."""

    def read(keys: list[bytes]) -> None:
        came = store.get([key.decode() for key in keys], buffers)
        if came != len(keys):
            raise RuntimeError(f"mooncake read {came} of {len(keys)} values that it had taken")

    return in_turn(batches, read, sum(map(len, buffers)))


def ram_get(bench: Bench, folder: Path, chunk_bytes: int) -> Iterator[Row]:
    """Reads from memory."""
    namespace = bench.namespace(chunk_bytes)
    keys = scattered_keys(namespace, bench.effort.ram_bytes // chunk_bytes)
    fill(namespace, keys, chunk_bytes)
    memory, buffers = batch_memory(chunk_bytes)
    ours = get_step(namespace, shuffled_batches(keys, BATCH), buffers, chunk_bytes)
    names = names_of(bench.effort.ram_bytes // chunk_bytes)
    what = f"get {chunk_bytes // KiB} KiB x{BATCH} from RAM"
    with ExitStack() as end:
        contenders = [Contender(name="kvstore", steps=[ours], server_cpu_ns=bench.node.cpu_ns)]
        if redis.available():
            server = end.enter_context(closing(Redis(folder)))
            for batch in names:
                server.put(batch, buffers)
            step = in_turn(names, lambda batch: server.get(batch, buffers), len(memory))
            contenders.append(Contender(name="redis", steps=[step], server_cpu_ns=server.cpu_ns))
        if mooncake.available():
            store = end.enter_context(closing(Mooncake(folder, memory_bytes=4 * bench.effort.ram_bytes)))
            store.register(memory)
            for batch in names:
                store.put([key.decode() for key in batch], buffers)
            contenders.append(
                Contender(name="mooncake", steps=[reads_from(store, buffers, names)], server_cpu_ns=store.cpu_ns)
            )
        for contender in contenders:
            contender.steps[0]()
        rows, samples = compare(
            what, "of raw pair", contenders, lambda: raw_limit(bench, bench.pair.get, buffers), bench.effort
        )
        yield from rows
        if "redis" in samples and chunk_bytes == MiB:
            yield beside(
                f"{what}: kvstore's CPU",
                "of redis's",
                samples["kvstore"],
                samples["redis"],
                must=_RAM_CPU_OF_REDIS,
                of_cpu=True,
            )


def durable_put(bench: Bench, folder: Path) -> Iterator[Row]:
    """Puts: ours are durable when they are answered, Redis's are in memory, or in a file that is synced each second."""
    memory, buffers = batch_memory(MiB)
    ours = [put_step(bench, seed) for seed in (13, 17)]
    written = 0
    while written < 1.5 * bench.effort.put_capacity_bytes:
        written += ours[0]()
    names = names_of(_REDIS_BYTES // MiB)
    what = f"put 1 MiB x{BATCH}"
    with ExitStack() as end:
        contenders = [Contender(name="kvstore, durable", steps=ours, server_cpu_ns=bench.node.cpu_ns)]
        if redis.available():
            for name, keeps in (("redis, in memory", False), ("redis, append-only file", True)):
                place = end.enter_context(private_folder(folder, purpose="redis"))
                server = end.enter_context(closing(Redis(place, keeps=keeps)))
                step = in_turn(names, partial(server.put, values=buffers), len(memory))
                contenders.append(Contender(name=name, steps=[step], server_cpu_ns=server.cpu_ns))
        for contender in contenders[1:]:
            contender.steps[0]()
        rows, samples = compare(
            what, "of raw pair", contenders, lambda: raw_limit(bench, bench.pair.put, buffers), bench.effort
        )
        yield from rows
        if "redis, in memory" in samples:
            mine, theirs = samples["kvstore, durable"], samples["redis, in memory"]
            yield beside(
                f"{what}: kvstore's rate", "of redis's, in memory", mine, theirs, must=_PUT_RATE_OF_REDIS, of_cpu=False
            )
            yield beside(
                f"{what}: kvstore's CPU", "of redis's, in memory", mine, theirs, must=_PUT_CPU_OF_REDIS, of_cpu=True
            )


def cold_get(bench: Bench, folder: Path) -> Iterator[Row]:
    """Reads from the drive. Mooncake may keep a sixth of it in memory, which the store may not."""
    total = bench.effort.cold_bytes // 2
    namespace = bench.namespace(MiB)
    keys = scattered_keys(namespace, total // MiB)
    fill(namespace, keys, MiB)
    memory, buffers = batch_memory(MiB)
    _, other_buffers = batch_memory(MiB)
    batches = shuffled_batches(keys, BATCH)
    ours = [
        get_step(namespace, batches, buffers, MiB),
        get_step(namespace, batches[len(batches) // 2 :], other_buffers, MiB),
    ]
    what = f"get 1024 KiB x{BATCH} from SSD"
    data_file = bench.node.data_dir / "kvstore.data"

    def limit() -> Limit | None:
        found = fio.random_read(
            data_file,
            block_bytes=MiB,
            depth=32,
            offset=64 * MiB,
            size_bytes=total,
            seconds=max(1.0, bench.effort.seconds),
        )
        pair = raw_limit(bench, bench.pair.get, buffers)
        if found is None:
            return None
        return Limit(bytes_per_s=found.bytes_per_s, pair_cpu_s_per_gb=pair.pair_cpu_s_per_gb)

    with ExitStack() as end:
        contenders = [Contender(name="kvstore", steps=ours, server_cpu_ns=bench.node.cpu_ns)]
        if mooncake.available():
            place = end.enter_context(private_folder(folder, purpose="mooncake"))
            store = end.enter_context(closing(Mooncake(place, memory_bytes=max(total // 6, GiB // 4), offloads=True)))
            store.register(memory)
            names = names_of(total // MiB)
            for batch in names:
                store.put([key.decode() for key in batch], buffers)
            random.Random(29).shuffle(names)
            step = reads_from(store, buffers, names)
            contenders.append(Contender(name="mooncake", steps=[step], server_cpu_ns=store.cpu_ns))
        rows, samples = compare(what, "of fio depth 32", contenders, limit, bench.effort)
        yield from rows
        if "mooncake" in samples:
            yield beside(
                f"{what}: kvstore's CPU",
                "of mooncake's",
                samples["kvstore"],
                samples["mooncake"],
                must=_COLD_CPU_OF_MOONCAKE,
                of_cpu=True,
            )


def run(*, quick: bool, folder: Path, only: str = "") -> Iterator[Row]:
    """All rows; `only` keeps groups by name. Peers that are not installed are left out.

    Raises:
        RuntimeError: A step fails, or no peer is installed.
    """
    if not redis.available() and not mooncake.available():
        raise RuntimeError(
            "no peer is installed: redis-server (Debian) and mooncake-transfer-engine-non-cuda (pip install "
            "'kvstore[bench]') are looked for"
        )
    effort = Effort.quick() if quick else Effort.full()
    ram: list[Callable[[Bench, Path], Iterator[Row]]] = [
        lambda bench, place: ram_get(bench, place, MiB),
        lambda bench, place: ram_get(bench, place, 64 * KiB),
    ]
    ssd: list[Callable[[Bench, Path], Iterator[Row]]] = [cold_get] if fio.available() else []
    with closing(RawPair()) as pair, private_folder(folder, purpose="peers") as place:
        for group, capacity_bytes, cache_bytes, flow, steps in (
            ("ram", 2 * GiB, 1 * GiB, "decode_read", ram),
            ("ssd", 2 * effort.cold_bytes + GiB, 0, "decode_read", ssd),
            ("put", effort.put_capacity_bytes, 128 * MiB, "writeback", [durable_put]),
        ):
            if only and only not in group:
                continue
            with bench_with(
                effort, folder, pair, capacity_bytes=capacity_bytes, cache_bytes=cache_bytes, flow=flow
            ) as bench:
                for step in steps:
                    yield from step(bench, place)

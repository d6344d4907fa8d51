"""What RDMA costs in Python, natively: making a work request and handing it to the library, without a device.

Software RDMA in a virtual machine says nothing about this cost nor about throughput; ./dev test-rdma prints those.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, cast

from kvstore.limits import FRAME_AIM_BYTES, KiB
from kvstore.transport.rdma.pair_queue import PairQueue, Transfer
from kvstore.transport.rdma.verbs import SUCCESS, Completion, Piece, QueuePair, Work
from kvstore_bench import rdma_cost
from kvstore_bench.measure import Row

BATCH: Final = 32
_BACKENDS: Final = ("ibverbs", "pyverbs")
_MUST_ONE_US: Final = 3.0
_MUST_BATCH_US: Final = 1.0


def run(*, quick: bool, folder: Path, only: str) -> Iterator[Row]:
    """Rows for each library that is there, and of whole reads."""
    for record_bytes in (1024 * KiB, 256 * KiB, 64 * KiB):
        if only in "requests":
            yield _requests_of(record_bytes)
    if only in "reads":
        with tempfile.TemporaryDirectory(dir=folder) as own:
            yield from rdma_cost.rows(Path(own), rounds=3 if quick else 7, repeats=20 if quick else 60)
    rounds, repeats = (3, 2_000) if quick else (9, 20_000)
    for backend in _BACKENDS:
        if only not in f"requests {backend}":
            continue
        try:
            home = importlib.import_module(f"kvstore.transport.rdma.{backend}_backend")
        except ImportError:
            continue
        pair = cast("QueuePair", home.dry_pair())
        for count, must in ((1, _MUST_ONE_US), (BATCH, _MUST_BATCH_US)):
            pieces: list[Piece] = [(4096 * at, 4096, 7, 8192 * at, 9) for at in range(count)]
            yield _row(
                f"{backend}: post, {count} at once", must, rounds, repeats // count, count, _poster(pair, pieces)
            )
            name = f"{backend}: queue, post and end, {count} at once"
            yield _row(name, None, rounds, repeats // count, count, _transfer(pair, pieces))


def _requests_of(record_bytes: int) -> Row:
    """What a MiB read in records of one length, each in one region, takes: counted, not timed."""
    pieces: list[Piece] = [(at, record_bytes, 7, 2 * at, 9) for at in range(0, FRAME_AIM_BYTES, record_bytes)]
    queue = PairQueue(fence=(0, 0), ids=itertools.count(1))
    queue.add(Transfer(Work.WRITE, pieces, lambda status: None))
    counts = []
    while (chain := queue.next_chain(1 << 20)) is not None:
        counts.append(chain.count)
    return Row(
        name=f"a MiB in records of {record_bytes // KiB} KiB",
        unit="work requests",
        value=float(sum(counts)),
        details={"posts": float(len(counts))},
    )


def _poster(pair: QueuePair, pieces: list[Piece]) -> Callable[[], None]:
    return lambda: pair.post(Work.WRITE, pieces, 5)


def _transfer(pair: QueuePair, pieces: list[Piece]) -> Callable[[], None]:
    """As a rail does it: through the queue, with the fence of a write, and the two completions."""
    queue = PairQueue(fence=(0, 0), ids=itertools.count(1))

    def ignore(status: int) -> None:
        del status

    def step() -> None:
        queue.add(Transfer(Work.WRITE, pieces, ignore))
        posted = []
        while (chain := queue.next_chain(1 << 20)) is not None:
            pair.post(chain.kind, chain.pieces, chain.work_id)
            posted.append(chain.work_id)
        for work_id in posted:
            queue.ended(Completion(work_id, SUCCESS, 0, 0))

    return step


def _row(name: str, must: float | None, rounds: int, repeats: int, count: int, step: Callable[[], None]) -> Row:
    """Median over rounds of the CPU time of one work request."""
    found = []
    for _ in range(rounds):
        begin = time.process_time_ns()
        for _ in range(repeats):
            step()
        found.append((time.process_time_ns() - begin) / 1e3 / repeats / count)
    details = {"us_min": min(found), "us_max": max(found)}
    return Row(
        name=name,
        unit="us per request",
        value=statistics.median(found),
        must=must,
        higher_is_better=False,
        details=details,
    )

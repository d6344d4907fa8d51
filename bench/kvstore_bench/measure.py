"""How a speed is stated: interleaved pairs of (ours, limit), the median of the per-pair ratios, CPU seconds per GB."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed stretch of work."""

    seconds: float
    work_bytes: int
    operations: int
    cpu_client_ns: int
    cpu_node_ns: int

    @property
    def gb_per_s(self) -> float:
        return self.work_bytes / GB / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        return (self.cpu_client_ns + self.cpu_node_ns) / 1e9 / (self.work_bytes / GB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What the machine allows at this moment.

    Attributes:
        bytes_per_s: of the peer that only moves the bytes.
        pair_cpu_s_per_gb: CPU of both sides of the raw pair of sockets, to judge our own CPU by.
    """

    bytes_per_s: float
    pair_cpu_s_per_gb: float


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of a report: what was measured, against which limit, and the targets it is judged by.

    `must` and `aim` are in the unit of `value`; `higher_is_better` tells the direction.
    """

    name: str
    unit: str
    value: float
    must: float | None = None
    aim: float | None = None
    higher_is_better: bool = True
    details: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def verdict(self) -> str:
        """ "aim", "must", "missed" or "" when there is no target."""
        if self.must is None:
            return ""
        sign = 1 if self.higher_is_better else -1
        if self.aim is not None and sign * self.value >= sign * self.aim:
            return "aim"
        return "must" if sign * self.value >= sign * self.must else "missed"


def timed(
    step: Callable[[], int],
    *,
    seconds: float,
    operations_per_step: int,
    client_cpu: Callable[[], int],
    node_cpu: Callable[[], int],
) -> Sample:
    """Repeat `step` (which returns the bytes it moved) for about `seconds`."""
    client, node, total, count = client_cpu(), node_cpu(), 0, 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        total += step()
        count += operations_per_step
    return Sample(
        seconds=elapsed,
        work_bytes=total,
        operations=count,
        cpu_client_ns=client_cpu() - client,
        cpu_node_ns=node_cpu() - node,
    )


def timed_together(
    steps: Sequence[Callable[[], int]],
    *,
    seconds: float,
    operations_per_step: int,
    client_cpu: Callable[[], int],
    node_cpu: Callable[[], int],
) -> Sample:
    """As `timed`, with each of `steps` repeated in a thread of its own: so many calls are in flight at any time."""

    def repeat(step: Callable[[], int]) -> tuple[int, int]:
        total = count = 0
        while time.perf_counter() - start < seconds:
            total += step()
            count += operations_per_step
        return total, count

    with ThreadPoolExecutor(len(steps)) as pool:
        client, node = client_cpu(), node_cpu()
        start = time.perf_counter()
        done = list(pool.map(repeat, steps))
        elapsed = time.perf_counter() - start
    return Sample(
        seconds=elapsed,
        work_bytes=sum(total for total, _ in done),
        operations=sum(count for _, count in done),
        cpu_client_ns=client_cpu() - client,
        cpu_node_ns=node_cpu() - node,
    )


def interleaved(
    pairs: int, ours: Callable[[], Sample], limit: Callable[[], Limit | None]
) -> tuple[list[Sample], list[Limit]]:
    """`pairs` times (ours, limit); pairs whose limit was stalled (None) are taken again, bounded."""
    samples: list[Sample] = []
    limits: list[Limit] = []
    for _ in range(pairs * 3):
        if len(samples) == pairs:
            break
        ours_sample, found = ours(), limit()
        if found is None:
            continue
        samples.append(ours_sample)
        limits.append(found)
    if not samples:
        raise RuntimeError("the limit was stalled in every pair; measure again on a quieter machine")
    return samples, limits


def ratio_details(samples: list[Sample], limits: list[Limit]) -> tuple[float, dict[str, float]]:
    """Median per-pair ratio, and the figures behind it."""
    pairs = list(zip(samples, limits, strict=True))
    ratios = [sample.work_bytes / sample.seconds / limit.bytes_per_s for sample, limit in pairs]
    return statistics.median(ratios), {
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "gb_per_s": statistics.median(sample.gb_per_s for sample in samples),
        "limit_gb_per_s": statistics.median(limit.bytes_per_s for limit in limits) / GB,
        "cpu_s_per_gb": statistics.median(sample.cpu_s_per_gb for sample in samples),
        "raw_pair_s_per_gb": statistics.median(limit.pair_cpu_s_per_gb for limit in limits),
        "cpu_of_raw_pair": statistics.median(sample.cpu_s_per_gb / limit.pair_cpu_s_per_gb for sample, limit in pairs),
        "client_s_per_gb": statistics.median(sample.cpu_client_ns / sample.work_bytes for sample in samples),
        "node_s_per_gb": statistics.median(sample.cpu_node_ns / sample.work_bytes for sample in samples),
        "node_us_per_operation": statistics.median(sample.cpu_node_ns / 1e3 / sample.operations for sample in samples),
    }

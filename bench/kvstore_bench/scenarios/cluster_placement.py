"""What `run_bytes` costs and gives, computed from the placement alone: no node runs.

Long runs keep a prefix on few targets, so that the loss of one target makes few holes. Short ones spread a prefix, so
that one reader loads it from many targets at once. Each row has both, for chains of 32k tokens on eight equal targets
in domains of their own: the worst and the mean share of usable prefix tokens when one target is dead.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.cluster.placement import Ranking
from kvstore.cluster.view import ReplicaPolicy
from kvstore.limits import DIGEST_BYTES, MiB
from kvstore.types import presets
from kvstore.types.layout import KVLayout
from kvstore_bench.measure import Row

TOKENS: Final = 32_768
TARGETS: Final = 8
RUN_BYTES: Final = (1, 4 * MiB, 16 * MiB, 64 * MiB, 256 * MiB, 1024 * MiB)
"""1 is one chunk a run."""
_SEED: Final = 16
_RUNS: Final = 40_000
_LAYOUTS: Final[Mapping[str, KVLayout]] = {
    "deepseek-v4-flash": presets.deepseek_v4_flash(),
    "deepseek-v3.2": presets.deepseek_v32(),
    "llama-3-8b": presets.llama_3_8b(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFigures:
    """Of many chains of one layout.

    Attributes:
        runs: Of each chain.
        usable_mean: Share of usable prefix tokens with one target dead, over all targets that may be the one.
        usable_worst: For the target whose loss costs most.
        usable_bare: `usable_mean` without copies of head runs.
        balance: Chunks of the fullest target over the mean, first copies only.
        spread: How many targets' rates one reader of one chain gets: its chunks over those of its busiest target.
    """

    runs: int
    usable_mean: float
    usable_worst: float
    usable_bare: float
    balance: float
    spread: float


def figures_of(layout: KVLayout, *, chains: int, seed: int, policy: ReplicaPolicy) -> PlacementFigures:
    """What the placement makes of `chains` chains of TOKENS tokens."""
    chunks = TOKENS // layout.chunk_tokens
    lengths = _run_lengths(chunks, layout.chunks_per_run)
    names = [f"t{at}" for at in range(TARGETS)]
    ranking = Ranking(dict.fromkeys(names, 1.0), {name: name for name in names})
    heads = random.Random(seed).randbytes(DIGEST_BYTES * chains * len(lengths))
    places = ranking.rank_batch(heads, policy.head_copies).reshape(chains, len(lengths), -1)
    copies = np.array([policy.copies_of(run_index=at) for at in range(len(lengths))])
    usable = [_usable(places, copies, lengths, dead) for dead in range(TARGETS)]
    bare = [_usable(places, np.ones_like(copies), lengths, dead) for dead in range(TARGETS)]
    first = places[:, :, 0]
    load = np.bincount(first.ravel(), weights=np.tile(lengths, chains), minlength=TARGETS)
    busiest = [np.bincount(chain, weights=lengths, minlength=TARGETS).max() for chain in first]
    return PlacementFigures(
        runs=len(lengths),
        usable_mean=float(np.mean(usable)),
        usable_worst=float(np.min(usable)),
        usable_bare=float(np.mean(bare)),
        balance=float(load.max() / load.mean()),
        spread=float(chunks / np.mean(busiest)),
    )


def run(*, quick: bool, folder: Path) -> Iterator[Row]:
    """One row for each layout and `run_bytes`. `folder` is not used."""
    del folder
    for name, layout in _LAYOUTS.items():
        for run_bytes in sorted({*RUN_BYTES, layout.run_bytes}):
            sized = replace(layout, run_bytes=run_bytes)
            runs = -(-(TOKENS // sized.chunk_tokens) // sized.chunks_per_run)
            chains = max(400, (_RUNS // 4 if quick else _RUNS) // runs)
            found = figures_of(sized, chains=chains, seed=_SEED, policy=ReplicaPolicy())
            label = "1 chunk" if run_bytes == 1 else f"{run_bytes // MiB} MiB"
            is_default = run_bytes == layout.run_bytes
            yield Row(
                name=f"placement: {name}, runs of {label}{' (default)' * is_default}",
                unit="usable",
                value=found.usable_mean,
                must=1 - 2 / TARGETS if is_default else None,
                details={
                    "runs": found.runs,
                    "usable_worst": found.usable_worst,
                    "usable_without_copies": found.usable_bare,
                    "balance": found.balance,
                    "targets_in_parallel": found.spread,
                },
            )


def _run_lengths(chunks: int, chunks_per_run: int) -> NDArray[np.int64]:
    """Chunks of each run of a chain."""
    full, rest = divmod(chunks, chunks_per_run)
    return np.array([chunks_per_run] * full + ([rest] if rest else []), np.int64)


def _usable(places: NDArray[np.intp], copies: NDArray[np.int64], lengths: NDArray[np.int64], dead: int) -> float:
    """Share of the chunks before the first hole, over all chains, when one target is dead."""
    written = np.arange(places.shape[2])[np.newaxis, np.newaxis, :] < copies[np.newaxis, :, np.newaxis]
    is_there = ((places != dead) & written).any(axis=2)
    before_hole = np.logical_and.accumulate(is_there, axis=1)
    return float((before_hole * lengths).sum() / (lengths.sum() * len(places)))

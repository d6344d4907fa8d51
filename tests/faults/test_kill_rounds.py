"""kill -9 at every step of a put under load: what was acknowledged is there, nothing else is, no byte is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.episode import Episode, EpisodePlan

ROUNDS = 15


def run(folder: Path, plan: EpisodePlan) -> None:
    episode = Episode(folder, plan)
    try:
        episode.run()
    finally:
        episode.node.close()
        starts = sorted(episode.node.starts_s)
        print(f"seed {plan.seed}: starts {starts[0]:.2f} to {starts[-1]:.2f} s" if starts else "it never started")
        for what, count in sorted(episode.told.items()):
            print(f"  {count:6} {what}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(6))
def test_acknowledged_chunks_survive(tmp_path: Path, seed: int) -> None:
    run(tmp_path, EpisodePlan(seed=seed, rounds=ROUNDS))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(100, 102))
def test_a_full_store_stays_right(tmp_path: Path, seed: int) -> None:
    run(tmp_path, EpisodePlan(seed=seed, rounds=ROUNDS, is_full=True))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200, 232))
def test_acknowledged_chunks_survive_all_night(tmp_path: Path, seed: int) -> None:
    run(tmp_path, EpisodePlan(seed=seed, rounds=ROUNDS))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(300, 308))
def test_a_full_store_stays_right_all_night(tmp_path: Path, seed: int) -> None:
    run(tmp_path, EpisodePlan(seed=seed, rounds=ROUNDS, is_full=True))

"""The demo as a person runs it: real processes, a real model, a node that is killed; and its synthetic twin."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore", "demo", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_the_synthetic_demo_restores_the_whole_prefix() -> None:
    done = run_demo("--synthetic")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1024 of 1040 in 32 chunks" in done.stdout
    assert "identical" in done.stdout


@pytest.mark.timeout(600)  # the first run on a machine downloads and converts the weights
def test_the_demo_generates_the_same_text_from_the_restored_cache_of_a_real_model() -> None:
    done = run_demo()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "960 of 974 in 30 chunks" in done.stdout
    assert "identical" in done.stdout

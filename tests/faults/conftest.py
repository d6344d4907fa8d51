"""Nodes and file systems for the fault tests; ended with the test, whatever it did to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.loop_lab import LoopLab, missing_for_loop_lab
from tests.faults.node import HurtNode


@pytest.fixture
def node(tmp_path: Path) -> Iterator[HurtNode]:
    """A node of 128 MiB without RAM cache: every get is read from the drive. Not started."""
    with HurtNode(tmp_path, cache="0") as node:
        yield node


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[LoopLab]:
    """Loop devices and mounts of one test. Needs root; else skipped, which CI counts as a failure."""
    if reason := missing_for_loop_lab():
        pytest.skip(reason)
    folder = tmp_path / "lab"
    folder.mkdir()
    lab = LoopLab(folder)
    yield lab
    lab.close()

"""A machine of files for each test, and real file systems where they can be made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.fake_system import FakeSystem
from kvstore.testing.loop_lab import LoopLab, missing_for_loop_lab


@pytest.fixture
def fake(tmp_path: Path) -> FakeSystem:
    """A machine of which nothing is known yet."""
    (tmp_path / "machine").mkdir()
    return FakeSystem(tmp_path / "machine")


@pytest.fixture(scope="session")
def loop_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopLab]:
    """Needs root and the tools; without them its tests are skipped, which CI counts as a failure."""
    if reason := missing_for_loop_lab():
        pytest.skip(reason)
    lab = LoopLab(tmp_path_factory.mktemp("loop"))
    try:
        yield lab
    finally:
        lab.close()

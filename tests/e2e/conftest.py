"""Real nodes for end-to-end tests: processes on loopback, free ports, data in the test's own folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cli.local_node import LocalNode


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    """A running node with 256 MiB on an empty data dir; ended with the test, whatever the test did to it."""
    local = LocalNode(tmp_path / "node", capacity="256MiB", arguments=("--cache", "32MiB", "--staging", "64MiB"))
    try:
        local.start()
        yield local
    finally:
        local.close()

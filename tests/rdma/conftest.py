"""The tests in guest/ run in the virtual machine only; what they said there is shown with the host's results."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

IN_GUEST = "KVSTORE_RDMA_GUEST" in os.environ
REPORTS: pytest.StashKey[list[str]] = pytest.StashKey()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out what has no RDMA device to run on."""
    return True if collection_path.name == "guest" and not IN_GUEST else None


@pytest.fixture
def machine_reports(request: pytest.FixtureRequest) -> list[str]:
    """Lines that the end of the run shows."""
    return request.config.stash.setdefault(REPORTS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Shows what ran in the machines."""
    lines = config.stash.get(REPORTS, [])
    if lines:
        terminalreporter.section("in the virtual machines")
        for line in lines:
            terminalreporter.write_line(line)

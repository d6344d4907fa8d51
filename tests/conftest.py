"""What holds for every test: in CI a skip is a failure, unless the test says that it needs hardware CI has not."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a skip into a failure where CI is set: what must run there must not be skipped silently."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and item.get_closest_marker("hardware") is None:
        if not hasattr(report, "wasxfail"):
            report.outcome = "failed"
            report.longrepr = f"skipped in CI, where it must run: {report.longrepr}"
    return report

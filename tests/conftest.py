"""What holds for every test: in CI a skip is a failure, unless the test needs hardware that CI has not."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from hypothesis import settings

# A slow moment of a shared machine is no failure: nothing here asserts on time.
settings.register_profile("house", deadline=None)
settings.load_profile("house")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a skip into a failure where CI is set: what must run there must not be skipped silently."""
    report = yield
    excused = item.get_closest_marker("hardware") is not None or hasattr(report, "wasxfail")
    if report.skipped and os.environ.get("CI") == "true" and not excused:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where it must run: {report.longrepr}"
    return report

"""What documents promise to name, they name."""

from __future__ import annotations

import re
from pathlib import Path

from kvstore.settings import NodeSettings

ROOT = Path(__file__).resolve().parents[2]


def test_the_operations_page_names_every_setting() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    missing = [name for name in NodeSettings.model_fields if f"`{name}`" not in page]
    assert not missing, f"docs/operations.md does not say what these settings do: {missing}"


def test_the_operations_page_names_no_metric_that_is_gone() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    source = (ROOT / "kvstore" / "telemetry" / "metrics.py").read_text()
    named = set(re.findall(r"`(kvstore_\w+)", page))
    # what Prometheus adds to the names of counters and of facts
    gone = [name for name in named if f'"{re.sub("_(total|info)$", "", name)}"' not in source]
    assert not gone, f"docs/operations.md names metrics that nobody renders: {gone}"


def test_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "./dev demo" in readme
    assert "./dev test" in readme

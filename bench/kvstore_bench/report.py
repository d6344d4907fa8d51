"""Reports: a table for people, JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from kvstore import __version__
from kvstore_bench.measure import Row

LEGEND = "the word behind the targets: aim or must is the one that is reached, missed says neither"


def line_of(row: Row) -> str:
    """One row as text: value, unit, targets, verdict, and the figures behind it."""
    target = "" if row.must is None else f"must {row.must:g}" + ("" if row.aim is None else f" aim {row.aim:g}")
    details = "  ".join(f"{name}={value:.3g}" for name, value in row.details.items())
    return f"{row.name:58s} {row.value:9.3f} {row.unit:16s} {target:18s} {row.verdict:7s} {details}{row.note}"


def as_json(scenario: str, rows: Sequence[Row]) -> str:
    """The whole run with the machine it ran on."""
    machine = {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
    body = {
        "scenario": scenario,
        "kvstore": __version__,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "rows": [asdict(row) | {"verdict": row.verdict} for row in rows],
    }
    return json.dumps(body, indent=2)


def write_json(path: Path, scenario: str, rows: Sequence[Row]) -> None:
    """Write the report. Raises OSError."""
    path.write_text(as_json(scenario, rows) + "\n")

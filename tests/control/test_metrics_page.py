"""docs/metrics.md lists every metric that a node shows, with the help it has in the code."""

from __future__ import annotations

from pathlib import Path

from kvstore.telemetry.instruments import Instrument, Kind, instruments_of
from kvstore.telemetry.metrics import ROOMS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
SUFFIX = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "", Kind.INFO: "_info"}


def labels_of(instruments: list[Instrument]) -> str:
    """The labels of a family with their values, as the page writes them."""
    first = instruments[0]
    if first.kind is Kind.INFO:
        return ", ".join(f"`{instrument.index_label}`" for instrument in instruments)
    if first.index_label:
        return f"`{first.index_label}`: {', '.join(value for value in first.index_values if value)}"
    return ", ".join(
        f"`{name}`: {', '.join(dict.fromkeys(dict(instrument.labels)[name] for instrument in instruments))}"
        for name, _ in first.labels
    )


def expected_table() -> list[str]:
    """The rows of the page's tables, room by room."""
    rows: list[str] = []
    for name, room in ROOMS.items():
        rows += [f"## {name}", "", (room.__doc__ or "").strip().splitlines()[0], ""]
        rows += ["| metric | type | labels | meaning |", "|---|---|---|---|"]
        families: dict[str, list[Instrument]] = {}
        for instrument in instruments_of(room).values():
            families.setdefault(instrument.family, []).append(instrument)
        for family, instruments in families.items():
            first = instruments[0]
            metric = f"`{family}{SUFFIX[first.kind]}`"
            rows.append(f"| {metric} | {first.kind.value} | {labels_of(instruments)} | {first.help} |")
        rows.append("")
    return rows


def test_the_page_is_complete_and_current() -> None:
    """To write it anew: replace everything from the first room on by what this test expects."""
    lines = PAGE.read_text().splitlines()
    found = lines[lines.index("## engine") :]
    assert found == expected_table()[:-1]

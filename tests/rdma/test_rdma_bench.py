"""The scenario that measures what RDMA costs in Python runs where there is a library, without a device."""

from __future__ import annotations

from pathlib import Path

from kvstore_bench.main import main


def test_the_transport_scenario_needs_no_device(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert main(["run", "transport", "--quick", "--only", "ibverbs", "--json", str(out)]) == 0
    text = out.read_text()
    assert "ibverbs: post, 32 at once" in text
    assert "us per request" in text


def test_reads_are_measured_on_scripted_devices(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert main(["run", "transport", "--quick", "--only", "reads", "--json", str(out)]) == 0
    text = out.read_text()
    assert "read of 16 x 256 KiB by RDMA" in text
    assert "node_in_frames_us" in text

"""What `kvstore status` and the status page tell a person, also while there is little to tell."""

from __future__ import annotations

import pytest

from kvstore.server.grpc_edge.messages import stats_message, stats_value
from kvstore.server.report import NodeReport, NodeState
from kvstore.server.summary import summary_lines
from kvstore.telemetry.registry import Snapshot


def lines_of(state: NodeState, numbers: Snapshot) -> dict[str, str]:
    """Name and words of each line."""
    report = NodeReport(
        node_id="n",
        version="1",
        state=state,
        epoch=1,
        uptime_seconds=1.0,
        pid=1,
        grpc="127.0.0.1:1",
        metrics="127.0.0.1:2",
        workers=(),
        numbers=numbers,
    )
    return {line.name: line.value for line in summary_lines(report)}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (NodeState.RECOVERING, "recovering: the drives are being read"),
        (NodeState.DOWN, "not known (no worker answers)"),
    ],
)
def test_a_node_that_knows_nothing_yet_shows_no_zeros_as_facts(state: NodeState, words: str) -> None:
    lines = lines_of(state, {"supervisor": {}})
    assert lines["stored"] == lines["device"] == words
    assert "RAM cache" not in lines


def test_a_fenced_node_says_so_first_and_why() -> None:
    report = NodeReport(
        node_id="n",
        version="1",
        state=NodeState.SERVING,
        epoch=1,
        uptime_seconds=1.0,
        pid=1,
        grpc="127.0.0.1:1",
        metrics="127.0.0.1:2",
        workers=(),
        numbers={},
        fence="lease lost 3 s ago",
    )
    first, second, *_ = summary_lines(report)
    assert "serving" not in first.value
    assert first.value.startswith("fenced")
    assert "refuses puts" in second.value
    assert second.value.endswith("lease lost 3 s ago")
    assert stats_value(stats_message(report)) == report, "it travels"


def test_one_record_is_no_records() -> None:
    lines = lines_of(NodeState.SERVING, {"engine": {"records": 1, "evicted_records": 2}})
    assert lines["stored"].startswith("1 record, ")
    assert lines["eviction"] == "2 records evicted"

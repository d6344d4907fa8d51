"""What `kvstore status` looks like: no word is split and nothing cut off, on a narrow terminal and in a pipe."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any
from unicodedata import east_asian_width

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvstore.cli.cluster_status import NodeAnswer, TargetLine
from kvstore.cli.columns import Column, Kind, lay_out, text_width
from kvstore.cli.render import json_line, show_status
from kvstore.cli.screen import Screen
from kvstore.cluster.view import Target, TargetState, View
from kvstore.server.report import DriveReport, DriveState, NodeReport, NodeState, NodeWhere, WorkerReport, WorkerState

GIB = 1 << 30
IPV6 = "[2001:db8:85a3:8d3:1319:8a2e:370:7348]:7401"


def line(number: int, node: str, **changes: object) -> TargetLine:
    made = TargetLine(
        node_id=node,
        id=f"{number:04x}" * 8,
        state="serving",
        drive="serving",
        data=(IPV6,),
        capacity_bytes=100 * GIB,
        used_bytes=number * GIB,
        hits=number,
        keys=1000,
        sent_bytes_second=123.4 * (1 << 20),
        received_bytes_second=5.6 * (1 << 20),
        mode="threads",
        epoch=417,
        grpc=f"{node}:7400",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def own_report(lines: list[TargetLine]) -> NodeReport:
    worker = WorkerReport(rail=0, pid=4711, state=WorkerState.SERVING, data=(IPV6,), restarts=0, detail="")
    drives = [
        DriveReport(path=f"/srv/kv/{one.id[:4]}", id=one.id, rail=0, state=DriveState.SERVING, detail="")
        for one in lines
        if one.node_id == lines[0].node_id
    ]
    return NodeReport(
        node_id=lines[0].node_id,
        version="1.0",
        state=NodeState.SERVING,
        epoch=417,
        uptime_seconds=60.0,
        pid=4711,
        grpc=IPV6,
        metrics=IPV6,
        workers=(worker,),
        numbers={},
        drives=tuple(drives),
        nodes=tuple(NodeWhere(node_id=node, grpc=IPV6) for node in sorted({one.node_id for one in lines})),
    )


def view_of(lines: list[TargetLine]) -> View:
    targets = [
        Target(id=one.id, data=one.data, weight=1.0, state=TargetState.SERVING, node_id=one.node_id) for one in lines
    ]
    return View(epoch=417, node_id="", cluster="prod", targets=tuple(targets))


def shown(lines: list[TargetLine], width: int | None, *, silent: str = "") -> str:
    answers = [
        NodeAnswer(
            node_id=where.node_id,
            grpc=where.grpc,
            report=None if where.node_id == silent else own_report(lines),
            failure="it was silent for 3 s; is it there, and is the port open?" if where.node_id == silent else "",
        )
        for where in own_report(lines).nodes
    ]
    return told(width, own_report(lines), view_of(lines), answers, lines)


def told(width: int | None, *what: Any) -> str:
    """What `show_status` shows, without colours."""
    out = io.StringIO()
    console = Console(file=out, width=width or 80, force_terminal=width is not None, no_color=True, highlight=False)
    show_status(Screen(console), *what)
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


READ_ONLY = "/srv/kv/2: the file system refuses writes; mount it for writing, then start the node again"
MANY = [line(number, f"node-{number // 4:02}") for number in range(40)]
LONG = [line(number, f"kvstore-storage-node-{number}.rack-17.eu-central-1.example.org") for number in range(3)]
WRONG = [
    line(1, "a"),
    line(
        2,
        "a",
        drive="read-only",
        detail="/srv/kv/2: the file system refuses writes; mount it for writing, then start the node again",
    ),
    line(
        3, "b", state="recovering", drive="no answer", used_bytes=None, epoch=0, mode="", detail="it was silent for 3 s"
    ),
    line(4, "c", state="", drive="foreign", used_bytes=None, capacity_bytes=0),
]


@pytest.mark.parametrize("lines", [MANY, LONG, WRONG], ids=["many", "long names", "wrong"])
@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_terminal_shows_everything_within_its_width(lines: list[TargetLine], width: int) -> None:
    text = shown(lines, width, silent=lines[-1].node_id)
    table = text[text.index("cluster prod") :]
    for one in lines:
        assert any(one.id.startswith(word) for word in table.split() if len(word) >= 8), "its target is there"
        assert one.node_id in table
        assert one.grpc in table.split(), "what `kvstore drain --node` needs"
        for words in filter(None, (one.state, one.drive if one.drive != "serving" else "", *one.detail.split())):
            assert words in table
    headers = ("node", "address", "epoch", "target", "state", "capacity", "used", "hit rate", "out/s", "in/s", "device")
    for header in headers:
        assert re.search(rf"(^|\s){header}(\s|:|$)", table, re.MULTILINE), header
    too_long = [row for row in text.splitlines() if len(row) > width]
    assert not [row for row in too_long if len(row.split()) > 3], "only a word that fits nowhere is longer"
    assert IPV6 in text


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_usual_cluster_is_one_line_a_target(width: int) -> None:
    text = shown(MANY, width)
    rows = [row for row in text[text.index("cluster prod") :].splitlines() if "threads" in row]
    assert len(rows) == len(MANY)
    assert len({row.index("threads") for row in rows}) == 1, "columns stand below each other"
    for row in rows:
        assert re.search(r"100\.0 GiB +\d+\.0 % +\d+ % +123\.4 MiB +5\.6 MiB  threads", row), row


@pytest.mark.parametrize("lines", [MANY, LONG, WRONG], ids=["many", "long names", "wrong"])
def test_a_pipe_gets_one_line_a_target_with_all_columns(lines: list[TargetLine]) -> None:
    text = shown(lines, None)
    table = text[text.index("cluster prod") :].splitlines()
    header, rows = table[1], table[2 : 2 + len(lines)]
    assert header.split()[:5] == ["node", "address", "epoch", "target", "state"]
    for one, row in zip(lines, rows, strict=True):
        assert row.startswith(one.node_id)
        assert row.endswith(one.detail or row[-1])


def test_a_target_is_named_by_as_much_as_tells_it_from_others() -> None:
    twins = [line(1, "a", id="0123456789abcdef" + "0" * 16), line(1, "a", id="0123456789abc000" + "0" * 16)]
    text = shown(twins, 80)
    assert "0123456789abcd " in text
    assert "0123456789abc0 " in text


def test_a_tenant_is_told_the_targets_by_as_short_names() -> None:
    """Without the scope admin there are no drives in the report, and no node is asked."""
    lines = MANY[:3]
    text = told(100, replace(own_report(lines), drives=()), view_of(lines))
    for one in lines:
        assert f"{one.id[:8]} " in text
        assert one.id[:9] not in text


def test_json_of_watch_is_one_line() -> None:
    text = json_line({"targets": MANY})
    assert "\n" not in text
    assert len(json.loads(text)["targets"]) == len(MANY)


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z", "M")), min_size=1, max_size=12)
CELLS = st.lists(WORDS, max_size=6).map(" ".join)


@given(
    st.lists(st.tuples(st.sampled_from(Kind), st.booleans()), min_size=1, max_size=6),
    st.data(),
    st.one_of(st.none(), st.integers(10, 120)),
)
def test_no_word_is_lost_split_or_cut(kinds: list[tuple[Kind, bool]], data: st.DataObject, width: int | None) -> None:
    columns = [Column(header=f"h{at}", kind=kind, is_number=right) for at, (kind, right) in enumerate(kinds)]
    rows = data.draw(st.lists(st.lists(CELLS, min_size=len(columns), max_size=len(columns)), max_size=5))
    lines = [one.text for one in lay_out(columns, rows, width)]
    told = [word for one in lines for word in one.split()]
    for row in rows:
        for cell in row:
            for word in cell.split():
                assert word in told
    if width is None:
        assert len(lines) == 1 + len(rows)


def test_wide_characters_count_twice() -> None:
    assert text_width("機械a") == 5
    assert east_asian_width("機") == "W"

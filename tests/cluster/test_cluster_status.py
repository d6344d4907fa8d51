"""`kvstore status` over a cluster: all nodes are in it, also those that do not answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.cluster_status import NodeAnswer, ask_all, relay_rows, target_lines
from kvstore.cluster.view import Relay, Target, TargetState, View
from kvstore.errors import DeadlineExceeded
from kvstore.server.report import DriveReport, DriveState, NodeReport, NodeState, NodeWhere, WorkerReport, WorkerState
from kvstore.testing.etcd_process import EtcdProcess
from kvstore.testing.serve_process import ServeProcess


def report(name: str, *drives: DriveReport) -> NodeReport:
    worker = WorkerReport(
        rail=0,
        pid=1,
        state=WorkerState.SERVING,
        data=("h:1",),
        restarts=0,
        detail="",
        sent_bytes_second=5.0,
        lookup_keys=10,
        lookup_hits=7,
    )
    return NodeReport(
        node_id=name,
        version="1",
        state=NodeState.SERVING,
        epoch=9,
        uptime_seconds=1.0,
        pid=1,
        grpc=f"{name}:7400",
        metrics="",
        workers=(worker,),
        numbers={},
        drives=drives,
    )


def drive(target: str, *, state: DriveState = DriveState.SERVING, capacity_bytes: int = 100) -> DriveReport:
    used = capacity_bytes // 2
    return DriveReport(
        path=f"/{target}", id=target, rail=0, state=state, detail="", capacity_bytes=capacity_bytes, live_bytes=used
    )


def target(name: str, node: str, state: TargetState = TargetState.SERVING) -> Target:
    return Target(id=name, data=(f"{node}:1",), weight=1.0, state=state, node_id=node, capacity_bytes=100)


def test_every_target_has_a_line_whoever_answers() -> None:
    view = View(
        epoch=9,
        node_id="",
        cluster="c",
        targets=(target("t1", "a"), target("t2", "b"), target("t3", "gone", TargetState.DOWN)),
    )
    answers = (
        NodeAnswer(
            node_id="a",
            grpc="a:7400",
            report=report("a", drive("t1"), drive("bad", state=DriveState.FOREIGN, capacity_bytes=0)),
        ),
        NodeAnswer(node_id="b", grpc="b:7400", report=None, failure="it was silent"),
    )
    lines = {line.id: line for line in target_lines(view, answers)}
    assert list(lines) == ["bad", "t1", "t2", "t3"]
    good = lines["t1"]
    assert (good.state, good.drive, good.used_bytes, good.hits, good.keys) == ("serving", "serving", 50, 7, 10)
    assert (good.epoch, good.sent_bytes_second, good.grpc) == (9, 5.0, "a:7400")
    assert (lines["bad"].state, lines["bad"].drive, lines["bad"].used_bytes) == ("", "foreign", None)
    assert (lines["t2"].state, lines["t2"].drive, lines["t2"].detail) == ("serving", "no answer", "it was silent")
    assert (lines["t2"].capacity_bytes, lines["t2"].grpc) == (100, "b:7400"), "the view and the store know it"
    assert (lines["t3"].state, lines["t3"].drive) == ("down", "")


def test_a_fenced_node_is_shown_as_such_and_why() -> None:
    view = View(epoch=9, node_id="", cluster="c", targets=(target("t1", "a"), target("t2", "a")))
    said = replace(report("a", drive("t1"), drive("t2", state=DriveState.SUSPECT)), fence="lease lost 3 s ago")
    lines = {line.id: line for line in target_lines(view, (NodeAnswer(node_id="a", grpc="a:7400", report=said),))}
    assert (lines["t1"].drive, lines["t1"].detail) == ("fenced", "fenced: lease lost 3 s ago")
    assert lines["t2"].drive == "suspect", "what is worse with it stays"


def test_one_that_fails_does_not_keep_the_others_from_answering() -> None:
    def ask(address: str) -> NodeReport:
        if address == "b:7400":
            raise DeadlineExceeded("b was silent for 3 s")
        return report("c")

    nodes = [NodeWhere(node_id=name, grpc=f"{name}:7400") for name in "abc"]
    answers = ask_all(report("a"), nodes, ask)
    assert [(one.node_id, one.report is not None) for one in answers] == [("a", True), ("b", False), ("c", True)]
    assert answers[1].failure == "b was silent for 3 s"


def test_relays_have_a_row() -> None:
    relay = Relay(id="r1", data=("h:1", "h:2"), state=TargetState.SERVING, node_id="decode-1", label="rack")
    assert relay_rows([relay]) == [("decode-1", "r1", "serving", "h:1, h:2", "rack")]


def status(node: ServeProcess, *arguments: str) -> str:
    command = [sys.executable, "-m", "kvstore", "status", "--node", node.wait_ready().grpc, *arguments]
    wide = os.environ | {"COLUMNS": "250"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=wide).stdout


@pytest.mark.timeout(180)
def test_a_cluster_is_shown_by_any_node_and_with_a_node_that_is_silent(
    tmp_path: Path, shared_etcd: EtcdProcess
) -> None:
    with ExitStack() as stack:
        nodes: dict[str, ServeProcess] = {}
        for name in "ab":
            (tmp_path / name).mkdir()
            place = ("--cluster", f"etcd://{shared_etcd.members}/{tmp_path.name}", "--node-id", name)
            nodes[name] = stack.enter_context(ServeProcess(tmp_path / name, *place, "--lease-ttl", "120s"))

        def shown(by: str) -> dict[str, Any]:
            found: dict[str, Any] = json.loads(status(nodes[by], "--json"))
            return found

        until_both = time.monotonic() + 60
        while len((seen := shown("b"))["targets"]) < 2 or len(seen["nodes"]) < 2:
            assert time.monotonic() < until_both, seen
        assert [line["node_id"] for line in seen["targets"]] == ["a", "b"]
        assert {line["drive"] for line in seen["targets"]} == {"serving"}
        assert all(line["mode"] and line["epoch"] and line["used_bytes"] is not None for line in seen["targets"])
        assert [one["node_id"] for one in shown("a")["nodes"]] == ["a", "b"]
        nodes["b"].process.send_signal(signal.SIGSTOP)
        try:
            seen = shown("a")
            assert [line["drive"] for line in seen["targets"]] == ["serving", "no answer"]
            assert seen["nodes"][1]["report"] is None
            text = status(nodes["a"])
            assert "node without an answer" in text
            assert "2 nodes, 2 targets" in text
        finally:
            nodes["b"].process.send_signal(signal.SIGCONT)


@pytest.mark.timeout(180)
def test_a_node_that_lost_its_etcd_says_that_it_is_fenced_until_it_is_back(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    with EtcdProcess(tmp_path / "etcd") as etcd:
        place = ("--cluster", f"etcd://{etcd.members}/fence", "--node-id", "a", "--lease-ttl", "5s")
        with ServeProcess(tmp_path / "node", *place) as node:

            def until_fence(word: str) -> dict[str, Any]:
                until = time.monotonic() + 60
                while True:
                    seen: dict[str, Any] = json.loads(status(node, "--json"))
                    if bool(seen["node"]["fence"]) is bool(word) and word in seen["node"]["fence"]:
                        return seen
                    assert time.monotonic() < until, seen["node"]["fence"]

            until_fence("")
            etcd.kill_all()
            (line,) = until_fence("unreachable")["targets"]
            assert line["drive"] == "fenced"
            assert "lease lost" in line["detail"]
            text = status(node)
            assert "fenced, up for" in text
            assert "refuses puts, deletes and drops" in text
            etcd.restart_all()
            assert until_fence("")["targets"][0]["drive"] == "serving"

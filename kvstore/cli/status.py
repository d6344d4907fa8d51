"""`kvstore status`: once, or again every two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from kvstore.cli.cluster_status import NodeAnswer, TargetLine, ask_all, target_lines
from kvstore.cli.render import json_line, json_text, show_status
from kvstore.cli.screen import Screen
from kvstore.cluster.view import View
from kvstore.errors import Retryable
from kvstore.server.grpc_edge.client import ControlClient
from kvstore.server.report import NodeReport

_WATCH_SECONDS: Final = 2.0

Connect = Callable[[str], AbstractContextManager[ControlClient]]
_Found = tuple[NodeReport, View, tuple[NodeAnswer, ...], tuple[TargetLine, ...]]


def run_status(client: ControlClient, connect: Connect, *, as_json: bool, watch: bool) -> None:
    """Show how a node and its cluster are.

    With `watch` it ends only when it is interrupted: a node that does not answer is told, and asked again. In JSON each
    time is one object, on a line of its own with `watch`.

    Args:
        client: of the node that is asked.
        connect: a client of another node, by its gRPC address. Called on several threads.

    Raises:
        KVStoreError: without `watch`, the node's.
    """

    def ask(address: str) -> NodeReport:
        with connect(address) as other:
            return other.report()

    def find() -> _Found:
        report, view = client.report(), client.view()
        is_told_all = bool(report.drives)  # a tenant is not: of other nodes it would learn no more than the view says
        answers = ask_all(report, report.nodes, ask) if is_told_all else ()
        return report, view, answers, target_lines(view, answers) if answers else ()

    screen = Screen()
    if not watch:
        found = find()
        if as_json:
            print(json_text(_fields(found)))
        else:
            show_status(screen, *found)
        return
    while True:
        try:
            found = find()
        except Retryable as error:
            print(f"kvstore: {error}", file=sys.stderr, flush=True)
        else:
            if as_json:
                print(json_line(_fields(found)), flush=True)
            else:
                screen.clear()
                show_status(screen, *found)
        time.sleep(_WATCH_SECONDS)


def _fields(found: _Found) -> dict[str, object]:
    report, view, answers, lines = found
    return {"node": report, "view": view, "nodes": answers, "targets": lines}

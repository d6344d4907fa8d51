"""The page at / of the metrics port: one self-contained piece of HTML, without scripts."""

from __future__ import annotations

from html import escape
from typing import Final

from kvstore.server.report import NodeReport, WorkerReport
from kvstore.server.summary import summary_lines

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .8rem .3rem 0;"
    "border-bottom:1px solid #8884;vertical-align:top}th{font-weight:600;white-space:nowrap}"
    ":root{color-scheme:light dark}"
)


def status_page(report: NodeReport) -> str:
    """The page. Refreshes itself every 5 seconds."""
    facts = "".join(_row(line.name, line.value) for line in summary_lines(report))
    workers = "".join(_row(f"worker {worker.rail}", _worker(worker)) for worker in report.workers)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5">'
        f"<title>kvstore {escape(report.node_id)}: {escape(report.state)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>kvstore {escape(report.node_id)}</h1><table>{facts}{workers}</table>"
        '<p><a href="/metrics">metrics</a> <a href="/healthz">health</a></p></body></html>'
    )


def _row(name: str, value: str) -> str:
    return f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"


def _worker(worker: WorkerReport) -> str:
    detail = f" ({worker.detail})" if worker.detail else ""
    where = ", ".join(worker.data) or "no address yet"
    return f"{worker.state}{detail}, pid {worker.pid}, data {where}, restarted {worker.restarts} times"

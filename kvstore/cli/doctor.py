"""`kvstore doctor`: the findings as a table for people, and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvstore.cli.columns import Column, Kind
from kvstore.cli.screen import Screen
from kvstore.doctor.examination import examine
from kvstore.doctor.finding import Finding, Status, worst
from kvstore.errors import InvalidRequest
from kvstore.server.tenants_file import load_tenants
from kvstore.settings import NodeSettings

JSON_VERSION: Final = 1
"""Grows when a field changes its meaning or goes; new fields and new checks do not make it grow."""
NOTHING_FAILS: Final = 0
SOMETHING_FAILS: Final = 1


def run_doctor(flags: Mapping[str, object], *, config: Path | None, as_json: bool) -> int:
    """Examine the machine and print what was found.

    Returns:
        Exit status: NOTHING_FAILS unless some finding is failing; warnings do not count.
    """
    findings = examine(flags, config=config, more_faults=_faults_of_tenants)
    if as_json:
        print(json_of(findings))
    else:
        _show(Screen(), findings)
    return SOMETHING_FAILS if worst(findings) is Status.FAILING else NOTHING_FAILS


def _faults_of_tenants(settings: NodeSettings) -> list[str]:
    try:
        if settings.tenants:
            load_tenants(Path(settings.tenants))
    except InvalidRequest as error:
        return [str(error)]
    return []


def json_of(findings: Sequence[Finding]) -> str:
    """The documented form (docs/operations.md), all fields always there."""
    lines = [
        {
            "check": finding.check,
            "subject": finding.subject,
            "status": finding.status.value,
            "found": finding.found,
            "needed": finding.needed,
            "reason": finding.reason,
            "fix": finding.fix
            and {
                "shell": finding.fix.shell,
                "systemd": finding.fix.systemd,
                "kubernetes": finding.fix.kubernetes,
            },
        }
        for finding in findings
    ]
    whole = {"version": JSON_VERSION, "status": worst(findings).value, "findings": lines}
    return json.dumps(whole, indent=2, ensure_ascii=False)


def _show(screen: Screen, findings: Sequence[Finding]) -> None:
    rows = [
        (
            finding.status.value,
            " ".join(filter(None, (finding.check, finding.subject))),
            finding.needed,
            "\n".join(filter(None, (finding.found, finding.reason))),
        )
        for finding in findings
    ]
    texts = (Column(header="needed", kind=Kind.NOTE), Column(header="found", kind=Kind.TEXT))
    screen.grid("", (Column(header=""), Column(header="check"), *texts), rows)
    for finding in findings:
        if finding.fix is not None:
            screen.line(f"\n{finding.status.value}: {' '.join(filter(None, (finding.check, finding.subject)))}")
            screen.line(f"  shell:      {finding.fix.shell}")
            screen.line(f"  systemd:    {finding.fix.systemd}")
            screen.line(f"  Kubernetes: {finding.fix.kubernetes}")
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    screen.line(f"\n{counts[Status.OK]} ok, {counts[Status.WARNING]} warning, {counts[Status.FAILING]} failing")

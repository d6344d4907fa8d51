"""One line of the doctor's table: the value found against the value needed, and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """How bad it is.

    OK: as needed. WARNING: the node serves, but slower, with less, or at a risk that is named. FAILING: it cannot
    start, or cannot keep what its settings promise.
    """

    OK = "ok"
    WARNING = "warning"
    FAILING = "failing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """What to do, exactly, in each of the ways that nodes are run.

    Attributes:
        shell: commands for a node started by hand, as root where that is needed.
        systemd: lines of the unit, with their section where it is not [Service].
        kubernetes: fields of the pod or values, or what to do on the machine below it.
    """

    shell: str
    systemd: str
    kubernetes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer of one check about one thing.

    Attributes:
        check: stable name of the check, such as "memlock".
        subject: what was looked at where there are several: a data dir, an address, a device; else "".
        status: the verdict.
        found: the value found, in words.
        needed: the value needed, in words.
        reason: why it matters or why it was chosen; "" where found and needed say all.
        fix: what to do; None only where nothing is to be done.
    """

    check: str
    subject: str = ""
    status: Status
    found: str
    needed: str
    reason: str = ""
    fix: Fix | None = None

    def __post_init__(self) -> None:
        assert self.status is Status.OK or self.fix is not None, f"{self.check}: a verdict without a fix"

    @property
    def sentence(self) -> str:
        """The finding in one line, for logs: what, found, needed, why, and the three fixes."""
        what = f"{self.check} {self.subject}" if self.subject else self.check
        parts = [f"{what}: {self.found}, needed: {self.needed}"]
        if self.reason:
            parts.append(self.reason)
        if self.fix:
            parts.append(f"shell: {self.fix.shell} | systemd: {self.fix.systemd} | Kubernetes: {self.fix.kubernetes}")
        return "; ".join(parts)


def worst(findings: Iterable[Finding]) -> Status:
    """The gravest verdict among findings; OK where there are none."""
    found = {finding.status for finding in findings}
    return next((status for status in (Status.FAILING, Status.WARNING) if status in found), Status.OK)


def words_of_bytes(size_bytes: int | None) -> str:
    """A size for people, "1.5 GiB"; None is "unlimited"."""
    if size_bytes is None:
        return "unlimited"
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

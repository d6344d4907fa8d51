"""The parts in C: each has a twin in Python that gives the same answers, slower. Which are missing here, and why."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from kvstore.doctor.finding import Finding, Fix, Status
from kvstore.types.compiled import BUILD_AGAIN, require_interface

COMPILED_PARTS: Final[Mapping[str, str]] = {
    "kvstore.device._uring": "drives are driven by a pool of threads",
    "kvstore.engine._records": "cold reads are checked in Python",
    "kvstore.engine._search": "keys are looked up in Python",
    "kvstore.transport._exchange": "single reads are exchanged in Python",
    "kvstore.transport._inflow": "batches are received in Python",
    "kvstore.transport._outflow": "the loop takes a turn for each part that a socket takes",
    "kvstore.transport._put_lane": "puts are received in Python",
    "kvstore.types._sums": "puts, and reads of shared memory, are summed more slowly",
}
"""Module of each part, and what happens without it."""


def read_compiled(names: Mapping[str, str] = COMPILED_PARTS) -> dict[str, str]:
    """The parts that cannot be imported, or are of another build, and why not."""
    missing = {}
    for name in names:
        try:
            require_interface(import_module(name))
        except ImportError as error:
            missing[name] = str(error)
    return missing


def check_compiled(missing: Mapping[str, str]) -> Finding:
    """Whether all parts are there. None of them is needed to be right."""
    there = len(COMPILED_PARTS) - len(missing)
    return Finding(
        check="compiled_parts",
        status=Status.WARNING if missing else Status.OK,
        found=f"{there} of {len(COMPILED_PARTS)}" + "".join(f"; {why}" for why in missing.values()),
        needed="all, to be fast",
        reason="; ".join(COMPILED_PARTS[name] for name in missing),
        fix=_fix() if missing else None,
    )


def _fix() -> Fix:
    again = BUILD_AGAIN
    return Fix(
        shell=f"install a C compiler and Python's headers (apt-get install gcc python3-dev), then {again}",
        systemd=f"as for the shell, in the environment of ExecStart: {again}",
        kubernetes="an image that was built with a C compiler (gcc and python3-dev in its build stage)",
    )

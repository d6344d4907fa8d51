"""The line about compiled parts: all built here, each missing one named with what is slower without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvstore.doctor.compiled import COMPILED_PARTS, check_compiled, read_compiled
from kvstore.doctor.finding import Status
from kvstore.types.compiled import INTERFACES

WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None  # what Python itself does to forbid an import
from kvstore.doctor.compiled import check_compiled, read_compiled
finding = check_compiled(read_compiled())
print(finding.status.value, "|", finding.found, "|", finding.reason)
"""

STALE = """
import sys, types
from importlib import import_module
name = sys.argv[1]
stale = sys.modules[name] = types.ModuleType(name)  # as a build from before there were numbers
if sys.argv[3]:
    stale.INTERFACE = int(sys.argv[3])
twin = import_module(sys.argv[2])
print(getattr(twin, "IS_COMPILED", not getattr(twin, "BINDING_MISSING", "")), end="|")
from kvstore.doctor.compiled import check_compiled, read_compiled
print(check_compiled(read_compiled()).found)
"""
TWINS = {
    "kvstore.device._uring": "kvstore.device.uring_probe",
    "kvstore.engine._records": "kvstore.engine.packing",
    "kvstore.engine._search": "kvstore.engine.index",
    "kvstore.transport._exchange": "kvstore.transport.exchange",
    "kvstore.transport._inflow": "kvstore.transport.inflow",
    "kvstore.transport._outflow": "kvstore.transport.outflow",
    "kvstore.transport._put_lane": "kvstore.transport.put_lane",
    "kvstore.types._sums": "kvstore.types.checksum",
}


def test_all_parts_are_built_where_the_tests_run() -> None:
    finding = check_compiled(read_compiled())
    assert finding.status is Status.OK, finding.found
    assert finding.found == "8 of 8"


@pytest.mark.parametrize("name", COMPILED_PARTS)
def test_a_missing_part_is_named_with_what_is_slower(name: str) -> None:
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT, name], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert told.startswith("warning | 7 of 8; ")
    assert name in told.split("|")[1]
    assert told.strip().endswith(COMPILED_PARTS[name])


@pytest.mark.parametrize("number", ["", "999"])
@pytest.mark.parametrize("name", COMPILED_PARTS)
def test_a_part_of_another_build_is_not_used_and_named(name: str, number: str) -> None:
    told = subprocess.run(
        [sys.executable, "-c", STALE, name, TWINS[name], number], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    used, _, found = told.partition("|")
    assert used == "False"
    assert found.startswith(f"7 of 8; {name} is of another build: interface {number or 'without a number'}, ")
    assert f"goes with {INTERFACES[name]}; build it again" in found


def test_a_missing_part_has_a_fix() -> None:
    finding = check_compiled({"kvstore.engine._search": "not built"})
    assert finding.fix is not None
    assert "gcc" in finding.fix.shell

"""The line about compiled parts: all built here, each missing one named with what is slower without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvstore.doctor.compiled import COMPILED_PARTS, check_compiled, read_compiled
from kvstore.doctor.finding import Status

WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None  # what Python itself does to forbid an import
from kvstore.doctor.compiled import check_compiled, read_compiled
finding = check_compiled(read_compiled())
print(finding.status.value, "|", finding.found, "|", finding.reason)
"""


def test_all_parts_are_built_where_the_tests_run() -> None:
    finding = check_compiled(read_compiled())
    assert finding.status is Status.OK, finding.found
    assert finding.found == "4 of 4"


@pytest.mark.parametrize("name", COMPILED_PARTS)
def test_a_missing_part_is_named_with_what_is_slower(name: str) -> None:
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT, name], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert told.startswith("warning | 3 of 4; ")
    assert name in told.split("|")[1]
    assert told.strip().endswith(COMPILED_PARTS[name])


def test_a_missing_part_has_a_fix() -> None:
    finding = check_compiled({"kvstore.engine._search": "not built"})
    assert finding.fix is not None
    assert "gcc" in finding.fix.shell

"""Boots the machines, and passes if all passed in them and nothing was skipped."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.rdma.network import PYVERBS, TWO_DEVICES
from tests.vm.boot_image import PROGRAMS
from tests.vm.machine import VirtualMachine, missing_programs

GUEST = Path(__file__).parent / "guest"
REPORT = "report.xml"
WAIT_S = 300
MISSING = [*missing_programs((*PROGRAMS, "rdma", "ip")), *([] if Path(PYVERBS).exists() else [PYVERBS])]

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.timeout(WAIT_S + 60),
    pytest.mark.skipif(bool(MISSING), reason=f"the virtual machine needs {MISSING}"),
]


def pytest_command(*tests: Path) -> list[str]:
    """Runs them in a guest, whose file system cannot be written to."""
    written = ["-p", "no:cacheprovider", f"--junitxml=/run/control/{REPORT}"]
    light = ["-p", "no:hypothesispytest", f"--confcutdir={GUEST.parent}"]  # an import costs 30 times what it does here
    return [sys.executable, "-m", "pytest", "-q", "--durations=8", *written, *light, *map(str, tests)]


def judge(folder: Path, machine: VirtualMachine, reports: list[str], what: str) -> None:
    """Fails with what the guest printed, unless each test passed there."""
    status = machine.wait(WAIT_S)
    assert status == 0, machine.output() + machine.printed()
    suite = ElementTree.parse(folder / REPORT).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    reports.append(f"{what}: {counts['tests']} tests in {float(suite.attrib['time']):.0f} s")
    reports += [f"  {line}" for line in machine.output().splitlines() if line.startswith("measured:")]
    assert counts["tests"]
    assert counts["skipped"] == 0, machine.output()


def test_two_devices_of_one_machine(tmp_path: Path, machine_reports: list[str]) -> None:
    tests = sorted(GUEST.glob("test_*.py"))
    with VirtualMachine(tmp_path, pytest_command(*tests), kit="rdma", before=TWO_DEVICES) as machine:
        judge(tmp_path, machine, machine_reports, "one machine, two devices")

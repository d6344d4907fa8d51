"""Boots the machines, and passes if all passed in them and nothing was skipped."""

from __future__ import annotations

import compileall
import contextlib
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.rdma.network import PYVERBS, TWO_DEVICES, one_device
from tests.vm.boot_image import PROGRAMS
from tests.vm.machine import ROOT, VirtualMachine, link_device, missing_programs

GUEST = Path(__file__).parent / "guest"
REPORT = "report.xml"
WAIT_S = 600
MISSING = [*missing_programs((*PROGRAMS, "rdma", "ip", "tc")), *([] if Path(PYVERBS).exists() else [PYVERBS])]

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.timeout(WAIT_S + 60),
    pytest.mark.skipif(bool(MISSING), reason=f"the virtual machine needs {MISSING}"),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """A guest writes no bytecode, and what it has to compile itself takes it minutes."""
    for room in ("kvstore", "client", "tests/rdma", "tests/vm"):
        compileall.compile_dir(ROOT / room, quiet=1)


def pytest_command(tests: tuple[str, ...], chosen: str) -> list[str]:
    """Runs those of some modules whose names contain a word, in a guest, whose file system cannot be written to."""
    written = ["-p", "no:cacheprovider", f"--junitxml=/run/control/{REPORT}"]
    light = [
        "-p",
        "no:hypothesispytest",
        f"--confcutdir={GUEST.parent}",
        f"--timeout={WAIT_S}",
    ]  # an import costs 30 times what it does here
    select = [*(str(GUEST / name) for name in tests), "-k", chosen]
    return [sys.executable, "-m", "pytest", "-q", "--durations=5", *written, *light, *select]


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


# a machine for each, so that none runs for long
@pytest.mark.parametrize(
    ("tests", "chosen"),
    [
        (("test_verbs_backends.py", "test_memlock.py"), "Test or locked"),
        (("test_rdma_channel.py",), "Ibverbs"),
        (("test_rdma_channel.py",), "Pyverbs"),
    ],
)
def test_two_devices_of_one_machine(
    tmp_path: Path, machine_reports: list[str], tests: tuple[str, ...], chosen: str
) -> None:
    command = pytest_command(tests, chosen)
    with VirtualMachine(tmp_path, command, kit="rdma", before=TWO_DEVICES) as machine:
        judge(tmp_path, machine, machine_reports, f"one machine, two devices, {chosen}")


def test_two_machines(tmp_path: Path, machine_reports: list[str]) -> None:
    folders = [tmp_path / name for name in ("node", "client")]
    with tempfile.TemporaryDirectory(prefix="kvstore-") as link, contextlib.ExitStack() as stack:
        machines = []
        for host, folder in enumerate(folders):
            folder.mkdir()
            command = [sys.executable, "-m", "tests.rdma.guest.served", folder.name]
            # a path of a socket must be short
            wires = [part for wire in range(2) for part in link_device(Path(link), host=host, wire=wire)]
            machines.append(
                stack.enter_context(VirtualMachine(folder, command, kit="rdma", devices=wires, before=one_device(host)))
            )
        for machine in machines:
            status = machine.wait(WAIT_S)
            assert status == 0, machine.output() + "".join(other.printed() for other in machines)
            assert "all as it should be" in machine.output()
    measured = [line for line in machines[1].output().splitlines() if line.startswith("measured:")]
    machine_reports.append("two machines: served, byte-exact both ways whatever broke")
    machine_reports += [f"  {line}" for line in measured]

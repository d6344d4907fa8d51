"""Boots the machines, and passes if all passed in them and nothing was skipped."""

from __future__ import annotations

import compileall
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final
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


def one_machine(tests: tuple[str, ...], chosen: str, folder: Path) -> list[str]:
    """Two devices, and the tests of some modules whose names contain a word: what to report when each passed."""
    with VirtualMachine(folder, pytest_command(tests, chosen), kit="rdma", before=TWO_DEVICES) as machine:
        status = machine.wait(WAIT_S)
        assert status == 0, machine.output() + machine.printed()
        suite = ElementTree.parse(folder / REPORT).getroot().find("testsuite")
        assert suite is not None
        counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
        assert counts["tests"]
        assert counts["skipped"] == 0, machine.output()
        report = f"one machine, two devices, {chosen}: {counts['tests']} tests in {float(suite.attrib['time']):.0f} s"
        return [report, *measured(machine)]


def two_machines(folder: Path) -> list[str]:
    """A node on one, a client on the other: what to report when all was as it should be."""
    folders = [folder / name for name in ("node", "client")]
    with tempfile.TemporaryDirectory(prefix="kvstore-") as link, contextlib.ExitStack() as stack:
        machines = []
        for host, own in enumerate(folders):
            own.mkdir()
            command = [sys.executable, "-m", "tests.rdma.guest.served", own.name]
            # a path of a socket must be short
            wires = [part for wire in range(2) for part in link_device(Path(link), host=host, wire=wire)]
            machines.append(
                stack.enter_context(VirtualMachine(own, command, kit="rdma", devices=wires, before=one_device(host)))
            )
        for machine in reversed(machines):  # the client says when all is over
            status = machine.wait(WAIT_S)
            assert status == 0, machine.output() + "".join(other.printed() for other in machines)
            assert "all as it should be" in machine.output()
        return ["two machines: served, byte-exact both ways whatever broke", *measured(machines[1])]


def measured(machine: VirtualMachine) -> list[str]:
    """What a guest said of rates and counts."""
    return [f"  {line}" for line in machine.output().splitlines() if line.startswith("measured:")]


RUNS: Final[dict[str, Callable[[Path], list[str]]]] = {
    "two machines": two_machines,
    # a machine for each, so that none runs for long
    "backends": partial(one_machine, ("test_verbs_backends.py", "test_memlock.py"), "Test or locked"),
    "channel by ibverbs": partial(one_machine, ("test_rdma_channel.py",), "Ibverbs"),
    "channel by pyverbs": partial(one_machine, ("test_rdma_channel.py",), "Pyverbs"),
}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[list[str]]]]:
    """Those that were chosen, two at a time: machines that wait for each other leave half of the CPUs idle.

    A machine lives no longer than the thread that made it, which waits for it here.
    """
    wanted = [item.callspec.params["run"] for item in request.session.items if item.module is request.module]
    with ThreadPoolExecutor(2) as pool:
        yield {run: pool.submit(RUNS[run], tmp_path_factory.mktemp("run")) for run in wanted}


@pytest.mark.parametrize("run", RUNS)
def test_what_needs_devices(run: str, runs: dict[str, Future[list[str]]], machine_reports: list[str]) -> None:
    machine_reports += runs[run].result()

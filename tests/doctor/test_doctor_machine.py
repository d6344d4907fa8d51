"""Kernel, clock, huge pages and memory: each state of a machine of files, and this one."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.doctor.finding import Finding, Status
from kvstore.doctor.machine import check_machine, read_machine
from kvstore.doctor.system import LinuxSystem
from kvstore.limits import GiB
from kvstore.testing.fake_system import FakeSystem

HEALTHY = {
    "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
    "/sys/devices/system/clocksource/clocksource0/available_clocksource": "tsc hpet acpi_pm",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "/proc/meminfo": "MemTotal:       64000000 kB\nMemAvailable:   32000000 kB",
}


def examined(fake: FakeSystem) -> dict[str, Finding]:
    return {one.check: one for one in check_machine(read_machine(fake, memory_wanted_bytes=GiB))}


def test_a_healthy_machine(fake: FakeSystem) -> None:
    fake.put(HEALTHY)
    findings = examined(fake)
    assert {one.status for one in findings.values()} == {Status.OK}
    assert list(findings) == ["kernel", "clocksource", "clock", "huge_pages", "memory"]
    assert findings["memory"].needed == "1 GiB for cache and staging"


@pytest.mark.parametrize(
    ("release", "status", "words"),
    [
        ("6.1.0-18-amd64", Status.OK, ""),
        ("7.0.1", Status.OK, ""),
        ("5.15.0-105-generic", Status.WARNING, "IORING_SETUP_COOP_TASKRUN"),
        ("5.10.0", Status.WARNING, "MADV_POPULATE_WRITE"),
        ("4.18.0-513.el8.x86_64", Status.WARNING, "the device mode is threads"),
        ("5.19.17", Status.WARNING, "STATX_DIOALIGN"),
        ("something else", Status.OK, ""),
    ],
)
def test_kernels(fake: FakeSystem, release: str, status: Status, words: str) -> None:
    fake.release = release
    finding = examined(fake)["kernel"]
    assert (finding.status, finding.found) == (status, release)
    assert words in finding.reason


@pytest.mark.parametrize(("source", "status"), [("hpet", Status.WARNING), ("acpi_pm", Status.WARNING), ("", Status.OK)])
def test_clocksources(fake: FakeSystem, source: str, status: Status) -> None:
    fake.put(HEALTHY | {"/sys/devices/system/clocksource/clocksource0/current_clocksource": source})
    finding = examined(fake)["clocksource"]
    assert finding.status is status
    if finding.fix:
        assert "current_clocksource" in finding.fix.shell
        assert "tsc hpet acpi_pm" in finding.fix.shell


@pytest.mark.parametrize(
    ("answer", "status", "found"),
    [
        (True, Status.OK, "synchronised"),
        (False, Status.WARNING, "not synchronised"),
        (None, Status.OK, "not told by the kernel"),
    ],
)
def test_wall_clock(fake: FakeSystem, answer: bool | None, status: Status, found: str) -> None:
    fake.is_synchronised = answer
    finding = examined(fake)["clock"]
    assert (finding.status, finding.found) == (status, found)


@pytest.mark.parametrize(
    ("enabled", "status"),
    [
        ("[always] madvise never", Status.OK),
        ("always [madvise] never", Status.OK),
        ("always madvise [never]", Status.WARNING),
    ],
)
def test_huge_pages(fake: FakeSystem, enabled: str, status: Status) -> None:
    fake.put({"/sys/kernel/mm/transparent_hugepage/enabled": enabled})
    finding = examined(fake)["huge_pages"]
    assert finding.status is status


def test_a_kernel_without_huge_pages(fake: FakeSystem) -> None:
    finding = examined(fake)["huge_pages"]
    assert finding.status is Status.WARNING
    assert "not in this kernel" in finding.found


def test_memory_that_others_have_taken(fake: FakeSystem) -> None:
    fake.put({"/proc/meminfo": "MemTotal:       64000000 kB\nMemAvailable:   1000 kB"})
    finding = examined(fake)["memory"]
    assert finding.status is Status.WARNING
    assert finding.found == "1000 KiB available"


REPORT = """
import json
import platform
from kvstore.doctor.machine import check_machine, read_machine
from kvstore.doctor.system import LinuxSystem
findings = check_machine(read_machine(LinuxSystem(), memory_wanted_bytes=1 << 30))
print(json.dumps({one.check: [one.status.value, one.found] for one in findings}))
"""


def test_a_real_process_that_sees_another_machine(tmp_path: Path) -> None:
    """Files mounted over those of the kernel, in a mount namespace of its own: what a container may show."""
    shown = {
        "/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        "/sys/devices/system/clocksource/clocksource0/current_clocksource": "acpi_pm",
        "/proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 1000 kB",
    }
    mounts = []
    for at, (path, content) in enumerate(shown.items()):
        (tmp_path / str(at)).write_text(content)
        mounts.append(f"mount --bind {tmp_path / str(at)} {path}")
    script = " && ".join([*mounts, 'exec "$0" "$@"'])
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, sys.executable, "-c", REPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["huge_pages"] == ["warning", "transparent huge pages: never"]
    assert found["clocksource"] == ["warning", "acpi_pm"]
    assert found["memory"] == ["warning", "1000 KiB available"]


def test_a_real_process_that_sees_an_old_kernel() -> None:
    """Under the personality that old programs ask for (UNAME26, personality(2))."""
    command = ["setarch", platform.machine(), "--uname-2.6", sys.executable, "-c", REPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    status, found = json.loads(done.stdout)["kernel"]
    assert status == "warning"
    assert found.startswith("2.6.")


def test_this_machine_tells_all_of_it() -> None:
    facts = read_machine(LinuxSystem(), memory_wanted_bytes=0)
    assert facts.kernel_release
    assert facts.memory_free_bytes
    assert facts.huge_pages in ("always", "madvise", "never")
    assert facts.clock_is_synchronised is not None
    assert {one.status for one in check_machine(facts)} <= {Status.OK, Status.WARNING}

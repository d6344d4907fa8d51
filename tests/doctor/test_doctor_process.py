"""Locked memory and open files: each limit of a machine of files, and real processes under real limits."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence

import pytest

from kvstore.doctor.finding import Finding, Status
from kvstore.doctor.process import OPEN_FILES_NEEDED, check_process, read_process
from kvstore.doctor.system import Limit
from kvstore.limits import OPEN_FILES_MIN, GiB, MiB
from kvstore.testing.fake_system import FakeSystem

LOCKS = "CapEff:\t0000000000004000"
ALL_IDS = "         0          0 4294967295"
REPORT = """
import json
from kvstore.doctor.process import check_process, read_process
from kvstore.doctor.system import LinuxSystem
facts = read_process(
    LinuxSystem(), locked_bytes=1 << 30, rdma_wanted=True, rdma_present=False, registers_for_drives=True
)
print(json.dumps({one.check: [one.status.value, one.found] for one in check_process(facts)}))
"""


def examined(
    fake: FakeSystem,
    *,
    locked_bytes: int = GiB,
    rdma_wanted: bool = False,
    rdma_present: bool = False,
    registers_for_drives: bool = True,
) -> dict[str, Finding]:
    facts = read_process(
        fake,
        locked_bytes=locked_bytes,
        rdma_wanted=rdma_wanted,
        rdma_present=rdma_present,
        registers_for_drives=registers_for_drives,
    )
    return {one.check: one for one in check_process(facts)}


def memlock(fake: FakeSystem, soft_bytes: int | None) -> None:
    fake.limits[resource.RLIMIT_MEMLOCK] = Limit(soft=soft_bytes, hard=soft_bytes)


def test_eight_mebibytes_are_too_few_for_io_uring_and_rdma(fake: FakeSystem) -> None:
    memlock(fake, 8 * MiB)
    warned = examined(fake)["memlock"]
    assert (warned.status, warned.found) == (Status.WARNING, "8 MiB (RLIMIT_MEMLOCK)")
    assert "1 GiB" in warned.needed
    assert "io_uring" in warned.reason
    assert "RDMA" in examined(fake, rdma_present=True)["memlock"].reason
    failing = examined(fake, rdma_wanted=True)["memlock"]
    assert failing.status is Status.FAILING
    assert failing.fix
    assert "ulimit -l" in failing.fix.shell
    assert "Docker" in failing.fix.shell
    assert failing.fix.systemd == "LimitMEMLOCK=infinity"
    assert "IPC_LOCK" in failing.fix.kubernetes
    assert "containerd" in failing.fix.kubernetes


def test_nothing_is_needed_where_nothing_is_registered(fake: FakeSystem) -> None:
    memlock(fake, 8 * MiB)
    finding = examined(fake, registers_for_drives=False)["memlock"]
    assert (finding.status, finding.needed) == (Status.OK, "none: nothing is registered")


@pytest.mark.parametrize("soft_bytes", [None, GiB, 2 * GiB])
def test_enough_may_be_locked(fake: FakeSystem, soft_bytes: int | None) -> None:
    memlock(fake, soft_bytes)
    assert examined(fake, rdma_wanted=True)["memlock"].status is Status.OK


def test_a_capability_counts_only_outside_of_user_namespaces(fake: FakeSystem) -> None:
    memlock(fake, 8 * MiB)
    fake.put({"/proc/self/status": f"Name:\tx\n{LOCKS}", "/proc/self/uid_map": ALL_IDS})
    finding = examined(fake)["memlock"]
    assert finding.status is Status.OK
    assert "CAP_IPC_LOCK" in finding.found
    fake.put({"/proc/self/uid_map": "         0       1000          1"})
    assert examined(fake)["memlock"].status is Status.WARNING
    fake.put({"/proc/self/status": "CapEff:\t0000000000000000", "/proc/self/uid_map": ALL_IDS})
    assert examined(fake)["memlock"].status is Status.WARNING


@pytest.mark.parametrize(
    ("hard", "status"),
    [
        (None, Status.OK),
        (OPEN_FILES_NEEDED, Status.OK),
        (OPEN_FILES_NEEDED - 1, Status.WARNING),
        (OPEN_FILES_MIN, Status.WARNING),
        (OPEN_FILES_MIN - 1, Status.FAILING),
    ],
)
def test_open_files(fake: FakeSystem, hard: int | None, status: Status) -> None:
    fake.limits[resource.RLIMIT_NOFILE] = Limit(soft=256, hard=hard)
    finding = examined(fake)["open_files"]
    assert finding.status is status
    if finding.fix:
        assert finding.fix.systemd == f"LimitNOFILE={OPEN_FILES_NEEDED}"
        assert "Docker" in finding.fix.shell


def report(wrapper: Sequence[str], shell: str) -> dict[str, list[str]]:
    """What a process says of itself that a shell has started under its limits."""
    command = [*wrapper, "sh", "-c", f'{shell} && exec "$0" "$@"', sys.executable, "-c", REPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    answer: dict[str, list[str]] = json.loads(done.stdout)
    return answer


def test_a_real_process_with_few_open_files() -> None:
    assert report((), "ulimit -n 600")["open_files"] == ["warning", "600 (hard limit)"]
    assert report((), "ulimit -n 300")["open_files"] == ["failing", "300 (hard limit)"]


def test_a_real_process_that_may_lock_little() -> None:
    # in a user namespace even root's capability does not count, so the limit does
    found = report(("unshare", "--user", "--map-root-user"), "ulimit -l 8192")
    assert found["memlock"] == ["failing", "8 MiB (RLIMIT_MEMLOCK)"]

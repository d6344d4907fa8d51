"""Data dirs: every verdict from facts, machines of files for what is read, and real file systems, drives and limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.doctor.finding import Finding, Status
from kvstore.doctor.storage import PlaceFacts, TrialFacts, check_places, check_trial
from kvstore.doctor.storage_reading import mount_of, read_place
from kvstore.doctor.storage_trial import try_place
from kvstore.doctor.system import LinuxSystem
from kvstore.limits import GiB, MiB
from kvstore.testing.fake_system import FakeSystem
from kvstore.testing.loop_lab import LoopLab, call

GOOD = PlaceFacts(
    path="/data",
    file_system="xfs",
    mount_options=("rw", "noatime"),
    mount_point="/data",
    drive="nvme0n1",
    scheduler="none",
    free_bytes=10 * GiB,
    size_bytes=20 * GiB,
    needed_bytes=8 * GiB,
)
TRIED = TrialFacts(
    path="/data",
    direct_io=True,
    direct_reason="O_DIRECT on xfs",
    alignment_bytes=(4, 512),
    uring_opcodes=("read", "read_fixed", "readv_fixed"),
)


def examined(*places: PlaceFacts) -> dict[str, Finding]:
    return {one.check: one for one in check_places(places)}


def tried(facts: TrialFacts) -> dict[str, Finding]:
    return {one.check: one for one in check_trial(facts)}


def test_a_good_place() -> None:
    findings = examined(GOOD)
    assert list(findings) == ["data_dir", "file_system", "drive", "space"]
    assert {one.status for one in findings.values()} == {Status.OK}
    assert findings["space"].found == "room for 10 GiB of 20 GiB"
    assert findings["drive"].found == "nvme0n1, solid-state, scheduler none"


def test_a_read_only_mount_is_not_told_to_change_owners() -> None:
    ro = replace(GOOD, problem="not writable", mount_options=("ro", "noatime"), mount_point="/srv")
    found = examined(ro)["data_dir"]
    assert found.status is Status.FAILING
    assert found.reason == "/srv is mounted read-only"
    assert found.fix is not None
    assert found.fix.shell.startswith("mount -o remount,rw /srv")
    owned = examined(replace(GOOD, problem="not writable"))["data_dir"]
    assert owned.fix is not None
    assert "chown" in owned.fix.shell
    assert not owned.reason


def test_a_place_that_cannot_be_used_is_said_once() -> None:
    findings = examined(replace(GOOD, problem="not writable"))
    assert [(one.check, one.status) for one in findings.values()] == [("data_dir", Status.FAILING)]


@pytest.mark.parametrize(
    ("file_system", "options", "words"),
    [
        ("tmpfs", ("rw",), "lives in RAM"),
        ("overlay", ("rw",), "gone with the container"),
        ("nfs4", ("rw",), "of another machine"),
        ("fuse.s3fs", ("rw",), "of another machine"),
        ("btrfs", ("rw",), "not one of those that are tested"),
        ("ext4", ("rw", "data=journal"), "writes all data twice"),
        ("ext4", ("rw", "nobarrier"), "without barriers"),
        ("ext4", ("rw", "barrier=0"), "without barriers"),
        ("ext4", ("rw", "data=ordered"), ""),
        ("xfs", ("rw",), ""),
        ("block device", (), ""),
    ],
)
def test_file_systems(file_system: str, options: tuple[str, ...], words: str) -> None:
    finding = examined(replace(GOOD, file_system=file_system, mount_options=options))["file_system"]
    assert finding.status is (Status.WARNING if words else Status.OK)
    assert words in finding.reason
    if finding.fix:  # one that is good but for its options is mounted anew, not made anew
        assert ("umount /data" in finding.fix.shell) is (file_system == "ext4")
        assert ("mkfs" in finding.fix.shell) is (file_system != "ext4")


@pytest.mark.parametrize(
    ("rotational", "scheduler", "words"),
    [
        (True, "none", "spinning"),
        (True, "bfq", "spinning"),
        (False, "bfq", "bfq orders again"),
        (False, "mq-deadline", ""),
        (False, "kyber", ""),
        (False, "", ""),
    ],
)
def test_drives(rotational: bool, scheduler: str, words: str) -> None:
    finding = examined(replace(GOOD, is_rotational=rotational, scheduler=scheduler))["drive"]
    assert finding.status is (Status.WARNING if words else Status.OK)
    assert words in finding.reason
    if finding.fix:  # for what is wrong, and nothing else
        for text in (finding.fix.shell, finding.fix.systemd, finding.fix.kubernetes):
            assert ("scheduler" in text) is (scheduler == "bfq")
        assert ("echo 0 > /sys/block/nvme0n1/queue/rotational" in finding.fix.shell) is rotational


def test_capacity_that_is_not_there_fails_and_own_files_count() -> None:
    short = replace(GOOD, free_bytes=GiB)
    assert examined(short)["space"].status is Status.FAILING
    three = [short, *(replace(GOOD, path=path, device_number=at) for at, path in enumerate(("/b", "/c"), 1))]
    fix = next(one.fix for one in check_places(three) if one.check == "space" and one.fix)
    assert fix.shell.startswith("--capacity 3GiB,")  # divided evenly, each gets what the tightest has
    assert examined(replace(short, own_bytes=7 * GiB))["space"].status is Status.OK


def test_data_dirs_on_one_file_system_share_its_space() -> None:
    two = [replace(GOOD, path=path, device_number=7) for path in ("/a", "/b")]
    (finding,) = (one for one in check_places(two) if one.check == "space")
    assert finding.status is Status.FAILING
    assert finding.needed == "capacity 16 GiB for 2 data dirs together"
    assert finding.fix
    assert finding.fix.systemd == "Environment=KVSTORE_CAPACITY=10GiB"
    apart = [replace(two[0], device_number=1), replace(two[1], device_number=2)]
    assert [one.status for one in check_places(apart) if one.check == "space"] == [Status.OK, Status.OK]


def test_the_device_mode_and_its_reason() -> None:
    finding = tried(TRIED)["device_mode"]
    assert (finding.status, finding.found) == (Status.OK, "io_uring: read, read_fixed, readv_fixed")
    partly = tried(replace(TRIED, uring_opcodes=("read",), uring_notes=("no readv_fixed (EINVAL)",)))["device_mode"]
    assert (partly.status, partly.found) == (Status.OK, "io_uring: read")
    assert "no readv_fixed (EINVAL)" in partly.reason
    chosen = tried(replace(TRIED, mode_wanted="threads"))["device_mode"]
    assert (chosen.status, chosen.found) == (Status.OK, "threads")


@pytest.mark.parametrize(("mode", "status"), [("auto", Status.WARNING), ("uring", Status.FAILING)])
def test_without_io_uring(mode: str, status: Status) -> None:
    facts = replace(TRIED, uring_problem="io_uring_setup: EPERM; seccomp", uring_opcodes=(), mode_wanted=mode)
    finding = tried(facts)["device_mode"]
    assert finding.status is status
    assert "seccomp" in finding.reason
    assert finding.fix
    assert "io_uring_register" in finding.fix.kubernetes
    forbidden = tried(replace(facts, uring_disabled=2))["device_mode"].fix
    assert forbidden
    assert forbidden.shell.startswith("sysctl -w kernel.io_uring_disabled=0")
    unbuilt = tried(replace(facts, is_binding_built=False))["device_mode"].fix
    assert unbuilt
    assert "gcc" in unbuilt.shell


def test_direct_io_and_its_alignment() -> None:
    assert tried(TRIED)["direct_io"].found == (
        "O_DIRECT on xfs, alignment 4 bytes of memory and 512 of offset, sectors of 512 bytes"
    )
    refused = tried(replace(TRIED, direct_io=False, direct_reason="tmpfs lives in the page cache"))["direct_io"]
    assert refused.status is Status.WARNING


def test_a_place_that_could_not_be_tried() -> None:
    (finding,) = check_trial(TrialFacts(path="/data", problem="Permission denied"))
    assert (finding.check, finding.status) == ("device_mode", Status.WARNING)
    assert "Permission denied" in finding.found


MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,data=journal
40 27 0:40 / /data rw - tmpfs tmpfs rw,size=1g
41 27 259:1 / /data/nvme\\0400 rw,noatime - xfs /dev/nvme0n1 rw,attr2
42 41 259:2 / /data/nvme\\0400 rw - xfs /dev/nvme1n1 rw
broken line - """


@pytest.mark.parametrize(
    ("device", "path", "expected"),
    [
        (os.makedev(254, 0), "/var/lib", ("ext4", "/", ("rw", "relatime", "data=journal"))),
        (os.makedev(0, 40), "/data/x", ("tmpfs", "/data", ("rw", "size=1g"))),
        (os.makedev(259, 1), "/data/nvme 0/x", ("xfs", "/data/nvme 0", ("rw", "noatime", "attr2"))),
        (os.makedev(259, 2), "/data/nvme 0", ("xfs", "/data/nvme 0", ("rw",))),
        (os.makedev(0, 99), "/data/sub", ("tmpfs", "/data", ("rw", "size=1g"))),  # a btrfs subvolume's number
        (os.makedev(0, 99), "/database", ("ext4", "/", ("rw", "relatime", "data=journal"))),
    ],
)
def test_the_mount_of_a_path(
    fake: FakeSystem, device: int, path: str, expected: tuple[str, str, tuple[str, ...]]
) -> None:
    fake.put({"/proc/self/mountinfo": MOUNTS})
    assert mount_of(fake, device, path) == expected


def test_the_drive_behind_a_partition(fake: FakeSystem, tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    drive = "/sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1"
    fake.put(
        {
            f"{drive}/queue/scheduler": "[none] mq-deadline",
            f"{drive}/queue/rotational": "0",
            f"{drive}/nvme0n1p2/partition": "2",
            f"/sys/dev/block/{os.major(number)}:{os.minor(number)}": f"-> {drive}/nvme0n1p2",
            "/proc/self/mountinfo": f"1 1 {os.major(number)}:{os.minor(number)} / / rw - ext4 /dev/nvme0n1p2 rw",
        }
    )
    facts = read_place(fake, str(tmp_path), needed_bytes=1)
    assert (facts.drive, facts.scheduler, facts.is_rotational, facts.file_system) == ("nvme0n1", "none", False, "ext4")


def test_this_machine(tmp_path: Path) -> None:
    facts = read_place(LinuxSystem(), str(tmp_path / "not" / "yet" / "made"), needed_bytes=MiB)
    assert facts.problem == ""
    assert facts.file_system
    assert facts.free_bytes > 0
    (tmp_path / "file").write_bytes(b"")
    assert "neither a folder" in read_place(LinuxSystem(), str(tmp_path / "file"), needed_bytes=0).problem


def test_a_trial_leaves_nothing_behind(tmp_path: Path) -> None:
    facts = try_place(LinuxSystem(), str(tmp_path), mode_wanted="auto")
    assert facts.problem == ""
    assert list(tmp_path.iterdir()) == []
    assert facts.uring_opcodes or facts.uring_problem


def test_own_bytes_are_counted_as_du_does(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(MiB))
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(GiB)
    assert MiB <= read_place(LinuxSystem(), str(tmp_path), needed_bytes=0).own_bytes < 2 * MiB


@pytest.fixture(scope="module")
def tmpfs(loop_lab: LoopLab) -> Path:
    """16 MiB of memory as a file system."""
    return loop_lab.mount("doctor-tmpfs", "-t", "tmpfs", "-o", "size=16m", "tmpfs")


def test_a_real_tmpfs(tmpfs: Path) -> None:
    findings = examined(read_place(LinuxSystem(), str(tmpfs), needed_bytes=64 * MiB))
    assert findings["file_system"].status is Status.WARNING
    assert findings["space"].status is Status.FAILING
    assert findings["space"].found == "room for 16 MiB of 16 MiB"
    direct = tried(try_place(LinuxSystem(), str(tmpfs), mode_wanted="auto"))["direct_io"]
    assert direct.status is Status.WARNING
    assert "tmpfs lives in the page cache" in direct.found


@pytest.mark.parametrize(("sector_bytes", "journal"), [(512, "ordered"), (4096, "journal")])
def test_a_real_ext4_and_its_journal(loop_lab: LoopLab, sector_bytes: int, journal: str) -> None:
    name = f"doctor-{journal}"
    device = loop_lab.loop(loop_lab.image(name, 64), sector_bytes=sector_bytes)
    call("mkfs.ext4", "-q", "-m", "0", str(device))
    place = loop_lab.mount(name, "-o", f"data={journal}", str(device))
    facts = read_place(LinuxSystem(), str(place), needed_bytes=32 * MiB)
    finding = examined(facts)["file_system"]
    assert (facts.file_system, facts.drive) == ("ext4", device.name)
    if journal == "journal":
        assert finding.status is Status.WARNING
        assert "data=journal" in finding.found
    else:
        assert finding.status is Status.OK
    trial = try_place(LinuxSystem(), str(place), mode_wanted="auto")
    assert trial.direct_io == (journal == "ordered"), trial
    if trial.direct_io and trial.alignment_bytes:
        assert trial.alignment_bytes[1] == sector_bytes


def test_a_real_drive_raw_and_mounted(loop_lab: LoopLab) -> None:
    raw = loop_lab.loop(loop_lab.image("doctor-raw", 8), sector_bytes=4096)
    facts = read_place(LinuxSystem(), str(raw), needed_bytes=16 * MiB)
    assert (facts.problem, facts.file_system, facts.free_bytes) == ("", "block device", 8 * MiB)
    assert examined(facts)["space"].status is Status.FAILING
    trial = try_place(LinuxSystem(), str(raw), mode_wanted="auto")
    assert (trial.problem, trial.direct_io, trial.sector_bytes) == ("", True, 4096)
    call("mkfs.ext4", "-q", str(raw))
    point = loop_lab.mount("doctor-mounted", str(raw))
    finding = examined(read_place(LinuxSystem(), str(raw), needed_bytes=0))["data_dir"]
    assert finding.status is Status.FAILING
    assert f"mounted at {point}" in finding.found


def test_a_real_drive_that_spins_by_its_own_word(loop_lab: LoopLab) -> None:
    device = loop_lab.loop(loop_lab.image("doctor-spins", 64), sector_bytes=512)
    call("mkfs.ext4", "-q", str(device))
    place = loop_lab.mount("doctor-spins", str(device))
    rotational = Path(f"/sys/block/{device.name}/queue/rotational")
    for word, status in (("0", Status.OK), ("1", Status.WARNING)):
        rotational.write_text(word)
        finding = examined(read_place(LinuxSystem(), str(place), needed_bytes=0))["drive"]
        assert finding.status is status, finding


REPORT = """
import json, sys
from kvstore.doctor.storage import check_trial
from kvstore.doctor.storage_trial import try_place
from kvstore.doctor.system import LinuxSystem
trial = try_place(LinuxSystem(), sys.argv[1], mode_wanted=sys.argv[2])
print(json.dumps({one.check: [one.status.value, one.found, one.reason] for one in check_trial(trial)}))
"""
# As container runtimes do it (seccomp(2)): io_uring_setup answers EPERM, all else passes.
FORBID_IO_URING = """
import ctypes, struct
rows = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | 1), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rows), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program) == 0
"""


@pytest.mark.parametrize(("mode", "status"), [("auto", "warning"), ("uring", "failing"), ("threads", "ok")])
def test_a_real_process_without_io_uring(tmp_path: Path, mode: str, status: str) -> None:
    command = [sys.executable, "-c", FORBID_IO_URING + REPORT, str(tmp_path), mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    verdict, found, reason = json.loads(done.stdout)["device_mode"]
    assert verdict == status
    assert "threads" in found or mode == "uring"
    assert "seccomp profile forbids io_uring" in reason


def test_a_real_folder_that_may_not_be_written() -> None:
    program = (
        "import os, sys\n"
        "from kvstore.doctor.storage_reading import read_place\n"
        "from kvstore.doctor.system import LinuxSystem\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "print([read_place(LinuxSystem(), path, needed_bytes=0).problem for path in sys.argv[1:]])"
    )
    folder = Path("/sys/kernel")  # readable by all, writable by none, whoever runs the tests
    command = [sys.executable, "-c", program, str(folder), str(folder / "sub")]
    if os.geteuid() != 0:
        command[2] = program.replace("os.setgid(65534); os.setuid(65534)", "pass")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"['not writable', 'cannot be made: {folder} is not writable']"

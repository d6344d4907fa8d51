"""Data dirs: how they can be driven, what file system they lie on, and whether their capacity is there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.doctor.finding import Finding, Fix, Status, words_of_bytes
from kvstore.limits import MiB
from kvstore.settings import format_size
from kvstore.types.compiled import BUILD_AGAIN

_GOOD_FILE_SYSTEMS: Final = frozenset(("ext4", "xfs", "block device"))
_RAM_FILE_SYSTEMS: Final = frozenset(("tmpfs", "ramfs"))
_NETWORK_FILE_SYSTEMS: Final = frozenset(("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "virtiofs", "glusterfs"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceFacts:
    """Where a data dir lies, without any I/O on it.

    Attributes:
        path: as the settings name it.
        problem: why it cannot be a data dir; "" when it can. The rest is then as far as known.
        file_system: "ext4", ..., "block device" for a raw drive, "" when not known.
        mount_options: of mount and super block.
        mount_point: "" for a raw drive.
        drive: block device below, "vda"; "" when there is none or not known.
        is_rotational, scheduler: of that drive; scheduler "" is not known.
        device_number: st_dev: data dirs with the same one share their space.
        free_bytes: free to this user.
        own_bytes: taken already by the files of the data dir.
        size_bytes: of the file system or raw drive.
        needed_bytes: capacity that the settings give to this data dir; 0 is not set.
    """

    path: str
    problem: str = ""
    file_system: str = ""
    mount_options: tuple[str, ...] = ()
    mount_point: str = ""
    drive: str = ""
    is_rotational: bool = False
    scheduler: str = ""
    device_number: int = 0
    free_bytes: int = 0
    own_bytes: int = 0
    size_bytes: int = 0
    needed_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFacts:
    """What real I/O on a data dir found.

    Attributes:
        path: as the settings name it.
        problem: why it could not be tried; "" when it was.
        direct_io: the page cache can be bypassed.
        direct_reason: one clause that says why.
        alignment_bytes: (memory, offset) that O_DIRECT needs by statx(2); None when the kernel does not tell.
        sector_bytes: logical sector of a raw drive, else 512.
        uring_problem: why io_uring does not work, with the fix; "" when it does.
        uring_disabled: sysctl kernel.io_uring_disabled: 0 is allowed, 1 for some groups, 2 for nobody; None before 6.6.
        is_binding_built: the compiled half of the io_uring device is there.
        uring_opcodes: the kinds of operation that work: "read", "read_fixed", "readv_fixed".
        uring_notes: what does not, one clause each.
        mode_wanted: the setting "auto", "uring" or "threads".
    """

    path: str
    problem: str = ""
    direct_io: bool = False
    direct_reason: str = ""
    alignment_bytes: tuple[int, int] | None = None
    sector_bytes: int = 512
    uring_problem: str = ""
    uring_disabled: int | None = None
    is_binding_built: bool = True
    uring_opcodes: tuple[str, ...] = ()
    uring_notes: tuple[str, ...] = ()
    mode_wanted: str = "auto"


def check_places(places: Sequence[PlaceFacts]) -> list[Finding]:
    """All lines that need no I/O: data dir, file system, drive, space."""
    findings: list[Finding] = []
    for facts in places:
        findings.append(check_data_dir(facts))
        if not facts.problem:
            findings += [check_file_system(facts), check_drive(facts)]
    return findings + check_space([facts for facts in places if not facts.problem])


def check_trial(facts: TrialFacts) -> list[Finding]:
    """All lines that real I/O answers: device mode and direct I/O."""
    return [check_device_mode(facts), check_direct_io(facts)] if not facts.problem else [_untried(facts)]


def check_data_dir(facts: PlaceFacts) -> Finding:
    """Whether the node may use it at all."""
    is_read_only = bool(facts.problem) and "ro" in facts.mount_options
    own = f"mkdir -p {facts.path} && chown USER {facts.path}, as root; or pass another --data-dir"
    remount = f"mount -o remount,rw {facts.mount_point}, as root; if the kernel refuses, dmesg says what the drive has"
    return Finding(
        check="data_dir",
        subject=facts.path,
        status=Status.FAILING if facts.problem else Status.OK,
        found=facts.problem or "writable",
        needed="a folder that can be made and written, or a block device",
        reason=f"{facts.mount_point} is mounted read-only" if is_read_only else "",
        fix=Fix(
            shell=remount if is_read_only else own,
            systemd=f"StateDirectory=kvstore with KVSTORE_DATA_DIR=/var/lib/kvstore, or ReadWritePaths={facts.path}",
            kubernetes="securityContext.fsGroup of the pod, and a volume mounted there that is not readOnly",
        )
        if facts.problem
        else None,
    )


def check_file_system(facts: PlaceFacts) -> Finding:
    """Whether the file system is one that keeps data, and its journal is not in the way."""
    status, reason = Status.OK, ""
    if facts.file_system in _RAM_FILE_SYSTEMS:
        status, reason = Status.WARNING, "it lives in RAM: nothing survives a reboot, and its bytes are memory"
    elif facts.file_system == "overlay":
        status, reason = Status.WARNING, "a container's own layer: the data is gone with the container"
    elif facts.file_system in _NETWORK_FILE_SYSTEMS or facts.file_system.startswith("fuse"):
        status, reason = Status.WARNING, "a file system of another machine or program: its latency is not a drive's"
    elif "data=journal" in facts.mount_options:
        status, reason = Status.WARNING, "the journal writes all data twice (data=journal), and O_DIRECT is off"
    elif {"nobarrier", "barrier=0"} & set(facts.mount_options):
        status, reason = Status.WARNING, 'without barriers durability="power" is not kept after a power cut'
    elif facts.file_system not in _GOOD_FILE_SYSTEMS:
        status, reason = Status.WARNING, "not one of those that are tested"
    options = [option for option in facts.mount_options if option.startswith(("data=", "barrier", "nobarrier"))]
    found = " ".join(filter(None, (facts.file_system or "unknown", facts.mount_point, ",".join(options))))
    return Finding(
        check="file_system",
        subject=facts.path,
        status=status,
        found=found,
        needed="ext4 (data=ordered or writeback) or xfs, with barriers, or a raw block device",
        reason=reason,
        fix=None if status is Status.OK else _file_system_fix(facts),
    )


def _file_system_fix(facts: PlaceFacts) -> Fix:
    if facts.file_system in _GOOD_FILE_SYSTEMS:  # it is the way that it is mounted
        point = facts.mount_point
        return Fix(
            shell=f"in /etc/fstab take data=journal, nobarrier and barrier=0 from the options of {point}, then with "
            f"the node stopped: umount {point} && mount {point}, or reboot (a remount does not change data=)",
            systemd=f"Options= of the .mount unit for {point} without them",
            kubernetes="mountOptions of the PersistentVolume without them",
        )
    path = facts.path
    return Fix(
        shell="pass a --data-dir on a drive with ext4 or xfs; or make one, which erases the drive: "
        f"mkfs.xfs /dev/DRIVE && mkdir -p {path} && mount /dev/DRIVE {path}",
        systemd=f"a .mount unit for {path} with Type=xfs, and RequiresMountsFor={path} in [Unit]",
        kubernetes="a local PersistentVolume with fsType: xfs (or volumeMode: Block) in place of emptyDir, "
        "overlay or network storage",
    )


def check_drive(facts: PlaceFacts) -> Finding:
    """Whether the drive below is solid-state, with a scheduler that stays out of the way."""
    slow_scheduler = facts.scheduler not in ("", "none", "mq-deadline", "kyber")
    status = Status.WARNING if facts.is_rotational or slow_scheduler else Status.OK
    kind = "spinning" if facts.is_rotational else "solid-state"
    found = f"{facts.drive}, {kind}, scheduler {facts.scheduler or 'not known'}" if facts.drive else "no drive in /sys"
    reason = ""
    if facts.is_rotational:
        reason = "a spinning drive (or a virtual one that says so): random reads take milliseconds"
    elif slow_scheduler:
        reason = f"{facts.scheduler} orders again what the node has ordered, at a cost for each operation"
    return Finding(
        check="drive",
        subject=facts.path,
        status=status,
        found=found,
        needed="solid-state, scheduler none (or mq-deadline, kyber)",
        reason=reason,
        fix=None if status is Status.OK else _drive_fix(facts, slow_scheduler=slow_scheduler),
    )


def _drive_fix(facts: PlaceFacts, *, slow_scheduler: bool) -> Fix:
    queue = f"/sys/block/{facts.drive}/queue"
    commands = [f"echo none > {queue}/scheduler"] if slow_scheduler else []
    wanted = ['ATTR{queue/scheduler}="none"'] if slow_scheduler else []
    where = ""
    if facts.is_rotational:
        commands.append(f"move the data dir to an SSD; where {facts.drive} is one: echo 0 > {queue}/rotational")
        wanted.append('ATTR{queue/rotational}="0"')
        where = "a drive on SSDs; where this one is: "
    rule = f'a udev rule: ACTION=="add|change", KERNEL=="{facts.drive}", {", ".join(wanted)}'
    return Fix(
        shell="; ".join(commands),
        systemd=where + rule,
        kubernetes="nodes with local SSDs (node label and nodeSelector), or on the node " + rule,
    )


def check_space(places: Sequence[PlaceFacts]) -> list[Finding]:
    """Whether the capacity is there. Data dirs on one file system share its space, so they are judged together."""
    shared: defaultdict[int, list[PlaceFacts]] = defaultdict(list)
    for facts in places:
        shared[facts.device_number].append(facts)
    return [_check_shared_space(group, place_count=len(places)) for group in shared.values()]


def _check_shared_space(group: Sequence[PlaceFacts], *, place_count: int) -> Finding:
    room = group[0].free_bytes + sum(facts.own_bytes for facts in group)
    needed = sum(facts.needed_bytes for facts in group)
    short = room < needed
    # capacity is divided evenly over all data dirs, so the tightest file system bounds the whole
    fitting = format_size(room // len(group) // MiB * MiB * place_count)
    together = f" for {len(group)} data dirs together" if len(group) > 1 else ""
    return Finding(
        check="space",
        subject=", ".join(facts.path for facts in group),
        status=Status.FAILING if short else Status.OK,
        found=f"room for {words_of_bytes(room)} of {words_of_bytes(group[0].size_bytes)}",
        needed=f"capacity {words_of_bytes(needed)}{together}" if needed else "not known: capacity is not set",
        reason="the node evicts earlier than its capacity says" if short else "",
        fix=Fix(
            shell=f"--capacity {fitting}, or free space on that file system (du -x shows by what it is taken)",
            systemd=f"Environment=KVSTORE_CAPACITY={fitting}",
            kubernetes=f"capacity: {fitting}, or raise resources.requests.storage of the volume claim",
        )
        if short
        else None,
    )


def check_device_mode(facts: TrialFacts) -> Finding:
    """Which device mode a node takes on this data dir, why, and which operations of io_uring work."""
    opcodes = ", ".join(facts.uring_opcodes) or "none"
    needed = "io_uring with read, read_fixed and readv_fixed"
    if facts.mode_wanted == "threads":
        works = facts.uring_problem or f"io_uring would work: {opcodes}"
        return Finding(
            check="device_mode",
            subject=facts.path,
            status=Status.OK,
            found="threads",
            needed="threads, as set",
            reason=works,
        )
    if facts.uring_problem:
        return Finding(
            check="device_mode",
            subject=facts.path,
            status=Status.FAILING if facts.mode_wanted == "uring" else Status.WARNING,
            found="threads" if facts.mode_wanted == "auto" else "refused",
            needed=needed,
            reason=f"{facts.uring_problem}"
            + ("" if facts.mode_wanted == "uring" else "; threads take more CPU for each operation"),
            fix=_uring_fix(facts),
        )
    partly = bool(facts.uring_notes)
    return Finding(
        check="device_mode",
        subject=facts.path,
        status=Status.OK,
        found=f"io_uring: {opcodes}",
        needed=needed,
        reason="io_uring works on this file" + (f"; {'; '.join(facts.uring_notes)}" if partly else ""),
    )


def _uring_fix(facts: TrialFacts) -> Fix:
    if not facts.is_binding_built:
        return Fix(
            shell=f"apt-get install gcc python3-dev, then {BUILD_AGAIN}",
            systemd="the same; or Environment=KVSTORE_DEVICE=threads",
            kubernetes="an image with the compiled binding (one that was built with gcc), or device: threads",
        )
    if facts.uring_disabled:
        return Fix(
            shell="sysctl -w kernel.io_uring_disabled=0, and the same line in /etc/sysctl.d/90-kvstore.conf",
            systemd="kernel.io_uring_disabled = 0 in /etc/sysctl.d/90-kvstore.conf (systemd-sysctl)",
            kubernetes="sysctl -w kernel.io_uring_disabled=0 on the node (it has no namespaces), or device: threads",
        )
    return Fix(
        shell="in Docker: --security-opt seccomp=PROFILE, with io_uring_setup, io_uring_enter and io_uring_register "
        "allowed in it; or --device threads",
        systemd="SystemCallFilter=@system-service io_uring_setup io_uring_enter io_uring_register, "
        "or Environment=KVSTORE_DEVICE=threads",
        kubernetes="securityContext.seccompProfile: {type: Localhost, localhostProfile: PROFILE} that allows "
        "io_uring_setup, io_uring_enter and io_uring_register (RuntimeDefault forbids them), or device: threads",
    )


def check_direct_io(facts: TrialFacts) -> Finding:
    """Whether the page cache is bypassed, and with which alignment."""
    found = facts.direct_reason
    if facts.alignment_bytes:
        memory, offset = facts.alignment_bytes
        found += f", alignment {memory} bytes of memory and {offset} of offset"
    found += f", sectors of {facts.sector_bytes} bytes"
    return Finding(
        check="direct_io",
        subject=facts.path,
        status=Status.OK if facts.direct_io else Status.WARNING,
        found=found,
        needed="O_DIRECT with an alignment of at most 4096",
        reason=""
        if facts.direct_io
        else "reads and writes go through the page cache: twice the memory traffic, and its write-back is not ours",
        fix=None
        if facts.direct_io
        else Fix(
            shell="move the data dir to ext4, xfs or a raw drive with sectors of at most 4096 bytes "
            "(for ext4 not data=journal, no encryption or verity on the folder)",
            systemd="RequiresMountsFor= the mount of such a file system, in [Unit]",
            kubernetes="a local PersistentVolume with ext4 or xfs, or volumeMode: Block; not emptyDir in memory",
        ),
    )


def _untried(facts: TrialFacts) -> Finding:
    return Finding(
        check="device_mode",
        subject=facts.path,
        status=Status.WARNING,
        found=f"not tried: {facts.problem}",
        needed="a trial of real I/O on the data dir",
        fix=Fix(
            shell="run kvstore doctor as the user of the node (sudo -u USER kvstore doctor ...)",
            systemd="systemd-run --pipe -p User=USER kvstore doctor ...",
            kubernetes="kubectl exec into the node's pod, and run kvstore doctor there",
        ),
    )

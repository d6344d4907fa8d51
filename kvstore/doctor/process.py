"""Limits of the process: memory that it may lock, files that it may have open."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from typing import Final

from kvstore.doctor.finding import Finding, Fix, Status, words_of_bytes
from kvstore.doctor.system import Limit, System
from kvstore.limits import CONNECTIONS_MAX, DESCRIPTORS_OWN, OPEN_FILES_MIN

_CAP_IPC_LOCK: Final = 14  # capabilities(7): memory locks are not counted
_ALL_IDS: Final = ["0", "0", "4294967295"]
OPEN_FILES_NEEDED: Final = CONNECTIONS_MAX + DESCRIPTORS_OWN


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """What this process, and so a node started like it, may do.

    Attributes:
        memlock: bytes of memory that it may lock.
        may_lock_memory: CAP_IPC_LOCK of the machine's own user namespace: the limit does not count.
        open_files: descriptors.
        locked_bytes: memory that the node will register: cache and staging.
        rdma_wanted: transport is "rdma": without registered memory it cannot serve.
        rdma_present: there is an RDMA device.
        registers_for_drives: the drives are driven by io_uring, or may be.
    """

    memlock: Limit
    may_lock_memory: bool
    open_files: Limit
    locked_bytes: int
    rdma_wanted: bool
    rdma_present: bool
    registers_for_drives: bool


def read_process(
    system: System, *, locked_bytes: int, rdma_wanted: bool, rdma_present: bool, registers_for_drives: bool
) -> ProcessFacts:
    """Ask the kernel about this process."""
    effective = re.search(r"^CapEff:\s+([0-9a-f]+)", system.text("/proc/self/status") or "", re.MULTILINE)
    return ProcessFacts(
        memlock=system.limit(resource.RLIMIT_MEMLOCK),
        # a user namespace shows the capability, but the kernel asks for it outside (user_namespaces(7))
        may_lock_memory=bool(effective and int(effective[1], 16) >> _CAP_IPC_LOCK & 1)
        and (system.text("/proc/self/uid_map") or "").split() in ([], _ALL_IDS),
        open_files=system.limit(resource.RLIMIT_NOFILE),
        locked_bytes=locked_bytes,
        rdma_wanted=rdma_wanted,
        rdma_present=rdma_present,
        registers_for_drives=registers_for_drives,
    )


def check_process(facts: ProcessFacts) -> list[Finding]:
    """All lines about limits of the process."""
    return [check_memlock(facts), check_open_files(facts)]


def check_memlock(facts: ProcessFacts) -> Finding:
    """Whether cache and staging may be registered with io_uring and with RDMA devices."""
    for_rdma = facts.rdma_wanted or facts.rdma_present
    needed = facts.locked_bytes if for_rdma or facts.registers_for_drives else 0
    limit = facts.memlock.soft
    enough = facts.may_lock_memory or limit is None or limit >= needed
    consequence = (
        "RDMA cannot register the memory that it moves"
        if for_rdma
        else "the memory is not registered with io_uring, so each operation pins its own"
    )
    found = f"{words_of_bytes(limit)} (RLIMIT_MEMLOCK)"
    return Finding(
        check="memlock",
        status=Status.OK if enough else Status.FAILING if facts.rdma_wanted else Status.WARNING,
        found=f"{found}, not counted (CAP_IPC_LOCK)" if facts.may_lock_memory else found,
        needed=f"{words_of_bytes(needed)} for cache and staging" if needed else "none: nothing is registered",
        reason="" if enough else consequence,
        fix=None if enough else memlock_fix(),
    )


def memlock_fix() -> Fix:
    """How memory may be locked, in each way that a node is started."""
    return Fix(
        shell="ulimit -l unlimited (as root, before kvstore serve); for a user: '* - memlock unlimited' in "
        "/etc/security/limits.conf and log in again; in Docker: --ulimit memlock=-1:-1",
        systemd="LimitMEMLOCK=infinity",
        kubernetes='securityContext.capabilities.add: ["IPC_LOCK"]; Kubernetes sets no limits of its own, so else '
        "LimitMEMLOCK=infinity in the unit of containerd (or crio, docker) on each node, and restart it",
    )


def check_open_files(facts: ProcessFacts) -> Finding:
    """Whether all the connections that a node takes may be open. A worker raises its soft limit to the hard one."""
    hard = facts.open_files.hard
    enough = hard is None or hard >= OPEN_FILES_NEEDED
    status = Status.OK if enough else Status.WARNING if hard is None or hard >= OPEN_FILES_MIN else Status.FAILING
    return Finding(
        check="open_files",
        status=status,
        found="unlimited" if hard is None else f"{hard} (hard limit)",
        needed=f"{OPEN_FILES_NEEDED} for {CONNECTIONS_MAX} connections",
        reason="" if enough else "connections beyond the limit are refused",
        fix=None
        if enough
        else Fix(
            shell=f"ulimit -Hn {OPEN_FILES_NEEDED} (as root, before kvstore serve); for a user: "
            f"'* hard nofile {OPEN_FILES_NEEDED}' in /etc/security/limits.conf and log in again; in Docker: "
            f"--ulimit nofile={OPEN_FILES_NEEDED}",
            systemd=f"LimitNOFILE={OPEN_FILES_NEEDED}",
            kubernetes=f"LimitNOFILE={OPEN_FILES_NEEDED} or more in the unit of containerd (or crio) on each node; "
            "pods inherit it",
        ),
    )

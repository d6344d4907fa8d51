"""The machine as a whole: kernel, clock, huge pages, memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvstore.doctor.finding import Finding, Fix, Status, words_of_bytes
from kvstore.doctor.system import System
from kvstore.types.free_memory import machine_free_bytes

_CLOCKSOURCE: Final = "/sys/devices/system/clocksource/clocksource0"
_HUGE_PAGES: Final = "/sys/kernel/mm/transparent_hugepage/enabled"

KERNEL_NEEDED: Final = (6, 1)
"""The oldest that has all that a node uses and that people still get updates for (Debian 12)."""

_KERNEL_FEATURES: Final = (
    ((5, 1), "io_uring, so the device mode is threads"),
    ((5, 14), "populating memory from the side (madvise(2) MADV_POPULATE_WRITE), so a start waits for its cache"),
    ((5, 19), "io_uring completions without interrupts (IORING_SETUP_COOP_TASKRUN)"),
    ((6, 1), "the alignment that O_DIRECT needs (statx(2) STATX_DIOALIGN), so it is found by trying"),
)

FAST_CLOCKSOURCES: Final = frozenset(("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"))
"""Read by the vDSO without a system call; each operation reads the clock several times (kernel, timekeeping.rst)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What the kernel tells of the machine.

    Attributes:
        kernel_release: uname -r.
        clocksource: where time comes from; "" where /sys does not tell.
        clocksources: what else there is, space-separated.
        clock_is_synchronised: whether NTP or the like holds the wall clock; None is not known.
        huge_pages: the chosen mode of transparent huge pages, "always", "madvise" or "never"; "" without them.
        memory_free_bytes: what can be taken without swapping (MemAvailable); None is not known.
        memory_wanted_bytes: cache and staging of the node's settings.
    """

    kernel_release: str
    clocksource: str
    clocksources: str
    clock_is_synchronised: bool | None
    huge_pages: str
    memory_free_bytes: int | None
    memory_wanted_bytes: int


def read_machine(system: System, *, memory_wanted_bytes: int) -> MachineFacts:
    """Ask the machine."""
    chosen = re.search(r"\[(\w+)\]", system.text(_HUGE_PAGES) or "")
    return MachineFacts(
        kernel_release=system.kernel_release(),
        clocksource=system.text(f"{_CLOCKSOURCE}/current_clocksource") or "",
        clocksources=system.text(f"{_CLOCKSOURCE}/available_clocksource") or "",
        clock_is_synchronised=system.clock_is_synchronised(),
        huge_pages=chosen[1] if chosen else "",
        memory_free_bytes=machine_free_bytes(system.text("/proc/meminfo") or ""),
        memory_wanted_bytes=memory_wanted_bytes,
    )


def check_machine(facts: MachineFacts) -> list[Finding]:
    """All lines about the machine as a whole."""
    checks = (check_kernel, check_clocksource, check_clock, check_huge_pages, check_memory)
    return [check(facts) for check in checks]


def check_kernel(facts: MachineFacts) -> Finding:
    """Whether the kernel has what a node uses."""
    match = re.match(r"(\d+)\.(\d+)", facts.kernel_release)
    version = (int(match[1]), int(match[2])) if match else KERNEL_NEEDED
    missing = [words for since, words in _KERNEL_FEATURES if version < since]
    return Finding(
        check="kernel",
        status=Status.WARNING if missing else Status.OK,
        found=facts.kernel_release,
        needed="6.1 or newer",
        reason=f"this one lacks {'; '.join(missing)}" if missing else "",
        fix=Fix(
            shell="install a newer kernel of the distribution (Debian: apt-get install linux-image-amd64) and reboot",
            systemd="the same; a unit cannot bring a kernel",
            kubernetes="use node images with Linux 6.1 or newer; a container runs on its node's kernel",
        )
        if missing
        else None,
    )


def check_clocksource(facts: MachineFacts) -> Finding:
    """Whether reading the clock is cheap."""
    slow = bool(facts.clocksource) and facts.clocksource not in FAST_CLOCKSOURCES
    return Finding(
        check="clocksource",
        status=Status.WARNING if slow else Status.OK,
        found=facts.clocksource or "not told by /sys",
        needed=" or ".join(sorted(FAST_CLOCKSOURCES)),
        reason="each look at this clock is a system call or a slow device read, and each request takes several"
        if slow
        else "",
        fix=Fix(
            shell=f"echo tsc > {_CLOCKSOURCE}/current_clocksource (available here: {facts.clocksources or 'unknown'}); "
            "to keep it: clocksource=tsc tsc=reliable on the kernel's command line",
            systemd="the same on the kernel's command line, /etc/default/grub",
            kubernetes="the same on the node's kernel command line; pods share their node's clock",
        )
        if slow
        else None,
    )


def check_clock(facts: MachineFacts) -> Finding:
    """Whether the wall clock can be believed."""
    wrong = facts.clock_is_synchronised is False
    unknown = facts.clock_is_synchronised is None
    return Finding(
        check="clock",
        status=Status.WARNING if wrong else Status.OK,
        found="not synchronised" if wrong else "not told by the kernel" if unknown else "synchronised",
        needed="synchronised (chrony, systemd-timesyncd)",
        reason="leases and deadlines use the monotonic clock, but logs of several nodes will not line up and "
        "certificates may count as expired"
        if wrong
        else "",
        fix=Fix(
            shell="timedatectl set-ntp true (needs systemd-timesyncd); or apt-get install chrony, and systemctl enable "
            "--now chrony",
            systemd="in [Unit]: After=time-sync.target and Wants=time-sync.target, with chrony or timesyncd enabled",
            kubernetes="run chrony on the machine below (and in its hypervisor); a pod has its node's clock",
        )
        if wrong
        else None,
    )


def check_huge_pages(facts: MachineFacts) -> Finding:
    """Whether the cache may lie in huge pages."""
    fine = facts.huge_pages in ("always", "madvise")
    return Finding(
        check="huge_pages",
        status=Status.OK if fine else Status.WARNING,
        found=f"transparent huge pages: {facts.huge_pages or 'not in this kernel'}",
        needed="madvise or always",
        reason="" if fine else "cache and staging lie in 4 KiB pages: each transfer pins 512 times as many",
        fix=None
        if fine
        else Fix(
            shell=f"echo madvise > {_HUGE_PAGES}",
            systemd=f"in a unit that runs before: ExecStart=/bin/sh -c 'echo madvise > {_HUGE_PAGES}'; "
            "or transparent_hugepage=madvise on the kernel's command line",
            kubernetes="transparent_hugepage=madvise on the node's kernel command line (or its tuned profile); "
            "pods need nothing, hugepages-2Mi resources are not used",
        ),
    )


def check_memory(facts: MachineFacts) -> Finding:
    """Whether cache and staging fit beside what runs already."""
    wanted, free = facts.memory_wanted_bytes, facts.memory_free_bytes
    short = free is not None and free < wanted
    return Finding(
        check="memory",
        status=Status.WARNING if short else Status.OK,
        found=f"{words_of_bytes(free)} available" if free is not None else "not told by /proc/meminfo",
        needed=f"{words_of_bytes(wanted)} for cache and staging",
        reason="the cache is filled in the background, so the node starts and may be killed for memory later"
        if short
        else "",
        fix=Fix(
            shell="pass a smaller --cache, or end what else runs",
            systemd="Environment=KVSTORE_CACHE=SIZE with a smaller size",
            kubernetes="a smaller cache, or resources.requests.memory and limits.memory above cache + staging + index",
        )
        if short
        else None,
    )

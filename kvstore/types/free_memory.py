"""How much memory may be taken before the kernel kills somebody for it.

Shared memory is taken at once and belongs to no process, so the kernel ends others first when it runs out.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvstore.limits import KiB

_MACHINE = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")  # of cgroup v2; in a container its own group is the root of the mount


def free_memory_bytes() -> int | None:
    """What can be taken without swapping, by the machine and by the control group; None where neither says."""
    group = group_free_bytes(_text(_GROUP / "memory.max"), _text(_GROUP / "memory.stat"))
    known = [free for free in (machine_free_bytes(_text(_MACHINE)), group) if free is not None]
    return min(known, default=None)


def machine_free_bytes(meminfo: str) -> int | None:
    """MemAvailable of /proc/meminfo; None where it is not in it."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(found[1]) * KiB if found else None


def group_free_bytes(memory_max: str, memory_stat: str) -> int | None:
    """What a control group may still take, its page cache counted as free; None for a group without a limit."""
    if not memory_max.strip().isdigit():
        return None
    taken = sum(int(value) for value in re.findall(r"^(?:anon|shmem|kernel) (\d+)$", memory_stat, re.MULTILINE))
    return max(0, int(memory_max) - taken)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

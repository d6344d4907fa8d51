"""How memory is cut into RDMA regions within the limits of process and device, and what is short: a pure plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.limits import PAGE_BYTES

MEMLOCK_WORDS: Final = (
    "raise it: ulimit -l unlimited (shell), LimitMEMLOCK=infinity (systemd; containerd: in its unit), "
    "--ulimit memlock=-1:-1 (Docker), capability IPC_LOCK in securityContext.capabilities.add (Kubernetes)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLimits:
    """What bounds registered memory.

    Attributes:
        memlock_bytes: RLIMIT_MEMLOCK; None is unlimited, or not counted (CAP_IPC_LOCK).
        region_bytes_max: max_mr_size of the device.
        regions_max: max_mr of the device, less what is registered already.
    """

    memlock_bytes: int | None
    region_bytes_max: int
    regions_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """How much memory can be registered, and in which pieces.

    Attributes:
        wanted_bytes: what was asked for.
        piece_bytes: lengths of the regions, in order, whole pages; empty when nothing fits.
        shortfall: why it is less than wanted, naming limit, current value, value needed and fix; "" when all fits.
    """

    wanted_bytes: int
    piece_bytes: tuple[int, ...]
    shortfall: str

    @property
    def usable_bytes(self) -> int:
        """Sum of the pieces: what a small start works with."""
        return sum(self.piece_bytes)


def plan_regions(wanted_bytes: int, limits: RegionLimits) -> RegionPlan:
    """Cut `wanted_bytes` (whole pages) into as few regions as the device takes, and say what is short."""
    wanted_bytes = _whole_pages(wanted_bytes + PAGE_BYTES - 1)
    piece_bytes = _whole_pages(limits.region_bytes_max)
    usable, shortfall = wanted_bytes, ""
    by_device = piece_bytes * max(0, limits.regions_max)
    if by_device < usable:
        needed = -(-wanted_bytes // piece_bytes) if piece_bytes else 0
        usable = by_device
        shortfall = (
            f"the device takes {limits.regions_max} more regions (max_mr) of at most {limits.region_bytes_max} bytes "
            f"(max_mr_size), {wanted_bytes} bytes need {needed}; lower cache and staging, or end what else registers "
            "memory with it"
        )
    if limits.memlock_bytes is not None and limits.memlock_bytes < usable:
        usable = _whole_pages(limits.memlock_bytes)
        shortfall = (
            f"the locked memory limit (RLIMIT_MEMLOCK) is {limits.memlock_bytes} bytes, {wanted_bytes} are needed; "
            f"{MEMLOCK_WORDS}"
        )
    pieces: list[int] = []
    while usable > 0:
        pieces.append(min(usable, piece_bytes))
        usable -= pieces[-1]
    return RegionPlan(wanted_bytes=wanted_bytes, piece_bytes=tuple(pieces), shortfall=shortfall)


def _whole_pages(length_bytes: int) -> int:
    return length_bytes // PAGE_BYTES * PAGE_BYTES

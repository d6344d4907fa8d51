"""What the kernel says is free, of the machine and of a control group."""

from __future__ import annotations

from kvstore.limits import GiB, KiB, MiB
from kvstore.types.free_memory import free_memory_bytes, group_free_bytes, machine_free_bytes


def test_the_machine_says_what_is_available() -> None:
    assert machine_free_bytes("MemTotal: 24000000 kB\nMemFree: 1 kB\nMemAvailable:   2048 kB\n") == 2 * MiB
    assert machine_free_bytes("MemTotal: 24000000 kB\n") is None


def test_a_group_counts_what_it_cannot_give_back() -> None:
    stat = f"anon {GiB}\nfile {7 * GiB}\nkernel {MiB}\nshmem {512 * MiB}\nanon_thp {GiB}\n"
    assert group_free_bytes(f"{4 * GiB}\n", stat) == 4 * GiB - GiB - 512 * MiB - MiB
    assert group_free_bytes(f"{GiB}\n", stat) == 0
    assert group_free_bytes("max\n", stat) is None
    assert group_free_bytes("", "") is None


def test_this_machine_has_some() -> None:
    free = free_memory_bytes()
    assert free is not None
    assert free > 64 * KiB

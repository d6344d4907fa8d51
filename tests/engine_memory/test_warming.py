"""Memory that is touched while the engine works already."""

from __future__ import annotations

from kvstore.device.memory import MemoryDevice
from kvstore.engine.arena import Arena
from kvstore.engine.warming import Warming
from kvstore.limits import WARMING_STEP_BYTES, MiB


class Registering(MemoryDevice):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__(size_bytes=1 * MiB)
        self.registered: list[memoryview] = []

    def register(self, memory: memoryview) -> None:
        self.registered.append(memory)


def resident_kib() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4


def test_memory_is_touched_then_registered_once_by_the_engines_thread() -> None:
    device = Registering()
    before = resident_kib()
    arena = Arena(4 * WARMING_STEP_BYTES + 3 * MiB, prefault=False)
    arena.memory[:8] = b"anything"
    warming = Warming(arena, device)
    warming._thread.join()
    assert resident_kib() - before > 4 * WARMING_STEP_BYTES // 1024
    assert not warming.done, "the ring belongs to the engine's thread"
    for _ in range(2):
        warming.poll()
    assert warming.done
    assert device.registered == [arena.memory]
    assert arena.memory[:8] == b"anything"
    warming.stop()


def test_a_stopped_warming_registers_nothing() -> None:
    device = Registering()
    warming = Warming(Arena(64 * MiB, prefault=False), device)
    warming.stop()
    warming.poll()
    assert warming.done
    assert not device.registered

"""Shared memory that the garbage collector frees: in any thread, at any allocation, also in the midst of our own."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from kvstore.limits import PAGE_BYTES
from kvstore_client.shm import SharedMemory, address_of

ROUNDS = 1_000
PATIENCE_S = 30  # of which a second is needed


class Knot:
    """Holds a buffer, and itself: only the collector frees it."""

    def __init__(self, memory: memoryview | None) -> None:
        self.memory = memory
        self.me = self


@pytest.fixture
def restored_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.collect()


@pytest.mark.usefixtures("restored_thresholds")
def test_memory_is_freed_wherever_the_collector_comes_by() -> None:
    gc.collect()  # what other tests have left behind is not counted
    shared = SharedMemory()
    descriptors = len(os.listdir("/proc/self/fd"))

    def work() -> None:
        for number in range(ROUNDS):
            gc.set_threshold(1 + number % 50, 1, 1)  # by and by it comes at each allocation of ours
            Knot(shared.allocate(PAGE_BYTES, prefault=False))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it waits for itself"
    gc.collect()
    assert shared.numbers == frozenset()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_freed_memory_is_not_found() -> None:
    shared = SharedMemory()
    memory = shared.allocate(PAGE_BYTES, prefault=False)
    assert memory is not None
    address = address_of(memory)
    found = shared.find(address, PAGE_BYTES)
    assert found is not None
    del memory
    assert shared.find(address, PAGE_BYTES) is None
    with pytest.raises(OSError):
        os.fstat(found[0].fd)

"""The arena's pages are touched in a thread while the node serves already, and pinned for the device afterwards.

Where the kernel has to fetch memory from a host, 1 GiB takes seconds (docs/decisions/cold-and-put-path.md). Until it
is done a first use of a page costs a fault, and operations of the device pin their own memory.
"""

from __future__ import annotations

import os
import threading

from kvstore.device.base import Device
from kvstore.device.syscalls import populate
from kvstore.engine.arena import Arena
from kvstore.limits import WARMING_NICENESS, WARMING_STEP_BYTES


class Warming:
    """One pass over an arena made without `prefault`. `poll` and `stop` belong to the engine's thread."""

    def __init__(self, arena: Arena, device: Device) -> None:
        """Starts at once; the arena and the device must outlive `stop`."""
        self._arena = arena
        self._device = device
        self._wanted = True
        self._registered = False
        self._thread = threading.Thread(target=self._run, name="warming", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """The memory is there and the device has it, or it was stopped."""
        return self._registered or not self._wanted

    def poll(self) -> None:
        """Hands the memory to the device once the thread has ended: its ring takes orders from one thread only."""
        if not self.done and not self._thread.is_alive():
            self._registered = True
            self._device.register(self._arena.memory)

    def stop(self) -> None:
        """No page is touched any more. Idempotent."""
        self._wanted = False
        self._thread.join()

    def _run(self) -> None:
        # a thread has its own niceness on Linux (setpriority(2), NOTES); requests come first
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WARMING_NICENESS)
        for at in range(0, self._arena.size_bytes, WARMING_STEP_BYTES):
            length = min(WARMING_STEP_BYTES, self._arena.size_bytes - at)
            if not self._wanted or not populate(self._arena.address + at, length):
                return  # an old kernel: registering the memory touches it

"""A node's own memory that work requests may name: registered once, at start, and never while a transfer waits."""

from __future__ import annotations

from bisect import bisect_right

from kvstore.limits import PAGE_BYTES
from kvstore.transport.rdma.rail import Rail
from kvstore.transport.rdma.regions import address_of
from kvstore.transport.rdma.verbs import Access, MemoryRegion


class Staging:
    """Arenas of a worker. Only their owner's device reads and writes them: no remote key is given away."""

    def __init__(self, rail: Rail) -> None:
        self._rail = rail
        self._regions: list[MemoryRegion] = []  # by address
        self._begins: list[int] = []
        self._arenas: list[memoryview] = []

    def add(self, arena: memoryview) -> None:
        """Registers an arena, cut to what the device takes. The arena is kept until `close`. Raises VerbsFailure."""
        begin, step = address_of(arena), self._rail.device.limits.region_bytes_max // PAGE_BYTES * PAGE_BYTES
        for at in range(0, len(arena), step):
            region = self._rail.register(begin + at, min(step, len(arena) - at), Access.LOCAL_WRITE)
            place = bisect_right(self._begins, region.address)
            self._regions.insert(place, region)
            self._begins.insert(place, region.address)
        self._arenas.append(arena)

    def cut(self, address: int, length_bytes: int) -> list[tuple[int, int, int]] | None:
        """(address, length, local key) of those bytes, cut where regions meet; None when some are not registered."""
        found = []
        place = bisect_right(self._begins, address) - 1
        while length_bytes > 0:
            if place < 0 or place >= len(self._regions):
                return None
            region = self._regions[place]
            take = min(length_bytes, region.address + region.length_bytes - address)
            if take <= 0 or address < region.address:
                return None
            found.append((address, take, region.local_key))
            address += take
            length_bytes -= take
            place += 1
        return found

    def close(self) -> None:
        """Deregisters all; no transfer may be on its way. Idempotent."""
        for region in self._regions:
            region.close()
        self._regions, self._begins, self._arenas = [], [], []

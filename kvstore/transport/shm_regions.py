"""The memory that clients share with this node: what is mapped for whom, within bounds.

A region lives until its connection drops it, and its mapping until nothing uses it any more: a device read that is
under way holds a view of it, so the memory stays where the drive writes to even after the client was killed. The bounds
count mappings, not regions.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import defaultdict

from kvstore.errors import InvalidRequest, Overloaded
from kvstore.limits import PAGE_BYTES, REGION_BYTES_MAX, REGION_BYTES_PER_CLIENT_MAX, REGIONS_PER_CONNECTION_MAX
from kvstore.transport.shm import Peer, open_memory
from kvstore.wire.shared import Place


class MappedMemory:
    """Bytes that are mapped, for each process and together.

    Attributes:
        mapped_bytes: of all clients now.
    """

    def __init__(
        self, *, bytes_max: int = REGION_BYTES_MAX, client_bytes_max: int = REGION_BYTES_PER_CLIENT_MAX
    ) -> None:
        self.mapped_bytes = 0
        self._bytes_max = bytes_max
        self._client_bytes_max = client_bytes_max
        self._of_peer: defaultdict[Peer, int] = defaultdict(int)

    def map(self, fd: int, length_bytes: int, peer: Peer) -> mmap.mmap:
        """Maps a client's memory. Raises Overloaded over a bound, else as `open_memory`."""
        own = self._of_peer[peer]
        if own + length_bytes > self._client_bytes_max:
            raise Overloaded(
                f"{own} bytes are shared by this process already, {length_bytes} more are over the limit of "
                f"{self._client_bytes_max}: share less, or drop what is not used"
            )
        if self.mapped_bytes + length_bytes > self._bytes_max:
            raise Overloaded(
                f"{self.mapped_bytes} bytes are shared by all clients, {length_bytes} more are over the limit of "
                f"{self._bytes_max}: close clients that are done, or let some use transport tcp"
            )
        mapped = open_memory(fd, length_bytes)
        self._of_peer[peer] += length_bytes
        self.mapped_bytes += length_bytes
        weakref.finalize(mapped, self._unmapped, length_bytes, peer).atexit = False
        return mapped

    def _unmapped(self, length_bytes: int, peer: Peer) -> None:
        self.mapped_bytes -= length_bytes
        self._of_peer[peer] -= length_bytes
        if not self._of_peer[peer]:
            del self._of_peer[peer]


class Regions:
    """The regions of one connection."""

    def __init__(self, memory: MappedMemory, peer: Peer) -> None:
        self._memory = memory
        self._peer = peer
        self._views: dict[int, memoryview] = {}

    def __len__(self) -> int:
        return len(self._views)

    def add(self, region: int, fd: int, length_bytes: int) -> None:
        """Takes a client's memory; `fd` is closed in any case.

        Raises:
            InvalidRequest: The number is in use, or as `open_memory`.
            Overloaded: A bound.
        """
        try:
            if region in self._views:
                raise InvalidRequest(f"region {region} is in use on this connection: choose another number")
            if len(self._views) >= REGIONS_PER_CONNECTION_MAX:
                raise Overloaded(
                    f"{len(self._views)} regions are open on this connection, the limit is "
                    f"{REGIONS_PER_CONNECTION_MAX}: drop some, or share larger ones"
                )
            self._views[region] = memoryview(self._memory.map(fd, length_bytes, self._peer))
        finally:
            os.close(fd)

    def drop(self, region: int) -> None:
        """Forgets a region; unmapped as soon as no transfer uses it. Unknown ones are passed over."""
        self._views.pop(region, None)

    def view(self, place: Place) -> memoryview:
        """The memory of a place. Raises InvalidRequest for a place outside of the client's regions."""
        region, offset, length_bytes = place
        whole = self._views.get(region)
        if whole is None:
            raise InvalidRequest(f"region {region} is not open on this connection: send REGION first")
        end = offset + length_bytes
        if end > len(whole) or offset % PAGE_BYTES:
            raise InvalidRequest(
                f"place at {offset} of {length_bytes} bytes in region {region}, which has {len(whole)}; places lie "
                f"inside and begin at a multiple of {PAGE_BYTES}"
            )
        return whole[offset:end]

    def close(self) -> None:
        """Forgets all of them."""
        self._views.clear()

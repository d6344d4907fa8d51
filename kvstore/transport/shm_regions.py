"""The memory that clients share with this node: what is mapped for whom, within bounds.

A region lives until its connection drops it, and its mapping until nothing uses it any more: a device read that is
under way holds a view of it, so the memory stays where the drive writes to even after the client was killed. Then it is
unmapped, in a thread (`shm_unmapping`). The bounds count mappings, not regions.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import defaultdict
from functools import partial

from kvstore.errors import Overloaded
from kvstore.limits import (
    PAGE_BYTES,
    REGION_BYTES_MAX,
    REGION_BYTES_PER_CLIENT_MAX,
    REGIONS_MAX,
    REGIONS_PER_CLIENT_MAX,
    REGIONS_PER_CONNECTION_MAX,
    REGIONS_SHARE_OF_FILES,
    SECOND_NS,
)
from kvstore.transport.regions import RegionTable
from kvstore.transport.shm import Peer, open_memory
from kvstore.transport.shm_unmapping import Unmapper
from kvstore.wire.shared import Place


def regions_max() -> int:
    """How many regions all clients together may have, where each takes one of this process's open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return REGIONS_MAX if soft == resource.RLIM_INFINITY else min(REGIONS_MAX, int(soft * REGIONS_SHARE_OF_FILES))


class MappedMemory:
    """Bytes that are mapped, and in how many regions, for each process and together.

    Attributes:
        mapped_bytes, mapped_regions: of all clients now.
        from_drive_bytes: payload that a drive has put into them.
        copied_in_bytes, copied_out_bytes: payload that we have copied to places of theirs, and from there.
    """

    def __init__(
        self,
        *,
        bytes_max: int = REGION_BYTES_MAX,
        client_bytes_max: int = REGION_BYTES_PER_CLIENT_MAX,
        regions_max: int = REGIONS_MAX,
        client_regions_max: int = REGIONS_PER_CLIENT_MAX,
    ) -> None:
        self.mapped_bytes = self.mapped_regions = 0
        self.from_drive_bytes = self.copied_in_bytes = self.copied_out_bytes = 0
        self._bytes_max = bytes_max
        self._client_bytes_max = client_bytes_max
        self._regions_max = regions_max
        self._client_regions_max = client_regions_max
        self._of_peer: defaultdict[Peer, tuple[int, int]] = defaultdict(lambda: (0, 0))  # bytes, regions
        self._counting = threading.Lock()  # what is mapped is counted by the loop, what is unmapped by the thread
        self._unmapper = Unmapper()

    def map(self, fd: int, length_bytes: int, peer: Peer) -> memoryview:
        """Maps a client's memory, until the last view of it is gone.

        Raises:
            Overloaded: A bound.
            InvalidRequest, Unavailable: As `open_memory`.
        """
        own_bytes, own_regions = self._of_peer.get(peer, (0, 0))
        if own_bytes + length_bytes > self._client_bytes_max:
            raise Overloaded(
                f"{own_bytes} bytes are shared by this process already, {length_bytes} more are over the limit of "
                f"{self._client_bytes_max}: share less, or drop what is not used"
            )
        if own_regions >= self._client_regions_max:
            raise Overloaded(
                f"{own_regions} regions are shared by this process, the limit is {self._client_regions_max}: "
                "share larger ones, or drop what is not used"
            )
        if self.mapped_bytes + length_bytes > self._bytes_max:
            raise Overloaded(
                f"{self.mapped_bytes} bytes are shared by all clients, {length_bytes} more are over the limit of "
                f"{self._bytes_max}: close clients that are done, or let some use transport tcp"
            )
        if self.mapped_regions >= self._regions_max:
            raise Overloaded(
                f"{self.mapped_regions} regions are shared by all clients, the limit is {self._regions_max}: close "
                "clients that are done, let some use transport tcp, or raise the limit on open files (ulimit -Hn)"
            )
        try:
            self._unmapper.start()
        except RuntimeError as error:
            raise Overloaded(
                f"memory cannot be shared without a thread that unmaps it ({error}): raise the limit on processes "
                "(ulimit -u, pids.max), or use transport tcp"
            ) from None
        mapped = open_memory(fd, length_bytes)
        self._count(length_bytes, 1, peer)
        return self._unmapper.lend(mapped, partial(self._count, -length_bytes, -1, peer))

    def close(self, *, within_ns: int = 10 * SECOND_NS) -> None:
        """Unmaps what is not used any more, as far as that is done `within_ns`. Idempotent."""
        self._unmapper.close(within_ns=within_ns)

    def _count(self, length_bytes: int, regions: int, peer: Peer) -> None:
        with self._counting:
            self.mapped_bytes += length_bytes
            self.mapped_regions += regions
            own_bytes, own_regions = self._of_peer[peer]
            if own_regions + regions:
                self._of_peer[peer] = own_bytes + length_bytes, own_regions + regions
            else:
                del self._of_peer[peer]


class Regions:
    """The regions of one connection."""

    def __init__(self, memory: MappedMemory, peer: Peer) -> None:
        self._memory = memory
        self._peer = peer
        self._table: RegionTable[memoryview] = RegionTable(
            regions_max=REGIONS_PER_CONNECTION_MAX, unit_bytes=PAGE_BYTES
        )

    def __len__(self) -> int:
        return len(self._table)

    def add(self, region: int, fd: int, length_bytes: int) -> None:
        """Takes a client's memory; `fd` is closed in any case.

        Raises:
            InvalidRequest: The number is in use, or as `open_memory`.
            Overloaded: A bound.
        """
        try:
            self._table.check_new(region)
            self._table.add(region, self._memory.map(fd, length_bytes, self._peer), length_bytes)
        finally:
            os.close(fd)

    def drop(self, region: int) -> None:
        """Forgets a region; unmapped as soon as no transfer uses it. Unknown ones are passed over."""
        self._table.drop(region)

    def view(self, place: Place) -> memoryview:
        """The memory of a place. Raises InvalidRequest for a place outside of the client's regions."""
        return self._table.find(place)[place.offset : place.offset + place.length_bytes]

    def close(self) -> None:
        """Forgets all of them."""
        self._table.clear()

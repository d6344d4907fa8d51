"""What the node knows of the regions of one client, by the numbers that it gave them."""

from __future__ import annotations

from typing import Generic, TypeVar

from kvstore.errors import InvalidRequest, Overloaded
from kvstore.wire.shared import Place

M = TypeVar("M")


class RegionTable(Generic[M]):
    """Regions and their lengths, within a bound. What a region is to the transport, M, is the transport's."""

    __slots__ = ("_known", "_regions_max", "_unit_bytes")

    def __init__(self, *, regions_max: int, unit_bytes: int = 1) -> None:
        """
        Args:
            regions_max: known at once.
            unit_bytes: places begin at a multiple of it.
        """
        self._known: dict[int, tuple[M, int]] = {}
        self._regions_max = regions_max
        self._unit_bytes = unit_bytes

    def __len__(self) -> int:
        return len(self._known)

    def check_new(self, region: int) -> None:
        """Raises InvalidRequest for a number that is in use, Overloaded when there are too many."""
        if region in self._known:
            raise InvalidRequest(f"region {region} is in use on this connection: choose another number")
        if len(self._known) >= self._regions_max:
            raise Overloaded(
                f"{len(self._known)} regions are open on this connection, the limit is {self._regions_max}: drop some, "
                "or share larger ones"
            )

    def add(self, region: int, memory: M, length_bytes: int) -> None:
        """A region whose number `check_new` has seen."""
        self._known[region] = memory, length_bytes

    def drop(self, region: int) -> None:
        """Forgets a region. Unknown ones are passed over."""
        self._known.pop(region, None)

    def find(self, place: Place) -> M:
        """The region that a place lies in. Raises InvalidRequest for a place outside of the client's regions."""
        region, offset, length_bytes = place
        known = self._known.get(region)
        if known is None:
            raise InvalidRequest(f"region {region} is not open on this connection: tell of it first")
        memory, region_bytes = known
        if offset + length_bytes > region_bytes or offset % self._unit_bytes:
            raise InvalidRequest(
                f"place at {offset} of {length_bytes} bytes in region {region}, which has {region_bytes}; places lie "
                f"inside and begin at a multiple of {self._unit_bytes}"
            )
        return memory

    def clear(self) -> None:
        """Forgets all of them."""
        self._known.clear()

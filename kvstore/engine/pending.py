"""Puts in progress by salted index key: tickets, and parcels, which are tickets only to who asks for one record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.engine.put import Ticket
    from kvstore.engine.put_parcel import GrantedParcel


class Pending(Mapping[bytes, "Ticket"]):
    """What is on its way to the drive.

    Attributes:
        tickets: records that go alone.
    """

    __slots__ = ("_parcels", "tickets")

    def __init__(self) -> None:
        self.tickets: dict[bytes, Ticket] = {}
        self._parcels: dict[bytes, GrantedParcel] = {}

    def __getitem__(self, key16: bytes) -> Ticket:
        parcel = self._parcels.get(key16)
        return self.tickets[key16] if parcel is None else parcel.twin(key16)

    def __contains__(self, key16: object) -> bool:
        return key16 in self.tickets or key16 in self._parcels

    def __iter__(self) -> Iterator[bytes]:
        yield from self.tickets
        yield from self._parcels

    def __len__(self) -> int:
        return len(self.tickets) + len(self._parcels)

    def has_any(self, keys16: Iterable[bytes]) -> bool:
        """Whether one of these is on its way."""
        return not (self.tickets.keys().isdisjoint(keys16) and self._parcels.keys().isdisjoint(keys16))

    def received(self) -> set[bytes]:
        """Those that have come whole, and become valid unless the drive fails."""
        found = {key16 for key16, ticket in self.tickets.items() if ticket.received}
        return found.union(key16 for key16, parcel in self._parcels.items() if parcel.received)

    def adopt(self, parcel: GrantedParcel) -> None:
        """The records of a parcel are on their way."""
        self._parcels.update(dict.fromkeys(parcel.keys16, parcel))

    def leave(self, parcel: GrantedParcel) -> None:
        """They have ended."""
        for key16 in parcel.keys16:
            del self._parcels[key16]

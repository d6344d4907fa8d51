"""Pins: a client's time-bound hold on keys against eviction. Time is an argument; nothing here has a clock.

A pin costs its client the bytes that no other pin held when it was taken, so a prefix shared by a thousand requests is
counted once. A get never needs a pin to be right.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from kvstore.engine.catalog import Catalog
from kvstore.engine.location import I64, U64
from kvstore.limits import PIN_TTL_NS_MAX, PINNED_SHARE_CLIENT, PINNED_SHARE_TARGET, PINS_MAX, SECOND_NS
from kvstore.telemetry.metrics import PinAge


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pin:
    client_id: bytes
    keys: U64
    charged_bytes: int
    since_ns: int
    until_ns: int


class Pins:
    """All pins of one drive.

    Args:
        catalog: where holds are counted per key.
        capacity_bytes: of the drive; the shares in limits.py are of it.
    """

    def __init__(self, catalog: Catalog, *, capacity_bytes: int) -> None:
        self._catalog = catalog
        self._client_bytes_max = int(capacity_bytes * PINNED_SHARE_CLIENT)
        self._target_bytes_max = int(capacity_bytes * PINNED_SHARE_TARGET)
        self._pins: dict[int, _Pin] = {}
        self._pins_of: dict[bytes, set[int]] = {}
        self._bytes_of: dict[bytes, int] = {}
        self._expiry: list[tuple[int, int]] = []
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, slots: I64, *, client_id: bytes, now_ns: int, ttl_ns: int) -> int:
        """Hold the keys in these index slots.

        Args:
            slots: none negative; may repeat.
            ttl_ns: counted from now, cut off at PIN_TTL_NS_MAX.

        Returns:
            The pin's id; 0 if it would exceed what the client or the target may pin: nothing is pinned then.
        """
        slots = _distinct(slots)
        charge = self._catalog.pinnable_bytes(slots)
        mine = self._bytes_of.get(client_id, 0)
        if (
            charge < 0
            or mine + charge > self._client_bytes_max
            or self._catalog.pinned_bytes + charge > self._target_bytes_max
            or len(self._pins) >= PINS_MAX
        ):
            return 0
        self._catalog.pin(slots)
        id = self._next_id
        self._next_id += 1
        until_ns = now_ns + min(ttl_ns, PIN_TTL_NS_MAX)
        keys = self._catalog.index.keys_at(slots)
        self._pins[id] = _Pin(client_id=client_id, keys=keys, charged_bytes=charge, since_ns=now_ns, until_ns=until_ns)
        self._pins_of.setdefault(client_id, set()).add(id)
        self._bytes_of[client_id] = mine + charge
        heappush(self._expiry, (until_ns, id))
        return id

    def unpin(self, id: int, *, client_id: bytes | None = None) -> None:
        """End a pin. Ids that are unknown, expired, released already, or not of `client_id` are passed over."""
        pin = self._pins.get(id)
        if pin is None or client_id not in (None, pin.client_id):
            return
        del self._pins[id]
        self._catalog.unpin(pin.keys)
        mine = self._pins_of[pin.client_id]
        mine.discard(id)
        self._bytes_of[pin.client_id] -= pin.charged_bytes
        if not mine:
            del self._pins_of[pin.client_id], self._bytes_of[pin.client_id]

    def client_gone(self, client_id: bytes) -> None:
        """End all pins of a client."""
        for id in list(self._pins_of.get(client_id, ())):
            self.unpin(id)

    def expire(self, now_ns: int) -> None:
        """End the pins whose time is up."""
        while self._expiry and self._expiry[0][0] <= now_ns:
            self.unpin(heappop(self._expiry)[1])
        if len(self._expiry) > 2 * len(self._pins) + 64:
            self._expiry = sorted((pin.until_ns, id) for id, pin in self._pins.items())

    def next_expiry_ns(self) -> int | None:
        """When `expire` has something to do; None without pins."""
        while self._expiry and self._expiry[0][1] not in self._pins:
            heappop(self._expiry)
        return self._expiry[0][0] if self._expiry else None

    def by_age(self, now_ns: int) -> list[int]:
        """How many pins there are, indexed by PinAge."""
        counts = [0] * len(PinAge)
        for pin in self._pins.values():
            age_ns = now_ns - pin.since_ns
            bounds = (10 * SECOND_NS, 60 * SECOND_NS, 300 * SECOND_NS)
            counts[sum(age_ns >= bound for bound in bounds)] += 1
        return counts


def _distinct(slots: I64) -> I64:
    """Each slot once. numpy's `unique` takes ten times as long as sorting does."""
    ordered = np.sort(slots)
    twin = ordered[1:] == ordered[:-1]
    return ordered[np.concatenate([[True], ~twin])] if twin.any() else ordered

"""Deletes that are remembered after nothing of their record is left here: others may still have a copy.

In a cluster a record that was deleted while one of its holders was away comes back with it, unless those that saw the
delete still know of it: they copy nothing that they have a grave for, and tell who returns. A grave is the tombstone
that the log has anyhow, kept for longer (FORMAT.md, section 5), so it survives a restart; when it was dug does not, and
a restart begins its time anew: kept longer, never shorter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kvstore.engine.logrecord import TOMBSTONE_BYTES
from kvstore.limits import ACCESS_TICK_NS, GRAVES_MAX, LOG_SHARE_GRAVES, REPAIR_WINDOW_NS

_WINDOW_TICKS: Final = REPAIR_WINDOW_NS // ACCESS_TICK_NS


@dataclass(slots=True)
class Grave:
    """One delete.

    Attributes:
        namespace: id on this drive.
        tenant: whose namespace that is.
        tick: when it was; see `Graves`.
        record: its tombstone, as logged.
    """

    namespace: int
    tenant: str
    tick: int
    record: bytes


class Graves:
    """The deletes of one drive that are remembered, by index key. Times are access ticks.

    Where there are too many the oldest goes of whoever has more than an even part of the room: a tenant that deletes
    what it never had takes none of the others'.

    Attributes:
        enabled: deletes are remembered; off for a node on its own, which has nobody to tell.
        lost: graves given up before their time because there were too many.
    """

    def __init__(self, *, log_half_bytes: int) -> None:
        self._count_max = min(GRAVES_MAX, int(log_half_bytes * LOG_SHARE_GRAVES) // TOMBSTONE_BYTES)
        self._graves: dict[bytes, Grave] = {}
        self._order: dict[str, OrderedDict[bytes, Grave]] = {}  # of each tenant with any, the oldest first
        self.enabled = False
        self.lost = 0

    def __len__(self) -> int:
        return len(self._graves)

    def __contains__(self, key16: bytes) -> bool:
        return key16 in self._graves

    def dig(self, key16: bytes, namespace: int, tick: int, record: bytes, *, tenant: str) -> None:
        """A record was deleted. Of a key that was deleted before the newer delete counts."""
        self._remove(key16)
        grave = self._graves[key16] = Grave(namespace, tenant, tick, record)
        mine = self._order.setdefault(tenant, OrderedDict())
        mine[key16] = grave
        self._expire(tenant, tick)
        while len(self._graves) > self._count_max:
            self._remove(next(iter(self._order[self._most_of(tenant)])))
            self.lost += 1

    def _most_of(self, tenant: str) -> str:
        """Who gives up one: the tenant itself, unless others are above their part and it is not."""
        if len(self._order[tenant]) * len(self._order) > self._count_max:
            return tenant
        return max(self._order, key=lambda other: len(self._order[other]))

    def _remove(self, key16: bytes) -> None:
        grave = self._graves.pop(key16, None)
        if grave is not None:
            mine = self._order[grave.tenant]
            del mine[key16]
            if not mine:
                del self._order[grave.tenant]

    def date(self, key16: bytes, tick: int) -> None:
        """The delete was longer ago than when it was heard of."""
        grave = self._graves.get(key16)
        if grave is not None:
            grave.tick = min(grave.tick, tick)

    def expire(self, tick: int) -> None:
        """Forget what is older than the window."""
        for tenant in list(self._order):
            self._expire(tenant, tick)

    def _expire(self, tenant: str, tick: int) -> None:
        while mine := self._order.get(tenant):
            key16, grave = next(iter(mine.items()))
            if grave.tick + _WINDOW_TICKS > tick:
                return
            self._remove(key16)

    def keys(self) -> list[bytes]:
        """All index keys, for a walk in steps: a grave may be gone when its turn comes."""
        return list(self._graves)

    def of(self, key16s: Iterable[bytes], tick: int) -> dict[int, list[tuple[bytes, int]]]:
        """By id of the namespace which of these keys have graves, and how long ago each was dug, in ns."""
        found: dict[int, list[tuple[bytes, int]]] = {}
        for key16 in key16s:
            grave = self._graves.get(key16)
            if grave is not None and grave.tick + _WINDOW_TICKS > tick:
                found.setdefault(grave.namespace, []).append((key16, max(tick - grave.tick, 0) * ACCESS_TICK_NS))
        return found

    def log_records(self) -> Iterator[bytes]:
        """Everything, as log records for a checkpoint."""
        for grave in self._graves.values():
            yield grave.record

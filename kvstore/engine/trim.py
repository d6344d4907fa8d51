"""A tenant that reaches its quota gives up its own oldest records, wherever they lie; nobody else's are touched.

A segment is shared by tenants, so it cannot be freed for one of them: its records are forgotten one by one, each with a
tombstone, as deleted ones are. Their space comes back when their segment is evicted, earlier now that less in it lives.
"""

from __future__ import annotations

import numpy as np

from kvstore.engine.allocator import Allocator
from kvstore.engine.format import ENTRY_DTYPE, Entries, entry_spaces
from kvstore.engine.job import IoQueue, Steps
from kvstore.engine.ledger import Ledger, entry_keys, entry_locations
from kvstore.engine.location import I64, location_depths
from kvstore.engine.sealed import read_index
from kvstore.engine.segment import OpenSegment, SegmentState
from kvstore.engine.usage import TenantUse
from kvstore.limits import PAGE_BYTES, TRIM_RECORDS_MAX
from kvstore.telemetry.metrics import EngineMetrics


class Trimmer:
    """Trims one tenant in one segment at a time.

    Attributes:
        running: a segment's index is being read.
    """

    def __init__(self, *, queue: IoQueue, allocator: Allocator, ledger: Ledger, metrics: EngineMetrics) -> None:
        self._queue = queue
        self._allocator = allocator
        self._table = allocator.table
        self._ledger = ledger
        self._metrics = metrics
        self._barren: dict[str, set[int]] = {}  # segments in which all that a tenant has is pinned
        self._stuck: set[str] = set()  # tenants with such segments only: looking takes a walk over all
        self.running = False

    def choose(self) -> tuple[TenantUse, int] | None:
        """Whom to trim, and the segment to begin with: the coldest that has records of the tenant; None for nobody."""
        for use in self._ledger.usage.crowded():
            segment = self._coldest(use) if use.name not in self._stuck else None
            if segment is not None:
                return use, segment
            self._stuck.add(use.name)
        return None

    def trim(self, use: TenantUse, segment: int) -> Steps[None]:
        """Forget the coldest records of a tenant in a segment, as many as it has too much."""
        self.running = True
        target = self._unsealed().get(segment)
        if target is not None:
            entries = np.frombuffer(b"".join(target.entry_bytes()), dtype=ENTRY_DTYPE)
        else:
            self._table.set_state(segment, SegmentState.EVICTING)
            entries, _ = yield from read_index(self._queue, self._table, segment)
            self._table.set_state(segment, SegmentState.SEALED)
        order = self._coldest_first(entries, segment, use)
        surplus_pages = use.surplus_pages
        before = np.cumsum(entries["pages"][order].astype(np.int64)) - entries["pages"][order]
        chosen = order[before < surplus_pages][:TRIM_RECORDS_MAX]
        gone = self._ledger.retire(entries[chosen], entry_locations(entries[chosen], segment))
        self._metrics.evicted_records += len(gone)
        self._metrics.evicted_bytes += int(entries["pages"][chosen][gone].sum()) * PAGE_BYTES
        use.trimmed()
        if not len(gone):
            self._barren.setdefault(use.name, set()).add(segment)
        self.running = False

    def forget_barren(self) -> None:
        """Pins have ended since, perhaps."""
        self._barren.clear()
        self._stuck.clear()

    def _coldest(self, use: TenantUse) -> int | None:
        segments = [*self._table.in_state(SegmentState.SEALED).tolist(), *self._unsealed()]
        barren = self._barren.get(use.name, ())
        live = self._table.live
        candidates: list[int] = [
            segment
            for segment in segments
            if segment not in barren and any(count.use is use and count.pages for count in live[segment].values())
        ]
        if not candidates:
            return None
        access = np.nan_to_num(self._ledger.catalog.scores.mean_access()[candidates])
        return candidates[int(np.argmin(access))]

    def _unsealed(self) -> dict[int, OpenSegment]:
        allocator = self._allocator
        targets = (*allocator.unsealed, *allocator.closing, allocator.open)
        return {target.segment: target for target in targets if target is not None}

    def _coldest_first(self, entries: Entries, segment: int, use: TenantUse) -> I64:
        """Positions of the tenant's live records that no pin holds; of two equally cold ones the deeper goes first."""
        keys, locations = entry_keys(entries), entry_locations(entries, segment)
        catalog = self._ledger.catalog
        mine = self._ledger.spaces_of(use, entry_spaces(entries))
        free = np.flatnonzero(mine & catalog.valid(keys, locations) & ~catalog.pinned(keys))
        ticks = catalog.ticks(keys[free]).astype(np.int64)
        order: I64 = free[np.lexsort((-location_depths(locations[free]).astype(np.int64), ticks))]
        return order

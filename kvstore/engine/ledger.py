"""What lives and what died, kept the same in memory and in the log.

Everything that ends a record is written here as a tombstone, synced before its owner hears of it. Live pages are also
counted per segment and namespace generation, so that dropping a namespace makes the live bytes exact at once, without
looking at its records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import numpy as np

from kvstore.engine.allocator import Allocator
from kvstore.engine.api import NamespaceRef
from kvstore.engine.catalog import Catalog
from kvstore.engine.format import ENTRY_BYTES, ENTRY_DTYPE, Entries, distinct, entry_spaces
from kvstore.engine.graves import Graves
from kvstore.engine.index import NOT_INSERTED
from kvstore.engine.location import (
    I64,
    U32,
    U64,
    Bools,
    location_pages,
    location_segment,
    location_segments,
    pack_locations,
)
from kvstore.engine.log import Log
from kvstore.engine.logrecord import (
    Reason,
    Tombstone,
    encode_commit,
    encode_drop,
    encode_namespace,
    encode_tombstone,
)
from kvstore.engine.namespaces import NamespaceTable
from kvstore.engine.segment import LiveCount, OpenSegment, SegmentState, SegmentTable, namespace_key
from kvstore.engine.usage import TenantUse, Usage
from kvstore.limits import PAGE_BYTES
from kvstore.types.results import MissReason

NOWHERE: Final = 0xFFFF_FFFF
"""Segment of a tombstone whose record was not on the drive."""


class RecordWatcher(Protocol):
    """Who must know when valid records move or end: the cache."""

    def moved(self, keys: U64, old: U64, new: U64) -> None:
        """Records lie elsewhere now; the catalog says so already."""

    def removed(self, keys: U64, locations: U64) -> None:
        """Records are no longer valid."""


class Ledger:
    """The catalog of valid records with its log.

    Attributes:
        tick: the present access tick, set by the engine.
        index_full: a record found no room in the index since this was last cleared.
        usage: what each tenant has, counted with the live pages.
        graves: deletes that are remembered for other nodes.
        tombstone_bytes: log bytes that checkpoints carry for records that died in segments still in use.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        table: SegmentTable,
        allocator: Allocator,
        namespaces: NamespaceTable,
        watcher: RecordWatcher,
        graves: Graves,
    ) -> None:
        self.catalog = catalog
        self.table = table
        self.allocator = allocator
        self.namespaces = namespaces
        self.watcher = watcher
        self.tick = 1
        self.index_full = False
        self.usage = Usage()
        self.tombstone_bytes = 0
        self.graves = graves
        self._tombstones: dict[int, list[bytes]] = {}
        self._forgotten: dict[int, list[U64]] = {}  # index keys of what lay in victims, until they are erased
        self._log: Log | None = None

    def attach(self, log: Log) -> None:
        """Give it the log, which needs `snapshot` to be made."""
        self._log = log

    @property
    def log(self) -> Log:
        assert self._log is not None, "the ledger's log is attached before it is used"
        return self._log

    # --- records come -----------------------------------------------------------------------------------------------
    def complete(self, target: OpenSegment, entry: bytes, *, key: tuple[int, int], location: int, space: int) -> bool:
        """A record's commit is in the log: make it valid. False when the index is full.

        Args:
            entry: as logged.
            key: index key.
            space: `namespace_key` of its namespace and generation.
        """
        previous = self.catalog.replace(*key, location, self.tick)
        if previous == NOT_INSERTED:
            self.index_full = True
            return False
        if previous:
            self._count(location_segment(previous), space, -location_pages(previous), -1)
        self._count(target.segment, space, location_pages(location), 1)
        target.add(entry)
        return True

    def complete_many(
        self, target: OpenSegment, entries: bytes, *, keys16: Sequence[bytes], locations: Sequence[int], space: int
    ) -> list[bool]:
        """`complete` of records of one shape and namespace, all keys different. Says which the index took."""
        previous = self.catalog.replace_many(keys16, locations, self.tick)
        pages = location_pages(locations[0])
        if not any(previous):
            self._count(target.segment, space, pages * len(previous), len(previous))
            target.add(entries)
            return [True] * len(previous)
        taken = [before != NOT_INSERTED for before in previous]
        for at, before in enumerate(previous):
            if before == NOT_INSERTED:
                self.index_full = True
                continue
            if before:
                self._count(location_segment(before), space, -location_pages(before), -1)
            self._count(target.segment, space, pages, 1)
            target.add(entries[at * ENTRY_BYTES : (at + 1) * ENTRY_BYTES])
        return taken

    def move(self, target: OpenSegment, entry: bytes, *, keys: U64, old: U64, new: U64, space: int) -> bool:
        """A record of a victim was written again: it lies at `new` if it still lay at `old`, else the copy is dead.

        Args:
            keys, old, new: shapes [1, 2], [1] and [1].
        """
        if not self._is_live(space) or not self.catalog.move(keys, old=old, new=new)[0]:
            return False
        pages = location_pages(int(new[0]))
        self._count(location_segment(int(old[0])), space, -pages, -1)
        self._count(target.segment, space, pages, 1)
        target.add(entry)
        self.watcher.moved(keys, old, new)
        return True

    def load(self, entries: Entries, locations: U64, ticks: U32) -> Bools:
        """Recovery: many valid records at once, each key once. Says which the index took."""
        taken = self.catalog.load(entry_keys(entries), locations, ticks)
        spaces, which = distinct(entry_spaces(entries)[taken])
        cells = location_segments(locations[taken]) * len(spaces) + which
        used, cell = distinct(cells.astype(np.uint64))
        pages = np.bincount(cell, weights=entries["pages"][taken], minlength=len(used))
        records = np.bincount(cell, minlength=len(used))
        for at, page_count, record_count in zip(used.tolist(), pages.tolist(), records.tolist(), strict=True):
            segment, space = divmod(at, len(spaces))
            self._count(segment, int(spaces[space]), int(page_count), int(record_count))
        return taken

    def _count(self, segment: int, space: int, pages: int, records: int) -> None:
        live = self.table.live[segment]
        count = live.get(space)
        if count is None:
            if not self._is_live(space):
                return  # its namespace was dropped, and with it this count
            count = live[space] = LiveCount(self.usage.of(self._tenant_of(space)))
        count.pages += pages
        count.records += records
        count.use.pages += pages
        count.use.records += records

    def _tenant_of(self, space: int) -> str:
        ref = self.namespaces.by_id(space >> 32)
        assert ref is not None, "only live namespaces are counted"
        return ref.tenant

    def spaces_of(self, use: TenantUse, spaces: U64) -> Bools:
        """Which of these namespace keys are of a tenant's namespaces, in their present generation."""
        found, which = distinct(spaces)
        mine = np.array([self._is_live(space) and self._tenant_of(space) == use.name for space in found.tolist()], bool)
        return mine[which] if len(found) else np.zeros(0, dtype=np.bool_)

    def _is_live(self, space: int) -> bool:
        ref = self.namespaces.by_id(space >> 32)
        return ref is not None and namespace_key(ref.id, ref.generation) == space

    @property
    def live_bytes(self) -> int:
        """Padded bytes of all valid records, exact."""
        return self.catalog.scores.live_bytes

    # --- records go -------------------------------------------------------------------------------------------------
    def delete(self, ref: NamespaceRef, keys: U64, on_done: Callable[[bytes], None]) -> None:
        """Forget keys; `on_done(statuses)` when that survives a power cut: 0 deleted, ABSENT, IO if the log failed."""
        if not self.namespaces.is_current(ref):
            on_done(bytes([MissReason.ABSENT]) * len(keys))
            return
        locations = self.catalog.delete(keys, self.tick)
        statuses = np.where(locations != 0, 0, MissReason.ABSENT).astype(np.uint8)
        # where deletes are remembered those of records that are not here are, too: others may have them
        gone = (
            np.arange(len(keys)) if self.graves.enabled else np.flatnonzero((locations != 0) | self._may_return(keys))
        )
        if not len(gone):
            on_done(statuses.tobytes())
            return
        left = len(gone)

        def logged(error: OSError | None) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                statuses[gone] = MissReason.IO
            if left == 0:
                on_done(statuses.tobytes())

        self._bury(ref, keys[gone], locations[gone], Reason.DELETE, logged, is_told=True)

    def _may_return(self, keys: U64) -> Bools:
        """Which lay in a victim that is still to be erased: they would be back if the program ended now."""
        found = np.zeros(len(keys), dtype=np.bool_)
        for evicted in self._forgotten.values():
            for some in evicted:
                found |= np.isin(keys[:, 0], some[:, 0])  # 64 random bits: one too many is only a tombstone too many
        return found

    def quarantine(self, ref: NamespaceRef, keys: U64, locations: U64) -> int:
        """Records turned out bad: forget those that still lie there. Answers how many did."""
        if not self.namespaces.is_current(ref):
            return 0
        gone = np.flatnonzero(self.catalog.quarantine(keys, locations, self.tick))
        if len(gone):
            self._bury(ref, keys[gone], locations[gone], Reason.QUARANTINE, _nobody_waits)
        return len(gone)

    def retire(self, entries: Entries, locations: U64) -> I64:
        """Evict single records of live namespaces, while their segment stays. Answers which positions were valid."""
        keys, spaces = entry_keys(entries), entry_spaces(entries)
        gone = np.flatnonzero(self.catalog.evict(keys, locations, self.tick))
        for space in distinct(spaces[gone])[0].tolist():
            ref = self.namespaces.by_id(space >> 32)
            assert ref is not None, "only records of live namespaces are retired"
            mine = gone[spaces[gone] == space]
            # without a tombstone a copy of a record that is put again, and deleted, could come back from here
            self._bury(ref, keys[mine], locations[mine], Reason.DELETE, _nobody_waits)
        return gone

    def _bury(
        self,
        ref: NamespaceRef,
        keys: U64,
        locations: U64,
        reason: Reason,
        on_done: Callable[[OSError | None], None],
        *,
        is_told: bool = False,
    ) -> None:
        """Tombstones for records, or, where the location is 0, for what is not here but may be elsewhere.

        Args:
            is_told: Others are to be told, if there are any.
        """
        space = namespace_key(ref.id, ref.generation)
        generation, page = self.allocator.watermark()
        evicting = self.table.in_state(SegmentState.EVICTING, SegmentState.BAD).tolist()
        records = []
        is_remembered = self.graves.enabled and is_told
        rows = zip(np.ascontiguousarray(keys, dtype="<u8"), locations.tolist(), self._may_return(keys), strict=True)
        for key, location, may_return in rows:
            segment = location_segment(location) if location else NOWHERE
            record = encode_tombstone(
                Tombstone(
                    key=key.tobytes(),
                    generation=generation,
                    page=page,
                    segment=segment,
                    reason=reason,
                    namespace=ref.id if is_remembered else 0,
                )
            )
            if location:
                self._count(segment, space, -location_pages(location), -1)
            # A victim may hold an older copy, which must stay dead if the program ends before the victim is freed.
            holders = {segment, *evicting} if location else evicting if may_return else ()
            for holder in holders:
                self._tombstones.setdefault(holder, []).append(record)
                self.tombstone_bytes += len(record)
            if is_remembered:
                self.graves.dig(key.tobytes(), ref.id, self.tick, record, tenant=ref.tenant)
            records.append(record)
        self._remember_no_more(keys)
        for record in records:
            self.log.append(record, on_done, sync=True)
        self.watcher.removed(keys[locations != 0], locations[locations != 0])

    def _remember_no_more(self, keys: U64) -> None:
        """What has a tombstone needs no other one."""
        for evicted in self._forgotten.values():
            evicted[:] = [some[~np.isin(some[:, 0], keys[:, 0])] for some in evicted]

    def keep_tombstone(self, segment: int, record: bytes) -> None:
        """Recovery: a tombstone that is needed while this segment is in use."""
        self._tombstones.setdefault(segment, []).append(record)
        self.tombstone_bytes += len(record)

    def most_buried(self) -> int | None:
        """The sealed segment with most tombstones: freeing it relieves the log most."""
        sealed = [segment for segment in self._tombstones if self.table.state[segment] == SegmentState.SEALED]
        return max(sealed, key=lambda segment: len(self._tombstones[segment]), default=None)

    def evict(self, entries: Entries, locations: U64) -> Bools:
        """Forget the records of a victim's entries that still lie there. Says which were valid until now.

        Args:
            locations: all in one segment.
        """
        keys = entry_keys(entries)
        spaces = entry_spaces(entries)
        live = self.live_spaces(spaces)
        if live.all():
            gone = self.catalog.evict(keys, locations, self.tick)
        else:
            self.catalog.erase(keys[~live], locations[~live])
            gone = np.zeros(len(entries), dtype=np.bool_)
            gone[live] = self.catalog.evict(keys[live], locations[live], self.tick)
        if gone.any():
            found, which = distinct(spaces[gone])
            pages = np.bincount(which, weights=entries["pages"][gone])
            records = np.bincount(which)
            segment = location_segment(int(locations[0]))
            for space, page_count, count in zip(found.tolist(), pages.tolist(), records.tolist(), strict=True):
                self._count(segment, space, -int(page_count), -count)
        if len(keys):
            # those that were moved, too: where they lie now may be evicted, and erased, while the victim cannot be
            self._forgotten.setdefault(location_segment(int(locations[0])), []).append(keys)
        self.watcher.removed(keys[gone], locations[gone])
        return gone

    def forget_rest(self, segment: int) -> tuple[int, int]:
        """Forget all that the index still has in a segment whose own index is damaged: a walk over the whole index.

        Returns:
            Records that were valid until now, and their bytes. What a dropped namespace left goes too, uncounted.
        """
        index, scores = self.catalog.index, self.catalog.scores
        lost = int(scores.live_records[segment]), int(scores.live_pages[segment]) * PAGE_BYTES
        slots = index.taken_slots()
        slots = slots[location_segments(index.locations[slots]) == segment]
        keys, locations = index.keys_at(slots), index.locations[slots].copy()
        self.catalog.evict(keys, locations, self.tick)
        self._uncount_all(segment)
        self._forgotten.setdefault(segment, []).append(keys)
        self.watcher.removed(keys, locations)
        return lost

    def live_spaces(self, spaces: U64) -> Bools:
        """Which of these namespace keys are of a namespace's present generation."""
        found, which = distinct(spaces)
        known = np.array([self._is_live(space) for space in found.tolist()], dtype=np.bool_)
        return known[which] if len(found) else np.zeros(0, dtype=np.bool_)

    def freed(self, segment: int) -> None:
        """A segment was erased on the drive: nothing in it can come back, so its tombstones are not needed."""
        self.tombstone_bytes -= sum(map(len, self._tombstones.pop(segment, ())))
        self._forgotten.pop(segment, None)
        self._uncount_all(segment)

    def _uncount_all(self, segment: int) -> None:
        """Nothing in a segment is alive any more."""
        self.catalog.scores.reset(segment)
        for count in self.table.live[segment].values():
            count.leave()
        self.table.live[segment] = {}

    # --- namespaces -------------------------------------------------------------------------------------------------
    def add_namespace(self, manifest: bytes, *, copies: int = 0) -> NamespaceRef:
        """Register, and log it in the background: commits of its records stand behind it in the log.

        Args:
            copies: that its records are to have, from now on; 0 says nothing.

        Raises:
            InvalidRequest: as `NamespaceTable.add`.
        """
        ref, is_new = self.namespaces.add(manifest)
        if is_new:
            for record in encode_namespace(ref.id, ref.generation, manifest):
                self.log.append(record, _nobody_waits, sync=True)
        if copies and self.namespaces.set_copies(ref, copies):
            self.log.append(encode_drop(ref.id, ref.generation, copies=copies), _nobody_waits, sync=True)
        return ref

    def drop_namespace(
        self, ref: NamespaceRef, on_done: Callable[[OSError | None], None], *, generation: int = 0
    ) -> NamespaceRef:
        """Hide all records of a namespace; calls back when that survives a power cut. Answers the new reference.

        Args:
            generation: see `NamespaceTable.drop`.
        """
        current = self.namespaces.by_id(ref.id)
        assert current is not None, "references come from this table"
        space = namespace_key(current.id, current.generation)
        fresh = self.namespaces.drop(current, generation=generation)
        for segment, live in enumerate(self.table.live):
            count = live.pop(space, None)
            if count is not None:
                count.leave()
                self.catalog.scores.forget(segment, pages=count.pages, records=count.records)
        self.log.append(encode_drop(fresh.id, fresh.generation), on_done, sync=True)
        return fresh

    # --- checkpoint -------------------------------------------------------------------------------------------------
    def snapshot(self) -> Iterator[bytes]:
        """The whole live state as log records: namespaces, tombstones, and the commits that no segment index has."""
        yield from self.namespaces.log_records()
        written: set[bytes] = set()
        for records in self._tombstones.values():
            for record in records:
                if record not in written:
                    written.add(record)
                    yield record
        self.graves.expire(self.tick)
        yield from (record for record in self.graves.log_records() if record not in written)
        for target in (*self.allocator.unsealed, *self.allocator.closing, self.allocator.open):
            if target is not None:
                for entry in target.entry_bytes():
                    yield encode_commit(target.segment, target.generation, entry)


def entry_keys(entries: Entries) -> U64:
    """Index keys of entries, shape [n, 2]."""
    return np.stack([entries["key0"], entries["key1"]], axis=1).astype(np.uint64)


def entry_locations(entries: Entries, segments: I64 | int) -> U64:
    """Locations of entries, all of one segment or each of its own. A record without position counts as a head."""
    positions = entries["position"].astype(np.uint64)
    positions[positions == 0xFFFF_FFFF] = 0
    return pack_locations(
        segments=np.broadcast_to(np.asarray(segments, dtype=np.uint64), (len(entries),)),
        pages_at=entries["page"].astype(np.uint64),
        pages=entries["pages"].astype(np.uint64),
        depths=positions,
    )


def _nobody_waits(error: OSError | None) -> None:
    """For records whose failure shows in `Log.failed` and concerns nobody else."""


assert ENTRY_DTYPE["key0"].itemsize + ENTRY_DTYPE["key1"].itemsize == 16

"""What happens in memory when something happens on the drive: a record is stored, moves, goes, or needs room."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.engine.api import digest_at
from kvstore.engine.cache import Cache, CachedRecord, RecordFacts
from kvstore.engine.catalog import Catalog
from kvstore.engine.namespaces import index_key
from kvstore.engine.policy import Ancestors
from kvstore.engine.put import Put, Ticket
from kvstore.engine.put_parcel import GrantedParcel
from kvstore.limits import ANCESTORS_MAX
from kvstore.types.digest import ZERO_DIGEST


class Hooks:
    """What the disk side asks of the memory side: implements `store.StoreMemory`.

    Attributes:
        tick: the present access tick, set by the engine.
    """

    def __init__(self, cache: Cache, catalog: Catalog) -> None:
        self._cache = cache
        self._catalog = catalog
        self._ancestors = Ancestors(ANCESTORS_MAX)
        self._touched: list[int] = []
        self.tick = 1
        self.moved = cache.moved
        self.removed = cache.removed

    def stored(self, ticket: Ticket) -> None:
        """A record is durable: keep it in RAM, and keep what lies before it in its chain as warm as itself."""
        spec = ticket.spec
        if spec.parent.strip(b"\0"):
            parent = int.from_bytes(index_key(spec.namespace, spec.parent), "little")
            self._touched += self._ancestors.put(int.from_bytes(ticket.key16, "little"), parent, self.tick)
        piece = ticket.piece
        if self._cache.capacity_bytes and self._cache.fits(spec.payload_bytes) and isinstance(ticket, Put):
            if piece is not None:
                piece.hold()
            facts = RecordFacts(
                key=spec.key,
                record_bytes=spec.payload_bytes,
                block_bytes=spec.block_bytes,
                crcs=ticket.crc_table,
                content_id=ticket.content_id,
                header_pages=ticket.header_pages,
                location=ticket.location(),
            )
            self._cache.insert(spec.namespace.salt, facts, piece, tick=self.tick)

    def stored_parcel(self, parcel: GrantedParcel, locations: Sequence[int], stored: Sequence[bool]) -> None:
        """`stored` of several records."""
        columns, first = parcel.columns, parcel.first
        ref = columns.namespace
        for at in range(parcel.count) if columns.parents.strip(b"\0") else ():
            parent = digest_at(columns.parents, first + at)
            if stored[at] and parent != ZERO_DIGEST:
                key = int.from_bytes(parcel.keys16[at], "little")
                above = int.from_bytes(index_key(ref, parent), "little")
                self._touched += self._ancestors.put(key, above, self.tick)
        cache = self._cache
        payload_bytes, block_bytes = columns.payload_bytes, columns.block_bytes
        if not cache.capacity_bytes or not cache.fits(payload_bytes):
            return
        header_pages = parcel.header_pages
        rows = zip(parcel.keys(), parcel.tables, parcel.content_ids, locations, parcel.pieces, stored, strict=True)
        records = []
        for key, table, its_id, location, piece, is_stored in rows:
            if is_stored:
                piece.holders += 1
                facts = RecordFacts(key, payload_bytes, block_bytes, table, its_id, header_pages, location)
                records.append(CachedRecord(ref.salt, facts, piece, tick=self.tick))
        cache.insert_all(ref.salt, records)

    def touch_ancestors(self) -> None:
        """Tell the index of the ancestors that puts of this turn have touched."""
        if self._touched:
            raw = b"".join([key.to_bytes(16, "little") for key in self._touched])
            self._touched = []
            self._catalog.touch_keys(np.frombuffer(raw, dtype="<u8").reshape(-1, 2), self.tick)

    def reclaim_memory(self, length_bytes: int) -> bool:
        """See `writer.MemorySide`."""
        return self._cache.make_room(length_bytes)

    def stored_content(self, key0: int, key1: int) -> bytes:
        """See `writer.MemorySide`."""
        record = self._cache.at.get(self._catalog.index.get(key0, key1))
        return record.facts.content_id if record is not None else b""

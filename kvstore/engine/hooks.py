"""What happens in memory when something happens on the drive: a record is stored, moves, goes, or needs room."""

from __future__ import annotations

import numpy as np

from kvstore.engine.cache import Cache, RecordFacts
from kvstore.engine.catalog import Catalog
from kvstore.engine.namespaces import index_key
from kvstore.engine.policy import Ancestors
from kvstore.engine.put import Put, Ticket
from kvstore.limits import ANCESTORS_MAX


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

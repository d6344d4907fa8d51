"""The sink of a read that is done for the cache alone."""

from __future__ import annotations

from kvstore.engine.api import ReadyItem
from kvstore.types.results import MissReason


class Discard:
    """Sink of a prefetch: the records stay in the cache, nobody else wants them."""

    def ready(self, item: ReadyItem) -> None:
        item.release()

    def missed(self, index: int, reason: MissReason) -> None:
        pass

    def finished(self) -> None:
        pass

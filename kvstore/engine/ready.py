"""Verified bytes on their way out: what `api.ReadyItem` looks like."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.engine.arena import Piece


class ReadyRecord:
    """Whole checksum blocks of one record. See `api.ReadyItem`; one is made for each record sent, so it is lean."""

    __slots__ = (
        "_on_release",
        "_piece",
        "block_bytes",
        "content_id",
        "crcs",
        "data",
        "index",
        "last",
        "offset",
        "record_bytes",
    )

    def __init__(
        self,
        index: int,
        record_bytes: int,
        block_bytes: int,
        offset: int,
        data: memoryview,
        crcs: bytes,
        content_id: bytes,
        last: bool,
        piece: Piece | None,
        on_release: Callable[[int], None],
    ) -> None:
        """Takes over one hold on `piece`; `on_release` is called with the length of `data`."""
        self.index = index
        self.record_bytes = record_bytes
        self.block_bytes = block_bytes
        self.offset = offset
        self.data = data
        self.crcs = crcs
        self.content_id = content_id
        self.last = last
        self._piece = piece
        self._on_release = on_release

    def release(self) -> None:
        """The bytes are not needed any more."""
        if self._piece is not None:
            self._piece.release()
        self._on_release(len(self.data))

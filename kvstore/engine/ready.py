"""Verified bytes on their way out: what `api.ReadyItem` looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.engine.arena import Piece

if TYPE_CHECKING:
    from kvstore.engine.request import Request


class ReadyRecord:
    """Whole checksum blocks of one record. See `api.ReadyItem`; one is made for each record sent, so it is lean."""

    __slots__ = (
        "_piece",
        "_request",
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
        request: Request,
    ) -> None:
        """Takes over one hold on `piece`, and `len(data)` of what the request has staged."""
        self.index = index
        self.record_bytes = record_bytes
        self.block_bytes = block_bytes
        self.offset = offset
        self.data = data
        self.crcs = crcs
        self.content_id = content_id
        self.last = last
        self._piece = piece
        self._request = request

    def release(self) -> None:
        """The bytes are not needed any more."""
        piece = self._piece
        if piece is not None:
            if piece.holders > 1:
                piece.holders -= 1  # others lie in the same memory: what `release` does, in line
            else:
                piece.release()
        request = self._request
        request.staged_bytes -= len(self.data)
        if request.reader.hungry:
            request.reader.memory_came_back(request)

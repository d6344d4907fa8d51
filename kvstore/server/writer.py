"""One layer-wise writer: a record that arrives in slices, over several calls of its client."""

from __future__ import annotations

from kvstore.engine.api import PutTicket


class Opening:
    """What one WRITER_OPEN has opened.

    Attributes:
        id: by which a repeat is known; empty for none.
        is_heard: the client has gone on with one of its writers, and so has had the answer that names them all.
    """

    __slots__ = ("id", "is_heard")

    def __init__(self, opening_id: bytes = b"") -> None:
        self.id = opening_id
        self.is_heard = False


class Writer:
    """An open writer. Ends by commit, abort, or when its client has not written for its time to live.

    Attributes:
        ticket: the engine's streaming ticket.
        record_bytes, block_bytes: of the record.
        ttl_ns: how long it lives after each write.
        expires_ns: monotonic.
        opening: that it came of.
        receiving: slices that wait for memory or payload, over all connections: until they end, the engine must not
            get the memory back, since a socket may still write into it.
    """

    __slots__ = (
        "_is_doomed",
        "block_bytes",
        "expires_ns",
        "opening",
        "receiving",
        "record_bytes",
        "ticket",
        "ttl_ns",
    )

    def __init__(
        self,
        ticket: PutTicket,
        *,
        record_bytes: int,
        block_bytes: int,
        ttl_ns: int,
        now_ns: int,
        opening: Opening,
    ) -> None:
        self.ticket = ticket
        self.opening = opening
        self.record_bytes = record_bytes
        self.block_bytes = block_bytes
        self.ttl_ns = ttl_ns
        self.expires_ns = now_ns + ttl_ns
        self.receiving = 0
        self._is_doomed = False

    def touch(self, now_ns: int) -> None:
        """Its owner is alive."""
        self.expires_ns = now_ns + self.ttl_ns

    def begin_slice(self, now_ns: int) -> None:
        """A slice is on its way."""
        self.touch(now_ns)
        self.opening.is_heard = True
        self.receiving += 1

    def end_slice(self) -> None:
        """A slice has arrived, or will not; no socket writes into its memory any more."""
        self.receiving -= 1
        if self._is_doomed and not self.receiving:
            self.ticket.abort()

    def doom(self, *, orphaned: bool = False) -> None:
        """Nobody wants it any more: its ticket is aborted, as soon as no slice is on its way.

        Args:
            orphaned: its owner has been silent for its time to live; nothing is on its way then.
        """
        self._is_doomed = True
        if not self.receiving:
            self.ticket.abort(orphaned=orphaned)

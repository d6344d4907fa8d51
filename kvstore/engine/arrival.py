"""The payload of a put, checked block by block as it arrives, while the CPU's cache still has it."""

from __future__ import annotations

from kvstore.types.checksum import crcs_match

_WORD = 4


class Arrival:
    """How far the payload of one put has been checked.

    Its CRC words are known beforehand (`crc_table`), or come with the slices.
    """

    __slots__ = ("_block_bytes", "_checked_bytes", "_is_good", "_payload", "_table", "_words")

    def __init__(self, payload: memoryview, *, block_bytes: int, crc_table: bytes | None) -> None:
        self._payload = payload
        self._block_bytes = block_bytes
        self._table = crc_table
        self._checked_bytes = 0
        self._is_good = True
        self._words: list[bytes] = []

    def arrived(self, offset: int, length_bytes: int, crcs: bytes) -> None:
        """So many bytes of the slice at `offset` are there: check the blocks that are whole now.

        Args:
            offset: of the slice, a multiple of the block; slices come in order.
            crcs: words of the slice's blocks, or empty where the put's table is known.
        """
        start, block = self._checked_bytes, self._block_bytes
        end = offset + length_bytes
        if end < len(self._payload):
            end -= end % block
        if end <= start or start < offset:
            return  # nothing new, or the slice before has not been told of as a whole
        table = self._table
        first, last = start // block, -(-end // block)
        if table is None:
            skipped = offset // block
            words = crcs[(first - skipped) * _WORD : (last - skipped) * _WORD]
            self._words.append(words)
        else:
            words = table[first * _WORD : last * _WORD]
        if not crcs_match(self._payload[start:end], block, words):
            self._is_good = False
        self._checked_bytes = end

    @property
    def is_whole(self) -> bool:
        """All bytes have been told of."""
        return self._checked_bytes == len(self._payload)

    def table(self) -> bytes | None:
        """The CRC table of the payload, all of which is there; None if it does not match."""
        left_bytes = len(self._payload) - self._checked_bytes
        if left_bytes and self._table is not None:
            self.arrived(self._checked_bytes, left_bytes, b"")
        if not self._is_good or self._checked_bytes < len(self._payload):
            return None
        return b"".join(self._words) if self._table is None else self._table

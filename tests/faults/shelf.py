"""Chunks of one size and known content, put and read by one client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, Hit, Miss, Refused, Stored
from kvstore_client import KVClient

CHUNK_TOKENS: Final = 16
BLOCK_BYTES: Final = 16 * 1024
DEADLINE_S: Final = 30.0


class Shelf:
    """Attributes:
    store: the client's namespace.
    keys: of all chunks.
    """

    def __init__(
        self, client: KVClient, *, count: int, chunk_bytes: int, name: str = "shelf", chained: bool = True
    ) -> None:
        """
        Args:
            chained: one chain, of which the head outlives the tail; else keys that know nothing of each other, of
                which the oldest goes first.
        """
        layout = KVLayout.opaque(chunk_bytes=chunk_bytes, chunk_tokens=CHUNK_TOKENS, checksum_bytes=BLOCK_BYTES)
        self.store = client.namespace(
            Namespace(tenant="default", model=name, weights="sha256:" + "0" * 64, layout=layout)
        )
        self.keys = (
            self.store.keys(list(range(count * CHUNK_TOKENS)))
            if chained
            else self.store.keys_from_hashes([b"%d" % at for at in range(count)], algorithm="shelf")
        )
        self._name = name
        self._chunk_bytes = chunk_bytes
        self._count = count

    def payload(self, at: int) -> bytes:
        """The only right bytes of a chunk."""
        return blake3(f"{self._name} {at}".encode()).digest(length=self._chunk_bytes)

    def put(
        self, start: int = 0, stop: int | None = None, *, deadline_s: float = DEADLINE_S
    ) -> list[Stored | Exists | Refused]:
        """Puts chunks, durable."""
        payloads = [self.payload(at) for at in self._range(start, stop)]
        return self.store.put(self.keys[start:stop], payloads, deadline=deadline_s)

    def get(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        deadline_s: float = DEADLINE_S,
        soft_deadline_s: float | None = None,
    ) -> tuple[list[Hit | Miss], list[bytearray]]:
        """Reads chunks whole; asserts that every hit has the right bytes. The buffers are those handed to the store."""
        buffers = [bytearray(b"\xaa" * self._chunk_bytes) for _ in self._range(start, stop)]
        results = self.store.get_into(
            self.keys[start:stop], buffers, deadline=deadline_s, soft_deadline=soft_deadline_s
        )
        for at, (result, buffer) in enumerate(zip(results, buffers, strict=True), start):
            right = isinstance(result, Miss) or (result.length_bytes == len(buffer) and buffer == self.payload(at))
            assert right, f"{self._name}, chunk {at}: a hit with wrong bytes"
        return results, buffers

    def get_range(self, at: int, offset: int, length_bytes: int) -> Hit | Miss:
        """Reads a part of one chunk; asserts that a hit has the right bytes."""
        buffer = bytearray(b"\xaa" * length_bytes)
        result = self.store.get_into(
            self.keys[at : at + 1], [buffer], ranges=[(offset, length_bytes)], deadline=DEADLINE_S
        )[0]
        assert isinstance(result, Miss) or buffer == self.payload(at)[offset : offset + length_bytes], (
            f"chunk {at}: a hit with wrong bytes at {offset}"
        )
        return result

    def _range(self, start: int, stop: int | None) -> range:
        return range(start, self._count if stop is None else stop)

    def hits(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Which chunks are there."""
        results, _ = self.get(start, stop)
        return [at for at, result in enumerate(results, start) if isinstance(result, Hit)]


def reasons(results: Sequence[Hit | Miss | Stored | Exists | Refused]) -> set[str]:
    """Names of results with their reasons."""
    return {type(one).__name__ + (f" {one.reason.name}" if isinstance(one, Miss | Refused) else "") for one in results}

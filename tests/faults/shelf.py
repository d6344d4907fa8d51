"""A chain of chunks of one size and known content, put and read by one client."""

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
    keys: of all chunks, one chain.
    payloads: their only right bytes.
    """

    def __init__(self, client: KVClient, *, count: int, chunk_bytes: int, name: str = "shelf") -> None:
        layout = KVLayout.opaque(chunk_bytes=chunk_bytes, chunk_tokens=CHUNK_TOKENS, checksum_bytes=BLOCK_BYTES)
        self.store = client.namespace(
            Namespace(tenant="default", model=name, weights="sha256:" + "0" * 64, layout=layout)
        )
        self.keys = self.store.keys(list(range(count * CHUNK_TOKENS)))
        self.payloads = [blake3(f"{name} {at}".encode()).digest(length=chunk_bytes) for at in range(count)]

    def put(
        self, start: int = 0, stop: int | None = None, *, deadline_s: float = DEADLINE_S
    ) -> list[Stored | Exists | Refused]:
        """Puts chunks, durable."""
        return self.store.put(self.keys[start:stop], self.payloads[start:stop], deadline=deadline_s)

    def get(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        deadline_s: float = DEADLINE_S,
        soft_deadline_s: float | None = None,
    ) -> tuple[list[Hit | Miss], list[bytearray]]:
        """Reads chunks whole; asserts that every hit has the right bytes. The buffers are those handed to the store."""
        keys, payloads = self.keys[start:stop], self.payloads[start:stop]
        buffers = [bytearray(b"\xaa" * len(payload)) for payload in payloads]
        results = self.store.get_into(keys, buffers, deadline=deadline_s, soft_deadline=soft_deadline_s)
        for at, (result, buffer, payload) in enumerate(zip(results, buffers, payloads, strict=True), start):
            assert isinstance(result, Miss) or (result.length_bytes == len(payload) and buffer == payload), (
                f"chunk {at}: a hit with wrong bytes"
            )
        return results, buffers

    def get_range(self, at: int, offset: int, length_bytes: int) -> Hit | Miss:
        """Reads a part of one chunk; asserts that a hit has the right bytes."""
        buffer = bytearray(b"\xaa" * length_bytes)
        result = self.store.get_into(
            self.keys[at : at + 1], [buffer], ranges=[(offset, length_bytes)], deadline=DEADLINE_S
        )[0]
        assert isinstance(result, Miss) or buffer == self.payloads[at][offset : offset + length_bytes], (
            f"chunk {at}: a hit with wrong bytes at {offset}"
        )
        return result

    def hits(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Which chunks are there."""
        results, _ = self.get(start, stop)
        return [at for at, result in enumerate(results, start) if isinstance(result, Hit)]


def reasons(results: Sequence[Hit | Miss | Stored | Exists | Refused]) -> set[str]:
    """Names of results with their reasons."""
    return {type(one).__name__ + (f" {one.reason.name}" if isinstance(one, Miss | Refused) else "") for one in results}

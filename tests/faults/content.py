"""The chunks of the fault tests: key number -> key and payload, the same in every process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from blake3 import blake3

from kvstore.types.keys import KeyChain
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace

KiB: Final = 1024
CHUNK_BYTES_MAX: Final = 256 * KiB
DOCUMENT_CHUNKS: Final = 16
CHUNK_TOKENS: Final = 16
_SIZES: Final = (0, 1, 4095, 4096, 4097, 10_000, 16 * KiB, 40_000, 57_344, 64 * KiB, 100_001, CHUNK_BYTES_MAX)
_WEIGHTS: Final = (1, 1, 2, 4, 2, 10, 20, 20, 10, 10, 6, 3)


def namespace(model: str = "faults") -> Namespace:
    """The namespace that all of them write to."""
    layout = KVLayout.opaque(chunk_bytes=CHUNK_BYTES_MAX, chunk_tokens=CHUNK_TOKENS, checksum_bytes=16 * KiB)
    return Namespace(tenant="default", model=model, weights="sha256:" + "0" * 64, layout=layout)


def chunk_bytes(key: int) -> int:
    """Length of a key's payload: small, page sized, odd and large ones."""
    return random.Random(key).choices(_SIZES, _WEIGHTS)[0]


@lru_cache(maxsize=4096)
def payload(key: int) -> bytes:
    """The only right bytes of a key: BLAKE3 of its number, drawn out."""
    return blake3(b"content %d" % key).digest(length=chunk_bytes(key))


def document_of(key: int) -> int:
    """Keys come in documents of DOCUMENT_CHUNKS consecutive chunks, each a chain of its own."""
    return key // DOCUMENT_CHUNKS


def chain(where: Namespace, document: int) -> KeyChain:
    """The keys of a document."""
    first = document * DOCUMENT_CHUNKS * CHUNK_TOKENS
    return where.keys(list(range(first, first + DOCUMENT_CHUNKS * CHUNK_TOKENS)))


def chain_slice(where: Namespace, keys: Sequence[int]) -> KeyChain:
    """Consecutive key numbers of one document as a chain that knows its position."""
    first = keys[0] % DOCUMENT_CHUNKS
    assert list(keys) == list(range(keys[0], keys[0] + len(keys))), keys
    assert first + len(keys) <= DOCUMENT_CHUNKS, keys
    return chain(where, document_of(keys[0]))[first : first + len(keys)]

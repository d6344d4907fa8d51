"""Namespaces as a node knows them: small ids, generations, and the salts that make index keys of record keys.

    salt      = BLAKE3(namespace digest | generation u64 LE)[:16]
    index key = record key[:16] XOR salt, as two u64 LE

So a drop (generation + 1) hides every record at once, and a key never matches across namespaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.engine.api import NamespaceRef
from kvstore.engine.location import U64
from kvstore.errors import InvalidRequest, UnknownNamespace
from kvstore.limits import DIGEST_BYTES, NAMESPACES_MAX
from kvstore.types.digest import digest
from kvstore.types.namespace import Manifest

SALT_BYTES: Final = 16
_DIGEST_WORDS: Final = DIGEST_BYTES // 8


def generation_salt(namespace_digest: bytes, generation: int) -> bytes:
    """The 16 bytes that hide other namespaces and older generations."""
    return digest(namespace_digest, generation.to_bytes(8, "little"))[:SALT_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNamespace:
    """A namespace and the manifest that it was registered with."""

    ref: NamespaceRef
    manifest: bytes


class IndexKeys:
    """Makes index keys of record keys.

    `key_bits` cuts record keys to their first bits, so that tests see what collisions do: a lookup may then be wrong,
    a get still compares the full key.
    """

    def __init__(self, *, key_bits: int = 8 * SALT_BYTES) -> None:
        self._mask = (1 << key_bits) - 1
        self._masks = np.frombuffer(self._mask.to_bytes(SALT_BYTES, "little"), dtype="<u8")
        self._cut = key_bits < 8 * SALT_BYTES

    def many(self, ref: NamespaceRef, keys: bytes | memoryview) -> U64:
        """Index keys of n * 32 bytes of record keys, shape [n, 2]."""
        halves = np.frombuffer(keys, dtype="<u8").reshape(-1, _DIGEST_WORDS)[:, :2]
        if self._cut:
            halves = halves & self._masks
        salted: U64 = halves ^ np.frombuffer(ref.salt, dtype="<u8")
        return salted

    def one(self, ref: NamespaceRef, key: bytes) -> tuple[int, int]:
        """Index key of one record key."""
        salted = (int.from_bytes(key[:SALT_BYTES], "little") & self._mask) ^ int.from_bytes(ref.salt, "little")
        return salted & 0xFFFF_FFFF_FFFF_FFFF, salted >> 64


class NamespaceTable:
    """All namespaces of one drive, by digest and by id."""

    def __init__(self, *, namespaces_max: int = NAMESPACES_MAX) -> None:
        self._max = namespaces_max
        self._by_digest: dict[bytes, KnownNamespace] = {}
        self._by_id: dict[int, KnownNamespace] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[KnownNamespace]:
        return iter(list(self._by_id.values()))

    def get(self, namespace_digest: bytes) -> NamespaceRef | None:
        """The namespace with this digest, in its current generation."""
        known = self._by_digest.get(namespace_digest)
        return known.ref if known is not None else None

    def by_id(self, id: int) -> KnownNamespace | None:
        """The namespace with this id."""
        return self._by_id.get(id)

    def is_current(self, ref: NamespaceRef) -> bool:
        """Whether no drop happened since `ref` was handed out."""
        known = self._by_id.get(ref.id)
        return known is not None and known.ref.generation == ref.generation

    def add(self, manifest: bytes) -> tuple[NamespaceRef, bool]:
        """Register a namespace; says whether it is new.

        Raises:
            InvalidRequest: the manifest is malformed, or NAMESPACES_MAX are known already.
            FormatUnsupported: it is of another version.
        """
        decoded = Manifest.decode(manifest)
        known = self._by_digest.get(decoded.digest)
        if known is not None:
            return known.ref, False
        if len(self._by_id) >= self._max:
            raise InvalidRequest(
                f"this drive knows {len(self._by_id)} namespaces, the limit is {self._max}; use fewer, or another drive"
            )
        return self._register(self._next_id, 0, bytes(manifest), decoded), True

    def restore(self, *, id: int, generation: int, manifest: bytes) -> NamespaceRef:
        """Register what the log says.

        Raises:
            InvalidRequest, FormatUnsupported: the manifest is malformed.
        """
        if id <= 0 or id in self._by_id:
            raise InvalidRequest(f"namespace id {id} in the log is used twice or not positive")
        return self._register(id, generation, manifest, Manifest.decode(manifest))

    def drop(self, ref: NamespaceRef) -> NamespaceRef:
        """Hide everything stored under the namespace so far; answers its new generation.

        Raises:
            UnknownNamespace: it is not registered.
        """
        known = self._by_id.get(ref.id)
        if known is None:
            raise UnknownNamespace(f"namespace {ref.digest.hex()} is not known here; send its manifest")
        generation = known.ref.generation + 1
        return self._register(ref.id, generation, known.manifest, Manifest.decode(known.manifest))

    def _register(self, id: int, generation: int, manifest: bytes, decoded: Manifest) -> NamespaceRef:
        ref = NamespaceRef(
            id=id,
            digest=decoded.digest,
            generation=generation,
            salt=generation_salt(decoded.digest, generation),
            tenant=decoded.tenant,
        )
        self._by_digest[ref.digest] = self._by_id[id] = KnownNamespace(ref=ref, manifest=manifest)
        self._next_id = max(self._next_id, id + 1)
        return ref

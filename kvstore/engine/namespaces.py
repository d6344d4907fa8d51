"""The namespaces a drive knows: small ids for digests, generations, and the salts that hide what was dropped."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvstore.engine.api import NamespaceRef
from kvstore.engine.location import U64
from kvstore.engine.logrecord import Drop, NamespacePiece, encode_drop, encode_namespace
from kvstore.errors import FormatUnsupported, InvalidRequest
from kvstore.limits import NAMESPACES_MAX
from kvstore.types.checksum import crc32c
from kvstore.types.digest import digest
from kvstore.types.namespace import Manifest

_GENERATION = struct.Struct("<Q")
SALT_BYTES = 16


def generation_salt(namespace_digest: bytes, generation: int) -> bytes:
    """What record keys of one generation of a namespace are XORed with (docs/architecture.md, "Keys on the node")."""
    return digest(namespace_digest, _GENERATION.pack(generation))[:SALT_BYTES]


def index_key(ref: NamespaceRef, key: bytes) -> bytes:
    """The 16 bytes under which a record key (32 bytes) is indexed."""
    mixed = int.from_bytes(key[:SALT_BYTES], "little") ^ int.from_bytes(ref.salt, "little")
    return mixed.to_bytes(SALT_BYTES, "little")


def index_keys_few(ref: NamespaceRef, keys: Sequence[bytes]) -> list[bytes]:
    """`index_key` of a handful of keys."""
    salt = int.from_bytes(ref.salt, "little")
    size = SALT_BYTES
    return [(int.from_bytes(key[:size], "little") ^ salt).to_bytes(size, "little") for key in keys]


def index_keys(ref: NamespaceRef, keys: bytes | memoryview) -> U64:
    """The same for n * 32 bytes of keys, as the shape [n, 2] that the index takes."""
    words = np.frombuffer(keys, dtype="<u8").reshape(-1, 4)[:, :2]
    mixed: U64 = words ^ np.frombuffer(ref.salt, dtype="<u8")
    return mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNamespace:
    """A namespace of this drive with its manifest. `copies`: how many its records are to have, 0 where nobody said."""

    ref: NamespaceRef
    manifest: bytes
    copies: int = 0


class NamespaceTable:
    """Namespaces by digest and by id. Ids are never used twice on a drive, so lost ones leave orphans, not mix-ups.

    Args:
        manifest_bytes_max: all manifests together; they must fit the log beside everything else.
    """

    def __init__(self, *, manifest_bytes_max: int) -> None:
        self._manifest_bytes_max = manifest_bytes_max
        self._by_digest: dict[bytes, KnownNamespace] = {}
        self._by_id: dict[int, KnownNamespace] = {}
        self._manifest_bytes = 0
        self.next_id = 1

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[KnownNamespace]:
        return iter(self._by_digest.values())

    def count_of(self, tenant: str) -> int:
        """How many of them are a tenant's."""
        return sum(known.ref.tenant == tenant for known in self)

    def manifests_share_of(self, tenant: str) -> float:
        """Which part of the bytes that all manifests together may have is a tenant's."""
        mine = sum(len(known.manifest) for known in self if known.ref.tenant == tenant)
        return mine / self._manifest_bytes_max

    def by_digest(self, namespace_digest: bytes) -> NamespaceRef | None:
        """The namespace with this digest, in its present generation."""
        known = self._by_digest.get(namespace_digest)
        return known.ref if known is not None else None

    def by_id(self, id: int) -> NamespaceRef | None:
        """The namespace with this id, in its present generation."""
        known = self._by_id.get(id)
        return known.ref if known is not None else None

    def manifest(self, namespace_digest: bytes) -> bytes | None:
        """The manifest of a namespace."""
        known = self._by_digest.get(namespace_digest)
        return known.manifest if known is not None else None

    def copies(self, namespace_digest: bytes) -> int:
        """How many copies a namespace's records are to have; 0 where nobody said, or it is not known."""
        known = self._by_digest.get(namespace_digest)
        return known.copies if known is not None else 0

    def set_copies(self, ref: NamespaceRef, copies: int) -> bool:
        """Records of a namespace are to have so many copies. Says whether that is new, and must be logged."""
        known = self._by_id[ref.id]
        if known.copies == copies:
            return False
        self._by_digest[ref.digest] = self._by_id[ref.id] = replace(known, copies=copies)
        return True

    def is_current(self, ref: NamespaceRef) -> bool:
        """Whether a reference is of the present generation: not dropped since it was given out."""
        known = self._by_id.get(ref.id)
        return known is not None and known.ref.generation == ref.generation

    def add(self, manifest: bytes) -> tuple[NamespaceRef, bool]:
        """Register a manifest; says whether it is new, and must be logged.

        Raises:
            InvalidRequest: malformed, or more namespaces or manifest bytes than this drive takes.
        """
        known = self._by_digest.get(digest(manifest))
        if known is not None:
            return known.ref, False
        try:
            decoded = Manifest.decode(manifest)
        except FormatUnsupported as error:
            raise InvalidRequest(f"namespace manifest of {len(manifest)} bytes: {error}") from error
        if len(self) >= NAMESPACES_MAX:
            raise InvalidRequest(
                f"the drive knows {len(self)} namespaces, the limit is {NAMESPACES_MAX}; use fewer distinct salts, "
                "adapters or layouts"
            )
        if self._manifest_bytes + len(manifest) > self._manifest_bytes_max:
            raise InvalidRequest(
                f"manifests of {self._manifest_bytes + len(manifest)} bytes do not fit this drive's log, which keeps "
                f"{self._manifest_bytes_max} for them; use fewer namespaces or a larger capacity"
            )
        ref = self._insert(self.next_id, 1, manifest, decoded)
        self.next_id += 1
        return ref, True

    def drop(self, ref: NamespaceRef, *, generation: int = 0) -> NamespaceRef:
        """Begin a new generation; what `ref` and older ones stored is hidden. Answers the new reference.

        Args:
            generation: The one to begin, if it is a later one than the next: others have dropped it more often.
        """
        known = self._by_id[ref.id]
        return self._set_generation(known, max(known.ref.generation + 1, generation))

    def _insert(self, id: int, generation: int, manifest: bytes, decoded: Manifest) -> NamespaceRef:
        ref = NamespaceRef(
            id=id,
            digest=decoded.digest,
            generation=generation,
            salt=generation_salt(decoded.digest, generation),
            tenant=decoded.tenant,
        )
        known = KnownNamespace(ref=ref, manifest=manifest)
        self._by_digest[ref.digest] = known
        self._by_id[id] = known
        self._manifest_bytes += len(manifest)
        return ref

    def _set_generation(self, known: KnownNamespace, generation: int) -> NamespaceRef:
        old = known.ref
        ref = NamespaceRef(
            id=old.id,
            digest=old.digest,
            generation=generation,
            salt=generation_salt(old.digest, generation),
            tenant=old.tenant,
        )
        fresh = replace(known, ref=ref)
        self._by_digest[ref.digest] = fresh
        self._by_id[ref.id] = fresh
        return ref

    # --- the log ----------------------------------------------------------------------------------------------------
    def log_records(self) -> Iterator[bytes]:
        """Everything, as log records for a checkpoint."""
        for known in self._by_digest.values():
            yield from encode_namespace(known.ref.id, known.ref.generation, known.manifest)
            if known.copies:
                yield encode_drop(known.ref.id, known.ref.generation, copies=known.copies)

    def restore(self, pieces: Iterable[NamespacePiece], drops: Iterable[Drop]) -> int:
        """Take over what a scan of the log found; answers how many manifests were incomplete or damaged."""
        found: dict[int, dict[int, NamespacePiece]] = {}
        generations: dict[int, int] = {}
        copies: dict[int, int] = {}
        for piece in pieces:
            found.setdefault(piece.id, {})[piece.offset] = piece
            generations[piece.id] = max(generations.get(piece.id, 1), piece.generation)
        for drop in drops:
            generations[drop.id] = max(generations.get(drop.id, 1), drop.generation)
            if drop.copies:
                copies[drop.id] = drop.copies
        bad = 0
        for id, parts in sorted(found.items()):
            decoded = _join(parts)
            if decoded is None:
                bad += 1
                continue
            # One digest has one id, unless its manifest was lost and it was registered anew: the newer id counts.
            older = self._by_digest.get(decoded[1].digest)
            if older is not None:
                del self._by_id[older.ref.id]
                self._manifest_bytes -= len(older.manifest)
            self.set_copies(self._insert(id, generations[id], *decoded), copies.get(id, 0))
        self.next_id = max([self.next_id, *(id + 1 for id in generations)])
        return bad

    def reserve_ids(self, ids: Iterable[int]) -> None:
        """Ids that records on the drive carry are not given again, whether or not their namespace is known."""
        self.next_id = max([self.next_id, *(id + 1 for id in ids)])


def _join(parts: dict[int, NamespacePiece]) -> tuple[bytes, Manifest] | None:
    """The manifest that the pieces make, None if one is missing or wrong."""
    manifest = b"".join(parts[offset].piece for offset in sorted(parts))
    first = parts.get(0)
    if first is None or len(manifest) != first.total_bytes or crc32c(manifest) != first.manifest_crc:
        return None
    try:
        return manifest, Manifest.decode(manifest)
    except (FormatUnsupported, InvalidRequest):
        return None

"""Why keys are not there: what a lookup answers for those that the index does not have."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np

from kvstore.engine.api import NamespaceRef
from kvstore.engine.cache import Cache
from kvstore.engine.catalog import Catalog
from kvstore.engine.location import I64, U64
from kvstore.engine.namespaces import SALT_BYTES
from kvstore.engine.pending import Pending
from kvstore.limits import DIGEST_BYTES
from kvstore.types.results import MissReason

_LOOKUPS_OF_A_PASS: Final = 4  # a key is looked up in the time in which a pass over all goes by so many


class Misses:
    """Tells missing keys apart: on their way to the drive, in memory only, evicted, quarantined, or never seen.

    A lookup may miss tens of thousands of keys while puts are in progress, so nothing is done in Python for each key
    but for those that may be one of the few.
    """

    __slots__ = ("_cache", "_catalog", "_pending")

    def __init__(self, *, catalog: Catalog, pending: Pending, cache: Cache) -> None:
        self._catalog = catalog
        self._pending = pending
        self._cache = cache

    def statuses(self, ref: NamespaceRef, keys: bytes | memoryview, wanted: U64, missing: I64, *, now_ns: int) -> bytes:
        """One byte for each of n keys: 0 for a hit, else a MissReason.

        Args:
            keys: n * 32 bytes.
            wanted: their index keys, shape [n, 2].
            missing: ascending positions of those that the index has not.
        """
        statuses = np.zeros(len(wanted), dtype=np.uint8)
        if len(missing):
            statuses[missing] = self._catalog.history.reasons(wanted[missing])
            if self._cache.volatile_count:
                statuses[self._volatile(ref, keys, missing, now_ns)] = 0
            if self._pending:
                statuses[missing[on_their_way(self._pending, wanted[missing])]] = MissReason.PENDING
        return statuses.tobytes()

    def _volatile(self, ref: NamespaceRef, keys: bytes | memoryview, missing: I64, now_ns: int) -> list[int]:
        """Which of the missing keys live in memory only."""
        space = self._cache.space(ref.salt)
        if space is None:
            return []
        found = []
        for at in missing.tolist():
            record = space.get(bytes(keys[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]))
            if record is not None and record.until_ns > now_ns:
                found.append(at)
        return found


def on_their_way(pending: Collection[bytes], wanted: U64) -> list[int]:
    """Which of the keys that are wanted are being put.

    Args:
        pending: index keys of puts in progress; not empty.
        wanted: index keys, shape [n, 2].

    Returns:
        Positions in `wanted`.
    """
    if len(wanted) * _LOOKUPS_OF_A_PASS < len(pending):
        return [at for at, key in enumerate(np.ascontiguousarray(wanted)) if key.tobytes() in pending]
    firsts = np.frombuffer(b"".join(pending), dtype="<u8")[:: SALT_BYTES // 8]
    alike = np.flatnonzero(np.isin(wanted[:, 0], firsts)).tolist()
    return [at for at in alike if wanted[at].tobytes() in pending]

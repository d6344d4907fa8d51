"""What other nodes tell of a namespace while this one was away: a drop, and deletes that are known by half a key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvstore.engine.api import NamespaceRef
from kvstore.engine.engine import DriveEngine
from kvstore.engine.namespaces import SALT_BYTES
from kvstore.limits import DIGEST_BYTES

_REST: Final = bytes(DIGEST_BYTES - SALT_BYTES)


def raise_generation(engine: DriveEngine, ref: NamespaceRef, generation: int, on_done: Callable[[], None]) -> None:
    """Drop what is of an older generation of a namespace than this one. If the log cannot be written `on_done` never
    comes, as from `DriveEngine.drop_namespace`."""
    if ref.generation >= generation:
        on_done()
        return
    engine.cache.forget_namespace(ref.salt)
    engine.store.ledger.drop_namespace(ref, lambda error: on_done() if error is None else None, generation=generation)


def delete_by_prefix(
    engine: DriveEngine, ref: NamespaceRef, prefixes: Sequence[bytes], on_done: Callable[[], None]
) -> None:
    """Delete the records whose keys begin with these 16 bytes, which is all of a key that the index knows."""
    engine.delete(ref, b"".join([prefix + _REST for prefix in prefixes]), lambda _: on_done())

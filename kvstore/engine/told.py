"""What nodes tell each other of a namespace: that it was dropped, and deletes, which are known by half a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.engine.api import NamespaceRef
from kvstore.engine.engine import DriveEngine
from kvstore.engine.namespaces import SALT_BYTES, NamespaceTable, index_key
from kvstore.limits import ACCESS_TICK_NS, DIGEST_BYTES, NEWS_STEP_GRAVES, REPAIR_WINDOW_NS

_REST: Final = bytes(DIGEST_BYTES - SALT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What one drive has to tell of a namespace.

    Attributes:
        prefixes: the first 16 bytes of the keys of records that were deleted.
        ages_ns: how long ago each was.
    """

    digest: bytes
    manifest: bytes
    generation: int
    prefixes: Sequence[bytes]
    ages_ns: Sequence[int]


def news_of(engine: DriveEngine) -> Iterator[News]:
    """What somebody who was away should hear: namespaces that were dropped ever, then deletes.

    Each step looks at NEWS_STEP_GRAVES deletes, and may be taken in another turn of the loop. What is deleted or
    dropped meanwhile is not told: whoever listens has come back, and hears it from clients.
    """
    ledger, namespaces = engine.store.ledger, engine.store.namespaces
    for id in [known.ref.id for known in namespaces if known.ref.generation > 1]:
        yield from _news(namespaces, id, ())
    keys = ledger.graves.keys()
    for at in range(0, len(keys), NEWS_STEP_GRAVES):
        for id, found in ledger.graves.of(keys[at : at + NEWS_STEP_GRAVES], ledger.tick).items():
            yield from _news(namespaces, id, found)


def _news(namespaces: NamespaceTable, id: int, graves: Sequence[tuple[bytes, int]]) -> Iterator[News]:
    ref = namespaces.by_id(id)
    manifest = namespaces.manifest(ref.digest) if ref is not None else None
    if ref is None or manifest is None:
        return
    yield News(
        digest=ref.digest,
        manifest=manifest,
        generation=ref.generation,
        prefixes=[index_key(ref, key16 + _REST) for key16, _ in graves],
        ages_ns=[age_ns for _, age_ns in graves],
    )


def was_deleted(engine: DriveEngine, digest: bytes, key: bytes) -> bool:
    """Whether a record was deleted here within the repair window."""
    ref = engine.namespace(digest)
    return ref is not None and index_key(ref, key) in engine.store.ledger.graves


def raise_generation(engine: DriveEngine, ref: NamespaceRef, generation: int, on_done: Callable[[], None]) -> None:
    """Drop what is of an older generation of a namespace than this one. If the log cannot be written `on_done` never
    comes, as from `DriveEngine.drop_namespace`."""
    if ref.generation >= generation:
        on_done()
        return
    engine.cache.forget_namespace(ref.salt)
    engine.store.ledger.drop_namespace(ref, lambda error: on_done() if error is None else None, generation=generation)


def delete_by_prefix(
    engine: DriveEngine,
    ref: NamespaceRef,
    prefixes: Sequence[bytes],
    ages_ns: Sequence[int],
    on_done: Callable[[], None],
) -> None:
    """Delete the records whose keys begin with these 16 bytes, which is all of a key that the index knows.

    What was deleted longer ago than the repair window is passed over.
    """
    recent = [(prefix, age_ns) for prefix, age_ns in zip(prefixes, ages_ns, strict=True) if age_ns < REPAIR_WINDOW_NS]
    keys = [prefix + _REST for prefix, _ in recent]
    engine.delete(ref, b"".join(keys), lambda _: on_done())
    ledger = engine.store.ledger
    for key, (_, age_ns) in zip(keys, recent, strict=True):
        ledger.graves.date(index_key(ref, key), ledger.tick - age_ns // ACCESS_TICK_NS)

"""Copies of records between nodes, as one worker takes part in it: what it is to get, is asked about, is told of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvstore.cluster.view import READ_STATES, TargetId, View
from kvstore.engine.api import Engine, NamespaceRef
from kvstore.engine.engine import DriveEngine
from kvstore.engine.heads import Head
from kvstore.engine.told import delete_by_prefix, raise_generation
from kvstore.limits import DIGEST_BYTES
from kvstore.server.repair import PullQueue
from kvstore.types.results import MissReason, RefusedReason


class OwnDrive(Protocol):
    """A drive of this worker."""

    @property
    def id(self) -> TargetId: ...

    @property
    def engine(self) -> DriveEngine: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsFound:
    """What this worker says of records: an entry for each, and of their namespace."""

    heads: Sequence[Head | MissReason]
    generation: int
    manifest: bytes


class Copier:
    """The part of one worker in keeping copies.

    Attributes:
        queue: what is to be copied to this worker.
        view: of the cluster, as the worker was told last.
    """

    def __init__(self, drives: Sequence[OwnDrive]) -> None:
        self._drives = drives
        self._own = frozenset(drive.id for drive in drives)
        self.queue = PullQueue()
        self.view = View(epoch=0, node_id="", targets=())

    def set_view(self, view: View) -> None:
        """The cluster has changed."""
        self.view = view

    # --- what others ask ------------------------------------------------------------------------------------------
    def want(self, engine: Engine, namespace: NamespaceRef, keys: bytes, source: TargetId, now_ns: int) -> list[int]:
        """Take records to be copied here; 0 or a RefusedReason for each (see `wire.replicas.Pull`).

        Args:
            keys: n * 32 bytes of record keys.
        """
        count = len(keys) // DIGEST_BYTES
        target = self.view.target(source)
        if target is None or target.state not in READ_STATES:
            return [RefusedReason.INVALID] * count
        if source in self._own:
            return [0] * count
        statuses = engine.match(namespace, keys, now_ns=now_ns, touch=False).statuses
        lacking = [at for at, status in enumerate(statuses) if status]
        taken = self.queue.offer(
            namespace.digest, [keys[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] for at in lacking], source
        )
        answers = [0] * count
        for at, is_taken in zip(lacking, taken, strict=True):
            answers[at] = 0 if is_taken else RefusedReason.OVERLOADED
        return answers

    def heads(self, digest: bytes, keys: Sequence[bytes], on_done: Callable[[HeadsFound], None]) -> None:
        """Heads of records of a namespace, over all drives."""
        known = [(drive.engine, ref) for drive in self._drives if (ref := drive.engine.namespace(digest)) is not None]
        answers: list[list[Head | MissReason]] = []
        manifest = known[0][0].store.namespaces.manifest(digest) if known else None
        generation = max((ref.generation for _, ref in known), default=0)

        def answered(found: list[Head | MissReason]) -> None:
            answers.append(found)
            if len(answers) == len(known):
                best = [min(of_one, key=_is_missing) for of_one in zip(*answers, strict=True)]
                on_done(HeadsFound(heads=best, generation=generation, manifest=manifest or b""))

        for engine, ref in known:
            engine.store.heads.read(ref, keys, answered)

    def forget(
        self,
        digest: bytes,
        *,
        generation: int,
        prefixes: Sequence[bytes],
        ages_ns: Sequence[int],
        on_done: Callable[[], None],
    ) -> None:
        """Others tell what was deleted in a namespace, which every drive knows, and dropped.

        Args:
            prefixes: of record keys, 16 bytes each.
            ages_ns: how long ago each was deleted.
            on_done: called once all of it is on the drives.
        """
        left = len(self._drives)

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                on_done()

        for drive in self._drives:
            ref = drive.engine.namespace(digest)
            assert ref is not None, "a namespace is added to every drive"
            raise_generation(
                drive.engine, ref, generation, partial(self._delete, drive.engine, digest, prefixes, ended)
            )

    def _delete(
        self, engine: DriveEngine, digest: bytes, prefixes: Sequence[bytes], on_done: Callable[[], None]
    ) -> None:
        ref = engine.namespace(digest)
        if ref is not None and prefixes:
            delete_by_prefix(engine, ref, prefixes, on_done)
        else:
            on_done()


def _is_missing(one: Head | MissReason) -> bool:
    return not isinstance(one, Head)

"""`Writer`: chunks written layer by layer, visible when committed. For one thread at a time."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, TypeAlias

from kvstore.errors import Closed
from kvstore.limits import UNPIN_NS_MAX
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, Refused, Stored
from kvstore.wire.messages import Manifest
from kvstore_client import writer_verbs
from kvstore_client.blocking import BlockingDriver
from kvstore_client.options import DURABILITIES, WAITS, choice, deadline_after
from kvstore_client.outcomes import count_stores
from kvstore_client.process import ProcessState
from kvstore_client.regions import Item
from kvstore_client.writer_verbs import OpenRequest, WriterState

Session: TypeAlias = ProcessState[BlockingDriver]


class Writer:
    """Room for some chunks, to be filled in any order and committed once.

    `with namespace.writer(keys) as writer:` aborts at the end of the block what was not committed. A node forgets a
    writer that is left alone for its ttl; until the commit its keys answer as pending.
    """

    def __init__(self, session: Session, state: WriterState) -> None:
        self._session = session
        self._state = state
        self._is_over = False

    @classmethod
    def open(
        cls, session: Session, namespace: Namespace, manifest: Manifest, request: OpenRequest, deadline_ns: int
    ) -> Self:
        """Reserves the room; see `BoundNamespace.writer`."""
        state = session.driver.run(writer_verbs.open_writer(session.core, namespace, manifest, request, deadline_ns))
        return cls(session, state)

    @property
    def statuses(self) -> list[Stored | Exists | Refused]:
        """One per key so far: Refused(PENDING) while it takes bytes; Exists or Refused when it takes none."""
        return self._state.results()

    def write(
        self,
        index: int,
        buffer: Item,
        *,
        layer: int | None = None,
        offset: int | None = None,
        part: str | None = None,
        deadline: float | None = None,
    ) -> None:
        """Writes bytes of chunk `index` from the caller's memory, which is free again at the return.

        Whole checksum blocks are sent at once; an edge inside a block is copied and sent when its block is whole.
        What a node refuses shows in `statuses` and in the commit; the rest of the chunk's bytes are then dropped.

        Args:
            index: Of the key.
            buffer: One layer of each dense part (or of `part`) of each shard, one behind the other; or with `offset`
                any bytes of the chunk, its shards laid one behind the other. Neither means offset 0.
            layer: Of the model.
            offset: In bytes.
            part: One part instead of all.
            deadline: Seconds from now.

        Raises:
            InvalidRequest: Outside the chunk, bytes written before, or memory of the wrong length.
        """
        self._check_open()
        self._session.driver.run(
            writer_verbs.write(
                self._session.core,
                self._state,
                index,
                buffer,
                layer=layer,
                offset=offset,
                part=part,
                deadline_ns=self._deadline_ns(deadline),
            )
        )

    def commit(
        self, *, wait: str = "durable", durability: str = "commit", deadline: float | None = None
    ) -> list[Stored | Exists | Refused]:
        """Makes the chunks visible; see `BoundNamespace.put` for the arguments. The writer is over afterwards.

        Returns:
            One outcome per key; a chunk of which bytes are missing is Refused(INVALID).
        """
        self._check_open()
        self._is_over = True
        results = self._session.driver.run(
            writer_verbs.commit(
                self._session.core,
                self._state,
                durability=choice("durability", durability, DURABILITIES),
                wait=choice("wait", wait, WAITS),
                deadline_ns=self._deadline_ns(deadline),
            )
        )
        count_stores(results, self._state.lengths(), self._session.core.counters)
        return results

    def abort(self) -> None:
        """Gives the room back; nobody will see the chunks. Harmless when the writer is over."""
        if not self._is_over:
            self._is_over = True
            if self._session.is_usable:
                until_ns = time.monotonic_ns() + UNPIN_NS_MAX
                self._session.driver.run(writer_verbs.abort(self._session.core, self._state, until_ns))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _check_open(self) -> None:
        if self._is_over:
            raise Closed("the writer was committed or aborted; open a new one")
        self._session.check_process()

    def _deadline_ns(self, seconds: float | None) -> int:
        return deadline_after(time.monotonic_ns(), seconds, self._session.core.options.deadline_ns)

"""Workers that come back, or are new, hear what was deleted and dropped, before anything is copied from them."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvstore.cluster.view import READ_STATES, Target, TargetId, View
from kvstore.engine.engine import DriveEngine
from kvstore.engine.told import news_of
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.limits import TELL_RETRY_NS, TELL_TRIES_MAX
from kvstore.server.errand import Errand
from kvstore.server.peer import PeerCall
from kvstore.wire.messages import End
from kvstore.wire.replicas import Forget

log = logging.getLogger(__name__)

_NEVER_NS: Final = 1 << 63


class TellingHost(Protocol):
    """What the teller needs of the worker."""

    @property
    def now_ns(self) -> int:
        """The time of this turn."""

    def ask(self, target: Target, call: PeerCall) -> None:
        """Carry out a call at another worker."""

    def wake(self) -> None:
        """`poll` is to be called."""


@dataclass(slots=True, eq=False)
class _Listener:
    """A worker that has not heard all. `left` is what it is told next; `ids` are its targets."""

    target: Target
    ids: Sequence[TargetId]
    left: Iterator[Forget] | None = None
    tries: int = 0
    due_ns: int = 0


class Teller:
    """See the module. Each worker is told one thing after the other, from the beginning again when that fails."""

    def __init__(self, host: TellingHost, drives: Sequence[DriveEngine]) -> None:
        self._host = host
        self._drives = drives
        self._listeners: list[_Listener] = []

    def tell(self, returned: Sequence[Target], view: View) -> None:
        """These have come back, each standing for its worker."""
        self._listeners = [one for one in self._listeners if _is_there(one.target, view)]
        for target in returned:
            ids = [other.id for other in view.targets if (other.node_id, other.data) == (target.node_id, target.data)]
            self._listeners = [one for one in self._listeners if one.target.data != target.data]
            self._listeners.append(_Listener(target, ids, due_ns=self._host.now_ns))

    @property
    def untold(self) -> set[TargetId]:
        """Targets that nothing is to be copied from yet."""
        return {name for one in self._listeners for name in one.ids}

    @property
    def due_ns(self) -> int:
        """When `poll` has something to do."""
        return min((one.due_ns for one in self._listeners), default=_NEVER_NS)

    def poll(self, now_ns: int) -> None:
        """Tell whom it is time to tell."""
        due = [one for one in self._listeners if one.due_ns <= now_ns]
        if not due:
            return
        for one in due:
            one.left = self._forgets()  # made as they are told: all at once would hold up the loop
            self._next(one)

    def _forgets(self) -> Iterator[Forget]:
        for drive in self._drives:
            for news in news_of(drive):
                yield Forget(
                    manifest=news.manifest,
                    generation=news.generation,
                    keys=b"".join(news.prefixes),
                    ages_ns=struct.pack(f"<{len(news.ages_ns)}Q", *news.ages_ns),
                )

    def _next(self, one: _Listener) -> None:
        one.due_ns = _NEVER_NS  # until it has answered
        forget = next(one.left, None) if one.left is not None else None
        if forget is None:
            self._listeners.remove(one)
            self._host.wake()
            return
        self._host.ask(
            one.target, Errand(forget, End, lambda _: self._heard(one), lambda error: self._failed(one, error))
        )

    def _heard(self, one: _Listener) -> None:
        if one in self._listeners:
            self._next(one)

    def _failed(self, one: _Listener, error: KVStoreError) -> None:
        if one not in self._listeners:
            return
        if isinstance(error, InvalidRequest):
            # of this namespace alone: what is to be told of the others must not fail with it
            log.warning("target %s refuses what it is told of a namespace: %s", one.target.id, error)
            self._next(one)
            return
        one.tries += 1
        if one.tries >= TELL_TRIES_MAX:
            log.warning("target %s did not hear what was deleted while it was away: %s", one.target.id, error)
            self._listeners.remove(one)
        else:
            one.due_ns = self._host.now_ns + TELL_RETRY_NS
        self._host.wake()


def _is_there(target: Target, view: View) -> bool:
    now = view.target(target.id)
    return now is not None and now.state in READ_STATES and (now.boot_id, now.data) == (target.boot_id, target.data)

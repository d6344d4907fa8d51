"""What was told to a group that asks together: ranks of one request must come to one answer (case 39).

Each rank looks up for itself, moments apart, while chunks are put and evicted. A lookup that names a group is answered
with the statuses that the first of the group got, and what it found is held for as long as others may still come. A
later rank's own pin is on top of that. Who asks for other keys, or later than `MATCH_GROUP_NS`, has an answer of its
own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

from kvstore.engine.api import Engine, MatchOutcome, NamespaceRef
from kvstore.limits import DIGEST_BYTES, MATCH_GROUP_NS, MATCH_GROUPS_BYTES_MAX
from kvstore.types.digest import digest
from kvstore.types.results import MissReason
from kvstore.wire.messages import ID_BYTES, Match

_ENTRY_BYTES: Final = 512  # of the table, beside the statuses
_ABSENT: Final = bytes([MissReason.ABSENT])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """`generation` of the namespace is 0 where it was not known."""

    outcome: MatchOutcome
    generation: int
    until_ns: int

    @property
    def memory_bytes(self) -> int:
        return _ENTRY_BYTES + len(self.outcome.statuses)


class GroupAnswers:
    """See the module. Bounded by memory: the oldest answers go first. Time is an argument."""

    def __init__(self, *, bytes_max: int = MATCH_GROUPS_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._told: OrderedDict[bytes, _Told] = OrderedDict()  # in the order of their ends
        self._memory_bytes = 0

    def __len__(self) -> int:
        return len(self._told)

    def match(
        self,
        engine: Engine,
        namespace: NamespaceRef | None,
        request: Match,
        *,
        tenant: str,
        client_id: bytes,
        now_ns: int,
    ) -> MatchOutcome:
        """The answer for one of the group.

        Args:
            namespace: None where it is not known to who asks: all is absent.
            request: Names a group.
            tenant: Of who asks; "" where there are none.

        Returns:
            The group's statuses; the pin is the asker's own, and counts as one only if it holds every hit.
        """
        self._forget(now_ns)
        name = digest(
            b"kvstore.group.v1", tenant.encode(), b"\0", request.namespace, request.group, digest(request.keys)
        )
        generation = 0 if namespace is None else namespace.generation
        told = self._told.get(name)
        if told is None or told.generation not in (0, generation):
            told = self._first(engine, namespace, request, holder=name[:ID_BYTES], now_ns=now_ns)
            self._keep(name, told)
        if namespace is None:
            return told.outcome
        own = engine.match(
            namespace,
            request.keys,
            now_ns=now_ns,
            touch=request.touch,
            pin_ttl_ns=request.pin_ttl_ns,
            client_id=client_id,
        )
        is_there = zip(told.outcome.statuses, own.statuses, strict=True)
        holds = own.pinned and not any(status == 0 != now for status, now in is_there)
        return replace(told.outcome, pin_id=own.pin_id, pinned=holds)

    def _first(
        self, engine: Engine, namespace: NamespaceRef | None, request: Match, *, holder: bytes, now_ns: int
    ) -> _Told:
        """Look up for the group, and hold what is there in the name of `holder`, which is no client's."""
        until_ns = now_ns + MATCH_GROUP_NS
        if namespace is None:
            count = len(request.keys) // DIGEST_BYTES
            return _Told(outcome=all_absent(count), generation=0, until_ns=until_ns)
        outcome = engine.match(
            namespace, request.keys, now_ns=now_ns, touch=False, pin_ttl_ns=MATCH_GROUP_NS, client_id=holder
        )
        return _Told(outcome=outcome, generation=namespace.generation, until_ns=until_ns)

    def _keep(self, name: bytes, told: _Told) -> None:
        former = self._told.pop(name, None)
        if former is not None:
            self._memory_bytes -= former.memory_bytes
        self._told[name] = told
        self._memory_bytes += told.memory_bytes
        while self._memory_bytes > self._bytes_max and len(self._told) > 1:
            self._drop_oldest()

    def _forget(self, now_ns: int) -> None:
        """What is over."""
        while self._told and next(iter(self._told.values())).until_ns <= now_ns:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, told = self._told.popitem(last=False)
        self._memory_bytes -= told.memory_bytes


def all_absent(count: int) -> MatchOutcome:
    """The answer where nothing of a namespace is known."""
    return MatchOutcome(statuses=_ABSENT * count, pin_id=0, pinned=False, hit_bytes=0, load_ns=0)

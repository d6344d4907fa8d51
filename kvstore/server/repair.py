"""What is to be copied from where, in which order, and how fast: the deciding half of repair, without I/O.

Clients and other nodes say what this node lacks and who has it (PULL). The queue keeps that by source, since a source
that fails is left alone for a while with all that it was named for; a byte budget says when the next batch may go.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kvstore.cluster.view import TargetId
from kvstore.limits import (
    PULL_BACKOFF_NS_MAX,
    PULL_BACKOFF_NS_MIN,
    PULL_BATCH_RECORDS,
    PULL_FAILURES_MAX,
    PULL_QUEUE_RECORDS_MAX,
    SECOND_NS,
)

_TRIES_MAX: Final = 2
"""How often a record is asked for that its source had and could not give."""


class ByteBudget:
    """A token bucket: within any time t at most `bytes_second` * t + `burst_bytes` + the last batch are taken.

    Whoever takes does not know the size of a batch before it is there, so the bucket may go below zero, and then
    nothing more is taken until it has filled again.
    """

    __slots__ = ("_at_ns", "_left", "burst_bytes", "bytes_second")

    def __init__(self, *, bytes_second: int, burst_bytes: int, now_ns: int) -> None:
        """
        Args:
            bytes_second: 0 takes nothing ever.
        """
        self.bytes_second = bytes_second
        self.burst_bytes = burst_bytes
        self._left = burst_bytes * SECOND_NS if bytes_second else 0  # in bytes * ns: integers lose nothing
        self._at_ns = now_ns

    def ready(self, now_ns: int) -> bool:
        """Whether a batch may begin."""
        self._fill(now_ns)
        return self._left > 0

    def take(self, length_bytes: int, now_ns: int) -> None:
        """So much has come."""
        self._fill(now_ns)
        self._left -= length_bytes * SECOND_NS

    def ready_at_ns(self, now_ns: int) -> int | None:
        """When a batch may begin; None for never."""
        self._fill(now_ns)
        if self._left > 0:
            return now_ns
        return now_ns - self._left // self.bytes_second + 1 if self.bytes_second else None

    def _fill(self, now_ns: int) -> None:
        gone_ns = max(0, now_ns - self._at_ns)
        self._at_ns = max(self._at_ns, now_ns)
        self._left = min(self._left + gone_ns * self.bytes_second, self.burst_bytes * SECOND_NS)


_Wanted: TypeAlias = tuple[bytes, bytes, int]
"""Namespace, key, and how often it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Records of one namespace that one source is asked for together; `tries` for each, how often it was asked."""

    source: TargetId
    tenant: str
    namespace: bytes
    keys: tuple[bytes, ...]
    tries: tuple[int, ...]


@dataclass(slots=True)
class _Source:
    """What one target was named for, and how it has answered.

    Attributes:
        waiting: (namespace, key, tries) of each tenant that has any, whose turn it is first.
    """

    waiting: OrderedDict[str, deque[_Wanted]] = field(default_factory=OrderedDict)
    failures: int = 0
    again_ns: int = 0

    def of(self, tenant: str) -> deque[_Wanted]:
        """What waits for a tenant."""
        return self.waiting.setdefault(tenant, deque())


class PullQueue:
    """Records that are to be fetched, each once, whoever names it.

    A tenant has at most as many as there is room left: alone half the queue, and whoever comes later finds room too.
    The tenants of a source take turns.
    """

    def __init__(self, *, records_max: int = PULL_QUEUE_RECORDS_MAX) -> None:
        self._records_max = records_max
        self._sources: dict[TargetId, _Source] = {}
        self._known: dict[tuple[bytes, bytes], str] = {}
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        """Records that wait or are under way."""
        return len(self._known)

    def offer(self, namespace: bytes, keys: Sequence[bytes], source: TargetId, *, tenant: str) -> list[bool]:
        """Take what there is room for, in this order; says for each whether it is in the queue now."""
        held = self._sources.get(source)
        taken = []
        for key in keys:
            name = namespace, key
            if name not in self._known:
                if self._counts.get(tenant, 0) >= self._records_max - len(self._known):
                    taken.append(False)
                    continue
                if held is None:
                    held = self._sources[source] = _Source()
                self._known[name] = tenant
                self._counts[tenant] = self._counts.get(tenant, 0) + 1
                held.of(tenant).append((namespace, key, 0))
            taken.append(True)
        return taken

    def _forget(self, namespace: bytes, key: bytes) -> None:
        tenant = self._known.pop((namespace, key), None)
        if tenant is not None:
            self._counts[tenant] -= 1
            if not self._counts[tenant]:
                del self._counts[tenant]

    def next_batch(self, now_ns: int, *, busy: Collection[TargetId] = ()) -> Batch | None:
        """What to ask for next: of the source that has waited longest for its turn, and is neither busy nor failing."""
        for source in list(self._sources):
            held = self._sources[source]
            if source in busy or held.again_ns > now_ns or not held.waiting:
                continue
            tenant, waiting = held.waiting.popitem(last=False)
            namespace = waiting[0][0]
            keys: list[bytes] = []
            tries: list[int] = []
            while waiting and waiting[0][0] == namespace and len(keys) < PULL_BATCH_RECORDS:
                _, key, count = waiting.popleft()
                keys.append(key)
                tries.append(count)
            if waiting:
                held.waiting[tenant] = waiting  # behind the other tenants
            self._sources[source] = self._sources.pop(source)  # to the end of the order
            return Batch(source=source, tenant=tenant, namespace=namespace, keys=tuple(keys), tries=tuple(tries))
        return None

    def next_ns(self, now_ns: int, *, busy: Collection[TargetId] = ()) -> int | None:
        """When `next_batch` has something; None when nothing waits but for a source that is busy."""
        times = [
            max(held.again_ns, now_ns) for source, held in self._sources.items() if held.waiting and source not in busy
        ]
        return min(times, default=None)

    def done(self, batch: Batch, *, again: Collection[bytes] = ()) -> int:
        """A batch has ended; the source could not give `again` this time. Answers how many of these are given up."""
        held = self._sources[batch.source]
        held.failures = 0
        held.again_ns = 0
        lost = 0
        for key, tries in zip(batch.keys, batch.tries, strict=True):
            if key in again and tries + 1 < _TRIES_MAX:
                held.of(batch.tenant).append((batch.namespace, key, tries + 1))
            else:
                lost += key in again
                self._forget(batch.namespace, key)
        self._forget_idle(batch.source)
        return lost

    def failed(self, batch: Batch, now_ns: int) -> int:
        """The source did not answer or lied: it is asked again later, or no more. Answers how many are given up."""
        held = self._sources[batch.source]
        held.failures += 1
        held.of(batch.tenant).extendleft(
            (batch.namespace, key, tries) for key, tries in reversed(list(zip(batch.keys, batch.tries, strict=True)))
        )
        held.again_ns = now_ns + min(PULL_BACKOFF_NS_MIN << (held.failures - 1), PULL_BACKOFF_NS_MAX)
        if held.failures < PULL_FAILURES_MAX:
            return 0
        held.failures = 0  # whoever names it again begins anew
        return self.give_up(batch.source)

    def give_up(self, source: TargetId) -> int:
        """Forget all that waits for a source; answers how many records that were."""
        held = self._sources.get(source)
        if held is None:
            return 0
        wanted = [one for waiting in held.waiting.values() for one in waiting]
        for namespace, key, _ in wanted:
            self._forget(namespace, key)
        held.waiting.clear()
        self._forget_idle(source)
        return len(wanted)

    def _forget_idle(self, source: TargetId) -> None:
        held = self._sources[source]
        if not held.waiting and not held.failures:
            del self._sources[source]

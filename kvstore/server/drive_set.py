"""Several drives behind the contract of one engine: a worker divides keys among its drives by itself.

A run goes where rendezvous hashing of its head puts it, so neighbours lie side by side. A read asks every drive's
index, in RAM, since a request names records, not runs; so drives may be added or lose their store without a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvstore.device.health import DriveHealth
from kvstore.engine.api import (
    Engine,
    MatchOutcome,
    NamespaceRef,
    ParcelSource,
    PutColumns,
    PutParcel,
    PutSpec,
    PutTicket,
    ReadHandle,
    ReadSink,
    ReadSpec,
    ReadyItem,
)
from kvstore.engine.engine import DriveEngine
from kvstore.engine.told import raise_generation
from kvstore.limits import DIGEST_BYTES, PINS_MAX
from kvstore.types.digest import ZERO_DIGEST, digest
from kvstore.types.results import Exists, MissReason, Refused
from kvstore.wire.messages import ID_BYTES

_HIT = 0
_PREFERENCE = {_HIT: 0, int(MissReason.PENDING): 1, int(MissReason.ABSENT): 3}
"""Of what two drives say about one key, the lower counts: a hit, a put in progress, any other reason, never seen."""


@dataclass(slots=True)
class _Part:
    """The share of one drive in a batch: which items of the batch it has."""

    items: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)


class _Gathered:
    """Sink of all drives' shares of a read; tells the caller's sink when the last one has finished."""

    def __init__(self, sink: ReadSink) -> None:
        self._sink = sink
        self._open = 1  # the caller, until all shares are begun
        self.handles: list[ReadHandle] = []

    def begin(self) -> None:
        """One more share."""
        self._open += 1

    def finished(self) -> None:
        """A share has finished."""
        self._open -= 1
        if not self._open:
            self._sink.finished()

    @property
    def staged_bytes(self) -> int:
        """See `ReadHandle.staged_bytes`."""
        return sum(handle.staged_bytes for handle in self.handles)

    def cancel(self) -> None:
        """See `ReadHandle.cancel`."""
        for handle in self.handles:
            handle.cancel()


class _Share:
    """Sink of one drive's share: its indices become those of the batch."""

    def __init__(self, gathered: _Gathered, sink: ReadSink, items: list[int]) -> None:
        self._sink = sink
        self._items = items
        self.finished = gathered.finished
        landed: Callable[[ParcelSource], None] | None = getattr(sink, "landed", None)
        if landed is not None:
            self.landed = landed  # parcels name the items of the batch already

    def ready(self, item: ReadyItem) -> None:
        """See `ReadSink.ready`."""
        item.index = self._items[item.index]
        self._sink.ready(item)

    def missed(self, index: int, reason: MissReason) -> None:
        """See `ReadSink.missed`."""
        self._sink.missed(self._items[index], reason)


class DriveSet:
    """Implements `kvstore.engine.api.Engine` over the engines of two or more drives."""

    def __init__(self, drives: Sequence[tuple[str, DriveEngine]]) -> None:
        """
        Args:
            drives: Target id and engine of each. Every drive learns the namespaces of the others.
        """
        self._names = [name.encode() for name, _ in drives]
        self._engines = [engine for _, engine in drives]
        self._pins: dict[int, tuple[bytes, Sequence[tuple[Engine, int]]]] = {}
        self._last_pin = 0
        for engine in self._engines:
            for known in list(engine.store.namespaces):
                self.add_namespace(known.manifest, copies=known.copies)
        for known in list(self._engines[0].store.namespaces):
            self._hide_dropped(known.ref.digest)

    # --- namespaces -------------------------------------------------------------------------------------------------
    def namespace(self, digest: bytes) -> NamespaceRef | None:
        """See `Engine.namespace`; the first drive's reference stands for all."""
        return self._engines[0].namespace(digest)

    def add_namespace(self, manifest: bytes, *, copies: int = 0) -> NamespaceRef:
        """See `Engine.add_namespace`."""
        refs = [engine.add_namespace(manifest, copies=copies) for engine in self._engines]
        return refs[0]

    def drop_namespace(self, ref: NamespaceRef, on_done: Callable[[], None], *, generation: int = 0) -> None:
        """See `Engine.drop_namespace`."""
        left = _Countdown(len(self._engines), on_done)
        for engine in self._engines:
            engine.drop_namespace(_known(engine, ref), left.one, generation=generation)

    # --- lookups ----------------------------------------------------------------------------------------------------
    def match(
        self,
        ref: NamespaceRef,
        keys: bytes | memoryview,
        *,
        now_ns: int,
        touch: bool,
        pin_ttl_ns: int = 0,
        client_id: bytes = b"",
    ) -> MatchOutcome:
        """See `Engine.match`."""
        outcomes = [
            engine.match(
                _known(engine, ref), keys, now_ns=now_ns, touch=False, pin_ttl_ns=pin_ttl_ns, client_id=client_id
            )
            for engine in self._engines
        ]
        statuses = _merged([one.statuses for one in outcomes])
        if touch:
            # What lies behind the first hole must age, and no drive alone knows where that is.
            prefix = len(statuses) - len(statuses.lstrip(b"\0"))
            for engine in self._engines:
                engine.touch(_known(engine, ref), keys[: prefix * DIGEST_BYTES], now_ns=now_ns)
        pins = [(engine, one.pin_id) for engine, one in zip(self._engines, outcomes, strict=True) if one.pin_id]
        return MatchOutcome(
            statuses=statuses,
            pin_id=self._add_pin(client_id, pins) if pins else 0,
            pinned=bool(pins) and all(one.pinned or not one.hit_bytes for one in outcomes),
            hit_bytes=sum(one.hit_bytes for one in outcomes),
            load_ns=max(one.load_ns for one in outcomes),
        )

    def unpin(self, pin_id: int, *, client_id: bytes) -> None:
        """See `Engine.unpin`."""
        owner, parts = self._pins.get(pin_id, (b"", ()))
        if parts and owner == client_id:
            del self._pins[pin_id]
            for engine, part in parts:
                engine.unpin(part, client_id=client_id)

    def wait(
        self, ref: NamespaceRef, keys: bytes, deadline_ns: int, on_done: Callable[[bytes], None]
    ) -> Callable[[], None]:
        """See `Engine.wait`."""
        answers: list[bytes] = []
        left = _Countdown(len(self._engines), lambda: on_done(_merged(answers)))
        parts = [
            engine.wait(_known(engine, ref), keys, deadline_ns, left.collecting(answers)) for engine in self._engines
        ]

        def end() -> None:
            for end_part in parts:
                end_part()

        return end

    def delete(self, ref: NamespaceRef, keys: bytes, on_done: Callable[[bytes], None]) -> None:
        """See `Engine.delete`."""
        answers: list[bytes] = []
        left = _Countdown(len(self._engines), lambda: on_done(_merged(answers)))
        for engine in self._engines:
            engine.delete(_known(engine, ref), keys, left.collecting(answers))

    def prefetch(self, ref: NamespaceRef, keys: bytes, *, now_ns: int) -> int:
        """See `Engine.prefetch`."""
        return sum(engine.prefetch(_known(engine, ref), keys, now_ns=now_ns) for engine in self._engines)

    # --- reads ------------------------------------------------------------------------------------------------------
    def read(self, spec: ReadSpec, sink: ReadSink, *, now_ns: int) -> ReadHandle:
        """See `Engine.read`."""
        keys = bytes(spec.keys)
        found = [
            engine.match(_known(engine, spec.namespace), keys, now_ns=now_ns, touch=False).statuses
            for engine in self._engines
        ]
        parts = [_Part() for _ in self._engines]
        for item in range(len(keys) // DIGEST_BYTES):
            at = min(range(len(found)), key=lambda drive: _PREFERENCE.get(found[drive][item], 2))
            parts[at].items.append(item)
            parts[at].keys.append(keys[item * DIGEST_BYTES : (item + 1) * DIGEST_BYTES])
        gathered = _Gathered(sink)
        for engine, part in zip(self._engines, parts, strict=True):
            if part.items:
                gathered.begin()
                share = _share_of(spec, part, _known(engine, spec.namespace))
                gathered.handles.append(engine.read(share, _Share(gathered, sink, part.items), now_ns=now_ns))
        gathered.finished()
        return gathered

    def take_cached(self, ref: NamespaceRef, keys: bytes, *, now_ns: int, bytes_max: int) -> None:
        """See `Engine.take_cached`: several drives take the way over `read`."""

    def look_cached(self, digest: bytes, key: bytes, *, now_ns: int) -> None:
        """See `Engine.look_cached`: as `take_cached`."""

    # --- writes -----------------------------------------------------------------------------------------------------
    def open_put(
        self,
        spec: PutSpec,
        on_grant: Callable[[PutTicket | Exists | Refused], None],
        *,
        streaming: bool = False,
    ) -> None:
        """See `Engine.open_put`. A drive that holds the record already (from before one was added) is asked instead of
        the run's: it knows what it takes before Exists may be said."""
        home = self._home(spec.run_head if spec.run_head != ZERO_DIGEST else spec.key)
        for engine in self._engines:
            if engine is not home:
                ref = _known(engine, spec.namespace)
                if engine.match(ref, spec.key, now_ns=engine.now_ns, touch=False).statuses == b"\0":
                    home = engine
                    break
        home.open_put(replace(spec, namespace=_known(home, spec.namespace)), on_grant, streaming=streaming)

    def open_parcels(self, columns: PutColumns, first: int, stop: int) -> Sequence[PutParcel]:
        """See `Engine.open_parcels`: none, since each record has a drive of its own."""
        return ()

    def client_gone(self, client_id: bytes) -> None:
        """See `Engine.client_gone`."""
        for engine in self._engines:
            engine.client_gone(client_id)

    # --- the loop ---------------------------------------------------------------------------------------------------
    def poll(self, now_ns: int) -> None:
        """See `Engine.poll`."""
        for engine in self._engines:
            engine.poll(now_ns)

    def filenos(self) -> Sequence[int]:
        """See `Engine.filenos`."""
        return [fileno for engine in self._engines for fileno in engine.filenos()]

    def next_timer_ns(self) -> int | None:
        """See `Engine.next_timer_ns`."""
        timers = [engine.next_timer_ns() for engine in self._engines]
        return min((timer for timer in timers if timer is not None), default=None)

    # --- inside -----------------------------------------------------------------------------------------------------
    def _hide_dropped(self, namespace_digest: bytes) -> None:
        """A drive that was away when a namespace was dropped still shows what was in it: drop that as well."""
        newest = max(_generation(engine, namespace_digest) for engine in self._engines)
        for engine in self._engines:
            ref = engine.namespace(namespace_digest)
            assert ref is not None, "a namespace is added to every drive"
            raise_generation(engine, ref, newest, lambda: None)

    def _home(self, head: bytes) -> DriveEngine:
        """The drive of a run: the first of its ranking that takes puts, or is to be tried with them. Drives of one
        worker have one capacity, so none weighs more."""
        scores = [digest(b"kvstore.drive.v1", head, name) for name in self._names]
        best = self._engines[scores.index(max(scores))]
        if _may_have_puts(best):
            return best
        ranked = sorted(zip(scores, self._engines, strict=True), key=lambda pair: pair[0], reverse=True)
        return next((engine for _, engine in ranked if _may_have_puts(engine)), best)

    def _add_pin(self, client_id: bytes, pins: Sequence[tuple[Engine, int]]) -> int:
        if len(self._pins) >= PINS_MAX:
            # pins run out by themselves and are forgotten here oldest first; giving back a forgotten one does nothing
            self._pins.pop(next(iter(self._pins)))
        self._last_pin += 1
        self._pins[self._last_pin] = client_id, pins
        return self._last_pin


def _may_have_puts(engine: DriveEngine) -> bool:
    is_tried = engine.store.is_on_trial and engine.health is not DriveHealth.FAILED
    return engine.takes_puts or is_tried


class _Countdown:
    """Calls back when the last of some answers has come."""

    def __init__(self, count: int, on_last: Callable[[], None]) -> None:
        self._left = count
        self._on_last = on_last

    def one(self) -> None:
        """An answer."""
        self._left -= 1
        if not self._left:
            self._on_last()

    def collecting(self, answers: list[bytes]) -> Callable[[bytes], None]:
        """A callback that keeps an answer, then counts it."""

        def collect(answer: bytes) -> None:
            answers.append(answer)
            self.one()

        return collect


def _known(engine: Engine, ref: NamespaceRef) -> NamespaceRef:
    """The drive's own reference to a namespace: every drive knows all of them."""
    own = engine.namespace(ref.digest)
    assert own is not None, "a namespace is added to every drive"
    return own


def _generation(engine: Engine, namespace_digest: bytes) -> int:
    """How often a drive has dropped a namespace, and 1."""
    ref = engine.namespace(namespace_digest)
    assert ref is not None, "a namespace is added to every drive"
    return ref.generation


def _merged(answers: Sequence[bytes]) -> bytes:
    """What several drives say about the same keys, as one status for each."""
    return bytes(min(of_one, key=lambda status: _PREFERENCE.get(status, 2)) for of_one in zip(*answers, strict=True))


def _share_of(spec: ReadSpec, part: _Part, namespace: NamespaceRef) -> ReadSpec:
    """The request for one drive's share of a batch."""
    ranges, content_ids = spec.ranges, spec.content_ids
    if ranges is not None and len(ranges) > 1:
        ranges = [ranges[item] for item in part.items]
    if content_ids is not None:
        content_ids = b"".join(content_ids[item * ID_BYTES : (item + 1) * ID_BYTES] for item in part.items)
    places = spec.places and [spec.places[item] for item in part.items]
    return replace(
        spec,
        namespace=namespace,
        keys=b"".join(part.keys),
        ranges=ranges,
        content_ids=content_ids,
        places=places,
        items=part.items,
    )

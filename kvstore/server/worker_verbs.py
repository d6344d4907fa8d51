"""The worker's end of the admin socket: what `kvstore.server.launch` promises the supervisor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.cluster.view import View
from kvstore.engine.explain import KeyFate
from kvstore.engine.told import raise_generation
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.limits import (
    BATCH_ITEMS_MAX,
    DIGEST_BYTES,
    DROPPED_TOLD_MAX,
    EXPLAIN_KEYS_MAX,
    LEASE_TTL_NS_MAX,
    NAMESPACES_PAGE_MAX,
    PAGE_BYTES,
    SHUTDOWN_NS_MAX,
    TENANTS_MAX,
)
from kvstore.server.drives import Drive, DriveFault
from kvstore.server.tenants import TenantBook
from kvstore.telemetry.metrics import ProcessMetrics
from kvstore.telemetry.process import measure
from kvstore.telemetry.registry import Registry
from kvstore.types.results import MissReason
from kvstore.wire.codec import Plain, pack_plain

log = logging.getLogger(__name__)

Arguments = Mapping[str, Plain]

_FIRST_GENERATION = 1  # of a namespace that was never dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a worker has moved and answered since it started."""

    sent_bytes: int
    received_bytes: int
    lookup_keys: int
    lookup_hits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """How far a draining worker has handed on what it holds.

    Attributes:
        done: there is nothing (more) to hand on.
        handed_on: records that others have been seen to hold.
        left_behind: records that nobody took.
    """

    done: bool
    handed_on: int = 0
    left_behind: int = 0


class WorkerControl(Protocol):
    """What the verbs ask of the worker."""

    @property
    def now_ns(self) -> int:
        """The time of this turn."""

    @property
    def is_draining(self) -> bool:
        """Puts are refused."""

    def drain(self, *, resume: bool) -> None:
        """Refuse puts, or take them again."""

    def handover(self) -> Handover:
        """How far a draining worker has handed on what it holds."""

    def hold_writes(self, *, for_ns: int) -> None:
        """Take puts and deletes for so long."""

    def count_lookup(self, *, key_count: int, hit_count: int) -> None:
        """Take a lookup of the whole node into the hit rate."""

    def moved(self) -> Moved:
        """What it has moved since it started."""

    def shut_down(self, *, within_ns: int) -> None:
        """Finish what is in progress, then end."""

    def end_at_once(self) -> None:
        """The supervisor is gone."""

    def start_failed(self) -> None:
        """The supervisor knows why the start failed: end."""

    def set_view(self, view: View, packed: bytes) -> None:
        """What clients are told of the cluster, and the same as VIEW_REPLY carries it."""

    def set_tenants(self, book: TenantBook) -> None:
        """Who may do what from now on."""

    def set_shares(self, shares: Mapping[str, Mapping[str, int]]) -> None:
        """What tenants may have on each target, of their quotas of the cluster."""

    def set_peer_token(self, token: bytes) -> None:
        """By which nodes of the cluster know each other."""


@dataclass(slots=True)
class Started:
    """What `ready` reports: filled once the worker serves, or with why it cannot."""

    data: Sequence[str] = ()
    boot_id: bytes = b""
    drives: Sequence[Drive] = ()
    faults: Sequence[DriveFault] = ()
    failure: KVStoreError | None = None
    registry: Registry = field(default_factory=Registry)
    process: ProcessMetrics = field(default_factory=ProcessMetrics)


class WorkerVerbs:
    """Implements `kvstore.server.verbs.AdminVerbs`."""

    def __init__(self, started: Started) -> None:
        """
        Args:
            started: Shared with the worker, which fills it.
        """
        self._started = started
        self._worker: WorkerControl | None = None
        self._lost: set[str] = set()
        self._failing: set[str] = set()  # drives whose state was told of
        self._verbs: dict[str, Callable[[Arguments], Plain]] = {
            "ready": self._ready,
            "stats": self._stats,
            "pulse": self._pulse,
            "namespaces": self._namespaces,
            "explain": self._explain,
            "scrub": self._scrub,
            "drain": self._drain,
            "handover": self._handover,
            "hold_writes": self._hold_writes,
            "count_lookup": self._count_lookup,
            "view_set": self._view_set,
            "owner": self._owner,
            "tenants_set": self._tenants_set,
            "peer_token_set": self._peer_token_set,
            "uses": self._uses_by_target,
            "dropped": self._dropped,
            "dropped_set": self._dropped_set,
            "shares_set": self._shares_set,
            "shutdown": self._shutdown,
        }

    def bind(self, worker: WorkerControl) -> None:
        """The worker and its verbs know each other."""
        self._worker = worker

    def carry_out(self, verb: str, arguments: Plain) -> bytes:
        """See `AdminVerbs.carry_out`."""
        act = self._verbs.get(verb)
        if act is None:
            raise InvalidRequest(f"admin verb {verb!r} is unknown; known are {', '.join(self._verbs)}")
        if not isinstance(arguments, Mapping):
            raise InvalidRequest(f"arguments of {verb} are {type(arguments).__name__}; pass a map")
        return pack_plain(act(arguments))

    def supervisor_gone(self) -> None:
        """See `AdminVerbs.supervisor_gone`."""
        self._control.end_at_once()

    @property
    def _control(self) -> WorkerControl:
        assert self._worker is not None, "bind first"
        return self._worker

    def _ready(self, _: Arguments) -> Plain:
        started = self._started
        if started.failure is not None:
            self._control.start_failed()
            raise started.failure
        targets: list[Plain] = [
            {"id": drive.id, "path": drive.path, "capacity_bytes": drive.engine.store.superblock.capacity_bytes}
            for drive in started.drives
        ]
        return {"data": list(started.data), "boot_id": started.boot_id, "targets": targets}

    def _stats(self, _: Arguments) -> Plain:
        started = self._started
        for drive in started.drives:
            drive.engine.update_gauges(self._control.now_ns)
            if drive.loss or not drive.engine.takes_puts:
                drive.engine.device_metrics.healthy = 0
        measure(started.process)
        # a snapshot is plain data: maps of numbers, text and lists
        metrics: dict[str, Plain] = {name: dict(room) for name, room in started.registry.snapshot().items()}
        return {
            "metrics": metrics,
            "state": "draining" if self._control.is_draining else "serving",
            "tenants": self._uses(),
            "drives": self._drives(),
        }

    def _drives(self) -> list[Plain]:
        served: list[Plain] = [drive.describe() for drive in self._started.drives]
        faults: list[Plain] = [
            {"path": fault.path, "id": "", "state": "unusable", "detail": fault.detail}
            for fault in self._started.faults
        ]
        return served + faults

    def _tell_of_losses(self) -> None:
        """Each drive whose file is gone is told of once."""
        for drive in self._started.drives:
            if drive.path not in self._lost and (loss := drive.loss):
                self._lost.add(drive.path)
                log.error("drive %s: %s", drive.path, loss)

    def _tell_of_failures(self) -> None:
        """Each drive that takes no puts any more is told of once, and when all is well with it again."""
        for drive in self._started.drives:
            state, detail = drive.state()
            if not drive.engine.takes_puts and drive.path not in self._failing:
                self._failing.add(drive.path)
                log.error("drive %s takes no puts, it is %s: %s", drive.path, state, detail)
            elif state == "serving" and drive.path in self._failing:
                self._failing.discard(drive.path)
                log.warning("drive %s takes puts again", drive.path)

    def _pulse(self, _: Arguments) -> Plain:
        self._tell_of_losses()
        self._tell_of_failures()
        counts = self._control.moved()
        return {
            "sent_bytes": counts.sent_bytes,
            "received_bytes": counts.received_bytes,
            "lookup_keys": counts.lookup_keys,
            "lookup_hits": counts.lookup_hits,
        }

    def _uses(self) -> list[Plain]:
        """What each tenant has over all drives of this worker, the largest first."""
        found: dict[str, list[int]] = {}
        for drive in self._started.drives:
            for use in drive.engine.uses():
                counts = found.setdefault(use.name, [0, 0, 0])
                for at, count in enumerate((use.pages * PAGE_BYTES, use.records, use.refused_records)):
                    counts[at] += count
        ranked = sorted(found.items(), key=lambda item: item[1], reverse=True)[:TENANTS_MAX]
        return [
            {"name": name, "used_bytes": used_bytes, "records": records, "refused_records": refused}
            for name, (used_bytes, records, refused) in ranked
        ]

    def _namespaces(self, arguments: Arguments) -> Plain:
        after = _bytes(arguments, "after")
        limit = _number(arguments, "limit", NAMESPACES_PAGE_MAX)
        known = {item.ref.digest: item for drive in self._started.drives for item in drive.engine.store.namespaces}
        page = sorted(digest for digest in known if digest > after)[:limit]
        rows: list[Plain] = [
            {
                "digest": digest,
                "generation": known[digest].ref.generation,
                "dropped": known[digest].ref.generation > _FIRST_GENERATION,
                "manifest": known[digest].manifest,
            }
            for digest in page
        ]
        return {"namespaces": rows}

    def _explain(self, arguments: Arguments) -> Plain:
        namespace, keys = _bytes(arguments, "namespace"), _bytes(arguments, "keys")
        if len(keys) % DIGEST_BYTES or len(keys) // DIGEST_BYTES > EXPLAIN_KEYS_MAX:
            raise InvalidRequest(
                f"explain of {len(keys)} bytes of keys; at most {EXPLAIN_KEYS_MAX} keys of {DIGEST_BYTES} bytes"
            )
        answers = []
        for drive in self._started.drives:
            ref = drive.engine.namespace(namespace)
            if ref is not None:
                answers.append(drive.engine.explain(ref, keys))
        # of several drives, the one that knows most of a key speaks for it: a hit, else a reason other than ABSENT
        best = [min(fates, key=_ignorance) for fates in zip(*answers, strict=True)]
        rows: list[Plain] = [{"status": int(fate.status), "text": fate.text, "ago_ns": fate.ago_ns} for fate in best]
        return {"known": bool(answers), "keys": rows}

    def _scrub(self, arguments: Arguments) -> Plain:
        bytes_second = _number(arguments, "bytes_second", 1 << 62)
        started = [drive.engine.store.scrubber.start_round(bytes_second=bytes_second) for drive in self._started.drives]
        return {"started": any(started)}

    def _drain(self, arguments: Arguments) -> Plain:
        self._control.drain(resume=arguments.get("resume") is True)
        return {"draining": self._control.is_draining}

    def _handover(self, _: Arguments) -> Plain:
        handover = self._control.handover()
        return {"done": handover.done, "handed_on": handover.handed_on, "left_behind": handover.left_behind}

    def _hold_writes(self, arguments: Arguments) -> Plain:
        self._control.hold_writes(for_ns=_number(arguments, "for_ns", LEASE_TTL_NS_MAX))
        return {}

    def _count_lookup(self, arguments: Arguments) -> Plain:
        keys = _number(arguments, "keys", BATCH_ITEMS_MAX)
        self._control.count_lookup(key_count=keys, hit_count=_number(arguments, "hits", keys))
        return {}

    def _view_set(self, arguments: Arguments) -> Plain:
        view = View.from_plain(arguments)
        self._control.set_view(view, pack_plain(arguments))
        return {}

    def _owner(self, arguments: Arguments) -> Plain:
        digest = _bytes(arguments, "namespace")
        for drive in self._started.drives:
            ref = drive.engine.namespace(digest)
            if ref is not None:
                return {"tenant": ref.tenant, "manifest": drive.engine.store.namespaces.manifest(digest)}
        return {"tenant": "", "manifest": b""}

    def _tenants_set(self, arguments: Arguments) -> Plain:
        self._control.set_tenants(TenantBook.from_plain(arguments))
        return {}

    def _uses_by_target(self, _: Arguments) -> Plain:
        rows: list[Plain] = []
        for drive in self._started.drives:
            ranked = sorted(drive.engine.uses(), key=lambda use: use.pages, reverse=True)[:TENANTS_MAX]
            rows.append({"id": drive.id, "tenants": {use.name: use.pages * PAGE_BYTES for use in ranked if use.pages}})
        return {"targets": rows}

    def _dropped(self, _: Arguments) -> Plain:
        newest: dict[bytes, int] = {}
        for drive in self._started.drives:
            for known in drive.engine.store.namespaces:
                generation = max(known.ref.generation, newest.get(known.ref.digest, 0))
                if generation > _FIRST_GENERATION:
                    newest[known.ref.digest] = generation
        told = sorted(newest, key=lambda digest: newest[digest], reverse=True)[:DROPPED_TOLD_MAX]
        return {"digests": b"".join(told), "generations": [newest[digest] for digest in told]}

    def _dropped_set(self, arguments: Arguments) -> Plain:
        digests, generations = _bytes(arguments, "digests"), arguments.get("generations")
        if not isinstance(generations, list) or len(digests) != len(generations) * DIGEST_BYTES:
            raise InvalidRequest(f"{len(digests)} bytes of digests do not go with their generations")
        behind: set[bytes] = set()
        for at, generation in enumerate(generations):
            assert isinstance(generation, int), "a worker's own words"
            digest = digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
            for drive in self._started.drives:
                ref = drive.engine.namespace(digest)
                if ref is not None and ref.generation < generation:
                    raise_generation(drive.engine, ref, generation, lambda: None)
                    behind.add(digest)
        return {"count": len(behind)}

    def _shares_set(self, arguments: Arguments) -> Plain:
        shares: dict[str, dict[str, int]] = {}
        for target_id, given in _map(arguments, "shares").items():
            of_target = _map({"share": given}, "share")
            shares[target_id] = {tenant: _number(of_target, tenant, 1 << 63) for tenant in of_target}
        self._control.set_shares(shares)
        return {}

    def _peer_token_set(self, arguments: Arguments) -> Plain:
        self._control.set_peer_token(_bytes(arguments, "token"))
        return {}

    def _shutdown(self, arguments: Arguments) -> Plain:
        self._control.shut_down(within_ns=_number(arguments, "within_ns", SHUTDOWN_NS_MAX))
        return {}


def _ignorance(fate: KeyFate) -> tuple[bool, bool, int]:
    """How little a drive knows of a key."""
    return fate.status != 0, fate.status == MissReason.ABSENT, fate.status


def _number(arguments: Arguments, name: str, limit: int) -> int:
    value = arguments.get(name)
    if type(value) is not int or not 0 <= value <= limit:
        raise InvalidRequest(f"{name} is {value!r:.80}; it must be a number from 0 to {limit}")
    return value


def _map(arguments: Arguments, name: str) -> Mapping[str, Plain]:
    value = arguments.get(name)
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} is {type(value).__name__}; it must be a map")
    return value


def _bytes(arguments: Arguments, name: str) -> bytes:
    value = arguments.get(name)
    if not isinstance(value, bytes):
        raise InvalidRequest(f"{name} is {type(value).__name__}; it must be bytes")
    return value

"""The store of one drive, assembled: disk side, memory side, and the one clock that both are told of.

`api.py` is what callers rely on. Everything runs on the thread that calls; nothing blocks but `open` and `close`.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.device.base import Device
from kvstore.device.health import DriveHealth
from kvstore.device.probe import open_device
from kvstore.device.queue import DispatchQueue
from kvstore.engine.api import (
    MatchOutcome,
    NamespaceRef,
    PutColumns,
    PutParcel,
    PutSpec,
    PutTicket,
    ReadHandle,
    ReadSink,
    ReadSpec,
)
from kvstore.engine.arena import Arena
from kvstore.engine.cache import Cache, CachedRecord, HeaderLru
from kvstore.engine.catalog import Catalog
from kvstore.engine.discard import Discard
from kvstore.engine.drive import data_file, is_block_device, prepare_drive
from kvstore.engine.estimate import DayMeter, LoadEstimator
from kvstore.engine.explain import KeyFate, fate_of
from kvstore.engine.glance import Glance
from kvstore.engine.history_file import HISTORY_FILE, HistoryFile
from kvstore.engine.hooks import Hooks
from kvstore.engine.identity import NO_CLUSTER, refuse_foreign_file
from kvstore.engine.loads import Loader
from kvstore.engine.location import location_page_counts
from kvstore.engine.misses import Misses
from kvstore.engine.namespaces import index_key, index_keys
from kvstore.engine.parcels import Parcels
from kvstore.engine.pins import Pins
from kvstore.engine.policy import TickClock
from kvstore.engine.reader import Reader
from kvstore.engine.store import RecoveryReport, Store
from kvstore.engine.usage import TenantUse
from kvstore.engine.volatile import VolatilePuts
from kvstore.engine.waits import Waits
from kvstore.engine.warming import Warming
from kvstore.errors import InvalidRequest
from kvstore.limits import (
    CACHE_BYTES_DEFAULT,
    DIGEST_BYTES,
    HEADERS_BYTES_MAX,
    INDEX_ENTRIES_MAX,
    PAGE_BYTES,
    QUEUE_DEPTH_DEFAULT,
    REQUEST_NS_MAX,
    SECOND_NS,
    STAGING_BYTES_DEFAULT,
    WRITE_AMPLIFICATION_DEFAULT,
)
from kvstore.telemetry.metrics import DeviceMetrics, EngineMetrics
from kvstore.types.flow import FlowClass
from kvstore.types.results import Exists, MissReason, Refused

_RECORD_PAGES_MIN: Final = 1  # a record of no bytes is its header page


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How one drive is run.

    Attributes:
        capacity_bytes: of a new store, or to change to; 0 takes the device's size.
        segment_bytes: of a new store; 0 chooses by the capacity.
        cache_bytes: RAM for hot records; 0 turns the cache off.
        staging_bytes: RAM for transfers in progress.
        second_touch: cache a record that was read only at its second read.
        amplification_max: bound of bytes written over bytes put.
        endurance_bytes_day: what the drive is rated for, shown beside what is written; 0 is not set.
        device, queue_depth: see `kvstore.device.probe.open_device`.
        cluster_id: whose the drive is, 16 bytes; zeros are nobody's.
        prefault: touch all RAM at start.
        warming: a thread touches it instead, while requests are served.
    """

    capacity_bytes: int = 0
    segment_bytes: int = 0
    cache_bytes: int = CACHE_BYTES_DEFAULT
    staging_bytes: int = STAGING_BYTES_DEFAULT
    second_touch: bool = False
    amplification_max: float = WRITE_AMPLIFICATION_DEFAULT
    endurance_bytes_day: int = 0
    device: str = "auto"
    queue_depth: int = QUEUE_DEPTH_DEFAULT
    cluster_id: bytes = NO_CLUSTER
    prefault: bool = True
    warming: bool = False


class DriveEngine:
    """Implements `kvstore.engine.api.Engine` on one drive.

    Attributes:
        metrics, device_metrics: numbers; `update_gauges` brings the gauges among them up to date.
        recovered: what the start found.
        store, cache, catalog: its parts, for tools and tests.
    """

    def __init__(
        self,
        device: Device,
        settings: EngineSettings,
        *,
        name: str = "drive",
        now_ns: int,
        metrics: EngineMetrics | None = None,
        device_metrics: DeviceMetrics | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        history_path: Path | None = None,
    ) -> None:
        """Recover what is on the drive, or make a store on an empty one. Takes over the device.

        Raises:
            InvalidRequest, FormatUnsupported, Unavailable: as `drive.prepare_drive`.
            OSError: the drive cannot be read.
        """
        self.settings = settings
        self.device = device
        self.metrics = metrics or EngineMetrics()
        self.device_metrics = device_metrics or DeviceMetrics()
        superblock = prepare_drive(
            device,
            name=name,
            capacity_bytes=settings.capacity_bytes,
            segment_bytes=settings.segment_bytes,
            cluster_id=settings.cluster_id,
            metrics=self.metrics,
        )
        self._queue = DispatchQueue(device, settings.queue_depth, metrics=self.device_metrics)
        arena = Arena(
            settings.cache_bytes + settings.staging_bytes, prefault=settings.prefault and not settings.warming
        )
        if not settings.warming:
            device.register(arena.memory)
        self.cache = Cache(
            arena, capacity_bytes=settings.cache_bytes, second_touch=settings.second_touch, metrics=self.metrics
        )
        entries_max = superblock.capacity_bytes // (_RECORD_PAGES_MIN * PAGE_BYTES)
        self.catalog = Catalog(entries_max=min(entries_max, INDEX_ENTRIES_MAX), segment_count=superblock.segment_count)
        self._history_file = HistoryFile(history_path, self.catalog.history, disk_id=superblock.disk_id)
        self._memory = Hooks(self.cache, self.catalog)
        self.store = Store(
            queue=self._queue,
            superblock=superblock,
            arena=arena,
            catalog=self.catalog,
            memory=self._memory,
            metrics=self.metrics,
            amplification_max=settings.amplification_max,
            on_progress=on_progress,
        )
        self._ledger = self.store.ledger
        self._namespaces = self.store.namespaces
        self._pending = self.store.writer.pending
        self.estimator = LoadEstimator()
        self._loader = Loader(
            queue=self._queue,
            table=self.store.table,
            catalog=self.catalog,
            cache=self.cache,
            headers=HeaderLru(bytes_max=HEADERS_BYTES_MAX),
            metrics=self.metrics,
            is_current=self._namespaces.is_current,
            quarantine=self._quarantine,
        )
        self._reader = Reader(
            catalog=self.catalog,
            namespaces=self._namespaces,
            cache=self.cache,
            table=self.store.table,
            loader=self._loader,
            parcels=Parcels(
                queue=self._queue,
                table=self.store.table,
                catalog=self.catalog,
                cache=self.cache,
                loader=self._loader,
                metrics=self.metrics,
            ),
            pending=self._pending,
            metrics=self.metrics,
            estimator=self.estimator,
            start=self._queue.start,
        )
        self._glance = Glance(
            catalog=self.catalog,
            namespaces=self._namespaces,
            cache=self.cache,
            metrics=self.metrics,
            estimator=self.estimator,
        )
        self._volatile = VolatilePuts(self.cache, self.metrics)
        self._pins = Pins(self.catalog, capacity_bytes=superblock.capacity_bytes)
        self._waits = Waits(self._pending)
        self._misses = Misses(catalog=self.catalog, pending=self._pending, cache=self.cache)
        self._day = DayMeter(now_ns)
        self._closed = False
        last_tick = max(self.store.recovered.tick_max, self._history_file.tick)
        self._clock = TickClock(now_ns=now_ns, last_tick=last_tick)
        self._turn(now_ns)
        self._warming = Warming(arena, device) if settings.warming else None

    @classmethod
    def open(
        cls,
        path: str | Path,
        settings: EngineSettings,
        *,
        now_ns: int,
        metrics: EngineMetrics | None = None,
        device_metrics: DeviceMetrics | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> DriveEngine:
        """Open the store in a folder (its file is DATA_FILE), in a file, or on a block device.

        Raises:
            InvalidRequest, FormatUnsupported, Unavailable: what is wrong, and the fix.
        """
        file = data_file(path)
        refuse_foreign_file(file)  # the device would make it larger
        numbers = device_metrics or DeviceMetrics()
        device = open_device(
            file,
            size_bytes=0 if is_block_device(file) else settings.capacity_bytes // PAGE_BYTES * PAGE_BYTES,
            mode=settings.device,
            depth=settings.queue_depth,
            metrics=numbers,
        )
        try:
            return cls(
                device,
                settings,
                name=str(file),
                now_ns=now_ns,
                metrics=metrics,
                device_metrics=numbers,
                on_progress=on_progress,
                history_path=Path(path) / HISTORY_FILE if Path(path).is_dir() else None,
            )
        except BaseException:
            device.close()
            raise

    @property
    def recovered(self) -> RecoveryReport:
        """What the start found."""
        return self.store.recovered

    # --- namespaces ---------------------------------------------------------------------------------------------------
    def namespace(self, digest: bytes) -> NamespaceRef | None:
        """See `api.Engine.namespace`."""
        return self._namespaces.by_digest(digest)

    def add_namespace(self, manifest: bytes, *, copies: int = 0) -> NamespaceRef:
        """See `api.Engine.add_namespace`."""
        return self._ledger.add_namespace(manifest, copies=copies)

    def drop_namespace(self, ref: NamespaceRef, on_done: Callable[[], None], *, generation: int = 0) -> None:
        """See `api.Engine`. If the log cannot be written `on_done` never comes: nobody knows what a restart finds."""
        current = self._namespaces.by_id(ref.id)
        if current is not None and 0 < generation <= current.generation:
            on_done()
            return
        self.cache.forget_namespace(ref.salt)
        if current is not None:
            self.cache.forget_namespace(current.salt)
        self._ledger.drop_namespace(ref, lambda error: on_done() if error is None else None, generation=generation)

    # --- looking ------------------------------------------------------------------------------------------------------
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
        """See `api.Engine.match`. What lies behind the first miss is not touched, so it ages; all hits are pinned."""
        _check_keys(keys)
        self._turn(now_ns)
        if not self._namespaces.is_current(ref):
            absent = bytes([MissReason.ABSENT]) * (len(keys) // DIGEST_BYTES)
            return MatchOutcome(statuses=absent, pin_id=0, pinned=False, hit_bytes=0, load_ns=0)
        wanted = index_keys(ref, keys)
        slots = self.catalog.index.find_many(wanted)
        missing = np.flatnonzero(slots < 0)
        hits = slots if not len(missing) else slots[slots >= 0]
        if touch and len(hits):
            prefix = slots if not len(missing) else slots[: missing[0]]
            self.catalog.touch_slots(prefix, self._tick)
        pin_id = 0
        if pin_ttl_ns and len(hits):
            pin_id = self._pins.pin(hits, client_id=client_id, now_ns=now_ns, ttl_ns=pin_ttl_ns)
            self.metrics.pins_refused += not pin_id
        hit_bytes = int(location_page_counts(self.catalog.index.locations[hits]).sum()) * PAGE_BYTES
        return MatchOutcome(
            statuses=self._misses.statuses(ref, keys, wanted, missing, now_ns=self.now_ns),
            pin_id=pin_id,
            pinned=bool(pin_id),
            hit_bytes=hit_bytes,
            load_ns=self.estimator.load_ns(hit_bytes),
        )

    def touch(self, ref: NamespaceRef, keys: bytes | memoryview, *, now_ns: int) -> None:
        """An access of those of n * 32 bytes of record keys that are here: `match` of several drives in two steps."""
        _check_keys(keys)
        self._turn(now_ns)
        if keys and self._namespaces.is_current(ref):
            self.catalog.touch_records(ref, keys, self._tick)

    def unpin(self, pin_id: int, *, client_id: bytes) -> None:
        """See `api.Engine`."""
        self._pins.unpin(pin_id, client_id=client_id)

    def _volatile_left_ns(self, ref: NamespaceRef, key: bytes) -> int:
        record = self.cache.find(ref.salt, key)
        return max(record.until_ns - self.now_ns, 0) if record is not None else 0

    def explain(self, ref: NamespaceRef, keys: bytes) -> list[KeyFate]:
        """What became of each key, for people.

        Args:
            keys: n * 32 bytes of record keys.
        """
        _check_keys(keys)
        return [self._explain(ref, keys[at : at + DIGEST_BYTES]) for at in range(0, len(keys), DIGEST_BYTES)]

    def _explain(self, ref: NamespaceRef, key: bytes) -> KeyFate:
        key16 = index_key(ref, key)
        ticket = self._pending.get(key16)
        return fate_of(
            self.catalog,
            key16,
            tick=self._tick,
            left_ns=self._volatile_left_ns(ref, key),
            received=ticket.received if ticket is not None else None,
        )

    # --- reading ------------------------------------------------------------------------------------------------------
    def read(self, spec: ReadSpec, sink: ReadSink, *, now_ns: int) -> ReadHandle:
        """See `api.Engine.read`. Raises InvalidRequest for keys, ranges or content ids that do not fit together."""
        self._turn(now_ns)
        return self._reader.read(spec, sink)

    def take_cached(
        self, ref: NamespaceRef, keys: bytes, *, now_ns: int, bytes_max: int
    ) -> Sequence[CachedRecord] | None:
        """See `api.Engine.take_cached`."""
        self._turn(now_ns)
        return self._reader.take_cached(ref, keys, bytes_max)

    def look_cached(self, digest: bytes, key: bytes, *, now_ns: int) -> CachedRecord | None:
        """See `api.Engine.look_cached`."""
        if self._clock.tick(now_ns) != self._tick:
            self._turn(now_ns)
        return self._glance.record(digest, key, now_ns, self._tick)

    def prefetch(self, ref: NamespaceRef, keys: bytes | memoryview, *, now_ns: int) -> int:
        """Read records into the RAM cache. Answers how many are stored and were not there; 0 without a cache."""
        _check_keys(keys)
        self._turn(now_ns)
        if not self.cache.capacity_bytes or not self._namespaces.is_current(ref):
            return 0
        space = self.cache.space(ref.salt) or {}
        blob = bytes(keys)
        cold = [key for key in _each(blob) if key not in space]
        there = np.flatnonzero(self.catalog.lookup(index_keys(ref, b"".join(cold)))).tolist()
        wanted = b"".join([cold[at] for at in there])
        if wanted:
            spec = ReadSpec(namespace=ref, keys=wanted, flow=FlowClass.PREFETCH, deadline_ns=now_ns + _PREFETCH_NS)
            self._reader.read(spec, Discard(), force_cache=True)
        return len(there)

    # --- writing ------------------------------------------------------------------------------------------------------
    def open_put(
        self,
        spec: PutSpec,
        on_grant: Callable[[PutTicket | Exists | Refused], None],
        *,
        streaming: bool = False,
    ) -> None:
        """See `api.Engine.open_put`."""
        if spec.volatile_ttl_ns and not self.store.writer.draining:
            self._volatile.open_put(spec, on_grant, streaming=streaming)
        else:
            self.store.writer.open_put(spec, on_grant, streaming=streaming)

    def open_parcels(self, columns: PutColumns, first: int, stop: int) -> Sequence[PutParcel]:
        """See `api.Engine.open_parcels`."""
        return self.store.writer.open_parcels(columns, first, stop)

    def wait(
        self, ref: NamespaceRef, keys: bytes, deadline_ns: int, on_done: Callable[[bytes], None]
    ) -> Callable[[], None]:
        """See `api.Engine.wait`."""
        _check_keys(keys)

        def done() -> None:
            wanted = index_keys(ref, keys)
            missing = np.flatnonzero(self.catalog.lookup(wanted) == 0)
            on_done(self._misses.statuses(ref, keys, wanted, missing, now_ns=self.now_ns))

        return self._waits.add([index_key(ref, key) for key in _each(keys)], deadline_ns, done)

    def delete(self, ref: NamespaceRef, keys: bytes, on_done: Callable[[bytes], None]) -> None:
        """See `api.Engine.delete`."""
        _check_keys(keys)
        received = self._received(ref, keys)
        if received:
            # Their owners may have been told so: once they have become valid, a tombstone reaches them.
            self._waits.add(received, self.now_ns + REQUEST_NS_MAX, lambda: self.delete(ref, keys, on_done))
            return
        in_memory: list[int] = []
        if self.cache.volatile_count:
            for at, key in enumerate(_each(keys)):
                if self._volatile_left_ns(ref, key):
                    self.cache.forget(ref.salt, key)
                    in_memory.append(at)

        def done(statuses: bytes) -> None:
            merged = bytearray(statuses)
            for at in in_memory:
                merged[at] = 0
            on_done(bytes(merged))

        self._ledger.delete(ref, index_keys(ref, keys), done if in_memory else on_done)

    def _received(self, ref: NamespaceRef, keys: bytes) -> list[bytes]:
        """Index keys of those among `keys` whose puts have come whole and are on their way to the drive."""
        under_way = self._pending.received()
        return list(under_way.intersection(index_key(ref, key) for key in _each(keys))) if under_way else []

    def _quarantine(self, ref: NamespaceRef, key: bytes, location: int) -> None:
        count = self._ledger.quarantine(ref, index_keys(ref, key), np.array([location], dtype=np.uint64))
        self.metrics.quarantined_records += count

    # --- time ---------------------------------------------------------------------------------------------------------
    def client_gone(self, client_id: bytes) -> None:
        """See `api.Engine.client_gone`."""
        self._pins.client_gone(client_id)
        self._volatile.client_gone(client_id)
        self.store.writer.client_gone(client_id)

    def poll(self, now_ns: int) -> None:
        """See `api.Engine.poll`."""
        if self._warming is not None:
            self._warm()
        self._turn(now_ns)
        self.store.poll(now_ns)
        self._memory.touch_ancestors()
        self._reader.expire(now_ns)
        self._reader.pump()
        self.estimator.observe(
            read_bytes=self.device_metrics.read_bytes, busy=self._loader.operations > 0, now_ns=now_ns
        )
        self.cache.expire(now_ns)
        self._pins.expire(now_ns)
        self._waits.check(now_ns)
        if not self.store.log.idle:  # a delete that waited for a put: nothing else may wake us for a while
            self.store.log.pump()
            self._queue.start()

    def _warm(self) -> None:
        assert self._warming is not None
        self._warming.poll()
        if self._warming.done:
            self._warming = None

    def _turn(self, now_ns: int) -> None:
        """Everybody's idea of the time."""
        self.now_ns = now_ns
        tick = self._tick = self._clock.tick(now_ns)
        self._ledger.tick = self._memory.tick = self._loader.tick = self._reader.tick = self._volatile.tick = tick
        self._reader.now_ns = self._volatile.now_ns = now_ns

    def filenos(self) -> Sequence[int]:
        """See `api.Engine.filenos`."""
        return (self._queue.fileno(),)

    def next_timer_ns(self) -> int | None:
        """See `api.Engine.next_timer_ns`."""
        times = (
            self.store.next_timer_ns(),
            self._reader.next_timer_ns(),
            self.cache.next_expiry_ns(),
            self._pins.next_expiry_ns(),
            self._waits.next_deadline_ns(),
        )
        due = [due_ns for due_ns in times if due_ns is not None]
        return min(due) if due else None

    def update_gauges(self, now_ns: int) -> None:
        """Bring the gauges among the metrics up to date; call before they are sent."""
        self._history_file.poll(now_ns, self._tick)
        self.store.update_gauges()
        self._queue.update_gauges()
        metrics, cache, catalog = self.metrics, self.cache, self.catalog
        metrics.records = catalog.scores.record_count
        metrics.index_bytes = catalog.index.memory_bytes
        metrics.cache_bytes = cache.used_bytes
        metrics.cache_capacity_bytes = cache.capacity_bytes
        metrics.staging_bytes = max(cache.arena.used_bytes - cache.used_bytes, 0)
        metrics.pins = self._pins.by_age(now_ns)
        metrics.pinned_bytes = catalog.pinned_bytes
        evicted_tick = catalog.evicted_tick
        metrics.eviction_age_ns = TickClock.age_ns(int(self._tick - evicted_tick)) if evicted_tick else 0
        written = metrics.written_bytes + metrics.reinserted_bytes + metrics.log_bytes
        metrics.written_bytes_day = self._day.last_day(written, now_ns)
        metrics.endurance_bytes_day = self.settings.endurance_bytes_day

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """What each tenant may have on this drive, in padded bytes; one that is not named has no bound."""
        self._ledger.usage.set_quotas(quotas)

    def uses(self) -> list[TenantUse]:
        """What each tenant has on this drive."""
        return list(self._ledger.usage)

    def drain(self) -> None:
        """Take no new puts; those in progress go on."""
        self.store.writer.draining = True

    def resume(self) -> None:
        """Take puts again."""
        self.store.writer.draining = False

    @property
    def health(self) -> DriveHealth:
        """How the drive has behaved."""
        return self._queue.health.health

    @property
    def health_reason(self) -> str:
        """What last changed its health, "" where nothing did."""
        transitions = self._queue.health.transitions
        return transitions[-1].reason if transitions else ""

    @property
    def takes_puts(self) -> bool:
        """Whether the drive may be trusted with what is new."""
        return self._queue.health.health is not DriveHealth.FAILED and not self.store.write_fault

    @property
    def idle(self) -> bool:
        """Nothing is on its way to or from the drive."""
        return self.store.idle and not self._loader.operations

    def close(self, *, within_ns: int = 10 * SECOND_NS) -> None:
        """Finish what is on its way to the drive, for at most so long, and close it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._warming is not None:
            self._warming.stop()
        self.drain()
        deadline_ns = time.monotonic_ns() + within_ns
        ready = select.poll()
        ready.register(self._queue.fileno(), select.POLLIN)
        while not self.idle and time.monotonic_ns() < deadline_ns:
            ready.poll(_CLOSE_TURN_MS)
            self.poll(time.monotonic_ns())
        self._history_file.close(self._tick, within_s=1.0)
        self.device.close()


_PREFETCH_NS: Final = 60 * SECOND_NS
_CLOSE_TURN_MS: Final = 10


def _each(keys: bytes) -> list[bytes]:
    return [keys[at : at + DIGEST_BYTES] for at in range(0, len(keys), DIGEST_BYTES)]


def _check_keys(keys: bytes | memoryview) -> None:
    if len(keys) % DIGEST_BYTES:
        raise InvalidRequest(f"{len(keys)} bytes of record keys; each key has {DIGEST_BYTES} bytes")

"""The node dies after any device operation; what the next start finds is compared with a model.

One seeded run makes hundreds of crashes on one drive: a random load runs for a few operations, one completing at a
time, the node dies, the store is opened again on what survived, and every key is read.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.device.memory import MemoryDevice
from kvstore.engine import job
from kvstore.engine.api import Durability, NamespaceRef, PutSpec, PutTicket
from kvstore.engine.location import U64
from kvstore.engine.namespaces import index_key, index_keys
from kvstore.limits import KiB, MiB
from kvstore.testing.faulty_device import FaultyDevice, Survival
from kvstore.testing.store_rig import DEADLINE_NS, StoreRig
from kvstore.types.checksum import crc_table
from kvstore.types.flow import FlowClass
from kvstore.types.results import Exists, Refused, Stored

KEYS = 120
BLOCK = 4 * KiB
ABSENT = b"<absent>"
KEY_LIST = [random.Random(number).randbytes(32) for number in range(KEYS)]


class Model:
    """For each key, the payloads that a read may give; ABSENT is one of them."""

    def __init__(self, *, power_cut: bool) -> None:
        self.possible: dict[bytes, set[bytes]] = {}
        self.was_there: set[tuple[bytes, bytes]] = set()
        self.power_cut = power_cut
        self.busy: set[bytes] = set()

    def of(self, key: bytes) -> set[bytes]:
        return self.possible.setdefault(key, {ABSENT})

    def begun(self, key: bytes, payload: bytes) -> None:
        self.busy.add(key)
        self.of(key).add(payload)

    def stored(self, key: bytes, payload: bytes, durability: Durability) -> None:
        self.busy.discard(key)
        self.was_there.add((key, payload))
        if self.power_cut and durability is Durability.COMMIT:
            return  # it may be gone after a power cut, and what it replaced may be back, unless that was deleted
        self.possible[key] = {payload}

    def not_stored(self, key: bytes, payload: bytes) -> None:
        self.busy.discard(key)
        self.of(key).discard(payload)

    def deleting(self, key: bytes) -> None:
        self.busy.add(key)
        self.of(key).add(ABSENT)

    def deleted(self, key: bytes) -> None:
        self.busy.discard(key)
        self.possible[key] = {ABSENT}

    def evicted(self, key: bytes) -> None:
        self.of(key).add(ABSENT)

    def crashed(self) -> None:
        self.busy.clear()

    def observe(self, key: bytes, found: bytes | None) -> None:
        value = ABSENT if found is None else found
        assert value in self.of(key), f"key {key.hex()[:8]} has a value that it never may have"
        if found is not None:
            self.was_there.add((key, found))

    def narrow(self, key: bytes, found: bytes | None) -> None:
        """Nothing is in progress, and this is what is there.

        A record that was evicted may be back after a crash, if eviction had left an older copy of it: those are the
        right bytes. One that was never complete, or was deleted, may not.
        """
        if found is not None:
            self.possible[key] = {found}
        else:
            self.possible[key] = {ABSENT} | {value for value in self.of(key) if (key, value) in self.was_there}


class Load:
    """Random verbs against a rig, told to the model."""

    def __init__(self, rig: CrashRig, ref: NamespaceRef, model: Model, rng: random.Random) -> None:
        self.rig = rig
        self.ref = ref
        self.model = model
        self.rng = rng
        self.key_of16 = {index_key(ref, key): key for key in KEY_LIST}
        rig.memory.removed = self.removed  # type: ignore[method-assign]

    def removed(self, keys: U64, locations: U64) -> None:
        for pair in keys:
            self.model.evicted(self.key_of16[pair.tobytes()])

    def step(self) -> None:
        key = self.rng.choice(KEY_LIST)
        if key in self.model.busy:
            return
        kind = self.rng.random()
        if kind < 0.02:
            self.rig.store.log.checkpoint()
        elif kind < 0.04:
            self.roll()
        elif kind < 0.06:
            self.evict()
        elif kind < 0.2:
            self.delete(key)
        elif kind < 0.35:
            self.stream(key)
        elif kind < 0.5:
            self.parcel()
        else:
            self.put(key)

    def roll(self) -> None:
        """Go on in another segment, as if this one were full."""
        if self.rig.store.allocator.free_count() > 1:
            self.rig.store.appender.open_segment()

    def evict(self) -> None:
        """Evict a segment, as if room were short; what was touched lately is written again."""
        reclaimer = self.rig.store.reclaimer
        victim = reclaimer.choose()
        if victim is None or reclaimer.running:
            return
        self.rig.ledger.tick += 1
        touched = b"".join(self.rng.sample(KEY_LIST, KEYS // 2))
        self.rig.catalog.touch_keys(index_keys(self.ref, touched), self.rig.ledger.tick)
        job.start(reclaimer.evict(victim))

    def put(self, key: bytes) -> None:
        payload = self.rng.randbytes(self.rng.choice((0, 1, 4096, 20_000, 60_000)))
        durability = self.rng.choice(tuple(Durability))
        if self.rig.location(self.ref, key):
            return
        self.model.begun(key, payload)
        result = self.rig.begin_put(self.ref, key, payload, block_bytes=BLOCK, durability=durability)
        self.when(result.outcomes, key, payload, durability)

    def parcel(self) -> None:
        """Records of one shape, put together."""
        idle = [key for key in KEY_LIST if key not in self.model.busy and not self.rig.location(self.ref, key)]
        keys = self.rng.sample(idle, min(len(idle), self.rng.randrange(1, 12)))
        length = self.rng.choice((1, 4096, 20_000, 60_000))
        payloads = [self.rng.randbytes(length) for _ in keys]
        begun = self.rig.begin_parcels(self.rig.columns(self.ref, keys, length, block_bytes=BLOCK), payloads)
        for index, outcomes in begun.items():
            self.model.begun(keys[index], payloads[index])
            self.when(outcomes, keys[index], payloads[index], Durability.COMMIT)

    def when(self, outcomes: list[Any], key: bytes, payload: bytes, durability: Durability) -> None:
        """Tell the model as soon as the outcome is there: it may be already, or `append` brings it."""
        model = self.model

        class Told(list):  # type: ignore[type-arg]
            def append(self, outcome: object) -> None:
                if isinstance(outcome, Stored | bytes):
                    model.stored(key, payload, durability)
                elif isinstance(outcome, Exists | Refused):
                    model.not_stored(key, payload)

        told = Told()
        for outcome in outcomes:
            told.append(outcome)
        self.rig.listeners.append((outcomes, told))

    def stream(self, key: bytes) -> None:
        payload = self.rng.randbytes(self.rng.choice((100, 5_000, 8_192, 30_000)))
        block = self.rng.choice((4 * KiB, 5_000))
        durability = self.rng.choice(tuple(Durability))
        if self.rig.location(self.ref, key):
            return
        self.model.begun(key, payload)
        outcomes: list[object] = []
        rng, gives_up = self.rng, self.rng.random() < 0.2
        spec = PutSpec(
            namespace=self.ref,
            key=key,
            payload_bytes=len(payload),
            block_bytes=block,
            crc_table=None,
            flow=FlowClass.WRITEBACK,
            deadline_ns=DEADLINE_NS,
            client_id=b"stream",
            durability=durability,
        )

        def granted(answer: PutTicket | Exists | Refused) -> None:
            if isinstance(answer, Exists | Refused):
                outcomes.append(answer)
                return
            starts = list(range(0, len(payload), block))
            rng.shuffle(starts)
            for start in starts[: 1 if gives_up else None]:
                piece = payload[start : start + block]
                answer.slice_buffer(len(piece), fill(answer, start, piece))
            if gives_up:
                answer.abort()
                outcomes.append(Refused(0))  # type: ignore[arg-type]
            else:
                answer.commit(crc_table=crc_table(payload, block), on_done=outcomes.append)

        def fill(ticket: PutTicket, start: int, piece: bytes) -> Callable[[memoryview | None], None]:
            def memory(data: memoryview | None) -> None:
                assert data is not None
                data[:] = piece
                ticket.slice_filled(start, data, crc_table(piece, block))

            return memory

        self.rig.store.writer.open_put(spec, granted, streaming=True)
        self.when(outcomes, key, payload, durability)

    def delete(self, key: bytes) -> None:
        if not self.rig.location(self.ref, key):
            return
        self.model.deleting(key)
        self.rig.ledger.delete(self.ref, index_keys(self.ref, key), lambda statuses: self.model.deleted(key))


class CrashRig(StoreRig):
    """Its listeners hear of outcomes after each turn."""

    def __init__(self, device: FaultyDevice, **options: object) -> None:
        self.listeners: list[tuple[list[Any], list[Any]]] = []
        super().__init__(device, **options)  # type: ignore[arg-type]

    def poll(self) -> None:
        super().poll()
        waiting = []
        for outcomes, told in self.listeners:
            for outcome in outcomes:
                told.append(outcome)
            if not outcomes:
                waiting.append((outcomes, told))
        self.listeners = waiting


def calm(rig: CrashRig, load: Load, rng: random.Random) -> None:
    """Some load that comes to rest and is synced: from then on only one value of each key is possible."""
    for _ in range(rng.choice((20, 80))):
        load.step()
        rig.poll()
    rig.settle()
    synced: list[object] = []
    rig.store._syncer.sync(synced.append)
    rig.settle(lambda: bool(synced))
    rig.poll()
    for key in KEY_LIST:
        found = rig.get(load.ref, key)
        load.model.observe(key, found)
        load.model.narrow(key, found)


def crash_run(seed: int, survival: Survival, *, crashes: int) -> int:
    """Answers how many records were found in all."""
    rng = random.Random(seed)
    power_cut = survival is not Survival.ALL
    device = FaultyDevice(MemoryDevice(size_bytes=6 * MiB), seed=seed, shuffle=True, remember_unsynced=power_cut)
    rig = CrashRig(device, arena_bytes=2 * MiB)
    ref = rig.namespace()
    rig.settle()
    model = Model(power_cut=power_cut)
    seen = evictions = moves = 0
    for _ in range(crashes):
        load = Load(rig, ref, model, rng)
        if rng.random() < 0.4:
            calm(rig, load, rng)
        device.hold()
        for _ in range(rng.choice((3, 10, 40, 120))):
            if rng.random() < 0.6:
                load.step()
            device.release(rng.choice((1, 1, 1, 2, 5)))
            rig.poll()
        evictions += rig.metrics.evicted_segments
        moves += rig.memory.moved_count
        device = device.crash(survival)
        model.crashed()
        rig = CrashRig(device, arena_bytes=2 * MiB, now_ns=rig.now_ns)
        assert rig.store.namespaces.by_digest(ref.digest) == ref
        for key in KEY_LIST:
            found = rig.get(ref, key)
            model.observe(key, found)
            seen += found is not None
            if not power_cut:
                model.narrow(key, found)
        rig.check_accounts()
        if not power_cut:
            assert rig.recount_bytes() == rig.ledger.live_bytes
    assert evictions
    assert moves
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_kill_at_any_operation_loses_nothing_that_was_acknowledged(seed: int) -> None:
    assert crash_run(seed, Survival.ALL, crashes=60) > 500


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("survival", [Survival.NONE, Survival.SOME])
def test_a_power_cut_at_any_operation_never_gives_a_wrong_byte(seed: int, survival: Survival) -> None:
    assert crash_run(seed, survival, crashes=40) > 100


def test_what_was_deleted_stays_away_though_an_erased_segment_comes_back() -> None:
    """A segment erased but not synced came back with a power cut, when the checkpoint had let its tombstones go."""
    assert crash_run(106, Survival.SOME, crashes=125) > 100


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("survival", list(Survival))
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_more_crashes(seed: int, survival: Survival) -> None:
    assert crash_run(seed, survival, crashes=200) > 100

"""Records put in parcels end as the same records put one by one: in memory, on the drive and after a restart."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.device.base import IoKind
from kvstore.device.memory import MemoryDevice
from kvstore.engine.api import NamespaceRef, PutColumns, PutTicket
from kvstore.engine.put import Put
from kvstore.engine.put_parcel import GrantedParcel
from kvstore.engine.writer import parcel_sizes
from kvstore.errors import ChecksumMismatch
from kvstore.limits import PAGE_BYTES, PUT_PARCEL_BYTES, PUT_PARCEL_ENDS_BYTES, PUT_PARCEL_RECORDS_MAX, KiB, MiB
from kvstore.testing.faulty_device import Fault, FaultAction, FaultyDevice
from kvstore.testing.store_rig import StoreRig, parcel_ended
from kvstore.types.checksum import crc_table
from kvstore.types.results import Exists, Refused, RefusedReason, Stored


def key_of(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def payload_of(number: int, length: int) -> bytes:
    return random.Random(-1 - number).randbytes(length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What is put: records of one shape, some of which arrive wrong or not at all."""

    length: int
    block: int
    count: int
    in_chain: bool
    wrong: frozenset[int]
    missing: frozenset[int]
    order: tuple[int, ...]
    cuts: tuple[int, ...]

    def payload(self, index: int) -> bytes:
        return payload_of(index, self.length)

    def arriving(self, index: int) -> bytes:
        payload = bytearray(self.payload(index))
        if index in self.wrong:
            payload[index % self.length] ^= 1
        return bytes(payload)

    def columns(self, rig: StoreRig, ref: NamespaceRef) -> PutColumns:
        keys = [key_of(index) for index in range(self.count)]
        return rig.columns(
            ref,
            keys,
            self.length,
            block_bytes=self.block,
            positions=range(self.count) if self.in_chain else (),
            run_heads=keys[0] if self.in_chain else b"",
            parents=b"".join([bytes(32), *keys[:-1]]) if self.in_chain else b"",
        )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    count = draw(st.integers(1, 70))
    numbers = st.integers(0, count - 1)
    some = st.frozensets(numbers, max_size=3) if draw(st.booleans()) else st.just(frozenset[int]())
    return Batch(
        length=draw(st.sampled_from([1, 511, 4096, 4097, 20_000, 65_536])),
        block=draw(st.sampled_from([4096, 5000, 65_536])),
        count=count,
        in_chain=draw(st.booleans()),
        wrong=draw(some),
        missing=draw(some),
        order=tuple(draw(st.permutations(range(count)))),
        cuts=tuple(draw(st.lists(st.integers(1, 12), max_size=6))),
    )


def one_by_one(rig: StoreRig, ref: NamespaceRef, batch: Batch) -> list[object]:
    """Each record has its own ticket."""
    columns = batch.columns(rig, ref)
    outcomes: list[list[object]] = [[] for _ in range(batch.count)]
    tickets: dict[int, PutTicket] = {}
    for index in range(batch.count):
        rig.store.writer.open_put(columns.spec(index), lambda answer, index=index: tickets.update({index: answer}))  # type: ignore[misc]
    for index in batch.order:
        if index in batch.missing:
            tickets[index].abort()
            continue
        buffer = tickets[index].buffer
        assert buffer is not None
        buffer[:] = batch.arriving(index)
        tickets[index].arrived(0, batch.length, crc_table(batch.payload(index), batch.block))
        try:
            tickets[index].filled()
        except ChecksumMismatch as error:
            outcomes[index].append(str(error))
            continue
        tickets[index].commit(on_done=outcomes[index].append)
    rig.settle()
    return [said[0] if said else None for said in outcomes]


def in_parcels(rig: StoreRig, ref: NamespaceRef, batch: Batch) -> list[object]:
    """Parcels, which are cut here and there, and into single records where something is wrong or missing."""
    outcomes: dict[int, list[bytes | Refused]] = {index: [] for index in range(batch.count)}
    wrong: dict[int, str] = {}
    parcels = list(rig.store.writer.open_parcels(batch.columns(rig, ref), 0, batch.count))
    assert sum(parcel.count for parcel in parcels) == batch.count
    for size in batch.cuts:
        at = next((at for at, parcel in enumerate(parcels) if parcel.count > size), None)
        if at is not None:
            parcels.insert(at, parcels[at].cut(size))
    assert [parcel.first for parcel in parcels] == sorted(parcel.first for parcel in parcels)
    home = {index: parcel for parcel in parcels for index in range(parcel.first, parcel.first + parcel.count)}
    for index in batch.order:
        if index in batch.missing:
            continue
        parcel = home[index]
        parcel.buffers[index - parcel.first][:] = batch.arriving(index)
        parcel.arrived(index, 0, batch.length, crc_table(batch.payload(index), batch.block))
        parcel.missing -= 1
    for parcel in parcels:
        commit(parcel, outcomes, wrong)
    rig.settle()
    said: list[object] = []
    for index in range(batch.count):
        ended = outcomes[index]
        assert len(ended) <= 1, "a record ended twice"
        stored = Stored(durable=True, content_id=ended[0]) if ended and isinstance(ended[0], bytes) else None
        said.append(wrong.get(index, stored or (ended[0] if ended else None)))
    return said


def commit(parcel: GrantedParcel, outcomes: dict[int, list[bytes | Refused]], wrong: dict[int, str]) -> None:
    index = parcel.first
    try:
        is_good = not parcel.missing and parcel.filled()
    except ChecksumMismatch as error:
        wrong[index] = str(error)
        return
    if is_good:
        parcel.commit(on_received=None, on_done=lambda *ended: parcel_ended(outcomes, *ended))
    elif parcel.count == 1:
        parcel.abort()
        parcel.abort()
    else:
        commit(parcel.cut(1), outcomes, wrong)
        commit(parcel, outcomes, wrong)


def shape(said: Sequence[object]) -> list[object]:
    """Outcomes without what is drawn at random: 8 bytes of the content ids."""
    return [one.content_id[:8] if isinstance(one, Stored) else one for one in said]


@settings(max_examples=60, deadline=None)
@given(batches())
def test_parcels_end_as_single_puts_do(batch: Batch) -> None:
    rigs = [StoreRig(MemoryDevice(size_bytes=24 * MiB), segment_bytes=1 * MiB) for _ in range(2)]
    refs = [rig.namespace() for rig in rigs]
    free = [rig.arena.free_bytes for rig in rigs]
    said = [one_by_one(rigs[0], refs[0], batch), in_parcels(rigs[1], refs[1], batch)]
    assert shape(said[0]) == shape(said[1])
    for rig, ref, free_bytes in zip(rigs, refs, free, strict=True):
        assert rig.arena.free_bytes == free_bytes
        assert not rig.store.writer.pending
        assert rig.ledger.usage.of("default").waiting_pages == 0
        rig.check_accounts()
        again = StoreRig(rig.device, now_ns=rig.now_ns)
        for index in range(batch.count):
            there = index not in batch.wrong and index not in batch.missing
            expected = batch.payload(index) if there else None
            assert rig.get(ref, key_of(index)) == again.get(ref, key_of(index)) == expected
        assert again.recount_bytes() == again.ledger.live_bytes == rig.ledger.live_bytes
    singles, parcels = (rig.metrics for rig in rigs)
    for name in ("stored_records", "stored_bytes", "written_bytes", "refusals", "checksum_errors_received"):
        assert getattr(singles, name) == getattr(parcels, name), name
    assert sorted(rigs[0].memory.stored_keys) == sorted(rigs[1].memory.stored_keys)
    assert rigs[0].ledger.live_bytes == rigs[1].ledger.live_bytes


def started(rig: StoreRig, ref: NamespaceRef, count: int = 4, length: int = 64 * KiB) -> GrantedParcel:
    parcel = rig.store.writer.open_parcels(
        rig.columns(ref, [key_of(n) for n in range(count)], length, block_bytes=4 * KiB), 0, count
    )[0]
    assert parcel.count == count
    for index in range(count):
        payload = payload_of(index, length)
        parcel.buffers[index][:] = payload
        parcel.arrived(index, 0, length, crc_table(payload, 4 * KiB))
    assert parcel.filled()
    return parcel


def test_no_parcels_where_something_is_not_usual() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=24 * MiB))
    ref = rig.namespace()
    keys = [key_of(n) for n in range(4)]
    columns = rig.columns(ref, keys, 8192)
    assert not rig.store.writer.open_parcels(rig.columns(ref, [*keys, keys[0]], 8192), 0, 5)
    waiting = rig.begin_put(ref, keys[2], payload_of(2, 8192), commit=False)
    assert not rig.store.writer.open_parcels(columns, 0, 4)
    assert [parcel.count for parcel in rig.store.writer.open_parcels(columns, 0, 2)] == [2]
    assert waiting.ticket is not None
    waiting.ticket.commit(on_done=waiting.outcomes.append)
    rig.settle(lambda: bool(waiting.outcomes))
    assert not rig.store.writer.open_parcels(columns, 2, 3)
    rig.ledger.usage.set_quotas({"default": 64 * KiB})
    assert not rig.store.writer.open_parcels(rig.columns(ref, [key_of(9)], 64 * KiB), 0, 1)
    assert rig.ledger.usage.of("default").refused_records == 0
    rig.store.writer.draining = True
    assert not rig.store.writer.open_parcels(columns, 3, 4)


def test_as_many_as_there_is_memory_for() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=96 * MiB), arena_bytes=20 * MiB, segment_bytes=16 * MiB)
    ref = rig.namespace()
    columns = rig.columns(ref, [key_of(n) for n in range(32)], 1 * MiB)
    parcels = rig.store.writer.open_parcels(columns, 0, 32)
    assert [parcel.count for parcel in parcels] == [1, 4, 4, 4, 4]
    assert [parcel.first for parcel in parcels] == [0, 1, 5, 9, 13]
    for parcel in parcels:
        parcel.abort()
    assert rig.arena.used_bytes == 0
    assert not rig.store.writer.pending


def test_a_put_of_a_key_in_a_parcel_waits_for_it() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=24 * MiB))
    ref = rig.namespace()
    parcel = started(rig, ref)
    second = rig.begin_put(ref, key_of(1), payload_of(7, 100))
    third = rig.begin_put(ref, key_of(3), payload_of(7, 100))
    assert second.ticket is None
    outcomes: dict[int, list[bytes | Refused]] = {index: [] for index in range(4)}
    first = parcel.cut(2)
    first.commit(on_received=None, on_done=lambda *ended: parcel_ended(outcomes, *ended))
    parcel.abort()
    rig.settle(lambda: second.outcome is not None and third.outcome is not None)
    assert isinstance(second.outcome, Exists)
    assert isinstance(third.outcome, Stored)
    assert rig.get(ref, key_of(1)) == payload_of(1, 64 * KiB)
    assert rig.get(ref, key_of(3)) == payload_of(7, 100)
    assert [len(ended) for ended in outcomes.values()] == [1, 1, 0, 0]


def test_a_record_of_a_parcel_is_met_as_a_ticket() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=24 * MiB))
    ref = rig.namespace()
    rig.settle()
    parcel = started(rig, ref)
    pending = rig.store.writer.pending
    key16 = parcel.keys16[2]
    early = pending[key16]
    assert key16 in pending
    assert len(pending) == len(list(pending)) == 4
    assert not early.received
    assert not pending.received()
    parcel.commit(on_received=None, on_done=lambda *_: None)
    assert pending.received() == set(parcel.keys16)
    for twin in (early, pending[parcel.keys16[3]]):
        assert twin.received
        assert isinstance(twin, Put)
        assert twin.payload is not None
        assert twin.crc_table == crc_table(twin.payload, 4 * KiB)
        assert twin.content_id in parcel.content_ids
    rig.settle()
    assert not pending
    assert early.ended


def test_a_failed_write_goes_to_another_segment_and_twice_refuses_all() -> None:
    drive = FaultyDevice(MemoryDevice(size_bytes=24 * MiB))
    rig = StoreRig(drive)
    ref = rig.namespace()
    rig.settle()
    for times, expected in ((1, bytes), (None, Refused)):
        columns = rig.columns(ref, [key_of(100 * bool(times) + n) for n in range(6)], 64 * KiB)
        start = rig.store.table.offset(0, 1 if times else 0)
        drive.inject(Fault(action=FaultAction.ERROR, kind=IoKind.WRITE, start=start, times=times))
        outcomes = rig.begin_parcels(columns, [payload_of(n, 64 * KiB) for n in range(6)])
        rig.settle(lambda: all(outcomes.values()))  # noqa: B023
        assert all(isinstance(ended[0], expected) and len(ended) == 1 for ended in outcomes.values())
        if expected is Refused:
            assert {one.reason for ended in outcomes.values() for one in ended if isinstance(one, Refused)} == {
                RefusedReason.NO_SPACE
            }
    rig.settle()
    assert rig.arena.used_bytes == 0
    rig.check_accounts()
    assert all(rig.get(ref, key_of(100 + n)) == payload_of(n, 64 * KiB) for n in range(6))


def test_a_full_index_refuses_only_what_it_has_no_room_for() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=64 * MiB), entries_max=1, arena_bytes=32 * MiB)
    rig.catalog.index.pages_max = 1
    ref = rig.namespace()
    outcomes = rig.begin_parcels(rig.columns(ref, [key_of(n) for n in range(400)], 1), [b"x"] * 400)
    rig.settle(lambda: all(outcomes.values()))
    refused = sum(isinstance(ended[0], Refused) for ended in outcomes.values())
    stored = sum(isinstance(ended[0], bytes) for ended in outcomes.values())
    assert refused
    assert stored > 150
    assert rig.metrics.stored_records == stored == rig.catalog.index.count
    assert rig.metrics.refusals[RefusedReason.NO_SPACE] == refused
    rig.check_accounts()


@pytest.mark.parametrize("length", [1, 4096, 64 * KiB, 1 * MiB, 3 * MiB, 32 * MiB])
def test_the_first_parcel_is_small_and_the_last_of_a_short_offer(length: int) -> None:
    for count in (1, 2, 3, 7, 32, 100, 1024):
        sizes = parcel_sizes(count, length)
        assert sum(sizes) == count
        assert max(sizes) <= PUT_PARCEL_RECORDS_MAX
        assert max(sizes) == 1 or max(sizes) * length <= PUT_PARCEL_BYTES
        ends = (sizes[0], sizes[-1]) if count <= 7 else (sizes[0],)
        assert max(ends) * length <= max(length, PUT_PARCEL_ENDS_BYTES)
        assert sizes[1:] == sorted(sizes[1:], reverse=True)


def test_a_long_parcel_is_written_in_several_operations() -> None:
    drive = FaultyDevice(MemoryDevice(size_bytes=96 * MiB))
    rig = StoreRig(drive, arena_bytes=32 * MiB, segment_bytes=16 * MiB)
    ref = rig.namespace()
    rig.settle()
    payloads = [payload_of(n, 1 * MiB) for n in range(16)]
    outcomes = rig.begin_parcels(rig.columns(ref, [key_of(n) for n in range(16)], 1 * MiB), payloads)
    rig.settle(lambda: all(outcomes.values()))
    assert all(rig.get(ref, key_of(n)) == payloads[n] for n in range(16))
    assert rig.ledger.live_bytes == 16 * (1 * MiB + PAGE_BYTES)


def test_parcels_and_single_puts_of_one_run_lie_in_order() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=24 * MiB))
    ref = rig.namespace()
    head = key_of(0)
    columns = rig.columns(
        ref, [key_of(n) for n in (2, 3)], 8192, positions=(2, 3), run_heads=head, block_bytes=16 * KiB
    )
    rig.begin_parcels(columns, [payload_of(n, 8192) for n in (2, 3)])
    for position in (1, 0):
        rig.begin_put(ref, key_of(position), payload_of(position, 8192), position=position, run_head=head)
    rig.settle()
    places = [rig.location(ref, key_of(n)) for n in range(4)]
    assert places == sorted(places)

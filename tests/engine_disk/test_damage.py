"""Flipped bits and bad blocks anywhere on the drive: the right bytes or a miss, counted, and nothing else is lost."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.device.memory import MemoryDevice
from kvstore.engine import job
from kvstore.engine.api import NamespaceRef
from kvstore.engine.blocking import BlockingIo, pages
from kvstore.engine.check import check_drive
from kvstore.engine.format import SUPERBLOCK_OFFSETS, decode_segment_footer, decode_superblock
from kvstore.engine.location import location_page, location_pages, location_segment
from kvstore.engine.sealed import read_index
from kvstore.engine.segment import SegmentState
from kvstore.errors import FormatUnsupported
from kvstore.limits import PAGE_BYTES, MiB
from kvstore.testing.faulty_device import Fault, FaultAction, FaultyDevice
from kvstore.testing.store_rig import StoreRig


def key_of(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def payload_of(number: int) -> bytes:
    return random.Random(-1 - number).randbytes(5_000 + number * 1_000)


def filled(count: int = 60) -> tuple[StoreRig, FaultyDevice, NamespaceRef]:
    device = FaultyDevice(MemoryDevice(size_bytes=12 * MiB))
    rig = StoreRig(device)
    ref = rig.namespace()
    for number in range(count):
        rig.put(ref, key_of(number), payload_of(number))
    rig.settle()
    return rig, device, ref


def reopened(rig: StoreRig) -> StoreRig:
    return StoreRig(rig.device, now_ns=rig.now_ns)


def test_a_flipped_bit_anywhere_gives_the_right_bytes_or_a_miss() -> None:
    rig, device, ref = filled()
    newest_block = (
        rig.superblock.half_offset(rig.store.log.place.half) + (rig.store.log.place.next_block - 1) * PAGE_BYTES
    )
    used = np.frombuffer(bytes(BlockingIo(device).read(0, device.size_bytes)), dtype=np.uint8)
    places = np.flatnonzero(used).tolist()
    rng = random.Random(5)
    # Every structure is hit: all pages that hold no payload, and a sample of the payload.
    picks = [rng.choice(places) for _ in range(60)]
    for page in range(0, device.size_bytes, PAGE_BYTES):
        magic = bytes(used[page : page + 4])
        if magic.startswith(b"KV"):
            picks += [page + rng.randrange(PAGE_BYTES), page + 1]
    rng.shuffle(picks)
    twin_memory = MemoryDevice(size_bytes=device.size_bytes)
    for place in picks[:100]:
        twin_memory._view[:] = used.data
        twin = FaultyDevice(twin_memory)
        twin.flip_at_rest(place, rng.randrange(8))
        again = StoreRig(twin)
        fresh = again.store.namespaces.by_digest(ref.digest)
        missing = 0
        for number in range(60):
            found = again.get(fresh, key_of(number)) if fresh is not None else None
            assert found is None or found == payload_of(number)
            missing += found is None
        report = check_drive(twin, name="twin")
        unused_bits = missing == 0 and report.clean
        damaged = again.metrics.recovery_bad_structures
        # A flip that costs records is seen and counted, and costs the records of one block only. The newest block of
        # the log is the exception: a damaged one is as one that never arrived.
        assert unused_bits or damaged or not report.clean or place - place % PAGE_BYTES == newest_block
        magic = bytes(used[place - place % PAGE_BYTES :][:4])
        if magic in (b"KVST", b"KVSG", b"KVSF"):
            assert (missing, damaged) == (0, 1), magic
        elif magic not in (b"KVIX", b"KVLB"):
            assert (missing <= 1, damaged) == (True, 0), magic
        if magic == b"KVIX":
            assert damaged == 1
        again.check_accounts()


def test_a_bad_superblock_is_repaired_from_the_other() -> None:
    for copy, offset in enumerate(SUPERBLOCK_OFFSETS):
        rig, device, ref = filled(5)
        device.flip_at_rest(offset + 20, 3)
        assert check_drive(device, name="drive").bad_superblocks == 1
        again = reopened(rig)
        assert again.get(ref, key_of(1)) == payload_of(1)
        assert decode_superblock(BlockingIo(device).read(offset, PAGE_BYTES)) == again.superblock, copy
        assert again.metrics.recovery_bad_structures == 1
        assert reopened(again).metrics.recovery_bad_structures == 0


def test_two_bad_superblocks_are_refused_and_nothing_is_written() -> None:
    rig, device, _ = filled(5)
    for offset in SUPERBLOCK_OFFSETS:
        device.flip_at_rest(offset + 20, 3)
    before = bytes(BlockingIo(device).read(0, device.size_bytes))
    with pytest.raises(FormatUnsupported, match="not empty and holds no readable"):
        reopened(rig)
    assert bytes(BlockingIo(device).read(0, device.size_bytes)) == before


def test_something_foreign_is_refused() -> None:
    device = MemoryDevice(size_bytes=16 * MiB)
    page = pages(PAGE_BYTES)
    page[100:110] = b"ext4 maybe"
    BlockingIo(device).write(0, page)
    with pytest.raises(FormatUnsupported, match="kvstore drive format"):
        StoreRig(device)


def sealed_segment(rig: StoreRig) -> int:
    sealed = rig.store.table.in_state(SegmentState.SEALED)
    assert len(sealed)
    return int(sealed[0])


def test_a_bad_index_block_costs_only_its_own_records() -> None:
    device = FaultyDevice(MemoryDevice(size_bytes=12 * MiB))
    rig = StoreRig(device, segment_bytes=2 * MiB)
    ref = rig.namespace()
    count = 600
    results = [rig.begin_put(ref, key_of(n), b"x" * n) for n in range(count)]
    rig.settle(lambda: all(result.outcome is not None for result in results))
    rig.store.log.checkpoint()
    rig.settle()
    segment = sealed_segment(rig)
    end = rig.store.table.offset(segment + 1)
    footer = decode_segment_footer(BlockingIo(device).read(end - PAGE_BYTES, PAGE_BYTES))
    assert footer is not None
    assert footer.block_count >= 3
    device.flip_at_rest(rig.store.table.offset(segment, footer.index_page + 1) + 99, 1)
    again = reopened(rig)
    assert again.store.recovered.bad_index_blocks == 1
    missing = [n for n in range(count) if again.get(ref, key_of(n)) is None]
    assert len(missing) == 84
    assert again.store.recovered.records == count - 84
    report = check_drive(device, name="drive")
    assert (report.bad_index_blocks, report.clean, report.records) == (1, False, count - 84)
    # The segment can be evicted, with what its damaged block hides.
    again.store.reclaimer.budget.wrote(0)
    job.start(again.store.reclaimer.evict(segment))
    again.settle(lambda: not again.store.reclaimer.running)
    assert again.store.table.state[segment] == SegmentState.FREE
    again.check_accounts()


@pytest.mark.parametrize("is_dropped", [False, True])
def test_what_a_damaged_index_hides_is_not_counted_once_it_is_evicted(is_dropped: bool) -> None:
    device = FaultyDevice(MemoryDevice(size_bytes=12 * MiB))
    rig = StoreRig(device, segment_bytes=2 * MiB)
    ref = rig.namespace()
    other = rig.namespace("other")
    results = [rig.begin_put((ref, other)[n % 2], key_of(n), b"x" * n) for n in range(600)]
    rig.settle(lambda: all(result.outcome is not None for result in results))
    if is_dropped:  # its records stay in the index, uncounted, until their segment goes
        rig.ledger.drop_namespace(other, lambda error: None)
        rig.settle()
    segment = sealed_segment(rig)
    live, records = rig.ledger.live_bytes, int(rig.catalog.scores.live_records[segment])
    end = rig.store.table.offset(segment + 1)
    footer = decode_segment_footer(BlockingIo(device).read(end - PAGE_BYTES, PAGE_BYTES))
    assert footer is not None
    device.flip_at_rest(rig.store.table.offset(segment, footer.index_page + 1) + 99, 1)
    rig.store.table.hold(segment)  # a read in flight: the segment is not free for a while
    job.start(rig.store.reclaimer.evict(segment))
    for _ in range(200):
        rig.poll()
    assert rig.store.table.state[segment] == SegmentState.EVICTING
    rig.check_accounts()
    assert rig.ledger.live_bytes == live - rig.store.metrics.evicted_bytes
    assert rig.store.metrics.evicted_records == records > 0
    rig.store.table.release(segment)
    rig.settle(lambda: not rig.store.reclaimer.running)
    assert rig.store.table.state[segment] == SegmentState.FREE
    rig.check_accounts()


def test_a_bad_log_block_costs_only_its_own_records() -> None:
    rig, device, ref = filled(20)
    place = rig.store.log.place
    offset = rig.superblock.half_offset(place.half)
    device.flip_at_rest(offset + (place.next_block - 6) * PAGE_BYTES + 70, 2)
    again = reopened(rig)
    assert again.store.recovered.bad_log_blocks == 1
    missing = [n for n in range(20) if again.get(ref, key_of(n)) is None]
    assert len(missing) == 1
    assert not check_drive(device, name="drive").clean


def test_a_bad_segment_header_costs_nothing_where_the_footer_or_the_log_is_there() -> None:
    rig, device, ref = filled()
    for segment in (sealed_segment(rig), rig.store.allocator.open.segment):  # type: ignore[union-attr]
        device.flip_at_rest(rig.store.table.offset(segment) + 9, 0)
    again = reopened(rig)
    assert again.store.recovered.bad_headers == 2
    assert all(again.get(ref, key_of(n)) == payload_of(n) for n in range(60))
    assert reopened(again).store.recovered.bad_headers == 0


def footer_place(rig: StoreRig, segment: int) -> int:
    return rig.store.table.offset(segment + 1) - PAGE_BYTES


@pytest.mark.parametrize("damage", ["bit", "sector", "unreadable"])
def test_a_bad_segment_footer_costs_nothing(damage: str) -> None:
    rig, device, ref = filled()
    rig.store.log.checkpoint()  # from now on only the index blocks say what is in there
    rig.settle()
    segment = sealed_segment(rig)
    place = footer_place(rig, segment)
    if damage == "bit":
        device.flip_at_rest(place + 45, 1)
    elif damage == "sector":
        BlockingIo(device).write(place, bytes(512) + b"\x5a" * (PAGE_BYTES - 512))
    else:
        device.inject(Fault(action=FaultAction.ERROR, start=place, end=place + PAGE_BYTES, times=None))
    report = check_drive(device, name="drive")
    assert (report.bad_footers, report.clean, report.records) == (1, False, 60)
    again = reopened(rig)
    assert again.store.recovered.bad_footers == again.metrics.recovery_bad_structures == 1
    assert again.store.table.state[segment] == SegmentState.SEALED
    assert all(again.get(ref, key_of(n)) == payload_of(n) for n in range(60))
    again.settle()
    again.check_accounts()
    third = reopened(again)
    assert third.store.recovered.bad_footers == (damage == "unreadable"), "written anew where that can be done"
    assert third.recount_bytes() == third.ledger.live_bytes == rig.ledger.live_bytes


def test_a_footer_that_goes_bad_in_use_hides_nothing_from_scrub_and_eviction() -> None:
    rig, device, _ = filled()
    segment = sealed_segment(rig)
    device.flip_at_rest(footer_place(rig, segment) + 45, 1)
    found: list[tuple[int, bool]] = []

    def read() -> job.Steps[None]:
        entries, complete = yield from read_index(rig.queue, rig.store.table, segment)
        found.append((len(entries), complete))

    job.start(read())
    rig.settle(lambda: bool(found))
    assert found == [(int(rig.catalog.scores.live_records[segment]), True)]


def test_what_stands_behind_an_open_segment_is_no_footer() -> None:
    rig, device, ref = filled(20)
    assert rig.store.allocator.open is not None
    segment = rig.store.allocator.open.segment
    noise = random.Random(1).randbytes(2 * PAGE_BYTES)  # a raw drive that was used before
    BlockingIo(device).write(footer_place(rig, segment) - PAGE_BYTES, noise)
    assert check_drive(device, name="drive").clean
    again = reopened(rig)
    assert again.metrics.recovery_bad_structures == 0
    assert again.store.allocator.open is not None
    assert again.store.allocator.open.segment == segment
    assert all(again.get(ref, key_of(n)) == payload_of(n) for n in range(20))


def test_scrub_quarantines_what_is_bad_twice_and_nothing_else() -> None:
    rig, device, ref = filled()
    bad = []
    for number in range(60):
        location = rig.location(ref, key_of(number))
        if number % 10 == 0 and rig.store.table.state[location_segment(location)] == SegmentState.SEALED:
            place = rig.store.table.offset(location_segment(location), location_page(location))
            device.flip_at_rest(place + (location_pages(location) - 1) * PAGE_BYTES, 4)
            bad.append(number)
    assert bad
    rounds: list[int] = []
    rig.store.scrubber.run_now(rounds.append)
    rig.settle(lambda: bool(rounds))
    assert rounds == [len(bad)]
    assert rig.metrics.scrub_errors == rig.metrics.quarantined_records == len(bad)
    rig.settle()
    again = reopened(rig)
    for number in range(60):
        assert again.get(ref, key_of(number)) == (None if number in bad else payload_of(number))
    assert again.store.recovered.records == 60 - len(bad)
    assert again.recount_bytes() == again.ledger.live_bytes == rig.ledger.live_bytes
    # A quarantined key can be put again.
    again.put(ref, key_of(bad[0]), payload_of(bad[0]))
    assert reopened(again).get(ref, key_of(bad[0])) == payload_of(bad[0])


@pytest.mark.parametrize("polls", [0, 1, 3])
def test_scrub_does_not_take_what_was_dropped_for_damaged(polls: int) -> None:
    rig, _, ref = filled()
    rounds: list[int] = []
    if polls:
        rig.store.scrubber.run_now(rounds.append)
    for _ in range(polls):
        rig.poll()
    assert not rounds
    fresh = rig.ledger.drop_namespace(ref, lambda error: None)
    rig.put(fresh, key_of(1), payload_of(1))
    rig.settle()
    rig.store.scrubber.run_now(rounds.append)
    rig.settle(lambda: bool(rounds))
    assert set(rounds) == {0}
    assert rig.metrics.scrub_errors == rig.metrics.quarantined_records == rig.metrics.checksum_errors_read == 0
    assert rig.get(fresh, key_of(1)) == payload_of(1)


def test_scrub_keeps_its_pace() -> None:
    rig, _, _ = filled()
    rig.settle()
    scrubber = rig.store.scrubber
    scrubber.bytes_second = 1 * MiB
    start_ns = rig.now_ns
    rig.settle(lambda: rig.metrics.scrub_rounds == 1)
    seconds = (rig.now_ns - start_ns) / 1e9
    assert rig.metrics.scrubbed_bytes / seconds <= 1.05 * MiB
    assert rig.metrics.scrubbed_bytes >= 1 * MiB
    assert rig.metrics.scrub_errors == 0


def test_check_of_a_sound_drive_is_clean_and_counts() -> None:
    rig, device, ref = filled()
    rig.delete(ref, [key_of(1)])
    rig.settle()
    report = check_drive(device, name="drive")
    assert report.clean
    assert report.records == 59
    assert report.buried == 1
    assert report.live_bytes == rig.ledger.live_bytes
    assert report.namespaces == 1
    assert report.as_json()["complaints"] == []


def test_check_counts_a_bad_record() -> None:
    rig, device, ref = filled()
    location = rig.location(ref, key_of(7))
    device.flip_at_rest(rig.store.table.offset(location_segment(location), location_page(location)) + 5_000, 1)
    report = check_drive(device, name="drive")
    assert not report.clean
    assert report.bad_records == 1
    assert "payload" in report.complaints[0]
    assert report.live_bytes == rig.ledger.live_bytes - location_pages(location) * PAGE_BYTES

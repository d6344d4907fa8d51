"""Capacity, eviction, a full file system, failing writes."""

from __future__ import annotations

import errno
import os
import random

import pytest

from kvstore.device.base import IoKind
from kvstore.device.memory import MemoryDevice
from kvstore.engine.allocator import payload_bytes_max
from kvstore.engine.api import NamespaceRef
from kvstore.engine.check import check_drive
from kvstore.engine.job import Steps, start
from kvstore.engine.location import location_segment
from kvstore.engine.namespaces import index_keys
from kvstore.engine.policy import choose_victim
from kvstore.engine.sealed import read_index
from kvstore.engine.segment import SegmentState
from kvstore.engine.superblock import default_segment_bytes
from kvstore.errors import InvalidRequest
from kvstore.limits import PAGE_BYTES, SECOND_NS, SPACE_RETRY_NS_MIN, GiB, KiB, MiB
from kvstore.testing.faulty_device import Fault, FaultAction, FaultyDevice
from kvstore.testing.store_rig import StoreRig
from kvstore.types.results import Exists, Refused, RefusedReason, Stored


def key_of(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def payload_of(number: int, length: int = 60 * KiB) -> bytes:
    return random.Random(-1 - number).randbytes(length)


def fill(rig: StoreRig, ref: NamespaceRef, numbers: range, length: int = 60 * KiB) -> None:
    results = [rig.begin_put(ref, key_of(n), payload_of(n, length), position=n) for n in numbers]
    rig.settle(lambda: all(result.outcome is not None for result in results))
    rig.settle()
    assert all(isinstance(result.outcome, Stored) for result in results)


def reopened(rig: StoreRig, **options: int) -> StoreRig:
    return StoreRig(rig.device, now_ns=rig.now_ns, **options)


@pytest.mark.parametrize(("capacity_bytes", "segment_bytes"), [(64 * MiB, 4 * MiB), (64 * MiB, 0), (20 * MiB, 0)])
def test_85_percent_of_the_capacity_can_be_live(capacity_bytes: int, segment_bytes: int) -> None:
    rig = StoreRig(MemoryDevice(size_bytes=capacity_bytes), segment_bytes=segment_bytes)
    ref = rig.namespace()
    most = 0
    for number in range(capacity_bytes // (64 * KiB)):
        rig.put(ref, key_of(number), payload_of(0, 64 * KiB), block_bytes=64 * KiB)
        most = max(most, rig.ledger.live_bytes)
        assert rig.device.allocated_bytes() <= capacity_bytes
    assert most >= 0.85 * capacity_bytes
    assert rig.metrics.evicted_segments > 0


def test_a_segment_is_free_before_the_open_one_is_full() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=64 * MiB), segment_bytes=1 * MiB)
    ref = rig.namespace()
    allocator = rig.store.allocator
    crowded = 0
    for number in range(1100):
        rig.put(ref, key_of(number), payload_of(0, 60 * KiB))
        rig.settle()
        if rig.metrics.evicted_segments and allocator.open_room_pages() < rig.store.table.segment_pages // 2:
            crowded += 1
            assert allocator.free_count(), "a put would wait for an eviction"
    assert crowded > 20


def test_the_next_segment_is_freed_as_soon_as_the_free_one_is_taken() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=64 * MiB), segment_bytes=1 * MiB)
    ref = rig.namespace()
    number = 0
    while rig.store.allocator.free_count():
        assert not rig.store.reclaimer.running, "one ahead is enough"
        result = rig.begin_put(ref, key_of(number), payload_of(0))
        rig.settle(lambda result=result: result.outcome is not None)  # type: ignore[misc]
        number += 1
    left = rig.store.allocator.open_room_pages()
    rig.settle()
    assert rig.store.allocator.free_count() == 1
    assert rig.store.allocator.open_room_pages() == left > rig.store.table.segment_pages * 3 // 4
    assert rig.ledger.live_bytes >= 0.85 * 64 * MiB
    assert rig.metrics.evicted_segments == 1


def test_a_page_beside_an_index_that_cannot_be_read_costs_only_itself() -> None:
    device = FaultyDevice(MemoryDevice(size_bytes=32 * MiB))
    rig = StoreRig(device, segment_bytes=4 * MiB)
    ref = rig.namespace()
    fill(rig, ref, range(100))
    table = rig.store.table
    segment = int(table.in_state(SegmentState.SEALED)[0])
    beside = table.offset(segment + 1) - 10 * PAGE_BYTES
    device.inject(Fault(action=FaultAction.ERROR, kind=IoKind.READ, start=beside, end=beside + PAGE_BYTES, times=None))
    found: list[tuple[int, bool]] = []

    def read() -> Steps[None]:
        entries, complete = yield from read_index(rig.queue, table, segment)
        found.append((len(entries), complete))

    start(read())
    rig.settle(lambda: bool(found))
    assert found[0][0] > 50
    assert found[0][1], "nothing of the index was lost"


def test_default_segments() -> None:
    assert default_segment_bytes(16 * MiB) == 1 * MiB
    assert default_segment_bytes(128 * MiB) == 4 * MiB + 64 * KiB, "headers come on top"
    assert default_segment_bytes(512 * MiB) == 16 * MiB + 128 * KiB, "a small drive has larger shares"
    assert default_segment_bytes(1 * GiB) == 32 * MiB + 192 * KiB
    assert default_segment_bytes(8 * GiB) == 128 * MiB + 576 * KiB
    assert default_segment_bytes(1024 * GiB) == 1 * GiB
    assert payload_bytes_max(1 * GiB) == 64 * MiB
    assert payload_bytes_max(1 * MiB) == 1 * MiB - 16 * KiB


def test_the_longest_payload_fits_and_one_byte_more_is_refused() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=16 * MiB))
    ref = rig.namespace()
    longest = rig.store.writer.payload_bytes_max
    assert isinstance(rig.put(ref, key_of(1), payload_of(1, longest), block_bytes=4 * KiB), Stored)
    assert rig.get(ref, key_of(1)) == payload_of(1, longest)
    outcome = rig.put(ref, key_of(2), payload_of(2, longest + 1))
    assert isinstance(outcome, Refused)
    assert outcome.reason is RefusedReason.INVALID
    assert str(longest) in outcome.detail


def test_what_was_asked_for_lately_is_written_again_within_the_bound() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=24 * MiB))
    ref = rig.namespace()
    fill(rig, ref, range(300))
    hot = range(0, 300, 9)
    for batch in range(30):
        rig.ledger.tick += 10
        rig.catalog.touch_keys(index_keys(ref, b"".join(map(key_of, hot))), rig.ledger.tick)
        fill(rig, ref, range(1000 + 20 * batch, 1020 + 20 * batch))
    assert rig.metrics.evicted_segments > 10
    assert rig.memory.moved_count > 0
    assert all(rig.get(ref, key_of(n)) == payload_of(n) for n in hot)
    assert rig.store.reclaimer.budget.amplification <= 1.3
    assert rig.metrics.reinserted_records == rig.memory.moved_count
    assert rig.recount_bytes() == rig.ledger.live_bytes
    rig.check_accounts()
    again = reopened(rig)
    assert all(again.get(ref, key_of(n)) == payload_of(n) for n in hot)
    assert again.ledger.live_bytes == rig.ledger.live_bytes


def test_pinned_records_are_moved_not_evicted() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=24 * MiB))
    ref = rig.namespace()
    pinned = range(60)
    fill(rig, ref, pinned)
    slots = rig.catalog.index.find_many(index_keys(ref, b"".join(map(key_of, pinned))))
    rig.catalog.pin(slots)
    for batch in range(30):
        rig.ledger.tick += 10
        fill(rig, ref, range(1000 + 20 * batch, 1020 + 20 * batch))
    assert rig.metrics.evicted_segments > 10
    assert all(rig.get(ref, key_of(n)) == payload_of(n) for n in pinned)
    rig.check_accounts()


def test_a_read_in_flight_keeps_its_segment_and_others_go_first() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=12 * MiB))
    ref = rig.namespace()
    fill(rig, ref, range(5000, 5020))  # the deepest, which go first
    segment = location_segment(rig.location(ref, key_of(5000)))
    table = rig.store.table
    table.hold(segment)
    generation = int(table.generation[segment])
    fill(rig, ref, range(100, 500))  # twice the drive, and no put waits for the read
    assert rig.metrics.evicted_segments > 10
    assert int(table.generation[segment]) == generation
    table.release(segment)
    fill(rig, ref, range(500, 700))
    assert int(table.generation[segment]) != generation


def test_where_every_segment_is_being_read_puts_wait() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=12 * MiB))
    ref = rig.namespace()
    fill(rig, ref, range(200))
    table = rig.store.table
    held = table.in_state(SegmentState.SEALED).tolist()
    generations = table.generation[held].copy()
    table.hold_all(held)
    results = [rig.begin_put(ref, key_of(number), payload_of(number)) for number in range(1000, 1200)]
    for _ in range(500):
        rig.poll()
    assert not all(result.outcome is not None for result in results)
    assert (table.generation[held] == generations).all()
    table.release_all(held)
    rig.settle(lambda: all(result.outcome is not None for result in results))
    assert all(isinstance(result.outcome, Stored) for result in results)
    assert (table.generation[held] != generations).any()


def test_a_full_file_system_evicts_and_recovers_unaided() -> None:
    device = MemoryDevice(size_bytes=64 * MiB, space_bytes=16 * MiB)
    rig = StoreRig(device)
    ref = rig.namespace()
    fill(rig, ref, range(400))
    rig.store.update_gauges()
    assert device.allocated_bytes() < 16 * MiB
    assert rig.metrics.capacity_bytes < 16 * MiB
    assert rig.store.allocator.space_errors > 0
    recent = [n for n in range(400) if rig.get(ref, key_of(n)) == payload_of(n)]
    assert len(recent) > 150
    # A stranger takes more of it, later gives it back, and the file system grows.
    device._space_bytes = 40 * MiB
    for _ in range(200):
        rig.now_ns += SECOND_NS
        rig.settle()
    fill(rig, ref, range(1000, 1600))
    assert device.allocated_bytes() > 30 * MiB
    assert rig.ledger.live_bytes > 25 * MiB
    rig.check_accounts()
    assert check_drive(device, name="drive").clean


def test_a_file_system_without_room_for_one_segment_refuses_until_there_is_some() -> None:
    device = FaultyDevice(MemoryDevice(size_bytes=16 * MiB))
    rig = StoreRig(device)
    ref = rig.namespace()
    device.full = True
    outcomes = [rig.put(ref, key_of(n), payload_of(n)) for n in range(10)]
    reasons = {outcome.reason for outcome in outcomes if isinstance(outcome, Refused)}
    assert reasons == {RefusedReason.NO_SPACE}
    device.full = False
    for _ in range(3):
        rig.now_ns += 400 * SECOND_NS
        rig.settle()
    assert isinstance(rig.put(ref, key_of(99), payload_of(99)), Stored)


def test_a_single_segment_of_space_is_used_over_and_over() -> None:
    device = FaultyDevice(MemoryDevice(size_bytes=16 * MiB))
    rig = StoreRig(device)
    ref = rig.namespace()
    fill(rig, ref, range(5))
    device.full = True
    outcomes = [rig.put(ref, key_of(n), payload_of(n)) for n in range(10, 60)]
    assert all(isinstance(outcome, Stored) for outcome in outcomes)
    assert rig.get(ref, key_of(59)) == payload_of(59)
    assert rig.recount_bytes() == rig.ledger.live_bytes > 0
    assert reopened(rig).ledger.live_bytes == rig.ledger.live_bytes


def test_a_failed_write_is_tried_once_more_in_another_segment() -> None:
    device = FaultyDevice(MemoryDevice(size_bytes=16 * MiB))
    rig = StoreRig(device)
    ref = rig.namespace()
    fill(rig, ref, range(5))
    first = location_segment(rig.location(ref, key_of(0)))
    start = rig.store.table.offset(first)
    device.inject(Fault(action=FaultAction.ERROR, kind=IoKind.WRITE, start=start, end=start + 500_000, times=1))
    assert isinstance(rig.put(ref, key_of(9), payload_of(9)), Stored)
    assert location_segment(rig.location(ref, key_of(9))) != first
    rig.settle()
    again = reopened(rig)
    assert again.get(ref, key_of(9)) == payload_of(9)
    assert again.get(ref, key_of(0)) == payload_of(0)
    assert again.recount_bytes() == again.ledger.live_bytes == rig.ledger.live_bytes


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_drive_that_takes_no_writes_refuses_puts_and_shows_nothing(code: int) -> None:
    device = FaultyDevice(MemoryDevice(size_bytes=16 * MiB))
    rig = StoreRig(device)
    ref = rig.namespace()
    fill(rig, ref, range(5))
    fault = device.inject(Fault(action=FaultAction.ERROR, kind=IoKind.WRITE, times=None, errno_code=code))
    outcome = rig.put(ref, key_of(9), payload_of(9))
    assert isinstance(outcome, Refused)
    assert rig.get(ref, key_of(9)) is None
    assert not rig.store.writer.pending
    # A lack of space is answered by evicting, even if the drive turns out to be no better for it.
    assert rig.get(ref, key_of(1)) in ((payload_of(1),) if code == errno.EIO else (payload_of(1), None))
    assert rig.arena.free_bytes == rig.arena.size_bytes
    fault.times = 0
    again = reopened(rig)
    assert again.get(ref, key_of(9)) is None
    assert again.get(ref, key_of(1)) == payload_of(1)
    assert isinstance(again.put(ref, key_of(9), payload_of(9)), Stored)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO])
@pytest.mark.parametrize("start", [0, 1])
def test_a_full_drive_that_takes_no_more_writes_serves_what_it_holds(code: int, start: int) -> None:
    """As when its file system is remounted read-only under load, with (0) and without its log among what is refused."""
    device = FaultyDevice(MemoryDevice(size_bytes=64 * MiB))
    rig = StoreRig(device, segment_bytes=1 * MiB)
    ref = rig.namespace()
    fill(rig, ref, range(1200))
    assert rig.metrics.evicted_segments, "it is full"
    held = [n for n in range(1200) if rig.location(ref, key_of(n))]
    where = rig.superblock.segments_offset * start
    device.inject(Fault(action=FaultAction.ERROR, kind=IoKind.WRITE, start=where, times=None, errno_code=code))
    for number in range(2000, 2300):
        result = rig.begin_put(ref, key_of(number), payload_of(number))
        rig.settle(lambda result=result: result.outcome is not None)  # type: ignore[misc]
        assert isinstance(result.outcome, Refused)
        rig.now_ns += SECOND_NS // 10
    rig.settle()
    kept = [n for n in held if rig.get(ref, key_of(n)) == payload_of(n)]
    assert len(kept) >= 0.8 * len(held), f"{len(kept)} of {len(held)} records are served on"
    assert rig.store.write_fault, "nothing says so"
    assert rig.store.next_timer_ns() is not None, "it is tried again though nothing else happens"

    device.clear()
    rig.now_ns += 400 * SECOND_NS
    for _ in range(8):
        rig.settle()
        rig.now_ns += 10 * SECOND_NS
    rig.ledger.tick += 10
    fill(rig, ref, range(3000, 3100))
    assert all(rig.get(ref, key_of(n)) == payload_of(n) for n in range(3000, 3100))
    rig.settle()
    rig.store.update_gauges()
    assert not rig.store.write_fault
    assert not rig.metrics.segments_bad, "what could not be erased was, without a restart"
    again = reopened(rig)
    assert all(again.get(ref, key_of(n)) in (None, payload_of(n)) for n in (*range(1200), *range(3000, 3100)))
    assert again.recount_bytes() == again.ledger.live_bytes == rig.ledger.live_bytes


def test_two_segments_that_can_never_be_erased_do_not_keep_a_drive_from_puts() -> None:
    """A worker with other drives gives it none meanwhile, so nothing but time can bring them back."""
    device = FaultyDevice(MemoryDevice(size_bytes=16 * MiB))
    rig = StoreRig(device, segment_bytes=1 * MiB)
    ref = rig.namespace()
    store, numbers = rig.store, iter(range(10_000))

    def put() -> Stored | Exists | Refused:
        number = next(numbers)
        return rig.put(ref, key_of(number), payload_of(number))

    while not rig.metrics.evicted_segments:
        assert isinstance(put(), Stored)
    rig.settle()
    left = store.reclaimer.candidates()
    for _ in range(2):
        victim = choose_victim(store.ledger.catalog.scores, left)
        assert victim is not None
        left = left[left != victim]
        at = store.table.offset(victim)
        device.inject(Fault(action=FaultAction.ERROR, kind=IoKind.WRITE, start=at, end=at + 4096, times=None))
    while store.table.in_state_count[SegmentState.BAD] < 2:
        put()
    rig.settle()
    assert "2 segments that were to make room were not erased" in store.write_fault
    assert not store.is_on_trial
    rig.now_ns += SPACE_RETRY_NS_MIN
    for _ in range(4):
        rig.poll()
    assert store.is_on_trial, "nobody puts, and it is time"
    assert store.write_fault, "it stays said"
    held = [n for n in range(300) if rig.location(ref, key_of(n))]
    rig.settle()
    assert held == [n for n in range(300) if rig.location(ref, key_of(n))], "nothing is given up before puts come"
    outcomes = [put() for _ in range(40)]
    assert isinstance(outcomes[-1], Stored), outcomes[-1]
    rig.settle()
    assert not store.write_fault, "a third segment was erased"
    assert not store.is_on_trial


def test_a_drive_that_turns_read_only_before_it_is_full_goes_on_serving() -> None:
    """Space for the next segment is asked for while puts wait: what fallocate(2) answers must not end the worker."""
    device = FaultyDevice(MemoryDevice(size_bytes=64 * MiB))
    rig = StoreRig(device, segment_bytes=1 * MiB)
    ref = rig.namespace()
    fill(rig, ref, range(200))
    allocated = rig.store.allocator.allocated_segments()
    device.read_only = True
    fault = device.inject(Fault(action=FaultAction.ERROR, kind=IoKind.WRITE, times=0, errno_code=errno.EROFS))
    results = [rig.begin_put(ref, key_of(n), payload_of(n)) for n in range(1000, 1040)]  # the open one takes some
    rig.settle(lambda: all(result.outcome is not None for result in results))
    last = results[-1].outcome
    assert isinstance(last, Refused)
    assert os.strerror(errno.EROFS) in last.detail
    fault.times = None
    for _ in range(8):
        assert isinstance(rig.put(ref, key_of(2000), payload_of(2000)), Refused)
        assert rig.store.write_fault
        rig.now_ns += SECOND_NS
    assert rig.store.next_timer_ns() is not None, "it is tried again though nothing else happens"
    assert all(rig.get(ref, key_of(n)) == payload_of(n) for n in range(200))
    assert not rig.metrics.evicted_segments
    assert rig.store.allocator.allocated_segments() == allocated, "what it could not make is not there"
    device.clear()
    for _ in range(4):
        rig.now_ns += 10 * SECOND_NS
        rig.settle()
    assert not rig.store.write_fault
    fill(rig, ref, range(3000, 3040))
    again = reopened(rig)
    assert all(again.get(ref, key_of(n)) == payload_of(n) for n in (*range(200), *range(3000, 3040)))


def test_a_log_block_that_fails_is_written_further_on() -> None:
    device = FaultyDevice(MemoryDevice(size_bytes=16 * MiB))
    rig = StoreRig(device)
    ref = rig.namespace()
    fill(rig, ref, range(3))
    half = rig.superblock.half_offset(rig.store.log.place.half)
    device.inject(
        Fault(action=FaultAction.ERROR, kind=IoKind.WRITE, start=half, end=half + rig.superblock.log_half_bytes)
    )
    assert isinstance(rig.put(ref, key_of(9), payload_of(9)), Stored)
    again = reopened(rig)
    assert again.get(ref, key_of(9)) == payload_of(9)
    assert again.store.recovered.bad_log_blocks == 1


def test_an_index_that_cannot_be_written_stays_in_the_log() -> None:
    device = FaultyDevice(MemoryDevice(size_bytes=16 * MiB))
    rig = StoreRig(device)
    ref = rig.namespace()
    fill(rig, ref, range(5))
    segment = location_segment(rig.location(ref, key_of(0)))
    end = rig.store.table.offset(segment + 1)
    device.inject(Fault(action=FaultAction.ERROR, kind=IoKind.WRITE, start=end - 4096, end=end, times=2))
    fill(rig, ref, range(5, 60))
    rig.store.log.checkpoint()
    rig.settle()
    assert rig.store.allocator.unsealed
    again = reopened(rig)
    assert all(again.get(ref, key_of(n)) == payload_of(n) for n in range(60))


def test_capacity_grows_and_shrinks_between_starts() -> None:
    device = MemoryDevice(size_bytes=32 * MiB)
    rig = StoreRig(device, capacity_bytes=16 * MiB)
    ref = rig.namespace()
    fill(rig, ref, range(200))
    rig.settle()
    bigger = reopened(rig, capacity_bytes=32 * MiB)
    assert bigger.ledger.live_bytes == rig.ledger.live_bytes
    fill(bigger, ref, range(1000, 1400))
    assert bigger.ledger.live_bytes > 25 * MiB
    smaller = reopened(bigger, capacity_bytes=12 * MiB)
    assert device.allocated_bytes() <= 12 * MiB
    assert 0 < smaller.ledger.live_bytes < 12 * MiB
    assert smaller.recount_bytes() == smaller.ledger.live_bytes
    smaller.check_accounts()
    fill(smaller, ref, range(2000, 2100))
    assert device.allocated_bytes() <= 12 * MiB
    # What the smaller store no longer knew does not come back.
    kept = smaller.ledger.live_bytes
    again = reopened(smaller, capacity_bytes=32 * MiB)
    assert again.ledger.live_bytes == kept


def test_a_capacity_that_is_too_small_names_the_fix() -> None:
    with pytest.raises(InvalidRequest, match="set the capacity to"):
        StoreRig(MemoryDevice(size_bytes=2 * MiB))


def test_many_deletes_do_not_fill_the_log() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=24 * MiB), segment_bytes=2 * MiB)
    ref = rig.namespace()
    numbers = range(3000)
    results = [rig.begin_put(ref, key_of(n), payload_of(n, 2 * KiB)) for n in numbers]
    rig.settle(lambda: all(result.outcome is not None for result in results))
    gone: list[bytes] = []
    for at in range(0, 2800, 100):
        keys = b"".join(key_of(n) for n in range(at, at + 100))
        rig.ledger.delete(ref, index_keys(ref, keys), gone.append)
        rig.settle()
    assert len(gone) == 28
    assert rig.store.log.failed is None
    again = reopened(rig)
    assert all(again.get(ref, key_of(n)) is None for n in range(2800))
    assert again.ledger.live_bytes == rig.ledger.live_bytes
    assert rig.metrics.evicted_segments > 0


def test_a_drive_that_comes_back_takes_writes_again_without_a_restart() -> None:
    device = FaultyDevice(MemoryDevice(size_bytes=16 * MiB))
    rig = StoreRig(device)
    ref = rig.namespace()
    fill(rig, ref, range(5))
    end = rig.superblock.segments_offset
    device.inject(Fault(action=FaultAction.ERROR, kind=IoKind.WRITE, end=end, times=None))
    outcome = rig.put(ref, key_of(9), payload_of(9))
    assert isinstance(outcome, Refused)
    assert outcome.reason is RefusedReason.OUTCOME_UNKNOWN
    assert rig.store.log.failed is not None
    assert isinstance(rig.put(ref, key_of(10), payload_of(10)), Refused)
    device.clear()
    for _ in range(4):
        rig.now_ns += 6 * SECOND_NS
        rig.poll()
    rig.settle()
    assert rig.store.log.failed is None
    assert isinstance(rig.put(ref, key_of(11), payload_of(11)), Stored)
    again = reopened(rig)
    assert again.get(ref, key_of(11)) == payload_of(11)
    assert again.get(ref, key_of(1)) == payload_of(1)
    assert again.get(ref, key_of(10)) is None


def test_a_full_index_evicts() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=96 * MiB), entries_max=1)
    ref = rig.namespace()
    room = rig.catalog.index.pages_max * 256
    outcomes = []
    for at in range(0, room + 2_000, 500):
        results = [rig.begin_put(ref, key_of(n), b"") for n in range(at, at + 500)]
        rig.settle(lambda results=results: all(result.outcome is not None for result in results))  # type: ignore[misc]
        outcomes += [result.outcome for result in results]
    refused = sum(isinstance(outcome, Refused) for outcome in outcomes)
    assert refused
    assert rig.metrics.evicted_segments
    assert any(isinstance(outcome, Stored) for outcome in outcomes[-500:])
    rig.settle()
    rig.check_accounts()

"""What must be on the drive before what: the rules that a crash makes visible, each with the crash that breaks it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from kvstore.device.base import IoKind, IoOp
from kvstore.device.memory import MemoryDevice
from kvstore.engine import job
from kvstore.engine.api import NamespaceRef
from kvstore.engine.blocking import pages
from kvstore.engine.location import location_segment
from kvstore.engine.namespaces import index_keys
from kvstore.engine.segment import SegmentState
from kvstore.limits import PAGE_BYTES, SPACE_RETRY_NS_MIN, KiB, MiB
from kvstore.testing.device_suite import aligned
from kvstore.testing.faulty_device import Fault, FaultAction, FaultyDevice
from kvstore.testing.store_rig import StoreRig
from kvstore.types.flow import FlowClass
from kvstore.types.results import MissReason, Stored


class Gate(FaultyDevice):
    """Holds back the operations that a test names, and writes down the order of all others."""

    def __init__(self, inner: MemoryDevice) -> None:
        super().__init__(inner)
        self.closed_for: Callable[[IoOp], bool] = lambda op: False
        self.behind: list[IoOp] = []
        self.order: list[tuple[IoKind, int, int]] = []

    def submit(self, ops: Sequence[IoOp]) -> None:
        held = [op for op in ops if self.closed_for(op)]
        self.behind += held
        super().submit([op for op in ops if op not in held])

    def poll(self) -> list[IoOp]:
        done = super().poll()
        self.order += [(op.kind, op.offset, op.length_bytes) for op in done]
        return done

    def open(self) -> None:
        self.closed_for = lambda op: False
        held, self.behind = self.behind, []
        super().submit(held)


def key_of(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def payload_of(number: int, length: int = 60 * KiB) -> bytes:
    return random.Random(-1 - number).randbytes(length)


def rig_of(count: int, *, length: int = 60 * KiB) -> tuple[StoreRig, Gate, NamespaceRef]:
    gate = Gate(MemoryDevice(size_bytes=16 * MiB))
    rig = StoreRig(gate)
    ref = rig.namespace()
    for number in range(count):
        assert isinstance(rig.put(ref, key_of(number), payload_of(number, length)), Stored)
    rig.settle()
    return rig, gate, ref


def crashed(rig: StoreRig, gate: Gate) -> StoreRig:
    return StoreRig(gate.inner, now_ns=rig.now_ns)


def turns(rig: StoreRig, count: int = 100) -> None:
    for _ in range(count):
        rig.poll()


def test_no_commit_is_logged_before_the_header_of_its_segment() -> None:
    rig, gate, ref = rig_of(3)
    starts = {rig.store.table.offset(segment) for segment in range(rig.store.table.count)}
    gate.closed_for = lambda op: op.kind is IoKind.WRITE and op.offset in starts and op.length_bytes == PAGE_BYTES
    assert rig.store.appender.open_segment()
    result = rig.begin_put(ref, key_of(9), payload_of(9))
    turns(rig)
    assert result.outcome is None
    assert crashed(rig, gate).get(ref, key_of(9)) is None
    gate.open()
    rig.settle()
    assert isinstance(result.outcome, Stored)
    assert crashed(rig, gate).get(ref, key_of(9)) == payload_of(9)


def test_a_half_is_overwritten_only_when_the_other_one_is_known_to_be_stable() -> None:
    rig, gate, ref = rig_of(3)
    gate.order.clear()
    gate.closed_for = lambda op: op.kind is IoKind.SYNC and len(gate.order) >= 3
    rig.store.log.checkpoint()
    turns(rig)
    # image, sync, switch block; the sync behind the switch is held back
    assert [kind for kind, _, _ in gate.order] == [IoKind.WRITE, IoKind.SYNC, IoKind.WRITE]
    assert len(gate.behind) == 1
    first_half = gate.order[0][1]
    rig.store.log.checkpoint()
    rig.begin_put(ref, key_of(9), b"x")
    turns(rig)
    log_end = rig.superblock.segments_offset
    log_writes = [offset for kind, offset, _ in gate.order if kind is IoKind.WRITE and offset < log_end]
    assert all(abs(offset - first_half) < rig.superblock.log_half_bytes for offset in log_writes)
    gate.open()
    rig.settle()
    assert rig.store.log.checkpoints == 2
    assert crashed(rig, gate).get(ref, key_of(9)) == b"x"


def test_what_a_drive_tells_together_shares_a_batch_of_the_log() -> None:
    rig, gate, ref = rig_of(3)
    gate.order.clear()
    log_end = rig.superblock.segments_offset
    gate.closed_for = lambda op: op.kind is IoKind.WRITE and op.offset < log_end
    results = [rig.begin_put(ref, key_of(7), b"a")]
    turns(rig)
    results.append(rig.begin_put(ref, key_of(8), b"b"))
    turns(rig)
    gate.closed_for = lambda op: op.kind is IoKind.WRITE
    results.append(rig.begin_put(ref, key_of(9), b"c"))
    turns(rig)
    assert len(gate.behind) == 2, "the commit record of the first and the bytes of the last"
    gate.open()
    rig.settle()
    assert all(isinstance(one.outcome, Stored) for one in results)
    assert sum(kind is IoKind.WRITE and offset < log_end for kind, offset, _ in gate.order) == 2
    assert crashed(rig, gate).get(ref, key_of(9)) == b"c"


def test_the_drive_has_its_next_writes_before_the_background_goes_on() -> None:
    rig, gate, ref = rig_of(3)
    events: list[str] = []
    read = IoOp(IoKind.READ, 0, [aligned(PAGE_BYTES)], owner=lambda op: events.append("background"))
    rig.queue.submit(read)
    rig.queue.start()
    result = rig.begin_put(ref, key_of(9), payload_of(9))
    submit = gate.submit

    def submitted(ops: Sequence[IoOp]) -> None:
        events.extend("write" for op in ops if op.kind is IoKind.WRITE)
        submit(ops)

    gate.submit = submitted  # type: ignore[method-assign]
    rig.poll()
    assert events == ["write", "background"]
    rig.settle()
    assert isinstance(result.outcome, Stored)


def test_an_interrupted_checkpoint_leaves_the_old_half_in_charge_and_its_generation_unused() -> None:
    rig, gate, ref = rig_of(3)
    before = rig.store.log.place.generation
    gate.closed_for = lambda op: op.kind is IoKind.SYNC
    rig.store.log.checkpoint()
    turns(rig)
    again = crashed(rig, gate)
    assert all(again.get(ref, key_of(n)) == payload_of(n) for n in range(3))
    place = again.store.log.place
    assert (place.generation, place.highest_generation) == (before, before + 1)
    again.store.log.checkpoint()
    again.settle()
    assert again.store.log.place.generation == before + 2


def test_a_deleted_key_does_not_come_back_from_a_victim_that_could_not_be_erased() -> None:
    rig, gate, ref = rig_of(20)
    victim = location_segment(rig.location(ref, key_of(0)))
    assert rig.store.table.state[victim] == SegmentState.SEALED
    rig.ledger.tick += 10
    key = key_of(0)
    start = rig.store.table.offset(victim)
    end = start + rig.store.table.segment_bytes
    gate.closed_for = lambda op: op.kind is IoKind.WRITE and start <= op.offset < end
    rig.catalog.pin(rig.catalog.index.find_many(index_keys(ref, key)))
    job.start(rig.store.reclaimer.evict(victim))
    turns(rig)
    moved_to = location_segment(rig.location(ref, key))
    assert moved_to != victim, "the pinned record was moved"
    assert gate.behind, "the victim is about to be erased"
    assert rig.delete(ref, [key]) == b"\0"
    gate.inject(Fault(action=FaultAction.ERROR, kind=IoKind.WRITE, start=start, end=end, times=None))
    gate.open()
    rig.settle()
    assert rig.store.table.state[victim] == SegmentState.BAD
    gate.clear()
    # The segment with the copy goes, and with it what the log says of it.
    rig.store.appender.open_segment()
    rig.settle()
    job.start(rig.store.reclaimer.evict(moved_to))
    rig.settle()
    assert rig.store.table.state[moved_to] == SegmentState.FREE
    rig.store.log.checkpoint()
    rig.settle()
    rig.put(ref, key_of(99), b"one more")
    assert crashed(rig, gate).get(ref, key) is None


@pytest.mark.parametrize("fails", [False, True], ids=["not yet", "could not be"])
def test_what_was_evicted_and_then_deleted_does_not_come_back_from_a_victim_that_is_not_erased(fails: bool) -> None:
    rig, gate, ref = rig_of(20)
    victim = location_segment(rig.location(ref, key_of(0)))
    start = rig.store.table.offset(victim)
    end = start + rig.store.table.segment_bytes
    gate.closed_for = lambda op: op.kind is IoKind.WRITE and start <= op.offset < end
    job.start(rig.store.reclaimer.evict(victim))
    turns(rig)
    assert gate.behind, "the victim is about to be erased"
    if fails:
        gate.inject(Fault(action=FaultAction.ERROR, kind=IoKind.WRITE, start=start, end=end, times=None))
        gate.open()
        rig.settle()
        gate.clear()
    assert rig.store.table.state[victim] == (SegmentState.BAD if fails else SegmentState.EVICTING)
    evicted = [n for n in range(20) if not rig.location(ref, key_of(n))]
    assert len(evicted) > 1
    absent = bytes([MissReason.ABSENT])
    buried_bytes = rig.ledger.tombstone_bytes
    for _ in range(2):
        assert rig.delete(ref, [key_of(evicted[0]), key_of(98)]) == 2 * absent
    assert len(rig.ledger._tombstones[victim]) == 1, "one for what was here, and once"
    assert rig.ledger.tombstone_bytes > buried_bytes
    rig.store.log.checkpoint()
    turns(rig)
    again = crashed(rig, gate)
    assert again.get(ref, key_of(evicted[0])) is None
    assert again.get(ref, key_of(evicted[1])) == payload_of(evicted[1]), "the victim is as it was"


def test_what_was_moved_out_of_a_victim_that_is_not_erased_and_then_evicted_and_deleted_does_not_come_back() -> None:
    rig, gate, ref = rig_of(20)
    victim = location_segment(rig.location(ref, key_of(0)))
    start = rig.store.table.offset(victim)
    end = start + rig.store.table.segment_bytes
    gate.inject(Fault(action=FaultAction.ERROR, kind=IoKind.WRITE, start=start, end=end, times=None))
    keys = index_keys(ref, key_of(0))
    rig.catalog.pin(rig.catalog.index.find_many(keys))
    job.start(rig.store.reclaimer.evict(victim))
    rig.settle()
    assert rig.store.table.state[victim] == SegmentState.BAD
    moved_to = location_segment(rig.location(ref, key_of(0)))
    assert moved_to != victim
    rig.catalog.unpin(keys)
    rig.store.appender.open_segment()
    rig.settle()
    rig.ledger.tick += 100
    job.start(rig.store.reclaimer.evict(moved_to))
    rig.settle()
    while rig.location(ref, key_of(0)):
        rig.ledger.tick += 100
        rig.store.appender.open_segment()
        rig.settle()
        job.start(rig.store.reclaimer.evict(location_segment(rig.location(ref, key_of(0)))))
        rig.settle()
    assert rig.store.table.state[moved_to] == SegmentState.FREE
    assert rig.delete(ref, [key_of(0)]) == bytes([MissReason.ABSENT])
    assert crashed(rig, gate).get(ref, key_of(0)) is None


def test_a_victim_that_could_not_be_erased_is_erased_later_and_what_was_kept_for_it_goes() -> None:
    rig, gate, ref = rig_of(20)
    victim = location_segment(rig.location(ref, key_of(0)))
    start = rig.store.table.offset(victim)
    end = start + rig.store.table.segment_bytes
    gate.inject(Fault(action=FaultAction.ERROR, kind=IoKind.WRITE, start=start, end=end, times=None))
    job.start(rig.store.reclaimer.evict(victim))
    rig.settle()
    assert rig.store.table.state[victim] == SegmentState.BAD
    gone = [n for n in range(20) if rig.location(ref, key_of(n))][:3]
    assert not any(rig.delete(ref, [key_of(n) for n in gone]))
    assert victim in rig.ledger._tombstones, "it may hold older copies"
    rig.now_ns += 2 * SPACE_RETRY_NS_MIN
    rig.settle()
    rig.now_ns += 2 * SPACE_RETRY_NS_MIN
    rig.settle()
    assert rig.store.table.state[victim] == SegmentState.BAD, "the drive still refuses"
    gate.clear()
    for _ in range(2):
        rig.now_ns += 2 * SPACE_RETRY_NS_MIN
        rig.settle()
    assert rig.store.table.state[victim] == SegmentState.FREE
    assert victim not in rig.ledger._tombstones
    rig.store.log.checkpoint()
    rig.settle()
    again = crashed(rig, gate)
    assert all(again.get(ref, key_of(n)) is None for n in gone)


def test_a_segment_that_never_can_be_erased_does_not_keep_another_waiting() -> None:
    rig, gate, ref = rig_of(40)
    table = rig.store.table
    victims = sorted(table.in_state(SegmentState.SEALED)[:2].tolist())
    for victim in victims:
        start = table.offset(victim)
        gate.inject(
            Fault(
                action=FaultAction.ERROR,
                kind=IoKind.WRITE,
                start=start,
                end=start + table.segment_bytes,
                times=None if victim == victims[0] else 2,
            )
        )
        job.start(rig.store.reclaimer.evict(victim))
        rig.settle()
    assert [int(table.state[victim]) for victim in victims] == [SegmentState.BAD] * 2
    rig.store.update_gauges()
    assert rig.metrics.segments_bad == 2
    assert rig.metrics.segments_used + rig.metrics.segments_free + rig.metrics.segments_bad == table.count
    assert rig.store.next_timer_ns() is not None, "it is tried again though nothing else happens"
    for _ in range(8):
        rig.now_ns += 2 * SPACE_RETRY_NS_MIN
        rig.settle()
    assert [int(table.state[victim]) for victim in victims] == [SegmentState.BAD, SegmentState.FREE]
    assert rig.metrics.erase_retries >= 3
    assert all(rig.get(ref, key_of(n)) in (None, payload_of(n)) for n in range(40))


def test_the_victim_is_the_first_that_no_read_holds() -> None:
    rig, _, _ = rig_of(60)
    table, reclaimer = rig.store.table, rig.store.reclaimer
    held: list[int] = []
    while (victim := reclaimer.choose()) not in held:
        assert victim is not None
        held.append(victim)
        table.hold(victim)
    assert sorted(held) == sorted(table.in_state(SegmentState.SEALED).tolist())
    assert victim == held[0], "all are held: the first has to do"
    for segment in held[1:]:
        table.release(segment)
        assert reclaimer.choose() == segment
        table.hold(segment)


def test_moves_do_not_wait_for_room_that_was_lost_with_the_open_segment() -> None:
    """The room of a victim's records is in the open segment; none is free until the victim is."""
    rig, gate, ref = rig_of(20)
    number = 100
    while rig.store.allocator.free_count():
        rig.put(ref, key_of(number), b"one more")
        number += 1
        rig.store.appender.open_segment()
        rig.settle()
    victim = location_segment(rig.location(ref, key_of(0)))
    assert rig.store.table.state[victim] == SegmentState.SEALED
    rig.catalog.pin(rig.catalog.index.find_many(index_keys(ref, key_of(0))))
    target = rig.store.allocator.open
    assert target is not None
    start = rig.store.table.offset(target.segment)
    end = start + rig.store.table.segment_bytes
    gate.inject(Fault(action=FaultAction.ERROR, kind=IoKind.WRITE, start=start, end=end, times=None))
    job.start(rig.store.reclaimer.evict(victim))
    for _ in range(200):
        rig.poll()
    assert not rig.store.reclaimer.running, "it does not wait for ever"
    gate.clear()
    rig.settle()
    assert rig.store.table.state[victim] != SegmentState.EVICTING
    assert isinstance(rig.put(ref, key_of(7777), b"room again"), Stored)
    rig.check_accounts()


def test_a_flood_of_small_puts_lets_reads_have_their_turns() -> None:
    """Each is as short as a block of the log, and is no more urgent than the class it comes in."""
    gate = Gate(MemoryDevice(size_bytes=16 * MiB))
    rig = StoreRig(gate, depth=4)
    ref = rig.namespace()
    rig.put(ref, key_of(0), payload_of(0))
    rig.settle()
    gate.hold()
    for number in range(1, 60):
        rig.begin_put(ref, key_of(number), payload_of(number, 1 * KiB))
        rig.poll()
    waiting = rig.queue.queued
    assert waiting > 40
    done: list[IoOp] = []
    read = IoOp(IoKind.READ, rig.store.table.offset(0), [pages(PAGE_BYTES)], flow=FlowClass.DECODE_READ)
    read.owner = done.append
    rig.queue.submit(read)
    ended = 0
    while not done:
        gate.release(1)
        ended += 1
        rig.poll()
    assert ended <= 4 + 2, "what was on the drive, and a turn of the writes"
    gate.release()
    rig.settle()


def test_what_commits_wait_for_goes_past_records() -> None:
    """The log, a segment's header, its index and its erasure; a record of any length does not."""
    rig, gate, ref = rig_of(20)
    seen: dict[bool, set[str]] = {True: set(), False: set()}
    table = rig.store.table

    def watch(op: IoOp) -> bool:
        if op.kind is IoKind.WRITE:
            page = (op.offset - table.offset(0)) // PAGE_BYTES % table.segment_pages
            ends = page + op.length_bytes // PAGE_BYTES
            where = "log" if op.offset < table.offset(0) else "header" if page == 0 else "record"
            seen[op.is_urgent].add("footer" if ends == table.segment_pages else where)
        return False

    gate.closed_for = watch
    rig.put(ref, key_of(30), payload_of(30, 1))
    rig.store.appender.open_segment()
    rig.put(ref, key_of(31), payload_of(31, 1))
    rig.settle()
    job.start(rig.store.reclaimer.evict(int(table.in_state(SegmentState.SEALED)[0])))
    rig.settle()
    assert seen[True] == {"log", "header", "footer"}
    assert seen[False] == {"record"}

"""Reads within their bounds: deadlines, windows, memory that is used up, readers that take nothing."""

from __future__ import annotations

import pytest

from kvstore.engine.api import ParcelSource
from kvstore.limits import READ_WINDOW_BYTES, SECOND_NS, KiB, MiB
from kvstore.testing.engine_driver import Collector
from kvstore.types.results import MissReason
from tests.engine_memory.reading_lab import Lab, numbers, payload


def test_after_its_deadline_a_reader_hears_nothing_more() -> None:
    lab = Lab()
    keys = lab.put(3, 300_000)
    lab.drive.hold()
    sink = lab.start(keys, deadline_ns=lab.driver.now_ns + SECOND_NS)
    timer_ns = lab.engine.next_timer_ns()
    assert timer_ns is not None
    assert timer_ns <= lab.driver.now_ns + SECOND_NS
    lab.driver.advance(2 * SECOND_NS)
    assert sink.done
    assert sink.answers == [MissReason.DEADLINE] * 3
    lab.drive.release()
    lab.check_memory()
    late = lab.start(keys, deadline_ns=lab.driver.now_ns)
    assert late.answers == [MissReason.DEADLINE] * 3
    assert lab.get(keys) == numbers(1, 3, 300_000)


@pytest.mark.parametrize("cache", [0, 64 * MiB])
def test_a_request_stages_no_more_than_its_window(cache: int) -> None:
    lab = Lab(size=128 * MiB, cache=cache, staging=64 * MiB)
    keys = lab.put(50, 900_000)
    sink = lab.start(keys, hold=True)
    lab.driver.run_until(lambda: sink.held_bytes > READ_WINDOW_BYTES // 2)
    for _ in range(50):
        lab.driver.advance(1000)
    staged = sink.held_bytes
    assert staged <= READ_WINDOW_BYTES + MiB
    assert not sink.done
    other = lab.start(keys[:4])
    lab.driver.run_until(lambda: other.done)
    sink.let_go()
    lab.driver.run_until(lambda: sink.done)
    assert sink.answers == numbers(1, 50, 900_000)
    lab.check_memory()


class Patient(Collector):
    """Leaves parcels where they are until it is told to take them."""

    source: ParcelSource | None = None

    def landed(self, source: ParcelSource) -> None:
        self.source = source

    def take_all(self) -> None:
        assert self.source is not None
        super().landed(self.source)


def test_what_has_landed_is_right_though_its_segment_is_another_by_now() -> None:
    lab = Lab(size=64 * MiB, segment_bytes=4 * MiB)
    keys = lab.put(4, 900_000)
    segment = (lab.place(keys[0]) - lab.engine.store.table.offset(0)) // lab.engine.store.table.segment_bytes
    generation = int(lab.engine.store.table.generation[segment])
    sink = Patient(4)
    lab.engine.read(lab.driver.read_spec(lab.ref, keys), sink, now_ns=lab.driver.now_ns)
    lab.driver.run_until(lambda: lab.engine.idle and sink.source is not None)
    assert sink.answers == [None] * 4
    lab.driver.delete(lab.ref, keys)
    for first in range(100, 300, 20):
        lab.put(20, 900_000, first=first)
    assert lab.engine.store.table.generation[segment] != generation, "a landed parcel does not keep its segment"
    sink.take_all()
    assert sink.done
    assert sink.answers == numbers(1, 4, 900_000)
    lab.check_memory()


def test_what_landed_and_is_not_taken_by_the_deadline_is_given_back() -> None:
    lab = Lab()
    keys = lab.put(4, 300_000)
    sink = Patient(4)
    lab.engine.read(lab.driver.read_spec(lab.ref, keys), sink, now_ns=lab.driver.now_ns)
    lab.driver.run_until(lambda: lab.engine.idle and sink.source is not None)
    lab.driver.advance(lab.driver.timeout_ns + SECOND_NS)
    assert sink.done
    assert sink.answers == [MissReason.DEADLINE] * 4
    sink.take_all()
    lab.check_memory()


def test_a_small_request_does_not_wait_behind_a_large_one() -> None:
    lab = Lab(size=128 * MiB, staging=64 * MiB)
    keys = lab.put(60, 900_000)
    lab.drive.hold()
    large = lab.start(keys[:59])
    small = lab.start(keys[59:])
    while not small.done:
        lab.drive.release(1)
        lab.driver.advance(1000)
    assert large.answers.count(None) > 35
    lab.drive.release()
    lab.driver.run_until(lambda: large.done)
    lab.check_memory()


def test_memory_that_is_used_up_makes_readers_wait_and_not_fail() -> None:
    lab = Lab(staging=2 * MiB)
    keys = lab.put(20, 400_000)
    sinks = [lab.start(keys[number : number + 5], hold=True) for number in range(15)]
    for _ in range(20):
        lab.driver.advance(1000)
    assert not all(one.done for one in sinks)
    while not all(one.done for one in sinks):
        for one in sinks:
            held, one.held = one.held, []
            for item in held:
                item.release()
        lab.driver.advance(1000)
    for number, one in enumerate(sinks):
        one.let_go()
        assert one.answers == numbers(number + 1, 5, 400_000)
    lab.check_memory()


def test_a_thousand_cancelled_reads_leave_nothing_behind() -> None:
    lab = Lab(cache=MiB, staging=4 * MiB)
    keys = lab.put(10, 60_000)
    lab.engine.cache.clear()
    for number in range(1000):
        sink = Collector(10)
        handle = lab.engine.read(lab.driver.read_spec(lab.ref, keys), sink, now_ns=lab.driver.now_ns)
        if number % 3 == 0:
            lab.engine.poll(lab.driver.now_ns)
        if not sink.done:
            handle.cancel()
            sink.cancelled = True
    lab.check_memory()
    assert lab.get(keys) == numbers(1, 10, 60_000)


def test_reads_wait_for_a_full_queue_and_leave_nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that refused one half-way would leave its segment held for ever."""
    lab = Lab(queue_depth=1)
    keys = lab.put(24, 8 * KiB)
    monkeypatch.setattr("kvstore.device.queue.QUEUED_OPS_MAX", 4)
    monkeypatch.setattr("kvstore.engine.loads.QUEUED_OPS_MAX", 4)
    monkeypatch.setattr("kvstore.engine.loads.READ_TURN_OPS_MAX", 2)
    sinks = [lab.start([one]) for one in keys]
    lab.driver.run_until(lambda: all(sink.done for sink in sinks))
    assert [sink.answers for sink in sinks] == [[payload(n, 8 * KiB)] for n in range(1, 25)]
    lab.check_memory()
    table = lab.engine.store.table
    assert not any(table.is_held(segment) for segment in range(table.count))

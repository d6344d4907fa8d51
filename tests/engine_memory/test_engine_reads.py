"""What the assembled engine reads: hits from RAM and drive, joined, shared, verified, within its bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.device.base import IoKind
from kvstore.device.memory import MemoryDevice
from kvstore.engine.api import ParcelSource
from kvstore.engine.engine import DriveEngine, EngineSettings
from kvstore.engine.location import location_page, location_segment
from kvstore.engine.namespaces import index_key
from kvstore.engine.volatile import VolatilePut
from kvstore.errors import ChecksumMismatch
from kvstore.limits import PAGE_BYTES, QUEUE_DEPTH_DEFAULT, READ_WINDOW_BYTES, SECOND_NS, KiB, MiB
from kvstore.testing.engine_driver import Collector, Driver
from kvstore.testing.faulty_device import Fault, FaultAction, FaultyDevice
from kvstore.types.checksum import crc_table
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, MissReason, Refused, Stored


def manifest(name: str = "m") -> bytes:
    layout = KVLayout.opaque(chunk_bytes=8 * MiB, chunk_tokens=16)
    return Namespace(tenant="t", model=name, weights="w", layout=layout).manifest()


def key(number: int, *, prefix: int | None = None) -> bytes:
    """A record key; equal `prefix`es make keys that the index cannot tell apart."""
    first = number if prefix is None else prefix
    return first.to_bytes(16, "little") + number.to_bytes(16, "little")


def payload(number: int, length: int) -> bytes:
    return (number.to_bytes(8, "little") * (length // 8 + 1))[:length]


class Lab:
    """An engine on a drive in memory that fails on demand."""

    def __init__(
        self,
        *,
        size: int = 64 * MiB,
        cache: int = 0,
        staging: int = 32 * MiB,
        segment_bytes: int = 0,
        queue_depth: int = QUEUE_DEPTH_DEFAULT,
    ) -> None:
        self.drive = FaultyDevice(MemoryDevice(size_bytes=size))
        self.settings = EngineSettings(
            cache_bytes=cache,
            staging_bytes=staging,
            segment_bytes=segment_bytes,
            queue_depth=queue_depth,
            prefault=False,
        )
        self.engine = DriveEngine(self.drive, self.settings, now_ns=1)
        self.driver = Driver(self.engine)
        self.ref = self.driver.namespace(manifest())

    def put(self, count: int, length: int, *, first: int = 1) -> list[bytes]:
        """Put a chain of records one after the other on the drive; their keys."""
        records = [(key(n), payload(n, length)) for n in range(first, first + count)]
        outcomes = self.driver.put(self.ref, records, chain=True)
        assert all(isinstance(one, Stored) for one in outcomes)
        return [k for k, _ in records]

    def get(self, keys: list[bytes], **changes: object) -> list[bytes | MissReason | None]:
        return self.driver.get(self.ref, keys, **changes)

    def start(self, keys: list[bytes], *, hold: bool = False, **changes: object) -> Collector:
        sink = Collector(len(keys), hold=hold)
        self.engine.read(self.driver.read_spec(self.ref, keys, **changes), sink, now_ns=self.driver.now_ns)
        return sink

    def place(self, k: bytes) -> int:
        """Byte offset of a record on the drive."""
        key16 = index_key(self.ref, k)
        location = self.engine.catalog.index.get(
            int.from_bytes(key16[:8], "little"), int.from_bytes(key16[8:], "little")
        )
        return self.engine.store.table.offset(location_segment(location), location_page(location))

    def check_memory(self) -> None:
        """Everything that is not cached has come back to the arena."""
        self.driver.run_until(lambda: self.engine.idle)
        cached = (self.engine.cache.space(self.ref.salt) or {}).values()
        held = sum(record.piece.length for record in cached if record.piece is not None)
        assert self.engine.cache.arena.used_bytes == held


def numbers(first: int, count: int, length: int) -> list[bytes]:
    return [payload(n, length) for n in range(first, first + count)]


@pytest.mark.parametrize("cache", [0, 8 * MiB])
def test_what_was_put_is_read(cache: int) -> None:
    lab = Lab(cache=cache)
    lengths = [0, 1, 4095, 4096, 4097, 60_000, 300_000, 700_001]
    records = [(key(n), payload(n, length)) for n, length in enumerate(lengths)]
    assert all(isinstance(one, Stored) for one in lab.driver.put(lab.ref, records, chain=True))
    keys = [k for k, _ in records]
    assert lab.get(keys) == [p for _, p in records]
    assert lab.driver.match(lab.ref, [*keys, key(99)]).statuses == bytes(8) + bytes([MissReason.ABSENT])
    assert lab.get([key(99)]) == [MissReason.ABSENT]
    assert lab.get([]) == []
    assert [type(one) for one in lab.driver.put(lab.ref, records[:2])] == [Exists, Exists]
    lab.check_memory()


def test_neighbours_are_read_in_one_io_whatever_the_order_of_the_request() -> None:
    lab = Lab()
    keys = lab.put(16, 56 * KiB)
    shuffled = keys[::-2] + keys[0::2]
    before = lab.engine.metrics.read_ios
    assert lab.get(shuffled) == [payload(int.from_bytes(k[:16], "little"), 56 * KiB) for k in shuffled]
    assert lab.engine.metrics.read_ios - before == 1
    lab.check_memory()


@pytest.mark.parametrize("cache", [0, 32 * MiB])
def test_many_concurrent_readers_of_one_prefix_read_the_drive_once(cache: int) -> None:
    lab = Lab(cache=cache)
    keys = lab.put(8, MiB // 2 + 100 * KiB)
    lab.engine.cache.clear()
    before = lab.engine.metrics.read_ios
    lab.drive.hold()
    leader = lab.start(keys)
    handle_sink = Collector(8)
    handle = lab.engine.read(lab.driver.read_spec(lab.ref, keys), handle_sink, now_ns=lab.driver.now_ns)
    followers = [lab.start(keys) for _ in range(62)]
    handle.cancel()
    handle_sink.cancelled = True
    lab.drive.release()
    lab.driver.run_until(lambda: leader.done and all(one.done for one in followers))
    assert lab.engine.metrics.read_ios - before == 8
    for one in (leader, *followers):
        assert one.answers == numbers(1, 8, MiB // 2 + 100 * KiB)
    lab.check_memory()


def test_followers_survive_a_cancelled_leader_and_a_failure_is_not_remembered() -> None:
    lab = Lab()
    keys = lab.put(2, 200 * KiB)
    lab.drive.hold()
    leader = Collector(2)
    handle = lab.engine.read(lab.driver.read_spec(lab.ref, keys), leader, now_ns=lab.driver.now_ns)
    follower = lab.start(keys)
    handle.cancel()
    handle.cancel()
    leader.cancelled = True
    lab.drive.release()
    lab.driver.run_until(lambda: follower.done)
    assert follower.answers == numbers(1, 2, 200 * KiB)
    lab.drive.inject(Fault(action=FaultAction.ERROR, kind=IoKind.READ, start=lab.place(keys[0]), times=3))
    sinks = [lab.start(keys[:1]) for _ in range(5)]
    lab.driver.run_until(lambda: all(one.done for one in sinks))
    assert [one.answers for one in sinks] == [[MissReason.IO]] * 5
    lab.drive.clear()
    assert lab.get(keys) == numbers(1, 2, 200 * KiB)
    lab.check_memory()


def test_a_bit_that_flips_on_the_way_is_read_again_and_counted() -> None:
    lab = Lab()
    keys = lab.put(4, 20_000)
    lab.drive.inject(Fault(action=FaultAction.FLIP, kind=IoKind.READ, bit=8 * (PAGE_BYTES + 77)))
    assert lab.get(keys) == numbers(1, 4, 20_000)
    assert lab.engine.metrics.checksum_errors_read == 1
    assert lab.engine.metrics.quarantined_records == 0
    lab.check_memory()


@pytest.mark.parametrize("ranges", [None, [[(70_000, 100)]]], ids=["whole", "range"])
def test_a_bit_that_flipped_in_memory_is_found_when_a_client_tells_of_it(ranges: list[list[tuple[int, int]]]) -> None:
    lab = Lab(cache=8 * MiB)
    keys = lab.put(3, 200_000)
    assert lab.get(keys) == numbers(1, 3, 200_000)
    good = lab.get(keys, ranges=ranges)
    copy = lab.engine.cache.find(lab.ref.salt, keys[1])
    assert copy is not None
    copy.view[70_001] ^= 16
    metrics = lab.engine.metrics
    reads = metrics.read_ios
    assert lab.get(keys, ranges=ranges, verify=True) == good
    assert metrics.read_ios > reads
    assert (metrics.checksum_errors_reported, metrics.checksum_errors_memory) == (3, 1)
    assert (metrics.checksum_errors_read, metrics.quarantined_records) == (0, 0), "the drive is not to blame"
    assert lab.get(keys, ranges=ranges) == good
    lab.check_memory()


@pytest.mark.parametrize("at", [0, 100, 260, PAGE_BYTES, PAGE_BYTES + 19_999], ids=lambda at: f"byte {at}")
def test_a_bit_that_flipped_at_rest_costs_its_record_and_no_other(at: int) -> None:
    lab = Lab()
    keys = lab.put(4, 20_000)
    lab.drive.flip_at_rest(lab.place(keys[1]) + at, 3)
    good = numbers(1, 4, 20_000)
    assert lab.get(keys) == [good[0], MissReason.CORRUPT, good[2], good[3]]
    assert lab.engine.metrics.quarantined_records == 1
    attempts = lab.engine.metrics.read_ios
    for _ in range(5):
        assert lab.driver.prefix(lab.ref, keys) == 1
        assert lab.driver.match(lab.ref, keys[1:2]).statuses == bytes([MissReason.CORRUPT])
        assert lab.get(keys[1:2]) == [MissReason.CORRUPT]
    assert lab.engine.metrics.read_ios == attempts, "nobody goes to the drive for it again"
    assert "quarantined" in lab.engine.explain(lab.ref, keys[1])[0].text
    assert isinstance(lab.driver.put(lab.ref, [(keys[1], good[1])])[0], Stored)
    assert lab.get(keys) == good
    lab.check_memory()


def test_an_error_that_passes_keeps_the_record_and_one_that_stays_ends_it() -> None:
    lab = Lab()
    keys = lab.put(4, 20_000)
    good = numbers(1, 4, 20_000)
    bad = Fault(
        action=FaultAction.ERROR, kind=IoKind.READ, start=lab.place(keys[2]), end=lab.place(keys[2]) + 1, times=2
    )
    lab.drive.inject(bad)
    assert lab.get(keys) == [good[0], good[1], MissReason.IO, good[3]], "joined first, then each alone"
    assert lab.get(keys) == good
    bad.times = None
    assert lab.get(keys)[2] == MissReason.IO
    assert lab.driver.match(lab.ref, keys[2:3]).statuses == b"\0"
    assert lab.get(keys)[2] == MissReason.IO
    assert lab.driver.match(lab.ref, keys[2:3]).statuses == bytes([MissReason.CORRUPT])
    assert lab.engine.metrics.quarantined_records == 1
    lab.check_memory()


def test_a_truncated_drive_is_a_miss_at_the_first_get_and_absent_for_the_next_lookup() -> None:
    lab = Lab()
    keys = lab.put(1, 50_000)
    lab.drive.inject(Fault(action=FaultAction.SHORT, kind=IoKind.READ, keep_bytes=PAGE_BYTES, times=None))
    hits = attempts = 0
    for _ in range(5):
        if lab.driver.prefix(lab.ref, keys):
            hits += 1
            assert lab.get(keys) == [MissReason.CORRUPT]
            attempts += 1
    assert (hits, attempts) == (1, 1)
    lab.check_memory()


def test_keys_that_the_index_cannot_tell_apart_never_get_each_others_bytes() -> None:
    lab = Lab()
    records = [(key(n, prefix=n % 256), payload(n, 5000)) for n in range(300)]
    lab.driver.put(lab.ref, records)
    answers = lab.get([k for k, _ in records]) + lab.get([key(n, prefix=n % 256) for n in range(1000, 1300)])
    for got, (_, wanted) in zip(answers[:300], records, strict=True):
        assert got in (wanted, MissReason.ABSENT)
    assert sum(isinstance(got, bytes) for got in answers[:300]) == 256
    assert answers[300:] == [MissReason.ABSENT] * 300
    assert lab.engine.metrics.key_collisions > 0
    assert lab.engine.metrics.quarantined_records == 0
    lab.check_memory()


def test_colliding_keys_in_one_batch_and_in_the_cache() -> None:
    lab = Lab(cache=8 * MiB)
    one, other = key(1, prefix=7), key(2, prefix=7)
    lab.driver.put(lab.ref, [(one, payload(1, 9000))])
    for _ in range(2):
        assert lab.get([other, one, one, other]) == [
            MissReason.ABSENT,
            payload(1, 9000),
            payload(1, 9000),
            MissReason.ABSENT,
        ]
    lab.engine.cache.clear()
    assert lab.get([one, other, one])[0::2] == [payload(1, 9000)] * 2
    lab.check_memory()


@pytest.mark.parametrize("cache", [0, 16 * MiB])
@pytest.mark.parametrize("length", [100_000, 900_000])
def test_ranges_bring_the_blocks_that_cover_them(cache: int, length: int) -> None:
    lab = Lab(cache=cache)
    keys = lab.put(3, length)
    lab.engine.cache.clear()
    whole = numbers(1, 3, length)
    ranges = [(10, 1), (4096 * 5, 4096), (4096 * 6 + 5, 10), (length - 1, 1), (7, 0)]
    sinks = [lab.start(keys, ranges=[ranges]), lab.start(keys, ranges=[ranges[:1], ranges, [(0, 0)]])]
    lab.driver.run_until(lambda: all(one.done for one in sinks))
    last = (length - 1) // 4096 * 4096
    for number, pieces in enumerate(sinks[0].pieces):
        assert sorted(pieces) == [
            (0, whole[number][:4096]),
            (4096 * 5, whole[number][4096 * 5 : 4096 * 7]),
            (last, whole[number][last:]),
        ]
    assert sinks[1].answers == [whole[0][:4096], sinks[0].answers[1], b""]
    assert sinks[1].record_bytes == [length] * 3
    assert lab.get(keys, ranges=[[(0, length + 1)], [(0, length)], [(length, 0)]]) == [
        MissReason.LAYOUT,
        whole[1],
        b"",
    ]
    lab.check_memory()


def test_a_range_of_a_long_record_costs_one_read_once_its_header_is_known() -> None:
    lab = Lab()
    keys = lab.put(1, 900_000)
    metrics = lab.engine.device_metrics
    assert lab.get(keys, ranges=[[(400_000, 100)]])[0] == payload(1, 900_000)[97 * 4096 : 98 * 4096]
    reads, read_bytes = metrics.reads, metrics.read_bytes
    lab.get(keys, ranges=[[(500_000, 100)]])
    assert metrics.reads - reads == 1
    assert metrics.read_bytes - read_bytes <= 2 * PAGE_BYTES
    lab.check_memory()


def test_a_flipped_bit_in_a_range_is_a_miss_and_outside_of_it_is_not() -> None:
    lab = Lab()
    keys = lab.put(1, 900_000)
    lab.drive.flip_at_rest(lab.place(keys[0]) + PAGE_BYTES + 500_000, 0)
    assert lab.get(keys, ranges=[[(0, 100)]]) == [payload(1, 900_000)[:4096]]
    assert lab.get(keys, ranges=[[(0, 100), (500_000, 1)]]) == [MissReason.CORRUPT]
    assert lab.driver.match(lab.ref, keys).statuses == bytes([MissReason.CORRUPT])
    lab.check_memory()


@pytest.mark.parametrize("length", [6 * MiB, 17 * MiB])
def test_a_record_longer_than_memory_would_like_is_read_piece_by_piece(length: int) -> None:
    lab = Lab(size=160 * MiB, staging=40 * MiB, segment_bytes=32 * MiB)
    keys = lab.put(2, length)
    lab.driver.block_bytes = 64 * KiB
    assert lab.get(keys) == numbers(1, 2, length)
    assert lab.get([keys[0], keys[0]]) == [payload(1, length)] * 2
    lab.check_memory()


def test_a_reader_who_pinned_a_copy_gets_no_other() -> None:
    lab = Lab(cache=8 * MiB)
    keys = lab.put(2, 5000)
    sink = lab.start(keys)
    lab.driver.run_until(lambda: sink.done)
    ids = sink.content_ids
    assert lab.get(keys, content_ids=b"".join(ids)) == numbers(1, 2, 5000)
    assert lab.get(keys, content_ids=bytes(16) + b"x" * 16) == [payload(1, 5000), MissReason.ABSENT]
    lab.driver.delete(lab.ref, keys[:1])
    lab.driver.put(lab.ref, [(keys[0], payload(1, 5000))])
    assert lab.get(keys, content_ids=b"".join(ids)) == [MissReason.ABSENT, payload(2, 5000)]
    lab.engine.cache.clear()
    assert lab.get(keys, content_ids=b"".join(ids), ranges=[[(0, 5000)]])[0] == MissReason.ABSENT


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


def test_a_key_given_twice_is_read_once_and_answered_twice() -> None:
    lab = Lab()
    keys = lab.put(2, 300_000)
    before = lab.engine.metrics.read_ios
    assert lab.get([keys[0], keys[1], keys[0], keys[0]]) == [payload(n, 300_000) for n in (1, 2, 1, 1)]
    assert lab.engine.metrics.read_ios - before == 1
    lab.check_memory()


def test_a_record_in_ram_needs_no_drive_until_it_is_deleted_or_dropped() -> None:
    lab = Lab(cache=16 * MiB)
    keys = lab.put(4, 100_000)
    before = lab.engine.metrics.read_ios
    assert lab.get(keys) == numbers(1, 4, 100_000)
    assert lab.engine.metrics.read_ios == before
    assert lab.engine.metrics.cache_hits == 4
    assert lab.driver.delete(lab.ref, [keys[0], key(77)]) == bytes([0, MissReason.ABSENT])
    assert lab.get(keys[:2]) == [MissReason.ABSENT, payload(2, 100_000)]
    old, lab.ref = lab.ref, lab.driver.drop(lab.ref)
    assert lab.get(keys) == [MissReason.ABSENT] * 4
    assert lab.driver.get(old, keys) == [MissReason.ABSENT] * 4
    assert lab.driver.match(old, keys).statuses == bytes([MissReason.ABSENT]) * 4
    assert len(lab.engine.cache) == 0
    lab.check_memory()


def test_a_record_deleted_while_it_is_read_does_not_come_to_life_in_the_cache() -> None:
    lab = Lab(cache=16 * MiB)
    keys = lab.put(2, 100_000)
    lab.engine.cache.clear()
    lab.drive.hold()
    sink = lab.start(keys)
    statuses: list[bytes] = []
    lab.engine.delete(lab.ref, keys[0], statuses.append)
    lab.drive.release()
    lab.driver.run_until(lambda: sink.done and bool(statuses))
    assert lab.get(keys) == [MissReason.ABSENT, payload(2, 100_000)]
    lab.check_memory()


def test_prefetch_brings_records_into_ram() -> None:
    lab = Lab(cache=16 * MiB)
    keys = lab.put(6, 100_000)
    lab.engine.cache.clear()
    assert lab.engine.prefetch(lab.ref, b"".join([*keys[:4], key(99)]), now_ns=lab.driver.now_ns) == 4
    lab.driver.run_until(lambda: len(lab.engine.cache) == 4)
    assert lab.engine.prefetch(lab.ref, b"".join(keys), now_ns=lab.driver.now_ns) == 2
    lab.check_memory()
    before = lab.engine.metrics.read_ios
    assert lab.get(keys) == numbers(1, 6, 100_000)
    assert lab.engine.metrics.read_ios == before
    off = Lab()
    assert off.engine.prefetch(off.ref, b"".join(off.put(2, 100)), now_ns=off.driver.now_ns) == 0


def test_received_but_not_durable_is_pending_except_for_those_who_accept_that() -> None:
    lab = Lab(cache=16 * MiB)
    lab.driver.run_until(lambda: lab.engine.idle)
    lab.drive.hold()
    records = [(key(n), payload(n, 100_000)) for n in range(3)]
    outcomes = [lab.driver.start_put(lab.driver.spec(lab.ref, k, p), p) for k, p in records]
    keys = [k for k, _ in records]
    lab.driver.advance(1000)
    assert lab.driver.match(lab.ref, keys).statuses == bytes([MissReason.PENDING]) * 3
    assert lab.get(keys) == [MissReason.PENDING] * 3
    assert lab.get(keys, accept_pending=True) == [p for _, p in records]
    assert "put is in progress" in lab.engine.explain(lab.ref, keys[0])[0].text
    waited: list[bytes] = []
    lab.engine.wait(lab.ref, b"".join(keys), lab.driver.now_ns + 100 * SECOND_NS, waited.append)
    early: list[bytes] = []
    lab.engine.wait(lab.ref, b"".join(keys), lab.driver.now_ns + SECOND_NS, early.append)
    lab.driver.advance(2 * SECOND_NS)
    assert early == [bytes([MissReason.PENDING]) * 3]
    assert not waited
    lab.drive.release()
    lab.driver.run_until(lambda: all(outcomes) and bool(waited))
    assert waited == [bytes(3)]
    assert lab.get(keys) == [p for _, p in records]
    lab.check_memory()


def test_a_delete_reaches_a_record_that_was_received_and_is_not_durable_yet() -> None:
    lab = Lab()
    lab.driver.run_until(lambda: lab.engine.idle)
    lab.drive.hold()
    records = [(key(n), payload(n, 100_000)) for n in range(3)]
    outcomes = [lab.driver.start_put(lab.driver.spec(lab.ref, k, p), p) for k, p in records]
    lab.driver.advance(1000)
    statuses: list[bytes] = []
    lab.engine.delete(lab.ref, b"".join([key(0), key(7), key(2)]), statuses.append)
    lab.driver.advance(1000)
    assert not statuses, "who is told that it is gone must not find it later"
    lab.drive.release()
    lab.driver.run_until(lambda: all(outcomes) and bool(statuses))
    assert statuses == [bytes([0, MissReason.ABSENT, 0])]
    assert lab.get([k for k, _ in records]) == [MissReason.ABSENT, payload(1, 100_000), MissReason.ABSENT]
    lab.check_memory()


def test_volatile_records_live_in_ram_for_their_ttl_and_never_touch_the_drive() -> None:
    lab = Lab(cache=16 * MiB)
    lab.driver.run_until(lambda: lab.engine.idle)
    written = lab.engine.device_metrics.written_bytes
    body = payload(5, 50_000)
    spec = lab.driver.spec(lab.ref, key(5), body, volatile_ttl_ns=10 * SECOND_NS, part=1)
    assert [type(one) for one in lab.driver.put_specs([(spec, body)])] == [Stored]
    assert [type(one) for one in lab.driver.put_specs([(spec, body)])] == [Exists]
    assert lab.get([key(5)]) == [body]
    assert lab.driver.match(lab.ref, [key(5), key(6)]).statuses == bytes([0, MissReason.ABSENT])
    assert "RAM only" in lab.engine.explain(lab.ref, key(5))[0].text
    assert lab.engine.device_metrics.written_bytes == written
    lab.driver.advance(11 * SECOND_NS)
    assert lab.get([key(5)]) == [MissReason.ABSENT]
    assert lab.driver.match(lab.ref, [key(5)]).statuses == bytes([MissReason.ABSENT])
    spec = lab.driver.spec(lab.ref, key(5), body, volatile_ttl_ns=10 * SECOND_NS, part=1)
    lab.driver.put_specs([(spec, body)])
    assert lab.driver.delete(lab.ref, [key(5)]) == b"\0"
    assert lab.get([key(5)]) == [MissReason.ABSENT]
    lab.check_memory()
    off = Lab()
    spec = off.driver.spec(off.ref, key(5), body, volatile_ttl_ns=10 * SECOND_NS)
    assert isinstance(off.driver.put_specs([(spec, body)])[0], Refused)


def test_a_volatile_writer_that_ended_writes_no_memory_and_keeps_none() -> None:
    lab = Lab(cache=16 * MiB)
    body = payload(5, 3 * 4096)
    spec = replace(
        lab.driver.spec(lab.ref, key(5), body, volatile_ttl_ns=10 * SECOND_NS), crc_table=None, block_bytes=4096
    )
    tickets: list[object] = []
    lab.engine.open_put(spec, tickets.append, streaming=True)
    ticket = tickets[0]
    assert isinstance(ticket, VolatilePut)
    lent: list[memoryview] = []
    for _ in range(3):
        ticket.slice_buffer(4096, lambda memory: lent.append(memory) if memory is not None else None)
    bad, late, never = lent
    own = ticket._payload
    with pytest.raises(ChecksumMismatch):
        ticket.slice_filled(0, bad, b"\0\0\0\0")
    own[:] = bytes(len(own))  # as whoever got that memory next
    late[:] = never[:] = b"L" * 4096
    ticket.slice_filled(4096, late, crc_table(late, 4096))
    assert bytes(own) == bytes(len(own))
    ticket.abort()
    lab.check_memory()


def test_two_tenants_with_one_key_see_only_their_own() -> None:
    lab = Lab(cache=16 * MiB)
    other = lab.driver.namespace(manifest("other"))
    lab.driver.put(lab.ref, [(key(1), payload(1, 9000))])
    assert lab.driver.get(other, [key(1)]) == [MissReason.ABSENT]
    assert lab.driver.delete(other, [key(1)]) == bytes([MissReason.ABSENT])
    lab.driver.put(other, [(key(1), payload(2, 9000))])
    assert lab.get([key(1)]) == [payload(1, 9000)]
    assert lab.driver.get(other, [key(1)]) == [payload(2, 9000)]


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

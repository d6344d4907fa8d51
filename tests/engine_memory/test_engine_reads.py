"""What the assembled engine reads: hits from RAM and drive, joined and shared, and nothing of others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.device.base import IoKind
from kvstore.engine.volatile import VolatilePut
from kvstore.errors import ChecksumMismatch
from kvstore.limits import PAGE_BYTES, SECOND_NS, KiB, MiB
from kvstore.testing.engine_driver import Collector
from kvstore.testing.faulty_device import Fault, FaultAction
from kvstore.types.checksum import crc_table
from kvstore.types.results import Exists, MissReason, Refused, Stored
from tests.engine_memory.reading_lab import Lab, key, manifest, numbers, payload


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

"""Puts reach the drive, come back after a restart, and are counted exactly."""

from __future__ import annotations

import random

import pytest

from kvstore.device.memory import MemoryDevice
from kvstore.engine.api import Durability
from kvstore.errors import ChecksumMismatch
from kvstore.limits import KiB, MiB
from kvstore.testing.store_rig import StoreRig
from kvstore.types.results import Exists, Refused, Stored


def key_of(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def payload_of(number: int, length: int = 64 * KiB) -> bytes:
    return random.Random(-1 - number).randbytes(length)


def reopened(rig: StoreRig) -> StoreRig:
    return StoreRig(rig.device, now_ns=rig.now_ns)


def test_what_was_stored_is_there_after_a_restart() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=32 * MiB))
    ref = rig.namespace()
    for number in range(100):
        outcome = rig.put(ref, key_of(number), payload_of(number))
        assert isinstance(outcome, Stored)
        assert outcome.durable
    rig.settle()
    again = reopened(rig)
    again_ref = again.store.namespaces.by_digest(ref.digest)
    assert again_ref == ref
    assert again.store.recovered.records == 100
    for number in range(100):
        assert again.get(ref, key_of(number)) == payload_of(number)
    assert again.ledger.live_bytes == rig.ledger.live_bytes == 100 * 68 * KiB
    assert again.recount_bytes() == again.ledger.live_bytes
    again.check_accounts()


@pytest.mark.parametrize("length", [0, 1, 511, 512, 4095, 4096, 4097, 65536, 900 * KiB])
def test_every_length_round_trips(length: int) -> None:
    rig = StoreRig(MemoryDevice(size_bytes=16 * MiB))
    ref = rig.namespace()
    payload = payload_of(1, length)
    assert isinstance(rig.put(ref, key_of(1), payload, block_bytes=4 * KiB), Stored)
    assert rig.get(ref, key_of(1)) == payload
    assert reopened(rig).get(ref, key_of(1)) == payload


def test_many_puts_at_once_evict_and_stay_exact() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=24 * MiB))
    ref = rig.namespace()
    results = [rig.begin_put(ref, key_of(n), payload_of(n)) for n in range(1000)]
    rig.settle(lambda: all(result.outcome is not None for result in results))
    rig.settle()
    assert all(isinstance(result.outcome, Stored) for result in results)
    there = 0
    for number in range(1000):
        found = rig.get(ref, key_of(number))
        assert found is None or found == payload_of(number)
        there += found is not None
    assert there > 250
    assert rig.recount_bytes() == rig.ledger.live_bytes == there * 68 * KiB
    rig.check_accounts()
    again = reopened(rig)
    assert again.store.recovered.records == there
    assert again.ledger.live_bytes == rig.ledger.live_bytes
    again.check_accounts()


def test_a_second_put_of_a_key_exists() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=16 * MiB))
    ref = rig.namespace()
    first = rig.begin_put(ref, key_of(1), payload_of(1))
    second = rig.begin_put(ref, key_of(1), payload_of(2))
    rig.settle(lambda: second.outcome is not None)
    assert isinstance(first.outcome, Stored)
    assert isinstance(second.outcome, Exists)
    assert rig.get(ref, key_of(1)) == payload_of(1)
    assert rig.metrics.exists_records == 1


def test_a_second_put_gets_the_ticket_when_the_first_gives_up() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=16 * MiB))
    ref = rig.namespace()
    first = rig.begin_put(ref, key_of(1), payload_of(1), commit=False)
    second = rig.begin_put(ref, key_of(1), payload_of(2))
    assert second.ticket is None
    assert first.ticket is not None
    first.ticket.abort()
    first.ticket.abort()
    rig.settle(lambda: second.outcome is not None)
    assert isinstance(second.outcome, Stored)
    assert rig.get(ref, key_of(1)) == payload_of(2)


def test_bytes_that_do_not_match_their_table_are_not_stored() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=16 * MiB))
    ref = rig.namespace()
    free = rig.arena.free_bytes
    flipped = bytearray(payload_of(1))
    flipped[5] ^= 1
    with pytest.raises(ChecksumMismatch):
        rig.begin_put(ref, key_of(1), payload_of(1), arriving=bytes(flipped))
    assert rig.arena.free_bytes == free
    assert not rig.store.writer.pending
    assert rig.get(ref, key_of(1)) is None


def test_deleted_stays_deleted_and_can_be_put_again() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=16 * MiB))
    ref = rig.namespace()
    for number in range(20):
        rig.put(ref, key_of(number), payload_of(number))
    assert rig.delete(ref, [key_of(3), key_of(99), key_of(4)]) == bytes([0, 1, 0])
    rig.put(ref, key_of(4), payload_of(40))
    again = reopened(rig)
    assert again.get(ref, key_of(3)) is None
    assert again.get(ref, key_of(4)) == payload_of(40)
    assert again.store.recovered.records == 19
    assert again.recount_bytes() == again.ledger.live_bytes == rig.ledger.live_bytes
    # The room behind the tombstone's place is used after a restart, never the room before it.
    again.put(ref, key_of(3), payload_of(30))
    assert reopened(again).get(ref, key_of(3)) == payload_of(30)


def test_a_dropped_namespace_is_empty_at_once_and_after_a_restart() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=16 * MiB))
    ref, other = rig.namespace("a"), rig.namespace("b")
    for number in range(10):
        rig.put(ref, key_of(number), payload_of(number))
        rig.put(other, key_of(number), payload_of(100 + number))
    errors: list[OSError | None] = []
    fresh = rig.ledger.drop_namespace(ref, errors.append)
    rig.settle(lambda: bool(errors))
    assert errors == [None]
    assert rig.ledger.live_bytes == 10 * 68 * KiB
    assert rig.get(fresh, key_of(1)) is None
    assert isinstance(rig.put(ref, key_of(1), payload_of(1)), Refused)
    rig.put(fresh, key_of(1), payload_of(7))
    again = reopened(rig)
    assert again.get(fresh, key_of(1)) == payload_of(7)
    assert again.get(other, key_of(1)) == payload_of(101)
    assert again.get(fresh, key_of(2)) is None
    assert again.ledger.live_bytes == rig.ledger.live_bytes == 11 * 68 * KiB
    again.check_accounts()


def test_power_durability_syncs_what_exists_without_it() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=8 * MiB))
    ref = rig.namespace()
    rig.put(ref, key_of(1), payload_of(1))
    before = rig.queue.metrics.syncs
    for durability, syncs in ((Durability.COMMIT, 0), (Durability.POWER, 1)):
        assert isinstance(rig.put(ref, key_of(1), payload_of(1), durability=durability), Exists)
        assert rig.queue.metrics.syncs == before + syncs


def test_power_durability_syncs_before_it_is_stored() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=16 * MiB))
    ref = rig.namespace()
    rig.settle()
    before = rig.queue.metrics.syncs
    rig.put(ref, key_of(1), payload_of(1), durability=Durability.POWER)
    assert rig.queue.metrics.syncs >= before + 2


def test_a_store_that_stays_open_survives_many_checkpoints() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=16 * MiB))
    ref = rig.namespace()
    for number in range(300):
        rig.put(ref, key_of(number % 120), payload_of(number % 120, 8 * KiB))
        if number % 7 == 0:
            rig.delete(ref, [key_of(number % 120)])
    assert rig.store.log.checkpoints >= 2
    again = reopened(rig)
    assert again.ledger.live_bytes == rig.ledger.live_bytes
    for number in range(120):
        assert again.get(ref, key_of(number)) == rig.get(ref, key_of(number))

"""A drive full of pinned records: puts are refused at once, little is written, and all goes on when the pins end."""

from __future__ import annotations

import random

import pytest

from kvstore.device.memory import MemoryDevice
from kvstore.engine.api import Durability, NamespaceRef
from kvstore.engine.namespaces import index_keys
from kvstore.engine.policy import WriteBudget
from kvstore.limits import KiB, MiB
from kvstore.testing.store_rig import StoreRig
from kvstore.types.results import Refused, RefusedReason, Stored

CAPACITY_BYTES = 40 * MiB
SEGMENT_BYTES = 4 * MiB
POLLS_MAX = 400  # in the rig a device operation takes a turn or two


def key_of(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def pin(rig: StoreRig, ref: NamespaceRef, numbers: list[int]) -> None:
    rig.catalog.pin(rig.catalog.index.find_many(index_keys(ref, b"".join(map(key_of, numbers)))))


def put_promptly(rig: StoreRig, ref: NamespaceRef, number: int, payload: bytes) -> Stored | Refused:
    """A put that has its outcome within some hundred turns."""
    durability = Durability.POWER if number % 2 else Durability.COMMIT
    result = rig.begin_put(ref, key_of(number), payload, block_bytes=64 * KiB, durability=durability)
    for _ in range(POLLS_MAX):
        rig.poll()
        if result.outcome is not None:
            assert isinstance(result.outcome, Stored | Refused)
            return result.outcome
    raise AssertionError(f"put {number} hangs")


def there(rig: StoreRig, ref: NamespaceRef, last: int) -> list[int]:
    return [number for number in range(last) if rig.location(ref, key_of(number))]


@pytest.mark.parametrize("length_kib", [200, 1024, 2040, 2200, 4000])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_pinned_drives_refuse_at_once_and_go_on_later(length_kib: int, every: int) -> None:
    rig = StoreRig(MemoryDevice(size_bytes=CAPACITY_BYTES), segment_bytes=SEGMENT_BYTES, arena_bytes=16 * MiB)
    ref = rig.namespace()
    payload = random.Random(length_kib).randbytes(length_kib * KiB)
    fill = CAPACITY_BYTES // len(payload) + 8
    for number in range(fill):
        assert isinstance(put_promptly(rig, ref, number, payload), Stored)
    pinned = there(rig, ref, fill)[::every]
    pin(rig, ref, pinned)
    budget = rig.store.reclaimer.budget
    moved_before, user_before = budget.moved_bytes, budget.user_bytes

    outcomes = [put_promptly(rig, ref, number, payload) for number in range(1000, 1000 + fill)]

    refused = [outcome for outcome in outcomes if isinstance(outcome, Refused)]
    assert {outcome.reason for outcome in refused} <= {RefusedReason.NO_SPACE}
    assert every > 1 or refused, "everything was pinned"
    moved, user = budget.moved_bytes - moved_before, budget.user_bytes - user_before
    assert moved <= 0.3 * user + 0.3 * SEGMENT_BYTES + 0.3 * user_before
    assert budget.amplification <= 1.3 + 0.3 * SEGMENT_BYTES / budget.user_bytes
    rig.settle()
    assert all(rig.get(ref, key_of(number)) == payload for number in pinned)
    rig.check_accounts()

    rig.catalog.unpin(index_keys(ref, b"".join(map(key_of, pinned))))
    outcomes = [put_promptly(rig, ref, number, payload) for number in range(2000, 2000 + 2 * fill)]
    assert all(isinstance(outcome, Stored) for outcome in outcomes)
    rig.settle()
    assert rig.get(ref, key_of(2000 + 2 * fill - 1)) == payload
    assert rig.recount_bytes() == rig.ledger.live_bytes
    rig.check_accounts()


def test_a_put_as_long_as_a_segment_finds_room_on_a_full_drive() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=24 * MiB), segment_bytes=2 * MiB)
    ref = rig.namespace()
    payload = random.Random(1).randbytes(rig.store.writer.payload_bytes_max)
    for number in range(30):
        assert isinstance(put_promptly(rig, ref, number, payload), Stored)
    assert len(there(rig, ref, 30)) >= rig.store.table.count - 2, "no more is evicted than the put needs"


def test_85_percent_of_a_small_drive_can_be_live_with_chunks_of_a_mebibyte() -> None:
    capacity_bytes = 128 * MiB
    rig = StoreRig(MemoryDevice(size_bytes=capacity_bytes))
    ref = rig.namespace()
    payload, most = random.Random(2).randbytes(1 * MiB), 0
    for number in range(140):
        assert isinstance(put_promptly(rig, ref, number, payload), Stored)
        most = max(most, rig.ledger.live_bytes)
    assert rig.store.table.count >= 16
    assert most >= 0.85 * capacity_bytes
    assert rig.metrics.evicted_segments > 0


def test_the_budget_counts_what_puts_will_write_in_the_room_gained() -> None:
    budget = WriteBudget(amplification_max=1.5, saved_bytes_max=1000)
    assert budget.affords(50, gained_bytes=100)
    assert not budget.affords(51, gained_bytes=100)
    budget.moved(50)
    assert not budget.affords(50, gained_bytes=100), "a debt is paid first"
    budget.wrote(100)
    assert budget.affords(50, gained_bytes=100)

"""A drive full of pinned records: puts are refused at once, little is written, and all goes on when the pins end."""

from __future__ import annotations

import random

import pytest

from kvstore.device.memory import MemoryDevice
from kvstore.engine.api import Durability, NamespaceRef
from kvstore.engine.location import location_segment
from kvstore.engine.namespaces import index_keys
from kvstore.engine.policy import WriteBudget
from kvstore.engine.segment import SegmentState
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


def fill_and_pin(rig: StoreRig, ref: NamespaceRef, payload: bytes, *, every: int) -> tuple[int, list[int]]:
    """Puts more than the drive holds, and pins some of what is left: how many were put, and the pinned."""
    fill = CAPACITY_BYTES // len(payload) + 8
    for number in range(fill):
        assert isinstance(put_promptly(rig, ref, number, payload), Stored)
    pinned = there(rig, ref, fill)[::every]
    pin(rig, ref, pinned)
    return fill, pinned


@pytest.mark.parametrize("length_kib", [200, 1024, 2040, 2200, 4000])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_pinned_drives_refuse_at_once_and_go_on_later(length_kib: int, every: int) -> None:
    rig = StoreRig(MemoryDevice(size_bytes=CAPACITY_BYTES), segment_bytes=SEGMENT_BYTES, arena_bytes=16 * MiB)
    ref = rig.namespace()
    payload = random.Random(length_kib).randbytes(length_kib * KiB)
    fill, pinned = fill_and_pin(rig, ref, payload, every=every)
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


def late_pins(rig: StoreRig, ref: NamespaceRef, numbers: range, held: set[int]) -> list[int]:
    """Of each segment that is being evicted one record that is still there and that no pin holds."""
    victims = set(rig.store.table.in_state(SegmentState.EVICTING).tolist())
    found: dict[int, int] = {}
    for number in numbers:
        location = rig.location(ref, key_of(number)) if number not in held else 0
        if location and location_segment(location) in victims:
            found[location_segment(location)] = number
    return list(found.values())


@pytest.mark.parametrize("memory_mib", [16, 3])
def test_what_is_pinned_while_its_segment_is_evicted_stays(memory_mib: int) -> None:
    """Some records of the victim are being copied, since they were pinned before; then somebody pins another one."""
    arena_bytes = memory_mib * MiB
    rig = StoreRig(MemoryDevice(size_bytes=CAPACITY_BYTES), segment_bytes=SEGMENT_BYTES, arena_bytes=arena_bytes)
    ref = rig.namespace()
    payload = random.Random(5).randbytes(200 * KiB)
    fill, early = fill_and_pin(rig, ref, payload, every=12)
    late: list[int] = []
    for number in range(1000, 1000 + 3 * fill):
        result = rig.begin_put(ref, key_of(number), payload, block_bytes=64 * KiB)
        while result.outcome is None:
            rig.poll()
            if len(late) < 12:
                some = late_pins(rig, ref, range(fill), {*early, *late})
                pin(rig, ref, some)
                late += some
    rig.settle()
    assert len(late) == 12
    assert [number for number in [*early, *late] if rig.get(ref, key_of(number)) != payload] == []
    assert rig.recount_bytes() == rig.ledger.live_bytes
    rig.check_accounts()


def test_what_is_pinned_stays_when_there_is_no_memory_to_copy_it() -> None:
    rig = StoreRig(MemoryDevice(size_bytes=CAPACITY_BYTES), segment_bytes=SEGMENT_BYTES)
    ref = rig.namespace()
    payload = random.Random(6).randbytes(200 * KiB)
    fill, pinned = fill_and_pin(rig, ref, payload, every=12)
    evicted = rig.metrics.evicted_segments
    for number in range(1000, 1000 + 3 * fill):
        result = rig.begin_put(ref, key_of(number), payload, block_bytes=64 * KiB)
        others = []
        while (piece := rig.arena.allocate(64 * KiB)) is not None:
            others.append(piece)
        for _ in range(50):
            rig.poll()
        for piece in others:
            piece.release()
        rig.settle(lambda: result.outcome is not None)  # noqa: B023 -- called before the next turn
    assert rig.metrics.evicted_segments > evicted
    assert [number for number in pinned if rig.get(ref, key_of(number)) != payload] == []
    rig.check_accounts()


def test_puts_that_hold_all_memory_do_not_keep_pinned_records_from_making_way() -> None:
    """All that memory holds waits for room, and each segment has pinned records, which need memory to be moved."""
    rig = StoreRig(MemoryDevice(size_bytes=CAPACITY_BYTES), segment_bytes=SEGMENT_BYTES, arena_bytes=4 * MiB)
    ref = rig.namespace()
    payload = random.Random(7).randbytes(200 * KiB)
    _, pinned = fill_and_pin(rig, ref, payload, every=12)
    others = [rig.begin_put(ref, key_of(number), payload, block_bytes=64 * KiB) for number in range(1000, 1200)]
    assert any(one.ticket is None for one in others), "some wait for memory"
    rig.settle(lambda: all(one.outcome is not None for one in others))
    assert {type(one.outcome) for one in others} == {Stored}
    rig.settle()
    assert [number for number in pinned if rig.get(ref, key_of(number)) != payload] == []
    assert rig.arena.used_bytes == 0
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

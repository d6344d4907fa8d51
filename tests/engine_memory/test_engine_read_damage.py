"""What the engine reads and finds to be wrong: bits that flip, errors of the drive, a drive that is too short."""

from __future__ import annotations

import pytest

from kvstore.device.base import IoKind
from kvstore.limits import PAGE_BYTES, MiB
from kvstore.testing.faulty_device import Fault, FaultAction
from kvstore.types.results import MissReason, Stored
from tests.engine_memory.reading_lab import Lab, numbers, payload


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


def test_a_flipped_bit_in_a_range_is_a_miss_and_outside_of_it_is_not() -> None:
    lab = Lab()
    keys = lab.put(1, 900_000)
    lab.drive.flip_at_rest(lab.place(keys[0]) + PAGE_BYTES + 500_000, 0)
    assert lab.get(keys, ranges=[[(0, 100)]]) == [payload(1, 900_000)[:4096]]
    assert lab.get(keys, ranges=[[(0, 100), (500_000, 1)]]) == [MissReason.CORRUPT]
    assert lab.driver.match(lab.ref, keys).statuses == bytes([MissReason.CORRUPT])
    lab.check_memory()

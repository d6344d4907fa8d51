"""A reader who sums whole records himself gets them unsummed where nobody else does: right bytes, or he knows better.

He asks once more with `verify`, as a client does, and then the engine judges.
"""

from __future__ import annotations

import pytest

from kvstore.device.base import IoKind
from kvstore.limits import PAGE_BYTES, MiB
from kvstore.testing.engine_driver import Collector
from kvstore.testing.faulty_device import Fault, FaultAction
from kvstore.types.results import MissReason, Stored
from tests.engine_memory.test_engine_reads import Lab, numbers

LENGTHS = pytest.mark.parametrize("length", [20_000, 1_500_000], ids=["in a parcel", "too long for one"])
AT_REST = PAGE_BYTES + 11_111


def start(lab: Lab, keys: list[bytes], **changes: object) -> Collector:
    """A read whose reader checks."""
    sink = Collector(len(keys), checks=True)
    spec = lab.driver.read_spec(lab.ref, keys, reader_checks=True, **changes)
    lab.engine.read(spec, sink, now_ns=lab.driver.now_ns)
    return sink


def read(lab: Lab, keys: list[bytes], **changes: object) -> Collector:
    sink = start(lab, keys, **changes)
    lab.driver.run_until(lambda: sink.done)
    return sink


def counted(lab: Lab) -> tuple[int, int, int]:
    """Mismatches that were read, those that clients told of, and records that were taken out."""
    metrics = lab.engine.metrics
    return metrics.checksum_errors_read, metrics.checksum_errors_reported, metrics.quarantined_records


@LENGTHS
def test_a_bit_that_flipped_at_rest_is_seen_by_the_reader_and_judged_when_he_tells(length: int) -> None:
    lab = Lab(segment_bytes=8 * MiB)
    keys, good = lab.put(4, length), numbers(1, 4, length)
    lab.drive.flip_at_rest(lab.place(keys[1]) + AT_REST, 3)
    sink = read(lab, keys)
    assert sink.doubtful == [1]
    assert [sink.answers[at] for at in (0, 2, 3)] == [good[0], good[2], good[3]]
    assert counted(lab) == (0, 0, 0)
    again = read(lab, keys[1:2], verify=True)
    assert (again.answers, again.doubtful) == ([MissReason.CORRUPT], [])
    assert counted(lab) == (2, 1, 1), "read twice, told of once, taken out"
    assert "quarantined" in lab.engine.explain(lab.ref, keys[1])[0].text
    ios = lab.engine.metrics.read_ios
    assert read(lab, keys[1:2]).answers == [MissReason.CORRUPT]
    assert lab.engine.metrics.read_ios == ios, "nobody goes to the drive for it again"
    assert isinstance(lab.driver.put(lab.ref, [(keys[1], good[1])])[0], Stored)
    assert read(lab, keys).answers == good
    lab.check_memory()


@LENGTHS
@pytest.mark.parametrize("at", [0, 8, 40, 100, 200, 260], ids=lambda at: f"byte {at}")
def test_a_header_is_judged_for_him_too(at: int, length: int) -> None:
    lab = Lab(segment_bytes=8 * MiB)
    keys, good = lab.put(4, length), numbers(1, 4, length)
    lab.drive.flip_at_rest(lab.place(keys[2]) + at, 5)
    sink = read(lab, keys)
    assert sink.answers == [good[0], good[1], MissReason.CORRUPT, good[3]]
    assert not sink.doubtful
    assert counted(lab) == (2, 0, 1)
    lab.check_memory()


@LENGTHS
def test_a_bit_that_flips_once_on_the_way_costs_nothing(length: int) -> None:
    lab = Lab(segment_bytes=8 * MiB)
    keys, good = lab.put(4, length), numbers(1, 4, length)
    lab.drive.inject(Fault(action=FaultAction.FLIP, kind=IoKind.READ, bit=8 * AT_REST))
    sink = read(lab, keys)
    assert sink.doubtful == [0]
    assert sink.answers[1:] == good[1:]
    assert read(lab, keys[:1], verify=True).answers == good[:1]
    assert counted(lab) == (0, 1, 0)
    assert read(lab, keys).answers == good
    lab.check_memory()


@LENGTHS
def test_a_bit_that_flips_again_while_the_engine_judges_is_counted(length: int) -> None:
    lab = Lab(segment_bytes=8 * MiB)
    keys, good = lab.put(1, length), numbers(1, 1, length)
    lab.drive.inject(Fault(action=FaultAction.FLIP, kind=IoKind.READ, bit=8 * AT_REST, times=2))
    assert read(lab, keys).doubtful == [0]
    assert read(lab, keys, verify=True).answers == good, "the third read was right"
    assert counted(lab) == (1, 1, 0)
    lab.check_memory()


@LENGTHS
@pytest.mark.parametrize("first_checks", [True, False])
@pytest.mark.parametrize("second_checks", [True, False])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_two_readers_share_is_summed(
    length: int, first_checks: bool, second_checks: bool, is_cancelled: bool
) -> None:
    lab = Lab(segment_bytes=8 * MiB)
    keys, good = lab.put(4, length), numbers(1, 4, length)
    lab.drive.flip_at_rest(lab.place(keys[1]) + AT_REST, 3)
    lab.drive.hold()
    first = Collector(4)
    spec = lab.driver.read_spec(lab.ref, keys, reader_checks=first_checks)
    handle = lab.engine.read(spec, first, now_ns=lab.driver.now_ns)
    second = Collector(4)
    spec = lab.driver.read_spec(lab.ref, keys, reader_checks=second_checks)
    lab.engine.read(spec, second, now_ns=lab.driver.now_ns)
    if is_cancelled:
        handle.cancel()
        first.cancelled = True
    lab.drive.release()
    sinks = [second] if is_cancelled else [first, second]
    lab.driver.run_until(lambda: all(one.done for one in sinks))
    for one in sinks:
        assert one.answers == [good[0], MissReason.CORRUPT, good[2], good[3]]
    assert counted(lab) == (2, 0, 1)
    lab.check_memory()


@LENGTHS
def test_what_a_cache_may_keep_is_summed(length: int) -> None:
    lab = Lab(segment_bytes=8 * MiB, cache=32 * MiB)
    keys, good = lab.put(4, length), numbers(1, 4, length)
    lab.engine.cache.clear()
    lab.drive.flip_at_rest(lab.place(keys[1]) + AT_REST, 3)
    sink = read(lab, keys)
    assert (sink.answers, sink.doubtful) == ([good[0], MissReason.CORRUPT, good[2], good[3]], [])
    assert counted(lab) == (2, 0, 1)
    assert read(lab, keys).answers[0] == good[0]
    lab.check_memory()


@LENGTHS
def test_ranges_and_reads_that_are_to_be_verified_are_summed(length: int) -> None:
    for asked in ({"ranges": [[(11_000, 500)]]}, {"verify": True}):
        lab = Lab(segment_bytes=8 * MiB)
        keys = lab.put(2, length)
        lab.drive.flip_at_rest(lab.place(keys[1]) + AT_REST, 3)
        sink = read(lab, keys, **asked)
        assert (sink.answers[1], sink.doubtful) == (MissReason.CORRUPT, [])
        assert counted(lab)[0] == 2
        lab.check_memory()


@LENGTHS
def test_a_copy_that_is_named_is_its_readers_to_sum(length: int) -> None:
    lab = Lab(segment_bytes=8 * MiB)
    keys, good = lab.put(2, length), numbers(1, 2, length)
    lab.drive.flip_at_rest(lab.place(keys[1]) + AT_REST, 3)
    sink = read(lab, keys, content_ids=bytes(32))
    assert (sink.answers[0], sink.doubtful) == (good[0], [1])
    assert counted(lab) == (0, 0, 0)
    assert read(lab, keys[1:], content_ids=bytes(16), verify=True).answers == [MissReason.CORRUPT]
    assert counted(lab) == (2, 1, 1)
    lab.check_memory()


def test_a_key_that_is_given_twice_is_summed() -> None:
    lab = Lab(segment_bytes=8 * MiB)
    keys, good = lab.put(3, 20_000), numbers(1, 3, 20_000)
    lab.drive.flip_at_rest(lab.place(keys[1]) + AT_REST, 3)
    sink = read(lab, [keys[0], keys[1], keys[1], keys[2]])
    assert (sink.answers, sink.doubtful) == ([good[0], MissReason.CORRUPT, MissReason.CORRUPT, good[2]], [])
    lab.check_memory()


def test_an_error_beside_it_changes_nothing() -> None:
    """One of two runs of a parcel fails, so all of it goes the general way: unsummed for one reader there, too."""
    lab = Lab(segment_bytes=8 * MiB)
    keys, good = lab.put(2, 20_000), numbers(1, 2, 20_000)
    apart = lab.put(1, 20_000, first=50)
    lab.put(1, 20_000, first=60)
    keys += lab.put(2, 20_000, first=3)
    good += numbers(3, 2, 20_000)
    del apart
    lab.drive.flip_at_rest(lab.place(keys[0]) + AT_REST, 3)
    lab.drive.inject(Fault(action=FaultAction.ERROR, kind=IoKind.READ, start=lab.place(keys[2]), times=3))
    sink = read(lab, keys)
    assert sink.doubtful == [0]
    assert sink.answers[1:] == [good[1], MissReason.IO, MissReason.IO]
    lab.drive.clear()
    assert read(lab, keys[:1], verify=True).answers == [MissReason.CORRUPT]
    assert read(lab, keys[1:]).answers == good[1:]
    lab.check_memory()

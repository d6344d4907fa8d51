"""The node dies while a segment is sealed: any pages of its index and footer may have arrived, and nothing is lost.

Until a checkpoint is synced behind a segment's index, the log names each of its records: what an index lacks, it has.
"""

from __future__ import annotations

import itertools
import random

import pytest

from kvstore.device.base import IoKind
from kvstore.device.memory import MemoryDevice
from kvstore.engine.api import NamespaceRef
from kvstore.engine.blocking import BlockingIo
from kvstore.engine.check import check_drive
from kvstore.engine.format import decode_segment_footer
from kvstore.engine.segment import SegmentState, SegmentTable
from kvstore.limits import PAGE_BYTES, MiB
from kvstore.testing.faulty_device import Fault, FaultAction, FaultyDevice
from kvstore.testing.store_rig import StoreRig

RECORDS = 240
"""Three index blocks of at most 84 entries."""
INDEX_BLOCKS = 3


def key_of(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def payload_of(number: int) -> bytes:
    return random.Random(-1 - number).randbytes(1 + number % 16)


def lasting(rig: StoreRig, ref: NamespaceRef) -> list[int]:
    """Which records are there."""
    return [number for number in range(RECORDS) if rig.get(ref, key_of(number)) == payload_of(number)]


class Sealed:
    """A drive with a segment that was just sealed, and the pages that sealing wrote."""

    def __init__(self, *, is_newest: bool = False) -> None:
        self.device = FaultyDevice(MemoryDevice(size_bytes=12 * MiB))
        rig = StoreRig(self.device, segment_bytes=2 * MiB)
        self.ref = rig.namespace()
        results = [rig.begin_put(self.ref, key_of(number), payload_of(number)) for number in range(RECORDS)]
        rig.settle(lambda: all(result.outcome is not None for result in results))
        assert rig.store.allocator.open is not None
        self.segment = rig.store.allocator.open.segment
        target = rig.store.allocator.open
        if is_newest:
            rig.store.allocator.close_open()
            rig.store._seal(target)
        else:
            rig.store.appender.open_segment()
        rig.settle()
        assert rig.store.table.state[self.segment] == SegmentState.SEALED
        self.start = rig.store.table.offset(self.segment + 1) - (INDEX_BLOCKS + 1) * PAGE_BYTES
        self.image = bytes(BlockingIo(self.device).read(self.start, (INDEX_BLOCKS + 1) * PAGE_BYTES))
        footer = decode_segment_footer(self.image[-PAGE_BYTES:])
        assert footer is not None
        assert footer.block_count == INDEX_BLOCKS
        self.now_ns = rig.now_ns

    def leave(self, pages: list[bytes]) -> None:
        """What is there of the image."""
        memory = BlockingIo(self.device)
        for at, page in enumerate(pages):
            memory.write(self.start + at * PAGE_BYTES, memoryview(bytearray(page)))

    def opened(self) -> StoreRig:
        return StoreRig(self.device, now_ns=self.now_ns)


def torn(page: bytes) -> bytes:
    """Half of the sectors arrived, and not those that the checksum stands for."""
    return page[:24] + bytes(PAGE_BYTES - 24)


def survives(drive: Sealed) -> StoreRig:
    """All is there at once, and for good: also when the log has forgotten what it knew of the segment."""
    rig = drive.opened()
    assert lasting(rig, drive.ref) == list(range(RECORDS))
    rig.check_accounts()
    rig.settle()
    rig.store.log.checkpoint()
    rig.settle()
    again = drive.opened()
    assert lasting(again, drive.ref) == list(range(RECORDS))
    assert again.metrics.recovery_bad_structures == 0
    again.check_accounts()
    assert check_drive(drive.device, name="drive").clean
    assert again.recount_bytes() == again.ledger.live_bytes
    return again


@pytest.mark.parametrize("is_newest", [False, True])
@pytest.mark.parametrize("footer", ["whole", "torn", "none"])
@pytest.mark.parametrize("blocks", list(itertools.product([True, False], repeat=INDEX_BLOCKS)))
def test_no_page_of_a_half_written_index_costs_a_record(blocks: tuple[bool, ...], footer: str, is_newest: bool) -> None:
    drive = Sealed(is_newest=is_newest)
    pages = [drive.image[at * PAGE_BYTES : (at + 1) * PAGE_BYTES] for at in range(INDEX_BLOCKS + 1)]
    left = [page if came else bytes(PAGE_BYTES) for page, came in zip(pages, blocks, strict=False)]
    left.append({"whole": pages[-1], "torn": torn(pages[-1]), "none": bytes(PAGE_BYTES)}[footer])
    drive.leave(left)
    rig = survives(drive)
    if all(blocks) and footer == "whole":
        assert rig.store.table.state[drive.segment] == SegmentState.SEALED


def test_an_index_of_an_earlier_attempt_does_not_hide_what_came_behind_it() -> None:
    """It died while sealing, went on filling the segment, and died while sealing again: the old blocks all decode."""
    drive = Sealed(is_newest=True)
    blocks = [drive.image[at * PAGE_BYTES : (at + 1) * PAGE_BYTES] for at in range(INDEX_BLOCKS)]
    drive.leave([*blocks, bytes(PAGE_BYTES)])
    rig = drive.opened()
    more = [rig.begin_put(drive.ref, key_of(number), b"later") for number in range(RECORDS, RECORDS + 5)]
    rig.settle(lambda: all(result.outcome is not None for result in more))
    rig.store.appender.open_segment()
    rig.settle()
    drive.now_ns = rig.now_ns
    drive.leave([*blocks, torn(drive.image[-PAGE_BYTES:])])
    again = survives(drive)
    assert all(again.get(drive.ref, key_of(number)) == b"later" for number in range(RECORDS, RECORDS + 5))


def test_a_torn_footer_is_not_believed_where_a_block_is_missing_and_the_log_is_silent() -> None:
    """Two pages went bad at rest: the block costs its own records, and no footer is made up from what is left."""
    drive = Sealed()
    rig = drive.opened()
    rig.store.log.checkpoint()
    rig.settle()
    pages = [drive.image[at * PAGE_BYTES : (at + 1) * PAGE_BYTES] for at in range(INDEX_BLOCKS + 1)]
    drive.leave([pages[0], bytes(PAGE_BYTES), pages[2], torn(pages[3])])
    before = bytes(BlockingIo(drive.device).read(drive.start, len(drive.image)))
    again = drive.opened()
    assert len(lasting(again, drive.ref)) == RECORDS - 84
    again.settle()
    assert bytes(BlockingIo(drive.device).read(drive.start, len(drive.image))) == before
    # the block is readable again: what it lists is back
    drive.leave([pages[0], pages[1], pages[2], torn(pages[3])])
    survives(drive)


def unreadable(start: int, length: int) -> Fault:
    return Fault(action=FaultAction.ERROR, kind=IoKind.READ, start=start, end=start + length, times=None)


def without_third() -> tuple[Sealed, SegmentTable]:
    """A sealed segment of which the log knows nothing but that the third record was deleted."""
    drive = Sealed()
    rig = drive.opened()
    rig.store.log.checkpoint()
    rig.settle()
    rig.delete(drive.ref, [key_of(3)])
    rig.settle()
    return drive, rig.store.table


@pytest.mark.parametrize("first_page", [False, True])
def test_an_end_that_cannot_be_read_for_a_while_is_left_as_it_is(first_page: bool) -> None:
    """Neither footer nor last block, and the log has forgotten: an empty index in its place would lose all for good."""
    drive, table = without_third()
    places = [(table.offset(drive.segment + 1) - 2 * PAGE_BYTES, 2 * PAGE_BYTES)]
    if first_page:
        places = [(table.offset(drive.segment), PAGE_BYTES)]
    faults = [unreadable(start, length) for start, length in places]
    for fault in faults:
        drive.device.inject(fault)
    again = drive.opened()
    assert again.metrics.recovery_bad_structures
    again.settle()
    again.store.log.checkpoint()
    again.settle()
    again.check_accounts()
    for fault in faults:
        fault.times = 0
    third = drive.opened()
    assert lasting(third, drive.ref) == [number for number in range(RECORDS) if number != 3]
    third.check_accounts()


def test_a_segment_that_cannot_be_read_at_all_is_erased_before_it_is_used_and_brings_back_no_deleted_record() -> None:
    drive, table = without_third()
    start, end = table.offset(drive.segment), table.offset(drive.segment + 1)
    fault = drive.device.inject(unreadable(start, end - start))
    again = drive.opened()
    assert again.metrics.recovery_bad_structures == 1
    assert again.store.table.state[drive.segment] == SegmentState.BAD
    again.store.log.checkpoint()
    again.settle(lambda: again.store.log.checkpoints == 1 and again.store.idle)
    fault.times = 0
    third = drive.opened()
    assert lasting(third, drive.ref) == [number for number in range(RECORDS) if number != 3]
    fault.times = None
    last = drive.opened()
    last.settle(lambda: last.store.table.state[drive.segment] == SegmentState.FREE)
    last.check_accounts()
    fault.times = 0
    assert lasting(drive.opened(), drive.ref) == []

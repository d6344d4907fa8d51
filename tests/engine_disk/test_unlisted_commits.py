"""Commits that are in the log and were never told of: their records keep their room, and so do those beside them."""

from __future__ import annotations

import random

import pytest

from kvstore.device.base import IoKind
from kvstore.device.memory import MemoryDevice
from kvstore.engine.api import Durability, NamespaceRef
from kvstore.engine.format import index_block_count
from kvstore.engine.job import start
from kvstore.engine.segment import OpenSegment, SegmentState
from kvstore.limits import PAGE_BYTES, MiB
from kvstore.testing.faulty_device import Fault, FaultAction, FaultyDevice
from kvstore.testing.store_rig import StoreRig
from kvstore.types.results import Refused, RefusedReason

RECORDS = 252
"""With one page of header each and one of payload, one of them two, they fill a segment of 512 pages: one that is not
listed, three index blocks, header and footer page."""


def key_of(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def payload_of(number: int) -> bytes:
    return random.Random(-1 - number).randbytes(PAGE_BYTES + 1 if number == RECORDS - 1 else PAGE_BYTES)


def test_an_index_with_what_was_not_confirmed_has_room_behind_the_records() -> None:
    device = FaultyDevice(MemoryDevice(size_bytes=12 * MiB))
    rig = StoreRig(device, segment_bytes=2 * MiB)
    ref = rig.namespace()
    rig.settle()
    # its bytes are synced, its commit is not: what became of it is not known, and the log has it
    device.inject(Fault(action=FaultAction.ERROR, kind=IoKind.SYNC, skip=1))
    unknown = rig.put(ref, key_of(-1), b"?" * PAGE_BYTES, durability=Durability.POWER)
    assert isinstance(unknown, Refused)
    assert unknown.reason is RefusedReason.OUTCOME_UNKNOWN
    fill(rig, ref)
    rig.store.appender.open_segment()
    rig.settle()
    assert rig.store.table.in_state_count[SegmentState.SEALED]
    again = StoreRig(device, now_ns=rig.now_ns)
    again.settle()
    assert [n for n in range(RECORDS) if again.get(ref, key_of(n)) != payload_of(n)] == []
    again.check_accounts()


def test_an_index_without_room_lies_over_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that was filled without counting what is not confirmed: its log carries the segment, until it goes."""
    device = FaultyDevice(MemoryDevice(size_bytes=12 * MiB))
    rig = StoreRig(device, segment_bytes=2 * MiB)
    ref = rig.namespace()
    rig.settle()
    with monkeypatch.context() as older:
        older.setattr(OpenSegment, "room_pages", room_pages_without_unlisted)
        device.inject(Fault(action=FaultAction.ERROR, kind=IoKind.SYNC, skip=1))
        assert isinstance(rig.put(ref, key_of(RECORDS), b"?" * PAGE_BYTES, durability=Durability.POWER), Refused)
        fill(rig, ref)
        rig.store.appender.open_segment()
        rig.settle()
    for _ in range(2):
        rig = StoreRig(device, now_ns=rig.now_ns)
        rig.settle()
        assert [n for n in range(RECORDS) if rig.get(ref, key_of(n)) != payload_of(n)] == []
        assert rig.get(ref, key_of(RECORDS)) == b"?" * PAGE_BYTES, "the log has it"
        assert [target.entry_count for target in rig.store.allocator.unsealed] == [RECORDS + 1]
        rig.check_accounts()
    segment = rig.store.allocator.unsealed[0].segment
    start(rig.store.reclaimer.evict(segment))
    rig.settle(lambda: rig.store.table.state[segment] == SegmentState.FREE)
    assert not rig.store.allocator.unsealed
    assert not rig.catalog.index.taken_slots().any(), "nothing is looked for where it was"
    rig.check_accounts()


def fill(rig: StoreRig, ref: NamespaceRef) -> None:
    results = [rig.begin_put(ref, key_of(number), payload_of(number)) for number in range(RECORDS)]
    rig.settle(lambda: all(result.outcome is not None for result in results))
    assert not any(isinstance(result.outcome, Refused) for result in results)


def room_pages_without_unlisted(self: OpenSegment, segment_pages: int, count: int = 1) -> int:
    index = index_block_count(self.entry_count + self.outstanding + count)
    return segment_pages - 1 - index - self.next_page

"""Reads hold segments one by one and in groups; an eviction waits for all of them, and is told once."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.engine.format import Superblock
from kvstore.engine.segment import SegmentTable
from kvstore.limits import PAGE_BYTES, MiB

COUNT = 4
SEGMENTS = st.integers(0, COUNT - 1)


class Holds(RuleBasedStateMachine):
    """Against a count for each segment."""

    def __init__(self) -> None:
        super().__init__()
        front = 16 * PAGE_BYTES
        self.table = SegmentTable(
            Superblock(
                cluster_id=bytes(16),
                disk_id=bytes(16),
                segment_bytes=MiB,
                log_half_bytes=PAGE_BYTES,
                segments_offset=front,
                capacity_bytes=front + COUNT * MiB,
                created_ns=0,
                revision=1,
            )
        )
        self.held: Counter[int] = Counter()
        self.singles: list[int] = []
        self.groups: list[list[int]] = []
        self.waiting: Counter[int] = Counter()
        self.free: Counter[int] = Counter()  # how many waited when nobody held it last
        self.told: Counter[int] = Counter()

    @rule(segment=SEGMENTS)
    def hold(self, segment: int) -> None:
        self.table.hold(segment)
        self.singles.append(segment)
        self.held[segment] += 1

    @rule(segment=SEGMENTS, generation=st.integers(0, 2**64 - 1))
    def begin(self, segment: int, generation: int) -> None:
        self.table.generation[segment] = generation

    @rule(segments=st.lists(SEGMENTS, min_size=1, max_size=6))
    def hold_all(self, segments: list[int]) -> None:
        self.table.hold_all(segments)
        self.groups.append(segments)
        self.held.update(segments)

    @precondition(lambda self: self.singles)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        segment = self.singles.pop(data.draw(st.integers(0, len(self.singles) - 1)))
        self.held[segment] -= 1
        self.table.release(segment)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def release_all(self, data: st.DataObject) -> None:
        group = self.groups.pop(data.draw(st.integers(0, len(self.groups) - 1)))
        self.held.subtract(group)
        self.table.release_all(group)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def hold_apart(self, data: st.DataObject) -> None:
        group = self.groups.pop(data.draw(st.integers(0, len(self.groups) - 1)))
        self.singles += group
        self.table.hold_apart(group)

    @rule(segment=SEGMENTS)
    def wait(self, segment: int) -> None:
        self.waiting[segment] += 1
        self.table.when_unheld(segment, lambda: self.told.update([segment]))

    @invariant()
    def it_is_as_counted(self) -> None:
        for segment in range(COUNT):
            if not self.held[segment]:
                self.free[segment] = self.waiting[segment]
        assert [self.told[segment] for segment in range(COUNT)] == [self.free[segment] for segment in range(COUNT)]
        held = [bool(self.held[segment]) for segment in range(COUNT)]
        assert [self.table.is_held(segment) for segment in range(COUNT)] == held
        assert self.table.held().tolist() == held
        twice = [*range(COUNT), *range(COUNT)]
        assert self.table.generations_of(twice) == dict(enumerate(self.table.generation.tolist()))


TestHolds = Holds.TestCase
TestHolds.settings = settings(max_examples=40)

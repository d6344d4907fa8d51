"""What is valid, computed on arrays, against the same rules written plainly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.device.memory import MemoryDevice
from kvstore.engine.blocking import BlockingIo
from kvstore.engine.format import (
    ENTRY,
    ENTRY_DTYPE,
    SegmentHeader,
    encode_segment_header,
    entries_in_bounds,
)
from kvstore.engine.logrecord import Reason, Tombstone
from kvstore.engine.recovery import FoundSegment, valid_records
from kvstore.engine.seal import seal_image
from kvstore.limits import PAGE_BYTES, MiB
from kvstore.testing.store_rig import StoreRig


@dataclass(frozen=True)
class Copy:
    """A record somewhere."""

    key: int
    namespace: int
    namespace_generation: int
    segment: int
    page: int


GENERATIONS = {0: 7, 1: 3, 2: 9}
"""Generation of each segment."""
NAMESPACES = {1: 1, 2: 4}


def key16(key: int) -> bytes:
    # Half of the keys share their first half with another one.
    return (key // 2).to_bytes(8, "little") + key.to_bytes(8, "little")


def entry(copy: Copy) -> bytes:
    return ENTRY.pack(
        key16(copy.key), copy.namespace, copy.namespace_generation, copy.page, 2, 1, 0, 100, copy.page, 5, 0
    )


copies = st.builds(
    Copy,
    key=st.integers(0, 7),
    namespace=st.sampled_from([1, 1, 1, 2, 3]),
    namespace_generation=st.sampled_from([1, 1, 4]),
    segment=st.sampled_from(sorted(GENERATIONS)),
    page=st.integers(1, 40),
)
tombs = st.builds(
    Tombstone,
    key=st.integers(0, 7).map(key16),
    generation=st.integers(1, 10),
    page=st.integers(0, 41),
    segment=st.sampled_from(sorted(GENERATIONS)),
    reason=st.sampled_from(list(Reason)),
)


def plainly(found: list[Copy], tombstones: list[Tombstone]) -> set[Copy]:
    best: dict[bytes, Copy] = {}
    for copy in found:
        place = (GENERATIONS[copy.segment], copy.page)
        if NAMESPACES.get(copy.namespace) != copy.namespace_generation:
            continue
        if any(key16(copy.key) == one.key and place <= (one.generation, one.page) for one in tombstones):
            continue
        rival = best.get(key16(copy.key))
        if rival is None or (GENERATIONS[rival.segment], rival.page) < place:
            best[key16(copy.key)] = copy
    return set(best.values())


@given(st.lists(copies, unique_by=lambda copy: (copy.segment, copy.page)), st.lists(tombs, max_size=6))
def test_the_rules(found: list[Copy], tombstones: list[Tombstone]) -> None:
    segments = [
        FoundSegment(
            segment=segment,
            generation=generation,
            sealed=True,
            entries=np.frombuffer(
                b"".join(entry(copy) for copy in found if copy.segment == segment), dtype=ENTRY_DTYPE
            ),
            end_page=50,
        )
        for segment, generation in GENERATIONS.items()
    ]
    valid = valid_records(segments, tombstones, NAMESPACES)
    got = {
        (one.tobytes()[:16], int(segment), int(one["page"]))
        for one, segment in zip(valid.entries, valid.segments, strict=True)
    }
    assert got == {(key16(copy.key), copy.segment, copy.page) for copy in plainly(found, tombstones)}
    counted = len(valid.entries) + valid.orphans + valid.dropped + valid.buried + valid.twins
    assert counted >= len(found)
    needed = {segment for segment, _ in valid.needed}
    buried_in = {
        copy.segment
        for copy in found
        if any(
            key16(copy.key) == one.key and (GENERATIONS[copy.segment], copy.page) <= (one.generation, one.page)
            for one in tombstones
        )
    }
    assert needed == buried_in


def test_entries_that_cannot_be_are_dropped() -> None:
    good = (b"k" * 16, 1, 1, 5, 3, 1, 0, 5_000, 0, 0, 0)
    fields = [good]
    fields += [(*good[:3], page, *good[4:]) for page in (0, 250, 254, 0xFFFF_FFFF)]
    fields += [(*good[:4], pages, *good[5:]) for pages in (0, 2, 4, 0xFFFF)]
    fields += [(*good[:5], header, *good[6:]) for header in (0, 2, 255)]
    fields += [(*good[:7], payload, *good[8:]) for payload in (0, 9_000, 0xFFFF_FFFF)]
    entries = np.frombuffer(b"".join(ENTRY.pack(*one) for one in fields), dtype=ENTRY_DTYPE)
    assert entries_in_bounds(entries, 256).tolist() == [True, False, True] + [False] * (len(fields) - 3)


def test_a_hundred_thousand_records_of_many_segments_are_counted_exactly() -> None:
    device = MemoryDevice(size_bytes=1024 * MiB)
    first = StoreRig(device, segment_bytes=16 * MiB)
    refs = [first.namespace(name) for name in ("a", "b", "c")]
    first.settle()
    superblock = first.superblock
    io = BlockingIo(device)
    rng = np.random.default_rng(7)
    per_segment = 1_900
    count = 100_000 // per_segment
    for segment in range(count):
        entries = np.zeros(per_segment, dtype=ENTRY_DTYPE)
        entries["key0"] = rng.integers(1, 1 << 63, per_segment, dtype=np.uint64)
        entries["key1"] = rng.integers(1, 1 << 63, per_segment, dtype=np.uint64)
        entries["namespace"] = [refs[at % 3].id for at in range(per_segment)]
        entries["namespace_generation"] = 1
        entries["page"] = 1 + 2 * np.arange(per_segment)
        entries["pages"], entries["header_pages"], entries["payload_bytes"] = 2, 1, 4096
        entries["access"] = segment
        start = superblock.segments_offset + segment * superblock.segment_bytes
        header = SegmentHeader(segment=segment, generation=segment + 1, disk_id=superblock.disk_id, opened_ns=0)
        io.write(start, encode_segment_header(header))
        image = seal_image(
            entries,
            segment=segment,
            generation=segment + 1,
            segment_pages=superblock.segment_bytes // PAGE_BYTES,
            end_page=1 + 2 * per_segment,
            disk_id=superblock.disk_id,
        )
        io.write(start + superblock.segment_bytes - len(image), image)
    rig = StoreRig(device, entries_max=200_000)
    total = count * per_segment
    assert rig.store.recovered.records == total
    assert rig.store.recovered.tick_max == count - 1
    assert rig.ledger.live_bytes == total * 2 * PAGE_BYTES
    rig.check_accounts()
    fresh = rig.store.namespaces.by_digest(refs[1].digest)
    assert fresh is not None
    rig.ledger.drop_namespace(fresh, lambda error: None)
    gone = count * sum(at % 3 == 1 for at in range(per_segment))
    assert rig.ledger.live_bytes == (total - gone) * 2 * PAGE_BYTES
    rig.settle()
    again = StoreRig(device, entries_max=200_000)
    assert again.store.recovered.dropped == gone
    assert again.ledger.live_bytes == rig.ledger.live_bytes

"""The pure parts of the read path: covering blocks, headers against the format's own decoder, estimates, words."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.engine import _records, division, packing
from kvstore.engine.api import NamespaceRef
from kvstore.engine.cache import RecordFacts
from kvstore.engine.division import divide, line_up
from kvstore.engine.estimate import DayMeter, LoadEstimator
from kvstore.engine.explain import gone, stored, unknown
from kvstore.engine.format import (
    RECORD_MAGIC,
    RecordHeader,
    decode_record_header,
    encode_record_header,
    header_page_count,
)
from kvstore.engine.history import Event, Fate
from kvstore.engine.location import PAGE_BITS, location_page, pack_location
from kvstore.engine.packing import Packed, pack
from kvstore.engine.readplan import covering_blocks, ranges_per_record
from kvstore.engine.verify import GENERATION, Fault, check_header, check_run, header_pages_of
from kvstore.engine.waits import Waits
from kvstore.errors import InvalidRequest
from kvstore.limits import (
    ACCESS_TICK_NS,
    MS_NS,
    PAGE_BYTES,
    PARCEL_BYTES_FIRST,
    PARCEL_BYTES_MAX,
    RANGES_PER_ITEM_MAX,
    READ_COALESCE_BYTES,
    SECOND_NS,
    SLICES_PER_FRAME_MAX,
    MiB,
)
from kvstore.types.checksum import crc_table, crcs_match
from kvstore.types.results import MissReason
from kvstore.wire.slices import Slice, decode_slices

ranges = st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 20_000)), max_size=8)


@given(ranges, st.integers(0, 60_000), st.sampled_from([4096, 5000, 16_384]), st.sampled_from([4096, 20_000, 1 << 20]))
def test_pieces_cover_the_ranges_with_whole_blocks_and_no_byte_twice(
    ranges: list[tuple[int, int]], record_bytes: int, block_bytes: int, piece_bytes_max: int
) -> None:
    pieces = covering_blocks(
        ranges, record_bytes=record_bytes, block_bytes=block_bytes, piece_bytes_max=piece_bytes_max
    )
    if any(offset + length > record_bytes for offset, length in ranges):
        assert pieces is None
        return
    assert pieces is not None
    end = 0
    for offset, length in pieces:
        assert offset % block_bytes == 0
        assert offset >= end
        assert length <= max(piece_bytes_max, block_bytes)
        end = offset + length
        assert end % block_bytes == 0 or end == record_bytes
    wanted = {block for offset, length in ranges if length for block in blocks_of(offset, length, block_bytes)}
    found = {block for offset, length in pieces if length for block in blocks_of(offset, length, block_bytes)}
    assert found == wanted
    assert wanted or pieces == [(0, 0)]


def blocks_of(offset: int, length: int, block_bytes: int) -> range:
    return range(offset // block_bytes, -(-(offset + length) // block_bytes))


def test_ranges_are_for_all_records_or_for_each() -> None:
    assert ranges_per_record([[(1, 2)]], 3) == [[(1, 2)]] * 3
    assert ranges_per_record([[(1, 2)], []], 2) == [[(1, 2)], []]
    too_many = [(0, 1)] * (RANGES_PER_ITEM_MAX + 1)
    wrong: list[list[list[tuple[int, int]]]] = [[[], []], [[(-1, 2)]], [[(1, -2)]], [too_many]]
    for bad in wrong:
        with pytest.raises(InvalidRequest):
            ranges_per_record(bad, 3)


REF = NamespaceRef(id=1, digest=b"n" * 32, generation=3, salt=bytes(16), tenant="t")


def make_header(payload_bytes: int, block_bytes: int) -> tuple[RecordHeader, bytearray, int]:
    payload = bytes(range(256)) * (payload_bytes // 256 + 1)
    table = crc_table(payload[:payload_bytes], block_bytes)
    header = RecordHeader(
        key=b"k" * 32,
        parent=b"p" * 32,
        run_head=b"r" * 32,
        namespace=REF.digest,
        namespace_generation=REF.generation,
        position=7,
        part=0,
        segment=5,
        page=9,
        segment_generation=11,
        payload_bytes=payload_bytes,
        block_bytes=block_bytes,
        content_id=b"c" * 16,
        crc_table=table,
        written_ns=123,
    )
    pages = header_page_count(payload_bytes, block_bytes)
    page = bytearray(pages * PAGE_BYTES)
    encode_record_header(header, memoryview(page))
    location = pack_location(segment=5, page=9, pages=pages + -(-payload_bytes // PAGE_BYTES), depth=7)
    return header, page, location


@given(st.integers(0, 9_000_000), st.sampled_from([4096, 65_536]))
def test_a_good_header_is_read_as_the_format_reads_it(payload_bytes: int, block_bytes: int) -> None:
    header, page, location = make_header(payload_bytes, block_bytes)
    assert header_pages_of(memoryview(page)) == header.header_pages
    facts = check_header(memoryview(page), REF, header.key, location, 11)
    assert facts == RecordFacts(
        key=header.key,
        record_bytes=payload_bytes,
        block_bytes=block_bytes,
        crcs=header.crc_table,
        content_id=header.content_id,
        header_pages=header.header_pages,
        location=location,
    )
    if header.header_pages > 1:
        assert check_header(memoryview(page)[:PAGE_BYTES], REF, header.key, location, 11) is Fault.CORRUPT
    assert check_header(memoryview(page)[:512], REF, header.key, location, 11) is Fault.CORRUPT


@given(st.integers(0, 8 * PAGE_BYTES - 1))
def test_any_flipped_bit_in_the_covered_part_of_a_header_is_seen(bit: int) -> None:
    header, page, location = make_header(10_000, 4096)
    page[bit // 8] ^= 1 << bit % 8
    assert check_header(memoryview(page), REF, header.key, location, 11) is Fault.CORRUPT
    assert decode_record_header(page) is None


def test_a_sound_header_of_another_key_or_place_is_told_apart() -> None:
    header, page, location = make_header(10_000, 4096)
    view = memoryview(page)
    other = NamespaceRef(id=2, digest=b"m" * 32, generation=3, salt=bytes(16), tenant="t")
    older = NamespaceRef(id=1, digest=REF.digest, generation=2, salt=bytes(16), tenant="t")
    assert check_header(view, REF, b"K" * 32, location, 11) is Fault.OTHER
    assert check_header(view, other, header.key, location, 11) is Fault.OTHER
    assert check_header(view, older, header.key, location, 11) is Fault.OTHER
    assert check_header(view, REF, header.key, location, 12) is Fault.CORRUPT
    pages = 4
    for segment, page_number in ((6, 9), (5, 10)):
        elsewhere = pack_location(segment=segment, page=page_number, pages=pages, depth=7)
        assert check_header(view, REF, header.key, elsewhere, 11) is Fault.CORRUPT
    longer = pack_location(segment=5, page=9, pages=pages + 1, depth=7)
    assert check_header(view, REF, header.key, longer, 11) is Fault.CORRUPT


class Read:
    """What `check_run` looks at of a record in flight."""

    def __init__(self, key: bytes, location: int, at: int, length_bytes: int) -> None:
        self.key = key
        self.location = location
        self.at = at
        self.length_bytes = length_bytes


def one_by_one(data: memoryview, read: Read, generation: int, *, sums: bool = True) -> RecordFacts | Fault:
    """What the check of a single record says; without `sums` its reader does those of payload."""
    facts = check_header(data, REF, read.key, read.location, generation)
    if isinstance(facts, RecordFacts) and sums:
        start = facts.header_pages * PAGE_BYTES
        if not crcs_match(data[start : start + facts.record_bytes], facts.block_bytes, facts.crcs):
            return Fault.CORRUPT
    return facts


def check_packed(view: memoryview, reads: list[Read], alone: list[RecordFacts | Fault], *, sums: bool) -> None:
    """What `pack` says of them is what was found of each alone, compiled and not."""
    assert packing.IS_COMPILED, "the extension is not built"
    for compiled in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packing, "IS_COMPILED", compiled)
            check_packed_so(view, reads, alone, sums)


def check_packed_so(view: memoryview, reads: list[Read], alone: list[RecordFacts | Fault], sums: bool) -> None:
    keys = b"".join(read.key for read in reversed(reads))
    wants = [(read.location, len(reads) - 1 - at) for at, read in enumerate(reads)]
    packed = pack(view, wants, keys, REF, {5: 11}, sums=sums)
    assert list(packed.faults) == [(at, found) for at, found in enumerate(alone) if isinstance(found, Fault)]
    good = [(at, found) for at, found in enumerate(alone) if isinstance(found, RecordFacts)]
    total = sum(map(len, packed.payload))
    slices = decode_slices(packed.body, count=packed.count, payload_bytes=total) if good else []
    expected = [
        Slice(wants[at][1], 0, one.record_bytes, 0, True, one.content_id, one.record_bytes, one.block_bytes, one.crcs)
        for at, one in good
    ]
    assert slices == expected
    payload = [
        bytes(view[start : start + one.record_bytes])
        for at, one in good
        if one.record_bytes and (start := reads[at].at + one.header_pages * PAGE_BYTES)
    ]
    assert [bytes(one) for one in packed.payload] == payload
    assert len(pack(view, wants, keys, REF, {5: 12}, sums=sums).faults) == len(reads)


@pytest.mark.parametrize("length", [4096, 5000, 65_536, 70_001])
@pytest.mark.parametrize("block_bytes", [4096, 1 << 20])
@pytest.mark.parametrize("sums", [True, False], ids=["summed", "the reader sums"])
def test_the_compiled_check_says_yes_only_to_what_is_right(length: int, block_bytes: int, sums: bool) -> None:
    """Every byte that it looks at, flipped in one of nine records; those that it need not look at do not matter."""

    def check() -> Packed:
        return pack(view, wants, keys, REF, generations, sums=sums)

    generations = {5: 11}
    view, wants, keys = alike(9, length, block_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_pack_each", lambda *_: None)  # what is judged one by one
        right = check()
        assert right is not None, "one call judged them all"
        patch.setattr(packing, "IS_COMPILED", False)
        assert check() == right, "and columns say the same"
        patch.setattr(packing, "IS_COMPILED", True)
        header_bytes = header_page_count(length, block_bytes) * PAGE_BYTES
        stride = len(view) // 9
        random_places = random.Random(length).sample(range(header_bytes, header_bytes + length), 60)
        for place in [*range(300), header_bytes - 1, header_bytes, header_bytes + length - 1, *random_places]:
            at = place % 9 * stride + place
            view[at] ^= 1 << place % 8
            for compiled in (True, False):
                patch.setattr(packing, "IS_COMPILED", compiled)
                if sums or place < header_bytes:
                    assert check() is None, f"byte {place} was not looked at"
                else:
                    assert check() == right, "it is the reader's"
            view[at] ^= 1 << place % 8
        patch.setattr(packing, "IS_COMPILED", True)
        for wrong in ({5: 12}, {}):
            generations = wrong
            assert check() is None
        generations = {5: 11}
        for place, index in ((0, 1), (1, 0)):
            others = [(wants[0][0], index), *wants[1:]][place:] + wants[:place]
            assert pack(view, others, keys, REF, generations, sums=sums) is None
        if header_bytes + length < stride:
            view[stride - 1] ^= 1  # behind the payload
        assert check() == right


def alike(count: int, length: int, block_bytes: int) -> tuple[memoryview, list[tuple[int, int]], bytes]:
    """Good records of one shape, one behind the other; their wants, and their keys in the reverse order."""
    generator = random.Random(length)
    records = bytearray()
    wants: list[tuple[int, int]] = []
    keys = [generator.randbytes(32) for _ in range(count)]
    pages = header_page_count(length, block_bytes) + -(-length // PAGE_BYTES)
    for number, key in enumerate(keys):
        payload = generator.randbytes(length)
        header = RecordHeader(
            key=key,
            parent=generator.randbytes(32),
            run_head=generator.randbytes(32),
            namespace=REF.digest,
            namespace_generation=REF.generation,
            position=number,
            part=0,
            segment=5,
            page=9 + number * pages,
            segment_generation=11,
            payload_bytes=length,
            block_bytes=block_bytes,
            content_id=generator.randbytes(16),
            crc_table=crc_table(payload, block_bytes),
            written_ns=1,
        )
        record = bytearray(pages * PAGE_BYTES)
        start = header.header_pages * PAGE_BYTES
        encode_record_header(header, memoryview(record)[:start])
        record[start : start + length] = payload
        records += record
        wants.append((pack_location(segment=5, page=9 + number * pages, pages=pages, depth=3), count - 1 - number))
    return memoryview(records), wants, b"".join(reversed(keys))


@pytest.mark.parametrize("case", ["short", "space", "words", "keys", "block", "want", "indices"])
def test_impossible_lengths_are_refused_by_the_compiled_check(case: str) -> None:
    view, wants, keys = alike(4, 5000, 4096)
    arguments: list[Any] = [view, wants, keys, REF.digest + GENERATION.pack(REF.generation), {5: 11}]
    arguments += [int.from_bytes(RECORD_MAGIC, "little"), 3 * PAGE_BYTES, PAGE_BYTES, 4096, 5000, 2, 1, True]
    assert _records.check(*arguments) is not None
    at, value = {
        "short": (0, view[:-1]),
        "space": (3, bytes(39)),
        "words": (10, 3),
        "keys": (2, keys[:96]),
        "block": (8, 0),
        "want": (1, [wants[0], wants[1], wants[2], 7]),
        "indices": (1, [wants[0], wants[1], wants[2], (wants[3][0], -1)]),
    }[case]
    arguments[at] = value
    if case == "keys":
        assert _records.check(*arguments) is None
    else:
        with pytest.raises((ValueError, TypeError, OverflowError)):
            _records.check(*arguments)


some_lengths = st.sampled_from([0, 1, 4096, 9000, 70_000])


@given(
    st.lists(some_lengths, min_size=1, max_size=6)
    | st.builds(lambda length, count: [length] * count, some_lengths, st.integers(8, 12)),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 80_000), st.integers(0, 7)), max_size=3),
    st.lists(st.sampled_from(["", "key", "place", "longer"]), min_size=12, max_size=12) | st.just([""] * 12),
    st.sampled_from([4096, 128 * 1024]),
)
def test_a_run_is_checked_as_each_of_its_records_alone(
    lengths: list[int], flips: list[tuple[int, int, int]], changes: list[str], block_bytes: int
) -> None:
    parts: list[bytearray] = []
    reads: list[Read] = []
    page = at = 0
    for number, length in enumerate(lengths):
        payload = bytes([number + 1]) * length
        pages = header_page_count(length, block_bytes) + -(-length // PAGE_BYTES)
        header = RecordHeader(
            key=bytes([number]) * 32,
            parent=bytes(32),
            run_head=bytes(32),
            namespace=REF.digest,
            namespace_generation=REF.generation,
            position=number,
            part=0,
            segment=5,
            page=9 + page,
            segment_generation=11,
            payload_bytes=length,
            block_bytes=block_bytes,
            content_id=bytes([number]) * 16,
            crc_table=crc_table(payload, block_bytes),
            written_ns=1,
        )
        record = bytearray(pages * PAGE_BYTES)
        encode_record_header(header, memoryview(record)[: header.header_pages * PAGE_BYTES])
        start = header.header_pages * PAGE_BYTES
        record[start : start + length] = payload
        change = changes[number]
        key = b"?" * 32 if change == "key" else header.key
        at_page = 9 + page + (change == "place")
        claimed = pages + (change == "longer" and number == len(lengths) - 1)
        location = pack_location(segment=5, page=at_page, pages=claimed, depth=0)
        record += bytes((claimed - pages) * PAGE_BYTES)
        reads.append(Read(key, location, at, len(record)))
        parts.append(record)
        page += pages
        at += len(record)
    for which, byte, bit in flips:
        part = parts[which % len(parts)]
        part[byte % len(part)] ^= 1 << bit
    view = memoryview(b"".join(parts))
    for sums in (True, False):
        alone = [one_by_one(view[read.at : read.at + read.length_bytes], read, 11, sums=sums) for read in reads]
        assert check_run(view, reads, REF, 11, sums=None if sums else [False] * len(reads)) == alone
        check_packed(view, reads, alone, sums=sums)
    mixed = [number % 2 == 0 for number in range(len(reads))]
    assert check_run(view, reads, REF, 11, sums=mixed) == [
        one_by_one(view[read.at : read.at + read.length_bytes], read, 11, sums=summed)
        for read, summed in zip(reads, mixed, strict=True)
    ]
    assert check_run(view, reads, REF, 12) == [Fault.CORRUPT] * len(reads)


FIRST, SEGMENT = 64 * MiB, 1 << 30


@given(st.lists(st.tuples(st.sampled_from([0, 1, 1, 1]), st.integers(1, 300)), max_size=40), st.integers(100, 400))
def test_records_are_lined_up_alike(records: list[tuple[int, int]], pages_max: int) -> None:
    assert division.IS_COMPILED
    locations = [
        there and pack_location(segment=pages % 3, page=number, pages=pages, depth=0)
        for number, (there, pages) in enumerate(records)
    ]
    indices = list(range(len(records)))
    found = line_up(locations, indices, pages_max)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(division, "IS_COMPILED", False)
        assert line_up(locations, indices, pages_max) == found
    if found is None:
        assert any(not there or pages > pages_max for there, pages in records)
    else:
        assert found == sorted(zip(locations, indices, strict=True))


@given(
    st.lists(st.tuples(st.sampled_from([0, 0, 0, 0, 3]), st.integers(1, 40)), min_size=1, max_size=150),
    st.lists(st.tuples(st.integers(0, 149), st.integers(1, 300)), max_size=12),
    st.integers(0, 5),
)
def test_records_are_divided_into_parcels_as_one_after_the_other(
    records: list[tuple[int, int]], longer: list[tuple[int, int]], at: int
) -> None:
    lengths = [pages for _, pages in records]
    for number, pages in longer:
        lengths[number % len(lengths)] = pages
    wants: list[tuple[int, int]] = []
    page = 1
    for index, ((gap, _), pages) in enumerate(zip(records, lengths, strict=True)):
        page += gap
        wants.append((pack_location(segment=2, page=page, pages=pages, depth=index % 3), index))
        page += pages
    at = min(at, len(wants) - 1)
    while at < len(wants):
        cut = divide(wants, at, first_byte=FIRST, segment_bytes=SEGMENT)
        if cut is None:
            assert lengths[at] > MiB // PAGE_BYTES + 1
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(division, "IS_COMPILED", False)
            assert divide(wants, at, first_byte=FIRST, segment_bytes=SEGMENT) == cut
        assert cut.end > at
        assert cut.locations == [location for location, _ in wants[at : cut.end]]
        assert cut.offsets == [FIRST + 2 * SEGMENT + (place & 0x3FFFF) * PAGE_BYTES for _, _, place in cut.starts]
        assert cut.segments == [2] * len(cut.starts)
        assert sum(cut.lengths) == cut.pages * PAGE_BYTES
        is_short = len(wants) * lengths[0] <= 2 * PARCEL_BYTES_MAX // PAGE_BYTES
        most = PARCEL_BYTES_FIRST if is_short and not at else PARCEL_BYTES_MAX
        assert cut.pages == sum(lengths[at : cut.end])
        assert cut.pages - (cut.end - at) <= most // PAGE_BYTES, "a page of each is its header"
        if cut.end < len(wants) and lengths[cut.end] <= MiB // PAGE_BYTES + 1 and cut.end - at < SLICES_PER_FRAME_MAX:
            assert cut.pages + lengths[cut.end] - (cut.end + 1 - at) > most // PAGE_BYTES, "as many as fit"
        runs = [*(first for first, _, _ in cut.starts), cut.end - at]
        assert runs[0] == 0
        assert runs == sorted(set(runs))
        for (first, byte, place), last in zip(cut.starts, runs[1:], strict=True):
            assert byte == sum(lengths[at : at + first]) * PAGE_BYTES
            for number in range(at + first, at + last):
                location = wants[number][0]
                assert 2 << PAGE_BITS | location_page(location) == place + sum(lengths[at + first : number])
            assert last - first == 1 or sum(lengths[at + first : at + last]) <= READ_COALESCE_BYTES // PAGE_BYTES
        at = cut.end


@given(st.binary(max_size=20_000), st.sampled_from([4096, 5000]), st.data())
def test_blocks_match_their_checksums_and_no_others(payload: bytes, block_bytes: int, data: st.DataObject) -> None:
    table = crc_table(payload, block_bytes)
    assert crcs_match(memoryview(payload), block_bytes, table)
    if payload:
        at = data.draw(st.integers(0, len(payload) - 1))
        wrong = bytearray(payload)
        wrong[at] ^= 1
        assert not crcs_match(memoryview(wrong), block_bytes, table)
        longer = memoryview(payload + bytes(block_bytes))
        assert not crcs_match(longer, block_bytes, table), "more payload than checksums"


def test_the_estimate_follows_the_drive_and_idle_time_does_not_count() -> None:
    estimator = LoadEstimator()
    assert estimator.load_ns(0) == 0
    read_bytes, now_ns = 0, SECOND_NS
    for _ in range(200):
        now_ns += 60 * SECOND_NS
        estimator.observe(read_bytes=read_bytes, busy=True, now_ns=now_ns)
        read_bytes += 4_000_000
        now_ns += 2 * MS_NS
        estimator.observe(read_bytes=read_bytes, busy=False, now_ns=now_ns)
    expected = 2_000_000_000  # bytes per second
    assert estimator.load_ns(2_000_000_000) == pytest.approx(2_000_000_000 * SECOND_NS / expected, rel=0.01)
    for _ in range(100):
        estimator.served(from_memory=10, records=10)
    assert estimator.load_ns(2_000_000_000) < SECOND_NS // 2


def test_bytes_per_day_forget_what_was_a_day_ago() -> None:
    meter = DayMeter(0)
    hour_ns = 3600 * SECOND_NS
    totals = [meter.last_day(hour * 100, hour * hour_ns) for hour in range(60)]
    assert totals[0] == 0
    assert totals[10] == 1000
    assert totals[59] == 2400


def test_explanations_say_what_happened_and_roughly_when() -> None:
    second = SECOND_NS // ACCESS_TICK_NS
    assert stored(pack_location(segment=0, page=1, pages=3, depth=4), ago_ticks=5 * second).text == (
        "stored, 12288 bytes on the drive, position 4, last asked for 5.0 seconds ago"
    )
    fate = gone(Event(fate=Fate.EVICTED, tick=1), ago_ticks=7200 * second)
    assert fate.status == MissReason.EVICTED
    assert fate.text == "evicted about 2 hours ago to make room"
    assert fate.ago_ns == 7200 * SECOND_NS
    assert gone(Event(fate=Fate.QUARANTINED, tick=1), ago_ticks=0).status == MissReason.CORRUPT
    assert gone(Event(fate=Fate.DELETED, tick=1), ago_ticks=300 * second).text == "deleted about 5 minutes ago"
    assert unknown(remembered=12).status == MissReason.ABSENT
    assert "the last 12 events" in unknown(remembered=12).text
    assert "as a raw device, keeps no history over a restart" in unknown(remembered=12, is_kept=False).text


def test_waits_end_when_nothing_is_pending_or_at_their_deadline() -> None:
    pending: dict[bytes, object] = {b"a": 1, b"b": 1}
    waits, done = Waits(pending), list[str]()
    waits.add([b"x"], 100, lambda: done.append("none"))
    waits.add([b"a", b"b"], 100, lambda: done.append("both"))
    waits.add([b"b"], 50, lambda: done.append("late"))
    assert done == ["none"]
    assert waits.next_deadline_ns() == 50
    del pending[b"a"]
    waits.check(49)
    assert done == ["none"]
    waits.check(50)
    assert done == ["none", "late"]
    del pending[b"b"]
    waits.check(51)
    assert done == ["none", "late", "both"]
    assert waits.next_deadline_ns() is None
    pending[b"a"] = 1
    waits.add([b"a"], 1000, lambda: done.append("ended"))()
    waits.check(52)
    assert done[3:] == ["ended"]
    assert len(waits) == 0

"""Starting on a drive: what the log, the segments' indexes and the tombstones say is valid, found again.

The log is read once; of its two halves the one with the highest generation counts whose checkpoint was completed. A
sealed segment is read through its index, an open one through its commits in the log, one whose index lacks what the log
names through both: its sealing did not end, and it is sealed again. Every length and place is checked against its
bounds before it is used, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from kvstore.engine.blocking import BlockingIo, Range, pages
from kvstore.engine.format import (
    ENTRY_DTYPE,
    Entries,
    SegmentFooter,
    Superblock,
    decode_index_blocks,
    decode_segment_footer,
    decode_segment_header,
    distinct,
    entries_in_bounds,
    footer_behind,
)
from kvstore.engine.location import I64, Bools
from kvstore.engine.log import LogPlace
from kvstore.engine.logrecord import (
    BlockHeader,
    Commit,
    Drop,
    NamespacePiece,
    Tombstone,
    decode_block,
    encode_tombstone,
    records_in,
)
from kvstore.limits import DEVICE_IO_BYTES_MAX, PAGE_BYTES, RECOVERY_BATCH_BYTES


@dataclass(slots=True, kw_only=True)
class LogScan:
    """What the log says.

    Attributes:
        place: where it goes on.
        highest_generation: of any segment, as far as the log knows.
        bad_blocks: blocks between good ones that were not good.
    """

    place: LogPlace
    highest_generation: int = 0
    bad_blocks: int = 0
    commits: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)
    tombstones: list[Tombstone] = field(default_factory=list)
    namespaces: list[NamespacePiece] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)


def scan_log(io: BlockingIo, superblock: Superblock) -> LogScan:
    """Read the newest complete half.

    Raises:
        OSError: a half cannot be read at all.
    """
    halves = [_read_half(io, superblock, half) for half in (0, 1)]
    complete = [
        (max(header.generation for _, header in blocks), half)
        for half, blocks in enumerate(halves)
        if any(header.number >= header.checkpoint_blocks for _, header in blocks)
    ]
    highest = max((header.generation for blocks in halves for _, header in blocks), default=0)
    if not complete:
        place = LogPlace(
            half=0, generation=highest + 1, highest_generation=highest + 1, checkpoint_blocks=0, next_block=0
        )
        return LogScan(place=place)
    generation, half = max(complete)
    blocks = halves[half]
    last = max(header.number for _, header in blocks)
    scan = LogScan(
        place=LogPlace(
            half=half,
            generation=generation,
            highest_generation=highest,
            checkpoint_blocks=blocks[0][1].checkpoint_blocks,
            next_block=last + 1,
        ),
        bad_blocks=last + 1 - len(blocks),
    )
    for page, header in blocks:
        scan.highest_generation = max(scan.highest_generation, header.segment_generation)
        _sort_records(scan, page, header)
    return scan


def _read_half(io: BlockingIo, superblock: Superblock, half: int) -> list[tuple[memoryview, BlockHeader]]:
    """The good blocks of the newest generation that a half holds, in order. Stops where a long stretch has none."""
    found: list[tuple[memoryview, BlockHeader]] = []
    generation = 0
    offset = superblock.half_offset(half)
    total = superblock.log_half_bytes
    for start in range(0, total, DEVICE_IO_BYTES_MAX):
        length = min(DEVICE_IO_BYTES_MAX, total - start)
        stretch = _read_pages(io, offset + start, length)
        before = len(found)
        for at in range(0, length, PAGE_BYTES):
            page = stretch[at : at + PAGE_BYTES]
            header = decode_block(page, superblock.disk_id)
            if header is None or header.number * PAGE_BYTES != start + at or header.generation < generation:
                continue
            if header.generation > generation:
                generation = header.generation
                found.clear()
            found.append((page, header))
        if start and len(found) == before:
            break
    return found


def _read_pages(io: BlockingIo, offset: int, length_bytes: int) -> memoryview:
    """A stretch of the drive, page by page where it does not read as a whole; what fails reads as zeros."""
    buffer = pages(length_bytes)
    if io.read_many([Range(offset=offset, buffer=buffer)])[0] is None:
        return buffer
    single = [
        Range(offset=offset + at, buffer=buffer[at : at + PAGE_BYTES]) for at in range(0, length_bytes, PAGE_BYTES)
    ]
    errors = io.read_many(single)
    for item, error in zip(single, errors, strict=True):
        if error is not None:
            item.buffer[:] = bytes(PAGE_BYTES)
    return buffer


def _sort_records(scan: LogScan, page: memoryview, header: BlockHeader) -> None:
    for record in records_in(page, header):
        if isinstance(record, Commit):
            scan.commits.setdefault((record.segment, record.generation), []).append(record.entry)
            scan.highest_generation = max(scan.highest_generation, record.generation)
        elif isinstance(record, Tombstone):
            scan.tombstones.append(record)
            scan.highest_generation = max(scan.highest_generation, record.generation)
        elif isinstance(record, NamespacePiece):
            scan.namespaces.append(record)
        else:
            scan.drops.append(record)


# --- segments -------------------------------------------------------------------------------------------------------
@dataclass(slots=True, kw_only=True)
class FoundSegment:
    """A segment in use.

    Attributes:
        generation: of its use; 0 where nothing tells it (then it is `hidden`).
        sealed: its index and footer are there, and list all that the log names; else `entries` come from the log too.
        entries: valid as far as the segment says: tombstones and twins are not looked at here.
        end_page: first page behind everything that was ever placed, as far as is known.
        half_sealed: not sealed, but something of its index or footer is there: it is to be sealed, not filled.
        hidden: its end is damaged and the log is silent, so nothing is known of what it holds: its end must be left as
            it is, since it may be readable the next time.
        bad_blocks: index blocks that were damaged.
        header_bad: its header page was damaged; the footer stood in.
        rebuilt: its footer page was damaged; this is what stood there, as its index tells.
    """

    segment: int
    generation: int
    sealed: bool
    entries: Entries
    end_page: int
    half_sealed: bool = False
    hidden: bool = False
    bad_blocks: int = 0
    header_bad: bool = False
    rebuilt: SegmentFooter | None = None


def scan_segments(
    io: BlockingIo,
    superblock: Superblock,
    log: LogScan,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[FoundSegment]:
    """Read the header and footer of every segment, and the indexes of the sealed ones.

    Args:
        on_progress: told (segments done, segments in all) now and then.
    """
    count = superblock.segment_count
    heads, unreadable = _read_ends(io, superblock)
    rebuilt = _rebuild_footers(io, superblock, heads)
    sealed: list[tuple[FoundSegment, SegmentFooter]] = []
    found: list[FoundSegment] = []
    for segment, ends in enumerate(heads):
        footer = rebuilt.get(segment) or decode_segment_footer(ends[1])
        one, footer = _look_at(superblock, log, segment, ends, footer)
        if one is None and segment in unreadable and all(any(memoryview(end).cast("Q")) for end in ends):
            one = _unknown(segment)
        if one is None:
            continue
        one.rebuilt = rebuilt.get(segment) if footer is not None else None
        found.append(one)
        if footer is not None:
            sealed.append((one, footer))
    done = count - len(sealed)
    for batch in _batches(sealed):
        _read_indexes(io, superblock, log, batch)
        done += len(batch)
        if on_progress is not None:
            on_progress(done, count)
    return found


def _unknown(segment: int) -> FoundSegment:
    """A segment of which neither end tells anything, and one could not be read: it may be readable the next time."""
    nothing = np.empty(0, dtype=ENTRY_DTYPE)
    return FoundSegment(
        segment=segment, generation=0, sealed=False, entries=nothing, end_page=1, hidden=True, bad_blocks=1
    )


def _read_ends(io: BlockingIo, superblock: Superblock) -> tuple[list[tuple[memoryview, memoryview]], frozenset[int]]:
    """First and last page of every segment, and the segments of which one could not be read.

    What cannot be read is nonsense: zeros would mean that nothing is there.
    """
    count, size = superblock.segment_count, superblock.segment_bytes
    memory = pages(2 * count * PAGE_BYTES)
    cut = [memory[at * PAGE_BYTES : (at + 1) * PAGE_BYTES] for at in range(2 * count)]
    ranges = []
    for segment in range(count):
        start = superblock.segments_offset + segment * size
        ranges.append(Range(offset=start, buffer=cut[2 * segment]))
        ranges.append(Range(offset=start + size - PAGE_BYTES, buffer=cut[2 * segment + 1]))
    failed = [item for item, error in zip(ranges, io.read_many(ranges), strict=True) if error is not None]
    unreadable: set[int] = set()
    for item, error in zip(failed, io.read_many(failed), strict=True):
        if error is not None:
            item.buffer[:] = b"\xff" * PAGE_BYTES
            unreadable.add((item.offset - superblock.segments_offset) // size)
    return [(cut[2 * segment], cut[2 * segment + 1]) for segment in range(count)], frozenset(unreadable)


def _rebuild_footers(
    io: BlockingIo, superblock: Superblock, heads: list[tuple[memoryview, memoryview]]
) -> dict[int, SegmentFooter]:
    """Footers of segments whose last page is damaged, by the index block in front of it. An open segment has none."""
    uses: dict[int, int] = {}
    for segment, (header_page, footer_page) in enumerate(heads):
        header = decode_segment_header(header_page)
        if header is None or (header.segment, header.disk_id) != (segment, superblock.disk_id):
            continue
        if any(memoryview(footer_page).cast("Q")) and decode_segment_footer(footer_page) is None:
            uses[segment] = header.generation
    segment_pages = superblock.segment_bytes // PAGE_BYTES
    start = superblock.segments_offset + superblock.segment_bytes - 2 * PAGE_BYTES
    ranges = [Range(offset=start + one * superblock.segment_bytes, buffer=pages(PAGE_BYTES)) for one in uses]
    found: dict[int, SegmentFooter] = {}
    for (segment, generation), item, error in zip(uses.items(), ranges, io.read_many(ranges), strict=True):
        footer = footer_behind(
            item.buffer,
            segment=segment,
            generation=generation,
            disk_id=superblock.disk_id,
            segment_pages=segment_pages,
        )
        if error is None and footer is not None:
            found[segment] = footer
    return found


def _look_at(
    superblock: Superblock,
    log: LogScan,
    segment: int,
    ends: tuple[memoryview, memoryview],
    footer: SegmentFooter | None,
) -> tuple[FoundSegment | None, SegmentFooter | None]:
    """What a segment is by its two ends: nothing, open, or sealed (then with its footer)."""
    segment_pages = superblock.segment_bytes // PAGE_BYTES
    header_page, footer_page = ends
    footer_bad = footer is None and any(memoryview(footer_page).cast("Q"))
    if footer is not None and not _footer_fits(footer, superblock, segment, segment_pages):
        footer = None
    header = decode_segment_header(header_page)
    if header is not None and (header.segment != segment or header.disk_id != superblock.disk_id):
        header = None
    header_bad = header is None and any(memoryview(header_page).cast("Q"))
    if header is not None:
        generation = header.generation
        if footer is not None and footer.generation != generation:
            footer = None
    elif header_bad and footer is not None:
        generation = footer.generation
    elif header_bad:
        # Only the log can tell which use of the segment this was.
        generation = max((use for of, use in log.commits if of == segment), default=0)
    else:
        generation = 0
    if generation == 0:
        return None, None
    found = FoundSegment(
        segment=segment,
        generation=generation,
        sealed=footer is not None,
        entries=np.empty(0, dtype=ENTRY_DTYPE),
        end_page=footer.end_page if footer is not None else 1,
        header_bad=header_bad,
    )
    if footer is None:
        found.entries = _logged_entries(log, found, segment_pages)
        found.end_page = _end_page(log, found, segment_pages)
        found.hidden = footer_bad and not len(found.entries)
        found.bad_blocks = int(found.hidden)
    return found, footer


def _end_page(log: LogScan, found: FoundSegment, segment_pages: int) -> int:
    """First page behind all that is known to have had room in an unsealed segment."""
    places = [tombstone.page + 1 for tombstone in log.tombstones if tombstone.generation == found.generation]
    end = min(max(places, default=1), segment_pages - 1)
    ends = found.entries["page"].astype(np.int64) + found.entries["pages"]
    return max(end, int(ends.max())) if len(ends) else end


def _footer_fits(footer: SegmentFooter, superblock: Superblock, segment: int, segment_pages: int) -> bool:
    return (
        footer.segment == segment
        and footer.disk_id == superblock.disk_id
        and footer.generation > 0
        and footer.index_page >= 1
        and footer.index_page + footer.block_count == segment_pages - 1
        and 1 <= footer.end_page <= footer.index_page
    )


def _logged_entries(log: LogScan, found: FoundSegment, segment_pages: int) -> Entries:
    raw = log.commits.get((found.segment, found.generation), [])
    entries = np.frombuffer(b"".join(raw), dtype=ENTRY_DTYPE)
    return entries[entries_in_bounds(entries, segment_pages)]


def _batches(
    sealed: Iterable[tuple[FoundSegment, SegmentFooter]],
) -> Iterable[list[tuple[FoundSegment, SegmentFooter]]]:
    """Groups of segments whose indexes are read at once, bounded in bytes."""
    batch: list[tuple[FoundSegment, SegmentFooter]] = []
    size = 0
    for one in sealed:
        batch.append(one)
        size += one[1].block_count * PAGE_BYTES
        if size >= RECOVERY_BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_indexes(
    io: BlockingIo, superblock: Superblock, log: LogScan, batch: list[tuple[FoundSegment, SegmentFooter]]
) -> None:
    segment_pages = superblock.segment_bytes // PAGE_BYTES
    buffers = [pages(footer.block_count * PAGE_BYTES) for _, footer in batch]
    ranges: list[Range] = []
    owner: list[int] = []
    for at, (found, footer) in enumerate(batch):
        start = superblock.segments_offset + found.segment * superblock.segment_bytes
        start += footer.index_page * PAGE_BYTES
        for cut in range(0, footer.block_count * PAGE_BYTES, DEVICE_IO_BYTES_MAX):
            end = min(cut + DEVICE_IO_BYTES_MAX, footer.block_count * PAGE_BYTES)
            ranges.append(Range(offset=start + cut, buffer=buffers[at][cut:end]))
            owner.append(at)
    for item, error in zip(ranges, io.read_many(ranges), strict=True):
        if error is not None:
            item.buffer[:] = _read_pages(io, item.offset, len(item.buffer))
    for (found, footer), buffer in zip(batch, buffers, strict=True):
        data = buffer[: footer.block_count * PAGE_BYTES]
        entries, bad = decode_index_blocks(data, segment=found.segment, generation=found.generation)
        found.entries = entries[entries_in_bounds(entries, segment_pages)]
        found.bad_blocks = bad
        _add_logged(log, found, segment_pages)


def _add_logged(log: LogScan, found: FoundSegment, segment_pages: int) -> None:
    """Add what the log names and the index does not: then the index was not written to its end.

    The log forgets a segment's commits with the first checkpoint behind a whole index, and as long as it has any it has
    all of them. So a segment is as good as unsealed if one is missing, whatever its footer says: the index may be half
    of a new one and half of one from an earlier attempt.
    """
    logged = _logged_entries(log, found, segment_pages)
    if not len(logged):
        return
    listed = np.zeros(segment_pages, dtype=np.bool_)
    listed[found.entries["page"]] = True
    missing = logged[~listed[logged["page"]]]
    if len(missing):
        found.entries = np.concatenate([found.entries, missing])
        found.sealed, found.half_sealed = False, True
        found.end_page = _end_page(log, found, segment_pages)


# --- what is valid ----------------------------------------------------------------------------------------------------
@dataclass(slots=True, kw_only=True)
class ValidRecords:
    """The records that live, each key once.

    Attributes:
        entries, segments: of each.
        orphans: records whose namespace is not known.
        dropped: records of a namespace's older generation.
        buried: records that a tombstone covers.
        twins: older copies of records that are there twice.
        needed: per segment the tombstones that cover something in it, encoded, and must be kept while it is in use.
    """

    entries: Entries
    segments: I64
    orphans: int = 0
    dropped: int = 0
    buried: int = 0
    twins: int = 0
    needed: list[tuple[int, bytes]] = field(default_factory=list)


def valid_records(
    found: list[FoundSegment], tombstones: list[Tombstone], generation_of: dict[int, int]
) -> ValidRecords:
    """Sort out what lives.

    Args:
        generation_of: the present generation of each namespace id.
    """
    entries = np.concatenate([one.entries for one in found]) if found else np.empty(0, dtype=ENTRY_DTYPE)
    lengths = [len(one.entries) for one in found]
    segments = np.repeat(np.array([one.segment for one in found], dtype=np.int64), lengths)
    uses = np.repeat(np.array([one.generation for one in found], dtype=np.int64), lengths)
    result = ValidRecords(entries=entries, segments=segments)
    keep = _known_namespaces(entries, generation_of, result)
    keep &= _not_buried(entries, segments, uses, tombstones, result)
    # What a damaged index block hides may be readable the next time.
    hiding = [one.segment for one in found if one.bad_blocks]
    result.needed += [(segment, encode_tombstone(one)) for segment in hiding for one in tombstones]
    if not keep.all():
        entries, segments, uses = entries[keep], segments[keep], uses[keep]
    newest = _newest(entries, uses)
    result.twins = len(entries) - len(newest)
    if result.twins:
        entries, segments = entries[newest], segments[newest]
    result.entries, result.segments = entries, segments
    return result


def _known_namespaces(entries: Entries, generation_of: dict[int, int], result: ValidRecords) -> Bools:
    ids, which = distinct(entries["namespace"].astype(np.uint64))
    current = np.array([generation_of.get(id, -1) for id in ids.tolist()], dtype=np.int64)
    if not len(ids):
        return np.zeros(0, dtype=np.bool_)
    wanted = current[which]
    known = wanted >= 0
    same = entries["namespace_generation"].astype(np.int64) == wanted
    result.orphans = int((~known).sum())
    result.dropped = int((known & ~same).sum())
    valid: Bools = known & same
    return valid


def _not_buried(
    entries: Entries,
    segments: I64,
    uses: I64,
    tombstones: list[Tombstone],
    result: ValidRecords,
) -> Bools:
    """Apply the tombstones: of a key, everything at or before the latest one's place is dead."""
    alive = np.ones(len(entries), dtype=np.bool_)
    latest: dict[bytes, Tombstone] = {}
    for tombstone in tombstones:
        known = latest.get(tombstone.key)
        if known is None or (known.generation, known.page) < (tombstone.generation, tombstone.page):
            latest[tombstone.key] = tombstone
    if not latest or not len(entries):
        return alive
    low = np.array([int.from_bytes(key[:8], "little") for key in latest], dtype=np.uint64)
    for at in np.flatnonzero(np.isin(entries["key0"], low)).tolist():
        found = latest.get(entries[at].tobytes()[:16])
        if found is None or (int(uses[at]), int(entries["page"][at])) > (found.generation, found.page):
            continue
        alive[at] = False
        result.buried += 1
        result.needed.append((int(segments[at]), encode_tombstone(found)))
    return alive


def _newest(entries: Entries, uses: I64) -> I64:
    """Positions of the newest copy of each key."""
    key0 = np.ascontiguousarray(entries["key0"])
    order = np.argsort(key0)
    ordered = key0[order]
    same = ordered[1:] == ordered[:-1]
    if not same.any():
        return np.arange(len(entries))
    twins = np.zeros(len(entries), dtype=np.bool_)
    twins[order[1:]] |= same
    twins[order[:-1]] |= same
    some = np.flatnonzero(twins)
    some = some[np.lexsort((entries["page"][some], uses[some], entries["key1"][some], key0[some]))]
    last = np.ones(len(some), dtype=np.bool_)
    pairs = entries[some]
    last[:-1] = (pairs["key0"][1:] != pairs["key0"][:-1]) | (pairs["key1"][1:] != pairs["key1"][:-1])
    twins[some[last]] = False
    return np.flatnonzero(~twins)

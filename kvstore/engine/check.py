"""Offline verification of a drive: everything is read, nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from kvstore.device.base import Device
from kvstore.engine.blocking import BlockingIo, Range, pages
from kvstore.engine.format import Entries, Superblock
from kvstore.engine.ledger import entry_keys
from kvstore.engine.location import I64
from kvstore.engine.namespaces import NamespaceTable
from kvstore.engine.recovery import FoundSegment, ValidRecords, scan_log, scan_segments, valid_records
from kvstore.engine.soundness import why_unsound
from kvstore.engine.superblock import read_superblock
from kvstore.errors import FormatUnsupported
from kvstore.limits import LOG_SHARE_MANIFESTS, PAGE_BYTES, READ_COALESCE_BYTES

_COMPLAINTS_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What `kvstore check` found. JSON-able: integers, booleans and lists of text.

    Attributes:
        clean: nothing is damaged. Orphans, dropped and buried records are no damage.
        records: valid ones, damaged included.
        live_bytes: of the undamaged ones, padded, headers included.
        bad_records: header, payload or place is not what the index says.
        unreadable_records: the drive failed.
        bad_superblocks, bad_log_blocks, bad_index_blocks, bad_headers, bad_footers, bad_manifests: damaged structures.
        orphans: records whose namespace is not known.
        dropped: of a namespace's older generation.
        buried: deleted or quarantined.
        twins: older copies.
        segments, open_segments, segment_count: in use, of these without index, in all.
        complaints: the first damages in words.
    """

    clean: bool
    records: int
    live_bytes: int
    bad_records: int
    unreadable_records: int
    bad_superblocks: int
    bad_log_blocks: int
    bad_index_blocks: int
    bad_headers: int
    bad_footers: int
    bad_manifests: int
    orphans: int
    dropped: int
    buried: int
    twins: int
    namespaces: int
    segments: int
    open_segments: int
    segment_count: int
    capacity_bytes: int
    allocated_bytes: int
    complaints: list[str]

    def as_json(self) -> dict[str, int | bool | list[str]]:
        """Field by field."""
        return asdict(self)


def check_drive(device: Device, *, name: str, on_progress: Callable[[int, int], None] | None = None) -> CheckReport:
    """Read and verify everything on a drive that no store has open.

    Args:
        device: opened and locked by the caller; only read from.
        name: for messages.
        on_progress: told (records done, records in all) now and then.

    Raises:
        FormatUnsupported: no store is on it, or one of a newer format.
        OSError: the log cannot be read.
    """
    io = BlockingIo(device)
    superblocks = read_superblock(io)
    if superblocks is None:
        raise FormatUnsupported(f"{name} holds no readable kvstore superblock; it is no store, or it is badly damaged")
    superblock = superblocks.superblock
    log = scan_log(io, superblock)
    namespaces = NamespaceTable(manifest_bytes_max=int(superblock.log_half_bytes * LOG_SHARE_MANIFESTS))
    bad_manifests = namespaces.restore(log.namespaces, log.drops)
    found = scan_segments(io, superblock, log)
    generations = {known.ref.id: known.ref.generation for known in namespaces}
    valid = valid_records(found, log.tombstones, generations)
    walk = _Walk(io, superblock, namespaces, found, on_progress)
    walk.run(valid)
    bad_index = sum(one.bad_blocks for one in found)
    bad_headers = sum(one.header_bad for one in found)
    bad_footers = sum(one.rebuilt is not None for one in found)
    damages = walk.bad + walk.unreadable + len(superblocks.bad_copies)
    damages += log.bad_blocks + bad_index + bad_headers + bad_footers + bad_manifests
    return CheckReport(
        clean=damages == 0,
        records=len(valid.entries),
        live_bytes=walk.live_bytes,
        bad_records=walk.bad,
        unreadable_records=walk.unreadable,
        bad_superblocks=len(superblocks.bad_copies),
        bad_log_blocks=log.bad_blocks,
        bad_index_blocks=bad_index,
        bad_headers=bad_headers,
        bad_footers=bad_footers,
        bad_manifests=bad_manifests,
        orphans=valid.orphans,
        dropped=valid.dropped,
        buried=valid.buried,
        twins=valid.twins,
        namespaces=len(namespaces),
        segments=len(found),
        open_segments=sum(not one.sealed for one in found),
        segment_count=superblock.segment_count,
        capacity_bytes=superblock.capacity_bytes,
        allocated_bytes=device.allocated_bytes(),
        complaints=walk.complaints,
    )


class _Walk:
    """Reads every valid record in the order of the drive."""

    def __init__(
        self,
        io: BlockingIo,
        superblock: Superblock,
        namespaces: NamespaceTable,
        found: list[FoundSegment],
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._io = io
        self._superblock = superblock
        self._namespaces = namespaces
        self._generation = {one.segment: one.generation for one in found}
        self._on_progress = on_progress
        self.bad = 0
        self.unreadable = 0
        self.live_bytes = 0
        self.complaints: list[str] = []

    def run(self, valid: ValidRecords) -> None:
        place = valid.segments * (1 << 20) + valid.entries["page"]
        order = place.argsort(kind="stable")
        entries, segments = valid.entries[order], valid.segments[order]
        at = 0
        while at < len(entries):
            end = _stretch(entries, segments, at)
            self._stretch(entries[at:end], int(segments[at]))
            at = end
            if self._on_progress is not None:
                self._on_progress(at, len(entries))

    def _offset(self, segment: int, page: int) -> int:
        return self._superblock.segments_offset + segment * self._superblock.segment_bytes + page * PAGE_BYTES

    def _stretch(self, entries: Entries, segment: int) -> None:
        first = int(entries["page"][0])
        total = int(entries["pages"].astype("i8").sum()) * PAGE_BYTES
        buffer = pages(total)
        error = self._io.read_many([Range(offset=self._offset(segment, first), buffer=buffer)])[0]
        for at in range(len(entries)):
            entry = entries[at : at + 1]
            begin = (int(entry["page"][0]) - first) * PAGE_BYTES
            data = buffer[begin : begin + int(entry["pages"][0]) * PAGE_BYTES]
            if error is not None:
                failed = self._io.read_many([Range(offset=self._offset(segment, int(entry["page"][0])), buffer=data)])[
                    0
                ]
                if failed is not None:
                    self.unreadable += 1
                    self._complain(segment, entry, str(failed))
                    continue
            self._one(data, entry, segment)

    def _one(self, data: memoryview, entry: Entries, segment: int) -> None:
        ref = self._namespaces.by_id(int(entry["namespace"][0]))
        why = why_unsound(data, entry, segment=segment, generation=self._generation[segment], ref=ref)
        if why is None:
            self.live_bytes += len(data)
        else:
            self.bad += 1
            self._complain(segment, entry, why)

    def _complain(self, segment: int, entry: Entries, why: str) -> None:
        if len(self.complaints) < _COMPLAINTS_MAX:
            key = entry_keys(entry).tobytes().hex()
            self.complaints.append(f"record {key} at segment {segment} page {int(entry['page'][0])}: {why}")


def _stretch(entries: Entries, segments: I64, start: int) -> int:
    """End of the neighbours from `start` on that are read in one I/O."""
    pages_read = int(entries["pages"][start])
    at = start + 1
    while at < len(entries) and segments[at] == segments[start]:
        if int(entries["page"][at]) != int(entries["page"][at - 1]) + int(entries["pages"][at - 1]):
            break
        pages_read += int(entries["pages"][at])
        if pages_read * PAGE_BYTES > READ_COALESCE_BYTES:
            break
        at += 1
    return at

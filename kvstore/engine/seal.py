"""Sealing: a full segment's index and footer go to its end, and the log need not carry its commits any longer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvstore.device.base import IoOp, UrgentWrite
from kvstore.engine.allocator import Allocator
from kvstore.engine.blocking import pages
from kvstore.engine.format import (
    Entries,
    SegmentFooter,
    Superblock,
    encode_index_blocks,
    encode_segment_footer,
    index_block_count,
)
from kvstore.engine.job import IoQueue, Steps, io
from kvstore.engine.segment import OpenSegment, SegmentState
from kvstore.limits import DEVICE_IO_BYTES_MAX, PAGE_BYTES, WRITE_ATTEMPTS_MAX
from kvstore.telemetry.metrics import EngineMetrics
from kvstore.types.flow import FlowClass

_log = logging.getLogger(__name__)


class Sealer:
    """Seals closed segments, one job each."""

    def __init__(self, *, queue: IoQueue, allocator: Allocator, superblock: Superblock, metrics: EngineMetrics) -> None:
        self._queue = queue
        self._allocator = allocator
        self._superblock = superblock
        self._metrics = metrics
        self._running: set[int] = set()

    def seal(self, target: OpenSegment) -> Steps[None]:
        """Write the index of a closing segment whose records are all complete or given up.

        Where the index cannot be written, or has no room behind the records, the log goes on carrying the segment's
        commits until it is evicted. What stands at its end stays: an index that lists less than the log counts with it.
        """
        if target.segment in self._running:
            return
        self._running.add(target.segment)
        is_sealed = False
        for _ in range(WRITE_ATTEMPTS_MAX if self._has_room(target) else 0):
            error: OSError | None = yield io(self._queue, self._ops(target))
            is_sealed = error is None
            if is_sealed:
                break
        self._running.discard(target.segment)
        self._allocator.closing.remove(target)
        self._allocator.table.set_state(target.segment, SegmentState.SEALED)
        if not is_sealed:
            self._allocator.unsealed.append(target)

    def _has_room(self, target: OpenSegment) -> bool:
        """Whether the index begins behind the last record.

        Room is kept for it (`OpenSegment.room_pages`), but drives were filled by builds that counted without commits
        that are in the log alone: a restart lists those.
        """
        room_pages = self._allocator.table.segment_pages - 1 - target.next_page
        if index_block_count(target.entry_count) <= room_pages:
            return True
        _log.warning(
            "segment %d has no room for the index of its %d records: the log carries them until it is evicted",
            target.segment,
            target.entry_count,
        )
        return False

    def _ops(self, target: OpenSegment) -> Sequence[IoOp]:
        image = seal_image(
            target.entries(),
            segment=target.segment,
            generation=target.generation,
            segment_pages=self._allocator.table.segment_pages,
            end_page=target.next_page,
            disk_id=self._superblock.disk_id,
        )
        self._metrics.log_bytes += len(image)
        start = self._allocator.table.offset(target.segment + 1) - len(image)
        return [
            UrgentWrite(start + at, [image[at : at + DEVICE_IO_BYTES_MAX]], flow=FlowClass.WRITEBACK)
            for at in range(0, len(image), DEVICE_IO_BYTES_MAX)
        ]


def seal_image(
    entries: Entries, *, segment: int, generation: int, segment_pages: int, end_page: int, disk_id: bytes
) -> memoryview:
    """Index blocks and footer page as they lie at the end of a segment."""
    blocks = index_block_count(len(entries))
    image = pages((blocks + 1) * PAGE_BYTES)
    encode_index_blocks(entries, segment=segment, generation=generation, out=image[: blocks * PAGE_BYTES])
    image[blocks * PAGE_BYTES :] = encode_segment_footer(
        SegmentFooter(
            segment=segment,
            generation=generation,
            disk_id=disk_id,
            index_page=segment_pages - 1 - blocks,
            block_count=blocks,
            entry_count=len(entries),
            end_page=end_page,
        )
    )
    return image

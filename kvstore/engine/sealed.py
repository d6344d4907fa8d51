"""Reading a sealed segment's own index back, for eviction and scrub."""

from __future__ import annotations

import numpy as np

from kvstore.device.base import IoKind, IoOp
from kvstore.engine.blocking import pages
from kvstore.engine.format import (
    ENTRY_DTYPE,
    Entries,
    decode_index_blocks,
    decode_segment_footer,
    entries_in_bounds,
)
from kvstore.engine.job import IoQueue, Steps, io
from kvstore.engine.segment import SegmentTable
from kvstore.limits import DEVICE_IO_BYTES_MAX, PAGE_BYTES


def read_index(queue: IoQueue, table: SegmentTable, segment: int) -> Steps[tuple[Entries, bool]]:
    """All entries of a sealed segment that are in bounds, and whether nothing of its index was unreadable."""
    generation = int(table.generation[segment])
    nothing = np.empty(0, dtype=ENTRY_DTYPE)
    page = pages(PAGE_BYTES)
    at = table.offset(segment + 1) - PAGE_BYTES
    error = yield io(queue, [IoOp(IoKind.READ, at, [page])])
    footer = decode_segment_footer(page) if error is None else None
    if footer is None or footer.segment != segment or footer.generation != generation:
        return nothing, False
    if footer.index_page < 1 or footer.index_page + footer.block_count != table.segment_pages - 1:
        return nothing, False
    if not footer.block_count:
        return nothing, True
    start = table.offset(segment, footer.index_page)
    index = pages(footer.block_count * PAGE_BYTES)
    ops = [
        IoOp(IoKind.READ, start + at, [index[at : at + DEVICE_IO_BYTES_MAX]])
        for at in range(0, len(index), DEVICE_IO_BYTES_MAX)
    ]
    yield io(queue, ops)
    entries, bad = decode_index_blocks(index, segment=segment, generation=generation)
    return entries[entries_in_bounds(entries, table.segment_pages)], bad == 0

"""Reading a sealed segment's own index back, for eviction and scrub."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstore.device.base import IoKind, IoOp, UrgentRead
from kvstore.engine.blocking import pages
from kvstore.engine.format import (
    ENTRY_DTYPE,
    Entries,
    decode_index_blocks,
    decode_segment_footer,
    entries_in_bounds,
    footer_behind,
)
from kvstore.engine.job import IoQueue, Steps, io
from kvstore.engine.segment import SegmentTable
from kvstore.limits import DEVICE_IO_BYTES_MAX, PAGE_BYTES

_TAIL_PAGES: Final = 16
"""What is read at first, footer and the index of a segment of few records: a read waits behind what is being written,
so one is better than two."""


def read_index(
    queue: IoQueue, table: SegmentTable, segment: int, *, is_urgent: bool = False
) -> Steps[tuple[Entries, bool]]:
    """All entries of a sealed segment that are in bounds, and whether nothing of its index was unreadable.

    Args:
        is_urgent: Room waits for it: its first read, which is all for a segment of few records, is an `UrgentRead`.
    """
    generation = int(table.generation[segment])
    nothing = np.empty(0, dtype=ENTRY_DTYPE)
    for tail_pages in (min(_TAIL_PAGES, table.segment_pages), 1):
        tail = pages(tail_pages * PAGE_BYTES)
        start = table.offset(segment + 1) - len(tail)
        error = yield io(queue, [UrgentRead(start, [tail]) if is_urgent else IoOp(IoKind.READ, start, [tail])])
        if error is None:
            break  # else a page that cannot be read costs only itself
    footer = decode_segment_footer(tail[-PAGE_BYTES:]) if error is None else None
    if footer is None and error is None and len(tail) > PAGE_BYTES:
        last = tail[-2 * PAGE_BYTES : -PAGE_BYTES]  # a damaged footer costs only itself
        footer = footer_behind(
            last, segment=segment, generation=generation, disk_id=bytes(16), segment_pages=table.segment_pages
        )
    if footer is None or footer.segment != segment or footer.generation != generation:
        return nothing, False
    if footer.index_page < 1 or footer.index_page + footer.block_count != table.segment_pages - 1:
        return nothing, False
    if not footer.block_count:
        return nothing, True
    if footer.block_count < tail_pages:
        index = tail[-(footer.block_count + 1) * PAGE_BYTES : -PAGE_BYTES]
    else:
        start = table.offset(segment, footer.index_page)
        index = pages(footer.block_count * PAGE_BYTES)
        ops = [
            IoOp(IoKind.READ, start + at, [index[at : at + DEVICE_IO_BYTES_MAX]])
            for at in range(0, len(index), DEVICE_IO_BYTES_MAX)
        ]
        yield io(queue, ops)
    entries, bad = decode_index_blocks(index, segment=segment, generation=generation)
    return entries[entries_in_bounds(entries, table.segment_pages)], bad == 0

"""What stands before the payload of records, read from the drive in the background: what a copy of one must keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.device.base import IoKind, IoOp
from kvstore.engine.api import NamespaceRef
from kvstore.engine.blocking import pages
from kvstore.engine.catalog import Catalog
from kvstore.engine.format import RecordHeader, decode_record_header, header_page_count
from kvstore.engine.job import IoQueue, Steps, gather, io, start
from kvstore.engine.location import location_page, location_pages, location_segment
from kvstore.engine.namespaces import index_keys
from kvstore.engine.segment import SegmentTable
from kvstore.limits import CHECKSUM_BYTES_MIN, PAGE_BYTES, PAYLOAD_BYTES_MAX
from kvstore.types.flow import FlowClass
from kvstore.types.results import MissReason

_PAGES_AT_FIRST: Final = 1
_HEADER_PAGES_MAX: Final = header_page_count(PAYLOAD_BYTES_MAX, CHECKSUM_BYTES_MIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A record without its payload. Attributes as in `api.PutSpec`."""

    payload_bytes: int
    block_bytes: int
    position: int
    part: int
    run_head: bytes
    parent: bytes
    content_id: bytes


class HeadReader:
    """Reads the headers of one drive's records."""

    def __init__(self, *, queue: IoQueue, table: SegmentTable, catalog: Catalog) -> None:
        self._queue = queue
        self._table = table
        self._catalog = catalog

    def read(
        self, ref: NamespaceRef, keys: Sequence[bytes], on_done: Callable[[list[Head | MissReason]], None]
    ) -> None:
        """Heads of these records, or why there is none. A damaged header is the business of whoever reads the record.

        Args:
            keys: record keys; few, since all are read side by side.
            on_done: called once, when the drive has answered.
        """
        if not keys:
            on_done([])
            return
        locations = self._catalog.lookup(index_keys(ref, b"".join(keys))).tolist()
        start(self._all([self._one(ref, key, at) for key, at in zip(keys, locations, strict=True)], on_done))

    def _all(
        self, jobs: Sequence[Steps[Head | MissReason]], on_done: Callable[[list[Head | MissReason]], None]
    ) -> Steps[None]:
        on_done((yield gather(jobs)))

    def _one(self, ref: NamespaceRef, key: bytes, location: int) -> Steps[Head | MissReason]:
        if not location:
            return MissReason.ABSENT
        header = yield from self.at(location)
        if header is None:
            return MissReason.IO
        if (header.key, header.namespace, header.namespace_generation) != (key, ref.digest, ref.generation):
            return MissReason.ABSENT
        return Head(
            payload_bytes=header.payload_bytes,
            block_bytes=header.block_bytes,
            position=header.position,
            part=header.part,
            run_head=header.run_head,
            parent=header.parent,
            content_id=header.content_id,
        )

    def at(self, location: int) -> Steps[RecordHeader | None]:
        """The header of the record that lies there now; None if it cannot be read, or is another one's."""
        segment = location_segment(location)
        generation = int(self._table.generation[segment])
        self._table.hold(segment)
        try:
            header = yield from self._header(segment, location_page(location), location_pages(location))
        finally:
            self._table.release(segment)
        return header if header is not None and header.segment_generation == generation else None

    def _header(self, segment: int, page: int, page_count: int) -> Steps[RecordHeader | None]:
        """The header there; None if it cannot be read."""
        count = _PAGES_AT_FIRST
        while True:
            data = pages(min(count, page_count) * PAGE_BYTES)
            op = IoOp(IoKind.READ, self._table.offset(segment, page), [data], flow=FlowClass.BACKGROUND)
            error: OSError | None = yield io(self._queue, [op])
            if error is not None:
                return None
            header = decode_record_header(data)
            if header is not None or count != _PAGES_AT_FIRST:
                return header
            count = min(int.from_bytes(data[8:10], "little"), _HEADER_PAGES_MAX)
            if count <= _PAGES_AT_FIRST:
                return None

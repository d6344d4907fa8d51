"""What a read wants of each key, worked out once for many calls, and the records that receive it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.types.layout import KVLayout
from kvstore.wire.messages import ID_BYTES
from kvstore.wire.slices import NO_CONTENT_ID
from kvstore_client.incoming import IncomingRecord
from kvstore_client.planner import Section, choose_shards, sections_of
from kvstore_client.ranges import Ranges, Selection, Spans, select, span_bytes
from kvstore_client.regions import Item, Region, region_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShape:
    """Sections of a read and what is wanted of their records.

    Attributes:
        sizes: Bytes of the whole record of each section.
        is_exact: The layout fixes the length of its records.
        takes_any: The one record of a key is read whole, and may have any length that fits its memory.
        is_plain: One section, read whole: the common case.
    """

    sections: tuple[Section, ...]
    selection: Selection
    sizes: tuple[int, ...]
    is_exact: bool
    takes_any: bool
    is_plain: bool

    @property
    def shared_spans(self) -> Spans | None:
        """What is wanted of every record, where that is the same for all; see `spans_of`."""
        return self.selection.shared[0]

    def spans_of(self, records: Sequence[int], key_count: int) -> list[Spans] | None:
        """The spans of each record of a plan; None where `shared_spans` holds for all."""
        if not self.selection.single and len(set(self.selection.shared)) == 1:
            return None
        sizes, selection = self.sizes, self.selection
        return [selection.spans(at // key_count, at % key_count) or ((0, sizes[at // key_count]),) for at in records]


def shape_of(
    layout: KVLayout,
    *,
    key_count: int,
    shards: int | Sequence[int] | None,
    part: str | None,
    layers: Sequence[int] | None,
    ranges: Ranges | None,
) -> ReadShape:
    """The shape of a read; see `BoundNamespace.get_into` for the arguments.

    Raises:
        InvalidRequest: As `select`, or unknown shards.
    """
    sections = sections_of(layout, shards=choose_shards(layout, shards), parts=(part,))
    chosen = select(layout, sections, key_count=key_count, part=part, layers=layers, ranges=ranges)
    if not chosen.single:
        # a shard that holds none of the layers asked for has nothing to send
        held = [at for at, spans in enumerate(chosen.shared) if spans != ()]
        sections = tuple(sections[at] for at in held)
        chosen = Selection(shared=tuple(chosen.shared[at] for at in held))
    is_plain = len(sections) == 1 and chosen.is_whole
    return ReadShape(
        sections=sections,
        selection=chosen,
        sizes=tuple(layout.record_bytes(section.shard, part=section.part) for section in sections),
        is_exact=layout.is_exact,
        takes_any=is_plain and not layout.is_exact,
        is_plain=is_plain,
    )


def incoming_records(
    shape: ReadShape, buffers: Sequence[Item], content_ids: Sequence[bytes] | None, *, key_count: int
) -> list[list[IncomingRecord]]:
    """Section by section the records of all items.

    Raises:
        InvalidRequest: Memory that does not fit; the message names the item, what it has and what is needed.
    """
    if len(buffers) != key_count:
        raise InvalidRequest(f"{len(buffers)} buffers are given for {key_count} keys; pass one for each key")
    if shape.is_plain and content_ids is None:
        return [_plain_records(shape, buffers)]
    width = len(shape.sections)
    if content_ids is not None and [len(one) for one in content_ids] != [ID_BYTES * width] * key_count:
        raise InvalidRequest(f"content_ids must be {ID_BYTES * width} bytes for each of {key_count} keys")
    rows: list[list[IncomingRecord]] = [[] for _ in shape.sections]
    for index, buffer in enumerate(buffers):
        region = region_of(buffer, index=index, writable=True)
        base = 0
        for at, size in enumerate(shape.sizes):
            spans = shape.selection.spans(at, index)
            content_id = NO_CONTENT_ID if content_ids is None else content_ids[index][at * ID_BYTES :][:ID_BYTES]
            room = region.length_bytes if shape.takes_any else size
            rows[at].append(IncomingRecord(region, base, room, shape.is_exact, spans, content_id))
            base += size if spans is None else span_bytes(spans)
        if base != region.length_bytes and not shape.takes_any:
            raise _wrong_total(index, region, base)
    return rows


def _plain_records(shape: ReadShape, buffers: Sequence[Item]) -> list[IncomingRecord]:
    """One whole record per item."""
    (size,) = shape.sizes
    exact = shape.is_exact
    records = []
    for index, buffer in enumerate(buffers):
        region = region_of(buffer, index=index, writable=True)
        if exact and region.length_bytes != size:
            raise _wrong_total(index, region, size)
        records.append(IncomingRecord(region, 0, region.length_bytes, exact, None, NO_CONTENT_ID))
    return records


def _wrong_total(index: int, region: Region, needed: int) -> InvalidRequest:
    return InvalidRequest(
        f"item {index} has {region.length_bytes} bytes in {len(region.views)} fragments, {needed} are needed; "
        "pass memory of exactly that size"
    )

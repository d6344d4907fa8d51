"""Which bytes of a record a read wants, by ranges or by layers, in the order in which they land in the buffer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvstore.errors import InvalidRequest
from kvstore.limits import RANGES_PER_ITEM_MAX
from kvstore.types.layout import ByteRange, KVLayout
from kvstore_client.planner import Section

Range: TypeAlias = ByteRange | tuple[int, int]
Ranges: TypeAlias = Sequence[Range] | Sequence[Sequence[Range]]
Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Ascending, disjoint (first byte, byte behind the last) of one record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What a read wants of each record.

    Attributes:
        shared: For each section the spans of every key's record; None means the whole record.
        single: For each key the spans in all its sections, or empty where `shared` holds.
    """

    shared: tuple[Spans | None, ...]
    single: tuple[Spans, ...] = ()

    def spans(self, section: int, key: int) -> Spans | None:
        """The spans of one record; None for all of it."""
        return self.single[key] if self.single else self.shared[section]

    @property
    def is_whole(self) -> bool:
        """True when every record is read as a whole."""
        return not self.single and all(spans is None for spans in self.shared)


def select(
    layout: KVLayout,
    sections: Sequence[Section],
    *,
    key_count: int,
    part: str | None,
    layers: Sequence[int] | None,
    ranges: Ranges | None,
) -> Selection:
    """What to read of each record of `sections`.

    Args:
        part: A dense part reads only its bytes of the dense record; None, or a sparse part, all of the record.
        layers: Indexes of model layers, ascending; each chosen part gives the layers it holds.
        ranges: Byte ranges of each record: the same for all keys, or one sequence per key.

    Raises:
        InvalidRequest: Both `layers` and `ranges`; ranges that overlap, descend or leave the record; nothing to read.
    """
    if layers is not None and ranges is not None:
        raise InvalidRequest("layers and ranges are both given; pass one of them")
    if ranges is not None:
        if part is not None and layout.part(part).is_dense:
            raise InvalidRequest(f"ranges count in the whole record, not in the dense part {part!r}; leave part out")
        return _select_ranges(layout, sections, ranges, key_count)
    if layers is None and (part is None or not layout.part(part).is_dense):
        return Selection(shared=(None,) * len(sections))
    shared = tuple(_layer_spans(layout, section, part, layers) for section in sections)
    if not any(shared):
        raise InvalidRequest(f"layers {list(layers or ())} hold nothing of part {part!r} in the shards asked for")
    return Selection(shared=shared)


def span_bytes(spans: Spans) -> int:
    """Bytes of all spans together."""
    return sum(end - start for start, end in spans)


def _select_ranges(layout: KVLayout, sections: Sequence[Section], ranges: Ranges, key_count: int) -> Selection:
    limit = min(layout.record_bytes(section.shard, part=section.part) for section in sections)
    if not ranges or _is_range(ranges[0]):
        spans = _spans(ranges, limit=limit, what="ranges")  # type: ignore[arg-type]  # told apart by the line above
        return Selection(shared=(spans,) * len(sections))
    if len(ranges) != key_count:
        raise InvalidRequest(f"ranges are given for {len(ranges)} keys of {key_count}; pass one sequence per key")
    return Selection(
        shared=(None,) * len(sections),
        single=tuple(
            _spans(own, limit=limit, what=f"ranges of item {index}")  # type: ignore[arg-type]
            for index, own in enumerate(ranges)
        ),
    )


def _is_range(value: object) -> bool:
    return isinstance(value, ByteRange) or (
        isinstance(value, tuple) and len(value) == 2 and all(isinstance(number, int) for number in value)
    )


def _spans(ranges: Sequence[Range], *, limit: int, what: str) -> Spans:
    if not 1 <= len(ranges) <= RANGES_PER_ITEM_MAX:
        raise InvalidRequest(f"{what} are {len(ranges)}; pass 1 to {RANGES_PER_ITEM_MAX}, or None for whole records")
    found: list[tuple[int, int]] = []
    for one in ranges:
        start, length = (one.offset_bytes, one.length_bytes) if isinstance(one, ByteRange) else one
        if start < 0 or length < 0 or start + length > limit:
            raise InvalidRequest(f"{what} hold ({start}, {length}), outside the record's {limit} bytes")
        _append(found, start, start + length, what)
    return tuple(found)


def _layer_spans(layout: KVLayout, section: Section, part: str | None, layers: Sequence[int] | None) -> Spans:
    chosen = range(layout.layers) if layers is None else layers
    if not len(chosen):
        raise InvalidRequest("layers are empty; name at least one, or None for whole records")
    names = [section.part] if section.part else [part] if part else [dense.name for dense in layout.dense_parts]
    found: list[tuple[int, int]] = []
    for name in names:
        previous = -1
        for first, count in _stretches(chosen):
            if first <= previous:
                raise InvalidRequest(f"layers {list(chosen)} do not ascend; sort them and name each once")
            previous = first + count - 1
            held = layout.layer_range(first, name, layer_count=count, shard=section.shard)
            if held.length_bytes:
                _append(found, held.offset_bytes, held.offset_bytes + held.length_bytes, "layers")
    return tuple(found)


def _stretches(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive layers as (first, count)."""
    if isinstance(layers, range) and layers.step == 1:
        return [(layers.start, len(layers))]
    found: list[tuple[int, int]] = []
    for layer in layers:
        if found and layer == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((layer, 1))
    return found


def _append(spans: list[tuple[int, int]], start: int, end: int, what: str) -> None:
    if spans and start < spans[-1][1]:
        raise InvalidRequest(f"{what}: the range {start}..{end} overlaps or precedes {spans[-1]}; sort and merge them")
    if spans and start == spans[-1][1]:
        spans[-1] = (spans[-1][0], end)
    elif end > start or not spans:
        spans.append((start, end))

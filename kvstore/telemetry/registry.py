"""All rooms of one process as plain data that msgpack can carry, and the sum over processes.

A snapshot is {room: {field: value}}. A value is a number, a string, a list of numbers, or for a histogram
{"counts": [...], "total_ns": n}. Both ends run the same version, so field names are the schema; a field that the
reader does not know is ignored, one that is missing reads as zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields

from kvstore.limits import SECOND_NS
from kvstore.telemetry.instruments import LATENCY_BOUNDS_NS, Histogram, Instrument, Merge, instruments_of
from kvstore.telemetry.metrics import ROOMS

Value = int | float | str | list[int] | dict[str, int | list[int]]
RoomSnapshot = dict[str, Value]
Snapshot = dict[str, RoomSnapshot]
NamedValue = int | float | str | dict[str, int] | dict[str, int | dict[str, int]]


class Registry:
    """The metrics objects of one process. Several of one room (drives) are merged in the snapshot."""

    def __init__(self) -> None:
        self._rooms: list[tuple[str, object]] = []

    def add(self, metrics: object) -> None:
        """Show `metrics`, an instance of one of `ROOMS`, in snapshots from now on."""
        for name, room in ROOMS.items():
            if isinstance(metrics, room):
                self._rooms.append((name, metrics))
                return
        raise AssertionError(f"{type(metrics).__name__} is not a room")

    def snapshot(self) -> Snapshot:
        """The values now, copied. Call on the thread that owns the metrics."""
        return merge({name: _room_snapshot(metrics)} for name, metrics in self._rooms)


def merge(snapshots: Iterable[Mapping[str, RoomSnapshot]]) -> Snapshot:
    """One snapshot out of many: each field as its instrument says. Rooms and fields that are not known are dropped."""
    merged: Snapshot = {}
    for snapshot in snapshots:
        for name, values in snapshot.items():
            if name in ROOMS:
                _merge_room(merged.setdefault(name, {}), values, instruments_of(ROOMS[name]))
    return merged


def _merge_room(into: RoomSnapshot, values: RoomSnapshot, instruments: Mapping[str, Instrument]) -> None:
    for field_name, value in values.items():
        instrument = instruments.get(field_name)
        if instrument is not None:
            into[field_name] = _merge_value(into.get(field_name), value, instrument)


def _merge_value(old: Value | None, new: Value, instrument: Instrument) -> Value:
    if old is None:
        return new
    match old, new:
        case dict(), dict():
            return {name: _add(old[name], new[name]) for name in old}
        case list(), list():
            return _add_lists(old, new)
        case str(), str():
            return old if new in old.split(", ") else f"{old}, {new}"
        case ((int() | float()), (int() | float())):
            return _merge_numbers(old, new, instrument.merge)
    raise AssertionError(f"{instrument.family}: {old!r} and {new!r} are not of one kind")


def _merge_numbers(old: float, new: float, how: Merge) -> int | float:
    if how is Merge.MAX:
        return max(old, new)
    return min(old, new) if how is Merge.MIN else old + new


def _add(old: int | list[int], new: int | list[int]) -> int | list[int]:
    if isinstance(old, list) and isinstance(new, list):
        return _add_lists(old, new)
    assert isinstance(old, int)
    assert isinstance(new, int)
    return old + new


def _add_lists(old: list[int], new: list[int]) -> list[int]:
    return [a + b for a, b in zip(old, new, strict=True)]


def _room_snapshot(metrics: object) -> RoomSnapshot:
    values: RoomSnapshot = {}
    for declared in fields(type(metrics)):  # type: ignore[arg-type]
        value = getattr(metrics, declared.name)
        if isinstance(value, Histogram):
            values[declared.name] = {"counts": list(value.counts), "total_ns": value.total_ns}
        else:
            values[declared.name] = list(value) if isinstance(value, list) else value
    return values


def number(snapshot: Mapping[str, RoomSnapshot], room: str, field_name: str) -> int | float:
    """One number of a snapshot, 0 where it is missing; a list's sum."""
    value = snapshot.get(room, {}).get(field_name, 0)
    if isinstance(value, list):
        return sum(value)
    assert isinstance(value, int | float)
    return value


def text(snapshot: Mapping[str, RoomSnapshot], room: str, field_name: str) -> str:
    """One string of a snapshot, "" where it is missing."""
    value = snapshot.get(room, {}).get(field_name, "")
    assert isinstance(value, str)
    return value


def named(snapshot: Mapping[str, RoomSnapshot]) -> dict[str, dict[str, NamedValue]]:
    """A snapshot for programs that don't know our enums: lists as {label: count}, as in the metrics.

    Counts of a histogram are by the upper bound of their bucket in seconds, each bucket on its own; "+Inf" is the last.
    """
    return {
        room: {name: _named_value(value, instruments[name]) for name, value in values.items() if name in instruments}
        for room, values in snapshot.items()
        if room in ROOMS and (instruments := instruments_of(ROOMS[room]))
    }


def _named_value(value: Value, instrument: Instrument) -> NamedValue:
    if isinstance(value, list):
        return {label: count for label, count in zip(instrument.index_values, value, strict=False) if label}
    if not isinstance(value, dict):
        return value
    bounds = (*(str(bound_ns / SECOND_NS) for bound_ns in LATENCY_BOUNDS_NS), "+Inf")
    return {
        name: dict(zip(bounds, part, strict=False)) if isinstance(part, list) else part for name, part in value.items()
    }

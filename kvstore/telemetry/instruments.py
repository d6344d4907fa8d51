"""Counters, gauges and histograms that cost one attribute add, and the words that describe them.

A room's numbers are a slotted dataclass of plain ints, floats, strings, lists and `Histogram`s. What a number means
(name, help, kind, labels, how two processes' numbers are merged) stands in its field's metadata, out of the hot path.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from typing import Any, Final

from kvstore.limits import MS_NS, SECOND_NS

LATENCY_BOUNDS_NS: Final = (
    MS_NS // 20,
    MS_NS // 10,
    MS_NS // 2,
    MS_NS,
    5 * MS_NS,
    10 * MS_NS,
    25 * MS_NS,
    100 * MS_NS,
    500 * MS_NS,
    5 * SECOND_NS // 2,
)
"""Upper bounds of latency buckets: 50 us (a hit in RAM) to 2.5 s (a drive in trouble)."""

_METADATA_KEY: Final = "kvstore.instrument"


class Kind(Enum):
    """What a number is; the value is the Prometheus type of its family."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Merge(Enum):
    """How the numbers of two processes or drives become one."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


class Histogram:
    """Counts of observations in fixed buckets. `observe` takes ns; `total_ns` is their sum."""

    __slots__ = ("counts", "total_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_NS) + 1)
        self.total_ns = 0

    def observe(self, duration_ns: int, count: int = 1) -> None:
        """Count a duration, `count` times; a bound belongs to the bucket below it, as Prometheus' `le` says."""
        self.counts[bisect_left(LATENCY_BOUNDS_NS, duration_ns)] += count
        self.total_ns += duration_ns * count


@dataclass(frozen=True, slots=True, kw_only=True)
class Instrument:
    """What one field of a room's metrics means.

    Attributes:
        family: Prometheus family name without the type's suffix; several fields may share one, told apart by labels.
        labels: fixed label of this field, or ().
        index_label: for a list, the label whose values are `index_values`.
        scale: multiplied into the value when rendered (ns to seconds).
    """

    family: str
    help: str
    kind: Kind
    merge: Merge = Merge.SUM
    labels: tuple[tuple[str, str], ...] = ()
    index_label: str = ""
    index_values: tuple[str, ...] = ()
    scale: float = 1


def instrument_of(declared: Field[Any]) -> Instrument:
    """The meaning of one field of a room's dataclass."""
    found = declared.metadata[_METADATA_KEY]
    assert isinstance(found, Instrument)
    return found


def instruments_of(room: type) -> dict[str, Instrument]:
    """Field name to meaning, in declaration order."""
    return {declared.name: instrument_of(declared) for declared in fields(room)}


def counter(family: str, help: str, **labels: str) -> Any:
    """An int that only grows."""
    return _number(Instrument(family=family, help=help, kind=Kind.COUNTER, labels=tuple(labels.items())), 0)


def gauge(family: str, help: str, *, merge: Merge = Merge.SUM, scale: float = 1, **labels: str) -> Any:
    """An int or float that goes up and down."""
    meaning = Instrument(
        family=family, help=help, kind=Kind.GAUGE, merge=merge, labels=tuple(labels.items()), scale=scale
    )
    return _number(meaning, 0)


def counter_by(family: str, help: str, *, label: str, values: Sequence[str]) -> Any:
    """A list of ints that only grow, one for each label value; index it with the enum whose order `values` is."""
    return _list(family, help, Kind.COUNTER, label=label, values=values)


def gauge_by(family: str, help: str, *, label: str, values: Sequence[str]) -> Any:
    """A list of ints that go up and down, one for each label value."""
    return _list(family, help, Kind.GAUGE, label=label, values=values)


def latency(family: str, help: str, **labels: str) -> Any:
    """A `Histogram` of durations; `family` ends in `_seconds`."""
    meaning = Instrument(
        family=family, help=help, kind=Kind.HISTOGRAM, labels=tuple(labels.items()), scale=1 / SECOND_NS
    )
    return field(default_factory=Histogram, metadata={_METADATA_KEY: meaning})


def info(family: str, help: str, *, label: str) -> Any:
    """A string, rendered as a label of a gauge that is always 1."""
    meaning = Instrument(family=family, help=help, kind=Kind.INFO, index_label=label)
    return field(default="", metadata={_METADATA_KEY: meaning})


def _number(meaning: Instrument, start: int) -> Any:
    return field(default=start, metadata={_METADATA_KEY: meaning})


def _list(family: str, help: str, kind: Kind, *, label: str, values: Sequence[str]) -> Any:
    meaning = Instrument(family=family, help=help, kind=kind, index_label=label, index_values=tuple(values))
    return field(default_factory=lambda: [0] * len(values), metadata={_METADATA_KEY: meaning})

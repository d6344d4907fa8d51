"""`Part`: a named piece of a chunk, of equal size in each of its layers."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TypeVar

from kvstore.errors import FormatUnsupported, InvalidRequest
from kvstore.limits import (
    CHECKSUM_BYTES_MAX,
    CHECKSUM_BYTES_MIN,
    CHUNK_TOKENS_MAX,
    LAYERS_MAX,
    LAYOUT_NAME_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    SHARDS_MAX,
    VOLATILE_TTL_NS_MAX,
)
from kvstore.types.canonical import Fields, Value, utf8

E = TypeVar("E", bound=StrEnum)


def member(kind: type[E], value: str, *, what: str) -> E:
    """The member of `kind` with that value. Raises InvalidRequest naming `what`, the value and the known ones."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(kind)
        raise InvalidRequest(f"{what} is {value!r}; use one of: {known}") from None


class PartKind(StrEnum):
    """Whether each chunk has the part (dense) or only chunks where the engine made a checkpoint (sparse)."""

    DENSE = "dense"
    SPARSE = "sparse"


class Retention(StrEnum):
    """Where records of a part live: on the SSD, or in RAM only for a time."""

    SSD = "ssd"
    VOLATILE = "volatile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A named piece of a chunk, of equal size in each of its layers.

    A layer's share is a number of entries: one for each `entry_tokens` tokens (1: one for each token; 4: one for four
    compressed tokens), or a fixed `entries` for each record (a sliding window, a recurrent state). Exactly one of the
    two is set; the other is 0.

    Attributes:
        name: Unique within the layout ("kv", "indexer", "swa").
        entry_bytes: Bytes of one entry in one layer, over all KV heads: K and V, latents, scales.
        entry_tokens: Tokens that one entry stands for.
        entries: Entries of a layer in each record, whatever `chunk_tokens` is.
        layers: Ascending indexes of the layers that hold the part; None is all of them.
        kind: Dense parts of a chunk share one record; a sparse part is its own.
        retention: `VOLATILE` records never touch the SSD; sparse parts only.
        ttl_ns: How long a volatile record is kept; 0 for `SSD`.
        checksum_bytes: Bytes covered by one CRC32C; 0 is the default rule of `KVLayout.checksum_bytes`.
    """

    name: str
    entry_bytes: int
    entry_tokens: int = 0
    entries: int = 0
    layers: tuple[int, ...] | None = None
    kind: PartKind = PartKind.DENSE
    retention: Retention = Retention.SSD
    ttl_ns: int = 0
    checksum_bytes: int = 0

    def __post_init__(self) -> None:
        if self.entry_tokens == 0 and self.entries == 0:
            object.__setattr__(self, "entry_tokens", 1)
        object.__setattr__(self, "kind", member(PartKind, self.kind, what=f"kind of part {self.name!r}"))
        object.__setattr__(
            self, "retention", member(Retention, self.retention, what=f"retention of part {self.name!r}")
        )
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(self.layers))
        _check_part(self)

    @property
    def is_dense(self) -> bool:
        """True when each chunk has the part, within the chunk's one record."""
        return self.kind is PartKind.DENSE

    def to_value(self) -> Value:
        """The part as a record of the canonical encoding; layers are packed u16, none of them for all."""
        return {
            "name": self.name,
            "kind": str(self.kind),
            "entry_bytes": self.entry_bytes,
            "entry_tokens": self.entry_tokens,
            "entries": self.entries,
            "layers": b"" if self.layers is None else struct.pack(f"<{len(self.layers)}H", *self.layers),
            "retention": str(self.retention),
            "ttl_ns": self.ttl_ns,
            "checksum_bytes": self.checksum_bytes,
        }

    @classmethod
    def from_value(cls, value: Value) -> Part:
        """The part of a decoded record. Raises FormatUnsupported for missing or unknown fields."""
        values = Fields(value, what="layout part")
        packed = values.raw("layers")
        if len(packed) % 2:
            raise FormatUnsupported(f"layout part field 'layers' has {len(packed)} bytes, not two for each layer")
        part = cls(
            name=values.text("name"),
            kind=member(PartKind, values.text("kind"), what="part kind"),
            entry_bytes=values.integer("entry_bytes"),
            entry_tokens=values.integer("entry_tokens"),
            entries=values.integer("entries"),
            layers=struct.unpack(f"<{len(packed) // 2}H", packed) or None,
            retention=member(Retention, values.text("retention"), what="part retention"),
            ttl_ns=values.integer("ttl_ns"),
            checksum_bytes=values.integer("checksum_bytes"),
        )
        values.finish()
        return part


def check_name(name: str, *, what: str) -> None:
    """Raises InvalidRequest unless `name` is 1 to LAYOUT_NAME_BYTES_MAX bytes of UTF-8."""
    length = len(utf8(name, what=what))
    if not 1 <= length <= LAYOUT_NAME_BYTES_MAX:
        raise InvalidRequest(f"{what} {name[:80]!r} has {length} bytes; use 1 to {LAYOUT_NAME_BYTES_MAX}")


def check_range(value: int, low: int, high: int, *, what: str) -> None:
    """Raises InvalidRequest unless `value` is an integer of low..high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{what} is {value!r}; use an integer of {low} to {high}")


def _check_part(part: Part) -> None:
    check_name(part.name, what="part name")
    what = f"of part {part.name!r}"
    check_range(part.entry_bytes, 1, PAYLOAD_BYTES_MAX * SHARDS_MAX, what=f"entry_bytes {what}")
    check_range(part.entry_tokens, 0, CHUNK_TOKENS_MAX, what=f"entry_tokens {what}")
    check_range(part.entries, 0, PAYLOAD_BYTES_MAX, what=f"entries {what}")
    if (part.entry_tokens == 0) == (part.entries == 0):
        raise InvalidRequest(
            f"entry_tokens {part.entry_tokens} and entries {part.entries} {what}: set exactly one of the two"
        )
    if part.checksum_bytes:
        check_range(part.checksum_bytes, CHECKSUM_BYTES_MIN, CHECKSUM_BYTES_MAX, what=f"checksum_bytes {what}")
    if part.layers is not None:
        _check_layers(part.layers, what)
    volatile = part.retention is Retention.VOLATILE
    if volatile and part.is_dense:
        raise InvalidRequest(f"retention {what} is volatile, but dense parts share one SSD record; make it sparse")
    if volatile:
        check_range(part.ttl_ns, 1, VOLATILE_TTL_NS_MAX, what=f"ttl_ns {what}, which is volatile,")
    elif part.ttl_ns:
        raise InvalidRequest(f"ttl_ns {what} is {part.ttl_ns}, but only volatile parts have one; leave it 0")


def _check_layers(layers: tuple[int, ...], what: str) -> None:
    if not layers:
        raise InvalidRequest(f"layers {what} are empty; name at least one, or None for all")
    for layer in layers:
        check_range(layer, 0, LAYERS_MAX - 1, what=f"layer {what}")
    for before, after in pairwise(layers):
        if before >= after:
            raise InvalidRequest(f"layers {what} are not ascending: {before} stands before {after}; sort them")

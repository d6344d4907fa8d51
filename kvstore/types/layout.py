"""`KVLayout`: what the bytes of a chunk are, fixed for a namespace. docs/layouts.md describes encoding and geometry.

A chunk's dense parts share one record for each shard, part after part, each part `[layer, entries, bytes]`, so that a
range of layers of one part is one byte range. A sparse part is a record of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields
from enum import StrEnum
from fractions import Fraction
from math import lcm
from typing import Final

from kvstore.errors import FormatUnsupported, InvalidRequest
from kvstore.limits import (
    CHECKSUM_BYTES_DEFAULT,
    CHECKSUM_BYTES_MAX,
    CHECKSUM_BYTES_MIN,
    CHUNK_TOKENS_MAX,
    LAYERS_MAX,
    LAYOUT_BYTES_MAX,
    PARTS_MAX,
    PAYLOAD_BYTES_MAX,
    RUN_BYTES_DEFAULT,
    RUN_BYTES_MAX,
    RUN_TOKENS_DEFAULT,
    SHARDS_MAX,
)
from kvstore.types.canonical import Fields, decode, encode
from kvstore.types.digest import digest
from kvstore.types.part import Part, PartKind, Retention, check_name, check_range, member

__all__ = ["ByteRange", "KVLayout", "Part", "PartKind", "Retention", "ShardAxis"]

ORDER_TOKEN_MAJOR: Final = "layer,token,entry"
ORDER_HEAD_MAJOR: Final = "layer,head,token,entry"
ORDER_OPAQUE: Final = "opaque"
OPAQUE_PART: Final = "data"
_MAGIC: Final = b"kvstore.layout.v1"


class ShardAxis(StrEnum):
    """What shards divide: the KV heads of each layer, or the layers."""

    HEADS = "heads"
    LAYERS = "layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Bytes `offset_bytes .. offset_bytes + length_bytes` of a record's payload."""

    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of a namespace's chunks. Two layouts are the same when their `digest` is.

    Attributes:
        chunk_tokens: Tokens of a chunk, a multiple of each dense part's `entry_tokens`.
        dtype: Name of the element type as the engine calls it ("bf16", "fp8_e4m3"). Not interpreted.
        quantisation: Name of the scheme, scales included ("none", "fp8_ds_mla"). Not interpreted.
        order: Axis names of a part, outermost first, "layer" the first ("layer,token,entry"). Not interpreted.
        layers: Layers of the model, those without KV included.
        parts: At least one of them dense. Their order is their order in the record.
        shards: Records of a chunk, each with its own writer. Fixed, so that any parallel size can read and write.
        shard_axis: `HEADS`: each entry is divided evenly.
            `LAYERS`: shard s holds the layers from L*s//shards to before L*(s+1)//shards.
        run_bytes: About how many bytes of consecutive records of a chain are placed together. 0, the default,
            becomes those of RUN_TOKENS_DEFAULT tokens, at least RUN_BYTES_DEFAULT: few runs make few holes.
        digest: 32 bytes, BLAKE3 over `encode()`; computed.

    Raises:
        InvalidRequest: A field is out of its bounds; the message names it, its value, the limit and the fix.
    """

    chunk_tokens: int
    dtype: str
    layers: int
    parts: tuple[Part, ...]
    quantisation: str = "none"
    order: str = ORDER_TOKEN_MAJOR
    shards: int = 1
    shard_axis: ShardAxis = ShardAxis.HEADS
    run_bytes: int = 0
    digest: bytes = field(init=False, repr=False, compare=False)
    _sizes: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)  # [part][shard]
    _dense_record_bytes: tuple[int, ...] = field(init=False, repr=False, compare=False)  # [shard]
    _checksum_bytes: tuple[int, ...] = field(init=False, repr=False, compare=False)  # [part]
    _dense_checksum_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shard_axis", member(ShardAxis, self.shard_axis, what="shard_axis"))
        object.__setattr__(self, "parts", tuple(_normal_layers(part, self.layers) for part in self.parts))
        _check_layout(self)
        sizes = tuple(
            tuple(len(_part_layers(self, part, shard)) * self._layer_bytes(part) for shard in range(self.shards))
            for part in self.parts
        )
        object.__setattr__(self, "_sizes", sizes)
        dense = [row for part, row in zip(self.parts, sizes, strict=True) if part.is_dense]
        object.__setattr__(self, "_dense_record_bytes", tuple(sum(column) for column in zip(*dense, strict=True)))
        _check_records(self)
        object.__setattr__(self, "run_bytes", self.run_bytes or _default_run_bytes(self))
        object.__setattr__(
            self,
            "_checksum_bytes",
            tuple(part.checksum_bytes or _default_checksum_bytes(self._layer_bytes(part)) for part in self.parts),
        )
        leader = self._index(max(self.dense_parts, key=self._layer_bytes).name)
        object.__setattr__(self, "_dense_checksum_bytes", self._checksum_bytes[leader])
        object.__setattr__(self, "digest", digest(self.encode()))

    @classmethod
    def opaque(
        cls,
        *,
        chunk_bytes: int,
        chunk_tokens: int = 64,
        shards: int = 1,
        run_bytes: int = 0,
        checksum_bytes: int = CHECKSUM_BYTES_DEFAULT,
    ) -> KVLayout:
        """A layout of plain bytes: a record takes a payload of 0 to `chunk_bytes / shards` bytes.

        Args:
            chunk_bytes: Upper bound of a chunk's bytes, a multiple of `shards`; at least 1.
            chunk_tokens: Tokens that one key stands for when keys are derived from token ids.
            shards: Records of a chunk.
            run_bytes: As in the class.
            checksum_bytes: Bytes covered by one CRC32C.
        """
        part = Part(name=OPAQUE_PART, entry_bytes=chunk_bytes, entries=1, checksum_bytes=checksum_bytes)
        return cls(
            chunk_tokens=chunk_tokens,
            dtype="bytes",
            layers=1,
            parts=(part,),
            order=ORDER_OPAQUE,
            shards=shards,
            run_bytes=run_bytes,
        )

    @property
    def is_exact(self) -> bool:
        """True when a record's payload has exactly its computed length; False for `opaque`, where that is the most."""
        return self.order != ORDER_OPAQUE

    @property
    def dense_parts(self) -> tuple[Part, ...]:
        """The parts that share a chunk's record, in record order."""
        return tuple(part for part in self.parts if part.is_dense)

    @property
    def sparse_parts(self) -> tuple[Part, ...]:
        """The parts that are records of their own."""
        return tuple(part for part in self.parts if not part.is_dense)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's dense parts over all shards; of an opaque layout, the most."""
        return sum(self._dense_record_bytes)

    @property
    def bytes_per_token(self) -> Fraction:
        """`chunk_bytes / chunk_tokens`, exact: compressed layouts have parts of a byte."""
        return Fraction(self.chunk_bytes, self.chunk_tokens)

    @property
    def max_record_bytes(self) -> int:
        """Payload bytes of the largest record of any kind and shard."""
        return max(
            max(self._dense_record_bytes),
            *(max(row) for part, row in zip(self.parts, self._sizes, strict=True) if not part.is_dense),
            0,
        )

    @property
    def chunks_per_run(self) -> int:
        """Consecutive chunks that are placed together: `run_bytes` over the largest dense record, at least 1."""
        return max(1, self.run_bytes // max(self._dense_record_bytes))

    def part(self, name: str) -> Part:
        """The part called `name`. Raises InvalidRequest with the known names."""
        return self.parts[self._index(name)]

    def record_bytes(self, shard: int = 0, *, part: str | None = None) -> int:
        """Payload bytes of a record: the dense one of `shard`, or that of the sparse part `part`."""
        self._check_shard(shard)
        if part is None:
            return self._dense_record_bytes[shard]
        return self._sizes[self._sparse_index(part)][shard]

    def part_record_bytes(self, name: str, shard: int = 0) -> int:
        """Bytes of one part, dense or sparse, in a record of `shard`."""
        self._check_shard(shard)
        return self._sizes[self._index(name)][shard]

    def layer_range(self, layer: int, part: str, *, layer_count: int = 1, shard: int = 0) -> ByteRange:
        """Where `layer_count` layers of a part, from `layer` on, lie in the payload of their record.

        Layers that the part or the shard does not hold take no bytes; the range may be empty. A sparse part's offsets
        count in its own record.

        Raises:
            InvalidRequest: Unknown part, shard, or a layer outside the model.
        """
        self._check_shard(shard)
        if layer < 0 or layer_count < 0 or layer + layer_count > self.layers:
            raise InvalidRequest(f"layers {layer}..{layer + layer_count} lie outside the model's 0..{self.layers}")
        index = self._index(part)
        chosen = self.parts[index]
        held = _part_layers(self, chosen, shard)
        first, last = bisect_left(held, layer), bisect_left(held, layer + layer_count)
        size = self._layer_bytes(chosen)
        return ByteRange(
            offset_bytes=self._part_offset(index, shard) + first * size, length_bytes=(last - first) * size
        )

    def checksum_bytes(self, part: str | None = None) -> int:
        """Bytes covered by one CRC32C in a dense record (`part` None) or in a sparse part's record.

        A record has one block size. The default is one layer of the dense part with the largest layers (of the sparse
        part), times the least factor that gives at least CHECKSUM_BYTES_MIN, or split evenly (else at
        CHECKSUM_BYTES_MAX) where a layer is above CHECKSUM_BYTES_MAX. A dense record takes the same part's own
        `checksum_bytes` when that is set.
        """
        return self._dense_checksum_bytes if part is None else self._checksum_bytes[self._sparse_index(part)]

    def differences(self, other: KVLayout) -> list[str]:
        """Names of the fields in which the two differ; parts as "parts.NAME.FIELD" or "parts.NAME"."""
        found = [
            name
            for name in (
                "chunk_tokens",
                "dtype",
                "quantisation",
                "order",
                "layers",
                "shards",
                "shard_axis",
                "run_bytes",
            )
            if getattr(self, name) != getattr(other, name)
        ]
        if [part.name for part in self.parts] != [part.name for part in other.parts]:
            return [*found, "parts"]
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            found += [
                f"parts.{mine.name}.{item.name}"
                for item in fields(Part)
                if getattr(mine, item.name) != getattr(theirs, item.name)
            ]
        return found

    def encode(self) -> bytes:
        """The canonical bytes, which the digest is over; `decode` reads them back."""
        return _MAGIC + encode(
            {
                "chunk_tokens": self.chunk_tokens,
                "dtype": self.dtype,
                "quantisation": self.quantisation,
                "order": self.order,
                "layers": self.layers,
                "shards": self.shards,
                "shard_axis": str(self.shard_axis),
                "run_bytes": self.run_bytes,
                "parts": [part.to_value() for part in self.parts],
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> KVLayout:
        """The layout that `data` encodes.

        Raises:
            FormatUnsupported: Not a layout, another version, unknown or missing fields, or not in canonical form.
            InvalidRequest: Well formed, but a field is out of its bounds.
        """
        if not data.startswith(_MAGIC):
            raise FormatUnsupported(f"layout begins with {data[: len(_MAGIC)]!r}; this version reads {_MAGIC!r}")
        values = Fields(decode(data[len(_MAGIC) :], what="layout"), what="layout")
        layout = cls(
            chunk_tokens=values.integer("chunk_tokens"),
            dtype=values.text("dtype"),
            quantisation=values.text("quantisation"),
            order=values.text("order"),
            layers=values.integer("layers"),
            shards=values.integer("shards"),
            shard_axis=member(ShardAxis, values.text("shard_axis"), what="shard_axis"),
            run_bytes=values.integer("run_bytes"),
            parts=tuple(Part.from_value(part) for part in values.items("parts")),
        )
        values.finish()
        if layout.encode() != data:
            raise FormatUnsupported(
                "layout encoding is not in canonical form: its fields or layers are in another order"
            )
        return layout

    def _layer_bytes(self, part: Part) -> int:
        """Bytes of one layer of `part` in one shard."""
        entries = part.entries or self.chunk_tokens // part.entry_tokens
        divisor = self.shards if self.shard_axis is ShardAxis.HEADS else 1
        return entries * (part.entry_bytes // divisor)

    def _part_offset(self, index: int, shard: int) -> int:
        if not self.parts[index].is_dense:
            return 0
        return sum(self._sizes[at][shard] for at in range(index) if self.parts[at].is_dense)

    def _index(self, name: str) -> int:
        for index, part in enumerate(self.parts):
            if part.name == name:
                return index
        known = ", ".join(part.name for part in self.parts)
        raise InvalidRequest(f"part {name!r} is not in the layout; its parts are: {known}")

    def _sparse_index(self, name: str) -> int:
        index = self._index(name)
        if self.parts[index].is_dense:
            raise InvalidRequest(f"part {name!r} is dense and has no record of its own; leave the part out")
        return index

    def _check_shard(self, shard: int) -> None:
        if not 0 <= shard < self.shards:
            raise InvalidRequest(f"shard {shard} lies outside the layout's 0..{self.shards - 1}")


def _part_layers(layout: KVLayout, part: Part, shard: int) -> range | tuple[int, ...]:
    """The layers of `part` that `shard` holds, ascending."""
    first, last = 0, layout.layers
    if layout.shard_axis is ShardAxis.LAYERS:
        first, last = layout.layers * shard // layout.shards, layout.layers * (shard + 1) // layout.shards
    if part.layers is None:
        return range(first, last)
    return part.layers[bisect_left(part.layers, first) : bisect_left(part.layers, last)]


def _default_checksum_bytes(layer_bytes: int) -> int:
    if layer_bytes <= CHECKSUM_BYTES_MAX:
        return layer_bytes * -(-CHECKSUM_BYTES_MIN // layer_bytes)
    pieces = -(-layer_bytes // CHECKSUM_BYTES_MAX)
    while layer_bytes % pieces and layer_bytes // pieces > CHECKSUM_BYTES_MIN:
        pieces += 1
    return layer_bytes // pieces if layer_bytes % pieces == 0 else CHECKSUM_BYTES_MAX


def _default_run_bytes(layout: KVLayout) -> int:
    chunks = -(-RUN_TOKENS_DEFAULT // layout.chunk_tokens)
    return min(max(RUN_BYTES_DEFAULT, chunks * max(layout._dense_record_bytes)), RUN_BYTES_MAX)


def _normal_layers(part: Part, layers: int) -> Part:
    """One form for "all layers", so that equal layouts have equal digests."""
    if part.layers is None or part.layers != tuple(range(layers)):
        return part
    return Part(**{item.name: getattr(part, item.name) for item in fields(Part) if item.name != "layers"})


def _check_layout(layout: KVLayout) -> None:
    check_range(layout.chunk_tokens, 1, CHUNK_TOKENS_MAX, what="chunk_tokens")
    check_range(layout.layers, 1, LAYERS_MAX, what="layers")
    check_range(layout.shards, 1, SHARDS_MAX, what="shards")
    check_range(layout.run_bytes, 0, RUN_BYTES_MAX, what="run_bytes")
    check_name(layout.dtype, what="dtype")
    check_name(layout.quantisation, what="quantisation")
    check_name(layout.order, what="order")
    axes = layout.order.split(",")
    if layout.order != ORDER_OPAQUE and (axes[0] != "layer" or "" in axes or len(set(axes)) < len(axes)):
        raise InvalidRequest(
            f'order is {layout.order!r}; name each axis once, outermost first, "layer" the first: {ORDER_TOKEN_MAJOR!r}'
        )
    names = [part.name for part in layout.parts]
    if not 1 <= len(names) <= PARTS_MAX or len(set(names)) < len(names):
        raise InvalidRequest(f"parts are {names}; use 1 to {PARTS_MAX} of them, each name once")
    if not layout.dense_parts:
        raise InvalidRequest(f"parts {names} are all sparse; at least one must be dense, or no chunk can be looked up")
    for part in layout.parts:
        _check_part_fits(layout, part)
    period = lcm(*(part.entry_tokens or 1 for part in layout.parts))
    if layout.chunk_tokens % period:
        periods = ", ".join(f"{part.name} {part.entry_tokens}" for part in layout.parts if part.entry_tokens)
        raise InvalidRequest(
            f"chunk_tokens is {layout.chunk_tokens}, not a multiple of {period}, the common compression period of the "
            f"parts ({periods}); use {max(1, layout.chunk_tokens // period) * period}"
        )


def _check_part_fits(layout: KVLayout, part: Part) -> None:
    if part.layers is not None and part.layers[-1] >= layout.layers:
        raise InvalidRequest(f"part {part.name!r} names layer {part.layers[-1]}, but layers is {layout.layers}")
    if layout.shard_axis is ShardAxis.HEADS and part.entry_bytes % layout.shards:
        raise InvalidRequest(
            f"entry_bytes of part {part.name!r} is {part.entry_bytes}, which {layout.shards} shards do not divide; "
            "use fewer shards, or shard by layers"
        )


def _check_records(layout: KVLayout) -> None:
    for shard, size in enumerate(layout._dense_record_bytes):
        if size == 0:
            raise InvalidRequest(
                f"shard {shard} of {layout.shards} would hold no bytes of any dense part; use fewer shards"
            )
    for part, row in zip(layout.parts, layout._sizes, strict=True):
        if not part.is_dense and 0 in row:
            raise InvalidRequest(
                f"shard {row.index(0)} of {layout.shards} would hold no bytes of the sparse part {part.name!r}; "
                "use fewer shards"
            )
    if layout.max_record_bytes > PAYLOAD_BYTES_MAX:
        raise InvalidRequest(
            f"a record would have {layout.max_record_bytes} bytes, above the limit of {PAYLOAD_BYTES_MAX}; "
            f"use fewer chunk_tokens (now {layout.chunk_tokens}) or more shards (now {layout.shards})"
        )
    length = len(layout.encode())
    if length > LAYOUT_BYTES_MAX:
        raise InvalidRequest(
            f"layout encodes to {length} bytes, above the limit of {LAYOUT_BYTES_MAX}; use fewer parts"
        )

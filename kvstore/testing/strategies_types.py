"""Hypothesis strategies for the values of `kvstore.types`: tokens, chains, layouts, namespaces."""

from __future__ import annotations

from hypothesis import strategies as st

from kvstore.limits import MiB
from kvstore.types.keys import KeyChain
from kvstore.types.layout import KVLayout, Part, PartKind, Retention, ShardAxis
from kvstore.types.namespace import Namespace

_NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
DIGESTS = st.binary(min_size=32, max_size=32)


def tokens(*, max_size: int = 200) -> st.SearchStrategy[list[int]]:
    """Token ids, the bounds of u32 among them."""
    return st.lists(st.integers(0, 300) | st.integers(0, 0xFFFF_FFFF), max_size=max_size)


@st.composite
def chains(draw: st.DrawFn, *, max_chunks: int = 24, chunks_per_run: int | None = None) -> KeyChain:
    """Chains from the root, of short chunks."""
    count = draw(st.integers(0, max_chunks))
    return KeyChain.from_tokens(
        draw(DIGESTS),
        draw(st.lists(st.integers(0, 0xFFFF_FFFF), min_size=2 * count, max_size=2 * count)),
        chunk_tokens=2,
        chunks_per_run=draw(st.integers(1, 6)) if chunks_per_run is None else chunks_per_run,
    )


@st.composite
def parts(draw: st.DrawFn, *, name: str, kind: PartKind, layers: int, chunk_tokens: int, shards: int) -> Part:
    """A part that fits a layout of the given numbers."""
    fixed = draw(st.booleans())
    periods = [period for period in (1, 2, 4, 128) if chunk_tokens % period == 0]
    volatile = kind is PartKind.SPARSE and draw(st.booleans())
    some = draw(st.none() | st.sets(st.integers(0, layers - 1), min_size=1).map(lambda chosen: tuple(sorted(chosen))))
    return Part(
        name=name,
        entry_bytes=shards * draw(st.integers(1, 700)),
        entry_tokens=0 if fixed else draw(st.sampled_from(periods)),
        entries=draw(st.integers(1, 130)) if fixed else 0,
        layers=some,
        kind=kind,
        retention=Retention.VOLATILE if volatile else Retention.SSD,
        ttl_ns=draw(st.integers(1, 10**12)) if volatile else 0,
        checksum_bytes=draw(st.just(0) | st.sampled_from((4096, 65536, MiB))),
    )


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    """Exact layouts, dense and sparse parts mixed; shards by heads, since a layer group could be left without bytes."""
    layers = draw(st.integers(1, 12))
    chunk_tokens = draw(st.sampled_from((1, 16, 63, 64, 128, 256)))
    shards = draw(st.sampled_from((1, 1, 2, 3)))
    names = draw(st.lists(_NAMES, min_size=1, max_size=4, unique=True))
    kinds = [PartKind.DENSE, *(draw(st.sampled_from(PartKind)) for _ in names[1:])]
    return KVLayout(
        chunk_tokens=chunk_tokens,
        dtype=draw(_NAMES),
        quantisation=draw(_NAMES),
        layers=layers,
        parts=tuple(
            draw(parts(name=name, kind=kind, layers=layers, chunk_tokens=chunk_tokens, shards=shards))
            for name, kind in zip(names, kinds, strict=True)
        ),
        shards=shards,
        shard_axis=ShardAxis.HEADS,
        run_bytes=draw(st.integers(1, 64 * MiB)),
    )


def opaque_layouts(*, max_chunk_bytes: int = 256 * 1024) -> st.SearchStrategy[KVLayout]:
    """Layouts of plain bytes."""
    return st.builds(
        lambda size, shards, tokens: KVLayout.opaque(chunk_bytes=size * shards, shards=shards, chunk_tokens=tokens),
        st.integers(1, max_chunk_bytes // 4),
        st.integers(1, 4),
        st.sampled_from((1, 16, 64)),
    )


@st.composite
def namespaces(draw: st.DrawFn, *, layout: KVLayout | None = None) -> Namespace:
    """Namespaces with any Unicode in their names."""
    adapter = draw(st.just("") | _NAMES)
    return Namespace(
        tenant=draw(_NAMES),
        model=draw(_NAMES),
        weights=draw(_NAMES),
        layout=layout or draw(layouts() | opaque_layouts()),
        adapter=adapter,
        adapter_revision=draw(st.just("") | _NAMES) if adapter else "",
        salt=draw(st.binary(max_size=16)),
    )

"""What travels with a record beside its key: facts of its place in a chain, and of its kind in a layout."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.limits import DIGEST_BYTES
from kvstore.types.keys import KeyChain
from kvstore.types.layout import KVLayout
from kvstore.wire.messages import U32_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFacts:
    """Per key of a chain what a record carries beside its own key: 32-byte blobs, and where positions begin."""

    run_heads: bytes
    parents: bytes
    first_position: int | None

    @classmethod
    def of(cls, chain: KeyChain) -> ChainFacts:
        """The facts of every key of `chain`."""
        return cls(run_heads=chain.run_heads(), parents=chain.parents, first_position=chain.first_position)

    def run_head(self, index: int) -> bytes:
        """Run head of key `index`."""
        return self.run_heads[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def parent(self, index: int) -> bytes:
        """Parent of key `index`, zeros where unknown."""
        return self.parents[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def position(self, index: int) -> int:
        """Position of key `index`, U32_MAX where unknown."""
        return U32_MAX if self.first_position is None else self.first_position + index


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    """What a layout says about the records of one kind."""

    code: int
    volatile_ttl_ns: int
    block_bytes: int

    @classmethod
    def of(cls, layout: KVLayout, part: str | None) -> PartFacts:
        """The facts of the dense record (None) or of a sparse part."""
        if part is None:
            return cls(code=0, volatile_ttl_ns=0, block_bytes=layout.checksum_bytes())
        index = next(at for at, one in enumerate(layout.sparse_parts) if one.name == part)
        return cls(
            code=1 + index, volatile_ttl_ns=layout.sparse_parts[index].ttl_ns, block_bytes=layout.checksum_bytes(part)
        )

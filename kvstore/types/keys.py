"""Chunk keys: 32-byte digests that name content by its input, and immutable chains of them.

    root        = 32 zero bytes
    chunk       = BLAKE3("kvstore.chunk.v1" | namespace digest | parent chunk or root
                         | u32 n | n token ids u32 | u32 len | extra)
    engine key  = BLAKE3("kvstore.engine.v1" | namespace digest | u32 len | algorithm | u32 len | engine's hash)
    shard s     = the chunk's digest where the layout has one shard,
                  else BLAKE3("kvstore.shard.v1" | chunk digest | u32 s)
    sparse part = BLAKE3("kvstore.part.v1" | chunk digest | u32 s | u32 len | part name)

All numbers are little endian, all text UTF-8. Golden vectors: tests/vectors/keys.json.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, cast, overload

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.limits import CHUNK_TOKENS_MAX, DIGEST_BYTES, ENGINE_HASH_BYTES_MAX, EXTRA_BYTES_MAX, LAYOUT_NAME_BYTES_MAX
from kvstore.types.canonical import utf8
from kvstore.types.digest import ZERO_DIGEST, digest_bodies, digest_chain, digest_each
from kvstore.types.tokens import PackedTokens, Tokens, pack_tokens

_CHUNK: Final = b"kvstore.chunk.v1"
_ENGINE: Final = b"kvstore.engine.v1"
_SHARD: Final = b"kvstore.shard.v1"
_PART: Final = b"kvstore.part.v1"
_U32: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ChunkKey:
    """The key of one chunk. Two keys are equal when their digests are.

    Attributes:
        digest: 32 bytes.
        position: Index of the chunk in its sequence; None when unknown.
        parent: Digest of the chunk before it; None at the root or when unknown.
        run_head: Digest of the first chunk of its run; its own when it is that, or when the position is unknown.
    """

    digest: bytes
    position: int | None = field(default=None, compare=False)
    parent: bytes | None = field(default=None, compare=False)
    run_head: bytes = field(compare=False)

    def __repr__(self) -> str:
        return f"ChunkKey({self.digest.hex()[:8]}.., position {self.position})"


class KeyChain(Sequence[ChunkKey]):
    """An immutable sequence of chunk keys: consecutive chunks of one token sequence, or keys without a position.

    A slice of a chain with step 1 is a chain that still knows positions, its parent and its run heads; it shares the
    digests of the chain it was cut from. Other slices, and sums of chains that do not follow each other, hold keys
    without a position. Chains are equal when digests, first position and parent are.
    """

    __slots__ = (
        "_blob",
        "_chunks_per_run",
        "_namespace",
        "_origin",
        "_origin_head",
        "_origin_parent",
        "_start",
        "_stop",
    )

    def __init__(
        self,
        digests: bytes = b"",
        *,
        first_position: int | None = None,
        parent: bytes | None = None,
        run_head: bytes | None = None,
        chunks_per_run: int = 1,
    ) -> None:
        """A chain of known digests. Callers use `from_tokens` or `from_hashes`; a node may rebuild one from a request.

        Args:
            digests: n * 32 bytes.
            first_position: Index of the first chunk in its sequence; None makes the keys position-less.
            parent: Digest of the chunk before the first.
            run_head: Digest of the first chunk of the run that the first chunk lies in. Without it a chain that begins
                inside a run takes its own first chunk for the head, and looks at other targets than the writer did.
            chunks_per_run: Chunks that are placed together (`KVLayout.chunks_per_run`).
        """
        if len(digests) % DIGEST_BYTES:
            raise InvalidRequest(f"digests have {len(digests)} bytes, not a multiple of {DIGEST_BYTES}")
        if chunks_per_run < 1:
            raise InvalidRequest(f"chunks_per_run is {chunks_per_run}; use at least 1")
        if first_position is not None and first_position < 0:
            raise InvalidRequest(f"first_position is {first_position}; use 0 or more, or None when it is unknown")
        for name, value in (("parent", parent), ("run_head", run_head)):
            if value is not None and len(value) != DIGEST_BYTES:
                raise InvalidRequest(f"{name} has {len(value)} bytes; a chunk digest has {DIGEST_BYTES}")
            if value is not None and first_position is None:
                raise InvalidRequest(f"{name} is given without first_position; pass both, or neither")
        if parent is not None and first_position == 0:
            raise InvalidRequest("parent is given for position 0, which has none; leave it out")
        self._blob = bytes(digests)
        self._start = 0
        self._stop = len(digests) // DIGEST_BYTES
        self._origin = first_position
        self._origin_parent = parent
        self._origin_head = run_head
        self._chunks_per_run = chunks_per_run
        self._namespace = b""

    @classmethod
    def from_tokens(
        cls,
        namespace_digest: bytes,
        tokens: Tokens,
        *,
        chunk_tokens: int,
        chunks_per_run: int = 1,
        extra: Sequence[bytes] | None = None,
        after: KeyChain | None = None,
    ) -> KeyChain:
        """Keys of the full chunks of `tokens`; a tail shorter than a chunk has no key.

        Args:
            namespace_digest: 32 bytes.
            tokens: Ids of 0..2^32-1, from the start of the sequence, or from the end of `after`.
            chunk_tokens: Tokens of a chunk.
            chunks_per_run: Chunks that are placed together.
            extra: For each full chunk, what its KV depends on beside namespace and tokens (a hash of the images whose
                placeholders it holds, say); b"" for nothing. None is b"" for all. Leaving it out where token ids do not
                tell content apart gives one key to different content.
            after: A chain with positions that these tokens continue; the result holds the new keys only.

        Raises:
            InvalidRequest: A bad token id (index and value named), or `extra` of another length than the chunks.
        """
        if not 1 <= chunk_tokens <= CHUNK_TOKENS_MAX:
            raise InvalidRequest(f"chunk_tokens is {chunk_tokens}; use 1 to {CHUNK_TOKENS_MAX}")
        _check_digest(namespace_digest, what="namespace digest")
        parent, position = None, 0
        if after is not None:
            if after.first_position is None:
                raise InvalidRequest("after has no positions, so nothing can follow it; pass a chain with them")
            parent, position = after._digest_before(len(after)), after.first_position + len(after)
        bodies = _chunk_bodies(pack_tokens(tokens), chunk_tokens, extra)
        digests = digest_chain(_CHUNK + namespace_digest, parent or ZERO_DIGEST, bodies)
        chain = cls(digests, first_position=position, parent=parent, chunks_per_run=chunks_per_run)
        chain._namespace = namespace_digest
        return chain if after is None else (after + chain)[len(after) :]

    @classmethod
    def from_hashes(
        cls,
        namespace_digest: bytes,
        hashes: Sequence[bytes],
        *,
        algorithm: str,
        first_position: int | None = None,
        parent: bytes | None = None,
        run_head: bytes | None = None,
        chunks_per_run: int = 1,
    ) -> KeyChain:
        """Keys for blocks that an engine hashed itself. The engine's hash must cover all the KV depends on.

        Args:
            namespace_digest: 32 bytes.
            hashes: One hash of 1 to ENGINE_HASH_BYTES_MAX bytes for each chunk.
            algorithm: Name of the engine's hash and its version; hashes of two algorithms never meet.
            first_position: Index of the first chunk; None when the hashes are not consecutive chunks.
            parent: Chunk digest (32 bytes) of the chunk before the first.
            run_head: As in `KeyChain`.
            chunks_per_run: Chunks that are placed together.
        """
        _check_digest(namespace_digest, what="namespace digest")
        name = utf8(algorithm, what="algorithm")
        if not 1 <= len(name) <= LAYOUT_NAME_BYTES_MAX:
            raise InvalidRequest(
                f"algorithm {algorithm[:80]!r} has {len(name)} bytes; use 1 to {LAYOUT_NAME_BYTES_MAX}"
            )
        prefix = _ENGINE + namespace_digest + _U32.pack(len(name)) + name
        for index, value in enumerate(hashes):
            if not isinstance(value, bytes) or not 1 <= len(value) <= ENGINE_HASH_BYTES_MAX:
                raise InvalidRequest(f"hash {index} is {value!r:.80}; use 1 to {ENGINE_HASH_BYTES_MAX} bytes")
        digests = digest_bodies(prefix, [_U32.pack(len(value)) + value for value in hashes])
        chain = cls(
            digests, first_position=first_position, parent=parent, run_head=run_head, chunks_per_run=chunks_per_run
        )
        chain._namespace = namespace_digest
        return chain

    @property
    def namespace_digest(self) -> bytes:
        """Of the namespace that all of the keys were made for; b"" where that is not known."""
        return self._namespace

    @property
    def digests(self) -> bytes:
        """The chunk digests, 32 bytes each, in order."""
        return self._blob[self._start * DIGEST_BYTES : self._stop * DIGEST_BYTES]

    @property
    def first_position(self) -> int | None:
        """Position of the first chunk; of an empty slice, where it would stand. None for keys without positions."""
        return None if self._origin is None else self._origin + self._start

    @property
    def parent(self) -> bytes | None:
        """Digest of the chunk before the first; None at the root or when unknown."""
        return self._digest_before(0)

    @property
    def parents(self) -> bytes:
        """The parent digest of each chunk, 32 bytes each; zeros at the root or when unknown."""
        if self._origin is None:
            return bytes(DIGEST_BYTES * len(self))
        return ((self.parent or ZERO_DIGEST) + self.digests)[: DIGEST_BYTES * len(self)]

    @property
    def chunks_per_run(self) -> int:
        """Chunks of a run, as given when the chain was made."""
        return self._chunks_per_run

    def run_heads(self, chunks_per_run: int | None = None) -> bytes:
        """The run head of each chunk, 32 bytes each.

        Runs begin at positions that are multiples of `chunks_per_run` (default: the chain's own). A head before the
        first digest that the chain knows is the `run_head` it was made with, else its first known digest.
        """
        size = chunks_per_run or self._chunks_per_run
        if self._origin is None or size == 1 or not len(self):
            return self.digests
        positions = np.arange(self._start, self._stop) + self._origin
        indexes = positions - positions % size - self._origin
        known = np.frombuffer(self._blob, np.dtype((np.void, DIGEST_BYTES)))
        heads = known[np.maximum(indexes, 0)]
        if self._origin_head is not None:
            heads[indexes < 0] = np.void(self._origin_head)
        return bytes(heads)

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, index: int) -> ChunkKey: ...
    @overload
    def __getitem__(self, index: slice) -> KeyChain: ...
    def __getitem__(self, index: int | slice) -> ChunkKey | KeyChain:
        if isinstance(index, slice):
            return self._slice(index)
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"key {index} of a chain of {len(self)}")
        position = None if self._origin is None else self._origin + self._start + at
        return ChunkKey(
            digest=self._digest(self._start + at),
            position=position,
            parent=self._digest_before(at),
            run_head=self._run_head(self._start + at),
        )

    def __iter__(self) -> Iterator[ChunkKey]:
        return (self[index] for index in range(len(self)))

    def __contains__(self, key: object) -> bool:
        wanted = key.digest if isinstance(key, ChunkKey) else key
        if not isinstance(wanted, bytes) or len(wanted) != DIGEST_BYTES:
            return False
        end = self._stop * DIGEST_BYTES
        at = self._blob.find(wanted, self._start * DIGEST_BYTES, end)
        while at >= 0 and at % DIGEST_BYTES:
            at = self._blob.find(wanted, at + 1, end)
        return at >= 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeyChain):
            return NotImplemented
        return (self.digests, self.first_position, self.parent) == (other.digests, other.first_position, other.parent)

    __hash__ = None  # type: ignore[assignment]  # a set of chains has no use, and hash() of bytes is seeded

    def __add__(self, other: KeyChain) -> KeyChain:
        """The keys of both; still a chain when `other` is the direct continuation, else without positions."""
        if not isinstance(other, KeyChain):
            return NotImplemented
        if not len(other):
            return self
        if not len(self) and self._origin is None:
            return other
        if not self._is_followed_by(other):
            apart = KeyChain(self.digests + other.digests)
            apart._namespace = self._namespace_with(other)
            return apart
        joined = KeyChain(chunks_per_run=self._chunks_per_run)
        joined._namespace = self._namespace_with(other)
        joined._blob = self._blob[: self._stop * DIGEST_BYTES] + other.digests
        joined._start, joined._stop = self._start, self._stop + len(other)
        joined._origin, joined._origin_parent, joined._origin_head = (
            self._origin,
            self._origin_parent,
            self._origin_head,
        )
        return joined

    def __repr__(self) -> str:
        where = "no positions" if self.first_position is None else f"from {self.first_position}"
        ends = f", {self._digest(self._start).hex()[:8]}..{self._digest(self._stop - 1).hex()[:8]}" if len(self) else ""
        return f"KeyChain({len(self)} keys, {where}{ends})"

    def _namespace_with(self, other: KeyChain) -> bytes:
        return self._namespace if self._namespace == other._namespace else b""

    def _is_followed_by(self, other: KeyChain) -> bool:
        if self.first_position is None or other.first_position != self.first_position + len(self):
            return False
        return self._digest_before(len(self)) == other.parent and (
            other.parent is not None or other.first_position == 0
        )

    def _slice(self, index: slice) -> KeyChain:
        start, stop, step = index.indices(len(self))
        if step != 1:
            picked = b"".join(self._digest(self._start + at) for at in range(start, stop, step))
            part = KeyChain(picked, chunks_per_run=self._chunks_per_run)
            part._namespace = self._namespace
            return part
        part = KeyChain(chunks_per_run=self._chunks_per_run)
        part._namespace = self._namespace
        part._blob = self._blob
        part._start, part._stop = self._start + start, self._start + max(start, stop)
        part._origin, part._origin_parent, part._origin_head = self._origin, self._origin_parent, self._origin_head
        return part

    def _digest(self, index: int) -> bytes:
        return self._blob[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def _digest_before(self, at: int) -> bytes | None:
        """Digest of the chunk before this chain's chunk `at`."""
        if self._origin is None:
            return None
        index = self._start + at
        return self._digest(index - 1) if index else self._origin_parent

    def _run_head(self, index: int) -> bytes:
        if self._origin is None:
            return self._digest(index)
        head = index - (self._origin + index) % self._chunks_per_run
        if head < 0 and self._origin_head is not None:
            return self._origin_head
        return self._digest(max(head, 0))


def record_key(digest: bytes, *, shard: int, shards: int) -> bytes:
    """The key under which shard `shard` of `shards` of a chunk is stored; `digest` is the chunk's."""
    return shard_keys(digest, shard=shard, shards=shards)


def record_keys(chain: KeyChain, *, shard: int, shards: int) -> bytes:
    """`record_key` of each chunk of the chain, 32 bytes each."""
    return shard_keys(chain.digests, shard=shard, shards=shards)


def shard_keys(digests: bytes, *, shard: int, shards: int) -> bytes:
    """`record_key` of each chunk digest in the blob."""
    if not 0 <= shard < shards:
        raise InvalidRequest(f"shard {shard} lies outside the layout's 0..{shards - 1}")
    return digests if shards == 1 else digest_each(_SHARD, digests, _U32.pack(shard))


def part_key(digest: bytes, *, part: str, shard: int = 0) -> bytes:
    """The key under which the sparse part `part` of a chunk's shard is stored; `digest` is the chunk's."""
    return digest_each(_PART, digest, _part_suffix(part, shard))


def part_keys(chain: KeyChain, *, part: str, shard: int = 0) -> bytes:
    """`part_key` of each chunk of the chain, 32 bytes each."""
    return digest_each(_PART, chain.digests, _part_suffix(part, shard))


def _part_suffix(part: str, shard: int) -> bytes:
    name = utf8(part, what="part")
    return _U32.pack(shard) + _U32.pack(len(name)) + name


def _chunk_bodies(tokens: PackedTokens, chunk_tokens: int, extra: Sequence[bytes] | None) -> list[bytes]:
    """For each full chunk: u32 n | token ids | u32 len | extra."""
    count = len(tokens) // chunk_tokens
    if extra is not None:
        _check_extra(extra, count)
    width = 4 + 4 * chunk_tokens + 4
    rows = np.zeros((count, width), np.uint8)
    rows[:, :4] = np.frombuffer(_U32.pack(chunk_tokens), np.uint8)
    rows[:, 4:-4] = tokens[: count * chunk_tokens].view(np.uint8).reshape(count, 4 * chunk_tokens)
    bodies = cast("list[bytes]", rows.view(np.dtype((np.void, width))).ravel().tolist())
    if extra is None:
        return bodies
    return [body[:-4] + _U32.pack(len(more)) + more for body, more in zip(bodies, extra, strict=True)]


def _check_extra(extra: Sequence[bytes], count: int) -> None:
    if isinstance(extra, bytes) or len(extra) != count:
        raise InvalidRequest(
            f"extra has {len(extra)} entries for {count} full chunks; pass bytes for each full chunk, b'' for none"
        )
    for index, more in enumerate(extra):
        if not isinstance(more, bytes) or len(more) > EXTRA_BYTES_MAX:
            raise InvalidRequest(
                f"extra {index} is {more!r:.80}; pass at most {EXTRA_BYTES_MAX} bytes (a hash will do)"
            )


def _check_digest(value: bytes, *, what: str) -> None:
    if len(value) != DIGEST_BYTES:
        raise InvalidRequest(f"{what} has {len(value)} bytes; it must have {DIGEST_BYTES}")

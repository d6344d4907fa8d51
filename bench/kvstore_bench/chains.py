"""Chains of chunks whose bytes follow from their keys: what was written, and how much of it is usable.

What a prefix is worth is what lies before its first hole, so availability is counted in usable prefix tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.types.keys import KeyChain
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Namespace
from kvstore.types.results import Exists, Hit, Miss, Stored
from kvstore_client.client import BoundNamespace, KVClient

_WORD_BYTES = 8
_STEP = np.uint64(0x9E3779B97F4A7C15)  # odd: no two words of a chunk are equal


class WrongBytes(AssertionError):
    """A hit delivered something else than what was stored under its key."""


def content_of(digest: bytes, length_bytes: int) -> bytes:
    """The payload of a key: every word of it is another one, and differs from those of all other keys."""
    first = np.uint64(int.from_bytes(digest[:_WORD_BYTES], "little"))
    words = np.arange(length_bytes // _WORD_BYTES, dtype=np.uint64) * _STEP + first
    return words.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainShape:
    """How a chain looks. The default is one of 32k tokens in four runs, with little KV for each token.

    Attributes:
        tokens: Of each chain.
        chunk_tokens: Of each chunk.
        chunk_bytes: Of each chunk, a multiple of 8.
        runs: How many runs a chain has.
    """

    tokens: int = 32_768
    chunk_tokens: int = 64
    chunk_bytes: int = 4096
    runs: int = 4

    @property
    def chunks(self) -> int:
        """Chunks of a chain."""
        return self.tokens // self.chunk_tokens

    def layout(self) -> KVLayout:
        """The layout that gives a chain its runs."""
        return KVLayout.opaque(
            chunk_bytes=self.chunk_bytes,
            chunk_tokens=self.chunk_tokens,
            run_bytes=self.chunk_bytes * -(-self.chunks // self.runs),
        )

    def namespace(self, model: str) -> Namespace:
        """The namespace of chains of this shape."""
        return Namespace(tenant="default", model=model, weights="sha256:none", layout=self.layout())


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """What of some chains can be used.

    Attributes:
        tokens: Usable prefix tokens, of each chain.
        wanted: Tokens of each chain.
        failures: Outcomes of reads that neither hit nor were absent, in words.
    """

    tokens: tuple[int, ...]
    wanted: int
    failures: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Of all tokens."""
        return sum(self.tokens) / (self.wanted * len(self.tokens))


class Chains:
    """Some chains of one namespace, made from a seed."""

    def __init__(self, *, count: int, seed: int, shape: ChainShape | None = None, model: str = "chains") -> None:
        self.shape = shape or ChainShape()
        self.seed = seed
        self.namespace = self.shape.namespace(model)
        self.layout = self.namespace.layout
        draw = random.Random(seed)
        self.keys: list[KeyChain] = []
        for _ in range(count):
            tokens = np.frombuffer(draw.randbytes(4 * self.shape.tokens), np.uint32)
            self.keys.append(
                KeyChain.from_tokens(
                    self.namespace.digest,
                    tokens,
                    chunk_tokens=self.shape.chunk_tokens,
                    chunks_per_run=self.layout.chunks_per_run,
                )
            )

    def put(self, client: KVClient, *, only: Sequence[int] | None = None, deadline: float = 30.0) -> list[object]:
        """Write chains; the outcomes, one for each chunk that was put."""
        bound = client.namespace(self.namespace)
        outcomes: list[object] = []
        for at in only if only is not None else range(len(self.keys)):
            chain = self.keys[at]
            payloads = [content_of(key.digest, self.shape.chunk_bytes) for key in chain]
            outcomes += bound.put(chain, payloads, deadline=deadline)
        return outcomes

    def put_all(self, client: KVClient, *, deadline: float = 30.0) -> None:
        """Write all of them. Raises AssertionError when one was not stored."""
        refused = [one for one in self.put(client, deadline=deadline) if not isinstance(one, Stored | Exists)]
        assert not refused, f"seed {self.seed}: {len(refused)} chunks were refused, first {refused[0]}"

    def usable(self, client: KVClient, *, deadline: float = 10.0, pin_ttl: float = 0) -> Usable:
        """By `match`, which counts nothing that is not there now; no payload is read."""
        bound = client.namespace(self.namespace)
        found = []
        for chain in self.keys:
            with bound.match(chain, deadline=deadline, pin_ttl=pin_ttl) as match:
                found.append(match.tokens)
        return Usable(tokens=tuple(found), wanted=self.shape.tokens)

    def read(self, client: KVClient, *, deadline: float = 10.0) -> Usable:
        """By reading everything into memory. Raises WrongBytes where a hit is not what was stored."""
        bound = client.namespace(self.namespace)
        tokens: list[int] = []
        failures: list[str] = []
        for chain in self.keys:
            outcomes = self.read_chain(bound, chain, deadline=deadline)
            holes = (at for at, outcome in enumerate(outcomes) if not isinstance(outcome, Hit))
            tokens.append(next(holes, len(chain)) * self.shape.chunk_tokens)
            failures += [str(one.reason) for one in outcomes if isinstance(one, Miss) and str(one.reason) != "absent"]
        return Usable(tokens=tuple(tokens), wanted=self.shape.tokens, failures=tuple(failures))

    def read_chain(self, bound: BoundNamespace, chain: KeyChain, *, deadline: float = 10.0) -> list[Hit | Miss]:
        """Read one chain, or a piece of one, and compare every byte of what is a hit."""
        size = self.shape.chunk_bytes
        memory = bytearray(size * len(chain))
        view = memoryview(memory)
        buffers = [view[at * size : (at + 1) * size] for at in range(len(chain))]
        outcomes = list(bound.get_into(chain, buffers, deadline=deadline))
        for key, buffer, outcome in zip(chain, buffers, outcomes, strict=True):
            if isinstance(outcome, Hit) and buffer != content_of(key.digest, size):
                raise WrongBytes(f"seed {self.seed}: {key} is a hit with other bytes than were stored")
        return outcomes

    def run_heads(self) -> list[bytes]:
        """Digest of the first chunk of each run, chain after chain."""
        step = self.layout.chunks_per_run
        return [chain[at].digest for chain in self.keys for at in range(0, len(chain), step)]

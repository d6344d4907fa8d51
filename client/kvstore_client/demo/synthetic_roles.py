"""The parts of the demo without a model: KV made from the tokens by a generator, text made from every byte of the KV.

Like a model's, the KV of a chunk depends on all tokens up to its end; like a model's, one wrong byte changes the text.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.cli.demo_report import RoleReport
from kvstore.types.layout import KVLayout, Part
from kvstore.types.results import Hit, Refused, Stored
from kvstore_client import KVClient, Namespace
from kvstore_client.client import BoundNamespace

MODEL_NAME: Final = "synthetic/135m-shape"
CHUNK_TOKENS: Final = 32
LAYOUT: Final = KVLayout(
    chunk_tokens=CHUNK_TOKENS, dtype="bf16", layers=30, parts=(Part(name="kv", entry_bytes=2 * 3 * 64 * 2),)
)
PROMPT: Final = [(index * 37 + 11) % 49_152 for index in range(1_040)]
NEW_WORDS: Final = 12
# Streams that are mixed for a chunk: the arithmetic that a model would need, in small.
ROUNDS: Final = 12
WORDS: Final = ("the", "node", "keeps", "a", "chunk", "and", "every", "worker", "reads", "it", "again", "soon")


class SyntheticRoles:
    """The made-up model."""

    def __init__(self) -> None:
        """Nothing to load."""
        self._report = RoleReport(model=f"{MODEL_NAME}, made-up KV", prompt_tokens=len(PROMPT))

    def prefill(self, node: str) -> RoleReport:
        """Computes the KV of the prompt and writes its full chunks, durably."""
        with KVClient.connect(node, flow="prefill_read") as client:
            namespace = _namespace(client)
            keys = namespace.keys(PROMPT)
            chunks = [_chunk(state) for state in _states(PROMPT)]
            started_ns = time.monotonic_ns()
            results = namespace.put(keys, chunks, wait="durable")
            return replace(
                self._report,
                chunks=len(results),
                length_bytes=sum(isinstance(result, Stored) for result in results) * LAYOUT.chunk_bytes,
                store_ns=time.monotonic_ns() - started_ns,
                trouble="; ".join(str(result) for result in results if isinstance(result, Refused)),
            )

    def decode(self, node: str) -> RoleReport:
        """Restores the stored prefix, computes the rest and generates."""
        with KVClient.connect(node, flow="decode_read") as client:
            namespace = _namespace(client)
            started_ns = time.monotonic_ns()
            keys = namespace.keys(PROMPT[:-1])
            with namespace.match(keys) as match:
                wanted = keys[: match.chunks]
                memory = np.frombuffer(client.alloc(max(1, match.chunks) * LAYOUT.chunk_bytes), np.uint8)
                found = [memory[at * LAYOUT.chunk_bytes :][: LAYOUT.chunk_bytes] for at in range(match.chunks)]
                results = namespace.get_into(wanted, found)
            good = next((at for at, result in enumerate(results) if not isinstance(result, Hit)), len(results))
            store_ns = time.monotonic_ns() - started_ns
            text = _generate(found[:good])
            return replace(
                self._report,
                matched_tokens=good * CHUNK_TOKENS,
                chunks=good,
                length_bytes=good * LAYOUT.chunk_bytes,
                store_ns=store_ns,
                first_token_ns=time.monotonic_ns() - started_ns,
                text=text,
                trouble="; ".join(str(result) for result in results if not isinstance(result, Hit)),
            )

    def alone(self) -> RoleReport:
        """Computes the whole prompt and generates; no store is asked."""
        started_ns = time.monotonic_ns()
        text = _generate([])
        return replace(self._report, first_token_ns=time.monotonic_ns() - started_ns, text=text)


def _namespace(client: KVClient) -> BoundNamespace:
    return client.namespace(
        Namespace(tenant="default", model=MODEL_NAME, weights=f"sha256:{ROUNDS:064x}", layout=LAYOUT)
    )


def _states(tokens: list[int]) -> list[bytes]:
    """For each full chunk a digest of all tokens up to its end."""
    digest, states = hashlib.sha256(), []
    for first in range(0, len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS, CHUNK_TOKENS):
        digest.update(np.asarray(tokens[first : first + CHUNK_TOKENS], "<u4").data)
        states.append(digest.digest())
    return states


def _chunk(state: bytes) -> npt.NDArray[np.uint8]:
    """The KV of the chunk with that state, `LAYOUT.chunk_bytes` bytes."""
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(state, "little")))
    mixed = np.zeros(LAYOUT.chunk_bytes // 8, np.uint64)
    for _ in range(ROUNDS):
        mixed ^= generator.integers(0, 1 << 64, mixed.size, np.uint64)
    return mixed.view(np.uint8)


def _generate(restored: list[npt.NDArray[np.uint8]]) -> str:
    """Words that depend on every byte of the prompt's KV; what is not restored is computed."""
    digest = hashlib.sha256()
    for at, state in enumerate(_states(PROMPT)):
        digest.update((restored[at] if at < len(restored) else _chunk(state)).data)
    return " ".join(WORDS[byte % len(WORDS)] for byte in digest.digest()[:NEW_WORDS])

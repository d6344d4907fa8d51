"""Hugging Face transformers: save the KV of a prompt, restore it in another process, compute only the rest.

    kv = TransformersKV.for_model(client, model, model_name="org/name", weights=fingerprint_folder(folder))
    restored = kv.restore(token_ids)                 # .cache stands after .tokens tokens; 0 tokens on a miss
    model(input_ids[:, restored.tokens:], cache=restored.cache)
    kv.save(restored.cache, token_ids, skip_tokens=restored.tokens)

Trouble of the store is a miss or a refusal, never an exception in the engine; a wrong call (more tokens cached than
named, a model that is not served) raises InvalidRequest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from transformers import DynamicCache

from kvstore.errors import (
    ChecksumMismatch,
    FormatUnsupported,
    InvalidRequest,
    LeaseExpired,
    NoSpace,
    OutcomeUnknown,
    Retryable,
    StaleView,
)
from kvstore.limits import INTEGRATION_RESTORE_ATTEMPTS, INTEGRATION_STAGING_BYTES
from kvstore.types.keys import KeyChain
from kvstore.types.results import Exists, Hit, Miss, MissReason, Refused, Stored
from kvstore_client import KVClient, Namespace
from kvstore_client.client import BoundNamespace
from kvstore_client.integrations import cache_tensors
from kvstore_client.integrations.cache_shape import WINDOW_PART, CacheShape, checkpoint_tokens
from kvstore_client.integrations.cache_tensors import LayerTensors
from kvstore_client.integrations.weights import fingerprint_config

CHUNK_TOKENS_DEFAULT: Final = 32
_STORE_TROUBLE = (
    Retryable,
    StaleView,
    LeaseExpired,
    OutcomeUnknown,
    ChecksumMismatch,
    FormatUnsupported,
    NoSpace,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What came back: a cache that the caller owns and goes on with.

    Attributes:
        cache: Stands after `tokens` tokens; empty on a miss.
        tokens: A multiple of the chunk size that leaves at least one token of the prompt to compute.
        length_bytes: Payload bytes that arrived and were used.
        trouble: Why it was not more than it was, for a person; empty when everything that matched arrived.
    """

    cache: DynamicCache
    tokens: int
    length_bytes: int
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What became of each chunk.

    Attributes:
        stored: Chunks written now.
        existing: Chunks that were there.
        refused: Chunks, or the window state, that were not stored.
        length_bytes: Payload bytes written now.
        checkpoint_tokens: Where the window state was saved; 0 when it was not, or the model has none.
        trouble: Why something was refused, for a person; else empty.
    """

    stored: int
    existing: int
    refused: int
    length_bytes: int
    checkpoint_tokens: int
    trouble: str = ""


class TransformersKV:
    """The KV of one model in one namespace. Keeps a staging buffer: one instance for each thread."""

    def __init__(self, client: KVClient, namespace: BoundNamespace, shape: CacheShape, model: Any) -> None:
        """Builds it from its parts; `for_model` is the usual way. The client stays the caller's to close."""
        self._client = client
        self._namespace = namespace
        self._shape = shape
        self._config = model.config
        self._device = model.device
        self._layout = namespace.layout
        self._staging: memoryview | None = None

    @classmethod
    def for_model(
        cls,
        client: KVClient,
        model: Any,
        *,
        model_name: str,
        weights: str,
        chunk_tokens: int = CHUNK_TOKENS_DEFAULT,
        tenant: str = "default",
        adapter: str = "",
        adapter_revision: str = "",
        salt: bytes = b"",
    ) -> TransformersKV:
        """Binds a loaded model to its namespace.

        Args:
            client: Connected; its flow class is that of all traffic here.
            model: A loaded causal language model; runs one forward pass of one token to see its cache.
            model_name: Name for people, part of the namespace.
            weights: Fingerprint of the weights, `weights.fingerprint_folder`. That of the settings is added to it.
            chunk_tokens: Tokens of a chunk.
            tenant: As in `Namespace`, like the arguments after it.
            adapter: Name of the adapter that is merged or active in `model`.
            adapter_revision: Its revision.
            salt: Secret of those who may share this KV.

        Raises:
            InvalidRequest: The model keeps a kind of cache that is not served here.
        """
        shape = cache_tensors.describe(model)
        namespace = client.namespace(
            Namespace(
                tenant=tenant,
                model=model_name,
                weights=f"{weights}+{fingerprint_config(model.config.to_dict())}",
                layout=shape.layout(chunk_tokens),
                adapter=adapter,
                adapter_revision=adapter_revision,
                salt=salt,
            )
        )
        return cls(client, namespace, shape, model)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self._layout.chunk_tokens

    def checkpoint_tokens(self, token_count: int) -> int:
        """Where to stop once during a prefill of `token_count` tokens and `save`; 0: save at the end, without a stop.

        Sliding-window layers forget what left the window, so their state at a chunk border can be taken only while the
        cache stands there. Models without such layers need no stop.
        """
        if not self._shape.window_layers:
            return 0
        return checkpoint_tokens(token_count, self._layout.chunk_tokens)

    def restore(self, token_ids: Sequence[int], *, extra: Sequence[bytes] | None = None) -> Restored:
        """The longest stored prefix of a prompt, as a cache to go on with.

        Args:
            token_ids: The whole prompt.
            extra: Per chunk, whatever beside the tokens the KV depends on (image hashes), as in `keys`.
        """
        try:
            return self._restore(self._keys(token_ids[:-1], extra))
        except _STORE_TROUBLE as error:
            return self._nothing(str(error))

    def save(
        self,
        cache: DynamicCache,
        token_ids: Sequence[int],
        *,
        skip_tokens: int = 0,
        wait: str = "durable",
        extra: Sequence[bytes] | None = None,
    ) -> Saved:
        """Stores the full chunks of what a cache holds, and the window state where the cache still has it.

        Args:
            cache: Of one sequence, standing after some tokens; not changed.
            token_ids: The tokens it was computed from, in order; may be longer than what is cached.
            skip_tokens: The first tokens whose chunks are stored already, as `restore` said.
            wait: "durable" or "received", as in `put`.
            extra: As in `restore`.

        Raises:
            InvalidRequest: The cache holds more tokens than `token_ids`, or several sequences.
        """
        seen = cache.get_seq_length()
        if seen > len(token_ids):
            raise InvalidRequest(
                f"the cache holds {seen} tokens but {len(token_ids)} were named; name every cached token"
            )
        if seen and cache.layers[0].keys.shape[0] != 1:
            raise InvalidRequest(f"the cache holds {cache.layers[0].keys.shape[0]} sequences; save one at a time")
        tally = _Tally()
        try:
            keys = self._keys(token_ids[:seen], extra)
            self._save_full(cache, keys, skip_tokens // self._layout.chunk_tokens, wait, tally)
            self._save_window(cache, keys, wait, tally)
        except _STORE_TROUBLE as error:
            tally.refused += 1
            tally.trouble = tally.trouble or str(error)
        return tally.saved()

    def _keys(self, token_ids: Sequence[int], extra: Sequence[bytes] | None) -> KeyChain:
        chunks = len(token_ids) // self._layout.chunk_tokens
        return self._namespace.keys(token_ids, extra=None if extra is None else list(extra)[:chunks])

    def _restore(self, keys: KeyChain) -> Restored:
        """Tries the longest usable prefix; what turns out unreadable shortens it and is tried without."""
        trouble = ""
        for _ in range(INTEGRATION_RESTORE_ATTEMPTS):
            with self._namespace.match(keys, need=self._shape.parts) as match:
                chunks = match.boundary_chunks
                if not chunks:
                    if match.reason not in (None, MissReason.ABSENT):
                        trouble = trouble or f"nothing was found: {match.reason.name.lower()}"
                    break
                full, good, why = self._load_full(keys[:chunks])
                trouble = trouble or why
                if not self._shape.window_layers and good:
                    return self._restored(full, [], good, trouble)
                if self._shape.window_layers and good == chunks:
                    window, why = self._load_window(keys[chunks - 1 : chunks], chunks)
                    trouble = trouble or why
                    if window:
                        return self._restored(full, window, chunks, trouble)
                    good -= 1
                keys = keys[:good]
        return self._nothing(trouble)

    def _restored(
        self, full: Sequence[LayerTensors], window: Sequence[LayerTensors], chunks: int, trouble: str
    ) -> Restored:
        tokens = chunks * self._layout.chunk_tokens
        whole = [LayerTensors(keys=t.keys[:, :, :tokens], values=t.values[:, :, :tokens]) for t in full]
        cache = cache_tensors.build_cache(self._config, self._shape, full=whole, window=window, tokens=tokens)
        length_bytes = chunks * self._layout.chunk_bytes
        if window:
            length_bytes += self._layout.record_bytes(part=WINDOW_PART)
        return Restored(cache=cache, tokens=tokens, length_bytes=length_bytes, trouble=trouble)

    def _nothing(self, trouble: str) -> Restored:
        return Restored(cache=DynamicCache(config=self._config), tokens=0, length_bytes=0, trouble=trouble)

    def _load_full(self, keys: KeyChain) -> tuple[list[LayerTensors], int, str]:
        """Tensors for all of `keys`, how many leading chunks of them are valid, and why not all."""
        shape, layout = self._shape, self._layout
        layers = len(shape.full_layers)
        target = cache_tensors.empty_layers(
            shape, layers=layers, tokens=len(keys) * layout.chunk_tokens, device=self._device
        )
        for first, batch in self._batches(keys, layout.chunk_bytes):
            buffer = self._buffer(len(batch) * layout.chunk_bytes)
            results = self._namespace.get_into(batch, _slices(buffer, layout.chunk_bytes))
            good, why = _leading_hits(results)
            if good:
                filled = buffer[: good * layout.chunk_bytes]
                view = cache_tensors.payload_view(
                    filled, shape, records=good, layers=layers, tokens=layout.chunk_tokens
                )
                cache_tensors.unpack(view, target, first_token=first * layout.chunk_tokens)
            if why:
                return target, first + good, why
        return target, len(keys), ""

    def _load_window(self, keys: KeyChain, chunks: int) -> tuple[list[LayerTensors], str]:
        shape, size = self._shape, self._layout.record_bytes(part=WINDOW_PART)
        buffer = self._buffer(size)
        _, why = _leading_hits(self._namespace.get_into(keys, [buffer], part=WINDOW_PART))
        if why:
            return [], why
        held = shape.window_held(chunks * self._layout.chunk_tokens)
        layers = len(shape.window_layers)
        target = cache_tensors.empty_layers(shape, layers=layers, tokens=held, device=self._device)
        view = cache_tensors.payload_view(buffer, shape, records=1, layers=layers, tokens=shape.window_tokens)
        cache_tensors.unpack(view[:, :, :, :held], target, first_token=0)
        return target, ""

    def _save_full(self, cache: DynamicCache, keys: KeyChain, first_chunk: int, wait: str, tally: _Tally) -> None:
        shape, layout = self._shape, self._layout
        source = cache_tensors.layers_of(cache, shape.full_layers)
        for first, batch in self._batches(keys[first_chunk:], layout.chunk_bytes):
            buffer = self._buffer(len(batch) * layout.chunk_bytes)
            view = cache_tensors.payload_view(
                buffer, shape, records=len(batch), layers=len(source), tokens=layout.chunk_tokens
            )
            cache_tensors.pack(source, view, first_token=(first_chunk + first) * layout.chunk_tokens)
            tally.add(self._namespace.put(batch, _slices(buffer, layout.chunk_bytes), wait=wait), layout.chunk_bytes)

    def _save_window(self, cache: DynamicCache, keys: KeyChain, wait: str, tally: _Tally) -> None:
        shape, tokens = self._shape, len(keys) * self._layout.chunk_tokens
        if not shape.window_layers or not tokens:
            return
        offset = cache_tensors.window_offset(cache, shape, tokens=tokens)
        if offset is None:
            return
        source, held = cache_tensors.layers_of(cache, shape.window_layers), shape.window_held(tokens)
        size = self._layout.record_bytes(part=WINDOW_PART)
        buffer = self._buffer(size)
        view = cache_tensors.payload_view(buffer, shape, records=1, layers=len(source), tokens=shape.window_tokens)
        view[:, :, :, held:].zero_()
        cache_tensors.pack(source, view[:, :, :, :held], first_token=offset)
        results = self._namespace.put(keys[len(keys) - 1 :], [buffer], part=WINDOW_PART, wait=wait)
        if not isinstance(results[0], Refused):
            tally.checkpoint_tokens = tokens
        tally.add_record(results[0], size)

    def _batches(self, keys: KeyChain, chunk_bytes: int) -> list[tuple[int, KeyChain]]:
        """Slices of `keys` that fit the staging bound, each with the number of its first chunk."""
        step = max(1, INTEGRATION_STAGING_BYTES // chunk_bytes)
        return [(first, keys[first : first + step]) for first in range(0, len(keys), step)]

    def _buffer(self, length_bytes: int) -> memoryview:
        """The staging buffer, at least as long as asked; what it held is overwritten by the next use."""
        if self._staging is None or self._staging.nbytes < length_bytes:
            self._staging = memoryview(self._client.alloc(length_bytes)).cast("B")
        return self._staging[:length_bytes]


@dataclass(slots=True, kw_only=True)
class _Tally:
    stored: int = 0
    existing: int = 0
    refused: int = 0
    length_bytes: int = 0
    checkpoint_tokens: int = 0
    trouble: str = ""

    def add(self, results: Sequence[Stored | Exists | Refused], chunk_bytes: int) -> None:
        """Counts the outcomes of a batch of chunks."""
        for result in results:
            self.stored += isinstance(result, Stored)
            self.existing += isinstance(result, Exists)
            self.add_record(result, chunk_bytes)

    def add_record(self, result: Stored | Exists | Refused, length_bytes: int) -> None:
        """Counts the bytes and the trouble of a record that is not a chunk."""
        if isinstance(result, Stored):
            self.length_bytes += length_bytes
        elif isinstance(result, Refused):
            self.refused += 1
            self.trouble = self.trouble or f"{result.reason.name.lower()} {result.detail}".strip()

    def saved(self) -> Saved:
        """The tally, as the caller sees it."""
        return Saved(
            stored=self.stored,
            existing=self.existing,
            refused=self.refused,
            length_bytes=self.length_bytes,
            checkpoint_tokens=self.checkpoint_tokens,
            trouble=self.trouble,
        )


def _slices(buffer: memoryview, chunk_bytes: int) -> list[memoryview]:
    return [buffer[at : at + chunk_bytes] for at in range(0, buffer.nbytes, chunk_bytes)]


def _leading_hits(results: Sequence[Hit | Miss]) -> tuple[int, str]:
    """How many results are hits before the first miss, and why that one is a miss."""
    for index, result in enumerate(results):
        if isinstance(result, Miss):
            return index, f"a chunk that matched was not read: {result.reason.name.lower()}"
    return len(results), ""

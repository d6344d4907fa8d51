"""What the KV cache of a model looks like, as numbers: the pure half of the transformers integration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.errors import InvalidRequest
from kvstore.types.layout import ORDER_HEAD_MAJOR, KVLayout, Part, PartKind

KV_PART: Final = "kv"
WINDOW_PART: Final = "swa"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The cache of one sequence: layers that keep every token, and layers that keep the last tokens of a window.

    Attributes:
        full_layers: Ascending indexes of the layers that keep K and V of every token.
        window_layers: Ascending indexes of the layers that keep only a sliding window.
        window_tokens: Tokens that a window layer keeps between two steps; 0 without such layers.
        heads: KV heads of each layer (compressed latents: 1).
        key_size: Elements of K of one head and token (MLA: the latent).
        value_size: Elements of V of one head and token (MLA: the rotary key).
        element_bytes: Bytes of an element.
        dtype: Name of the element type ("bf16", "fp32").
    """

    full_layers: tuple[int, ...]
    window_layers: tuple[int, ...]
    window_tokens: int
    heads: int
    key_size: int
    value_size: int
    element_bytes: int
    dtype: str

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.full_layers) + len(self.window_layers)

    @property
    def entry_elements(self) -> int:
        """Elements of one token of one head: K, then V."""
        return self.key_size + self.value_size

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token in one layer, over all heads."""
        return self.heads * self.entry_elements * self.element_bytes

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that a restore needs."""
        return (KV_PART, WINDOW_PART) if self.window_layers else (KV_PART,)

    def layout(self, chunk_tokens: int) -> KVLayout:
        """The layout of chunks of `chunk_tokens` tokens.

        The full layers are the dense part, `[layer, head, token, K | V]`. The window layers are a sparse part, stored
        at the chunk where the engine stopped: `window_tokens` entries, the oldest first, the unused last ones zero.

        Raises:
            InvalidRequest: No layer keeps every token, so that there is nothing to put into each chunk.
        """
        if not self.full_layers:
            raise InvalidRequest(
                f"all {len(self.window_layers)} layers of the model are sliding-window layers; chunks need at least "
                "one layer that keeps every token. Use the model without the store"
            )
        parts = [Part(name=KV_PART, entry_bytes=self.entry_bytes, layers=self.full_layers)]
        if self.window_layers:
            parts.append(
                Part(
                    name=WINDOW_PART,
                    entry_bytes=self.entry_bytes,
                    entries=self.window_tokens,
                    layers=self.window_layers,
                    kind=PartKind.SPARSE,
                )
            )
        return KVLayout(
            chunk_tokens=chunk_tokens,
            dtype=self.dtype,
            layers=self.layers,
            parts=tuple(parts),
            order=ORDER_HEAD_MAJOR,
        )

    def window_held(self, tokens: int) -> int:
        """Tokens that a window layer holds after `tokens` tokens."""
        return min(tokens, self.window_tokens)


def checkpoint_tokens(token_count: int, chunk_tokens: int) -> int:
    """Where an engine stops once during the prefill of `token_count` tokens, so that its window state can be saved.

    The last chunk border that leaves at least one token to compute; 0 when the prompt is shorter than a chunk.
    """
    return max(0, token_count - 1) // chunk_tokens * chunk_tokens

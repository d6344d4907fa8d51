"""Moves KV between the tensors of a transformers cache and chunk payloads: one copy each way, no bytes in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstore.errors import Internal, InvalidRequest
from kvstore_client.integrations.cache_shape import CacheShape

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


def describe(model: Any) -> CacheShape:
    """The cache shape of a loaded model, seen on the cache that one token leaves (so compressed latents are seen too).

    Args:
        model: A causal language model of transformers; it runs one forward pass of one token.

    Raises:
        InvalidRequest: A layer keeps something else than K and V of all tokens or of a window (recurrent state, sparse
            indexer, quantised cache), or the layers differ in size; the message names the layer and what is served.
    """
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), cache=cache)
    full, window, window_tokens = [], [], set()
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            full.append(index)
        elif type(layer) is DynamicSlidingWindowLayer:
            window.append(index)
            window_tokens.add(layer.sliding_window - 1)  # the new token's own K and V come with its step
        else:
            raise InvalidRequest(
                f"layer {index} of {type(model).__name__} keeps its cache in a {type(layer).__name__}; served are "
                "DynamicLayer and DynamicSlidingWindowLayer. Use the model without the store"
            )
    sizes = {(tuple(layer.keys.shape), tuple(layer.values.shape), layer.keys.dtype) for layer in cache.layers}
    if len(sizes) != 1 or len(window_tokens) > 1:
        raise InvalidRequest(
            f"the layers of {type(model).__name__} differ: shapes {sorted(map(str, sizes))}, windows "
            f"{sorted(window_tokens)}; this integration serves models whose layers are alike"
        )
    keys, values = cache.layers[0].keys, cache.layers[0].values
    if keys.shape[1] != values.shape[1] or keys.dtype not in _DTYPE_NAMES:
        raise InvalidRequest(
            f"K has {keys.shape[1]} heads of {keys.dtype}, V has {values.shape[1]}; served are equal head counts in "
            f"{', '.join(_DTYPES)}"
        )
    return CacheShape(
        full_layers=tuple(full),
        window_layers=tuple(window),
        window_tokens=window_tokens.pop() if window_tokens else 0,
        heads=keys.shape[1],
        key_size=keys.shape[3],
        value_size=values.shape[3],
        element_bytes=keys.element_size(),
        dtype=_DTYPE_NAMES[keys.dtype],
    )


def payload_view(buffer: memoryview, shape: CacheShape, *, records: int, layers: int, tokens: int) -> torch.Tensor:
    """`records` adjacent payloads as a tensor `[record, layer, head, token, K | V]` over the same memory."""
    flat = torch.frombuffer(buffer, dtype=_DTYPES[shape.dtype])
    return flat.view(records, layers, shape.heads, tokens, shape.entry_elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """K and V of one layer, `[1, head, token, size]`."""

    keys: torch.Tensor
    values: torch.Tensor


def layers_of(cache: DynamicCache, indexes: Sequence[int]) -> list[LayerTensors]:
    """The tensors that the given layers of a cache hold now."""
    return [LayerTensors(keys=cache.layers[at].keys, values=cache.layers[at].values) for at in indexes]


def empty_layers(shape: CacheShape, *, layers: int, tokens: int, device: torch.device) -> list[LayerTensors]:
    """Fresh tensors for `tokens` tokens of `layers` layers; their contents are undefined."""
    dtype = _DTYPES[shape.dtype]
    return [
        LayerTensors(
            keys=torch.empty((1, shape.heads, tokens, shape.key_size), dtype=dtype, device=device),
            values=torch.empty((1, shape.heads, tokens, shape.value_size), dtype=dtype, device=device),
        )
        for _ in range(layers)
    ]


def pack(source: Sequence[LayerTensors], payload: torch.Tensor, *, first_token: int) -> None:
    """Fills payloads from the tokens of `source` that start at `first_token`."""
    for slot, keys, values in _pairs(source, payload, first_token):
        slot[..., : keys.shape[-1]].copy_(keys)
        slot[..., keys.shape[-1] :].copy_(values)


def unpack(payload: torch.Tensor, target: Sequence[LayerTensors], *, first_token: int) -> None:
    """Fills the tokens of `target` that start at `first_token` from payloads."""
    for slot, keys, values in _pairs(target, payload, first_token):
        keys.copy_(slot[..., : keys.shape[-1]])
        values.copy_(slot[..., keys.shape[-1] :])


def _pairs(
    layers: Sequence[LayerTensors], payload: torch.Tensor, first_token: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each layer its slots `[record, head, token, K | V]` and views of its K and V of the same tokens and form."""
    records, _, _, tokens, _ = payload.shape

    def split(tensor: torch.Tensor) -> torch.Tensor:
        span = tensor[0, :, first_token : first_token + records * tokens]
        return span.unflatten(1, (records, tokens)).transpose(0, 1)

    return [(payload[:, at], split(layer.keys), split(layer.values)) for at, layer in enumerate(layers)]


def window_offset(cache: DynamicCache, shape: CacheShape, *, tokens: int) -> int | None:
    """Where, in what the window layers hold now, the window as it was after `tokens` tokens begins.

    None when the cache has moved on too far: a window layer forgets, so its state can be saved only while the engine
    stands at (or, with recorded past, not far behind) that token.
    """
    seen = cache.get_seq_length()
    first_needed = tokens - shape.window_held(tokens)
    offsets = {first_needed - (seen - cache.layers[at].keys.shape[-2]) for at in shape.window_layers}
    return offsets.pop() if len(offsets) == 1 and min(offsets) >= 0 else None


def build_cache(
    config: Any, shape: CacheShape, *, full: Sequence[LayerTensors], window: Sequence[LayerTensors], tokens: int
) -> DynamicCache:
    """A cache that stands after `tokens` tokens; it takes the tensors as its own, without a copy."""
    cache = DynamicCache(config=config)
    for at, tensors in zip((*shape.full_layers, *shape.window_layers), (*full, *window), strict=True):
        layer = cache.layers[at]
        layer.lazy_initialization(tensors.keys, tensors.values)
        layer.keys, layer.values = tensors.keys, tensors.values
        if at in shape.window_layers:
            layer.cumulative_length = tokens
    if any(layer.get_seq_length() != tokens for layer in cache.layers):
        raise Internal(f"a rebuilt cache stands at {cache.get_seq_length()} tokens, not at {tokens}")
    return cache

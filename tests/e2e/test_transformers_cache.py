"""Caches of tiny transformers models, saved to a real node that is killed, restored, and generated from.

The models have random weights and the shapes that matter: grouped heads, compressed latents, sliding windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvstore.cli.local_node import LocalNode
from kvstore.errors import InvalidRequest
from kvstore_client import KVClient
from kvstore_client.integrations.cache_shape import checkpoint_tokens
from kvstore_client.integrations.transformers import Restored, Saved, TransformersKV

CHUNK_TOKENS = 16
WINDOW = 48
NEW_TOKENS = 24
PROMPT = [(index * 37 + 11) % 500 for index in range(200)]
BORDER = checkpoint_tokens(len(PROMPT), CHUNK_TOKENS)
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and on a busy machine they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=32))


def deepseek_v3() -> Any:
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SIZES,
            num_key_value_heads=4,
            q_lora_rank=64,
            kv_lora_rank=512,
            qk_nope_head_dim=64,
            qk_rope_head_dim=64,
            v_head_dim=64,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.0,
        )
    )


def sliding_window() -> Any:
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return Qwen2ForCausalLM(
        Qwen2Config(**SIZES, num_key_value_heads=2, use_sliding_window=True, sliding_window=WINDOW, layer_types=kinds)
    )


def build(make: Any, dtype: torch.dtype) -> Any:
    """The same random weights each time."""
    torch.manual_seed(0)
    return make().to(dtype).eval()


def step(model: Any, cache: DynamicCache, tokens: Sequence[int]) -> int:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(tokens)]), cache=cache, logits_to_keep=1).logits
    return int(logits[0, -1].argmax())


def generate(model: Any, cache: DynamicCache) -> list[int]:
    """Greedy tokens after PROMPT, of which `cache` holds a prefix."""
    tokens = [step(model, cache, PROMPT[cache.get_seq_length() :])]
    while len(tokens) < NEW_TOKENS:
        tokens.append(step(model, cache, tokens[-1:]))
    return tokens


def prefix(model: Any, tokens: int = BORDER) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    step(model, cache, PROMPT[:tokens])
    return cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A node, and a secret that keeps this test's KV apart from that of others on it."""

    node: LocalNode
    salt: bytes

    def connect(self) -> KVClient:
        return KVClient.connect(self.node.addresses.grpc, flow="prefill_read")

    def bind(self, client: KVClient, model: Any, **names: Any) -> TransformersKV:
        given = {"model_name": "tests/tiny", "weights": "sha256:" + "0" * 64, "salt": self.salt} | names
        return TransformersKV.for_model(client, model, chunk_tokens=CHUNK_TOKENS, **given)

    def save(self, model: Any, cache: DynamicCache) -> Saved:
        with self.connect() as client:
            return self.bind(client, model).save(cache, PROMPT)

    def restore(self, model: Any, **names: Any) -> Restored:
        with self.connect() as client:
            return self.bind(client, model, **names).restore(PROMPT)


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNode]:
    """One node for the tests that leave it alone."""
    with LocalNode(tmp_path_factory.mktemp("shared"), capacity="256MiB", arguments=("--cache", "32MiB")) as node:
        yield node


@pytest.fixture
def store(shared_node: LocalNode, request: pytest.FixtureRequest) -> Store:
    return Store(node=shared_node, salt=request.node.name.encode())


@pytest.fixture
def own_store(node: LocalNode) -> Store:
    """A store whose node the test may kill."""
    return Store(node=node, salt=b"")


def same_bytes(left: DynamicCache, right: DynamicCache) -> bool:
    return all(
        torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
        for mine, theirs in zip(left.layers, right.layers, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("make", [llama, deepseek_v3, sliding_window])
def test_restored_after_a_kill_it_generates_what_it_would_have(own_store: Store, make: Any, dtype: torch.dtype) -> None:
    model = build(make, dtype)
    cache = prefix(model)
    saved = own_store.save(model, cache)
    assert (saved.stored, saved.existing, saved.refused) == (BORDER // CHUNK_TOKENS, 0, 0), saved.trouble
    assert saved.checkpoint_tokens == (BORDER if make is sliding_window else 0)

    own_store.node.kill()
    own_store.node.start()
    restored = own_store.restore(model)

    assert restored.tokens == BORDER, restored.trouble
    assert same_bytes(restored.cache, cache)
    assert generate(model, restored.cache) == generate(model, cache)


def test_compressed_latents_are_stored_compressed(store: Store) -> None:
    model = build(deepseek_v3, torch.bfloat16)
    cache = prefix(model)
    assert [tuple(cache.layers[0].keys.shape), tuple(cache.layers[0].values.shape)] == [
        (1, 1, BORDER, 512),
        (1, 1, BORDER, 64),
    ]
    assert store.save(model, cache).length_bytes == BORDER * 4 * (512 + 64) * 2


def test_a_second_save_of_the_same_prefix_writes_nothing(store: Store) -> None:
    model = build(llama, torch.float32)
    cache = prefix(model)
    store.save(model, cache)
    again = store.save(model, cache)
    assert (again.stored, again.existing, again.length_bytes) == (0, BORDER // CHUNK_TOKENS, 0)


def test_a_longer_prompt_restores_what_it_shares_and_saves_the_rest(store: Store) -> None:
    model = build(llama, torch.float32)
    store.save(model, prefix(model, 80))
    with store.connect() as client:
        kv = store.bind(client, model)
        restored = kv.restore(PROMPT)
        assert restored.tokens == 80
        step(model, restored.cache, PROMPT[80:BORDER])
        saved = kv.save(restored.cache, PROMPT, skip_tokens=80)
        assert (saved.stored, saved.existing) == ((BORDER - 80) // CHUNK_TOKENS, 0)
        assert kv.restore(PROMPT).tokens == BORDER


def test_a_prompt_that_is_all_stored_still_leaves_a_token_to_compute(store: Store) -> None:
    model = build(llama, torch.float32)
    with store.connect() as client:
        kv = store.bind(client, model)
        kv.save(prefix(model), PROMPT)
        assert kv.restore(PROMPT[:BORDER]).tokens == BORDER - CHUNK_TOKENS


def test_other_weights_adapters_and_types_never_meet(store: Store) -> None:
    model = build(llama, torch.float32)
    store.save(model, prefix(model))
    assert store.restore(model, weights="sha256:" + "1" * 64).tokens == 0
    assert store.restore(model, adapter="org/lora", adapter_revision="1").tokens == 0
    assert store.restore(model, tenant="other").tokens == 0
    assert store.restore(build(llama, torch.bfloat16)).tokens == 0
    assert store.restore(model).tokens == BORDER


def test_the_same_weights_with_other_settings_never_meet(store: Store) -> None:
    model = build(llama, torch.float32)
    store.save(model, prefix(model))
    other = build(llama, torch.float32)
    other.config.rms_norm_eps = 1e-3  # no weight tells of it, and all KV but the first layer's depends on it
    assert store.restore(other).tokens == 0
    assert store.restore(build(llama, torch.float32)).tokens == BORDER


def test_without_a_stop_a_window_model_saves_no_checkpoint_and_restores_nothing(store: Store) -> None:
    model = build(sliding_window, torch.float32)
    cache = prefix(model, len(PROMPT))  # the window has moved past the last chunk border
    saved = store.save(model, cache)
    assert saved.checkpoint_tokens == 0
    assert store.restore(model).tokens == 0


def test_a_window_that_is_not_full_yet_is_padded_and_restored_exactly(store: Store) -> None:
    model = build(sliding_window, torch.float32)
    cache = prefix(model, 2 * CHUNK_TOKENS)
    assert store.save(model, cache).checkpoint_tokens == 2 * CHUNK_TOKENS < WINDOW - 1
    restored = store.restore(model)
    assert restored.tokens == 2 * CHUNK_TOKENS
    assert same_bytes(restored.cache, cache)


def test_a_node_that_is_gone_is_a_miss_and_a_refusal(own_store: Store) -> None:
    model = build(llama, torch.float32)
    with own_store.connect() as client:
        kv = own_store.bind(client, model)
        kv.save(prefix(model), PROMPT)
        own_store.node.kill()
        restored = kv.restore(PROMPT)
        assert restored.tokens == 0
        assert generate(model, restored.cache) == generate(model, DynamicCache(config=model.config))
        saved = kv.save(prefix(model), PROMPT)
        assert saved.stored == 0
        assert saved.refused > 0
        assert saved.trouble


def test_wrong_calls_say_what_is_wrong(store: Store) -> None:
    model = build(llama, torch.float32)
    with store.connect() as client:
        kv = store.bind(client, model)
        with pytest.raises(InvalidRequest, match="the cache holds 192 tokens but 100 were named"):
            kv.save(prefix(model), PROMPT[:100])
        all_windows = MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=WINDOW))
        with pytest.raises(InvalidRequest, match="all 4 layers of the model are sliding-window layers"):
            store.bind(client, all_windows.eval())

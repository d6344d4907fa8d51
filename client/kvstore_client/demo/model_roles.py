"""The parts of the demo, played by SmolLM2-135M-Instruct through transformers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvstore.cli.demo_report import RoleReport
from kvstore_client import KVClient
from kvstore_client.demo.prompt import HANDBOOK, QUESTION
from kvstore_client.integrations.cache_shape import checkpoint_tokens
from kvstore_client.integrations.smollm2 import MODEL_NAME
from kvstore_client.integrations.transformers import CHUNK_TOKENS_DEFAULT, TransformersKV
from kvstore_client.integrations.weights import fingerprint_folder

NEW_TOKENS: Final = 40
WARM_UP_TOKENS: Final = 64


class ModelRoles:
    """A loaded model and the tokens of the prompt."""

    def __init__(self, folder: Path) -> None:
        """Loads the model of a folder that save_pretrained wrote, in bf16 on the CPU."""
        # Another number of threads sums in another order and rounds differently; one also does best on a busy machine.
        torch.set_num_threads(1)
        self._folder = folder
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        conversation = [{"role": "system", "content": HANDBOOK}, {"role": "user", "content": QUESTION}]
        text = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        self._prompt: list[int] = self._tokenizer(text).input_ids
        self._report = RoleReport(model=f"{MODEL_NAME}, bf16, one CPU thread", prompt_tokens=len(self._prompt))
        # The first pass of a process builds its kernels; without this the first measured one would pay for it.
        self._step(DynamicCache(config=self._model.config), self._prompt[:WARM_UP_TOKENS])

    def prefill(self, node: str) -> RoleReport:
        """Computes the KV of the prompt's full chunks and writes them, durably."""
        with KVClient.connect(node, flow="prefill_read") as client:
            kv = self._store(client)
            cache = self._prefix()
            started_ns = time.monotonic_ns()
            saved = kv.save(cache, self._prompt, wait="durable")
            return replace(
                self._report,
                chunks=saved.stored + saved.existing,
                length_bytes=saved.length_bytes,
                store_ns=time.monotonic_ns() - started_ns,
                trouble=saved.trouble,
            )

    def decode(self, node: str) -> RoleReport:
        """Restores the stored prefix, computes the rest and generates."""
        with KVClient.connect(node, flow="decode_read") as client:
            kv = self._store(client)
            started_ns = time.monotonic_ns()
            restored = kv.restore(self._prompt)
            store_ns = time.monotonic_ns() - started_ns
            text, first_ns = self._generate(restored.cache)
            return replace(
                self._report,
                matched_tokens=restored.tokens,
                chunks=restored.tokens // kv.chunk_tokens,
                length_bytes=restored.length_bytes,
                store_ns=store_ns,
                first_token_ns=store_ns + first_ns,
                text=text,
                trouble=restored.trouble,
            )

    def alone(self) -> RoleReport:
        """Computes the whole prompt and generates; no store is asked."""
        started_ns = time.monotonic_ns()
        cache = self._prefix()
        prefix_ns = time.monotonic_ns() - started_ns
        text, first_ns = self._generate(cache)
        return replace(self._report, first_token_ns=prefix_ns + first_ns, text=text)

    def _store(self, client: KVClient) -> TransformersKV:
        return TransformersKV.for_model(
            client, self._model, model_name=MODEL_NAME, weights=fingerprint_folder(self._folder)
        )

    def _prefix(self) -> DynamicCache:
        """The prompt computed up to its last chunk border, as an engine with chunked prefill does.

        With and without the store the rest is then one more pass over the same tokens. The arithmetic is the same to
        the last bit, so a text that differs is a wrong byte and never the rounding of bf16 over another split.
        """
        cache = DynamicCache(config=self._model.config)
        self._step(cache, self._prompt[: checkpoint_tokens(len(self._prompt), CHUNK_TOKENS_DEFAULT)])
        return cache

    def _generate(self, cache: DynamicCache) -> tuple[str, int]:
        """Greedy text after the prompt, and the time to its first token; `cache` holds a prefix of the prompt."""
        started_ns = time.monotonic_ns()
        token = self._step(cache, self._prompt[cache.get_seq_length() :])
        first_ns = time.monotonic_ns() - started_ns
        tokens = [token]
        while len(tokens) < NEW_TOKENS and token != self._tokenizer.eos_token_id:
            token = self._step(cache, [token])
            tokens.append(token)
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)), first_ns

    def _step(self, cache: DynamicCache, tokens: Sequence[int]) -> int:
        """Computes `tokens` on top of the cache; the most likely next token."""
        with torch.no_grad():
            result = self._model(input_ids=torch.tensor([tokens]), cache=cache, logits_to_keep=1)
        return int(result.logits[0, -1].argmax())

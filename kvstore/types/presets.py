"""Layouts of known models; `KVLayout.bytes_per_token` of each is the model's published figure.

DualPath is arXiv 2602.21548; layer and head counts of models without another source are those of their config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from kvstore.errors import InvalidRequest
from kvstore.limits import SECOND_NS
from kvstore.types.layout import ORDER_HEAD_MAJOR, KVLayout, Part, PartKind, Retention, ShardAxis

CHUNK_TOKENS: Final = 64  # DualPath section 4: a Full Block is [layer, tokens, bytes]; 64 tokens is its example
CHUNK_TOKENS_V4: Final = 256  # vLLM's block for V4; a multiple of lcm(4, 128), as arXiv 2606.19348 requires

LATENT_FP8_BYTES: Final = (
    512 + 4 * 4 + 64 * 2
)  # vLLM flashmla_sparse "fp8_ds_mla": e4m3 latent, 4 fp32 scales, bf16 RoPE
INDEXER_FP8_BYTES: Final = 128 + 4  # vLLM DeepseekV32IndexerCache: 128 fp8 and one fp32 scale

V4_ENTRY_BYTES: Final = 448 + 64 * 2 + 7 + 1  # vLLM: 448 fp8, 64 bf16 RoPE, 7 scales, 1 of padding
V4_INDEXER_BYTES: Final = 64 + 4  # 128 values in FP4 and 4 bytes of scales
V4_WINDOW_TOKENS: Final = 128
V41_ENTRY_BYTES: Final = 256 + 32  # 512 values in FP4 and 32 bytes of scales
V41_SWA_TTL_NS: Final = 5 * 60 * SECOND_NS

_ELEMENT_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}


def gqa(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: str = "bf16",
    chunk_tokens: int = CHUNK_TOKENS,
    shards: int = 1,
    shard_axis: ShardAxis = ShardAxis.HEADS,
    order: str = ORDER_HEAD_MAJOR,
) -> KVLayout:
    """Multi-head or grouped-query attention: 2 * layers * kv_heads * head_dim * bytes of an element for each token.

    Source: Ainslie et al., "GQA", arXiv 2305.13245, section 2; K and V of each KV head are kept.

    Args:
        layers: Layers with attention.
        kv_heads: KV heads; multi-head attention has as many as query heads.
        head_dim: Elements of a head.
        dtype: One of fp32, bf16, fp16, fp8, fp8_e4m3, fp8_e5m2, int8.
        chunk_tokens: Tokens of a chunk.
        shards: Records of a chunk. By heads: must divide `kv_heads`, and a tensor-parallel rank reads or writes whole
            shards.
        shard_axis: `HEADS`, or `LAYERS` for pipeline-parallel groups.
        order: Axes of a record; [layer, head, token, K and V] by default.

    Raises:
        InvalidRequest: Unknown dtype, or shards by heads that do not divide the KV heads.
    """
    if dtype not in _ELEMENT_BYTES:
        raise InvalidRequest(
            f"dtype {dtype!r} is unknown; use one of: {', '.join(_ELEMENT_BYTES)}, or build a KVLayout"
        )
    if shard_axis is ShardAxis.HEADS and shards > 0 and kv_heads % shards:
        raise InvalidRequest(f"shards is {shards}, which does not divide {kv_heads} KV heads; use a divisor")
    return KVLayout(
        chunk_tokens=chunk_tokens,
        dtype=dtype,
        layers=layers,
        parts=(Part(name="kv", entry_bytes=2 * kv_heads * head_dim * _ELEMENT_BYTES[dtype]),),
        order=order,
        shards=shards,
        shard_axis=shard_axis,
    )


def mla(
    *,
    layers: int,
    latent_dim: int = 512,
    rope_dim: int = 64,
    dtype: str = "bf16",
    chunk_tokens: int = CHUNK_TOKENS,
    shards: int = 1,
) -> KVLayout:
    """Multi-head latent attention: layers * (latent_dim + rope_dim) * bytes of an element for each token.

    The latents are the same on each tensor-parallel rank, so shards can only be layer groups; one writer is elected.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """
    if dtype not in _ELEMENT_BYTES:
        raise InvalidRequest(
            f"dtype {dtype!r} is unknown; use one of: {', '.join(_ELEMENT_BYTES)}, or build a KVLayout"
        )
    return KVLayout(
        chunk_tokens=chunk_tokens,
        dtype=dtype,
        layers=layers,
        parts=(Part(name="kv", entry_bytes=(latent_dim + rope_dim) * _ELEMENT_BYTES[dtype]),),
        shards=shards,
        shard_axis=ShardAxis.LAYERS,
    )


def llama_3_8b(*, chunk_tokens: int = CHUNK_TOKENS, shards: int = 1) -> KVLayout:
    """2 * 32 layers * 8 heads * 128 * 2 B = 131,072 B per token (arXiv 2407.21783, table 3)."""
    return gqa(layers=32, kv_heads=8, head_dim=128, chunk_tokens=chunk_tokens, shards=shards)


def llama_3_70b(*, chunk_tokens: int = CHUNK_TOKENS, shards: int = 1) -> KVLayout:
    """2 * 80 layers * 8 heads * 128 * 2 B = 327,680 B per token (arXiv 2407.21783, table 3)."""
    return gqa(layers=80, kv_heads=8, head_dim=128, chunk_tokens=chunk_tokens, shards=shards)


def llama_31_405b(*, chunk_tokens: int = CHUNK_TOKENS, shards: int = 1) -> KVLayout:
    """2 * 126 layers * 8 heads * 128 * 2 B = 516,096 B per token (arXiv 2407.21783, table 3)."""
    return gqa(layers=126, kv_heads=8, head_dim=128, chunk_tokens=chunk_tokens, shards=shards)


def qwen25_32b(*, chunk_tokens: int = CHUNK_TOKENS, shards: int = 1) -> KVLayout:
    """2 * 64 layers * 8 heads * 128 * 2 B = 262,144 B per token (arXiv 2412.15115, table 1)."""
    return gqa(layers=64, kv_heads=8, head_dim=128, chunk_tokens=chunk_tokens, shards=shards)


def qwen3_235b(*, dtype: str = "bf16", chunk_tokens: int = CHUNK_TOKENS, shards: int = 1) -> KVLayout:
    """2 * 94 layers * 4 heads * 128 * b = 192,512 B (bf16) or 96,256 B (fp8) per token (arXiv 2505.09388, table 2)."""
    return gqa(layers=94, kv_heads=4, head_dim=128, dtype=dtype, chunk_tokens=chunk_tokens, shards=shards)


def deepseek_v3(*, chunk_tokens: int = CHUNK_TOKENS, shards: int = 1) -> KVLayout:
    """V3, R1 (and Kimi-K2): 61 layers * (512 + 64) * 2 B = 70,272 B per token (arXiv 2412.19437, section 4.2)."""
    return mla(layers=61, chunk_tokens=chunk_tokens, shards=shards)


def deepseek_v3_fp8(*, chunk_tokens: int = CHUNK_TOKENS, shards: int = 1) -> KVLayout:
    """V3, R1 in FlashMLA's fp8: 61 layers * 656 B = 40,016 B per token.

    656 = 512 e4m3 + 4 fp32 scales + 64 bf16 RoPE values. Source: vLLM docs, flashmla_sparse ("fp8_ds_mla").
    """
    return KVLayout(
        chunk_tokens=chunk_tokens,
        dtype="fp8_e4m3",
        quantisation="fp8_ds_mla",
        layers=61,
        parts=(Part(name="kv", entry_bytes=LATENT_FP8_BYTES),),
        shards=shards,
        shard_axis=ShardAxis.LAYERS,
    )


def deepseek_v32(*, chunk_tokens: int = CHUNK_TOKENS, shards: int = 1) -> KVLayout:
    """V3.2 with its indexer: 61 layers * (656 + 132) B = 48,068 B per token.

    656 as in `deepseek_v3_fp8`; 132 = 128 fp8 + 1 fp32 scale. Source: vLLM's DeepseekV32IndexerCache. Both parts share
    a record, so that latents never meet a stale indexer.
    """
    return KVLayout(
        chunk_tokens=chunk_tokens,
        dtype="fp8_e4m3",
        quantisation="fp8_ds_mla",
        layers=61,
        parts=(Part(name="kv", entry_bytes=LATENT_FP8_BYTES), Part(name="indexer", entry_bytes=INDEXER_FP8_BYTES)),
        shards=shards,
        shard_axis=ShardAxis.LAYERS,
    )


def deepseek_v4_flash(*, chunk_tokens: int = CHUNK_TOKENS_V4) -> KVLayout:
    """21 CSA layers / 4 * (584 + 68) B + 20 HCA layers / 128 * 584 B = 3,514.25 B per token, beside the SWA windows.

    Source: arXiv 2606.19348 (CSA m = 4, HCA m' = 128, window 128); entry of 584 B: vLLM. 43 layers: the first two have
    a window only, then CSA and HCA alternate (`compress_ratios` 0, 0, 4, 128, 4, ...).
    """
    return _deepseek_v4(layers=43, csa=range(2, 43, 2), hca=range(3, 43, 2), chunk_tokens=chunk_tokens)


def deepseek_v4_pro(*, chunk_tokens: int = CHUNK_TOKENS_V4) -> KVLayout:
    """30 CSA layers / 4 * (584 + 68) B + 31 HCA layers / 128 * 584 B = 5,031.44 B per token, beside the SWA windows.

    Source as for `deepseek_v4_flash`. 61 layers: the first two are HCA, then CSA and HCA alternate.
    """
    return _deepseek_v4(layers=61, csa=range(2, 61, 2), hca=(0, 1, *range(3, 61, 2)), chunk_tokens=chunk_tokens)


def _deepseek_v4(*, layers: int, csa: range, hca: range | tuple[int, ...], chunk_tokens: int) -> KVLayout:
    return KVLayout(
        chunk_tokens=chunk_tokens,
        dtype="fp8_e4m3",
        quantisation="fp8_ds_v4",
        layers=layers,
        parts=(
            Part(name="csa", entry_bytes=V4_ENTRY_BYTES, entry_tokens=4, layers=tuple(csa)),
            Part(name="indexer", entry_bytes=V4_INDEXER_BYTES, entry_tokens=4, layers=tuple(csa)),
            Part(name="hca", entry_bytes=V4_ENTRY_BYTES, entry_tokens=128, layers=tuple(hca)),
            Part(name="swa", entry_bytes=V4_ENTRY_BYTES, entries=V4_WINDOW_TOKENS, kind=PartKind.SPARSE),
        ),
        shard_axis=ShardAxis.LAYERS,
    )


def deepseek_v41_flash(
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    swa_entry_bytes: int = V4_ENTRY_BYTES,
    swa_ttl_ns: int = V41_SWA_TTL_NS,
) -> KVLayout:
    """(3 encoder sources / 2 + 1 decoder source) * (288 + 68) B = 890 B per token, beside the SWA windows.

    Source: arXiv 2609.19969: CSA2 with m = 2 in the encoder and m = 1 in the decoder, other layers reuse their source's
    entries; FP4 entries of 256 + 32 B, indexer 64 + 4 B. Sources are layers 2, 8, 14 and 20 (`kv_source_layer_ids`).
    The windows are held in memory for minutes and recomputed on a miss (vLLM pull request 56227).

    Args:
        chunk_tokens: Tokens of a chunk, an even number.
        swa_entry_bytes: Bytes of a window's entry. The report gives none; V4's is the default.
        swa_ttl_ns: How long a window is held.
    """
    encoder, decoder = (2, 8, 14), (20,)
    return KVLayout(
        chunk_tokens=chunk_tokens,
        dtype="fp4",
        quantisation="fp4_ds_v41",
        layers=40,
        parts=(
            Part(name="kv_encoder", entry_bytes=V41_ENTRY_BYTES, entry_tokens=2, layers=encoder),
            Part(name="indexer_encoder", entry_bytes=V4_INDEXER_BYTES, entry_tokens=2, layers=encoder),
            Part(name="kv_decoder", entry_bytes=V41_ENTRY_BYTES, entry_tokens=1, layers=decoder),
            Part(name="indexer_decoder", entry_bytes=V4_INDEXER_BYTES, entry_tokens=1, layers=decoder),
            Part(
                name="swa",
                entry_bytes=swa_entry_bytes,
                entries=V4_WINDOW_TOKENS,
                kind=PartKind.SPARSE,
                retention=Retention.VOLATILE,
                ttl_ns=swa_ttl_ns,
            ),
        ),
        shard_axis=ShardAxis.LAYERS,
    )


PRESETS: Final[Mapping[str, Callable[[], KVLayout]]] = MappingProxyType(
    {
        "llama-3-8b": llama_3_8b,
        "llama-3-70b": llama_3_70b,
        "llama-3.1-405b": llama_31_405b,
        "qwen2.5-32b": qwen25_32b,
        "qwen3-235b": qwen3_235b,
        "qwen3-235b-fp8": lambda: qwen3_235b(dtype="fp8_e4m3"),
        "deepseek-v3": deepseek_v3,
        "deepseek-v3-fp8": deepseek_v3_fp8,
        "deepseek-v3.2": deepseek_v32,
        "deepseek-v4-flash": deepseek_v4_flash,
        "deepseek-v4-pro": deepseek_v4_pro,
        "deepseek-v4.1-flash": deepseek_v41_flash,
    }
)


def preset(name: str) -> KVLayout:
    """The layout of the known model `name` with its default chunk. Raises InvalidRequest with the known names."""
    if name not in PRESETS:
        raise InvalidRequest(f"layout preset {name!r} is unknown; use one of: {', '.join(PRESETS)}")
    return PRESETS[name]()

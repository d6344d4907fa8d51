"""Writes keys.json, layout.json and namespace.json: `python tests/vectors/generate_vectors.py`.

Only for new cases: bytes of a case that is there already can change only with a new version of the format.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from kvstore.types import keys, presets
from kvstore.types.keys import KeyChain
from kvstore.types.layout import KVLayout, Part, PartKind, Retention, ShardAxis
from kvstore.types.namespace import Namespace

FOLDER = Path(__file__).parent
NAMESPACE = bytes(range(32))


def hex_rows(blob: bytes) -> list[str]:
    return [blob[at : at + 32].hex() for at in range(0, len(blob), 32)]


def chunk_case(name: str, tokens: list[int], chunk_tokens: int, extra: list[bytes] | None = None) -> dict[str, object]:
    chain = KeyChain.from_tokens(NAMESPACE, tokens, chunk_tokens=chunk_tokens, extra=extra)
    return {
        "name": name,
        "namespace_digest": NAMESPACE.hex(),
        "chunk_tokens": chunk_tokens,
        "tokens": tokens,
        "extra": None if extra is None else [item.hex() for item in extra],
        "digests": hex_rows(chain.digests),
    }


def key_cases() -> dict[str, object]:
    draw = random.Random(1)
    ids = [draw.randrange(1 << 32) for _ in range(200)]
    chain = KeyChain.from_tokens(NAMESPACE, ids, chunk_tokens=16)
    engine_hashes = [b"\x01", bytes(range(32)), b"\xff" * 256]
    return {
        "chunks": [
            chunk_case("case 7 of the catalogue: (1, (2, 3))", [1, 2, 3], 3),
            chunk_case("no full chunk", [1, 2], 3),
            chunk_case("bounds of u32", [0, 1, 0xFFFFFFFF, 0x80000000], 2),
            chunk_case("200 random tokens, tail of 8 dropped", ids, 16),
            chunk_case("one chunk above 1024 bytes of input", ids + ids, 300),
            chunk_case("extra", ids[:6], 2, [b"", b"image:7", b"\x00" * 1100]),
        ],
        "engine": [
            {
                "namespace_digest": NAMESPACE.hex(),
                "algorithm": algorithm,
                "hashes": [value.hex() for value in engine_hashes],
                "digests": hex_rows(KeyChain.from_hashes(NAMESPACE, engine_hashes, algorithm=algorithm).digests),
            }
            for algorithm in ("vllm/sha256", "größe/块")
        ],
        "shards": [
            {
                "digest": NAMESPACE.hex(),
                "shard": shard,
                "shards": shards,
                "key": keys.record_key(NAMESPACE, shard=shard, shards=shards).hex(),
            }
            for shard, shards in ((0, 1), (0, 2), (1, 2), (1023, 1024))
        ],
        "parts": [
            {
                "digest": NAMESPACE.hex(),
                "shard": shard,
                "part": part,
                "key": keys.part_key(NAMESPACE, part=part, shard=shard).hex(),
            }
            for shard, part in ((0, "swa"), (3, "swa"), (0, "état"))
        ],
        "runs": [
            {
                "digests": hex_rows(chain.digests),
                "first": first,
                "chunks_per_run": size,
                "run_heads": hex_rows(chain[first:].run_heads(size)),
            }
            for first, size in ((0, 1), (0, 4), (3, 4), (5, 100))
        ],
    }


def part_fields(part: Part) -> dict[str, object]:
    return {
        "name": part.name,
        "kind": str(part.kind),
        "entry_bytes": part.entry_bytes,
        "entry_tokens": part.entry_tokens,
        "entries": part.entries,
        "layers": list(part.layers or ()),
        "retention": str(part.retention),
        "ttl_ns": part.ttl_ns,
        "checksum_bytes": part.checksum_bytes,
    }


def layout_case(name: str, layout: KVLayout) -> dict[str, object]:
    shards = range(layout.shards)
    return {
        "name": name,
        "fields": {
            "chunk_tokens": layout.chunk_tokens,
            "dtype": layout.dtype,
            "quantisation": layout.quantisation,
            "order": layout.order,
            "layers": layout.layers,
            "shards": layout.shards,
            "shard_axis": str(layout.shard_axis),
            "run_bytes": layout.run_bytes,
            "parts": [part_fields(part) for part in layout.parts],
        },
        "encoding": layout.encode().hex(),
        "digest": layout.digest.hex(),
        "record_bytes": [layout.record_bytes(shard) for shard in shards],
        "sparse_record_bytes": {
            part.name: [layout.record_bytes(shard, part=part.name) for shard in shards] for part in layout.sparse_parts
        },
        "checksum_bytes": layout.checksum_bytes(),
    }


def layouts() -> dict[str, KVLayout]:
    swa = Part(
        name="fenêtre", entry_bytes=64, entries=128, kind=PartKind.SPARSE, retention=Retention.VOLATILE, ttl_ns=10**9
    )
    return {
        **{name: presets.preset(name) for name in presets.PRESETS},
        "opaque": KVLayout.opaque(chunk_bytes=1 << 20),
        "sharded by heads": presets.llama_3_70b(shards=8),
        "sharded by layers": presets.deepseek_v32(shards=4),
        "all fields set": KVLayout(
            chunk_tokens=16,
            dtype="fp8_e4m3",
            quantisation="per-token",
            order="layer,head,token,entry",
            layers=4,
            shards=2,
            shard_axis=ShardAxis.HEADS,
            run_bytes=1 << 20,
            parts=(Part(name="kv", entry_bytes=64, layers=(0, 2, 3), checksum_bytes=8192), swa),
        ),
    }


def namespace_cases() -> list[dict[str, object]]:
    layout = presets.llama_3_8b()
    cases = {
        "plain": Namespace(tenant="default", model="org/name", weights="sha256:00", layout=layout),
        "adapter and salt": Namespace(
            tenant="t", model="m", weights="w", layout=layout, adapter="lora", adapter_revision="2", salt=b"\x00secret"
        ),
        "model in NFC": Namespace(tenant="t", model="m\u00f6del", weights="w", layout=layout),
        "model in NFD": Namespace(tenant="t", model="mo\u0308del", weights="w", layout=layout),
        "awkward names": Namespace(tenant="..", model="org/model-SEP-name", weights="a\x00b", layout=layout),
    }
    return [
        {
            "name": name,
            "fields": {
                "tenant": case.tenant,
                "model": case.model,
                "weights": case.weights,
                "adapter": case.adapter,
                "adapter_revision": case.adapter_revision,
            },
            "layout": case.layout.encode().hex(),
            "salt": case.salt.hex(),
            "manifest": case.manifest().hex(),
            "digest": case.digest.hex(),
        }
        for name, case in cases.items()
    ]


def all_vectors() -> dict[str, object]:
    """The content of each vector file, by its name."""
    return {
        "keys": key_cases(),
        "layout": [layout_case(name, layout) for name, layout in layouts().items()],
        "namespace": namespace_cases(),
    }


if __name__ == "__main__":
    for file, content in all_vectors().items():
        (FOLDER / f"{file}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")

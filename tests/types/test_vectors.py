"""The golden vectors: this code, a plain re-derivation in Python, and one in JavaScript all agree with them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Manifest

FOLDER = Path(__file__).resolve().parents[1] / "vectors"


def load_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


blake3 = load_module("plain_blake3").blake3


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def sized(data: bytes) -> bytes:
    return u32(len(data)) + data


def record(fields: dict[str, bytes]) -> bytes:
    return b"r" + u32(len(fields)) + b"".join(sized(name.encode()) + value for name, value in fields.items())


def field(name: str, item: Any) -> bytes:
    if name == "parts":
        return b"l" + u32(len(item)) + b"".join(map(layout_record, item))
    if isinstance(item, list):
        return b"b" + sized(b"".join(layer.to_bytes(2, "little") for layer in item))
    return b"u" + struct.pack("<Q", item) if isinstance(item, int) else b"s" + sized(item.encode())


def layout_record(fields: dict[str, Any]) -> bytes:
    return record({name: field(name, item) for name, item in fields.items()})


@pytest.mark.parametrize("case", load("keys")["chunks"], ids=lambda case: case["name"])
def test_chunk_digests(case: dict[str, Any]) -> None:
    size, parent = case["chunk_tokens"], bytes(32)
    assert len(case["digests"]) == len(case["tokens"]) // size
    for index, wanted in enumerate(case["digests"]):
        ids = b"".join(map(u32, case["tokens"][index * size : (index + 1) * size]))
        extra = bytes.fromhex(case["extra"][index]) if case["extra"] else b""
        parent = blake3(
            b"kvstore.chunk.v1", bytes.fromhex(case["namespace_digest"]), parent, u32(size), ids, sized(extra)
        )
        assert parent.hex() == wanted


def test_keys_of_engines_shards_and_parts() -> None:
    keys = load("keys")
    for case in keys["engine"]:
        prefix = b"kvstore.engine.v1" + bytes.fromhex(case["namespace_digest"]) + sized(case["algorithm"].encode())
        found = [blake3(prefix, sized(bytes.fromhex(value))).hex() for value in case["hashes"]]
        assert found == case["digests"]
    for case in keys["shards"]:
        digest = bytes.fromhex(case["digest"])
        found_key = digest if case["shards"] == 1 else blake3(b"kvstore.shard.v1", digest, u32(case["shard"]))
        assert found_key.hex() == case["key"]
    for case in keys["parts"]:
        found_key = blake3(
            b"kvstore.part.v1", bytes.fromhex(case["digest"]), u32(case["shard"]), sized(case["part"].encode())
        )
        assert found_key.hex() == case["key"]
    for case in keys["runs"]:
        positions = range(case["first"], len(case["digests"]))
        assert case["run_heads"] == [case["digests"][at - at % case["chunks_per_run"]] for at in positions]


@pytest.mark.parametrize("case", load("layout"), ids=lambda case: case["name"])
def test_layouts(case: dict[str, Any]) -> None:
    encoding = b"kvstore.layout.v1" + layout_record(case["fields"])
    assert encoding.hex() == case["encoding"]
    assert blake3(encoding).hex() == case["digest"]
    layout = KVLayout.decode(encoding)
    assert layout.digest.hex() == case["digest"]
    assert [layout.record_bytes(shard) for shard in range(layout.shards)] == case["record_bytes"]
    for part, sizes in case["sparse_record_bytes"].items():
        assert [layout.record_bytes(shard, part=part) for shard in range(layout.shards)] == sizes
    assert layout.checksum_bytes() == case["checksum_bytes"]


@pytest.mark.parametrize("case", load("namespace"), ids=lambda case: case["name"])
def test_namespaces(case: dict[str, Any]) -> None:
    fields = {name: b"s" + sized(text.encode()) for name, text in case["fields"].items()}
    fields["layout"] = b"b" + sized(bytes.fromhex(case["layout"]))
    fields["salt_hash"] = b"b" + sized(blake3(b"kvstore.salt.v1", bytes.fromhex(case["salt"])))
    manifest = b"kvstore.namespace.v1" + record(fields)
    assert manifest.hex() == case["manifest"]
    assert blake3(manifest).hex() == case["digest"]
    assert Manifest.decode(manifest, expected_digest=bytes.fromhex(case["digest"])).model == case["fields"]["model"]


def test_this_code_still_makes_the_vectors() -> None:
    for name, content in load_module("generate_vectors").all_vectors().items():
        assert json.loads(json.dumps(content)) == load(name), f"{name}.json: a pinned format has changed"


@pytest.mark.parametrize("script", ["check_vectors.mjs", "check_bytes.mjs"])
def test_another_language_agrees(script: str) -> None:
    """Keys, layouts, namespaces and placement; frames and the bytes of the drive, by the two format pages alone."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node (Debian: nodejs) is not installed")
    done = subprocess.run([node, str(FOLDER / script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "values agree" in done.stdout

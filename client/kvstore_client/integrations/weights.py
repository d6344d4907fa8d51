"""Fingerprints of model weights: part of a namespace, since KV computed by other weights is other content."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kvstore.errors import InvalidRequest


def fingerprint_folder(folder: str | os.PathLike[str]) -> str:
    """SHA-256 over the safetensors files of a model folder, as "sha256:<hex>".

    File names and lengths are hashed too, in name order, so that neither renaming nor splitting differently collides.
    Reads every byte once; keep the result beside the loaded model.

    Raises:
        InvalidRequest: The folder holds no .safetensors file, or `folder` is no path.
    """
    if not isinstance(folder, str | os.PathLike):
        raise InvalidRequest(f"folder is a {type(folder).__name__}; pass the path of a model folder")
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise InvalidRequest(
            f"no .safetensors file in {folder}: the weights cannot be told from others; "
            "point at the folder that save_pretrained wrote"
        )
    digest = hashlib.sha256(b"kvstore.weights.v1")
    for file in files:
        name = file.name.encode()
        digest.update(len(name).to_bytes(4, "little") + name + file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return f"sha256:{digest.hexdigest()}"

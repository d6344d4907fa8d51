"""Namespaces: every field separates, names are taken as they are, the manifest proves its digest without the salt."""

from __future__ import annotations

import dataclasses
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import FormatUnsupported, InvalidRequest, KVStoreError
from kvstore.limits import MANIFEST_BYTES_MAX, NAME_BYTES_MAX
from kvstore.testing.strategies_types import namespaces
from kvstore.types import presets
from kvstore.types.canonical import decode, encode
from kvstore.types.layout import KVLayout
from kvstore.types.namespace import Manifest, Namespace

MAGIC = b"kvstore.namespace.v1"
LAYOUT = KVLayout.opaque(chunk_bytes=4096, chunk_tokens=16)


def plain(**changes: Any) -> Namespace:
    values: dict[str, Any] = {"tenant": "t", "model": "m", "weights": "w", "layout": LAYOUT, "adapter": "a"}
    return Namespace(**{**values, **changes})


@given(namespaces())
def test_a_manifest_proves_its_digest(namespace: Namespace) -> None:
    manifest = Manifest.decode(namespace.manifest(), expected_digest=namespace.digest)
    assert manifest.digest == namespace.digest
    assert manifest.encode() == namespace.manifest()
    assert manifest.layout == namespace.layout
    assert (manifest.tenant, manifest.model, manifest.weights) == (namespace.tenant, namespace.model, namespace.weights)
    assert manifest.differences(manifest) == []


@given(namespaces(layout=LAYOUT), namespaces(layout=LAYOUT))
def test_digests_are_equal_just_when_namespaces_are(one: Namespace, other: Namespace) -> None:
    assert (one.digest == other.digest) == (one == other)


DIFFERENT: list[tuple[str, Any, list[str]]] = [
    ("tenant", "other", ["tenant"]),
    ("model", "other", ["model"]),
    ("weights", "sha256:2", ["weights"]),
    ("adapter", "b", ["adapter"]),
    ("adapter_revision", "2", ["adapter_revision"]),
    ("salt", b"s1", ["salt"]),
    ("layout", KVLayout.opaque(chunk_bytes=4096, chunk_tokens=64), ["layout.chunk_tokens"]),
]


@pytest.mark.parametrize(("field", "value", "named"), DIFFERENT)
def test_each_field_separates_and_is_named(field: str, value: Any, named: list[str]) -> None:
    one, other = plain(), plain(**{field: value})
    assert one.digest != other.digest
    assert set(one.keys(range(64)).digests) != set()
    assert one.keys(range(16)).digests != other.keys(range(64))[:1].digests
    assert one.keys_from_hashes([b"h"], algorithm="x").digests != other.keys_from_hashes([b"h"], algorithm="x").digests
    assert Manifest.decode(one.manifest()).differences(Manifest.decode(other.manifest())) == named


def test_every_field_is_tried_above() -> None:
    assert {field for field, _, _ in DIFFERENT} == {item.name for item in dataclasses.fields(Namespace) if item.init}


def test_dtype_and_chunk_size_separate_one_model() -> None:
    layouts = [
        presets.gqa(layers=2, kv_heads=2, head_dim=64, dtype=dtype, chunk_tokens=tokens, order=order)
        for dtype in ("bf16", "fp8_e4m3")
        for tokens in (16, 64)
        for order in ("layer,head,token,entry", "layer,token,head,entry")
    ]
    assert len({plain(layout=layout).digest for layout in layouts}) == 8


def test_names_are_bytes_and_never_normalised() -> None:
    names = ["org/model-SEP-name", "org/model/name", "@@x", "a@1@0", "..", "a\x00b", "mödel"]
    forms = [unicodedata.normalize(form, "mödel") for form in ("NFC", "NFD")]
    digests = {plain(model=name).digest for name in names[:-1] + forms}
    assert len(digests) == 8
    for name in names + forms:
        assert Manifest.decode(plain(model=name).manifest()).model == name


def test_fields_cannot_run_into_each_other() -> None:
    assert plain(tenant="ab", model="c").digest != plain(tenant="a", model="bc").digest
    assert plain(adapter="x", adapter_revision="").digest != plain(adapter="", adapter_revision="").digest


def test_the_longest_legal_names_work() -> None:
    long = "語" * (NAME_BYTES_MAX // 3) + "x"
    names = dict.fromkeys(("tenant", "model", "weights", "adapter", "adapter_revision"), long)
    assert len(plain(**names, salt=b"s" * 1024).manifest()) < MANIFEST_BYTES_MAX


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": ""}, "weights is empty; pass a fingerprint of the checkpoint"),
        ({"model": ""}, "model is empty"),
        ({"tenant": ""}, "tenant is empty"),
        ({"model": "語" * 342}, "model '語.* has 1026 bytes in UTF-8, above the limit of 1024; shorten it"),
        ({"tenant": "x\ud800"}, r"tenant .* holds the lone surrogate U\+D800 at index 1"),
        ({"adapter": "", "adapter_revision": "2"}, "adapter_revision is '2' without an adapter"),
        ({"salt": bytes(1025)}, "salt must be at most 1024 bytes"),
        ({"salt": "text"}, "salt must be"),
        ({"weights": 3}, "weights is 3; pass text"),
    ],
)
def test_a_namespace_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        plain(**changes)


def test_the_salt_stays_in_the_process() -> None:
    secret = b"a very secret salt"
    namespace = plain(salt=secret)
    assert secret not in namespace.manifest()
    assert "secret" not in repr(namespace)


def test_a_layout_of_another_type_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="layout is None; pass a KVLayout"):
        plain(layout=None)


def test_a_manifest_under_another_digest_is_refused_with_both() -> None:
    one, other = plain(), plain(model="x")
    with pytest.raises(
        InvalidRequest, match=f"hashes to {one.digest.hex()}, not to the namespace digest {other.digest.hex()}"
    ):
        Manifest.decode(one.manifest(), expected_digest=other.digest)


def test_a_manifest_of_another_kind_is_refused() -> None:
    data = plain().manifest()
    values = decode(data[len(MAGIC) :], what="manifest")
    assert isinstance(values, dict)
    with pytest.raises(FormatUnsupported, match=r"begins with b'kvstore.namespace.v9'"):
        Manifest.decode(b"kvstore.namespace.v9" + data[len(MAGIC) :])
    with pytest.raises(FormatUnsupported, match="manifest has unknown fields 'zone'"):
        Manifest.decode(MAGIC + encode({**values, "zone": "eu"}))
    with pytest.raises(FormatUnsupported, match="'salt_hash' has 1 bytes, not 32"):
        Manifest.decode(MAGIC + encode({**values, "salt_hash": b"x"}))
    with pytest.raises(FormatUnsupported, match="not in canonical form"):
        Manifest.decode(MAGIC + encode(dict(reversed(values.items()))))
    with pytest.raises(InvalidRequest, match="weights is empty"):
        Manifest.decode(MAGIC + encode({**values, "weights": ""}))
    with pytest.raises(InvalidRequest, match="above the limit of 65536"):
        Manifest.decode(data + bytes(MANIFEST_BYTES_MAX))


@given(st.data())
def test_a_damaged_manifest_never_passes_for_the_right_one(data: st.DataObject) -> None:
    namespace = plain()
    damaged = bytearray(namespace.manifest())
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(KVStoreError):
        Manifest.decode(bytes(damaged), expected_digest=namespace.digest)
    try:
        found = Manifest.decode(bytes(damaged))
    except KVStoreError:
        return
    assert found.digest != namespace.digest

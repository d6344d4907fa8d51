"""`Namespace`: everything that KV depends on beside its tokens; keys never match across namespaces.

The manifest is the canonical record of the fields, the salt only as its hash, and the namespace's digest is BLAKE3 over
the manifest: a node that never sees a salt can still check that a manifest belongs to a digest. Text is compared as its
UTF-8 bytes and never normalised: "mödel" in NFC and in NFD are two names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.errors import FormatUnsupported, InvalidRequest
from kvstore.limits import DIGEST_BYTES, MANIFEST_BYTES_MAX, NAME_BYTES_MAX, SALT_BYTES_MAX
from kvstore.types.canonical import Fields, decode, encode, utf8
from kvstore.types.digest import digest
from kvstore.types.keys import KeyChain
from kvstore.types.layout import KVLayout
from kvstore.types.tokens import Tokens

_MAGIC: Final = b"kvstore.namespace.v1"
_SALT: Final = b"kvstore.salt.v1"
_TEXTS: Final = ("tenant", "model", "weights", "adapter", "adapter_revision")
_MUST_BE_SET: Final = {
    "tenant": 'name one, "default" will do',
    "model": "name the model",
    "weights": "pass a fingerprint of the checkpoint: one model name with other weights would get wrong KV",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What identifies a body of KV. Equal fields give an equal digest in every process and language.

    Attributes:
        tenant: Who owns it.
        model: The model's name ("org/name").
        weights: Fingerprint of the checkpoint; never empty.
        layout: Shape of the chunks.
        adapter: Name of the LoRA or other adapter; "" for none.
        adapter_revision: Fingerprint of the adapter's weights.
        salt: Secret that separates callers within a tenant; never leaves the process, only its hash does.
        digest: 32 bytes, BLAKE3 over `manifest()`; computed.

    Raises:
        InvalidRequest: A name is empty where it must not be, longer than NAME_BYTES_MAX bytes, or no valid Unicode;
            or a field is of another type.
    """

    tenant: str
    model: str
    weights: str
    layout: KVLayout
    adapter: str = ""
    adapter_revision: str = ""
    salt: bytes = field(default=b"", repr=False)
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in _TEXTS:
            _check_text(name, getattr(self, name))
        if self.adapter_revision and not self.adapter:
            raise InvalidRequest(f"adapter_revision is {self.adapter_revision!r} without an adapter; name the adapter")
        if not isinstance(self.layout, KVLayout):
            raise InvalidRequest(f"layout is {self.layout!r:.80}; pass a KVLayout, such as KVLayout.opaque(...)")
        if not isinstance(self.salt, bytes) or len(self.salt) > SALT_BYTES_MAX:
            raise InvalidRequest(f"salt must be at most {SALT_BYTES_MAX} bytes; pass a hash of a longer one")
        object.__setattr__(self, "digest", digest(self.manifest()))

    def manifest(self) -> bytes:
        """The canonical bytes of all fields, the salt as its hash. `Manifest.decode` reads them."""
        return _encode(self, salt_hash=digest(_SALT, self.salt))

    def keys(self, tokens: Tokens, extra: Sequence[bytes] | None = None, *, after: KeyChain | None = None) -> KeyChain:
        """Keys of the full chunks of `tokens`; see `KeyChain.from_tokens`."""
        return KeyChain.from_tokens(
            self.digest,
            tokens,
            chunk_tokens=self.layout.chunk_tokens,
            chunks_per_run=self.layout.chunks_per_run,
            extra=extra,
            after=after,
        )

    def keys_from_hashes(
        self,
        hashes: Sequence[bytes],
        *,
        algorithm: str,
        first_position: int | None = None,
        parent: bytes | None = None,
        run_head: bytes | None = None,
    ) -> KeyChain:
        """Keys for blocks that an engine hashed itself; see `KeyChain.from_hashes`."""
        return KeyChain.from_hashes(
            self.digest,
            hashes,
            algorithm=algorithm,
            first_position=first_position,
            parent=parent,
            run_head=run_head,
            chunks_per_run=self.layout.chunks_per_run,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a node knows of a namespace: its fields with the hash of the salt, and the digest over them."""

    tenant: str
    model: str
    weights: str
    layout: KVLayout
    adapter: str
    adapter_revision: str
    salt_hash: bytes
    digest: bytes

    @classmethod
    def decode(cls, data: bytes, *, expected_digest: bytes | None = None) -> Manifest:
        """The manifest that `data` encodes.

        Args:
            data: Bytes from `Namespace.manifest`, by way of a peer or a disk.
            expected_digest: The digest under which the manifest was asked for or stored.

        Raises:
            FormatUnsupported: Not a manifest, another version, unknown or missing fields, or not in canonical form.
            InvalidRequest: Well formed, but a field is out of its bounds, or the digest is another one.
        """
        if len(data) > MANIFEST_BYTES_MAX:
            raise InvalidRequest(f"manifest has {len(data)} bytes, above the limit of {MANIFEST_BYTES_MAX}")
        if not data.startswith(_MAGIC):
            raise FormatUnsupported(f"manifest begins with {data[: len(_MAGIC)]!r}; this version reads {_MAGIC!r}")
        found = digest(data)
        if expected_digest is not None and expected_digest != found:
            raise InvalidRequest(
                f"manifest hashes to {found.hex()}, not to the namespace digest {expected_digest.hex()}"
            )
        values = Fields(decode(data[len(_MAGIC) :], what="manifest"), what="manifest")
        texts = {name: values.text(name) for name in _TEXTS}
        layout = KVLayout.decode(values.raw("layout"))
        salt_hash = values.raw("salt_hash")
        values.finish()
        for name, text in texts.items():
            _check_text(name, text)
        if len(salt_hash) != DIGEST_BYTES:
            raise FormatUnsupported(f"manifest field 'salt_hash' has {len(salt_hash)} bytes, not {DIGEST_BYTES}")
        manifest = cls(**texts, layout=layout, salt_hash=salt_hash, digest=found)
        if manifest.encode() != data:
            raise FormatUnsupported("manifest encoding is not in canonical form: its fields are in another order")
        return manifest

    def encode(self) -> bytes:
        """The bytes this was decoded from."""
        return _encode(self, salt_hash=self.salt_hash)

    def differences(self, other: Manifest) -> list[str]:
        """Names of the fields in which the two differ; those of the layout as "layout.FIELD"."""
        found = [name for name in _TEXTS if getattr(self, name) != getattr(other, name)]
        if self.salt_hash != other.salt_hash:
            found.append("salt")
        return found + [f"layout.{name}" for name in self.layout.differences(other.layout)]


def _encode(fields: Namespace | Manifest, *, salt_hash: bytes) -> bytes:
    return _MAGIC + encode(
        {
            "tenant": fields.tenant,
            "model": fields.model,
            "weights": fields.weights,
            "adapter": fields.adapter,
            "adapter_revision": fields.adapter_revision,
            "layout": fields.layout.encode(),
            "salt_hash": salt_hash,
        }
    )


def _check_text(name: str, text: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} is {text!r:.80}; pass text")
    length = len(utf8(text, what=name))
    if length > NAME_BYTES_MAX:
        raise InvalidRequest(
            f"{name} {text[:40]!r}... has {length} bytes in UTF-8, above the limit of {NAME_BYTES_MAX}; shorten it"
        )
    if not text and name in _MUST_BE_SET:
        raise InvalidRequest(f"{name} is empty; {_MUST_BE_SET[name]}")

"""What stands behind options: numbers, digests, files of manifests and tokens. A fault is named with its option."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvstore.errors import FormatUnsupported, InvalidRequest, Retryable
from kvstore.limits import DIGEST_BYTES
from kvstore.types.hex_text import bytes_of_hex

if TYPE_CHECKING:
    from kvstore.server.grpc_edge.client import ControlClient

_FILE_BYTES_MAX: Final = 64 * 1024 * 1024


def parsed(parse: Callable[[str], int], text: str, option: str) -> int:
    """A size or a duration. Raises InvalidRequest, as all of these do."""
    try:
        return parse(text)
    except ValueError as error:
        raise InvalidRequest(f"{option}: {error}") from None


def digest_of(text: str, what: str) -> bytes:
    """A whole digest, from hex."""
    digest = bytes_of_hex(text, DIGEST_BYTES)
    if digest is None:
        raise InvalidRequest(f"{what} is {text[:80]!r}; give the {2 * DIGEST_BYTES} hex characters of a digest")
    return digest


def check_hex(text: str, option: str) -> None:
    """That it may be the beginning of a digest."""
    if len(text) > 2 * DIGEST_BYTES or not set(text.lower()) <= set("0123456789abcdef"):
        raise InvalidRequest(
            f"{option} is {text[:80]!r}; give the {2 * DIGEST_BYTES} hex characters of a digest, or how it begins"
        )


def whole_digest(client: ControlClient, tenant: str, beginning: str, others: Sequence[ControlClient]) -> bytes:
    """The digest of the one namespace of the tenant that begins so, on any node of the cluster."""
    if len(beginning) == 2 * DIGEST_BYTES:
        return bytes.fromhex(beginning)
    found = _digests_like(client, tenant, beginning)
    for other in others:
        with suppress(Retryable):  # one that is away is named in the answer
            found |= _digests_like(other, tenant, beginning)
    if len(found) != 1:
        words = "no namespace" if not found else f"{len(found)} namespaces"
        raise InvalidRequest(
            f"--namespace {beginning}: {words} of tenant {tenant!r} begins so; `kvstore namespaces` lists them"
        )
    return found.pop()


def _digests_like(client: ControlClient, tenant: str, beginning: str) -> set[bytes]:
    found: set[bytes] = set()
    after = b""
    while True:
        page = client.namespaces(tenant, after=after)
        found |= {item.digest for item in page.namespaces if item.digest.hex().startswith(beginning)}
        after = page.next
        if not after:
            return found


def file_content(path: str, option: str) -> bytes:
    """All of a file, which is not a large one."""
    try:
        with open(path, "rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidRequest(f"{option} {path} cannot be read: {error.strerror}") from None
    if len(content) > _FILE_BYTES_MAX:
        raise InvalidRequest(f"{option} {path} has more than {_FILE_BYTES_MAX} bytes; ask for fewer tokens")
    return content


def manifest_of(path: str) -> bytes:
    """The manifest in a file, which has been decoded once."""
    from kvstore.types.namespace import Manifest

    content = file_content(path, "--manifest")
    try:
        Manifest.decode(content)
    except (InvalidRequest, FormatUnsupported) as error:
        raise InvalidRequest(f"--manifest {path} holds no Namespace.manifest(): {error}") from None
    return content


def tokens_of(text: str) -> tuple[int, ...]:
    """Token ids, from the words of an option or from the file that it names with @."""
    source = "--tokens"
    if text.startswith("@"):
        source = f"--tokens {text}"
        text = file_content(text[1:], "--tokens").decode("utf-8", "replace")
    pieces = text.replace(",", " ").split()
    odd = next((piece for piece in pieces if not re.fullmatch(r"-?[0-9]{1,20}", piece)), None)
    if odd is not None:
        raise InvalidRequest(f"{source} has {odd[:80]!r}; give token ids, comma-separated, or @FILE with ids in it")
    tokens = tuple(map(int, pieces))
    wrong = next((token for token in tokens if not 0 <= token < 2**32), None)
    if wrong is not None:
        raise InvalidRequest(f"--tokens has {wrong}; token ids are from 0 to {2**32 - 1}")
    return tokens

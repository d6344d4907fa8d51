"""BLAKE3 digests: the one place that imports the library."""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from kvstore.limits import DIGEST_BYTES

ZERO_DIGEST: Final = bytes(DIGEST_BYTES)


def digest(*pieces: bytes) -> bytes:
    """The 32-byte BLAKE3 hash (default mode, no key) of the concatenated pieces.

    The pieces are not separated: a caller with pieces of varying length puts a length before each, or two different
    inputs could give one digest.
    """
    return blake3(pieces[0] if len(pieces) == 1 else b"".join(pieces)).digest()


def digest_each(prefix: bytes, digests: bytes, suffix: bytes = b"") -> bytes:
    """The digest of `prefix | d | suffix` for each 32-byte d of the blob `digests`, as one blob in the same order."""
    hasher = blake3
    return b"".join(
        [
            hasher(prefix + digests[at : at + DIGEST_BYTES] + suffix).digest()
            for at in range(0, len(digests), DIGEST_BYTES)
        ]
    )


def digest_chain(prefix: bytes, parent: bytes, bodies: list[bytes]) -> bytes:
    """Digests of a chain: link i is the digest of `prefix | link i-1 | bodies[i]`, with `parent` before the first link.

    Returns:
        One blob of 32 bytes for each body, in order.
    """
    hasher = blake3
    links: list[bytes] = []
    append = links.append
    for body in bodies:
        parent = hasher(prefix + parent + body).digest()
        append(parent)
    return b"".join(links)


def digest_bodies(prefix: bytes, bodies: list[bytes]) -> bytes:
    """The digest of `prefix | body` for each body, as one blob in the same order."""
    hasher = blake3
    return b"".join([hasher(prefix + body).digest() for body in bodies])

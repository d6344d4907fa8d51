"""Bytes of a known length that people write as hex."""

from __future__ import annotations


def bytes_of_hex(text: str, length_bytes: int) -> bytes | None:
    """What `text` says, in either case; None unless it is `2 * length_bytes` hex characters and nothing else."""
    if len(text) != 2 * length_bytes:
        return None
    try:
        found = bytes.fromhex(text)
    except ValueError:
        return None
    return found if len(found) == length_bytes else None  # fromhex passes over spaces

"""CRC32C (Castagnoli, RFC 3720 appendix B.4) of payloads: the one place that imports the library.

A CRC table is one u32, little endian, for each block of `block_bytes`; the last block may be short, and no bytes
give an empty table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol, cast

from fastcrc import crc32

from kvstore.errors import InvalidRequest
from kvstore.types.buffers import Buffer, flat_view
from kvstore.types.compiled import require_crc_instruction, require_interface

try:
    from kvstore.types import _sums

    require_interface(_sums)
    require_crc_instruction(_sums)
except ImportError:
    IS_COMPILED = False
else:
    IS_COMPILED = True


class Crc32c(Protocol):
    """The CRC32C of `data`, any C-contiguous buffer. Chains: `crc32c(b, crc32c(a)) == crc32c(a + b)`.

    `data` must not change during the call. 0 is the checksum of no bytes.
    """

    def __call__(self, data: Buffer, value: int = 0, /) -> int: ...


# the library's own function, without one of ours around it: it is called for every block of every record
crc32c = _crc32c = cast("Crc32c", crc32.iscsi)
_U32 = struct.Struct("<I")
_FAR_BLOCKS_MIN: Final = 4  # that the compiled check sums side by side
_LENGTH_KNOWN_MAX: Final = 1 << 20
"""Up to here the cuts of a length are kept: some KiB for each, at the smallest blocks."""


def block_count(length_bytes: int, block_bytes: int) -> int:
    """How many blocks of `block_bytes` cover `length_bytes`; the last may be short."""
    return -(-length_bytes // block_bytes)


def crc_table(data: Buffer, block_bytes: int) -> bytes:
    """The CRC table of one buffer of any type and shape.

    Raises:
        InvalidRequest: `block_bytes` is not positive, or the buffer is not C-contiguous.
    """
    view = flat_view(data)
    length = len(view)
    _check_block_bytes(block_bytes)
    if length <= block_bytes:
        return _U32.pack(_crc32c(view, 0)) if length else b""
    return _table_of(view, length, block_bytes)


def crcs_match(payload: memoryview, block_bytes: int, crcs: bytes | memoryview) -> bool:
    """Whether `payload`, flat and beginning at a block, has exactly these checksums: one u32 LE for each block."""
    length = len(payload)
    crc = _crc32c
    if length <= block_bytes:
        return crc(payload, 0).to_bytes(4, "little") == crcs if length else not crcs
    return _table_of(payload, length, block_bytes) == crcs


def crcs_match_far(payload: memoryview, block_bytes: int, crcs: bytes | memoryview) -> bool:
    """As `crcs_match`, of bytes that this core's cache has not seen: a drive or another process has written them.

    Then memory is what one waits for, not the sum: the compiled part reads in four places at once, and ahead. What the
    cache has, `crcs_match` sums four times as fast.
    """
    if not IS_COMPILED or len(payload) < _FAR_BLOCKS_MIN * block_bytes:
        return crcs_match(payload, block_bytes, crcs)
    return _sums.match(payload, block_bytes, crcs)


def crc_table_far(payload: memoryview, block_bytes: int) -> bytes:
    """As `crc_table` of a flat view, of bytes that this core's cache has not seen; see `crcs_match_far`."""
    if not IS_COMPILED or len(payload) < _FAR_BLOCKS_MIN * block_bytes:
        return crc_table(payload, block_bytes)
    return _sums.table(payload, block_bytes)


@lru_cache(maxsize=64)
def _blocks(length_bytes: int, block_bytes: int) -> tuple[struct.Struct, tuple[slice, ...]]:
    """Where the blocks of so many bytes lie, and the form of their table."""
    cuts = tuple(slice(at, min(at + block_bytes, length_bytes)) for at in range(0, length_bytes, block_bytes))
    return struct.Struct(f"<{len(cuts)}I"), cuts


def _table_of(view: memoryview, length_bytes: int, block_bytes: int) -> bytes:
    """The table of a flat view. No loop in Python: it would cost as much as the checksums of small blocks."""
    if length_bytes > _LENGTH_KNOWN_MAX:
        crc = _crc32c
        words = [crc(view[at : at + block_bytes], 0) for at in range(0, length_bytes, block_bytes)]
        return struct.pack(f"<{len(words)}I", *words)
    form, cuts = _blocks(length_bytes, block_bytes)
    return form.pack(*map(_crc32c, map(view.__getitem__, cuts)))


def crc_table_fragments(fragments: Sequence[Buffer], block_bytes: int) -> bytes:
    """The CRC table of the concatenated fragments, without joining them; a block may span fragments.

    Raises:
        InvalidRequest: `block_bytes` is not positive, or a fragment is not C-contiguous.
    """
    if len(fragments) == 1:
        return crc_table(fragments[0], block_bytes)
    _check_block_bytes(block_bytes)
    words: list[int] = []
    carry = 0  # checksum of the block begun by earlier fragments
    carried_bytes = 0
    for fragment in fragments:
        view = flat_view(fragment)
        length = len(view)
        at = 0
        if carried_bytes:
            at = min(block_bytes - carried_bytes, length)
            carry = _crc32c(view[:at], carry)
            carried_bytes += at
            if carried_bytes < block_bytes:
                continue
            words.append(carry)
            carried_bytes = 0
        whole_end = length - (length - at) % block_bytes
        words += [_crc32c(view[start : start + block_bytes], 0) for start in range(at, whole_end, block_bytes)]
        carried_bytes = length - whole_end
        carry = _crc32c(view[whole_end:], 0) if carried_bytes else 0
    if carried_bytes:
        words.append(carry)
    return struct.pack(f"<{len(words)}I", *words)


def _check_block_bytes(block_bytes: int) -> None:
    if block_bytes < 1:
        raise InvalidRequest(f"checksum block of {block_bytes} bytes: it must hold at least 1 byte")

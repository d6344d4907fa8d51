"""BLAKE3 in plain Python after the specification (github.com/BLAKE3-team/BLAKE3-specs), slow and of our own."""

from __future__ import annotations

import struct

IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
LANES = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
DIAGONALS = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))
CHUNK_START, CHUNK_END, PARENT, ROOT = 1, 2, 4, 8
CHUNK_BYTES, BLOCK_BYTES, MASK = 1024, 64, 0xFFFFFFFF


def rotate(word: int, bits: int) -> int:
    return ((word >> bits) | (word << (32 - bits))) & MASK


def compress(chain: tuple[int, ...], block: bytes, counter: int, length: int, flags: int) -> tuple[int, ...]:
    message = list(struct.unpack("<16I", block.ljust(BLOCK_BYTES, b"\0")))
    state = [*chain, *IV[:4], counter & MASK, counter >> 32, length, flags]
    for _ in range(7):
        for index, (a, b, c, d) in enumerate(LANES + DIAGONALS):
            for word, (first, second) in zip(message[2 * index : 2 * index + 2], ((16, 12), (8, 7)), strict=True):
                state[a] = (state[a] + state[b] + word) & MASK
                state[d] = rotate(state[d] ^ state[a], first)
                state[c] = (state[c] + state[d]) & MASK
                state[b] = rotate(state[b] ^ state[c], second)
        message = [message[index] for index in PERMUTATION]
    return tuple(low ^ high for low, high in zip(state[:8], state[8:], strict=True))


def chunk(data: bytes, counter: int, root: int) -> tuple[int, ...]:
    chain = IV
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)] or [b""]
    for index, block in enumerate(blocks):
        flags = (CHUNK_START if index == 0 else 0) | (CHUNK_END | root if index == len(blocks) - 1 else 0)
        chain = compress(chain, block, counter, len(block), flags)
    return chain


def subtree(data: bytes, counter: int, root: int) -> tuple[int, ...]:
    if len(data) <= CHUNK_BYTES:
        return chunk(data, counter, root)
    left_chunks = 1
    while left_chunks * 2 * CHUNK_BYTES < len(data):
        left_chunks *= 2
    split = left_chunks * CHUNK_BYTES
    left, right = subtree(data[:split], counter, 0), subtree(data[split:], counter + left_chunks, 0)
    return compress(IV, struct.pack("<16I", *left, *right), 0, BLOCK_BYTES, PARENT | root)


def blake3(*pieces: bytes) -> bytes:
    """The 32-byte default hash of the concatenated pieces."""
    return struct.pack("<8I", *subtree(b"".join(pieces), 0, ROOT))

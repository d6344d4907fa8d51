"""CRC32C tables: the standard's values, any buffer, any cut into fragments."""

from __future__ import annotations

import array
import mmap
import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.types import _sums, checksum
from kvstore.types.checksum import block_count, crc32c, crc_table, crc_table_fragments


def plain_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def plain_table(data: bytes, block_bytes: int) -> bytes:
    blocks = [data[at : at + block_bytes] for at in range(0, len(data), block_bytes)]
    return b"".join(struct.pack("<I", plain_crc32c(block)) for block in blocks)


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_values_of_rfc_3720(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc


@given(st.binary(max_size=200), st.integers(0, 200))
def test_a_checksum_chains(data: bytes, cut: int) -> None:
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data) == plain_crc32c(data)


@given(st.binary(max_size=300), st.integers(1, 400))
def test_a_table_has_a_word_for_each_block(data: bytes, block_bytes: int) -> None:
    table = crc_table(data, block_bytes)
    assert table == plain_table(data, block_bytes)
    assert len(table) == 4 * block_count(len(data), block_bytes)


@given(st.lists(st.binary(max_size=60), max_size=8), st.integers(1, 100))
def test_fragments_give_the_table_of_their_sum(fragments: list[bytes], block_bytes: int) -> None:
    views = [memoryview(fragment) for fragment in fragments]
    assert crc_table_fragments(views, block_bytes) == plain_table(b"".join(fragments), block_bytes)


def test_any_buffer_is_taken_as_its_bytes() -> None:
    data = bytes(range(64)) * 80
    mapped = mmap.mmap(-1, len(data))
    mapped[:] = data
    numbers = array.array("Q", data)
    matrix = np.frombuffer(data, np.float32).reshape(8, 4, -1)
    wanted = crc_table(data, 4096)
    for buffer in (bytearray(data), memoryview(data).cast("H"), mapped, numbers, matrix):
        assert crc_table(buffer, 4096) == wanted
        assert crc_table_fragments([buffer, b""], 4096) == wanted


@pytest.mark.parametrize("empty", [b"", bytearray(), np.zeros((0, 4), np.float32), memoryview(b"")])
def test_nothing_has_an_empty_table(empty: bytes) -> None:
    assert crc_table(empty, 4096) == b""
    assert crc_table_fragments([empty, empty], 4096) == b""
    assert crc_table_fragments([], 4096) == b""


def test_a_strided_buffer_is_refused_with_its_shape() -> None:
    with pytest.raises(InvalidRequest, match=r"shape \(4, 2\).*contiguous"):
        crc_table(np.zeros((4, 4), np.uint8)[:, ::2], 4096)


@pytest.mark.parametrize("block_bytes", [0, -1])
def test_a_block_of_no_bytes_is_refused(block_bytes: int) -> None:
    with pytest.raises(InvalidRequest, match="at least 1 byte"):
        crc_table(b"x", block_bytes)
    with pytest.raises(InvalidRequest, match="at least 1 byte"):
        crc_table_fragments([b"x", b"y"], block_bytes)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 255, 256, 1024, 1031, 4 * 256, 7 * 256 + 3, 70_000])
@pytest.mark.parametrize("block", [1, 60, 64, 256, 4096])
def test_far_bytes_match_the_table_of_their_own_and_no_other(
    monkeypatch: pytest.MonkeyPatch, length: int, block: int, is_compiled: bool
) -> None:
    monkeypatch.setattr(checksum, "IS_COMPILED", is_compiled)
    data = bytearray(random.Random(length).randbytes(length))
    view, table = memoryview(data), crc_table(data, block)
    assert checksum.crc_table_far(view, block) == table
    assert checksum.crcs_match_far(view, block, table)
    assert checksum.crcs_match_far(view, block, memoryview(table))
    assert not checksum.crcs_match_far(view, block, table + bytes(4))
    if not length:
        return
    assert not checksum.crcs_match_far(view, block, table[:-4])
    for at in {0, length // 2, length - 1}:
        data[at] ^= 16
        assert not checksum.crcs_match_far(view, block, table), at
        data[at] ^= 16


def test_the_compiled_part_refuses_blocks_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        _sums.match(b"1234", 0, b"")
    with pytest.raises(ValueError, match="at least one byte"):
        _sums.table(b"1234", 0)

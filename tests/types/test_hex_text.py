"""Hex of a fixed length: what is anything else is nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.types.hex_text import bytes_of_hex


@given(st.binary(max_size=40))
def test_what_was_written_is_read(value: bytes) -> None:
    assert bytes_of_hex(value.hex(), len(value)) == value
    assert bytes_of_hex(value.hex().upper(), len(value)) == value


@pytest.mark.parametrize("text", ["", "ab", "abcde", "abcdef", "abcx", "ab d", " abc", "ab  ", "ab\ncd", "äbcd"])
def test_anything_else_is_nothing(text: str) -> None:
    assert bytes_of_hex(text, 2) is None

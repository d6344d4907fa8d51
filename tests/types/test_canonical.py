"""The canonical encoding: round trips, and clear refusal of everything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import FormatUnsupported, InvalidRequest
from kvstore.types.canonical import Fields, Value, decode, encode

_TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES: st.SearchStrategy[Value] = st.recursive(
    st.integers(0, 2**64 - 1) | _TEXT | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(VALUES)
def test_what_is_encoded_comes_back(value: Value) -> None:
    assert decode(encode(value), what="value") == value


@given(VALUES, VALUES)
def test_different_values_have_different_bytes(one: Value, other: Value) -> None:
    assert (encode(one) == encode(other)) == (one == other and repr(one) == repr(other))


@given(st.binary(max_size=64))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    try:
        value = decode(data, what="value")
    except FormatUnsupported:
        return
    assert encode(value) == data


@given(VALUES, st.data())
def test_a_cut_encoding_is_refused(value: Value, data: st.DataObject) -> None:
    encoded = encode(value)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(FormatUnsupported, match="cut short"):
        decode(encoded[:cut], what="value")


def test_a_deep_encoding_is_refused() -> None:
    value: Value = 1
    for _ in range(20):
        value = (value,)
    with pytest.raises(FormatUnsupported, match="deeper"):
        decode(encode(value), what="value")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x\0\0\0\0", "unknown tag b'x'"),
        (encode(1) + b"\0", "1 bytes behind its end"),
        (b"s\x01\0\0\0\xff", "not UTF-8"),
        (b"l\xff\xff\xff\xff", "cut short"),
        (b"r\x02\0\0\0" + 2 * (b"\x01\0\0\0a" + encode(1)), "field 'a' twice"),
    ],
)
def test_a_bad_encoding_says_what_is_wrong(data: bytes, message: str) -> None:
    with pytest.raises(FormatUnsupported, match=message):
        decode(data, what="value")


@pytest.mark.parametrize("value", [-1, 2**64, True, "\ud800"])
def test_what_has_no_encoding_is_refused(value: Value) -> None:
    with pytest.raises(InvalidRequest):
        encode(value)


def test_fields_are_taken_by_name_and_type() -> None:
    fields = Fields({"a": 1, "b": "x", "c": b"y", "d": (2,), "later": 3}, what="thing")
    assert (fields.integer("a"), fields.text("b"), fields.raw("c"), fields.items("d")) == (1, "x", b"y", (2,))
    with pytest.raises(FormatUnsupported, match="thing has unknown fields 'later'"):
        fields.finish()
    with pytest.raises(FormatUnsupported, match="lacks the field 'a'"):
        fields.integer("a")
    for take in (fields.text, fields.raw, fields.items):
        with pytest.raises(FormatUnsupported, match="field 'n' is int, not"):
            take.__func__(Fields({"n": 1}, what="thing"), "n")  # type: ignore[attr-defined]

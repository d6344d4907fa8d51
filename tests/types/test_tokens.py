"""Token ids: what fits u32 is packed, all else is refused by index and value."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from kvstore.errors import InvalidRequest
from kvstore.testing.strategies_types import tokens
from kvstore.types.tokens import pack_tokens


@given(tokens())
def test_every_kind_of_sequence_packs_alike(ids: list[int]) -> None:
    wanted = b"".join(token.to_bytes(4, "little") for token in ids)
    small = [token % 2**31 for token in ids]
    assert pack_tokens(ids).tobytes() == wanted
    assert pack_tokens(tuple(ids)).tobytes() == wanted
    assert pack_tokens(array("I", ids)).tobytes() == wanted
    assert pack_tokens(np.array(ids, np.int64)).tobytes() == wanted
    assert pack_tokens(np.array(ids, ">u4")).tobytes() == wanted
    assert pack_tokens([np.int64(token) for token in ids]).tobytes() == wanted  # type: ignore[misc]
    assert pack_tokens(np.array(small, np.int32)[::-1]).tobytes() == pack_tokens(small[::-1]).tobytes()
    assert pack_tokens(range(len(ids))).tolist() == list(range(len(ids)))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (True, r"token 3 is True \(bool\)"),
        (False, r"token 3 is False \(bool\)"),
        (1.0, r"token 3 is 1.0 \(float\)"),
        (None, r"token 3 is None"),
        ("7", r"token 3 is '7'"),
        (-1, r"token 3 is -1, outside 0..4294967295"),
        (2**32, r"token 3 is 4294967296, outside"),
        (2**70, r"token 3 is 1180591620717411303424, outside"),
    ],
)
def test_a_bad_id_is_named_with_its_index(bad: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        pack_tokens([0, 1, 2, bad, 4])
    with pytest.raises(InvalidRequest, match=message):
        pack_tokens((0, 1, 2, bad, True))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.array([1, 2, -5]), "token 2 is -5, outside"),
        (np.array([1, 2**40]), "token 1 is 1099511627776, outside"),
        (np.array([2**63], np.uint64), "token 0 is 9223372036854775808, outside"),
        (np.array([1.0, 2.0]), "token 0 is .*1.0.* of dtype float64"),
        (np.array([True]), "token 0 is .*True.* of dtype bool"),
        (np.zeros((1, 4), np.int64), r"shape \(1, 4\)"),
        (b"\x01\x02", "tokens are a bytes"),
        ("12", "tokens are a str"),
    ],
)
def test_a_bad_array_is_refused(bad: Sequence[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        pack_tokens(bad)


class Scalar:
    """What a one-element tensor looks like."""

    def __init__(self, value: int, dtype: str) -> None:
        self.value, self.dtype = value, dtype

    def __index__(self) -> int:
        return self.value


def test_scalars_of_a_tensor_are_ids_unless_they_are_truth_values() -> None:
    ids: list[Any] = [Scalar(0, "torch.int64"), Scalar(1, "torch.int64"), Scalar(7, "torch.int64")]
    assert pack_tokens(ids).tolist() == [0, 1, 7]
    with pytest.raises(InvalidRequest, match=r"token 3 is .*Scalar"):
        pack_tokens([*ids, Scalar(1, "torch.bool")])  # type: ignore[list-item]


def test_no_tokens_pack_to_nothing() -> None:
    assert len(pack_tokens([])) == len(pack_tokens(np.array([]))) == 0

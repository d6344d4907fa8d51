"""Token ids as a packed array of u32, with every id checked: a wrong id would name other content."""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy.typing as npt

Tokens: TypeAlias = "Sequence[int] | npt.NDArray[Any] | array[int]"
PackedTokens: TypeAlias = "npt.NDArray[np.uint32]"
TOKEN_MAX: Final = 0xFFFF_FFFF

assert array("I").itemsize == 4, "array('I') is taken for 32 bits"


def pack_tokens(tokens: Tokens) -> PackedTokens:
    """Token ids as a contiguous one-dimensional array of little-endian u32.

    Args:
        tokens: A list or other sequence of int, or a one-dimensional integer array (numpy, array.array, a CPU tensor).

    Raises:
        InvalidRequest: An id is a bool, a float or outside 0..2^32-1 (the message names index and value), or the array
            is not one-dimensional.
    """
    if isinstance(tokens, str | bytes | bytearray):
        raise InvalidRequest(f"tokens are a {type(tokens).__name__}; pass token ids as integers")
    if isinstance(tokens, array | memoryview) or hasattr(tokens, "__array__"):
        return _pack_array(np.asarray(tokens))
    return _pack_sequence(tokens if isinstance(tokens, list | tuple) else list(tokens))


def _pack_array(tokens: npt.NDArray[Any]) -> PackedTokens:
    if tokens.ndim != 1:
        raise InvalidRequest(f"tokens have shape {tokens.shape}; pass one sequence of ids (one dimension)")
    if tokens.dtype.kind not in "iu":
        if not tokens.size:
            return np.zeros(0, "<u4")
        raise InvalidRequest(f"token 0 is {tokens[0]!r} of dtype {tokens.dtype}; pass ids of an integer dtype")
    if tokens.size and (int(tokens.max()) > TOKEN_MAX or int(tokens.min()) < 0):
        index = int(np.flatnonzero((tokens < 0) | (tokens > TOKEN_MAX))[0])
        raise _out_of_range(index, int(tokens[index]))
    return np.ascontiguousarray(tokens, "<u4")


def _pack_sequence(tokens: Sequence[int]) -> PackedTokens:
    try:
        packed = array("I", tokens)
    except (TypeError, OverflowError):
        raise _first_bad(tokens) from None
    ids = np.frombuffer(packed, np.uint32)
    # array() takes True for 1; only where 0 or 1 came out can a bool have gone in, so few types need a look
    for index in np.flatnonzero(ids <= 1).tolist():
        if _is_truth(tokens[index]):
            raise _first_bad(tokens)
    return ids if sys.byteorder == "little" else ids.astype("<u4")


def _is_truth(token: object) -> bool:
    """True for a bool, and for a one-element array or tensor of them."""
    return isinstance(token, bool) or str(getattr(token, "dtype", "")).endswith("bool")


def _first_bad(tokens: Sequence[int]) -> InvalidRequest:
    for index, token in enumerate(tokens):
        try:
            value = operator.index(token)
        except TypeError:
            value = None
        if value is None or _is_truth(token):
            return InvalidRequest(f"token {index} is {token!r} ({type(token).__name__}); pass an integer id")
        if not 0 <= value <= TOKEN_MAX:
            return _out_of_range(index, value)
    return InvalidRequest("tokens changed while they were read; pass a sequence nobody else changes")


def _out_of_range(index: int, token: int) -> InvalidRequest:
    return InvalidRequest(f"token {index} is {token}, outside 0..{TOKEN_MAX}; pass ids that fit 32 unsigned bits")

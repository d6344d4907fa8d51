"""The one table between error classes and their codes in ERROR frames (append only)."""

from __future__ import annotations

from typing import Final

from kvstore import errors
from kvstore.limits import ERROR_TEXT_BYTES_MAX

ERROR_CODES: Final[dict[int, type[errors.KVStoreError]]] = {
    1: errors.InvalidRequest,
    2: errors.Denied,
    3: errors.UnknownNamespace,
    4: errors.Overloaded,
    5: errors.Unavailable,
    6: errors.DeadlineExceeded,
    7: errors.StaleView,
    8: errors.LeaseExpired,
    9: errors.OutcomeUnknown,
    10: errors.ChecksumMismatch,
    11: errors.FormatUnsupported,
    12: errors.NoSpace,
    13: errors.QuotaExceeded,
    14: errors.Closed,
    15: errors.Internal,
}
_CODES: Final = {kind: code for code, kind in ERROR_CODES.items()}
CODE_INTERNAL: Final = _CODES[errors.Internal]


def code_of(error: errors.KVStoreError) -> int:
    """The wire code of an error; a class without its own code travels as its nearest base that has one."""
    for kind in type(error).__mro__:
        code = _CODES.get(kind)
        if code is not None:
            return code
    return CODE_INTERNAL


def text_of(error: BaseException) -> str:
    """The message of an error, cut to what an ERROR frame may carry."""
    return clip(str(error) or type(error).__name__, ERROR_TEXT_BYTES_MAX)


def error_of(code: int, message: str) -> errors.KVStoreError:
    """The error that a peer reported, to be raised here. An unknown code (a newer peer) becomes Unavailable."""
    kind = ERROR_CODES.get(code)
    if kind is None:
        return errors.Unavailable(f"the peer reported error code {code}, unknown to this version: {message}")
    return kind(message)


def clip(text: str, bytes_max: int) -> str:
    """`text`, cut at a character border so that its UTF-8 form has at most `bytes_max` bytes."""
    raw = text.encode("utf-8", "replace")
    return raw[:bytes_max].decode("utf-8", "ignore")

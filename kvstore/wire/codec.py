"""msgpack, the one place that imports the library: flat message bodies, and plain values for administration.

A message body is one array of integers, truth values, bytes and text, and nothing else: no nested arrays, maps, floats
or extension types, so that decoding needs no more memory than the body itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgpack  # type: ignore[import-untyped]

from kvstore.errors import InvalidRequest
from kvstore.limits import ADMIN_BYTES_MAX, ADMIN_ENTRIES_MAX, MESSAGE_FIELDS_MAX

Scalar: TypeAlias = "int | bool | bytes | str"
Plain: TypeAlias = "bool | int | float | str | bytes | Sequence[Plain] | Mapping[str, Plain] | None"
"""What administration verbs take and give."""

_DEFECTS = (ValueError, TypeError, msgpack.UnpackException, RecursionError)


def pack_fields(values: tuple[Scalar, ...]) -> bytes:
    """The body of a message whose fields are `values`, in order."""
    packed: bytes = msgpack.packb(values)
    return packed


def unpack_fields(body: bytes | bytearray | memoryview, *, what: str) -> tuple[Scalar, ...]:
    """The fields of a message body; the caller checks their types. Raises InvalidRequest naming `what` for no array."""
    length = len(body)
    try:
        fields = msgpack.unpackb(
            body,
            use_list=False,
            max_array_len=MESSAGE_FIELDS_MAX,
            max_map_len=0,
            max_ext_len=0,
            ext_hook=_no_extensions,
            max_str_len=length,
            max_bin_len=length,
        )
    except _DEFECTS as error:
        raise InvalidRequest(f"{what} body of {length} bytes is no flat msgpack array: {_reason(error)}") from None
    if type(fields) is not tuple:
        raise InvalidRequest(f"{what} body is a msgpack {type(fields).__name__}, it must be an array")
    return fields


def pack_plain(value: Plain) -> bytes:
    """A plain value as msgpack. Raises InvalidRequest when it is larger than ADMIN_BYTES_MAX."""
    packed: bytes = msgpack.packb(value)
    if len(packed) > ADMIN_BYTES_MAX:
        raise InvalidRequest(f"administration value of {len(packed)} bytes, the limit is {ADMIN_BYTES_MAX}")
    return packed


def unpack_plain(data: bytes, *, what: str) -> Plain:
    """The plain value in `data`; map keys are text. Raises InvalidRequest naming `what`."""
    try:
        value: Plain = msgpack.unpackb(
            data,
            strict_map_key=True,
            max_array_len=ADMIN_ENTRIES_MAX,
            max_map_len=ADMIN_ENTRIES_MAX,
            max_ext_len=0,
            ext_hook=_no_extensions,
        )
    except _DEFECTS as error:
        raise InvalidRequest(f"{what} of {len(data)} bytes is no msgpack value: {_reason(error)}") from None
    return value


def _no_extensions(code: int, data: bytes) -> Scalar:
    raise ValueError(f"extension type {code} of {len(data)} bytes")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__} {error}".strip()

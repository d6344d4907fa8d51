"""A tagged, length-prefixed encoding that gives equal bytes for equal values in every process and language.

Layouts and namespaces are hashed over it, so it can never change; `docs/layouts.md` describes it for other languages.

    value  = 'u' u64               unsigned integer
           | 's' u32 bytes         text, UTF-8, not normalised
           | 'b' u32 bytes         raw bytes
           | 'l' u32 value*        list, the count first
           | 'r' u32 (u32 name value)*   record: field count, then each field's name (UTF-8) and value

All numbers are little endian. A record's fields stand in the order its type documents, none is left out.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from kvstore.errors import FormatUnsupported, InvalidRequest
from kvstore.limits import CANONICAL_DEPTH_MAX

Value: TypeAlias = "int | str | bytes | Sequence[Value] | Mapping[str, Value]"

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def utf8(text: str, *, what: str) -> bytes:
    """`text` as UTF-8. Raises InvalidRequest naming `what` for a lone surrogate, which UTF-8 cannot express."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{what} {text!r} holds the lone surrogate U+{ord(text[error.start]):04X} at index {error.start}, "
            "which UTF-8 cannot express; pass valid text"
        ) from None


def encode(value: Value) -> bytes:
    """The canonical bytes of `value`. Raises InvalidRequest for an integer outside u64 or text that is not Unicode."""
    out: list[bytes] = []
    _write(out, value)
    return b"".join(out)


def decode(data: bytes, *, what: str) -> Value:
    """The value that `data` encodes; every byte must be used.

    Args:
        data: Canonical bytes, from disk or from a peer.
        what: Name of the thing for messages ("layout").

    Raises:
        FormatUnsupported: The bytes are cut short, too deep, or have a tag that is not known.
    """
    value, end = _read(data, 0, 0, what)
    if end != len(data):
        raise FormatUnsupported(f"{what} encoding has {len(data) - end} bytes behind its end at byte {end}")
    return value


def _write(out: list[bytes], value: Value) -> None:
    if isinstance(value, bool):
        raise InvalidRequest(f"{value!r} cannot be encoded: a truth value is no integer here; pass 0 or 1")
    if isinstance(value, int):
        if not 0 <= value < 1 << 64:
            raise InvalidRequest(f"integer {value} does not fit 64 unsigned bits")
        out.append(b"u" + _U64.pack(value))
    elif isinstance(value, str):
        raw = utf8(value, what="text")
        out.append(b"s" + _U32.pack(len(raw)) + raw)
    elif isinstance(value, bytes):
        out.append(b"b" + _U32.pack(len(value)) + value)
    elif isinstance(value, Mapping):
        out.append(b"r" + _U32.pack(len(value)))
        for name, item in value.items():
            raw = utf8(name, what="field name")
            out.append(_U32.pack(len(raw)) + raw)
            _write(out, item)
    else:
        out.append(b"l" + _U32.pack(len(value)))
        for item in value:
            _write(out, item)


def _read(data: bytes, at: int, depth: int, what: str) -> tuple[Value, int]:
    if depth > CANONICAL_DEPTH_MAX:
        raise FormatUnsupported(f"{what} encoding nests deeper than {CANONICAL_DEPTH_MAX}")
    tag, at = _take(data, at, 1, what)
    if tag == b"u":
        raw, at = _take(data, at, 8, what)
        return _U64.unpack(raw)[0], at
    count, at = _read_count(data, at, what)
    if tag == b"s":
        raw, at = _take(data, at, count, what)
        return _text(raw, what), at
    if tag == b"b":
        return _take(data, at, count, what)
    if tag == b"l":
        items: list[Value] = []
        for _ in range(count):
            item, at = _read(data, at, depth + 1, what)
            items.append(item)
        return tuple(items), at
    if tag == b"r":
        return _read_record(data, at, count, depth, what)
    raise FormatUnsupported(f"{what} encoding has the unknown tag {tag!r}; it needs a newer version")


def _read_record(data: bytes, at: int, count: int, depth: int, what: str) -> tuple[Value, int]:
    fields: dict[str, Value] = {}
    for _ in range(count):
        length, at = _read_count(data, at, what)
        raw, at = _take(data, at, length, what)
        name = _text(raw, what)
        if name in fields:
            raise FormatUnsupported(f"{what} encoding has the field {name!r} twice")
        fields[name], at = _read(data, at, depth + 1, what)
    return fields, at


def _read_count(data: bytes, at: int, what: str) -> tuple[int, int]:
    raw, at = _take(data, at, 4, what)
    return _U32.unpack(raw)[0], at


def _take(data: bytes, at: int, length: int, what: str) -> tuple[bytes, int]:
    end = at + length
    if end > len(data):
        raise FormatUnsupported(
            f"{what} encoding is cut short: byte {at} needs {length} more, {len(data) - at} are there"
        )
    return data[at:end], end


def _text(raw: bytes, what: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise FormatUnsupported(f"{what} encoding holds text that is not UTF-8: {raw[:64]!r}") from None


class Fields:
    """A decoded record whose fields are taken one by one, by type; what is left at the end is refused by name."""

    __slots__ = ("_left", "_what")

    def __init__(self, value: Value, *, what: str) -> None:
        if not isinstance(value, Mapping):
            raise FormatUnsupported(f"{what} encoding is no record")
        self._left: dict[str, Value] = dict(value)
        self._what = what

    def integer(self, name: str) -> int:
        """Takes the unsigned integer `name`."""
        value = self._take(name)
        if not isinstance(value, int):
            raise self._wrong_type(name, "an integer", value)
        return value

    def text(self, name: str) -> str:
        """Takes the text `name`."""
        value = self._take(name)
        if not isinstance(value, str):
            raise self._wrong_type(name, "text", value)
        return value

    def raw(self, name: str) -> bytes:
        """Takes the bytes `name`."""
        value = self._take(name)
        if not isinstance(value, bytes):
            raise self._wrong_type(name, "bytes", value)
        return value

    def items(self, name: str) -> Sequence[Value]:
        """Takes the list `name`."""
        value = self._take(name)
        if not isinstance(value, tuple):
            raise self._wrong_type(name, "a list", value)
        return value

    def finish(self) -> None:
        """Raises FormatUnsupported naming the fields that nobody took."""
        if self._left:
            names = ", ".join(repr(name) for name in self._left)
            raise FormatUnsupported(f"{self._what} has unknown fields {names}; it was made by a newer version")

    def _take(self, name: str) -> Value:
        try:
            return self._left.pop(name)
        except KeyError:
            raise FormatUnsupported(f"{self._what} lacks the field {name!r}") from None

    def _wrong_type(self, name: str, wanted: str, value: Value) -> FormatUnsupported:
        return FormatUnsupported(f"{self._what} field {name!r} is {type(value).__name__}, not {wanted}")

"""Plain data (maps, lists, text, numbers): what views and registrations are made of outside this program.

A reader takes the fields it knows and refuses the rest by name: placement depends on every field of a view, so one
that is not understood would send keys to other places than everybody else does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from kvstore.errors import InvalidRequest
from kvstore.limits import TARGET_NAME_BYTES_MAX

Plain: TypeAlias = "bool | int | float | str | bytes | Sequence[Plain] | Mapping[str, Plain] | None"


def encode(value: Plain) -> str:
    """Canonical JSON: keys sorted, no spaces, text as it is (not escaped), numbers in their shortest form."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def decode(text: str, *, what: str, bytes_max: int) -> Plain:
    """The plain value in JSON `text`. Raises InvalidRequest naming `what`."""
    if len(text) > bytes_max:
        raise InvalidRequest(f"{what} has {len(text)} characters, the limit is {bytes_max} bytes")
    try:
        value: Plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is no JSON ({error}): {text!r:.80}") from None
    return value


class PlainFields:
    """The fields of one map, taken one by one, by type. A field that is absent gives its default, or is refused."""

    __slots__ = ("_left", "_what")

    def __init__(self, plain: Plain, *, what: str) -> None:
        if not isinstance(plain, Mapping):
            raise InvalidRequest(f"{what} is {type(plain).__name__}, not a map")
        self._left = dict(plain)
        self._what = what

    def text(self, name: str, default: str | None = None) -> str:
        """Takes the text `name`, of at most TARGET_NAME_BYTES_MAX bytes."""
        value = self._take(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "text")
        if len(value.encode("utf-8", "surrogatepass")) > TARGET_NAME_BYTES_MAX:
            raise self._wrong(name, value, f"text of at most {TARGET_NAME_BYTES_MAX} bytes")
        return value

    def texts(self, name: str, *, count_max: int) -> tuple[str, ...]:
        """Takes the list of texts `name`."""
        return tuple(PlainFields({name: item}, what=self._what).text(name) for item in self.items(name, count_max))

    def integer(self, name: str, default: int | None = None, *, low: int = 0, high: int = 2**64 - 1) -> int:
        """Takes the integer `name`, from `low` to `high`."""
        value = self._take(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, value, f"an integer from {low} to {high}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Takes the truth value `name`."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def amount(self, name: str) -> float:
        """Takes the finite number `name`, 0 or more."""
        return amount_of(self._take(name, None), name=name, what=self._what)

    def items(self, name: str, count_max: int, default: Sequence[Plain] | None = None) -> Sequence[Plain]:
        """Takes the list `name`."""
        value = self._take(name, default)
        if not isinstance(value, list | tuple) or len(value) > count_max:
            raise self._wrong(name, value, f"a list of at most {count_max}")
        return value

    def map(self, name: str, count_max: int) -> Mapping[str, Plain]:
        """Takes the map `name`."""
        value = self._take(name, None)
        if not isinstance(value, Mapping) or len(value) > count_max:
            raise self._wrong(name, value, f"a map of at most {count_max}")
        return value

    def plain(self, name: str, default: Plain) -> Plain:
        """Takes `name`, whatever it is."""
        return self._take(name, default)

    def finish(self) -> None:
        """Raises InvalidRequest naming the fields that nobody took."""
        if self._left:
            names = ", ".join(f"{name!r:.80}" for name in self._left)
            raise InvalidRequest(
                f"{self._what} has the unknown fields {names}; a newer version made it: upgrade this one"
            )

    def _take(self, name: str, default: Plain) -> Plain:
        if name in self._left:
            return self._left.pop(name)
        if default is None:
            raise InvalidRequest(f"{self._what} lacks the field {name!r}")
        return default

    def _wrong(self, name: str, value: Plain, wanted: str) -> InvalidRequest:
        return InvalidRequest(f"{name} of the {self._what} is {value!r:.80}, not {wanted}")


def amount_of(value: Plain, *, name: str, what: str) -> float:
    """`value` as a finite number, 0 or more. Raises InvalidRequest naming it."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise InvalidRequest(f"{name} of the {what} is {value!r:.80}, not a number of 0 or more")
    return float(value)

"""How a message class describes its fields, and what makes bodies of it: positional, checked, extensible at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, ClassVar, Final, Self, TypeVar, cast, get_type_hints

from kvstore.errors import InvalidRequest
from kvstore.limits import DIGEST_BYTES
from kvstore.wire.codec import Scalar, pack_fields, unpack_fields
from kvstore.wire.header import FrameType


class Uint:
    """An integer from 0 to `limit`."""

    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def check(self, what: str, value: Scalar) -> None:
        if type(value) is not int or not 0 <= value <= self.limit:
            raise InvalidRequest(f"{what} is {shown(value)}; it must be an integer from 0 to {self.limit}")


class Truth:
    """True or false."""

    __slots__ = ()

    def check(self, what: str, value: Scalar) -> None:
        if type(value) is not bool:
            raise InvalidRequest(f"{what} is {shown(value)}; it must be true or false")


class Blob:
    """Bytes: `count_max` or fewer pieces of `unit` bytes; at least `count_min`."""

    __slots__ = ("count_max", "count_min", "unit")

    def __init__(self, *, unit: int = 1, count_max: int, count_min: int = 0) -> None:
        self.unit = unit
        self.count_max = count_max
        self.count_min = count_min

    def check(self, what: str, value: Scalar) -> None:
        if type(value) is not bytes:
            raise InvalidRequest(f"{what} is {shown(value)}; it must be bytes")
        count, rest = divmod(len(value), self.unit)
        if rest:
            raise InvalidRequest(f"{what} has {len(value)} bytes; it must be a multiple of {self.unit}")
        if not self.count_min <= count <= self.count_max:
            raise InvalidRequest(
                f"{what} has {count} entries of {self.unit} bytes; from {self.count_min} to {self.count_max} "
                "are allowed: split the batch"
            )


class Text:
    """Text of at most `bytes_max` bytes in UTF-8."""

    __slots__ = ("bytes_max",)

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max

    def check(self, what: str, value: Scalar) -> None:
        if type(value) is not str:
            raise InvalidRequest(f"{what} is {shown(value)}; it must be text")
        if len(value) > self.bytes_max or len(value.encode("utf-8", "replace")) > self.bytes_max:
            raise InvalidRequest(f"{what} has {len(value)} characters; at most {self.bytes_max} bytes are allowed")


def digest_blob() -> Blob:
    """Exactly one 32-byte digest."""
    return Blob(unit=DIGEST_BYTES, count_min=1, count_max=1)


Rule = Uint | Truth | Blob | Text
_KINDS: Final[dict[type, type]] = {Uint: int, Truth: bool, Blob: bytes, Text: str}


class _Rules:
    """What `decode` does with the fields of one message class, laid out so that a good body costs little.

    Attributes:
        whats: names for messages, "GET.keys".
        kinds: types of the values.
        blobs: (index, least length, most length, unit) of each field of bytes.
        uints: (index, limit) of each integer.
        checks: judges a value; raises InvalidRequest.
        texts: indices of text fields, which only `checks` can judge.
        stores: sets each field of a new message.
    """

    __slots__ = ("blobs", "checks", "kinds", "stores", "texts", "uints", "whats")

    def __init__(self, cls: type[Message], names: Sequence[str], rules: Sequence[Rule]) -> None:
        self.whats = tuple(f"{cls.TYPE.name}.{name}" for name in names)
        self.kinds: tuple[type, ...] = tuple(_KINDS[type(rule)] for rule in rules)
        self.blobs = tuple(
            (at, rule.count_min * rule.unit, rule.count_max * rule.unit, rule.unit)
            for at, rule in enumerate(rules)
            if isinstance(rule, Blob)
        )
        self.uints = tuple((at, rule.limit) for at, rule in enumerate(rules) if isinstance(rule, Uint))
        self.texts = tuple(at for at, rule in enumerate(rules) if isinstance(rule, Text))
        self.checks = tuple(rule.check for rule in rules)
        # the slots' own descriptors: a frozen dataclass is filled here, before anybody has seen it
        self.stores = tuple(getattr(cls, name).__set__ for name in names)

    def judge(self, values: Sequence[Scalar]) -> None:
        """Raises InvalidRequest for the first value that is not allowed."""
        for check, what, value in zip(self.checks, self.whats, values, strict=False):
            check(what, value)


class Message:
    """Base of every message: a frozen dataclass whose annotations carry the rule of each field.

    The body is one msgpack array with the fields in the order of the class. Fields may be added at the end in later
    versions: a reader ignores those it does not know.
    """

    __slots__ = ()

    TYPE: ClassVar[FrameType]
    _NAME: ClassVar[str]
    _RULES: ClassVar[_Rules]
    _TAIL: ClassVar[tuple[Scalar, ...]]
    _VALUES: ClassVar[Callable[[Any], Any]]

    def encode(self) -> bytes:
        """The body of this message."""
        return pack_fields(type(self)._VALUES(self))

    @classmethod
    def decode(cls, body: bytes | bytearray | memoryview) -> Self:
        """The message in `body`.

        Raises:
            InvalidRequest: It is malformed; the text names the field, its value and what is allowed.
        """
        values = unpack_fields(body, what=cls._NAME)
        rules = cls._RULES
        count = len(rules.kinds)
        if len(values) != count:
            if len(values) < count - len(cls._TAIL):
                missing = rules.whats[len(values)]
                raise InvalidRequest(f"{cls._NAME} has {len(values)} fields; the field {missing} is missing")
            values = (*values, *cls._TAIL[len(values) - count :])[:count] if len(values) < count else values[:count]
        if tuple(map(type, values)) != rules.kinds or rules.texts:
            rules.judge(values)
        for at, low, high, unit in rules.blobs:
            size = len(values[at])  # type: ignore[arg-type]
            if not low <= size <= high or size % unit:
                rules.judge(values)
        for at, limit in rules.uints:
            if not 0 <= values[at] <= limit:  # type: ignore[operator]
                rules.judge(values)
        message = cls.__new__(cls)
        for store, value in zip(rules.stores, values, strict=True):
            store(message, value)
        message.validate()
        return message

    def validate(self) -> None:
        """Checks what concerns several fields at once. Raises InvalidRequest."""


M = TypeVar("M", bound=Message)


def message(frame_type: FrameType, *, optional_count: int = 0) -> Callable[[type[M]], type[M]]:
    """Class decorator, above `@dataclass`: binds a message to its frame type and collects the rules of its fields.

    Args:
        optional_count: so many fields at the end are younger than the frame: an older peer leaves them out, and they
            have their defaults then.
    """

    def bind(cls: type[M]) -> type[M]:
        hints = get_type_hints(cls, include_extras=True)
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        cls.TYPE = frame_type
        cls._NAME = frame_type.name
        known = fields(cls)  # type: ignore[arg-type]
        cls._TAIL = tuple([cast("Scalar", field.default) for field in known[len(known) - optional_count :]])
        cls._RULES = _Rules(cls, names, [hints[name].__metadata__[0] for name in names])
        getter = attrgetter(*names) if names else None
        if getter is None:
            cls._VALUES = staticmethod(lambda _: ())
        elif len(names) == 1:
            cls._VALUES = staticmethod(lambda self: (getter(self),))
        else:
            cls._VALUES = getter
        return cls

    return bind


def expect_count(
    what: str, blob: bytes, unit: int, count: int, *, or_empty: bool = False, or_one: bool = False
) -> None:
    """Checks that `blob` has one entry of `unit` bytes for each of `count` items, or a permitted short form."""
    found = len(blob) // unit
    if found == count or (or_empty and found == 0) or (or_one and found == 1):
        return
    forms = [str(count), *(["1"] if or_one else []), *(["0"] if or_empty else [])]
    raise InvalidRequest(f"{what} has {found} entries for {count} keys; it must have {' or '.join(forms)}")


def shown(value: Scalar) -> str:
    """A value as it may stand in a message: short, and its type visible."""
    text = repr(value)
    return text if len(text) <= 64 else f"{text[:60]}... ({type(value).__name__})"

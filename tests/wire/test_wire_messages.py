"""Messages: what is encoded decodes to the same, and what is malformed is refused by name."""

from __future__ import annotations

import struct
from dataclasses import fields
from typing import get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.limits import BATCH_ITEMS_MAX, RANGES_PER_CALL_MAX, RANGES_PER_ITEM_MAX
from kvstore.wire.codec import pack_plain, unpack_plain
from kvstore.wire.header import FrameType
from kvstore.wire.messages import (
    MESSAGES,
    Admin,
    End,
    ErrorReply,
    Get,
    Hello,
    Manifest,
    Offer,
    Result,
)
from kvstore.wire.ranges import decode_ranges, encode_ranges
from kvstore.wire.schema import Blob, Message, Text, Truth, Uint

KEY = bytes(range(32))


def values_of(rule: object) -> st.SearchStrategy[object]:
    """Legal values of one field; per-item blobs stay empty or whole so that counts can agree."""
    match rule:
        case Uint():
            return st.integers(0, rule.limit)
        case Truth():
            return st.booleans()
        case Text():
            return st.text(max_size=min(8, rule.bytes_max // 4))
        case Blob():
            sizes = st.integers(rule.count_min, min(rule.count_max, max(rule.count_min, 3)))
            return sizes.flatmap(lambda count: st.binary(min_size=count * rule.unit, max_size=count * rule.unit))
    raise AssertionError(rule)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    kind = draw(st.sampled_from(sorted(MESSAGES.values(), key=lambda kind: kind.TYPE)))
    hints = get_type_hints(kind, include_extras=True)
    arguments = {field.name: draw(values_of(hints[field.name].__metadata__[0])) for field in fields(kind)}  # type: ignore[arg-type]
    count = len(arguments["keys"]) // 32 if "keys" in arguments else len(arguments.get("items", b"")) // 4
    units = {"lengths": 4, "block_bytes": 4, "statuses": 1}
    optional = {
        "content_ids": 16,
        "run_heads": 32,
        "parents": 32,
        "positions": 4,
        "parts": 1,
        "range_counts": 4,
    }
    for name, unit in units.items():
        if name in arguments and kind.TYPE is not FrameType.MATCH_REPLY:
            arguments[name] = draw(st.binary(min_size=count * unit, max_size=count * unit))
    for name, unit in optional.items():
        if name in arguments:
            whole = st.binary(min_size=count * unit, max_size=count * unit)
            arguments[name] = draw(st.one_of(st.just(b""), whole))
    return kind(**arguments)


@given(messages())
def test_what_is_encoded_decodes_to_the_same(message: Message) -> None:
    assert type(message).decode(message.encode()) == message


@given(messages())
def test_fields_added_at_the_end_by_a_later_version_are_ignored(message: Message) -> None:
    longer = msgpack.packb((*msgpack.unpackb(message.encode()), 7, b"new"))
    assert type(message).decode(longer) == message


def test_a_manifest_of_before_there_were_copies_says_nothing_of_them() -> None:
    older = msgpack.packb((b"manifest",))
    assert Manifest.decode(older) == Manifest(manifest=b"manifest", copies=0)
    with pytest.raises(InvalidRequest, match=r"MANIFEST\.manifest is missing"):
        Manifest.decode(msgpack.packb(()))
    with pytest.raises(InvalidRequest, match=r"MANIFEST\.copies is 4"):
        Manifest.decode(msgpack.packb((b"manifest", 4)))


@given(st.sampled_from(sorted(MESSAGES.values(), key=lambda kind: kind.TYPE)), st.binary(max_size=200))
def test_random_bodies_are_decoded_or_refused(kind: type[Message], body: bytes) -> None:
    try:
        kind.decode(body)
    except InvalidRequest:
        pass


@given(messages(), st.data())
def test_damaged_bodies_are_decoded_or_refused(message: Message, data: st.DataObject) -> None:
    body = bytearray(message.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        if body:
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        type(message).decode(bytes(body[: data.draw(st.integers(0, len(body)))]))
    except InvalidRequest:
        pass


@pytest.mark.parametrize(
    ("kind", "values", "names"),
    [
        (Get, (KEY[:31], b"", 0, b"", b"", b"", 0, False, False), ("GET.namespace", "31", "32")),
        (Get, (KEY, bytes(33), 0, b"", b"", b"", 0, False, False), ("GET.keys", "33", "32")),
        (
            Get,
            (KEY, bytes(32 * (BATCH_ITEMS_MAX + 1)), 0, b"", b"", b"", 0, False, False),
            ("GET.keys", "65537", "65536"),
        ),
        (Get, (KEY, KEY, -1, b"", b"", b"", 0, False, False), ("GET.deadline_ns", "-1")),
        (Get, (KEY, KEY, 1 << 63, b"", b"", b"", 0, False, False), ("GET.deadline_ns", str(1 << 63), "3600000000000")),
        (Get, (KEY, KEY, 0, b"", b"", bytes(32), 0, False, False), ("GET.content_ids", "2", "1 or 0")),
        (Get, (KEY, KEY, 0, b"", b"", b"", 0, 1, False), ("GET.accept_pending", "1", "true or false")),
        (Get, (KEY, KEY, 0, b"", b"", b"", 0, False, 1), ("GET.verify", "1", "true or false")),
        (Get, (KEY, KEY, 0), ("GET", "3", "range_counts")),
        (Hello, (1, 1, 0, bytes(16), bytes(16), b"", 9), ("HELLO.flow", "9", "4")),
        (Hello, ("1", 1, 0, bytes(16), bytes(16), b"", 0), ("HELLO.version_min", "'1'")),
        (Result, (bytes(4), b"", b"", ""), ("RESULT.statuses", "0", "1")),
        (ErrorReply, (1, "x" * 5000, False), ("ERROR.text", "5000", "4096")),
        (ErrorReply, (1, b"bytes", False), ("ERROR.text", "b'bytes'")),
        (Offer, (KEY, KEY, bytes(4), b"", b"", 0, 0, 0, b"", b"", b"", b"", b"", 0, False), ("OFFER.block_bytes", "0")),
        (End, ([], 0), ("END.statuses", "()")),
        (End, ({}, 0), ("END.statuses", "{}")),
        (End, (None, 0), ("END.statuses", "None")),
        (End, (1.5, 0), ("END.statuses", "1.5")),
    ],
)
def test_a_refusal_names_field_value_and_limit(
    kind: type[Message], values: tuple[object, ...], names: tuple[str]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        kind.decode(msgpack.packb(values))
    for name in names:
        assert name in str(caught.value)


def test_extension_types_and_nesting_are_refused_without_memory() -> None:
    deep = b"\xdd\x00\x00\xff\xff" * 100_000
    for body in (deep, b"\x91" * 100_000 + b"\xc0", msgpack.packb([msgpack.ExtType(1, b"x")]), b"\xc1", b""):
        with pytest.raises(InvalidRequest):
            End.decode(body)


def test_plain_values_for_administration() -> None:
    value = {"a": [1, 2.5, None, True, "x", b"y"], "b": {"c": -1}}
    assert unpack_plain(pack_plain(value), what="reply") == value
    for bad in (b"", b"\x81\x01\x02", b"\xc1", msgpack.packb(msgpack.ExtType(1, b"")), b"\xdf\xff\xff\xff\xff"):
        with pytest.raises(InvalidRequest, match="reply"):
            unpack_plain(bad, what="reply")
    with pytest.raises(InvalidRequest, match="2097152"):
        pack_plain(bytes(3 << 20))
    assert Admin.decode(Admin(verb="stats", arguments=pack_plain({})).encode()).verb == "stats"


RANGE_LISTS = st.lists(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 30)), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


@given(RANGE_LISTS)
def test_ranges_round_trip(ranges: list[list[tuple[int, int]]]) -> None:
    counts, blob = encode_ranges(ranges)
    keys = KEY * len(ranges) if counts else KEY * 3
    get = Get.decode(Get(namespace=KEY, keys=keys, deadline_ns=1, range_counts=counts, ranges=blob).encode())
    assert decode_ranges(get) == ranges


def test_ranges_that_do_not_fit_are_refused() -> None:
    assert decode_ranges(Get(namespace=KEY, keys=KEY, deadline_ns=1)) is None
    assert encode_ranges(None) == (b"", b"")
    with pytest.raises(InvalidRequest, match="from 1 to"):
        encode_ranges([[]])
    with pytest.raises(InvalidRequest, match="64 unsigned bits"):
        encode_ranges([[(-1, 4)]])
    with pytest.raises(InvalidRequest, match=str(RANGES_PER_ITEM_MAX)):
        encode_ranges([[(0, 1)] * (RANGES_PER_ITEM_MAX + 1)])
    for counts, blob in ((struct.pack("<2I", 1, 2), bytes(32)), (struct.pack("<2I", 0, 2), bytes(32))):
        with pytest.raises(InvalidRequest):
            decode_ranges(Get(namespace=KEY, keys=KEY * 2, deadline_ns=1, range_counts=counts, ranges=blob))


def test_ranges_that_many_keys_share_are_bounded_as_if_each_had_its_own() -> None:
    _, blob = encode_ranges([[(0, 1)] * RANGES_PER_ITEM_MAX])
    keys_max = RANGES_PER_CALL_MAX // RANGES_PER_ITEM_MAX
    assert decode_ranges(Get(namespace=KEY, keys=KEY * keys_max, deadline_ns=1, ranges=blob)) is not None
    with pytest.raises(InvalidRequest, match=f"{RANGES_PER_CALL_MAX} in all"):
        decode_ranges(Get(namespace=KEY, keys=KEY * (keys_max + 1), deadline_ns=1, ranges=blob))

"""docs/protocol.md says what the code does: every frame with its code and fields, every code by its name."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvstore.types.flow import FlowClass
from kvstore.types.results import ItemStatus, MissReason, RefusedReason
from kvstore.wire.failures import ERROR_CODES
from kvstore.wire.header import FrameType
from kvstore.wire.messages import MESSAGES as PLAIN_MESSAGES
from kvstore.wire.pairs import PAIR_MESSAGES
from kvstore.wire.replicas import REPLICA_MESSAGES
from kvstore.wire.shared import SHARED_MESSAGES

MESSAGES = PLAIN_MESSAGES | SHARED_MESSAGES | REPLICA_MESSAGES | PAIR_MESSAGES
PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
ROWS = {row[2].strip(): row for row in (line.split("|") for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line))}


def test_every_frame_has_its_row_and_no_other_has_one() -> None:
    assert {name: int(row[1]) for name, row in ROWS.items()} == {kind.name: kind.value for kind in FrameType}


@pytest.mark.parametrize("kind", sorted(MESSAGES), ids=lambda kind: kind.name)
def test_every_field_stands_in_its_row_in_order(kind: FrameType) -> None:
    text = ROWS[kind.name][4]
    places = [re.search(rf"\b{field.name}\b", text) for field in fields(MESSAGES[kind])]  # type: ignore[arg-type]
    assert None not in places
    starts = [place.start() for place in places if place]
    assert starts == sorted(starts)


def test_every_code_stands_there() -> None:
    codes = PAGE[PAGE.index("## Codes") :]
    named = {name: int(code) for code, name in re.findall(r"\b(\d+) ([A-Za-z_]+)", codes)}
    for table in (MissReason, FlowClass, ItemStatus, RefusedReason):
        for member in table:
            name = member.name.lower() if table is FlowClass else member.name
            assert re.search(rf"\b{member.value} {name}\b", codes), f"{member!r} is not on the page"
    for code, kind in ERROR_CODES.items():
        assert named[kind.__name__] == code

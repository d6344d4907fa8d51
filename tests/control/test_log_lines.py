"""Log lines for machines, and the brake for faults that repeat."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from kvstore.limits import SECOND_NS
from kvstore.telemetry.logs import LogFormat, LogLevel, RepeatLogger, configure


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where a root logger of ours writes; the old one is put back."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield io.StringIO()
    root.handlers = handlers
    root.setLevel(level)


def test_json_lines_hold_the_message_and_the_traceback(stream: io.StringIO) -> None:
    configure(level=LogLevel.INFO, format=LogFormat.JSON, process="worker 0", stream=stream)
    logging.getLogger("x").debug("not this")
    logging.getLogger("x").info("a %s\nline", "mödel")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        logging.getLogger("x").exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "a mödel\nline"
    assert first["level"] == "info"
    assert first["process"] == "worker 0"
    assert "ZeroDivisionError" in second["traceback"]


def test_human_lines_say_who_speaks(stream: io.StringIO) -> None:
    configure(level=LogLevel.WARNING, format=LogFormat.HUMAN, process="supervisor", stream=stream)
    logging.getLogger("kvstore.x").warning("hot")
    assert "WARNING supervisor kvstore.x: hot" in stream.getvalue()


def test_a_flood_of_one_fault_is_one_line_with_a_count(stream: io.StringIO) -> None:
    configure(level=LogLevel.INFO, format=LogFormat.HUMAN, process="p", stream=stream)
    now_ns = [0]
    repeat = RepeatLogger(logging.getLogger("r"), every_ns=SECOND_NS, clock=lambda: now_ns[0])
    for _ in range(1000):
        repeat.warning("crc", "bad checksum in record 7")
    repeat.warning("eio", "drive failed")
    now_ns[0] = SECOND_NS
    repeat.warning("crc", "bad checksum in record 8")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[2].endswith("bad checksum in record 8 (999 more like it since the last line)")


def test_the_brake_itself_is_bounded(stream: io.StringIO) -> None:
    configure(level=LogLevel.ERROR, format=LogFormat.HUMAN, process="p", stream=stream)
    repeat = RepeatLogger(logging.getLogger("r"), clock=lambda: 0)
    for number in range(10_000):
        repeat.warning(f"kind {number}", "x")
    assert len(repeat._last) <= 256

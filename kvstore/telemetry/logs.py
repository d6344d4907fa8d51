"""Logging of a process: lines for people or JSON for machines, and a brake for faults that repeat."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final, TextIO

from kvstore.limits import SECOND_NS

REPEAT_NS: Final = 10 * SECOND_NS
"""A repeated fault is logged at most so often; what was held back is counted in the next line."""

_REPEAT_KEYS_MAX: Final = 256


class LogFormat(StrEnum):
    """How a line looks."""

    HUMAN = "human"
    JSON = "json"


class LogLevel(StrEnum):
    """What is worth a line."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def configure(*, level: LogLevel, format: LogFormat, process: str, stream: TextIO | None = None) -> None:
    """Set up the root logger of this process to write to `stream`, standard error by default. Call once, at start."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if format is LogFormat.JSON else _HumanFormatter(process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


class RepeatLogger:
    """Logs the first fault of a kind at once, then one line each `REPEAT_NS` with the number held back.

    For faults that can come by the thousand (a bad drive, a flood of bad frames): the count stands in the metrics.
    """

    def __init__(
        self, logger: logging.Logger, *, every_ns: int = REPEAT_NS, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._logger = logger
        self._every_ns = every_ns
        self._clock = clock
        self._last: dict[str, tuple[int, int]] = {}  # kind -> (time of its last line, held back since)

    def warning(self, kind: str, message: str) -> None:
        """Log `message` unless a line of the same `kind` was logged within the interval."""
        now_ns = self._clock()
        logged_ns, held = self._last.get(kind, (now_ns - self._every_ns, 0))
        if now_ns - logged_ns < self._every_ns:
            self._last[kind] = (logged_ns, held + 1)
            return
        if kind not in self._last and len(self._last) >= _REPEAT_KEYS_MAX:
            self._last.clear()
        self._last[kind] = (now_ns, 0)
        self._logger.warning("%s%s", message, f" ({held} more like it since the last line)" if held else "")


class _HumanFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {process} %(name)s: %(message)s")


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)

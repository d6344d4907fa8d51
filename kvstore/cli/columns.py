"""Tables of plain text: how rows of cells become lines of a given width. Pure.

Words are never split and nothing is cut off. Where there is no width (a pipe, a file) a row is one line and every
column is there. On a terminal the table that fits is taken: all in columns; else long texts beneath their rows; else
rows grouped below what several have in common; else the widest columns beneath their rows as well.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import Final
from unicodedata import east_asian_width

_GAP: Final = "  "
_INDENT: Final = "  "
_TEXT_WIDTH_MIN: Final = 16
"""Below that a text that is wrapped beside other columns is read word by word: it goes beneath its row instead."""


class Kind(Enum):
    """What may become of a column where the table is too wide."""

    CELL = "stays in its row"
    TEXT = "is wrapped in what the other columns leave"
    NOTE = "goes beneath its row, and is left out where it is empty"
    HEADING = "stands above the rows that have it in common"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column; `is_number` puts its cells to the right."""

    header: str
    kind: Kind = Kind.CELL
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class TableLine:
    """One line of text, and whether it is a header or a heading, which a terminal may show as such."""

    text: str
    is_header: bool = False


def lay_out(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[TableLine]:
    """The lines of a table.

    Args:
        columns: at least one.
        rows: as many cells each as there are columns.
        width: of the terminal in characters; None where there is none.
    """
    whole = _Table(columns=tuple(columns), rows=[[_one_line(cell) for cell in row] for row in rows])
    if width is None or whole.natural_width <= width:
        return whole.lines(None)
    for table in whole.narrower():
        if table.fits(width):
            return table.lines(width)
    return table.lines(width)


def text_width(text: str) -> int:
    """How many character cells of a terminal a text takes."""
    return len(text) if text.isascii() else sum(2 if east_asian_width(one) in "WF" else 1 for one in text)


def _one_line(cell: str) -> str:
    return "; ".join(filter(None, (line.strip() for line in cell.splitlines())))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """A table, and which of its columns are where."""

    columns: tuple[Column, ...]
    rows: list[list[str]]
    is_noted: bool = False
    is_grouped: bool = False

    def _places(self, kind: Kind) -> list[int]:
        return [at for at, column in enumerate(self.columns) if column.kind is kind]

    @property
    def _beneath(self) -> list[int]:
        return self._places(Kind.NOTE) if self.is_noted else []

    @property
    def _above(self) -> list[int]:
        return self._places(Kind.HEADING) if self.is_grouped else []

    @property
    def _beside(self) -> list[int]:
        elsewhere = {*self._beneath, *self._above}
        return [at for at in range(len(self.columns)) if at not in elsewhere]

    def _natural(self, at: int) -> int:
        return max(text_width(text) for text in (self.columns[at].header, *(row[at] for row in self.rows)))

    @property
    def natural_width(self) -> int:
        beside = self._beside
        indent = len(_INDENT) if self._above else 0
        return sum(map(self._natural, beside)) + len(_GAP) * (len(beside) - 1) + indent

    def _widths(self, width: int | None) -> dict[int, int] | None:
        """Of each column in the row; None when they do not fit."""
        natural = {at: self._natural(at) for at in self._beside}
        over = self.natural_width - width if width is not None else 0
        texts = [at for at in self._beside if self.columns[at].kind is Kind.TEXT]
        while over > 0:
            widest = max(texts, key=natural.__getitem__, default=None)
            if widest is None or natural[widest] <= max(_TEXT_WIDTH_MIN, self._longest_word(widest)):
                return None
            natural[widest] -= 1
            over -= 1
        return natural

    def _longest_word(self, at: int) -> int:
        texts = (self.columns[at].header, *(row[at] for row in self.rows))
        return max((text_width(word) for text in texts for word in text.split()), default=0)

    def fits(self, width: int) -> bool:
        return self._widths(width) is not None

    def narrower(self) -> Iterator[_Table]:
        """Itself with its texts wrapped, then ever narrower; the last one has a single column in its rows."""
        yield self
        noted = replace(self, is_noted=True)
        yield noted
        yield (table := replace(noted, is_grouped=True))
        while len(table._beside) > 1:
            # texts go first: one that could not be wrapped is the longest thing there is
            widest = max(table._beside[1:], key=table._demotion)
            columns = list(table.columns)
            columns[widest] = replace(columns[widest], kind=Kind.NOTE)
            table = replace(table, columns=tuple(columns))
            yield table

    def _demotion(self, at: int) -> tuple[bool, int]:
        return self.columns[at].kind is Kind.TEXT, self._natural(at)

    def lines(self, width: int | None) -> list[TableLine]:
        widths = self._widths(width) or {at: self._natural(at) for at in self._beside}
        indent = _INDENT if self._above else ""
        lines = []
        if any(self.columns[at].header for at in self._beside):
            lines = [
                TableLine(line, True) for line in self._row_lines([one.header for one in self.columns], widths, indent)
            ]
        for heading, rows in groupby(self.rows, key=lambda row: [row[at] for at in self._above]):
            if self._above:
                named = zip(self._above, heading, strict=True)
                words = [f"{self.columns[at].header} {text}" for at, text in named if text]
                lines += [TableLine(line, True) for line in _packed(words, width)]
            for row in rows:
                lines += [TableLine(line) for line in self._row_lines(row, widths, indent)]
                lines += [TableLine(line) for line in self._note_lines(row, width, indent)]
        return lines

    def _row_lines(self, row: Sequence[str], widths: dict[int, int], indent: str) -> Iterator[str]:
        wrapped = {
            at: _wrap(row[at], room) if self.columns[at].kind is Kind.TEXT else [row[at]] for at, room in widths.items()
        }
        for number in range(max(map(len, wrapped.values()), default=0)):
            cells = []
            for at, room in widths.items():
                text = wrapped[at][number] if number < len(wrapped[at]) else ""
                padding = " " * (room - text_width(text))
                cells.append(padding + text if self.columns[at].is_number else text + padding)
            yield (indent + _GAP.join(cells)).rstrip()

    def _note_lines(self, row: Sequence[str], width: int | None, indent: str) -> Iterator[str]:
        for at in self._beneath:
            if row[at]:
                before = f"{indent}{_INDENT}{self.columns[at].header}: "
                yield from _wrap(row[at], width, before=before, after=indent + 2 * _INDENT)


def _packed(words: Sequence[str], width: int | None) -> list[str]:
    """As many of some words a line as fit, in order; what follows the first line is indented."""
    lines = [words[0]] if words else [""]
    for word in words[1:]:
        line = lines[-1] + _GAP + word
        if width is None or text_width(line) <= width:
            lines[-1] = line
        else:
            lines.append(_INDENT + word)
    return lines


def _wrap(text: str, width: int | None, *, before: str = "", after: str = "") -> list[str]:
    if width is None:
        return [before + text]
    # a word that is longer than a line is left to the terminal: an address that was cut cannot be copied
    return textwrap.wrap(
        text,
        max(width, len(before) + 1),
        initial_indent=before,
        subsequent_indent=after,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [before]

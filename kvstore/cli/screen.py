"""What people see: steps with their progress, tables, and what went wrong. The one home of rich."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from kvstore.cli.columns import Column, Kind, lay_out


class Screen:
    """A terminal, or a plain file when the output is none."""

    def __init__(self, console: Console | None = None) -> None:
        """Writes to standard output unless another console is given."""
        self._console = console or Console(highlight=False)

    @contextmanager
    def step(self, title: str) -> Iterator[Callable[[str], None]]:
        """Shows that a step runs, what it last told, and how long it took when it is over.

        Yields:
            Called with a line for a person; the last one stays beside the title.
        """
        started_s = time.monotonic()
        last = ""
        with self._console.status(escape(title)) as status:

            def tell(note: str) -> None:
                nonlocal last
                last = note
                status.update(f"{escape(title)}  [dim]{escape(note)}[/dim]")

            try:
                yield tell
            except BaseException:
                self._console.print(f"[red]failed[/red]  {escape(title)}")
                raise
        took_s = time.monotonic() - started_s
        told = f": [dim]{escape(last)}[/dim]" if last else ""
        self._console.print(f"[green]{took_s:6.1f} s[/green]  {escape(title)}{told}", soft_wrap=True)

    @property
    def _width(self) -> int | None:
        """None where nobody looks at it in a window: a line of a pipe or a file may be as long as it has to."""
        return self._console.width if self._console.is_terminal else None

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Names and values, one pair a row."""
        self.grid(title, (Column(header=""), Column(header="", kind=Kind.TEXT)), rows)

    def grid(self, title: str, columns: Sequence[Column | str], rows: Sequence[Sequence[str]]) -> None:
        """Rows of cells under headers, below an empty line; see `columns` for what becomes of wide ones."""
        self.line("")
        if title:
            self._console.print(f"[bold]{escape(title)}[/bold]", soft_wrap=True)
        whole = [Column(header=column) if isinstance(column, str) else column for column in columns]
        for line in lay_out(whole, rows, self._width):
            text = escape(line.text)
            self._console.print(f"[bold]{text}[/bold]" if line.is_header else text, soft_wrap=True)

    def line(self, text: str) -> None:
        """One line of plain text, never wrapped."""
        self._console.print(escape(text), soft_wrap=True)

    def clear(self) -> None:
        """Begin at the top again; nothing where the output is no terminal."""
        if self._console.is_terminal:
            self._console.clear()

    def quote(self, who: str, text: str) -> None:
        """Text that a program made, set apart from ours."""
        self._console.print(f"[dim]{escape(who)}:[/dim]")
        self._console.print(Padding(escape(text), (0, 0, 0, 2)))

    def fail(self, message: str) -> None:
        """What went wrong, named, with the fix."""
        self._console.print(f"[red]{escape(message)}[/red]", soft_wrap=True)

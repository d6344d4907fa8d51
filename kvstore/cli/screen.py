"""What people see: steps with their progress, tables, and what went wrong. The one home of rich."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table


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
        self._console.print(
            f"[green]{took_s:6.1f} s[/green]  {escape(title)}: [dim]{escape(last)}[/dim]", soft_wrap=True
        )

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Names and values, one pair a row."""
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column(style="dim")
        table.add_column()
        for name, value in rows:
            table.add_row(escape(name), escape(value))
        self._console.print()
        self._console.print(table)

    def grid(self, title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows of cells under headers."""
        table = Table(title=title, title_justify="left")
        for header in headers:
            table.add_column(header, overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row))
        self._console.print(table)

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

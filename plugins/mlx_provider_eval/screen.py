"""Progress on stderr during a run, and the clean end of a run by a signal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.text import Text

from mlx_provider.commands import Ended, long_command

from .report import Table

WIDTH = 150
"""Columns of a table that goes to a file."""


@dataclass(frozen=True)
class Screen:
    console: Console

    def tell(self, phase: str, what: str) -> None:
        self.console.print(Text(f"{phase:<8}", style="dim"), Text(what), sep="")

    @contextmanager
    def counting(self, total: int) -> Iterator[Callable[[], None]]:
        """A progress bar in a terminal."""
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        quiet = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=quiet) as progress:
            task = progress.add_task("", total=total)
            yield lambda: progress.advance(task)


@contextmanager
def ending() -> Iterator[Screen]:
    """Signals end the block with its clean-ups, and this process with a shell's exit code."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    tell = None if console.is_terminal else console.print  # a terminal shows the progress bar
    try:
        with long_command(tell):
            yield Screen(console)
    except Ended as ended:
        raise typer.Exit(128 + ended.number) from None


def print_table(table: Table) -> None:
    """Print on stdout."""
    from rich.table import Table as Drawn

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    drawn = Drawn(title=table.title, title_justify="left")
    for name in table.head:
        drawn.add_column(Text(name), overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    console.print(drawn)

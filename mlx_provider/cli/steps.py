"""The steps of a command that starts or ends processes, on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def show_step(phase: str, what: str) -> None:
    """One line, with `phase` in a column of its own."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text(f"{phase:<8}", style="dim"), Text(what), sep="")

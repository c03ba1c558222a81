"""Shared parts of the commands that serve a model through a gateway."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

ContextTokens = Annotated[
    int | None,
    typer.Option("--context", min=256, help="Tokens of context. Default: what fits into memory."),
]


def show_step(phase: str, what: str) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text(f"{phase:<8}", style="dim"), Text(what), sep="")

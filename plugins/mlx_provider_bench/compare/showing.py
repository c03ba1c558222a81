"""The report on the terminal, the files in their folder, the result as the last line."""

from __future__ import annotations

from pathlib import Path

import typer

from .markdown import report
from .pictures import draw
from .result import Result, as_json, save


def show(result: Result, out: Path | None, *, plots: bool) -> None:
    """Raises `NotInstalled` for plots without matplotlib."""
    if out is not None:
        save(result, out, draw(result, out) if plots else ())
    typer.echo(report(result), err=True)
    typer.echo(as_json(result))

"""Two checkouts in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from command_line import running


def checkouts(
    other: Annotated[Path, typer.Argument(help="Another checkout of this project.")],
    benchmark: Annotated[list[str], typer.Argument(help="A benchmark's name and options.")],
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each side.")] = 3,
) -> None:
    """This code beside another checkout's, in turn: `checkouts ../before engine --part stall`."""
    from checkouts import compare as measure

    running.print_result(measure(other, benchmark, rounds))

"""Measurements of the engine from inside, in this process."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from . import running


class EnginePart(StrEnum):
    mixed = "mixed"
    decode = "decode"
    stall = "stall"
    host = "host"


def engine(
    part: Annotated[
        list[EnginePart] | None, typer.Option(help="Repeat for several; all by default.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Weights of the random model.")] = "float32",
    hidden: Annotated[int, typer.Option(help="Hidden size of the random model.")] = 256,
    layers: Annotated[int, typer.Option(help="Layers of the random model.")] = 6,
) -> None:
    """Our engine beside mlx-lm's BatchGenerator: mixed load, decode rate, stalls, host time."""
    running.preload()
    from ..engine import bench as measure
    from ..engine import sizes

    parts = [p.value for p in part or list(EnginePart)]
    running.show(measure(parts, dtype=dtype, **sizes(hidden, layers)))

"""Measurements of the engine from inside, in this process."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from . import running
from .options import Dtype, Hidden, Layers


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
    plot: Annotated[Path | None, typer.Option(help="Write a PNG or SVG picture.")] = None,
) -> None:
    """Our engine beside mlx-lm's BatchGenerator: mixed load, decode rate, stalls, host time."""
    running.preload()
    from ..engine import bench as measure
    from ..engine import sizes

    parts = [p.value for p in part or list(EnginePart)]
    result = measure(parts, dtype=dtype, **sizes(hidden, layers))
    if plot is not None:
        from ..plot import plot_engine

        plot_engine(result, plot)
    running.show(result)


class DevicePart(StrEnum):
    kernels = "kernels"
    scheduler = "scheduler"
    allocator = "allocator"
    noise = "noise"


def device(
    part: Annotated[
        list[DevicePart] | None, typer.Option(help="Repeat for several; all by default.")
    ] = None,
    hidden: Hidden = 256,
    layers: Layers = 6,
    dtype: Dtype = "float32",
) -> None:
    """Machines that one does not have: launches, the scheduler, memory, kernels that round."""
    running.preload()
    from ..device import Plan
    from ..device import bench as measure

    parts = [p.value for p in part or list(DevicePart)]
    running.print_result(measure(Plan(parts, hidden, layers, dtype)))


def grammar(
    rows: Annotated[int, typer.Option(help="Rows that decode together.")] = 16,
    constrained: Annotated[
        list[int] | None, typer.Option(help="Rows with a grammar; repeatable. 0, 1, 8.")
    ] = None,
    vocabulary: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 152_000,
    steps: Annotated[int, typer.Option(help="Decode steps of one run.")] = 40,
    repeats: Annotated[int, typer.Option(help="Runs of each kind; the fastest counts.")] = 3,
    hidden: Hidden = 512,
    layers: Layers = 6,
    dtype: Dtype = "float32",
) -> None:
    """What constrained rows add to a decode step."""
    running.preload()
    from ..grammar import Plan
    from ..grammar import bench as measure

    counts = sorted({0, *(constrained or Plan().constrained)})
    plan = Plan(rows, counts, vocabulary, steps, repeats, hidden, layers, dtype)
    running.print_result(measure(plan))

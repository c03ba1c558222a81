"""Measurements of the engine from inside, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from command_line import running
from command_line.running import Dtype, Hidden, Layers


def accounts() -> None:
    """How long a short prompt waits beside the flood of another account, on curves of devices."""
    running.preload()
    from accounts import bench as measure

    running.print_result(measure())


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
    from grammar_masks import Plan
    from grammar_masks import bench as measure

    counts = sorted({0, *(constrained or Plan().constrained)})
    plan = Plan(rows, counts, vocabulary, steps, repeats, hidden, layers, dtype)
    running.print_result(measure(plan))


def gap() -> None:
    """The host's work in a step, and how long an imagined device waits for it."""
    running.preload()
    from host_gap import Plan
    from host_gap import bench as measure

    running.print_result(measure(Plan()))


def long_prompt(
    tokenizer: Annotated[Path, typer.Argument(help="A tokenizer.json.", exists=True)],
) -> None:
    """What rendering and tokenising of a prompt of 400 kB costs other threads."""
    running.preload()
    from long_prompt import Plan
    from long_prompt import bench as measure

    running.print_result(measure(Plan(tokenizer)))


def tower() -> None:
    """How long a stream waits for the image of another request, whole and in slices of layers."""
    running.preload()
    from tower_stall import bench as measure

    running.print_result(measure())

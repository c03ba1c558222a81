"""Turns of coding agents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlx_provider_bench.commands import running
from mlx_provider_bench.commands.options import Hidden, Layers
from mlx_provider_bench.report import print_rows

COLUMNS = {
    "session": "session",
    "thoughts": "thoughts",
    "without": "without",
    "result": "result",
    "prefilled": "prefilled",
    "passes to the call": "begun",
    "passes": "passes",
    "tokens": "tokens",
    "first byte here": "first_byte",
    "end here": "ended",
    "M3 Max first token": "devices.M3 Max, dense 8B.first_token",
    "call": "devices.M3 Max, dense 8B.first_byte",
    "end": "devices.M3 Max, dense 8B.ended",
    "M5 Max first token": "devices.M5 Max, dense 8B.first_token",
    "call ": "devices.M5 Max, dense 8B.first_byte",
    "end ": "devices.M5 Max, dense 8B.ended",
}


def agent_turn(
    template: Annotated[Path | None, typer.Option(help="A chat template.", exists=True)] = None,
    family: Annotated[str, typer.Option(help="Family of the model.")] = "qwen3",
    hidden: Hidden = 256,
    layers: Layers = 4,
) -> None:
    """Seconds from a tool's result to the next call of recorded agents, with parts left out."""
    running.preload()
    from agent_turn import Plan
    from agent_turn import bench as measure

    result = measure(Plan(template, family, hidden, layers))
    print_rows("Medians of the turns after a result", COLUMNS, result["turns"])
    running.print_result(result)

"""Options that several benchmarks have, and the end of each: its result."""

import json
from typing import Annotated, Any

import typer

from mlx_provider_bench.commands import preload, print_result

__all__ = ["Dtype", "Hidden", "Layers", "Rounds", "preload", "print_result", "show"]

Hidden = Annotated[int, typer.Option(help="Hidden size of the random models.")]
Layers = Annotated[int, typer.Option(help="Layers of the random models.")]
Rounds = Annotated[int, typer.Option(min=1, help="Runs of each side that count.")]
Dtype = Annotated[str, typer.Option(help="Of the weights.")]


def show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.pretty import Pretty

    Console(stderr=True).print(Pretty(result))
    typer.echo(json.dumps(result))

"""One model over several processes."""

from __future__ import annotations

from typing import Annotated

import typer

from mlx_provider_bench.commands import running
from mlx_provider_bench.commands.options import Hidden, Layers


def ranks(
    ranks: Annotated[str, typer.Option(help="Processes that share the model.")] = "1,2",
    streams: Annotated[str, typer.Option(help="Requests at once.")] = "1,4",
    form: Annotated[
        str, typer.Option("--format", help="float32, bfloat16, 4bit: of the random model.")
    ] = "float32",
    tokens: Annotated[int, typer.Option(min=4, help="Of each answer.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="The fastest step counts.")] = 2,
    hidden: Hidden = 256,
    layers: Layers = 4,
    peers: Annotated[bool, typer.Option(help="Beside mlx-lm's server.")] = True,
) -> None:
    """Time in collectives of one model over several processes, beside mlx-lm's server."""
    running.preload()
    from rank_costs import bench
    from ranked.plan import Plan

    counts, crowds = numbers(ranks, "ranks"), numbers(streams, "streams")
    running.print_result(bench(Plan(counts, crowds, form, tokens, rounds, hidden, layers, peers)))


def numbers(told: str, name: str) -> tuple[int, ...]:
    """Of a list with commas. Raises `BadRequest`."""
    from mlx_provider.errors import BadRequest

    found = tuple(int(each) for each in told.split(",") if each.strip().isdecimal())
    if len(found) != told.count(",") + 1 or min(found) < 1:
        raise BadRequest(f"{told!r}: numbers with commas between them", param=name)
    return found

"""How fast a model is."""

from __future__ import annotations

from typing import Annotated

import typer

from . import running


def speed(
    model: Annotated[str, typer.Argument(help="A folder, a Hub repository, or demo.")],
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; repeatable. 1, 4, 8.")
    ] = None,
    prompt: Annotated[
        list[int] | None,
        typer.Option(min=20, help="Tokens of a prompt; repeatable. 1000, 8000, 32000."),
    ] = None,
    reply: Annotated[int, typer.Option(min=2, help="Tokens of each answer at most.")] = 128,
) -> None:
    """First token and tokens per second of a model on this machine."""
    running.preload()
    from ..model_speed import Plan, bench

    plan = Plan(model, streams or Plan.streams, prompt or Plan.prompts, reply)
    running.print_result(bench(plan))

"""What a LiteLLM proxy costs."""

from __future__ import annotations

from typing import Annotated

import typer

from command_line import running


def gateway(
    model: Annotated[str, typer.Option(help="A folder, or a model of the package.")] = "demo",
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; repeatable. 1, 8, 32.")
    ] = None,
    reply: Annotated[int, typer.Option(help="Tokens of each answer at most.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that count.")] = 3,
) -> None:
    """The engine alone and through LiteLLM, and our share of what a token costs the proxy."""
    running.preload()
    from gateway_share import Plan
    from gateway_share import bench as measure

    running.print_result(measure(Plan(model, streams or Plan().streams, reply, rounds)))

"""What a streamed token costs a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from command_line import running


def stream_cost(
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; repeatable. 1, 8.")
    ] = None,
    reply: Annotated[int, typer.Option(help="Tokens of each answer at most.")] = 400,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that count.")] = 5,
    rapid: Annotated[
        Path | None, typer.Option(help="The program rapid-mlx, to measure it, too.")
    ] = None,
) -> None:
    """Processor time for a streamed token: this engine, mlx_lm.server, mlx_vlm.server."""
    running.preload()
    from stream_cost import Plan
    from stream_cost import bench as measure

    plan = Plan(streams=streams or Plan.streams, reply=reply, rounds=rounds, rapid=rapid)
    running.print_result(measure(plan))

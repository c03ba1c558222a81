"""What was computed before: prefixes and images."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from mlx_provider_bench.commands import running
from mlx_provider_bench.commands.options import Dtype, Hidden, Layers


def traffic() -> None:
    """Hit rates of the prefix cache over agent-like traffic, and its lookup time (no model)."""
    running.preload()
    from dataclasses import asdict

    from agent_traffic import lookup_seconds, run

    running.show(
        {"scenarios": [asdict(each) for each in run()], "lookup_seconds": lookup_seconds()}
    )


class VisionPart(StrEnum):
    repeat = "repeat"
    mixed = "mixed"


def vision(
    part: Annotated[
        list[VisionPart] | None, typer.Option(help="Repeat for several; all by default.")
    ] = None,
    family: Annotated[
        list[str] | None, typer.Option(help="qwen3_vl, gemma3, qwen3_5; repeatable.")
    ] = None,
    edge: Annotated[int, typer.Option(help="Pixels along the sides of the repeated image.")] = 448,
    trials: Annotated[int, typer.Option(help="Images; the fastest trial counts.")] = 3,
    requests: Annotated[int, typer.Option(help="Mixed requests, half of them with images.")] = 8,
    reply: Annotated[int, typer.Option(help="Tokens of each mixed reply.")] = 64,
    hidden: Hidden = 256,
    layers: Layers = 6,
    dtype: Dtype = "float32",
    peers: Annotated[bool, typer.Option("--peers", help="Beside mlx-vlm's server.")] = False,
) -> None:
    """Images seen before, and text and images together, over HTTP."""
    running.preload()
    from vision import Plan
    from vision import bench as measure

    plan = Plan(
        families=family or Plan().families,
        edge=edge,
        trials=trials,
        requests=requests,
        reply=reply,
        hidden=hidden,
        layers=layers,
        dtype=dtype,
        peers=peers,
        parts=[p.value for p in part or list(VisionPart)],
    )
    running.print_result(measure(plan))

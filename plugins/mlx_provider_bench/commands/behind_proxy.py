"""Measurements through a LiteLLM proxy."""

from __future__ import annotations

from typing import Annotated

import typer

from . import running
from .options import Hidden, Layers, Peers


def proxy(
    family: Annotated[
        list[str] | None, typer.Option(help="A tiny family; repeatable. llama, qwen3_5.")
    ] = None,
    form: Annotated[
        list[str] | None,
        typer.Option("--format", help="float32, bfloat16, 4bit; repeatable. All by default."),
    ] = None,
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; repeatable. 1, 4, 16.")
    ] = None,
    words: Annotated[
        int, typer.Option(help="Words of the shortest question; others: up to twice.")
    ] = 40,
    reply: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that the servers take.")] = 3,
    hidden: Hidden = 256,
    layers: Layers = 6,
    peers: Peers = False,
) -> None:
    """Behind one LiteLLM proxy: throughput, first token, answers in company as alone."""
    running.preload()
    from ..proxy import Plan
    from ..proxy import bench as measure

    plan = Plan(
        families=family or Plan().families,
        formats=form or Plan().formats,
        streams=streams or Plan().streams,
        words=words,
        reply=reply,
        rounds=rounds,
        hidden=hidden,
        layers=layers,
        peers=peers,
    )
    running.print_result(measure(plan))


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
    from ..gateway_share import Plan
    from ..gateway_share import bench as measure

    running.print_result(measure(Plan(model, streams or Plan().streams, reply, rounds)))

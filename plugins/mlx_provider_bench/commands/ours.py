"""Measurements of this engine: a model's speed, and the gain of a stored prefix."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..group import PROGRESS
from . import running
from .options import Dtype, Hidden, Layers


def speed(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder, a Hub repository, or demo.")],
    streams: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at once; repeatable. Default: 1, 4, 8."),
    ] = None,
    prompt: Annotated[
        list[int] | None,
        typer.Option(min=20, help="Tokens of a prompt; repeatable. Default: 1000, 8000, 32000."),
    ] = None,
    reply: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 128,
) -> None:
    """Measure time to first token and tokens per second of a model on this machine."""
    running.preload()
    from ..model_speed import Plan, bench

    plan = Plan(model, streams or Plan.streams, prompt or Plan.prompts, reply)
    running.print_result(bench(plan, context.meta[PROGRESS]))


class PrefixPart(StrEnum):
    ttft = "ttft"
    conversation = "conversation"


def prefix(
    context: typer.Context,
    part: Annotated[
        list[PrefixPart] | None, typer.Option(help="Repeat for several; all by default.")
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="A tiny family; +image: with an image before the document; repeatable."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(exists=True, help="A checkpoint's folder instead of random models."),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of the prompt; repeatable. Default: 1024, 4096, 16384."),
    ] = None,
    document: Annotated[int, typer.Option(help="Tokens of the conversation's document.")] = 17_000,
    turns: Annotated[int, typer.Option(help="Turns of the conversation.")] = 6,
    hidden: Hidden = 256,
    layers: Layers = 4,
    dtype: Dtype = "float32",
) -> None:
    """Measure what a stored prefix saves: time to first token, and a conversation."""
    running.preload()
    from ..prefix_cache import VARIANTS, Plan
    from ..prefix_cache import bench as measure

    default = Plan()
    talk = default.talk if variant is None else [v for v in variant if v in VARIANTS][:1]
    if model is not None:
        model = model.resolve()
        variant = talk = [model.name]
    running.print_result(
        measure(
            Plan(
                variants=variant or default.variants,
                sizes=tokens or default.sizes,
                hidden=hidden,
                layers=layers,
                dtype=dtype,
                model=model,
                talk=talk,
                talk_document=document,
                turns=turns,
                parts=[p.value for p in part or list(PrefixPart)],
            ),
            context.meta[PROGRESS],
        )
    )

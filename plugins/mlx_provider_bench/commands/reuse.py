"""What a stored prefix saves."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from . import running
from .options import Dtype, Hidden, Layers


class PrefixPart(StrEnum):
    ttft = "ttft"
    conversation = "conversation"


def prefix(
    part: Annotated[
        list[PrefixPart] | None, typer.Option(help="Repeat for several; all by default.")
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="A tiny family, with +image for one before the document; repeatable."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(exists=True, help="A checkpoint's folder, in place of random models."),
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Prompt length; repeatable. 1024, 4096, 16384.")
    ] = None,
    document: Annotated[int, typer.Option(help="Tokens of the conversation's document.")] = 17_000,
    turns: Annotated[int, typer.Option(help="Turns of the conversation.")] = 6,
    hidden: Hidden = 256,
    layers: Layers = 4,
    dtype: Dtype = "float32",
) -> None:
    """What a stored prefix saves: first tokens, a conversation."""
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
            )
        )
    )

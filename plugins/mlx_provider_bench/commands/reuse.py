"""What was computed before: prefixes and images, here and on servers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from . import running
from .options import Dtype, Hidden, Layers, Peers


def traffic() -> None:
    """Hit rates of the prefix cache over agent-like traffic, and its lookup time (no model)."""
    running.preload()
    from dataclasses import asdict

    from ..traffic import lookup_seconds, run

    running.show(
        {"scenarios": [asdict(each) for each in run()], "lookup_seconds": lookup_seconds()}
    )


class PrefixPart(StrEnum):
    ttft = "ttft"
    conversation = "conversation"
    lookup = "lookup"
    traffic = "traffic"


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
    lookup: Annotated[
        tuple[int, int], typer.Option(help="Tokens of an entry, and number of entries.")
    ] = (65_536, 100),
    hidden: Hidden = 256,
    layers: Layers = 4,
    dtype: Dtype = "float32",
    peers: Peers = False,
) -> None:
    """What a stored prefix saves: first tokens, a conversation, lookup, agent traffic."""
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
                lookup_tokens=lookup[0],
                lookup_entries=lookup[1],
                peers=peers,
                parts=[p.value for p in part or list(PrefixPart)],
            )
        )
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
    peers: Peers = False,
) -> None:
    """Images seen before, and text and images together, over HTTP."""
    running.preload()
    from ..vision import Plan
    from ..vision import bench as measure

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

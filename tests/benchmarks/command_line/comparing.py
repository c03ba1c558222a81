"""Compares ours with other servers, and our engine with mlx-lm's own batches."""

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from command_line import running
from command_line.running import Dtype, Hidden, Layers


class ComparePart(StrEnum):
    answers = "answers"
    speed = "speed"
    reuse = "reuse"
    stall = "stall"


class Peer(StrEnum):
    mlx_lm = "mlx-lm"
    mlx_vlm = "mlx-vlm"
    none = "none"


Out = Annotated[
    Path | None,
    typer.Option(help="Folder for report.md and result.json, updated during the run."),
]


def _finite(value: float) -> float:
    """Refuse infinity, and NaN, which the bounds of an option do not exclude."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


Parts = Annotated[
    list[ComparePart] | None, typer.Option(help="Repeat for several; all by default.")
]
Models = Annotated[
    list[str] | None,
    typer.Option(help="A folder or Hub repository; repeatable. Unset: random weights."),
]
Families = Annotated[
    list[str] | None,
    typer.Option(help="For random weights; repeatable. Default: llama, qwen3_5."),
]
Formats = Annotated[
    list[str] | None,
    typer.Option("--format", help="float32, bfloat16, 4bit; repeatable. All by default."),
]
Servers = Annotated[
    list[str] | None,
    typer.Option(help="NAME=URL[,model] of a running server; repeatable. Its key: NAME_API_KEY."),
]
Peers = Annotated[
    list[Peer] | None,
    typer.Option(help="Servers of installed packages to start; repeatable. Both by default."),
]
Words = Annotated[
    int, typer.Option(min=4, help="Words of the shortest question; others have up to twice.")
]
Limit = Annotated[float, typer.Option(min=1, callback=_finite, help="Seconds for one request.")]


def compare(
    part: Parts = None,
    model: Models = None,
    family: Families = None,
    form: Formats = None,
    server: Servers = None,
    peer: Peers = None,
    native: Annotated[
        bool, typer.Option(help="On a CPU, also measure ours in the checkpoint's dtype.")
    ] = True,
    streams: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at once; repeatable. Default: 1, 2, 4, 8, 16, 32."),
    ] = None,
    crowd: Annotated[int, typer.Option(min=1, help="Requests at once, for `answers`.")] = 16,
    words: Words = 40,
    reply: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 64,
    prompt: Annotated[int, typer.Option(min=20, help="Words of a long prompt.")] = 1000,
    edge: Annotated[int, typer.Option(min=28, help="Pixels along an image's sides.")] = 448,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each server.")] = 3,
    limit: Limit = 120.0,
    hidden: Hidden = 256,
    layers: Layers = 6,
    out: Out = None,
) -> None:
    """Compare ours with other servers behind one LiteLLM proxy: answers first, then speed."""
    running.preload()
    from compare.others import parse_other
    from compare.plan import Plan
    from compare.run import bench as measure

    default = Plan()
    plan = Plan(
        parts=[p.value for p in part or list(ComparePart)],
        models=model or (),
        families=family or default.families,
        formats=form or default.formats,
        hidden=hidden,
        layers=layers,
        peers=default.peers if peer is None else [p.value for p in peer if p is not Peer.none],
        others=[parse_other(each) for each in server or ()],
        native=native,
        streams=streams or default.streams,
        crowd=crowd,
        words=words,
        reply=reply,
        prompt=prompt,
        edge=edge,
        rounds=rounds,
        limit=limit,
    )
    from compare.result import show

    show(measure(plan, out), out)


def report(
    file: Annotated[list[Path], typer.Argument(help="Results of `compare`, or folders.")],
    out: Out = None,
) -> None:
    """Join several runs of `compare` in one report, for parts that were run separately."""
    from compare.result import merged, read, show

    show(merged([read(each) for each in file]), out)


class EnginePart(StrEnum):
    mixed = "mixed"
    decode = "decode"
    stall = "stall"


def engine(
    part: Annotated[
        list[EnginePart] | None, typer.Option(help="Repeat for several; all by default.")
    ] = None,
    dtype: Dtype = "float32",
    hidden: Hidden = 256,
    layers: Layers = 6,
) -> None:
    """Compare our engine with mlx-lm's BatchGenerator: mixed load, decoding, stalls."""
    running.preload()
    from batch_generator import bench as measure
    from batch_generator import sizes

    parts = [p.value for p in part or list(EnginePart)]
    running.show(measure(parts, dtype=dtype, **sizes(hidden, layers)))

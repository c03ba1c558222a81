"""The list of the benchmarks that developers run; the last line of each is JSON."""

import math
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_provider_bench.commands import PROGRESS, LongGroup, preload, print_result

benchmarks = typer.Typer(cls=LongGroup, no_args_is_help=True, help=__doc__)
Rounds = Annotated[int, typer.Option(min=1, help="Runs of each side that count.")]
Dtype = Annotated[str, typer.Option(help="Of the weights.")]
Hidden = Annotated[int, typer.Option(help="Hidden size of the random model.")]
Layers = Annotated[int, typer.Option(help="Layers of the random model.")]
ComparePart = StrEnum("ComparePart", ["answers", "speed", "reuse"])
EnginePart = StrEnum("EnginePart", ["decode", "stall"])
Peer = StrEnum("Peer", ["mlx-lm", "mlx-vlm", "none"])


def show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.pretty import Pretty

    Console(stderr=True).print(Pretty(result))
    print_result(result)


def finite(value: float) -> float:
    """Refuse infinity, and NaN, which the bounds of an option do not exclude."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


@benchmarks.command()
def compare(
    context: typer.Context,
    part: Annotated[
        list[ComparePart] | None, typer.Option(help="Repeat for several; all by default.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A folder or Hub repository. Unset: random weights.")
    ] = None,
    family: Annotated[
        str, typer.Option(help="Of random weights: llama, qwen3_5_text, ...")
    ] = "llama",
    form: Annotated[
        str, typer.Option("--format", help="Of random weights: float32, bfloat16, 4bit.")
    ] = "4bit",
    server: Annotated[
        list[str] | None,
        typer.Option(help="NAME=URL,MODEL of a running server; repeatable. Its key: NAME_API_KEY."),
    ] = None,
    peer: Annotated[
        list[Peer] | None,
        typer.Option(help="Servers of installed packages to start; repeatable. Both by default."),
    ] = None,
    streams: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at once; repeatable. Default: 1, 4, 16."),
    ] = None,
    crowd: Annotated[int, typer.Option(min=1, help="Requests at once, for `answers`.")] = 16,
    words: Annotated[
        int, typer.Option(min=4, help="Words of the shortest question; others have up to twice.")
    ] = 40,
    reply: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 64,
    prompt: Annotated[int, typer.Option(min=20, help="Words of a long prompt.")] = 1000,
    rounds: Rounds = 3,
    limit: Annotated[
        float, typer.Option(min=1, callback=finite, help="Seconds for one request.")
    ] = 120.0,
    hidden: Hidden = 256,
    layers: Layers = 6,
) -> None:
    """Compare ours with other servers behind one LiteLLM proxy: answers, speed, stored prefixes."""
    preload()
    from compare import PEERS, Plan, parse_other
    from compare import compare as measure

    names = dict(zip(("mlx-lm", "mlx-vlm"), PEERS, strict=True))
    plan = Plan(
        parts=[each.value for each in part or list(ComparePart)],
        model=model,
        family=family,
        form=form,
        hidden=hidden,
        layers=layers,
        peers=[names[each] for each in peer or list(Peer) if each != "none"],
        others=[parse_other(each) for each in server or ()],
        streams=streams or Plan.streams,
        crowd=crowd,
        words=words,
        reply=reply,
        prompt=prompt,
        rounds=rounds,
        limit=limit,
    )
    print_result(measure(plan, context.meta[PROGRESS]))


@benchmarks.command()
def engine(
    part: Annotated[
        list[EnginePart] | None, typer.Option(help="Repeat for several; all by default.")
    ] = None,
    dtype: Dtype = "float32",
    hidden: Hidden = 256,
    layers: Layers = 6,
) -> None:
    """Compare our engine with mlx-lm's BatchGenerator: decoding, and stalls of streams."""
    preload()
    from batch_generator import bench as measure

    parts = [each.value for each in part or list(EnginePart)]
    show(measure(parts, dtype, hidden, layers))


@benchmarks.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True}
)
def checkouts(
    other: Annotated[Path, typer.Argument(help="Another checkout of this project.")],
    benchmark: Annotated[list[str], typer.Argument(help="A benchmark's name and options.")],
    rounds: Rounds = 3,
) -> None:
    """This code beside another checkout's, in turn: `checkouts ../before engine --part stall`."""
    from checkouts import compare as measure

    print_result(measure(other, benchmark, rounds))


@benchmarks.command()
def budgets() -> None:
    """Tokens that agents with prompts of 60k compute on prefix budgets of 20k, 40k and 80k."""
    preload()
    from small_budgets import run

    show({"turns": [asdict(turns) for turns in run()]})


@benchmarks.command()
def restart() -> None:
    """Tokens that an agent with 60k computes after a restart."""
    preload()
    from restart import run

    show({"restarts": [asdict(restarted) for restarted in run()]})

"""The commands of `bench`: measurements that anyone can repeat; the last line is JSON."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

bench = typer.Typer()

Hidden = Annotated[int, typer.Option(help="Hidden size of the random models.")]
Layers = Annotated[int, typer.Option(help="Layers of the random models.")]
Dtype = Annotated[str, typer.Option(help="Weights of the random models.")]
Peers = Annotated[
    bool, typer.Option("--peers", help="Beside the servers of mlx-lm and mlx-vlm, over HTTP.")
]


class EnginePart(StrEnum):
    mixed = "mixed"
    decode = "decode"
    stall = "stall"
    host = "host"


@bench.command()
def engine(
    part: Annotated[
        list[EnginePart] | None, typer.Option(help="Repeat for several; all by default.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Weights of the random model.")] = "float32",
    hidden: Annotated[int, typer.Option(help="Hidden size of the random model.")] = 256,
    layers: Annotated[int, typer.Option(help="Layers of the random model.")] = 6,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG or SVG picture.")] = None,
) -> None:
    """Our engine beside mlx-lm's BatchGenerator: mixed load, decode rate, stalls, host time."""
    _preload()
    from .engine import bench as measure
    from .engine import sizes

    parts = [p.value for p in part or list(EnginePart)]
    result = measure(parts, dtype=dtype, **sizes(hidden, layers))
    if plot is not None:
        from .plot import plot_engine

        plot_engine(result, plot)
    _show(result)


class DevicePart(StrEnum):
    kernels = "kernels"
    scheduler = "scheduler"
    allocator = "allocator"
    noise = "noise"


@bench.command()
def device(
    part: Annotated[
        list[DevicePart] | None, typer.Option(help="Repeat for several; all by default.")
    ] = None,
    hidden: Hidden = 256,
    layers: Layers = 6,
    dtype: Dtype = "float32",
) -> None:
    """Machines that one does not have: launches, the scheduler, memory, kernels that round."""
    _preload()
    from .device import Plan
    from .device import bench as measure

    parts = [p.value for p in part or list(DevicePart)]
    _print(measure(Plan(parts, hidden, layers, dtype)))


@bench.command()
def traffic() -> None:
    """Hit rates of the prefix cache over agent-like traffic, and its lookup time (no model)."""
    _preload()
    from dataclasses import asdict

    from .traffic import lookup_seconds, run

    _show({"scenarios": [asdict(each) for each in run()], "lookup_seconds": lookup_seconds()})


class PrefixPart(StrEnum):
    ttft = "ttft"
    conversation = "conversation"
    lookup = "lookup"
    traffic = "traffic"


@bench.command()
def prefix(
    part: Annotated[
        list[PrefixPart] | None, typer.Option(help="Repeat for several; all by default.")
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="A tiny family, with +image for one before the document; repeatable."),
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
    _preload()
    from .prefix_cache import VARIANTS, Plan
    from .prefix_cache import bench as measure

    default = Plan()
    talk = default.talk if variant is None else [v for v in variant if v in VARIANTS][:1]
    _print(
        measure(
            Plan(
                variants=variant or default.variants,
                sizes=tokens or default.sizes,
                hidden=hidden,
                layers=layers,
                dtype=dtype,
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


@bench.command()
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
    _preload()
    from .vision import Plan
    from .vision import bench as measure

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
    _print(measure(plan))


@bench.command()
def grammar(
    rows: Annotated[int, typer.Option(help="Rows that decode together.")] = 16,
    constrained: Annotated[
        list[int] | None, typer.Option(help="Rows with a grammar; repeatable. 0, 1, 8.")
    ] = None,
    vocabulary: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 152_000,
    steps: Annotated[int, typer.Option(help="Decode steps of one run.")] = 40,
    repeats: Annotated[int, typer.Option(help="Runs of each kind; the fastest counts.")] = 3,
    hidden: Hidden = 512,
    layers: Layers = 6,
    dtype: Dtype = "float32",
) -> None:
    """What constrained rows add to a decode step."""
    _preload()
    from .grammar import Plan
    from .grammar import bench as measure

    counts = sorted({0, *(constrained or Plan().constrained)})
    _print(measure(Plan(rows, counts, vocabulary, steps, repeats, hidden, layers, dtype)))


@bench.command()
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
    _preload()
    from .proxy import Plan
    from .proxy import bench as measure

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
    _print(measure(plan))


@bench.command()
def gateway(
    model: Annotated[str, typer.Option(help="A folder, or a model of the package.")] = "demo",
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; repeatable. 1, 8, 32.")
    ] = None,
    reply: Annotated[int, typer.Option(help="Tokens of each answer at most.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that count.")] = 3,
) -> None:
    """The engine alone and through LiteLLM, and our share of what a token costs the proxy."""
    _preload()
    from .gateway_share import Plan
    from .gateway_share import bench as measure

    _print(measure(Plan(model, streams or Plan().streams, reply, rounds)))


class SpeculationPart(StrEnum):
    rows = "rows"
    newcomer = "newcomer"
    rewrite = "rewrite"
    curves = "curves"


@bench.command()
def speculation(
    part: Annotated[
        list[SpeculationPart] | None, typer.Option(help="Repeat for several; all by default.")
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows that decode together; repeatable. 1 to 16.")
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(help="Drafts that hold on the random model, 0 to 1; repeatable."),
    ] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, max=7, help="Drafts of a row.")] = 7,
    reply: Annotated[int, typer.Option(help="Tokens of each reply.")] = 192,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each side that count.")] = 3,
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint's folder, in place of a random model.")
    ] = None,
    drafter: Annotated[str, typer.Option(help="Who guesses for the checkpoint.")] = "auto",
    draft_model: Annotated[
        str | None, typer.Option(help="Folder of a smaller model, for the drafter `model`.")
    ] = None,
    prompt: Annotated[
        Path | None, typer.Option(help="A text from which the checkpoint's prompts are cut.")
    ] = None,
    hidden: Hidden = 256,
    layers: Layers = 6,
    dtype: Dtype = "float32",
) -> None:
    """Drafts: rates with and without, a newcomer's first token, a file rewritten, device curves."""
    _preload()
    from .speculation import Plan
    from .speculation import bench as measure

    default = Plan()
    plan = Plan(
        parts=[p.value for p in part or list(SpeculationPart)],
        rows=rows or default.rows,
        shares=share or default.shares,
        most=draft_tokens,
        reply=reply,
        rounds=rounds,
        hidden=hidden,
        layers=layers,
        dtype=dtype,
        model=model,
        drafter=drafter,
        draft_model=draft_model,
        prompt=prompt,
    )
    _print(measure(plan))


class DraftCase(StrEnum):
    mtp = "mtp"
    model = "model"


@bench.command()
def drafts(
    case: Annotated[
        list[DraftCase] | None, typer.Option(help="Who guesses; repeatable. Both by default.")
    ] = None,
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; repeatable. 1, 4.")
    ] = None,
    reply: Annotated[int, typer.Option(help="Tokens of each answer.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that count.")] = 3,
    hidden: Hidden = 512,
    layers: Layers = 12,
    dtype: Dtype = "float32",
) -> None:
    """Drafts of ours and of the servers of mlx-lm and mlx-vlm: gain, newcomers, same answers."""
    _preload()
    from .drafts import Plan
    from .drafts import bench as measure

    plan = Plan(
        cases=[each.value for each in case or list(DraftCase)],
        streams=streams or Plan().streams,
        reply=reply,
        rounds=rounds,
        hidden=hidden,
        layers=layers,
        dtype=dtype,
    )
    _print(measure(plan))


class SparsePart(StrEnum):
    needle = "needle"
    prefill = "prefill"
    curves = "curves"


@bench.command()
def sparse(
    part: Annotated[
        list[SparsePart] | None, typer.Option(help="Repeat for several; all by default.")
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(min=0.1, max=1, help="Of a prompt that is kept; repeatable; 1: all of it."),
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(min=256, help="Tokens of the talks; repeatable. 350.")
    ] = None,
    prompt: Annotated[int, typer.Option(min=256, help="Tokens of the timed prompt.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each share.")] = 3,
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint's folder, in place of the package's models.")
    ] = None,
    draft_model: Annotated[
        Path | None, typer.Option(help="Folder of the smaller model that scores its prompts.")
    ] = None,
    hidden: Hidden = 256,
    layers: Layers = 6,
    dtype: Dtype = "float32",
) -> None:
    """Sparse prefill: what it saves, what it forgets, a long prompt on device curves."""
    _preload()
    from .sparse import Plan
    from .sparse import bench as measure

    default = Plan()
    plan = Plan(
        parts=[p.value for p in part or list(SparsePart)],
        shares=share or default.shares,
        lengths=length or default.lengths,
        prompt=prompt,
        rounds=rounds,
        hidden=hidden,
        layers=layers,
        dtype=dtype,
        model=model,
        draft_model=draft_model,
    )
    _print(measure(plan))


@bench.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def compare(
    other: Annotated[Path, typer.Argument(help="Another checkout of this project.")],
    benchmark: Annotated[list[str], typer.Argument(help="A benchmark's name and options.")],
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each side.")] = 3,
) -> None:
    """This code beside another checkout's, in turn: `compare ../before engine --part stall`."""
    from .comparison import compare as measure

    _print(measure(other, benchmark, rounds))


def _preload() -> None:
    """As an engine process starts: the BLAS must be loaded before MLX is.

    Raises `NotInstalled` where MLX is missing.
    """
    from mlx_provider.config import engine_settings
    from mlx_provider.upstream import blas, heap
    from mlx_provider.upstream.installed import require_mlx

    blas.preload(engine_settings().blas)
    heap.keep_freed()
    require_mlx()


def _show(result: dict[str, Any]) -> None:
    import json

    from rich.console import Console
    from rich.pretty import Pretty

    Console(stderr=True).print(Pretty(result))
    typer.echo(json.dumps(result))


def _print(result: dict[str, Any]) -> None:
    """The result as the last line; the benchmark has shown its table."""
    import json

    typer.echo(json.dumps(result))

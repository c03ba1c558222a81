"""Tokens that are guessed ahead, and prompts of which some tokens are left out."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from command_line import running
from command_line.running import Dtype, Hidden, Layers
from mlx_provider_bench.report import print_rows


class SpeculationPart(StrEnum):
    rows = "rows"
    newcomer = "newcomer"
    rewrite = "rewrite"
    curves = "curves"
    sources = "sources"


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
    running.preload()
    from speculation import Plan
    from speculation import bench as measure

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
    running.print_result(measure(plan))


CALL_COLUMNS = {
    "choice": "choice",
    "forced": "forced",
    "foretold": "foretold",
    "looked up": "looked_up",
    "tokens": "tokens",
    "passes": "passes",
    "tokens per pass": "per_pass",
    "drafts that hold": "held",
}


def calls(
    tokenizer: Annotated[
        Path | None, typer.Option(help="A folder with tokenizer.json.", exists=True)
    ] = None,
    most: Annotated[int | None, typer.Option(help="Scenarios; all by default.")] = None,
) -> None:
    """Tokens per pass inside tool calls, with text that is forced, foretold or looked up."""
    running.preload()
    from call_forecasts import Plan
    from call_forecasts import bench as measure

    result = measure(Plan(tokenizer, most))
    print_rows("Calls of `eval tools`", CALL_COLUMNS, result["rows"])
    running.print_result(result)


class DraftCase(StrEnum):
    mtp = "mtp"
    model = "model"


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
    running.preload()
    from drafts import Plan
    from drafts import bench as measure

    plan = Plan(
        cases=[each.value for each in case or list(DraftCase)],
        streams=streams or Plan().streams,
        reply=reply,
        rounds=rounds,
        hidden=hidden,
        layers=layers,
        dtype=dtype,
    )
    running.print_result(measure(plan))


def sparse(
    share: Annotated[
        list[float] | None,
        typer.Option(min=0.1, max=1, help="Of a prompt that is kept; repeatable; 1: all of it."),
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
    """Sparse prefill: time to first token."""
    running.preload()
    from sparse_prefill import Plan
    from sparse_prefill import bench as measure

    default = Plan()
    plan = Plan(
        shares=share or default.shares,
        prompt=prompt,
        rounds=rounds,
        hidden=hidden,
        layers=layers,
        dtype=dtype,
        model=model,
        draft_model=draft_model,
    )
    running.print_result(measure(plan))

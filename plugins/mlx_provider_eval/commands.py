"""The commands of `eval`. Each imports its modules when it runs, makes a plan (`ToolCalls` or
`Needles`), and measures one subject after the other: a model with options."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from .needle import Needles
    from .subjects import Result
    from .tools import ToolCalls

WIDTH = 150  # columns of a table that goes to a file
HELP = "Find the model, parser and options that answer best on this machine."
evaluate = typer.Typer(no_args_is_help=True, help=HELP)
Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Hub ids, folders, or demo.")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="An option of model_info.mlx. Several values are compared; `default` leaves it out.",
    ),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of a reply, with thoughts.")]
Body = Annotated[
    str, typer.Option(metavar="JSON", help="Further fields, such as chat_template_kwargs.")
]
Out = Annotated[
    typer.FileTextWrite | None,
    typer.Option(lazy=False, encoding="utf-8", help="File for the result as JSON."),
]


@evaluate.command()
def tools(
    context: typer.Context,
    model: Models,
    option: Options = None,
    scenarios: Annotated[
        list[Path] | None,
        typer.Option(help="A file of your own scenarios instead of ours. Repeatable."),
    ] = None,
    max_tokens: MaxTokens = 2048,
    body: Body = "{}",
    out: Out = None,
) -> None:
    """Score tool calls through a real gateway by kind, and compare models or options.

    Decoding is greedy. Only a model that is not on this machine needs the network."""
    from .scenario import read, shipped_scenarios
    from .tools import ToolCalls

    plan = ToolCalls(read(scenarios or shipped_scenarios()), max_tokens, _object(body))
    _run(context, plan, model, option or [], out)


@evaluate.command()
def needle(
    context: typer.Context,
    model: Models,
    option: Options = None,
    least: Annotated[
        int, typer.Option("--from", min=64, help="Tokens of the shortest prompt.")
    ] = 1024,
    limit: Annotated[
        int | None,
        typer.Option(min=64, help="Tokens of the longest. Default: what model and memory allow."),
    ] = None,
    needles: Annotated[int, typer.Option(min=1, help="How often to ask each cell.")] = 3,
    max_tokens: MaxTokens = 64,
    body: Body = "{}",
    out: Out = None,
) -> None:
    """Measure what a model finds in long prompts, by length and depth, and compare options.

    Lengths double up to the model's context. Decoding is greedy."""
    from .needle import Needles

    plan = Needles(least, limit, needles, max_tokens, _object(body))
    _run(context, plan, model, option or [], out)


def _object(written: str) -> dict[str, Any]:
    try:
        found = json.loads(written)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"--body {written}: write a JSON object")
    return found


def _run(
    context: typer.Context, plan: ToolCalls | Needles, models: list[str], options: list[str],
    out: typer.FileTextWrite | None,
) -> None:  # fmt: skip
    """Measure each subject, write all results to `out` after each, and print a table at the end.
    Exit code 1: nothing was measured. Raises all errors of the input before the start, and
    `EngineUnavailable` if the gateway has ended."""
    from rich.console import Console

    from mlx_provider.commands import PluginRegistry, long_command

    from .subjects import check_subjects, describe_run, load_subjects, make_subjects

    subjects = make_subjects(models, options)
    check_subjects(subjects, PluginRegistry.of(context))
    found: list[Result] = []
    with (
        long_command(partial(typer.echo, err=True)) as progress,
        closing(load_subjects(subjects, progress)) as stages,
    ):
        for stage in stages:
            # a dictionary says why the subject did not load
            found.append(stage if isinstance(stage, dict) else plan.measure(stage, progress))
            if out is not None:
                head = {"eval": plan.name, **describe_run(), **plan.as_json()}
                out.seek(0)
                json.dump({**head, "subjects": found}, out, indent=1, ensure_ascii=False)
                out.flush()
    for result in found:
        if "skipped" in result:
            typer.echo(f"{result['label']}: not measured: {result['skipped']}", err=True)
    measured = [result for result in found if "skipped" not in result]
    if not measured:
        raise typer.Exit(1)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(plan.report(measured))

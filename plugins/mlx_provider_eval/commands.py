"""The commands of `eval`. Each imports its modules when it runs."""

from __future__ import annotations

import json
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from .subjects import Subject

evaluate = typer.Typer(
    no_args_is_help=True,
    help="Find the model, parser, options and context that answer best on this machine.",
)

Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Hub ids, folders, or demo.")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="An operator's option, as in model_info.mlx; several values of one name are compared, "
        "`default` leaves it out. Repeatable.",
    ),
]
Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME=VALUE",
        help="A variable of the engine's environment; several values are compared, as above.",
    ),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of a reply, with thoughts.")]
Said = Annotated[
    str,
    typer.Option(
        metavar="JSON",
        help='Further fields of requests: {"chat_template_kwargs": {"enable_thinking": false}}.',
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="Folder for the result as JSON, updated after each model.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")]


@evaluate.command()
def tools(
    context: typer.Context,
    model: Models,
    option: Options = None,
    env: Variables = None,
    scenarios: Annotated[
        list[Path] | None,
        typer.Option(help="A file of your own scenarios instead of ours. Repeatable."),
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="Only scenarios of this kind. Repeatable.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="How often to ask each scenario.")] = 1,
    at_once: Annotated[int, typer.Option(min=1, help="Scenarios to ask at once.")] = 1,
    max_tokens: MaxTokens = 2048,
    body: Said = "{}",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Score tool calls through a real gateway by kind, and compare models or options.

    Decoding is greedy. Only a model that is not on this machine needs the network.
    """
    from . import tools as measuring
    from . import tools_report as report
    from .running import Evaluation, Report, run, show
    from .scenario import read, shipped

    asked = _of_kinds(read(scenarios or shipped()), kind)
    plan = measuring.Plan(asked, repeat, at_once, max_tokens, _object(body))
    evaluation = Evaluation(
        name="tools",
        asks=lambda staged: len(asked) * repeat,
        measured=partial(measuring.measured, plan),
        whole=partial(measuring.whole, plan),
        report=lambda it: Report(report.tables(it), report.guidance(it)),
    )
    result = run(evaluation, _chosen(context, model, option, env, out), out)
    show(evaluation, result, out, as_json=as_json)


class Hay(StrEnum):
    talk = "talk"
    document = "document"


Haystack = Annotated[
    Hay | None, typer.Option(help="Default: document, or talk for the models of the package.")
]
Least = Annotated[int, typer.Option("--from", min=64, help="Tokens of the shortest prompt.")]
Limit = Annotated[
    int | None,
    typer.Option(min=64, help="Tokens of the longest one. Default: what model and memory allow."),
]
Depths = Annotated[
    list[int] | None,
    typer.Option(
        min=0,
        max=100,
        help="Percent of the text before it. Repeatable. Default: 0, 25, 50, 75, 100.",
    ),
]


@evaluate.command()
def needle(
    context: typer.Context,
    model: Models,
    option: Options = None,
    env: Variables = None,
    haystack: Haystack = None,
    least: Least = 1024,
    limit: Limit = None,
    depth: Depths = None,
    needles: Annotated[int, typer.Option(min=1, help="How often to ask each cell.")] = 3,
    max_tokens: MaxTokens = 64,
    body: Said = "{}",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a model finds in long prompts, by length and depth, and compare options.

    Lengths double up to the model's context. Decoding is greedy.
    """
    from . import needle as measuring
    from . import needle_report as report
    from .running import Evaluation, Report, run, show

    plan = measuring.Plan(
        haystack=haystack.value if haystack else "",
        least=least,
        limit=limit,
        depths=sorted({*(depth or measuring.Plan().depths)}),
        needles=needles,
        max_tokens=max_tokens,
        said=_object(body),
    )
    evaluation = Evaluation(
        name="needle",
        asks=partial(measuring.asks, plan),
        measured=partial(measuring.measured, plan),
        whole=partial(measuring.whole, plan),
        report=lambda it: Report(report.tables(it), report.guidance(it)),
    )
    result = run(evaluation, _chosen(context, model, option, env, out), out)
    show(evaluation, result, out, as_json=as_json)


def _of_kinds(found: list[Any], kinds: list[str] | None) -> list[Any]:
    there = list(dict.fromkeys(each.kind for each in found))
    if unknown := sorted({*(kinds or ())} - {*there}):
        raise typer.BadParameter(
            f"no such kind: {', '.join(unknown)}; there are {', '.join(there)}"
        )
    return [each for each in found if not kinds or each.kind in kinds]


def _object(written: str) -> dict[str, Any]:
    try:
        found = json.loads(written)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"--body {written}: write a JSON object")
    return found


def _chosen(
    context: typer.Context,
    models: list[str],
    options: list[str] | None,
    variables: list[str] | None,
    out: Path | None,
) -> list[Subject]:
    """The subjects to compare. Raises every error that they can have before a start."""
    from mlx_provider.commands import PluginRegistry

    from .report import require_writable
    from .stage import prepare
    from .subjects import subjects, values

    chosen = subjects(models, values(options or [], "--option"), values(variables or [], "--env"))
    if out is not None:
        require_writable(out, "--out")
    prepare(chosen, PluginRegistry.of(context))
    return chosen

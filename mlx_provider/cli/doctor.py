"""`mlx-provider doctor`: finds problems on this machine, with their remedies."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..registry import PluginRegistry

if TYPE_CHECKING:
    from ..doctor import Finding

STYLES = {"fail": "bold red", "warn": "yellow", "note": "cyan", "ok": "green"}


def doctor(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A model: Hub id, folder, or `demo`.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Skip the test token, which needs an engine and a proxy."),
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not look up a model on the Hub.")
    ] = False,
) -> None:
    """Check this machine, and optionally a model. Exit code 0: no check fails."""
    from ..doctor import Subject, by_severity, examine, healthy
    from ..doctor import as_json as in_json

    registry = PluginRegistry.of(context)
    subject = Subject(model, offline=offline, discover=lambda environ: registry)
    with Console(stderr=True).status("checking ..."):
        found = by_severity(examine(subject, thorough=not quick))
    if as_json:
        typer.echo(json.dumps(in_json(found, model=model, version=__version__), indent=2))
    else:
        console = Console(highlight=False)
        console.print(table(found))
        console.print(verdict(found, model))
    raise typer.Exit(0 if healthy(found) else 1)


def table(found: Sequence[Finding]) -> Table:
    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for each in found:
        mark = Text(each.state, style=STYLES[each.state])
        made.add_row(mark, Text(each.name, style="dim"), Text(each.what))
        if each.remedy:
            made.add_row("", "", Text(f"-> {each.remedy}", style="bold"))
    return made


def verdict(found: Sequence[Finding], model: str | None) -> str:
    count = Counter(each.state for each in found)
    summary = f"\n{count['fail']} fail, {count['warn']} could be better, {count['ok']} are right"
    named = "" if model else "; name a model to have it examined, too: `mlx-provider doctor demo`"
    return summary + named

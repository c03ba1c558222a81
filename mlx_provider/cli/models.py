"""`mlx-provider pull`, `list` and `rm`: the models on this machine.

`mlx-provider doctor`: finds problems on this machine, with their remedies.
"""

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
from ..errors import BadRequest, MLXProviderError
from ..registry import PluginRegistry

if TYPE_CHECKING:
    from ..doctor import Finding
    from ..serving.on_disk import OnDisk


Repository = Annotated[str, typer.Argument(help="OWNER/NAME or OWNER/NAME@REVISION on the Hub.")]


def pull(context: typer.Context, model: Repository) -> None:
    """Download or update a model in the Hub cache. Continues an interrupted download."""
    from ..gateway.models import size
    from ..serving.hub import checkpoint, download, is_repository

    model = model.removeprefix("mlx/")
    if not is_repository(model):
        raise BadRequest(f"{model} is not a repository on the Hub: give OWNER/NAME", param="model")
    registry = PluginRegistry.of(context)
    registry.family_for(checkpoint(model).config)  # refused before a download of gigabytes
    folder = download(model)
    typer.echo(f"{model}: {size(checkpoint(model).weight_bytes)} of weights in {folder}")
    typer.echo(f"serve it: mlx-provider up {model}")


def show_models(context: typer.Context) -> None:
    """List the models in the Hub cache and in LM Studio's folders, with their sizes."""
    from ..gateway.models import size
    from ..serving.hub import cache_root
    from ..serving.on_disk import models_on_disk

    registry = PluginRegistry.of(context)
    found = models_on_disk()
    if not found:
        typer.echo(f"none yet; `demo` is part of this package; the Hub cache is {cache_root()}")
        return
    table = Table.grid(padding=(0, 2))
    for each in found:
        table.add_row(
            Text(each.name, overflow="fold"), Text(size(each.size)), Text(_state(each, registry))
        )
    Console(highlight=False).print(table)
    typer.echo(f"{size(sum(each.size for each in found))}; the Hub cache is {cache_root()}")


def _state(found: OnDisk, registry: PluginRegistry) -> str:
    """The family that serves it, or why none does."""
    from ..serving.hub import checkpoint

    if found.fault:
        return found.fault
    try:
        return f"family {registry.family_for(checkpoint(found.name).config)[0].name}"
    except MLXProviderError as error:
        return error.message


def rm(model: Repository) -> None:
    """Remove a model from the Hub cache."""
    from ..gateway.models import size
    from ..serving.on_disk import remove

    model = model.removeprefix("mlx/")
    typer.echo(f"{model} is removed, {size(remove(model))}")


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

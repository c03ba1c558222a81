"""`mlx-provider pull`, `list` and `rm`: the models on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import BadRequest, MLXProviderError
from ..registry import PluginRegistry

if TYPE_CHECKING:
    from ..serving.on_disk import OnDisk

Repository = Annotated[str, typer.Argument(help="OWNER/NAME or OWNER/NAME@REVISION on the Hub.")]


def pull(context: typer.Context, model: Repository) -> None:
    """Download or update a model in the Hub cache. Continues an interrupted download."""
    from ..gateway.models import size
    from ..serving.checkpoint import checkpoint
    from ..serving.hub import download, is_repository

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
    from ..serving.checkpoint import checkpoint

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

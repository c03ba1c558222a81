"""`mlx-provider init`: the files of a LiteLLM proxy for a model that fits this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..registry import PluginRegistry
from .gateway_commands import ContextTokens


def init(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Hub id, folder, or demo. Default: the best one here."),
    ] = None,
    tokens: ContextTokens = None,
    folder: Annotated[Path, typer.Option(help="Where the files are written.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Write config.yaml and .env for a LiteLLM proxy. Downloads only the model's config."""
    from ..gateway.files import START, write_pair
    from ..gateway.models import chosen, device_memory, size

    registry = PluginRegistry.of(context)
    memory = device_memory()
    found = chosen(model, registry, memory, tokens)
    paths = write_pair(folder, found.served(), limited_by=found.limited_by, force=force)
    typer.echo(f"{found.summary}, family {found.family}; {size(memory)} for models")
    typer.echo(f"written: {', '.join(map(str, paths))}")
    where = "" if folder == Path() else f"cd {folder}; "
    typer.echo(f"start it: {where}{START}")

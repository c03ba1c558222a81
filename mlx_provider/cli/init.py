"""`mlx-provider init`: the files of a LiteLLM proxy for a model that fits this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..registry import PluginRegistry


def init(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Hub id, folder, or demo; else the best that is here.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--context", min=256, help="Tokens; else what fits into memory.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where the files are written.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
) -> None:
    """Write config.yaml and .env for a LiteLLM proxy. Downloads nothing but the model's config."""
    from ..gateway.files import START, write_pair
    from ..gateway.models import automatic, candidate, device_memory, require_fit, size

    registry = context.find_object(PluginRegistry) or PluginRegistry.discover()
    memory = device_memory()
    found = (
        automatic(registry, memory, tokens)
        if model is None
        else candidate(model, registry, memory, tokens)
    )
    require_fit(found, memory, tokens)
    paths = write_pair(folder, found.served(), force=force)
    typer.echo(f"{found.told}, family {found.family}; {size(memory)} for models")
    typer.echo(f"written: {', '.join(map(str, paths))}")
    where = "" if folder == Path() else f"cd {folder}; "
    typer.echo(f"start it: {where}{START}")

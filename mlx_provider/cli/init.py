"""`mlx-provider init`: the files of a LiteLLM proxy for a model that fits this machine."""

from __future__ import annotations

import sys
from dataclasses import replace
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
    engine: Annotated[
        list[str] | None,
        typer.Option(help="http://host:port of an engine that serves it; repeatable."),
    ] = None,
    fallback: Annotated[
        list[str] | None,
        typer.Option(
            help="provider/model that answers if every engine fails or a prompt is too long; "
            "repeatable. Only with --engine."
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(help="redis://host:port shared by several proxies. Only with --engine."),
    ] = None,
    stock: Annotated[
        bool,
        typer.Option("--stock", help="For a LiteLLM without this package. Only with --engine."),
    ] = False,
) -> None:
    """Write config.yaml and .env for a LiteLLM proxy. Downloads only the model's config."""
    if engine:
        _write_fleet(context, model, tokens, folder, force, engine, fallback, redis, stock)
        return
    if fallback or redis or stock:
        raise typer.BadParameter("--fallback, --redis and --stock need engines: add --engine")
    from ..gateway.files import START, write_pair
    from ..gateway.models import chosen, device_memory, size

    registry = PluginRegistry.of(context)
    memory = device_memory()
    found = chosen(model, registry, memory, tokens)
    paths = write_pair(folder, found.served(), force=force)
    typer.echo(f"{found.summary}, family {found.family}; {size(memory)} for models")
    _tell(paths, folder, START)


def _write_fleet(
    context: typer.Context,
    model: str | None,
    tokens: int | None,
    folder: Path,
    force: bool,
    engines: list[str],
    fallbacks: list[str] | None,
    redis: str | None,
    stock: bool,
) -> None:
    """The same for engines on other machines.

    The engines know what fits into their memory, and may allow a longer context than the model's.
    """
    from ..gateway.files import START, write_pair
    from ..gateway.fleet import Fleet
    from ..gateway.models import candidate

    if model is None:
        raise typer.BadParameter("name the model that the engines serve")
    fleet = Fleet(tuple(engines), tuple(fallbacks or ()), redis, stock)
    registry = PluginRegistry.of(context)
    found = candidate(model, registry, sys.maxsize, tokens)
    length = tokens or found.own_context or found.context
    served = replace(found.served(), context=length)
    paths = write_pair(folder, served, fleet, force=force)
    typer.echo(f"{found.model}, context {length:,}, on {len(engines)} engines")
    for name, address in fleet.keys.items():
        typer.echo(f"put the key of {address} into {folder / '.env'} as {name}")
    _tell(paths, folder, START)


def _tell(paths: list[Path], folder: Path, start: str) -> None:
    typer.echo(f"written: {', '.join(map(str, paths))}")
    where = "" if folder == Path() else f"cd {folder}; "
    typer.echo(f"start it: {where}{start}")

"""The command `mlx-provider eval`: find the model, parser and options that answer best."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_provider import hookimpl

if TYPE_CHECKING:
    import typer

mlx_provider_api = 1


@hookimpl
def mlx_register_commands(cli: typer.Typer) -> None:
    from .commands import evaluate

    cli.add_typer(evaluate, name="eval")

"""The command `mlx-provider bench`: measurements that anyone can repeat. No request needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_provider import hookimpl

if TYPE_CHECKING:
    import typer

mlx_provider_api = 1


@hookimpl
def mlx_register_commands(cli: typer.Typer) -> None:
    from .commands import bench

    cli.add_typer(bench, name="bench")

"""The common part of all commands: before the measurement, and with the result."""

from __future__ import annotations

from typing import Any

import typer


def preload() -> None:
    """Set up this process like an engine: its BLAS must be loaded before MLX. Raises `NotInstalled`
    if MLX is missing."""
    from mlx_provider.commands import prepare_mlx

    prepare_mlx()


def show(result: dict[str, Any]) -> None:
    import json

    from rich.console import Console
    from rich.pretty import Pretty

    Console(stderr=True).print(Pretty(result))
    typer.echo(json.dumps(result))


def print_result(result: dict[str, Any]) -> None:
    import json

    typer.echo(json.dumps(result))

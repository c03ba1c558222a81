"""What every command does before it measures, and with what it has measured."""

from __future__ import annotations

from typing import Any

import typer


def preload() -> None:
    """As an engine process starts: the BLAS must be loaded before MLX is.

    Raises `NotInstalled` where MLX is missing.
    """
    from mlx_provider.commands import prepare_mlx

    prepare_mlx()


def show(result: dict[str, Any]) -> None:
    import json

    from rich.console import Console
    from rich.pretty import Pretty

    Console(stderr=True).print(Pretty(result))
    typer.echo(json.dumps(result))


def print_result(result: dict[str, Any]) -> None:
    """The result as the last line; the benchmark has shown its table."""
    import json

    typer.echo(json.dumps(result))

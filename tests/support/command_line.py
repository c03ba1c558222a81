"""`mlx-provider` in the process of the tests."""

import os
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from mlx_provider.cli.app import build
from mlx_provider.registry import PluginRegistry


def invoke(*words: str, plugins: PluginRegistry | str | None = "", **options: Any) -> Result:
    """`plugins`: names, separated by commas; what was found of them; or `None`, for all that the
    environment allows. `options`: of click."""
    chosen = {"MLX_PROVIDER_PLUGINS": plugins} if isinstance(plugins, str) else os.environ
    known = plugins if isinstance(plugins, PluginRegistry) else PluginRegistry.discover(chosen)
    return CliRunner().invoke(build(known), words, obj=known, **options)


def told(result: Result) -> str:
    """What it says, and the error that ends it."""
    return result.stdout + str(result.exception or "")

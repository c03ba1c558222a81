"""`mlx-provider` in the process of the tests."""

from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from mlx_provider.cli.app import build
from mlx_provider.registry import PluginRegistry


def invoke(*words: str, plugins: PluginRegistry | str = "", **options: Any) -> Result:
    """`plugins`: names, separated by commas, or what was found of them. `options`: of click."""
    if isinstance(plugins, str):
        plugins = PluginRegistry.discover({"MLX_PROVIDER_PLUGINS": plugins})
    return CliRunner().invoke(build(plugins), words, obj=plugins, **options)


def told(result: Result) -> str:
    """What it says, and the error that ends it."""
    return result.stdout + str(result.exception or "")

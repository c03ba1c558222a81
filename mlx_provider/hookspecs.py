"""The hooks that a plugin can implement. Each runs once, when plugins are discovered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import typer

    from .records import Client, Drafter, Kernels, ModelFamily, ReasoningParser, ToolParser

PROJECT = "mlx_provider"
API_VERSION = 1
"""Version of the plugin interface; a plugin module states it as `mlx_provider_api = 1`."""
OLDEST_API = 1
"""The oldest version that is accepted."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def mlx_model_families() -> Iterable[ModelFamily]:  # type: ignore[empty-body]
    """Yield the model families that this plugin serves."""


@hookspec
def mlx_tool_parsers() -> Iterable[ToolParser]:  # type: ignore[empty-body]
    """Yield the tool-call formats that this plugin reads."""


@hookspec
def mlx_reasoning_parsers() -> Iterable[ReasoningParser]:  # type: ignore[empty-body]
    """Yield the reasoning formats that this plugin reads."""


@hookspec
def mlx_kernels() -> Iterable[Kernels]:  # type: ignore[empty-body]
    """Yield functions that are faster on some device than those of upstream's models."""


@hookspec
def mlx_drafters() -> Iterable[Drafter]:  # type: ignore[empty-body]
    """Yield drafters, which guess tokens that the model checks in one pass."""


@hookspec
def mlx_clients() -> Iterable[Client]:  # type: ignore[empty-body]
    """Yield programs that `mlx-provider launch` can start on our gateway."""


@hookspec
def mlx_register_commands(cli: typer.Typer) -> None:
    """Add commands to the `mlx-provider` command line."""

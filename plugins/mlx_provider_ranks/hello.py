"""The `Hello` of this rank."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterable

from mlx_provider.replicas import Plugin, PluginRegistry, installed_version

from .messages import Hello

COMPUTING = ("mlx", "mlx-lm", "mlx-vlm", "mlx-provider", "transformers", "tokenizers", "numpy")
"""Distributions on which it depends what a rank computes, or what it takes a prompt for."""


def own_hello(rank: int, registry: PluginRegistry, device: str, memory_limit: int) -> Hello:
    """The `Hello` of this process. `memory_limit`: bytes."""
    return Hello(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        python=platform.python_version(),
        versions={name: installed_version(name) for name in COMPUTING},
        plugins=dict(_plugins(registry)),
        device=device,
        memory_limit=memory_limit,
    )


def _plugins(registry: PluginRegistry) -> Iterable[tuple[str, str]]:
    for plugin in registry.plugins:
        state = "broken" if plugin.error else _sources(registry, plugin)
        yield plugin.key, " ".join(filter(None, (plugin.version, state)))


def _sources(registry: PluginRegistry, plugin: Plugin) -> str:
    digest = registry.sources(plugin)
    return f"(sources {digest})" if digest else ""

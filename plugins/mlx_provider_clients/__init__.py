"""Coding agents that `mlx-provider launch` starts: one module each, with where its names are from.

Every profile sends a client's settings, sessions and caches into the launch's own folder, names the
model's real window where the client would guess another, and lifts the client's time limits, which
a long prompt on a slow machine exceeds.
"""

from __future__ import annotations

from collections.abc import Iterator

from mlx_provider import Client, hookimpl

from . import aider, claude, cline, codex, continue_, kilo, opencode, pi, qwen

mlx_provider_api = 1


@hookimpl
def mlx_clients() -> Iterator[Client]:
    """Clients in the order of the menu."""
    for module in (claude, codex, opencode, qwen, pi, continue_, kilo, cline, aider):
        yield module.CLIENT

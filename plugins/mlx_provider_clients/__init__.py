"""Coding agents for `mlx-provider launch`: each with the source of its names. A profile
keeps a client's settings, sessions and caches in the launch's own folder, states the real context
of the model, and raises time limits that a long prompt on a slow machine exceeds."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_provider import Client, hookimpl

from .independent import AIDER, CLINE, CONTINUE, KILO, OPENCODE, PI
from .vendors import CLAUDE, CODEX, QWEN

mlx_provider_api = 1


@hookimpl
def mlx_clients() -> Iterator[Client]:
    yield from (CLAUDE, CODEX, OPENCODE, QWEN, PI, CONTINUE, KILO, CLINE, AIDER)

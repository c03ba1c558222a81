"""Coding agents for `mlx-provider launch`: one module each, with the source of its names. A profile
keeps a client's settings, sessions and caches in the launch's own folder, states the real context
of the model, and raises time limits that a long prompt on a slow machine exceeds."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_provider import Client, hookimpl

from . import claude, codex, opencode
from . import editors as cline
from . import editors as continue_
from . import opencode as kilo
from . import scripts as aider
from . import scripts as pi
from . import scripts as qwen

mlx_provider_api = 1


@hookimpl
def mlx_clients() -> Iterator[Client]:
    for module in (claude, codex, opencode, qwen, pi, continue_, kilo, cline, aider):
        yield module.CLIENT

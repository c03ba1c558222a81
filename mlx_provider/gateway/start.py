"""Starts engine and proxy in parallel."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from ..client.connection import Connections
from ..client.generation import EngineClient
from ..protocol.health import Health
from .config import Served
from .engine import warm_up_in_thread
from .proxy import Proxy

Tell = Callable[[str, str], None]
"""(phase, message) for the user."""


def own_engine(environ: Mapping[str, str], ending: ExitStack) -> EngineClient:
    """This user's engine. Its first request starts it; `ending` closes the connection."""
    connections = Connections(environ)
    ending.callback(connections.close)
    return connections.client(None, None)


def start_both(
    served: Served, engine: EngineClient, start: Callable[[], Proxy], tell: Tell
) -> Proxy:
    """Load the model in an engine while `start` starts the proxy. Both are then ready.

    Raises the errors of the load and of the proxy.
    """
    begun = time.monotonic()
    options = served.model_info().get("mlx", {})
    warm = warm_up_in_thread(engine, served.model, options.get("context_length"))
    proxy = start()
    warm.result()
    tell("engine", f"{_engine_line(engine, served)}, {time.monotonic() - begun:.1f} s")
    proxy.wait_ready()
    tell("proxy", f"{proxy.url}, {time.monotonic() - begun:.1f} s")
    return proxy


def _engine_line(engine: EngineClient, served: Served) -> str:
    """A line with the process and the family that serve the model."""
    health: Health = engine.health()
    status = next((each for each in health.models if each.model == served.model), None)
    by = f", family {status.family} of plugin {status.plugin}" if status else ""
    return f"process {health.pid} on {health.device}{by}"

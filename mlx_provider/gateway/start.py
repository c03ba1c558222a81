"""Starts an engine, and its proxy or listener."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from ..client.connection import Connections
from ..client.generation import EngineClient
from ..client.http import HttpClient
from ..errors import EngineUnavailable
from ..protocol.health import Health
from .config import Served
from .engine import warm_up, warm_up_in_thread
from .progress import Tell, load_shown
from .proxy import Proxy, master_key


def own_engine(environ: Mapping[str, str], ending: ExitStack) -> EngineClient:
    """Its first request starts it; `ending` closes the connection."""
    connections = Connections(environ)
    ending.callback(connections.close)
    return connections.client(None, None)


def start_both(
    served: Served, engine: EngineClient, start: Callable[[], Proxy], tell: Tell
) -> Proxy:
    """Load the model while `start` starts the proxy. Both are then ready. Raises the errors of
    both."""
    begun = time.monotonic()
    warm = warm_up_in_thread(engine, served.model, served.options().get("context_length"))
    with load_shown(engine.figures, tell):
        proxy = start()
        warm.result()
    tell("engine", f"{_engine_line(engine, served)}, {time.monotonic() - begun:.1f} s")
    proxy.wait_ready()
    tell("proxy", f"{proxy.url}, {time.monotonic() - begun:.1f} s")
    return proxy


@dataclass(frozen=True)
class OpenDoor:
    url: str
    key: str = field(repr=False)


def open_door(served: Served, engine: EngineClient, ending: ExitStack, tell: Tell) -> OpenDoor:
    """Load the model and open a listener, which `ending` closes. Raises the errors of the load, and
    `EngineUnavailable` for an engine in this process."""
    if not isinstance(engine, HttpClient):
        raise EngineUnavailable("an engine in this process has no port for another program")
    begun, key = time.monotonic(), master_key()
    with load_shown(engine.figures, tell):
        warm_up(engine, served.model, served.options().get("context_length"))
    wanted = {"key": key, "model": served.model, "max_tokens": served.output}
    url, held = engine.open_door(wanted | {"options": served.options()})
    ending.callback(held.end)
    tell("engine", f"{_engine_line(engine, served)}, {time.monotonic() - begun:.1f} s")
    return OpenDoor(url, key)


def _engine_line(engine: EngineClient, served: Served) -> str:
    health: Health = engine.health()
    status = next((each for each in health.models if each.model == served.model), None)
    by = f", family {status.family} of plugin {status.plugin}" if status else ""
    return f"process {health.pid} on {health.device}{by}"

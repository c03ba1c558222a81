"""A separate gateway: engine and proxy of one command, which end with it.

Starts an engine, and its proxy or listener.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..client.connection import TRANSPORT, Connections
from ..client.generation import EngineClient
from ..client.http import HttpClient
from ..client.runtime_folder import EngineLock
from ..config import PREFIX, runtime
from ..errors import EngineUnavailable
from ..protocol.health import Health
from .config import Served, write_config
from .progress import Tell, end_engine, load_shown, warm_up, warm_up_in_thread
from .proxy import Proxy, master_key, require_proxy, start_proxy

IDLE_SECONDS = 30
"""Seconds until the engine ends if its command is killed."""
START_LIMIT = 20.0
POLL = 0.1


@dataclass(frozen=True)
class Apart:
    proxy: Proxy
    engine: EngineClient


@contextmanager
def gateway_apart(
    config: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    *,
    idle_seconds: int = IDLE_SECONDS,
) -> Iterator[Apart]:
    """Start a proxy for `config`; end it and its engine with the block. Does not wait for the
    proxy.

    It has its own runtime and state folders, so it neither uses nor ends an engine of the user, and
    keeps no prefix of an earlier run. Raises `NotInstalled` or `EngineUnavailable`."""
    require_proxy()
    with ExitStack() as ending:
        folder = Path(tempfile.mkdtemp(prefix="mlxp-"))  # short: the path of a socket is limited
        ending.callback(shutil.rmtree, folder, ignore_errors=True)
        own = {
            PREFIX + "DISK_CACHE_BYTES": "0",
            **environ,
            TRANSPORT: "process",
            PREFIX + "RUNTIME_DIR": os.fspath(folder),
            "XDG_STATE_HOME": os.fspath(folder),
            PREFIX + "IDLE_TIMEOUT": str(idle_seconds),
        }
        connections = Connections(own)
        engine = connections.client(None, None)
        ending.callback(_end_for_good, engine, runtime(own).lock)
        ending.callback(connections.close)
        proxy = start_proxy(write_config(config, folder), own)
        ending.callback(proxy.stop)
        yield Apart(proxy, engine)


def _end_for_good(engine: EngineClient, lock: Path) -> None:
    """Ends also an engine that does not listen yet."""
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline:
        end_engine(engine)
        if (free := EngineLock.try_take(lock)) is not None:
            free.release()
            return
        time.sleep(POLL)


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

"""A separate gateway: engine and proxy of one command, which end with it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..client.connection import TRANSPORT, Connections
from ..client.generation import EngineClient
from ..client.runtime_folder import EngineLock
from ..config import PREFIX, runtime
from .config import write_config
from .engine import end_engine
from .proxy import Proxy, require_proxy, start_proxy

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

"""A LiteLLM proxy and an engine of our own behind it, which end with the benchmark."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from mlx_provider.client.connection import Connections
from mlx_provider.client.generation import EngineClient
from mlx_provider.client.runtime_folder import EngineLock, holder
from mlx_provider.config import PREFIX, runtime
from mlx_provider.gateway.config import write_config
from mlx_provider.gateway.engine import end_engine
from mlx_provider.gateway.proxy import Proxy, start_proxy

from ..ending import held

IDLE_TIMEOUT = 600
"""Seconds after which the engine ends by itself, should the benchmark be killed."""
START_LIMIT = 15.0
"""Seconds in which an engine that was just started has signed its lock."""


@contextmanager
def stage(
    config: Mapping[str, Any], variables: Mapping[str, str] | None = None
) -> Iterator[tuple[EngineClient, Proxy]]:
    """Engine and proxy for a proxy's config; the engine starts with the first request.

    The runtime folder is the benchmark's own, so that an engine of the user is neither used nor
    ended. Raises `NotInstalled` or `EngineUnavailable` where the proxy cannot start.
    """
    with ExitStack() as ending:
        scratch = Path(tempfile.mkdtemp(prefix="mlxp-"))  # short: a socket's path is
        ending.callback(shutil.rmtree, scratch, ignore_errors=True)
        environ = {
            **os.environ,
            **(variables or {}),
            "HF_HUB_OFFLINE": "1",
            PREFIX + "RUNTIME_DIR": os.fspath(scratch),
            PREFIX + "IDLE_TIMEOUT": str(IDLE_TIMEOUT),
        }
        connections = Connections(environ)
        ending.callback(connections.close)
        engine = connections.client(None, None)
        ending.callback(_end_starting, runtime(environ).lock)
        ending.callback(end_engine, engine)
        with held():
            proxy = start_proxy(write_config(config, scratch), environ)
            ending.callback(proxy.stop)
        proxy.wait_ready()
        yield engine, proxy


def _end_starting(lock: Path) -> None:
    """End an engine that does not listen yet, once the proxy that started it is gone."""
    deadline = time.monotonic() + START_LIMIT
    while lock.exists() and time.monotonic() < deadline:
        taken = EngineLock.try_take(lock)
        if taken is not None:
            taken.release()
            return
        pid = holder(lock)
        if pid.isdigit():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGTERM)
        time.sleep(0.1)

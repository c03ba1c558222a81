"""Engine process and LiteLLM proxy of one demo: their own folder, their own end."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..client.connection import Connections
from ..client.generation import EngineClient
from ..config import PREFIX
from ..errors import EngineUnavailable
from ..protocol.messages import Done, GenerateRequest, Health, Sampling, Usage
from .config import proxy_config, write_config
from .proxy import Proxy, require_proxy, start_proxy

MODEL = "demo"
HYBRID = "demo-hybrid"
"""A model with recurrent layers, and a head that drafts."""
STORY = "Tell me a story."
IDLE_TIMEOUT = 30
"""Seconds after which the engine ends by itself, should the demo be killed."""
END_LIMIT = 10.0


@dataclass(frozen=True)
class Stage:
    """Both processes, ready."""

    proxy: Proxy
    engine: EngineClient

    def health(self) -> Health:
        """State of the engine process."""
        return self.engine.health()

    def drafted(self) -> tuple[str, Usage]:
        """Who drafts for the model with a head, and what held in a story that it tells."""
        messages = [{"role": "user", "content": STORY}]
        greedy = Sampling(temperature=0)
        asked = GenerateRequest(model=HYBRID, messages=messages, sampling=greedy, max_tokens=200)
        usage = _told(self.engine, asked)
        drafter = next(each.drafter for each in self.health().models if each.model == HYBRID)
        return drafter, usage


@contextmanager
def stage(port: int | None, environ: Mapping[str, str] = os.environ) -> Iterator[Stage]:
    """Start proxy and engine, and end them with the block, whatever ends it.

    The runtime folder is the demo's own, so that an engine of the user is neither used nor
    ended. Raises `NotInstalled` or `EngineUnavailable` where either cannot start.
    """
    require_proxy()
    with ExitStack() as ending:
        folder = Path(tempfile.mkdtemp(prefix="mlxp-demo-"))
        ending.callback(shutil.rmtree, folder, ignore_errors=True)
        own = {
            **environ,
            PREFIX + "RUNTIME_DIR": os.fspath(folder),
            PREFIX + "IDLE_TIMEOUT": str(IDLE_TIMEOUT),
        }
        connections = Connections(own)
        engine = connections.client(None, None)
        ending.callback(end_engine, engine)
        ending.callback(connections.close)
        warm = _in_thread(engine)
        proxy = start_proxy(write_config(proxy_config(MODEL, MODEL), folder), own, port=port)
        ending.callback(proxy.stop)
        warm.result()
        proxy.wait_ready()
        yield Stage(proxy, engine)


def _in_thread(engine: EngineClient) -> Future[None]:
    """Have the engine process started and the model loaded while the proxy starts."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="demo warm-up")
    future = pool.submit(warm_up, engine)
    pool.shutdown(wait=False)
    return future


def warm_up(engine: EngineClient) -> None:
    """One token from the model: the first request starts the engine process."""
    messages = [{"role": "user", "content": "Hi"}]
    _told(engine, GenerateRequest(model=MODEL, messages=messages, max_tokens=1))


def _told(engine: EngineClient, request: GenerateRequest) -> Usage:
    """Have a request answered to its end. Raises errors of `mlx_provider.errors`."""
    generation, usage = engine.submit(request), Usage(prompt_tokens=0, completion_tokens=0)
    while events := generation.get():
        usage = next((event.usage for event in events if isinstance(event, Done)), usage)
    generation.close()
    return usage


def end_engine(engine: EngineClient) -> None:
    """End the engine process and wait for it. Does nothing where none runs."""
    try:
        pid = engine.health().pid
    except EngineUnavailable:
        return
    engine.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        if _gone(pid):
            return


def _gone(pid: int) -> bool:
    """Whether the process ends in time."""
    deadline = time.monotonic() + END_LIMIT
    while time.monotonic() < deadline:
        if _ended(pid):
            return True
        threading.Event().wait(0.05)
    return False


def _ended(pid: int) -> bool:
    """Whether the process runs no more, though its parent may not have noticed.

    The client that started an engine waits for it in a thread. Where that client ended first, its
    engine is left to process 1, and that of a container need not wait for anybody.
    """
    try:
        os.kill(pid, 0)
        return b") Z " in Path(f"/proc/{pid}/stat").read_bytes()
    except ProcessLookupError:
        return True
    except OSError:  # a system without /proc
        return False

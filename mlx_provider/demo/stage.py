"""Engine process and LiteLLM proxy of one demo: their own folder, their own end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..client.connection import Connections
from ..client.generation import EngineClient
from ..config import PREFIX
from ..gateway.config import proxy_config, write_config
from ..gateway.engine import answered, end_engine, warm_up_in_thread
from ..gateway.proxy import Proxy, require_proxy, start_proxy
from ..protocol.messages import GenerateRequest, Health, Sampling, Usage

MODEL = "demo"
HYBRID = "demo-hybrid"
"""A model with recurrent layers, and a head that drafts."""
STORY = "Tell me a story."
IDLE_TIMEOUT = 30
"""Seconds after which the engine ends by itself, should the demo be killed."""


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
        usage = answered(self.engine, asked)
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
        warm = warm_up_in_thread(engine, MODEL)
        proxy = start_proxy(write_config(proxy_config(MODEL, MODEL), folder), own, port=port)
        ending.callback(proxy.stop)
        warm.result()
        proxy.wait_ready()
        yield Stage(proxy, engine)

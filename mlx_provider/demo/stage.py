"""Engine process and LiteLLM proxy of one demo: their own folder, their own end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ..client.generation import EngineClient
from ..gateway.apart import gateway_apart
from ..gateway.config import proxy_config
from ..gateway.engine import answered, warm_up
from ..gateway.proxy import Proxy
from ..protocol.events import Usage
from ..protocol.health import Health
from ..protocol.requests import GenerateRequest
from ..protocol.sampling import Sampling

MODEL = "demo"
HYBRID = "demo-hybrid"
"""A model with recurrent layers, and a head that drafts."""
STORY = "Tell me a story."


@dataclass(frozen=True)
class Stage:
    """Both processes, ready."""

    proxy: Proxy
    engine: EngineClient

    def health(self) -> Health:
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
def stage(environ: Mapping[str, str] = os.environ) -> Iterator[Stage]:
    """Start proxy and engine, and end them with the block, whatever ends it.

    Both are the demo's own. Raises `NotInstalled` or `EngineUnavailable` where either cannot start.
    """
    with gateway_apart(proxy_config(MODEL, MODEL), environ) as apart:
        warm_up(apart.engine, MODEL)
        apart.proxy.wait_ready()
        yield Stage(apart.proxy, apart.engine)

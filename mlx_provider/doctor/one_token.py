"""One token through a real proxy: LiteLLM, our handler, an engine and the model."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx

from ..client.connection import Connections
from ..client.generation import EngineClient
from ..client.http import HttpClient
from ..errors import EngineUnavailable
from ..gateway.config import proxy_config, write_config
from ..gateway.proxy import Proxy, start_proxy
from ..protocol.health import JOINED, Health, ModelStatus
from . import speed
from .findings import Finding
from .subject import Subject

NAME = "examined"
LIMIT = 600.0
"""Seconds, the load of a large model included."""
TRIES, PAUSE = 20, 0.1
LOGS = "see `mlx-provider engine logs`"


def token(subject: Subject) -> Iterator[Finding]:
    """Uses the user's engine, so that no model is loaded twice. Ends an engine that it started."""
    if subject.folder is None:
        return
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="mlxp-doctor-")))
        connections = Connections(subject.environ)
        ending.callback(connections.close)
        engine = connections.client(None, None)
        if not _runs(engine):
            ending.callback(_end, engine)
        config = write_config(proxy_config(NAME, subject.served_name), folder)
        proxy = start_proxy(config, subject.environ)
        ending.callback(proxy.stop)
        proxy.wait_ready()
        yield _answered(proxy)
        yield from told_of(_health(engine), subject)


def told_of(health: Health | None, subject: Subject) -> Iterator[Finding]:
    """How the engine serves the model, by its own report."""
    models = health.models if health else []
    served = [each for each in models if each.model == subject.served_name]
    for status in served[-1:]:
        yield _drafter(status, subject)
        for note in status.notes:
            yield Finding("served.notes", "note", note)


def _drafter(status: ModelStatus, subject: Subject) -> Finding:
    summary = f"drafts come from {status.drafter}" if status.drafter else "there are no drafts"
    drafters = map(subject.registry.drafters.get, status.drafter.split(JOINED))
    found = speed.head_of_model(subject)
    if found is not None and found.stored and not any(each and each.hidden for each in drafters):
        summary += ": no installed drafter takes the checkpoint's head"
        return Finding("served.drafter", "note", summary)
    return Finding("served.drafter", "ok", summary)


def _answered(proxy: Proxy) -> Finding:
    asked = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
        "temperature": 0,
    }
    answer = httpx.post(
        f"{proxy.url}/v1/chat/completions",
        json=asked,
        headers={"authorization": f"Bearer {proxy.key}"},
        timeout=LIMIT,
        trust_env=False,  # loopback needs no proxy
    )
    if answer.is_success and answer.json()["usage"]["completion_tokens"] == 1:
        summary = "one token came through LiteLLM, the handler and the engine"
        return Finding("proxy.token", "ok", summary)
    summary = f"the proxy answers {answer.status_code}: {answer.text[:500]}"
    return Finding("proxy.token", "fail", summary, f"{LOGS}, and what else is found here")


def _runs(engine: EngineClient) -> bool:
    return _health(engine) is not None


def _health(engine: EngineClient) -> Health | None:
    try:
        return engine.health()
    except EngineUnavailable:
        return None


def _end(engine: EngineClient) -> None:
    """Leaves an engine that others use by now."""
    if not isinstance(engine, HttpClient):
        return
    for _ in range(TRIES):  # the ended proxy counts as a client for a moment
        try:
            if engine.stop("`mlx-provider doctor` has ended", "alone"):
                return
        except EngineUnavailable:
            return
        time.sleep(PAUSE)

"""Starts the engine behind a proxy, loads a model, or ends the engine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ..client.address import Address
from ..client.generation import EngineClient
from ..client.http import HttpClient
from ..config import runtime
from ..errors import EngineUnavailable
from ..protocol.events import Done, Failed, Usage
from ..protocol.options import ModelOptions
from ..protocol.requests import GenerateRequest

END_LIMIT = 10.0


def warm_up(engine: EngineClient, model: str, context: int | None = None) -> None:
    """Generate one token, which starts the engine process. `context`: the operator's
    `context_length`, so that the same entry is loaded as later. Raises the errors of the load."""
    messages = [{"role": "user", "content": "Hi"}]
    options = ModelOptions(context_length=context)
    answered(engine, GenerateRequest(model=model, messages=messages, max_tokens=1, options=options))


def warm_up_in_thread(engine: EngineClient, model: str, context: int | None = None) -> Future[None]:
    pool = ThreadPoolExecutor(1, thread_name_prefix="warm-up")
    future = pool.submit(warm_up, engine, model, context)
    pool.shutdown(wait=False)
    return future


def answered(engine: EngineClient, request: GenerateRequest) -> Usage:
    """Run a request to its end. Raises errors of `mlx_provider.errors`."""
    generation, usage = engine.submit(request), Usage(prompt_tokens=0, completion_tokens=0)
    try:
        while events := generation.get():
            for event in events:
                if isinstance(event, Failed):
                    raise event.error.exception()
                usage = event.usage if isinstance(event, Done) else usage
    finally:
        generation.close()
    return usage


def end_engine(engine: EngineClient) -> None:
    """Waits for the end. Does nothing if none runs."""
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


def end_idle_engine(environ: Mapping[str, str], reason: str, *, alone: bool = False) -> str:
    """Once no request runs; `alone`: and no other program is connected. Returns a line about the
    result."""
    engine = HttpClient(Address("http://engine", os.fspath(runtime(environ).socket)))
    try:
        pid = engine.health().pid
        if not engine.stop(reason, "alone" if alone else "idle"):
            others = "other program uses it" if alone else "request runs"
            return f"process {pid} ends as soon as no {others}"
    except EngineUnavailable:
        return "none runs"
    finally:
        engine.close()
    return f"process {pid} has ended" if _gone(pid) else f"process {pid} is ending"


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + END_LIMIT
    while time.monotonic() < deadline:
        if has_ended(pid):
            return True
        threading.Event().wait(0.05)
    return False


def has_ended(pid: int) -> bool:
    """Also true for a zombie: a starter that ended first leaves the engine to process 1, which in a
    container may not wait for it."""
    try:
        os.kill(pid, 0)
        return b") Z " in Path(f"/proc/{pid}/stat").read_bytes()
    except ProcessLookupError:
        return True
    except OSError:  # a system without /proc
        return False

"""Starts, watches and ends the engine behind a proxy or a listener."""

import os
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ..bounded_process import in_thread
from ..client.connection import local_client
from ..client.http import HttpClient, When
from ..client.runtime_folder import POLL, has_ended, holder, is_held
from ..config import LOCK, PREFIX, runtime
from ..errors import EngineUnavailable, MLXProviderError, OtherProtocol
from ..isolation import resolve
from ..protocol.health import Stats
from ..protocol.requests import GenerateRequest, ModelOptions
from .config import Served, write_config
from .proxy import Proxy, require_proxy, start_proxy

END_LIMIT, PATIENCE = 30.0, 5.0  # seconds
REPEAT_SECONDS = 30.0  # after which an unchanged progress is reported again
LEAST_TOKENS = 1000  # of a prompt that is shown; agents ask for a title with fewer
Tell = Callable[[str, str], None]  # (phase, message) for the user
ReadStats = Callable[[], Stats]
Block = AbstractContextManager[None]


def warm_up(engine: HttpClient, model: str, context: int | None = None) -> None:
    """Generate one token, which starts the engine process. `context`: the operator's
    `context_length`, so that the same entry is loaded as later. Raises the errors of the load."""
    messages = [{"role": "user", "content": "Hi"}]
    options = ModelOptions(context_length=context)
    request = GenerateRequest(model=model, messages=messages, max_tokens=1, options=options)
    run_request(engine, request)


def run_request(engine: HttpClient, request: GenerateRequest) -> None:
    """Wait for the end of its reply, which is discarded. Raises its error."""
    with closing(engine.submit(request)) as generation:
        deque(generation, maxlen=0)


def end_engine(engine: HttpClient) -> None:
    """End this user's engine on this machine, also one that does not listen yet, and wait."""
    engine.close()
    lock, deadline = Path(str(engine.address.socket)).with_name(LOCK), time.monotonic() + END_LIMIT
    while is_held(lock) and time.monotonic() < deadline:
        if not (text := holder(lock)).isdecimal():  # it starts
            time.sleep(POLL)
            continue
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.kill(int(text), number)
            if has_ended(lock, text, END_LIMIT):
                break


def end_when(environ: Mapping[str, str], reason: str, when: When) -> str:
    """End this user's engine and wait, or let it end later, as `when` says, and return. Returns a
    text about what happens. Raises `EngineUnavailable` if it stays."""
    here = runtime(environ)
    try:
        with closing(local_client(environ)) as engine:
            try:
                pid = str(engine.health().pid)
            except OtherProtocol:
                pid = holder(here.lock)
            ends = engine.stop(reason, when)
    except EngineUnavailable:
        return "none runs"
    if ends is False:
        others = "other program uses it" if when == "alone" else "request runs"
        return f"process {pid} ends as soon as no {others}"
    if has_ended(here.lock, pid, END_LIMIT):
        return f"process {pid} has ended"
    raise EngineUnavailable(
        f"engine process {pid} does not end within {END_LIMIT:g} s: see {here.log} and "
        f"`kill -9 {pid}`"
    )


def show_load(stats: ReadStats, tell: Tell, patience: float = PATIENCE) -> Block:
    """Report loads and measurements during the block that take longer than `patience` seconds."""

    def run(over: threading.Event) -> None:
        began, last, at = time.monotonic(), "", 0.0
        while not over.wait(patience):
            now = time.monotonic()
            try:
                text = "; ".join(stage.summary for stage in stats().loading)
            except EngineUnavailable:
                text = "the engine process starts"
            if text and (text != last or now - at > REPEAT_SECONDS):
                last, at = text, now
                tell("loading", f"{text} ({now - began:.0f} s)")

    return in_thread(run)


def show_prefill(stats: ReadStats, screen: TextIO, patience: float = PATIENCE) -> Block:
    """Show the progress of the first prompt during the block, every `patience` seconds: in the
    window title of a terminal, on which a client may draw, else in lines."""

    def show(text: str) -> None:
        title = f"mlx-provider: {text}" if text else ""
        with suppress(OSError):  # the terminal may be gone
            screen.write(f"\x1b]2;{title}\x07" if screen.isatty() else f"{text}\n")  # OSC 2
            screen.flush()

    def run(over: threading.Event) -> None:
        shown_text = ""
        while not over.wait(patience):
            try:
                requests = [r for r in stats().requests if r.prompt_tokens >= LEAST_TOKENS]
            except MLXProviderError:
                break
            found = next((r for r in requests if r.state in ("prefill", "decode")), None)
            if found is not None and found.state == "prefill":
                done = found.cached_tokens + found.prefilled_tokens
                text = f"prompt: {done:,} of {found.prompt_tokens:,} tokens"
                if text != shown_text:
                    show(text)
                shown_text = text
            elif found is not None or shown_text:
                break
        if shown_text and screen.isatty():
            show("")

    return in_thread(run)


@dataclass(frozen=True)
class SeparateGateway:
    proxy: Proxy
    engine: HttpClient


@contextmanager
def separate_engine(
    environ: Mapping[str, str] = os.environ,
) -> Iterator[tuple[HttpClient, dict[str, str]]]:
    """An engine that starts at its first request and ends with the block (if this process is
    killed: when it has been idle), and the variables by which others find it. It shares neither
    runtime nor state folder with an engine of the user."""
    # a short path, because that of a socket is limited
    with tempfile.TemporaryDirectory(prefix="mlxp-", ignore_cleanup_errors=True) as folder:
        own = {
            PREFIX + "DISK_CACHE_BYTES": "0",
            PREFIX + "IDLE_TIMEOUT": "30",
            **environ,
            PREFIX + "RUNTIME_DIR": folder,
            "XDG_STATE_HOME": folder,
        }
        engine = local_client(own)
        try:
            yield engine, own
        finally:
            end_engine(engine)


@contextmanager
def separate_gateway(
    config: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Iterator[SeparateGateway]:
    """A proxy for `config` before `separate_engine`; both end with the block. Does not wait for the
    proxy. Raises `NotInstalled` or `EngineUnavailable`."""
    require_proxy()
    with separate_engine(environ) as (engine, own):
        proxy = start_proxy(write_config(config, Path(own[PREFIX + "RUNTIME_DIR"])), own)
        try:
            yield SeparateGateway(proxy, engine)
        finally:
            proxy.stop()


@contextmanager
def loading(served: Served, engine: HttpClient, tell: Tell) -> Iterator[None]:
    """Load the model beside the block; at its end, wait until it is ready. Raises the errors of the
    load. The thread is a daemon: a pool's would delay the end of an interrupted process."""
    begun, loaded = time.monotonic(), Future[None]()
    load = partial(warm_up, engine, served.model, served.options.get("context_length"))
    threading.Thread(target=resolve, args=(loaded, load), name="warm-up", daemon=True).start()
    with show_load(engine.stats, tell):
        yield
        loaded.result()
    tell("engine", f"{_engine_line(engine, served)}, {time.monotonic() - begun:.1f} s")


def _engine_line(engine: HttpClient, served: Served) -> str:
    health = engine.health()
    status = next((model for model in health.models if model.model == served.model), None)
    by = f", family {status.family} of plugin {status.plugin}" if status else ""
    return f"process {health.pid} on {health.device}{by}"

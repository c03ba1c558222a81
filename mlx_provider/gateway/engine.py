"""Starts, watches and ends the engine behind a proxy or a listener."""

import os
import signal
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..client.connection import local_client
from ..client.generation import EngineClient
from ..client.http import HttpClient
from ..client.messages import Address
from ..client.runtime_folder import POLL, has_ended, is_held
from ..config import LOCK, PREFIX, runtime
from ..errors import EngineUnavailable, MLXProviderError
from ..isolation import Fault, attempt
from ..protocol.events import Failed
from ..protocol.health import Stats
from ..protocol.requests import GenerateRequest, ModelOptions
from .config import Served, write_config
from .proxy import Proxy, require_proxy, start_proxy

END_LIMIT = 10.0
THREAD = "engine-progress"
EVERY = 0.5
"""Seconds between two polls, and between updates of a line in a terminal."""
PATIENCE = 5.0
AGAIN = 30.0
LEAST_TOKENS = 1000
"""Of a prompt that is shown. Agents ask for a title with fewer."""
Tell = Callable[[str, str], None]
"""(phase, message) for the user."""
ReadStats = Callable[[], Stats]
START_LIMIT = 20.0


def warm_up(engine: EngineClient, model: str, context: int | None = None) -> None:
    """Generate one token, which starts the engine process. `context`: the operator's
    `context_length`, so that the same entry is loaded as later. Raises the errors of the load."""
    messages = [{"role": "user", "content": "Hi"}]
    options = ModelOptions(context_length=context)
    request = GenerateRequest(model=model, messages=messages, max_tokens=1, options=options)
    run_request(engine, request)


def run_request(engine: EngineClient, request: GenerateRequest) -> None:
    """Waits for the end of its reply. Raises its error."""
    generation = engine.submit(request)
    try:
        while events := generation.get():
            for event in events:
                if isinstance(event, Failed):
                    raise event.error.exception()
    finally:
        generation.close()


def end_engine(engine: HttpClient) -> None:
    """Of this machine."""
    lock = Path(str(engine.address.socket)).with_name(LOCK)
    with suppress(EngineUnavailable, ProcessLookupError):
        pid = engine.health().pid
        engine.close()
        os.kill(pid, signal.SIGTERM)
        if not has_ended(lock, pid, END_LIMIT):
            os.kill(pid, signal.SIGKILL)
            has_ended(lock, pid, END_LIMIT)


def end_idle_engine(environ: Mapping[str, str], reason: str, *, alone: bool = False) -> str:
    """Once no request runs; `alone`: and no other program is connected. Returns what happens."""
    here = runtime(environ)
    engine = HttpClient(Address("http://engine", os.fspath(here.socket)))
    try:
        pid = engine.health().pid
        if not engine.stop(reason, "alone" if alone else "idle"):
            others = "other program uses it" if alone else "request runs"
            return f"process {pid} ends as soon as no {others}"
    except EngineUnavailable:
        return "none runs"
    finally:
        engine.close()
    return f"process {pid} {'has ended' if has_ended(here.lock, pid, END_LIMIT) else 'is ending'}"


@contextmanager
def _watching(run: Callable[[threading.Event], None]) -> Iterator[None]:
    over = threading.Event()
    thread = threading.Thread(target=run, args=(over,), name=THREAD, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(EVERY)


@contextmanager
def show_load(stats: ReadStats, tell: Tell, patience: float = PATIENCE) -> Iterator[None]:
    """Report loads and measurements during the block that take longer than `patience` seconds."""

    def run(over: threading.Event) -> None:
        began, last, at = time.monotonic(), "", 0.0
        while not over.wait(patience):
            now = time.monotonic()
            try:
                text = "; ".join(each.summary for each in stats().loading)
            except EngineUnavailable:
                text = "the engine process starts"
            if text and (text != last or now - at > AGAIN):
                last, at = text, now
                tell("loading", f"{text} ({now - began:.0f} s)")

    with _watching(run):
        yield


@contextmanager
def show_prefill(
    stats: ReadStats, screen: TextIO, every: float = EVERY, patience: float = PATIENCE
) -> Iterator[None]:
    """Show the progress of the first prompt during the block; every `patience` seconds if `screen`
    is no terminal, else in one line, which is finally cleared."""

    def run(over: threading.Event) -> None:
        last = ""
        while not over.wait(every if screen.isatty() else patience):
            try:
                requests = stats().requests
            except MLXProviderError:
                break
            large = [each for each in requests if each.prompt_tokens >= LEAST_TOKENS]
            found = next((each for each in large if each.state in ("prefill", "decode")), None)
            if found is not None and found.state == "prefill":
                done = found.cached_tokens + found.prefilled_tokens
                text = f"prompt: {done:,} of {found.prompt_tokens:,} tokens"
                if text != last:
                    _write_progress(screen, text)
                last = text
            elif found is not None or last:
                break
        if last and screen.isatty():
            _write_progress(screen, "")

    with _watching(run):
        yield


def _write_progress(screen: TextIO, text: str) -> None:
    if not screen.isatty():
        print(text, file=screen, flush=True)
        return
    title = f"mlx-provider: {text}" if text else ""
    line = f"\r{text}\x1b[K" if is_line_mode(screen) else f"\x1b]2;{title}\x07"  # xterm's OSC 2
    with suppress(OSError):  # the terminal may be gone
        os.write(screen.fileno(), line.encode())


def is_line_mode(screen: TextIO) -> bool:
    """Whether no program draws on the whole terminal, which a line would damage."""
    try:
        return bool(termios.tcgetattr(screen.fileno())[3] & termios.ICANON)
    except termios.error:
        return False


@dataclass(frozen=True)
class SeparateGateway:
    proxy: Proxy
    engine: EngineClient


@contextmanager
def separate_engine(
    environ: Mapping[str, str] = os.environ,
) -> Iterator[tuple[EngineClient, dict[str, str]]]:
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
            engine.close()
            _end_for_good(engine, runtime(own).lock)


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


def _end_for_good(engine: HttpClient, lock: Path) -> None:
    """Ends also an engine that does not listen yet."""
    deadline = time.monotonic() + START_LIMIT
    while is_held(lock) and time.monotonic() < deadline:
        end_engine(engine)
        time.sleep(POLL)


@contextmanager
def loading(served: Served, engine: EngineClient, tell: Tell) -> Iterator[None]:
    """Load the model beside the block, after which it is ready. Raises the errors of the load. The
    thread is a daemon: a pool's thread would delay the end of an interrupted process until the
    model is loaded."""
    begun, loaded = time.monotonic(), Future[Fault | None]()
    context = served.options.get("context_length")

    def run() -> None:
        loaded.set_result(attempt(lambda: warm_up(engine, served.model, context)))

    threading.Thread(target=run, name="warm-up", daemon=True).start()
    with show_load(engine.stats, tell):
        yield
        if (fault := loaded.result()) is not None:
            raise fault.error
    tell("engine", f"{_engine_line(engine, served)}, {time.monotonic() - begun:.1f} s")


def _engine_line(engine: EngineClient, served: Served) -> str:
    health = engine.health()
    status = next((each for each in health.models if each.model == served.model), None)
    by = f", family {status.family} of plugin {status.plugin}" if status else ""
    return f"process {health.pid} on {health.device}{by}"

"""Starts the engine behind a proxy, loads a model, or ends the engine.

Shows what an engine does while the user waits: its load, an agent's first prompt, its end.
"""

from __future__ import annotations

import os
import signal
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from ..client.generation import EngineClient
from ..client.http import HttpClient
from ..client.stream_connection import Address
from ..config import runtime
from ..errors import EngineUnavailable, MLXProviderError
from ..protocol.events import Done, Failed, Usage
from ..protocol.health import Figures, Health, RequestFigures
from ..protocol.requests import GenerateRequest, ModelOptions

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


THREAD = "engine-progress"
EVERY = 0.5
"""Seconds between two polls, and between updates of a line in a terminal."""
PATIENCE = 5.0
"""Seconds until the first line about a load, and between new lines."""
AGAIN = 30.0
LEAST_TOKENS = 1000
"""Smallest prompt that is shown. Earlier requests of agents, for example for a title, have fewer
tokens."""

Tell = Callable[[str, str], None]
"""(phase, message) for the user."""
ReadFigures = Callable[[], Figures]


@contextmanager
def _watching(run: Callable[[threading.Event], None]) -> Iterator[None]:
    """`run` in a thread during the block; its event is set at the block's end."""
    over = threading.Event()
    thread = threading.Thread(target=run, args=(over,), name=THREAD, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(EVERY)


@contextmanager
def load_shown(figures: ReadFigures, tell: Tell, patience: float = PATIENCE) -> Iterator[None]:
    """Report loads and measurements during the block that take longer than `patience` seconds."""

    def run(over: threading.Event) -> None:
        began, last, at = time.monotonic(), "", 0.0
        while not over.wait(patience):
            now = time.monotonic()
            try:
                text = "; ".join(each.summary for each in figures().loading)
            except EngineUnavailable:
                text = "the engine process starts"
            if text and (text != last or now - at > AGAIN):
                last, at = text, now
                tell("loading", f"{text} ({now - began:.0f} s)")

    with _watching(run):
        yield


@contextmanager
def engine_watched(
    health: Callable[[], Health], then: str, screen: TextIO, tell: Tell
) -> Iterator[None]:
    """Report an end of the engine during the block, and `then`, its consequence. While a client
    draws on the screen, the line waits for the block's end."""
    hidden: list[str] = []

    def run(over: threading.Event) -> None:
        pid = None
        while not over.wait(EVERY):
            with suppress(EngineUnavailable):
                pid = pid or health().pid
            if pid is not None and has_ended(pid):
                line = f"process {pid} has ended: {then}"
                if screen.isatty() and not is_line_mode(screen):
                    hidden.append(line)
                else:
                    tell("engine", line)
                break

    with _watching(run):
        yield
    for line in hidden:
        tell("engine", line)


@contextmanager
def prefill_shown(
    figures: ReadFigures, screen: TextIO, every: float = EVERY, patience: float = PATIENCE
) -> Iterator[None]:
    """Show the progress of the first prompt during the block; every `patience` seconds if `screen`
    is no terminal."""
    watch = PrefillProgress(figures, screen, every if screen.isatty() else patience)
    with _watching(watch.run):
        yield


class PrefillProgress:
    """In a terminal, the line is overwritten and finally cleared."""

    def __init__(self, figures: ReadFigures, screen: TextIO, every: float) -> None:
        self._figures = figures
        self._screen = screen
        self._every = every
        self._shown = ""

    def run(self, over: threading.Event) -> None:
        """Runs until the prompt is computed, the engine is gone, or `over` is set."""
        while not over.wait(self._every):
            try:
                found = self._first()
            except MLXProviderError:
                break
            if found is not None and found.state == "prefill":
                self._tell(progress_line(found))
            elif found is not None or self._shown:
                break
        if self._shown and self._screen.isatty():
            self._write("\r\x1b[K" if is_line_mode(self._screen) else title(""))

    def _first(self) -> RequestFigures | None:
        large = (each for each in self._figures().requests if each.prompt_tokens >= LEAST_TOKENS)
        return next((each for each in large if each.state in ("prefill", "decode")), None)

    def _tell(self, text: str) -> None:
        if text == self._shown:
            return
        self._shown = text
        if not self._screen.isatty():
            self._screen.write(f"{text}\n")
            self._screen.flush()
        elif is_line_mode(self._screen):
            self._write(f"\r{text}\x1b[K")
        else:
            self._write(title(f"mlx-provider: {text}"))

    def _write(self, text: str) -> None:
        try:
            os.write(self._screen.fileno(), text.encode())
        except OSError:  # the terminal is gone
            self._shown = ""


def is_line_mode(screen: TextIO) -> bool:
    """Whether no program draws on the whole terminal, which a line would damage."""
    try:
        return bool(termios.tcgetattr(screen.fileno())[3] & termios.ICANON)
    except termios.error:
        return False


def progress_line(request: RequestFigures) -> str:
    done = request.cached_tokens + request.prefilled_tokens
    return f"prompt: {done:,} of {request.prompt_tokens:,} tokens"


def title(text: str) -> str:
    """Sets a terminal's title (xterm's OSC 2)."""
    return f"\x1b]2;{text}\x07"

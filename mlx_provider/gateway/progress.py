"""Shows what an engine does while the user waits: its load, an agent's first prompt, its end."""

from __future__ import annotations

import os
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from ..errors import EngineUnavailable, MLXProviderError
from ..protocol.figures import Figures, RequestFigures
from ..protocol.health import Health
from .engine import has_ended

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

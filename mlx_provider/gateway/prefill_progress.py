"""Shows the progress of an agent's first prompt in its terminal."""

from __future__ import annotations

import os
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from ..errors import MLXProviderError
from ..protocol.figures import Figures, RequestFigures

THREAD = "prefill-progress"
EVERY = 0.5
"""Seconds between two updates."""
LEAST_TOKENS = 1000
"""Fewest tokens of a prompt that is shown. Earlier requests of agents, for example for a title,
have fewer."""


@contextmanager
def prefill_shown(
    figures: Callable[[], Figures], screen: TextIO, every: float = EVERY
) -> Iterator[None]:
    """Show the progress of the first prompt on `screen` during the block, if it is a terminal."""
    if not screen.isatty():
        yield
        return
    over = threading.Event()
    watch = PrefillProgress(figures, screen)
    thread = threading.Thread(target=watch.run, args=(over, every), name=THREAD, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(every)


class PrefillProgress:
    """Computed tokens of the first prompt, on a line that is overwritten and finally cleared."""

    def __init__(self, figures: Callable[[], Figures], screen: TextIO) -> None:
        self._figures = figures
        self._screen = screen
        self._shown = ""

    def run(self, over: threading.Event, every: float) -> None:
        """Run until the prompt is computed, the engine is gone, or `over` is set."""
        while not over.wait(every):
            try:
                found = self._first()
            except MLXProviderError:
                break
            if found is not None and found.state == "prefill":
                self._tell(progress_line(found))
            elif found is not None or self._shown:
                break
        self._clear()

    def _first(self) -> RequestFigures | None:
        large = (each for each in self._figures().requests if each.prompt_tokens >= LEAST_TOKENS)
        return next((each for each in large if each.state in ("prefill", "decode")), None)

    def _tell(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            line = f"\r{text}\x1b[K" if self._is_line_mode() else title(f"mlx-provider: {text}")
            self._write(line)

    def _clear(self) -> None:
        if self._shown:
            self._write("\r\x1b[K" if self._is_line_mode() else title(""))

    def _is_line_mode(self) -> bool:
        """Whether no program draws on the whole screen, which a line would damage."""
        try:
            return bool(termios.tcgetattr(self._screen.fileno())[3] & termios.ICANON)
        except termios.error:
            return False

    def _write(self, text: str) -> None:
        try:
            os.write(self._screen.fileno(), text.encode())
        except OSError:  # the terminal is gone
            self._shown = ""


def progress_line(request: RequestFigures) -> str:
    """One line for people."""
    done = request.cached_tokens + request.prefilled_tokens
    return f"prompt: {done:,} of {request.prompt_tokens:,} tokens"


def title(text: str) -> str:
    """The control sequence for a terminal's title (xterm's OSC 2)."""
    return f"\x1b]2;{text}\x07"

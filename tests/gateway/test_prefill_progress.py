"""What a terminal shows while an agent's first prompt is computed."""

from __future__ import annotations

import os
import pty
import threading
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from mlx_provider.errors import EngineUnavailable
from mlx_provider.gateway.prefill_progress import THREAD, prefill_shown
from mlx_provider.protocol.figures import Figures, RequestFigures


class Engine:
    """What it does at each look; then nothing more."""

    def __init__(self, *looks: RequestFigures | None) -> None:
        self._looks = iter(looks)
        self.looked_through = threading.Event()

    def figures(self) -> Figures:
        try:
            found = next(self._looks)
        except StopIteration:
            self.looked_through.set()
            raise EngineUnavailable("gone") from None
        return Figures(
            at=0, version="", device="", pid=1, requests=[] if found is None else [found]
        )


def prompt(done: int, whole: int = 44_100, state: str = "prefill") -> RequestFigures:
    return RequestFigures.model_validate(
        {
            "id": "r",
            "model": "m",
            "state": state,
            "prompt_tokens": whole,
            "cached_tokens": min(100, done),
            "prefilled_tokens": done - min(100, done),
        }
    )


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as screen:
        yield ours, screen
    os.close(ours)


def shown(terminal: tuple[int, TextIO], engine: Engine) -> str:
    ours, screen = terminal
    with prefill_shown(engine.figures, screen, every=0.001):
        for thread in threading.enumerate():
            if thread.name == THREAD:
                thread.join(10)
    os.write(screen.fileno(), b"END")
    text = b""
    while b"END" not in text:
        text += os.read(ours, 4096)
    return text.removesuffix(b"END").decode()


def test_a_line_tells_tokens_done_of_all_and_goes(terminal: tuple[int, TextIO]) -> None:
    engine = Engine(
        None, prompt(30, 200), prompt(100), prompt(12_300), prompt(44_100, state="decode")
    )
    assert shown(terminal, engine) == (
        "\rprompt: 100 of 44,100 tokens\x1b[K\rprompt: 12,300 of 44,100 tokens\x1b[K\r\x1b[K"
    )
    assert not engine.looked_through.is_set(), "later prompts are the agent's own business"


def test_an_agent_that_draws_on_the_screen_gets_no_line_but_a_title(
    terminal: tuple[int, TextIO],
) -> None:
    tty.setraw(terminal[1].fileno())
    text = shown(terminal, Engine(prompt(12_300), None))
    assert text == "\x1b]2;mlx-provider: prompt: 12,300 of 44,100 tokens\x07\x1b]2;\x07"


def test_an_engine_that_is_gone_ends_it(terminal: tuple[int, TextIO]) -> None:
    engine = Engine(prompt(500, 600), None)
    assert shown(terminal, engine) == ""
    assert engine.looked_through.is_set()


def test_without_a_terminal_nobody_looks() -> None:
    engine = Engine()
    with Path(os.devnull).open("w") as screen, prefill_shown(engine.figures, screen, every=0.001):
        pass
    assert not engine.looked_through.is_set()

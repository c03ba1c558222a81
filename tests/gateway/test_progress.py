"""What a user sees of the engine: a load, an agent's first prompt."""

import os
import pty
import threading
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from mlx_provider.errors import EngineUnavailable
from mlx_provider.gateway.engine import THREAD, show_load, show_prefill
from mlx_provider.protocol.health import LoadingStats, RequestStats, Stats


class Engine:
    """What it does at each look; then nothing more."""

    def __init__(self, *looks: RequestStats | None) -> None:
        self._looks = iter(looks)
        self.looked_through = threading.Event()

    def stats(self) -> Stats:
        try:
            found = next(self._looks)
        except StopIteration:
            self.looked_through.set()
            raise EngineUnavailable("gone") from None
        return Stats(at=0, version="", device="", pid=1, requests=[] if found is None else [found])


def prompt(done: int, whole: int = 44_100, state: str = "prefill") -> RequestStats:
    return RequestStats.model_validate(
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


def join() -> None:
    """Wait for what is told to end by itself."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(300)


def shown(terminal: tuple[int, TextIO], engine: Engine) -> str:
    ours, screen = terminal
    with show_prefill(engine.stats, screen, every=0.001):
        join()
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


def test_a_file_gets_lines(tmp_path: Path) -> None:
    engine = Engine(
        None, prompt(100), prompt(12_300), prompt(12_300), prompt(44_100, state="decode")
    )
    with (
        (tmp_path / "log").open("w") as screen,
        show_prefill(engine.stats, screen, patience=0.001),
    ):
        join()
    text = (tmp_path / "log").read_text()
    assert text == "prompt: 100 of 44,100 tokens\nprompt: 12,300 of 44,100 tokens\n"


def test_a_load_that_takes_time_is_told(tmp_path: Path) -> None:
    def stats() -> Stats:
        if not looks:
            told.append(("over", ""))
            threading.Event().wait(0.01)
            return Stats(at=0, version="", device="", pid=1)
        found = looks.pop(0)
        if found is None:
            raise EngineUnavailable("none")
        return Stats(at=0, version="", device="", pid=1, loading=[found])

    weights = {"model": "qwen", "what": "weights", "total": 4_600_000_000, "unit": "bytes"}
    looks = [
        None,
        LoadingStats(**weights, done=0),
        LoadingStats(**weights, done=3_100_000_000),
        LoadingStats(**weights, done=3_100_000_000),
        LoadingStats(model="qwen", what="measuring the time of passes", done=2, total=4),
    ]
    told: list[tuple[str, str]] = []
    with show_load(stats, lambda *line: told.append(line), patience=0.001):
        while ("over", "") not in told:
            threading.Event().wait(0.01)
    lines = [what.rpartition(" (")[0] for phase, what in told if phase == "loading"]
    assert lines == [
        "the engine process starts",
        "qwen: weights, 0.0 of 4.6 GB",
        "qwen: weights, 3.1 of 4.6 GB",
        "qwen: measuring the time of passes, step 2 of 4",
    ]

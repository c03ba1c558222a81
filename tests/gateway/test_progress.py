"""What a user sees of the engine: a load, an agent's first prompt."""

import os
import pty
import threading
from pathlib import Path
from typing import TextIO

import pytest

from mlx_provider.errors import EngineUnavailable
from mlx_provider.gateway.engine import show_load, show_prefill
from mlx_provider.protocol.health import LoadingStats, RequestStats, Stats


class Engine:
    """What it does at each look; then nothing more."""

    def __init__(self, *looks: RequestStats | None) -> None:
        self._looks = iter(looks)

    def stats(self) -> Stats:
        try:
            found = next(self._looks)
        except StopIteration:
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


def watch(screen: TextIO, *looks: RequestStats | None) -> None:
    """Until the progress ends by itself."""
    with show_prefill(Engine(*looks).stats, screen, patience=0.001):
        for thread in threading.enumerate():
            if thread.name == "beside-a-block":
                thread.join(300)


@pytest.mark.parametrize("last", [prompt(44_100, state="decode"), None], ids=["decode", "gone"])
def test_the_terminal_title_shows_progress_and_is_cleared(last: RequestStats | None) -> None:
    ours, theirs = pty.openpty()
    shown = ""
    with os.fdopen(theirs, "w") as screen:
        watch(screen, None, prompt(40, whole=900), prompt(0), prompt(8192), last)
        while not shown.endswith("\x1b]2;\x07"):  # it comes in pieces
            shown += os.read(ours, 4096).decode()
    os.close(ours)
    first, second = "prompt: 0 of 44,100 tokens", "prompt: 8,192 of 44,100 tokens"
    assert shown == f"\x1b]2;mlx-provider: {first}\x07\x1b]2;mlx-provider: {second}\x07\x1b]2;\x07"


def test_the_progress_of_a_prompt_is_written_to_a_file_as_lines(tmp_path: Path) -> None:
    with (tmp_path / "shown").open("w") as screen:
        watch(screen, prompt(0), prompt(8192), prompt(44_100, state="decode"))
    lines = (tmp_path / "shown").read_text().splitlines()
    assert lines == ["prompt: 0 of 44,100 tokens", "prompt: 8,192 of 44,100 tokens"]


def test_the_phases_of_a_slow_load_are_reported() -> None:
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

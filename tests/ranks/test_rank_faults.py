"""Real engines over two ranks, of which one fails in each phase of its work."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.errors import (
    BadRequest,
    EngineDied,
    EngineUnavailable,
    MLXProviderError,
    PluginError,
    ProcessLost,
    RequestFailed,
)
from mlx_provider.protocol.health import Health

from .faulty import HANGS_AFTER
from .rank_schedules import pictures
from .served_group import AT_ONCE, Asked, ServedGroup, fail, faulty_model, met, served_group, until

pytestmark = pytest.mark.ranks

ENDED = "its process ended, or closed the connection"
SILENT = "no beat for 4 s"
LONG = "every good boy does fine " * 120
ENDLESS = 20_000


@dataclass
class Served:
    """A group that is broken again and again, and a model that it serves."""

    group: ServedGroup
    model: Path
    expected: str

    def streams(self) -> list[Asked]:
        """Several requests that nothing ends."""
        return [self.group.ask(self.model, f"count {n}", count=ENDLESS) for n in range(3)]

    def decoding(self) -> list[Asked]:
        """The same, once they decode together."""
        asked = self.streams()
        until(lambda: all(each.deltas > 2 for each in asked))
        return asked

    def again(self, before: Health, rank: int, reason: str, since: float) -> None:
        """The group is back, tells what has become of the one before, and answers as that did."""
        after = self.group.again(before)
        fault = after.process_fault
        assert fault is not None
        assert (fault.name, fault.state) == (f"rank {rank}", "lost")
        assert reason in fault.detail
        assert since <= fault.since <= time.time()
        assert [each.state for each in after.processes] == ["serving", "serving"]
        assert self.group.ask(self.model, "hello").answer() == self.expected


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = faulty_model(tmp_path_factory.mktemp("faulty") / "llama", "llama")
    with served_group() as group:
        yield Served(group, model, group.ask(model, "hello").answer())


def lost(asked: Asked, rank: int, reason: str, since: float) -> None:
    """It has ended in time, with an error that names the rank. `since`: Unix seconds."""
    error = asked.end().error
    assert isinstance(error, ProcessLost), error
    assert (error.code, error.status) == ("process_lost", 503)
    assert error.message.startswith(f"rank {rank} on ")
    assert reason in error.message
    print(f"{asked.ended_at - since:.2f} s: {error.message}")
    assert asked.ended_at - since < AT_ONCE


@pytest.mark.parametrize(("number", "reason"), [("SIGKILL", ENDED), ("SIGSTOP", SILENT)])
def test_a_rank_is_killed_or_stopped_in_decode(served: Served, number: str, reason: str) -> None:
    before, asked = served.group.health(), served.decoding()
    since = time.time()
    os.kill(before.processes[1].pid, signal.Signals[number])
    for each in asked:
        lost(each, 1, reason, since)
    served.again(before, 1, reason, since)


@pytest.mark.parametrize(
    ("number", "reason"),
    [("SIGKILL", "the connection was closed"), ("SIGSTOP", "no beat for 3.5 s")],
)
def test_rank_0_is_killed_or_stopped_in_decode(served: Served, number: str, reason: str) -> None:
    """Who stands still holds its clients' connections until its supervisor kills it."""
    before, asked = served.group.health(), served.decoding()
    since = time.time()
    os.kill(before.pid, signal.Signals[number])
    for each in asked:
        assert isinstance(each.end().error, EngineDied | EngineUnavailable), each.error
        print(f"{each.ended_at - since:.2f} s: {each.error!r}")
        assert each.ended_at - since < AT_ONCE
    served.again(before, 0, reason, since)


def test_a_rank_is_killed_while_nobody_asks(served: Served) -> None:
    before, since = served.group.health(), time.time()
    os.kill(before.processes[1].pid, signal.SIGKILL)
    served.again(before, 1, ENDED, since)
    environ = os.environ | {"MLX_PROVIDER_RUNTIME_DIR": str(served.group.folder)}
    for words in (["doctor"], ["engine", "status"]):
        told = subprocess.run(
            [sys.executable, "-c", "from mlx_provider.cli import main; main()", *words],
            env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        shown = " ".join(told.stdout.split())
        assert "the group was last started again for rank 1 on" in shown
        assert "closed the connection" in shown
        assert "rank 1 on" in shown


@pytest.mark.parametrize(
    ("rank", "at", "least", "do", "reason"),
    [
        (1, "load", 0, "SIGKILL", ENDED),
        (1, "load", 0, "raise", "could not be loaded: plugin faulty (faulty 1.0): "),
        (0, "load", 0, "raise", "could not be loaded: plugin faulty (faulty 1.0): "),
        (1, "prefill", 512, "SIGKILL", ENDED),
        (1, "prefill", 512, "raise", "a pass failed on this rank: ArithmeticError: a scripted"),
        (1, "prefill", 512, "hang", f"a pass has not ended for {HANGS_AFTER:g} s"),
        (1, "decode", 3, "raise", "a pass failed on this rank: ArithmeticError: a scripted"),
        (0, "decode", 3, "raise", "a pass failed on rank 0: ArithmeticError: a scripted"),
        (0, "draw", 3, "raise", "a pass failed on rank 0: ArithmeticError: a scripted"),
    ],
)
def test_a_rank_fails_alone(
    served: Served, rank: int, at: str, least: int, do: str, reason: str
) -> None:
    before, since, model = served.group.health(), time.time(), served.model
    if at == "load":
        model = Path(shutil.copytree(model, model.parent / f"{rank} {do}"))
    fail(model, rank, at, do, least=least)
    if at in ("decode", "draw"):
        asked = served.streams()
    else:
        asked = [served.group.ask(model, LONG if at == "prefill" else "hello")]
    struck = until(lambda: met(model)) + (HANGS_AFTER if do == "hang" else 0)
    for each in asked:
        lost(each, rank, reason, struck)
    served.again(before, rank, reason, since)


def test_what_fails_on_rank_0_alone_costs_one_request(
    served: Served, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An image's tower, a first token, the end of a text, a drafter: others go on."""
    group = served.group
    model = faulty_model(tmp_path_factory.mktemp("sees") / "qwen3_vl", "qwen3_vl")
    before, image = group.health(), pictures([1], "what is it?")
    expected = [group.ask(model, f"count {n}", count=150).answer() for n in range(2)]

    def failing(content: Any, at: str = "", **more: Any) -> MLXProviderError:
        """Of a request beside two others, which are answered as they are alone."""
        others = [group.ask(model, f"count {n}", count=150) for n in range(2)]
        until(lambda: all(each.deltas for each in others))
        if at:
            fail(model, 0, at, "raise")
        error = group.ask(model, content, **more).end().error
        assert [each.answer() for each in others] == expected
        assert error is not None
        assert not at or met(model)
        return error

    error = failing(image, "embed")
    assert isinstance(error, PluginError), error
    assert "embed_in_slices failed: ArithmeticError: a scripted fault in embed" in error.message
    assert group.ask(model, image).answer()

    error = failing("hello", "first draw")
    assert isinstance(error, PluginError), error
    assert "plugin faulty (faulty 1.0): load.drawn failed: ArithmeticError" in error.message

    error = failing("hello", options={"reasoning_parser": "odd_end"})
    assert isinstance(error, RequestFailed), error
    assert "its text failed: TypeError" in error.message

    error = failing("hello", options={"drafter": "unfit"})
    assert isinstance(error, BadRequest), error
    assert "it does not like this model" in error.message
    error = failing("hello", options={"drafter": "faulty"})
    assert isinstance(error, PluginError), error
    assert "a scripted fault of a drafter" in error.message

    assert group.health().pid == before.pid
    assert group.ask(served.model, "hello").answer() == served.expected

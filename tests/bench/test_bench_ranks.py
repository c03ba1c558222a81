"""What `bench ranks` reads out of a run; the run itself starts ranks: `tox -e ranks`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from typer.testing import CliRunner

import rank_costs
from command_line.commands import benchmarks
from command_line.ranked import numbers
from mlx_provider.errors import BadRequest
from mlx_provider_bench.servers.client import Answer
from mlx_provider_bench.servers.client import Run as Answers
from mlx_provider_ranks import channel
from rank_costs import Round, Texts, _compare, _row, questions
from ranked.plan import Plan
from ranked.program import count
from ranked.tally import COUNTED, ROOM, Tally, step_seconds


@pytest.fixture
def tally(tmp_path: Path) -> Tally:
    return Tally(tmp_path / "tally", create=True)


def test_what_one_process_counts_another_reads(tally: Tally, tmp_path: Path) -> None:
    before = tally.seen()
    writer = Tally(tmp_path / "tally")
    writer.add("messages")
    writer.add("message_bytes", 120)
    for when in (1.0, 1.5):
        writer.passed(when, 4, 1)
    after = tally.seen()
    assert after.since(before) == dict.fromkeys(COUNTED, 0.0) | {
        "messages": 1.0,
        "message_bytes": 120.0,
        "passes": 2.0,
    }
    assert tally.passes(before, after) == [(1.0, 4, 1), (1.5, 4, 1)]


def test_passes_without_room_replace_the_first(tally: Tally) -> None:
    tally.add("passes", ROOM - 1)
    before = tally.seen()
    for when in (1.0, 2.0):
        tally.passed(when, 1, 1)
    assert tally.passes(before, tally.seen()) == [(1.0, 1, 1), (2.0, 1, 1)]


def test_a_step_is_from_one_pass_of_all_rows_to_the_next() -> None:
    passes = [(0.0, 1, 30), (5.0, 2, 1), (5.1, 2, 1), (5.3, 2, 1), (5.4, 1, 40), (9.0, 2, 1)]
    assert step_seconds(passes, 2) == pytest.approx(0.15)
    assert step_seconds(passes, 4) is None


@pytest.mark.parametrize("apart", [False, True])
def test_collectives_messages_and_passes_are_counted(
    tally: Tally, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    asked: list[Any] = []

    def summed(x: Any, *, group: Any = None) -> Any:
        asked.append(x)
        return x

    def told(self: Any, message: Any, *, more: bool) -> None:
        channel.frame(message)

    monkeypatch.setattr(mx.distributed, "all_sum", summed)
    monkeypatch.setattr(llama.Model, "__call__", lambda self, inputs, cache=None: inputs)
    monkeypatch.setattr(channel, "frame", lambda message: b"12345")
    monkeypatch.setattr(channel.LeaderChannel, "tell", told)
    count(tally, apart=apart)
    model = mx.zeros((2, 8))
    for each in (model, mx.zeros(2, mx.int32), 0):
        assert mx.distributed.all_sum(each, group=None) is each
    assert len(asked) == (2 if apart else 3)
    llama.Model.__call__(SimpleNamespace(), mx.zeros((2, 1)), cache=None)  # type: ignore[arg-type]
    channel.LeaderChannel.tell(SimpleNamespace(), {"kind": "step"})  # type: ignore[arg-type]
    counts = tally.seen().counts
    assert counts.pop("tell_seconds") > 0
    assert counts == {
        "model_calls": 1,
        "model_bytes": 64,
        "other_calls": 2,
        "other_bytes": 12,
        "messages": 1,
        "message_bytes": 5,
        "passes": 1,
    }


def a_round(step: float | None, text: str = "a", **counts: float) -> Round:
    answer = Answer(text, first=0.5, total=2.0, tokens=8, cached=0)
    return Round(Answers([answer], 2.0), dict.fromkeys(COUNTED, 0.0) | counts, step)


def test_a_row_has_the_fastest_step_and_counts_of_a_pass() -> None:
    plan, texts = Plan(rounds=2), Texts()
    whole = [a_round(0.020, passes=8, messages=10), a_round(0.012, passes=12, messages=10)]
    row = _row(plan, "ours", 2, 1, {1: whole}, {1: [a_round(0.010), a_round(None)]}, texts)
    assert (row["step_ms"], row["apart_ms"]) == (12.0, 10.0)
    assert row["collectives_ms"] == pytest.approx(2.0)
    assert (row["messages"], row["tokens_per_second"], row["first_token"]) == (1.0, 4.0, 0.5)
    assert row["equal"] == "2/2"
    other = [a_round(None, "b"), a_round(None, "a")]
    row = _row(plan, "theirs", 1, 1, {1: other}, {}, texts)
    assert (row["equal"], row["step_ms"], "apart_ms" in row) == ("1/2", None, False)


def test_ours_is_set_beside_theirs_where_both_have_a_figure() -> None:
    ours: dict[str, Any] = {"step_ms": 12.0, "collectives_ms": 3.0}
    _compare([ours, {"step_ms": 10.0, "collectives_ms": 4.0}])
    assert ours["step_to_theirs"] == {"measured": 1.2, "target": 1.0, "reached": False}
    assert ours["collectives_to_theirs"]["reached"]
    for mine, theirs in ((3.0, None), (3.0, -1.0), (-1.0, 3.0), (None, 3.0)):
        alone: dict[str, Any] = {"collectives_ms": mine}
        _compare([alone, {"collectives_ms": theirs}])
        assert alone.keys() == {"collectives_ms"}


def test_no_question_is_asked_twice() -> None:
    asked = [str(each) for n in (1, 4, 16) for turn in range(-1, 2) for each in questions(n, turn)]
    assert len(set(asked)) == len(asked)


def test_its_options_reach_the_plan(monkeypatch: pytest.MonkeyPatch, benchmark_here: Any) -> None:
    plans: list[Plan] = []
    about = {"device": "", "blas": "", "cores": 1, "load_average": 0.0}

    def measured(plan: Plan) -> dict[str, Any]:
        plans.append(plan)
        return about

    monkeypatch.setattr(rank_costs, "bench", measured)
    benchmark_here("ranks")
    more = ("--ranks", "1,2", "--streams", "4", "--format", "4bit", "--tokens", "8")
    benchmark_here(
        "ranks", *more, "--rounds", "1", "--hidden", "128", "--layers", "2", "--no-peers"
    )
    assert plans == [Plan(), Plan((1, 2), (4,), "4bit", 8, 1, 128, 2, peers=False)]
    assert CliRunner().invoke(benchmarks, ["ranks", "--tokens", "1"]).exit_code == 2


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: numbers("1,,2", "ranks"), "numbers with commas"),
        (lambda: numbers("0", "ranks"), "numbers with commas"),
        (lambda: numbers("two", "ranks"), "numbers with commas"),
        (lambda: Plan((1, 3)).check(), "3 ranks cannot share 4 key and value heads"),
        (lambda: Plan((8,)).check(), "a hidden size of 512"),
        (lambda: Plan(streams=(64,)).check(), "32 rows"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong: Callable[[], Any], told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        wrong()

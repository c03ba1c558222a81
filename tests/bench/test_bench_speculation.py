"""What `bench speculation` measures and reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import call_forecasts
import speculation
from speculation import Clock, Dictated, Plan
from tiny import build

FEW = ("--reply", "40", "--rounds", "1", "--share", "0.9")


def test_a_random_model(benchmark: Callable[..., dict[str, Any]], small: tuple[str, ...]) -> None:
    parts = ("--part", "rows", "--part", "newcomer", "--part", "rewrite")
    result = benchmark("speculation", *parts, "--rows", "1", "--rows", "2", *FEW, *small)
    assert [(row["rows"], row["lengths"], row["ratio"]["target"]) for row in result["rows"]] == [
        (1, "alike", 1.3),
        (2, "alike", 0.97),
        (2, "unlike", 0.97),
    ]
    assert [row["same_tokens"] for row in result["rows"]] == ["1/1", "2/2", "2/2"]
    assert [row["prompt"] for row in result["newcomer"]] == [8, 512]
    (rewritten,) = result["rewrite"]
    assert (rewritten["drafter"], rewritten["same_tokens"]) == ("lookup", "1/1")
    assert rewritten["ratio"]["target"] == 2


def test_a_checkpoint_with_a_drafter_that_is_installed(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", "qwen3", max_position_embeddings=4096)
    plan = Plan(["rows"], rows=(1,), reply=24, rounds=1, model=folder, drafter="lookup")
    (row,) = speculation.bench(plan)["rows"]
    assert (row["share"], row["same_tokens"]) == (None, "1/1")


def test_curves_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    import speculation_curves

    monkeypatch.setattr(speculation, "STEPS", 40)
    monkeypatch.setattr(speculation_curves, "ROWS", (1, 2))
    rows = speculation.bench(Plan(["curves"]))["curves"]
    devices, drafters = speculation_curves.DEVICES, speculation_curves.DRAFTERS
    assert len(rows) == 2 * len(devices) * len(drafters)
    assert {row["worst"]["target"] for row in rows} == {0.97}


def test_a_side_that_waits_for_the_other_ages_not() -> None:
    clock = Clock()
    before = clock()
    with clock:
        assert clock() > before
    stopped = clock()
    assert clock() == stopped > before


def test_a_text_that_is_dictated() -> None:
    grammar = Dictated([3, 40], vocab=100)
    ahead = grammar.fork()
    ahead.advance(3)
    assert [mask.tolist() for mask in (grammar.mask(), ahead.mask())] == [
        [8, 0, 0, 0],
        [0, 256, 0, 0],
    ]
    ahead.advance(40)
    assert (grammar.finished, ahead.finished) == (False, True)


def test_calls_are_foretold() -> None:
    rows = call_forecasts.bench(call_forecasts.Plan(most=1))["rows"]
    rates = {(row["choice"], row["foretold"], row["looked_up"]): row["per_pass"] for row in rows}
    assert rates["auto", False, False] == 1
    assert rates["auto", True, False] > 2
    assert rates["required", True, False] > rates["required", False, False] > 1.5

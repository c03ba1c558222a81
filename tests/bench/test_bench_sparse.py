"""What `bench sparse` measures and reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import sparse_prefill as sparse
from mlx_provider.records import Prompt
from sparse_prefill import Chance, Plan


def test_the_demo_knows_a_name_and_random_weights_are_timed() -> None:
    plan = Plan(
        ["needle", "prefill"], shares=(1.0, 0.5), lengths=(260,), depths=(0.5,), names=1,
        prompt=512, rounds=1, hidden=64, layers=3,
    )  # fmt: skip
    result = sparse.bench(plan)
    whole, *parts = result["needle"]
    assert (whole["chosen_by"], whole["recall"]) == ("whole", 1.0)
    assert [row["chosen_by"] for row in parts] == ["draft model", "chance"]
    assert all(row["kept"] < whole["kept"] for row in parts)
    assert all(row["rank"] is None or 0 <= row["rank"] <= 1 for row in parts)
    one, half = result["prefill"]
    assert (one["kept"], one["faster"]) == (512, 1.0)
    assert half["kept"] < 320


def test_curves_need_no_model(benchmark_here: Callable[..., dict[str, Any]]) -> None:
    rows = benchmark_here("sparse", "--part", "curves", "--share", "1", "--share", "0.3")["curves"]
    mac = [row for row in rows if row["device"] == "M3 Max"]
    assert [(row["streams"], row["share"]) for row in mac] == [(0, 1), (0, 0.3), (1, 1), (1, 0.3)]
    assert mac[1]["faster"] > 2
    assert mac[3]["longest_gap"] < 0.15, "scoring keeps a stream no longer than a chunk would"


@pytest.mark.parametrize("depth", [0.0, 1.0])
def test_a_name_stands_where_it_should(depth: float) -> None:
    class Words:
        """Its tokens are words."""

        def prepare(self, messages: Any, **more: Any) -> Prompt:
            return Prompt(" ".join(each["content"] for each in messages).split())  # type: ignore[arg-type]

    words = list(sparse.asked_after(Words(), 80, depth, 2).tokens)  # type: ignore[arg-type]
    assert len(words) >= 80
    assert words.count("Anna.") == 1
    assert (words.index("Anna.") < 8) == (depth == 0.0)
    assert words[-4:] == ["What", "is", "my", "name?"]


def test_chance_is_the_same_for_a_prompt_and_of_its_length() -> None:
    one, other = (Chance().scoring(range(100)).advance() for _ in range(2))
    assert one.shape == (100,)
    assert (one == other).all()

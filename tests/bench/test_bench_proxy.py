"""`bench proxy`: a whole run of our own side, and how sides are held against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_provider.errors import BadRequest
from mlx_provider.families.checkpoint import read_json
from mlx_provider_bench import proxy
from mlx_provider_bench.models.random_weights import load
from mlx_provider_bench.proxy import Plan, Run, Side, questions, rows
from mlx_provider_bench.servers.client import Answer
from mlx_provider_bench.servers.gateway import NATIVE
from mlx_provider_bench.servers.processes import MLX_LM, MLX_VLM, OURS


def test_ours_in_its_own_dtype_and_in_the_best() -> None:
    small = Plan(
        ("llama",), ("4bit",), streams=(1, 2), words=4, reply=4, rounds=1, hidden=64, layers=2
    )
    result = proxy.bench(small)
    assert result["skipped"] == []
    assert [(row["streams"], row["server"], row["answers"]) for row in result["rows"]] == [
        (1, OURS.name, "1/1"),
        (1, NATIVE, "1/1"),
        (2, OURS.name, "2/2"),
        (2, NATIVE, "2/2"),
    ]
    assert all(row["as_alone_percent"]["reached"] for row in result["rows"])
    assert all(0 < row["first_token_seconds"] < 60 for row in result["rows"])


def test_a_format_that_is_none_is_told() -> None:
    with pytest.raises(BadRequest, match="no such format: 8bit"):
        proxy.bench(Plan(formats=("8bit",)))


@pytest.mark.parametrize("family", proxy.FAMILIES)
def test_four_bits_are_what_is_served(tmp_path: Path, family: str) -> None:
    folder = proxy.write(tmp_path / "model", family, "4bit", 64, 2)
    assert read_json(folder / "config.json")["quantization"] == {"group_size": 64, "bits": 4}
    model: Any = load(folder, None)
    kinds = {type(layer).__name__ for _, layer in model.model.named_modules()}
    assert "QuantizedLinear" in kinds


def test_no_question_is_asked_twice_and_every_side_gets_the_same() -> None:
    plan = Plan()
    asked = [q for turn in range(3) for n in plan.streams for q in questions(plan, n, turn)]
    texts = [messages[0]["content"] for messages in asked]
    assert len(set(texts)) == len(texts) == 3 * (1 + 4 + 16)
    assert questions(plan, 4, 1) == questions(plan, 4, 1)


def side(*runs: tuple[float, float], equal: int = 16, failure: str = "") -> Side:
    """Of rounds of 16 answers: (tokens a second, seconds to the first token)."""
    answers = [
        Run([Answer("", first, 1.0, 10, 0) for _ in range(16)], 160 / rate) for rate, first in runs
    ]
    return Side(answers, equal, 16, failure)


def test_ours_is_held_against_the_best_peer_of_each_round() -> None:
    sides = {
        (OURS.name, 16): side((100, 1.0), (300, 2.0), (200, 1.0), equal=15),
        (MLX_LM.name, 16): side((100, 2.0), (100, 1.0), (50, 3.0), equal=16),
        (MLX_VLM.name, 16): side((50, 4.0), (200, 4.0), (40, 4.0), equal=8),
    }
    ours, lm, vlm = rows((16,), sides)
    assert ours["tokens_per_second"] == pytest.approx(200)
    assert ours["rate_over_best_peer"] == {"measured": 1.5, "target": 1.3, "reached": True}
    assert ours["first_over_best_peer"] == {"measured": 0.5, "target": 1.0, "reached": True}
    assert ours["as_alone_percent"] == {"measured": 93.75, "target": 100, "reached": False}
    assert (lm["as_alone_percent"], vlm["as_alone_percent"]) == (100.0, 50.0)
    assert "rate_over_best_peer" not in lm


def test_a_peer_that_failed_is_no_measure() -> None:
    sides = {
        (OURS.name, 1): side((100, 1.0)),
        (MLX_LM.name, 1): side((900, 0.1), failure="HTTP 500"),
    }
    ours, failed = rows((1,), sides)
    assert "rate_over_best_peer" not in ours
    assert failed["failed"] == "HTTP 500"

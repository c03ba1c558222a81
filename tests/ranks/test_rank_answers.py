"""A model over two ranks answers as one process does."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_provider.testing.tiny import build

from .models import MODELS
from .rank_schedules import Played, agree, alone, ask, cancel, embed, followed, over, read, score


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Played, Played, list[Any]]:
    """The same schedule in one process, and over two ranks; what followers hold then."""
    model = build(tmp_path_factory.mktemp("rank") / "qwen3", "qwen3", **MODELS["qwen3"][2])
    words = "hello world how are you"
    tokens = '{"true_token_id": 90, "false_token_id": 41}'
    (model / "1_LogitScore").mkdir()
    (model / "1_LogitScore" / "config.json").write_text(tokens)
    (model / "modules.json").write_text('[{"path": "1_LogitScore", "type": "st.LogitScore"}]')
    do = [
        ask("first", model, words),
        ask("left", model, "x " * 60, max_tokens=400),
        read("left", 5),
        cancel("left"),
        read("first"),
        ask("prefix", model, f"{words} today", logprobs=False),
        ask("choices", model, "two", n=2, sampling={"temperature": 0.9, "seed": 4}),
        ask("json", model, "json", response_format={"type": "json_object"}, max_tokens=20),
        ask("stopped", model, words, sampling={"temperature": 1.2, "top_p": 0.9, "seed": 1}),
        embed("vectors", model, ["hello", "two words"], options={"pooling": "mean"}),
        score("scores", model, words, ["hello", "two words"]),
        ask("cut", model, words, stop=["e", "a"], max_tokens=100),
    ]
    one = alone(tmp_path_factory.mktemp("alone"), do)
    return one, *over(2, tmp_path_factory.mktemp("over"), do)


def test_two_ranks_answer_as_one_process(both: tuple[Played, Played, list[Any]]) -> None:
    one, together, _ = both
    agree(one, together, cancelled={"left"})
    assert together["answers"]["prefix"]["usage"]["cached_tokens"] > 0
    assert together["answers"]["scores"]["scores"] == pytest.approx(
        one["answers"]["scores"]["scores"], abs=1e-5
    )
    assert set(together["answers"]["choices"]["texts"]) == {"0", "1"}
    assert together["answers"]["cut"]["finish"] == {"0": "stop"}
    assert together["models"] == one["models"]


def test_a_follower_holds_nothing_in_the_end(both: tuple[Played, Played, list[Any]]) -> None:
    _, together, followers = both
    assert len(followers) == 1
    followed(together, followers)

"""What `bench prefix` reports."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.sweep
def test_bench_prefix_measures_a_vision_model(bench: Callable[..., dict[str, Any]]) -> None:
    sizes = ("--tokens", "200", "--document", "120", "--turns", "2")
    result = bench("prefix", "--model", "demo+image", *sizes)
    (row,) = result["ttft"]
    assert row["same_answers"] == "14/14"
    assert row["repeat_cached"] == row["prompt_tokens"] - 1
    for hit in (row["next_turn"], row["other_question"]):
        assert 0 < hit["computed"] < 100 < hit["cached"]
    (talk,) = result["conversation"]
    assert talk["same_answers"] == "2/2"
    assert talk["cached_tokens"][0] < talk["cached_tokens"][1]


def test_bench_prefix_measures_a_checkpoint_in_place_of_the_demo_models(
    bench: Callable[..., dict[str, Any]], mine: str
) -> None:
    sizes = ("--tokens", "100", "--document", "60", "--turns", "2")
    result = bench("prefix", "--model", mine, *sizes)
    (row,), (talk,) = result["ttft"], result["conversation"]
    assert row["model"] == talk["model"] == "mine"
    assert row["repeat_cached"] == row["prompt_tokens"] - 1
    for hit in (row["next_turn"], row["other_question"]):
        assert 0 < hit["computed"] < hit["cached"]
    assert talk["cached_tokens"][0] < talk["cached_tokens"][1]
    assert (row["same_answers"], talk["same_answers"]) == ("14/14", "2/2")

"""Shape of what `bench vision` reports, and how answers are judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlx_provider_bench.servers.client import Answer
from vision import _beside_peer, _count


@pytest.mark.sweep
def test_both_parts(benchmark_here: Callable[..., dict[str, Any]], small: tuple[str, ...]) -> None:
    few = ("--edge", "64", "--trials", "1", "--requests", "4", "--reply", "4")
    result = benchmark_here("vision", "--family", "qwen3_vl", *few, *small)
    (repeat,), (mixed,) = result["repeat"], result["mixed"]
    assert result["skipped"] == []
    assert repeat["same_answers"] == "1/1"
    assert repeat["repeat_over_bare_repeat"]["target"] == 1.3
    assert mixed["right_together"] == mixed["right_alone"] == "4/4"
    assert mixed["together_over_solo"]["target"] == 1.5


def test_right_answers_are_counted_as_text() -> None:
    def answers(*texts: str) -> list[Answer]:
        return [Answer(text, 0.1, 0.2, 2, 0) for text in texts]

    assert _count(answers(" red", "blue", "green"), answers("red", "blue", "yellow")) == "2/3"


def test_a_peer_that_failed_is_no_measure() -> None:
    ours = {"server": "mlx-provider", "family": "gemma3", "together_tokens_per_second": 30.0}
    peer = {"server": "mlx_vlm.server", "family": "gemma3", "failed": "shapes"}
    _beside_peer([ours, peer], "gemma3")
    assert "over_peer" not in ours
    _beside_peer([ours, {**ours, "server": "mlx_vlm.server"}], "gemma3")
    assert ours["over_peer"]["measured"] == 1.0

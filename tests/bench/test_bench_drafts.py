"""`bench drafts`: the pair of models that it makes, and one run beside the peers' servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from draft_pair import write_pair
from mlx_provider import PrefillChunk, Prompt
from mlx_provider.commands import load_model


def test_the_smaller_of_a_pair_mostly_says_what_the_larger_one_does(tmp_path: Path) -> None:
    large, small = (load_model(each, None) for each in write_pair(tmp_path, "float32", 64, 4, 1))
    agreed = 0
    for seed in range(20):
        prompt = Prompt([20 + (seed * 37 + 11 * at) % 300 for at in range(12)])
        told = [
            int(mx.argmax(model.prefill(PrefillChunk(prompt, 0, 12, model.make_cache()))).item())
            for model in (large, small)
        ]
        agreed += told[0] == told[1]
    assert agreed >= 12
    assert large.info.weights_bytes > 1.3 * small.info.weights_bytes


@pytest.mark.sweep
def test_drafts_beside_the_peers(benchmark: Callable[..., dict[str, Any]]) -> None:
    few = ("--rounds", "1", "--streams", "1", "--reply", "16", "--hidden", "64", "--layers", "4")
    result = benchmark("drafts", *few)
    assert not result["skipped"]
    ours = [row for row in result["rows"] if row["server"] == "mlx-provider"]
    assert [(row["drafts"], row["same"]) for row in ours] == [("mtp", "1/1"), ("model", "1/1")]
    assert {row["server"] for row in result["rows"]} == {
        "mlx-provider", "mlx_lm.server", "mlx_vlm.server",
    }  # fmt: skip

"""What `sparse` of the benchmarks measures and reports."""

from __future__ import annotations

from pathlib import Path

import sparse_prefill as sparse
from sparse_prefill import Plan
from tiny import build


def test_a_prompt_whole_and_in_part_is_timed(tmp_path: Path) -> None:
    model = build(tmp_path / "model", "qwen3", max_position_embeddings=4096)
    draft = build(tmp_path / "draft", "qwen3", max_position_embeddings=4096, num_hidden_layers=1)
    plan = Plan(model, draft, shares=(1.0, 0.5), prompt=512, rounds=1)
    one, half = sparse.bench(plan)["prefill"]
    assert (one["kept"], one["faster"]) == (512, 1.0)
    assert half["kept"] < 320

"""What `speculation` of the benchmarks measures and reports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny import build


def test_a_checkpoint_with_a_drafter_that_is_installed(
    tmp_path: Path, benchmark: Callable[..., dict[str, Any]]
) -> None:
    folder = build(tmp_path / "model", "qwen3", max_position_embeddings=4096)
    few = ("--rows", "1", "--rows", "2", "--reply", "24", "--rounds", "1")
    result = benchmark("speculation", "--model", str(folder), "--drafter", "lookup", *few)
    assert [(row["rows"], row["same_tokens"]) for row in result["rows"]] == [(1, "1/1"), (2, "2/2")]

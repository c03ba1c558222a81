"""`bench ranks` as anyone runs it, at its smallest: two ranks, ours and mlx-lm's server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
SMALL = ("--streams", "2", "--tokens", "24", "--rounds", "1", "--hidden", "128", "--layers", "2")


@pytest.mark.ranks
def test_both_sides_answer_over_two_ranks_as_in_one_process() -> None:
    command = [sys.executable, BENCHMARKS, "ranks", "--ranks", "1,2", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    rows = result["rows"]
    sides = [(row["ranks"], row["server"]) for row in rows]
    ours, theirs = "mlx-provider", "mlx_lm.server"
    assert sides == [(1, ours), (1, theirs), (2, ours), (2, theirs)]
    assert {row["equal"] for row in rows} == {"2/2"}
    assert all(row["first_token"] > 0 for row in rows)
    for row in rows[2:]:
        assert row["model_calls"] == 4  # two for each layer
    assert rows[2]["messages"] >= 1
    assert rows[3]["messages"] == 0
    assert [each["ranks"] for each in result["collectives"]] == [2, 2]

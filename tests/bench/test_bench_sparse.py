"""What `bench sparse` measures and reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sparse_prefill as sparse
from sparse_prefill import Plan


def test_random_weights_are_timed() -> None:
    plan = Plan(["prefill"], shares=(1.0, 0.5), prompt=512, rounds=1, hidden=64, layers=3)
    one, half = sparse.bench(plan)["prefill"]
    assert (one["kept"], one["faster"]) == (512, 1.0)
    assert half["kept"] < 320


def test_curves_need_no_model(benchmark_here: Callable[..., dict[str, Any]]) -> None:
    rows = benchmark_here("sparse", "--part", "curves", "--share", "1", "--share", "0.3")["curves"]
    mac = [row for row in rows if row["device"] == "M3 Max"]
    assert [(row["streams"], row["share"]) for row in mac] == [(0, 1), (0, 0.3), (1, 1), (1, 0.3)]
    assert mac[1]["faster"] > 2
    assert mac[3]["longest_gap"] < 0.15, "scoring keeps a stream no longer than a chunk would"

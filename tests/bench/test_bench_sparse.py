"""What `bench sparse` measures and reports."""

from __future__ import annotations

import sparse_prefill as sparse
from sparse_prefill import Plan


def test_random_weights_are_timed() -> None:
    plan = Plan(shares=(1.0, 0.5), prompt=512, rounds=1, hidden=64, layers=3)
    one, half = sparse.bench(plan)["prefill"]
    assert (one["kept"], one["faster"]) == (512, 1.0)
    assert half["kept"] < 320

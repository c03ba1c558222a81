"""The minimum length of a shared prefix is measured at load."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_provider.engine.execution import calibration
from mlx_provider.engine.execution.calibration import (
    FEWEST_TOKENS,
    MOST_TOKENS,
    SHARED_UNMEASURED,
    least_shared,
)
from mlx_provider.engine.scheduling.costs import Curve

CURVE = Curve([(1, 0.001), (8, 0.002)], [(1, 1e-9)])
COPIED = 2 * 1e-9
DEPTH = calibration.SLOW_SHARED_DEPTH


@pytest.mark.parametrize(
    ("overhead", "shared", "tokens"),
    [
        (1e-6, 1e-9, 1750),
        (4e-6, 1e-9, 6250),
        (1e-8, 1e-9, 265),
        (1e-3, 1e-9, MOST_TOKENS),
        (-1e-6, 1e-9, FEWEST_TOKENS),
        (1e-6, 1.8e-9, MOST_TOKENS),
    ],
)
def test_a_prefix_is_shared_where_a_step_is_clearly_faster(
    overhead: float, shared: float, tokens: int
) -> None:
    assert calibration.least_tokens(1e-6, overhead, shared, COPIED) == tokens


def test_it_is_timed_in_passes_of_two_rows(qwen3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds by number of the pass: separate rows, a short prefix, a long prefix."""
    clock = iter(at + end for at in range(6) for end in (0.0, [1e-6, 3e-6, 4.05e-6][at // 2]))
    monkeypatch.setattr("mlx_provider.engine.execution.calibration.perf_counter", clock.__next__)
    model = qwen3
    monkeypatch.setattr(calibration, "SLOW_SHARED_DEPTH", DEPTH)
    before = mx.get_active_memory()
    found = least_shared(model, model.make_cache, CURVE, lambda nbytes: nbytes > 2**20)
    assert found == round((0.2 * 1e-6 + 1.2 * 2e-6) / (COPIED - 1.2 * 1.05e-6 / DEPTH))
    assert mx.get_active_memory() <= before + 2**16


def test_without_memory_or_measurements_it_is_a_constant(
    qwen3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = qwen3
    monkeypatch.setattr(calibration, "SLOW_SHARED_DEPTH", DEPTH)
    assert least_shared(model, model.make_cache, CURVE, lambda nbytes: False) == SHARED_UNMEASURED
    unmeasured, make_cache = Curve(CURVE.widths), model.make_cache
    assert least_shared(model, make_cache, unmeasured, lambda nbytes: True) == SHARED_UNMEASURED

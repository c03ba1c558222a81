"""Whether rows share a prefix is tried at load."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_provider.serving.calibration import NOT_FASTER, SHARED_UNMEASURED, OnDevice, least_shared

PREFIX = 1024


@pytest.mark.parametrize(("copies", "least"), [(1.25, PREFIX), (1.15, NOT_FASTER)])
def test_a_prefix_is_shared_where_a_step_is_clearly_faster(
    qwen3: Any, monkeypatch: pytest.MonkeyPatch, copies: float, least: int
) -> None:
    """Elsewhere only one so long that memory counts more."""
    seconds = [copies] * 3 + [1.0] * 3
    clock = iter(at + end for at in range(7) for end in (0.0, [0.0, *seconds][at]))
    monkeypatch.setattr("mlx_provider.serving.calibration.perf_counter", clock.__next__)
    monkeypatch.setattr("mlx_provider.serving.solo_rows.perf_counter", lambda: 0.0)
    before = mx.get_active_memory()
    passes = OnDevice(qwen3, qwen3.make_cache, lambda nbytes: True)
    next(clock), next(clock)
    assert least_shared(passes, PREFIX) == least
    assert mx.get_active_memory() <= before + 2**16


def test_without_memory_for_the_trial_the_sharing_threshold_is_a_constant(qwen3: Any) -> None:
    passes = OnDevice(qwen3, qwen3.make_cache, lambda nbytes: False)
    assert least_shared(passes, PREFIX) == SHARED_UNMEASURED
